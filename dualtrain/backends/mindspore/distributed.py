"""Ranks on MindSpore, for monitoring; MindSpore itself reduces the gradients."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import communication, ops


def rank() -> int:
    """Return this process's rank, 0 before ``mindspore.communication.init()``."""
    return int(communication.get_rank()) if communication.GlobalComm.INITED else 0


def world_size() -> int:
    """Return the number of processes, 1 before ``mindspore.communication.init()``."""
    return int(communication.get_group_size()) if communication.GlobalComm.INITED else 1


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank. Cost: one all-reduce of one number.

    The reduction is a sum, since MindSpore supports no other on the CPU.
    """
    if world_size() == 1:
        return flag
    votes = ops.AllReduce()(mindspore.Tensor(np.array([flag], dtype=np.float32)))
    return bool(votes.asnumpy()[0] > 0)
