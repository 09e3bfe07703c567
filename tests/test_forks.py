"""A process that is forked while another thread is within the library can use it too: the locks that it inherits are free."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
from rlhf_scan import gae, repeats
from rlhf_scan.backends import cpu_outputs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("module", "lock"), [(cpu_outputs, "_choosing"), (repeats, "_writing")])
def test_a_child_forked_while_a_thread_holds_a_lock_gets_its_result(module: Any, lock: str) -> None:
    rewards = torch.randn(2, 1 << 18)  # outputs large enough for memory that is used again
    gae(rewards, rewards, backend="cpu")
    with getattr(module, lock):  # as another thread may hold it at that moment; in the child that thread does not exist
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            gae(rewards[:, 1:], rewards[:, 1:], backend="cpu")
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child did not end by itself: {status}"
