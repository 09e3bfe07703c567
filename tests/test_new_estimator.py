"""A new estimator costs a builder, a naive loop and a registration (toy_estimator.py), and is then served everywhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import toy_estimator
from conftest import device_of
from service import running, wait_until
from torch import Tensor
from toy_estimator import NAME
from typer.testing import CliRunner

from rlhf_scan import CreditRequest, CreditResult, InputError, LocalEngine, execute
from rlhf_scan.estimators import Estimator, Rate, estimator, register, served, unregister
from rlhf_scan.rollout import read_result, write_request

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    toy_estimator.add()
    yield
    unregister(NAME)
    assert NAME not in {entry.name for entry in served()}


def request(dtype: torch.dtype = torch.float32, device: torch.device | None = None, **params: Any) -> CreditRequest:
    random = torch.Generator().manual_seed(8)
    tensors: dict[str, Tensor] = {
        "rewards": torch.randn(30, generator=random),
        "log_visits": torch.rand(30, generator=random) * 5,
        "bootstrap": torch.randn(4, generator=random),
        "gamma": torch.rand(4, generator=random),
        "scale": torch.rand(30, generator=random),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors |= {
        "mask": torch.rand(30, generator=random) < 0.8,
        "terminated": torch.rand(30, generator=random) < 0.1,
        "truncated": torch.rand(30, generator=random) < 0.1,
        "cu_seqlens": torch.tensor([0, 1, 1, 23, 30]),
    }
    return CreditRequest(NAME, {name: tensor.to(device or "cpu") for name, tensor in tensors.items()}, {"largest_bonus": 0.4, **params})


def assert_close(result: CreditResult, expected: CreditResult) -> None:
    """Thirty tokens of a magnitude below 8, each a few roundings."""
    assert list(result.tensors) == ["returns"]
    torch.testing.assert_close(result.tensors["returns"].cpu(), expected.tensors["returns"], rtol=0, atol=30 * 8 * 8 * 2.0**-24)


def test_by_hand(backend: str) -> None:
    device = device_of(backend)
    rewards, log_visits = torch.tensor([1.0, 2.0, 4.0], device=device), torch.zeros(3, device=device)
    found = LocalEngine(backend).run(
        CreditRequest(NAME, {"rewards": rewards, "log_visits": log_visits, "bootstrap": torch.tensor([8.0], device=device)}, {"gamma": 0.5})
    )
    assert found.tensors["returns"].tolist() == [1.5 + 3.375, 2.5 + 4.25, 4.5 + 4]


@pytest.mark.parametrize("masked", ["skip", "zero", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backends_agree_with_its_naive_loop(backend: str, dtype: torch.dtype, masked: str) -> None:
    expected = LocalEngine("reference").run(request(dtype, masked=masked))
    assert_close(LocalEngine(backend).run(request(dtype, device_of(backend), masked=masked)), expected)


def test_it_shares_launches() -> None:
    alone = LocalEngine("cpu").run(request())
    together = execute([request(), request(), request()], backend="cpu")
    assert [result.report["shared_with"] for result in together] == [2, 2, 2]
    assert all(torch.equal(result.tensors["returns"], alone.tensors["returns"]) for result in together)


def test_errors_name_it_and_its_arguments() -> None:
    with pytest.raises(InputError, match=rf"^{NAME}: tensors must hold .*got no log_visits"):
        LocalEngine("cpu").run(CreditRequest(NAME, {"rewards": torch.zeros(3)}))
    with pytest.raises(InputError, match=rf"^{NAME}: scale must lie in \[0, inf\], got -1"):
        LocalEngine("cpu").run(CreditRequest(NAME, {"rewards": torch.zeros(3), "log_visits": torch.zeros(3)}, {"scale": -1.0}))


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ("gae", {"name": "my est"}, "^Estimator: name must be a Python identifier, got 'my est'; write it like"),
        ("gae", {"name": "class"}, "name must be a Python identifier, got 'class'"),
        ("gae", {"name": None}, "name must be a Python identifier, got None"),
        ("gae", {"inputs": ("rewards", "my values")}, "inputs, .* must be Python identifiers, got 'my values'"),
        ("gae", {"inputs": ("rewards", "mask"), "following": ()}, "must be none of .*, got 'mask'; rename it"),
        ("gae", {"inputs": ("values", "values")}, "must differ, got 'values' twice"),
        ("gae", {"inputs": ("gamma", "values")}, "must differ, got 'gamma' twice"),
        ("gae", {"inputs": "values"}, r'inputs must be a tuple of names, got .values.; write \("values",\)'),
        ("gae", {"inputs": ["rewards", "values"]}, "inputs must be a tuple of names, got \\['rewards'"),
        ("gae", {"inputs": ()}, "inputs must hold one name at least"),
        ("gae", {"outputs": ("a", "a")}, "outputs must differ, got 'a' twice"),
        ("gae", {"outputs": ()}, "outputs must hold one name at least"),
        ("gae", {"rates": {"gamma": 0.99}}, r"rates must map names to Rate, got 0.99 for 'gamma'; write Rate\(0.99\)"),
        ("gae", {"rates": ("gamma",)}, "rates must map names to Rate"),
        ("gae", {"channels": (("gamma", "lamb"),)}, "channels must be among rates .*, got 'lamb'; correct the name or add it"),
        ("gae", {"channels": ("gamma",)}, "channels must be one or two tuples of rates"),
        ("gae", {"channels": ()}, "channels must be one or two tuples"),
        ("gae", {"channels": (("gamma", "lam"), ("lam_value",))}, "channels must take as many rates each"),
        ("gae", {"channels": (("gamma", "gamma"),)}, "channels must name each rate once"),
        ("gae", {"channels": (("gamma", "lam"),)}, "channels must name every rate, got no 'lam_value'"),
        ("gae", {"channels": (("gamma", "lam_value"), ("gamma", "lam"))}, "first channel must have a default, got None for 'lam_value'"),
        ("gae", {"following": ("value",)}, "following must be among inputs .*, got 'value'"),
        ("gae", {"following": "values"}, "following must be a tuple of names, got 'values'"),
        ("gae", {"following": ()}, "end must be one of .* where following is empty"),
        ("gae", {"rates_following": ("lam_value",)}, "rates_following must be among rates of the first channel .*, got 'lam_value'"),
        ("gae", {"rates_following": ("lam",)}, "rates_following must stand at the same place in each channel, got 'lam'"),
        ("gae", {"minus_infinity": ("logprobs",)}, "minus_infinity must be among inputs .*, got 'logprobs'"),
        ("gae", {"takes": ("masks",)}, "takes must be among flags .*, got 'masks'"),
        ("gae", {"takes": "mask"}, "takes must be a tuple of names, got 'mask'"),
        ("gae", {"end": "bootstrap"}, "end must be one of .*, got 'bootstrap'; choose one of these"),
        ("gae", {"starts": True}, "starts must be False unless reverse is False"),
        ("gae", {"coefficients": None}, "coefficients must be a function, got None"),
        ("gae", {"naive": None}, "naive must be a function, got None"),
        ("gae", {"naive": lambda steps, rewards: None}, r"naive must take \(steps, rewards, values, \*, gamma, lam, lam_value\), got"),
        ("gae", {"counts": {"cut": 1}}, "counts must map names to functions"),
        ("retrace", {"continuation": "next_q"}, "continuation must be among inputs .*, got 'next_q'"),
        ("retrace", {"following": ("expected_next_q",)}, "following must not hold the continuation"),
        ("retrace_from_policy", {"continuation": None}, "expectation must stand in place of a continuation"),
        ("retrace_from_policy", {"expectation": ("next_q",)}, "expectation must be a pair of names"),
        ("retrace_from_policy", {"choices": {"logprobs": ("probs", "actions")}}, "choices must be among inputs .*, got 'logprobs'"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(base: str, changes: dict[str, Any], words: str) -> None:
    """When it is registered, by name; not by a KeyError in a call."""
    with pytest.raises(InputError, match=words) as caught:
        register(replace(estimator(base), **changes))
    assert str(caught.value).startswith(f"{base}: " if "name" not in changes else "Estimator: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2.0,), r"default must lie in \[0, 1\], got 2.0"),
        (("0.9",), r"default must lie in \[0, 1\], got '0.9'"),
        ((0.5, -1.0), "largest must be a number > 0, got -1.0"),
        ((0.5, float("nan")), "largest must be a number > 0, got nan"),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=f"^Rate: {words}"):
        Rate(*arguments)


def test_what_is_registered_is_an_estimator_of_a_new_name() -> None:
    with pytest.raises(InputError, match=r"^register: estimator must be an Estimator, got str"):
        register("gae")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"^register: an estimator named '{NAME}' exists"):
        toy_estimator.add()
    assert isinstance(estimator(NAME), Estimator)


def test_http() -> None:
    from rlhf_scan.server import Settings
    from rlhf_scan.server.client import HttpEngine

    with running(Settings(backend="cpu", warm=NAME)) as url:
        wait_until(f"{url}/readyz", 200)  # it passed the service's self-test
        with HttpEngine(url) as engine:
            result = engine.run(request())
        assert torch.equal(result.tensors["returns"], LocalEngine("cpu").run(request()).tensors["returns"])
        sent = {"tensors": {"rewards": [1, 2], "log_visits": [0, 0]}, "params": {"gamma": 0.5, "scale": 0.25}}
        answer = httpx.post(f"{url}/v1/{NAME}", json=sent, timeout=60).json()
        assert answer["tensors"] == {"returns": [2.375, 2.25]}
        schema = httpx.get(f"{url}/openapi.json").json()["paths"][f"/v1/{NAME}"]["post"]
        assert all(word in json.dumps(schema) for word in ("log_visits", "largest_bonus", "bonus at the first visit"))
        wrong = httpx.post(f"{url}/v1/{NAME}", json={"tensors": {"rewards": [1, 2]}})
        assert wrong.status_code == 422
        assert "log_visits" in wrong.json()["detail"]


def test_command_line(tmp_path: Path) -> None:
    from rlhf_scan.cli import app

    write_request(request(), tmp_path / "in.safetensors")
    outcome = CliRunner().invoke(app, ["compute", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")])
    assert outcome.exit_code == 0, outcome.output
    found = read_result(tmp_path / "out.safetensors")
    assert torch.equal(found.tensors["returns"], LocalEngine().run(request()).tensors["returns"])


def test_ray() -> None:
    """An actor is another process, which runs the registration when it starts: Ray's worker_process_setup_hook."""
    ray = pytest.importorskip("ray")
    from rlhf_scan.ray_actors import RayEngine

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    path = os.pathsep.join(filter(None, [os.path.dirname(toy_estimator.__file__), os.environ.get("PYTHONPATH")]))
    environment = {"worker_process_setup_hook": "toy_estimator.add", "env_vars": {"PYTHONPATH": path}}
    ray.init(
        num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False, runtime_env=environment, address="local"
    )
    try:
        expected = LocalEngine("reference").run(request()).tensors["returns"]
        with RayEngine(num_cpus=0.1, backend="reference") as engine:
            assert torch.equal(engine.run(request()).tensors["returns"], expected)
            with pytest.raises(InputError, match=rf"^{NAME}: tensors must hold .*got no log_visits"):
                engine.run(CreditRequest(NAME, {"rewards": torch.zeros(3)}))
    finally:
        ray.shutdown()


