"""What a replay launches as compiled code takes it, addresses in place of tensors: as the call did that was recorded. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
import torch
from scripts import no_gpu
gpu = no_gpu.stand_in()
from rlhf_scan import Segments, ppo_advantages, replays, retrace_from_policy

seen = []
gpu.launcher_cls = lambda source, metadata: lambda *arguments: seen.append([str(metadata.name), *flat(arguments)])

def flat(arguments):
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from flat(argument)
        else:
            yield argument.data_ptr() if isinstance(argument, torch.Tensor) else argument

def plain(argument, given):
    "Where an address lies: in which argument of the call, or in memory that the call allocated."
    if type(argument) is not int or argument < 2**32:
        return str(argument)
    places = [(name, argument - it.data_ptr()) for name, it in given.items() if 0 <= argument - it.data_ptr() < it.untyped_storage().nbytes()]
    return places or "allocated"

def call(*shape, **options):
    names = "logprobs", "ref_logprobs", "values", "mask"
    tensors = {name: torch.randn(shape) for name in names} | {"scores": torch.randn(3)}
    if "segments" in options:
        tensors = {name: tensor.flatten() for name, tensor in tensors.items()}
    return tensors, lambda: ppo_advantages(**tensors, backend="triton", **options)

def policy():
    probs, actions = torch.rand(3, 41, 4), torch.zeros(3, 40, dtype=torch.int64)
    names = "rewards", "q_values", "behavior_logprobs"
    tensors = {name: torch.randn(3, 40) for name in names} | {"next_q": torch.randn(3, 40, 4), "actions": actions}
    views = {"target_probs": probs[:, 1:], "policy_probs": probs[:, :-1]}
    return tensors | {"probs": probs}, lambda: retrace_from_policy(**tensors, **views, backend="triton")

for tensors, run in (
    call(3, 40),
    call(3, 40, preset="trl"),
    call(3, 40, preset="slime"),
    call(3, 40, segments=Segments.from_lengths([40, 0, 80])),
    policy(),
):
    found = []
    for time in range(3):
        seen.clear()
        run()
        found.append([[plain(argument, tensors) for argument in arguments] for arguments in seen])
    replayed = [isinstance(known, replays.Replay) for known in replays._known.values()]
    print(json.dumps([replayed, found[1], found[2]]))
    replays._known.clear()
"""


def test_a_replay_launches_what_was_recorded() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, cwd=root)
    assert finished.returncode == 0, finished.stderr[-4000:]
    for line in finished.stdout.splitlines():
        replayed, recorded, repeated = json.loads(line)
        assert replayed == [True]
        assert repeated == recorded
        assert any("allocated" in arguments for arguments in repeated)
    assert len(finished.stdout.splitlines()) == 5
