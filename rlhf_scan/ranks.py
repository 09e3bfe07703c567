"""What the ranks of a process group know together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

from .errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_process_group(op: str, process_group: object) -> None:
    """Raise unless it is None or a group of ranks that this process is one of."""
    if process_group is None:
        return
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise InputError(f"{op}: process_group must be None while torch.distributed is not initialized; call init_process_group before")
    if process_group == torch.distributed.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to a process that it leaves out
        raise InputError(f"{op}: process_group must hold this process, but this process is not in it; call on its ranks alone")
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise InputError(
            f"{op}: process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}; pass "
            "torch.distributed.group.WORLD for all ranks, or None for this process alone"
        )


def gathered(numbers: Tensor, process_group: ProcessGroup) -> Tensor:
    """`numbers` [K] of every rank, [ranks, K] in the order of the ranks: on each rank the same bits. Every rank must call.

    They travel on the device that the group's backend takes: CUDA tensors over NCCL stay there and nothing is waited for; over gloo they
    pass through the CPU. CPU tensors over NCCL pass through the current CUDA device.
    """
    device = _travels_on(numbers.device, process_group)
    mine = numbers.to(device).contiguous()
    all_of_them = mine.new_empty(torch.distributed.get_world_size(process_group), *mine.shape)
    torch.distributed.all_gather_into_tensor(all_of_them.flatten(), mine.flatten(), group=process_group)
    return all_of_them.to(numbers.device)


def _travels_on(device: torch.device, process_group: ProcessGroup) -> torch.device:
    """Where a tensor of `device` must be for the group to send it."""
    pairs = torch.distributed.get_backend_config(process_group).split(",")  # such as "cpu:gloo,cuda:nccl"
    backends = {kind: backend for kind, _, backend in (pair.partition(":") for pair in pairs)}
    if backends.get(device.type) not in (None, "gloo"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