def ratio_coefficients(here: Any, following: Any, rates: Any) -> Any:
    """G_t = r_t / visits_t + gamma * G_{t+1}."""
    return here[0] / here[1], rates[0]


@pytest.mark.parametrize("fast", ["cpu", "triton"])
def test_a_division_by_0_is_infinite_and_stays_in_its_segment(fast: str) -> None:
    entry = replace(
        estimator(NAME), name="ratio_returns", rates={"gamma": Rate(0.5)}, channels=(("gamma",),), coefficients=ratio_coefficients
    )
    register(replace(entry, naive=lambda steps, rewards, log_visits, *, gamma: ({},)))
    try:
        tensors = {"rewards": torch.tensor([1.0, 2.0, 4.0]), "log_visits": torch.tensor([2.0, 0.0, 8.0]), "lengths": torch.tensor([2, 1])}
        tensors = {name: tensor.to(device_of(fast)) for name, tensor in tensors.items()}
        found = LocalEngine(fast).run(CreditRequest("ratio_returns", tensors)).tensors["returns"]
    finally:
        unregister("ratio_returns")
    assert found.tolist() == [float("inf"), float("inf"), 0.5]


def test_a_product_of_rates_that_overflows_ends_with_its_episode(backend: str) -> None:
    """256^16 is infinite, and 0 times infinity would be no number."""
    compound = replace(estimator("discounted_returns"), name="compound_returns", rates={"gamma": Rate(1.0, math.inf, "growth per step")})
    register(compound)
    try:
        last = torch.arange(96, device=device_of(backend)) == 40
        found = LocalEngine(backend).run(CreditRequest("compound_returns", {"rewards": last.float(), "terminated": last}, {"gamma": 256.0}))
    finally:
        unregister("compound_returns")
    assert found.tensors["returns"][26:41].tolist() == [256.0 ** (40 - t) for t in range(26, 41)]
