"""Ranks on PyTorch, for monitoring; gradients are reduced by the user's DDP wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank() -> int:
    """Return this process's rank, 0 without an initialised process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank; a collective on the host if gloo is available.

    Cost: one all-reduce of one number. With only NCCL it runs on the device, with a sync.
    """
    if world_size() == 1:
        return flag
    device = "cpu"
    if "gloo" not in dist.get_backend() and "cpu" not in dist.get_backend():
        accelerator = torch.accelerator.current_accelerator()
        device = str(accelerator) if accelerator is not None else "cpu"
    vote = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())
