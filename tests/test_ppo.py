"""`ppo_advantages` on every backend, against an independent loop and by its rules."""

from __future__ import annotations

import random

import pytest
import torch
from ppo_samples import OUTPUTS, expected, on_device, random_call, random_options, run

CASES = {"reference": 60, "cpu": 60, "triton": 12}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
def test_against_the_oracle(backend: str, packed: bool) -> None:
    rng = random.Random(f"{backend}{packed}")
    for _ in range(CASES[backend]):
        call, options = random_call(rng, packed=packed), random_options(rng)
        wanted, got = expected(call, options), run(on_device(call, backend), options, backend=backend)
        for name in OUTPUTS:
            found = getattr(got, name).double().flatten().cpu()
            scale = max(1.0, float(wanted[name].abs().max()) if wanted[name].numel() else 1.0)
            torch.testing.assert_close(found, wanted[name], rtol=0, atol=3e-5 * scale, msg=lambda m: f"{name} {options} {call}\n{m}")  # noqa: B023
