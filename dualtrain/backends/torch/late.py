"""Asynchronous copies of numbers from a GPU to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def to_float_later(value: torch.Tensor) -> Callable[[], float] | None:
    """Start an asynchronous copy of a scalar, or of the mean of a larger tensor, to the host.

    The copy is ordered in the stream, so later operations may overwrite the tensor, as a captured graph
    does.

    Returns:
        A function that waits for only this copy and returns the number; None if the tensor is not on a
        GPU.
    """
    if not value.is_cuda:
        return None
    value = value.detach()
    if value.numel() != 1:
        value = value.float().mean()
    copy = value.to("cpu", non_blocking=True)  # into pinned memory; otherwise the copy would block
    copied = torch.cuda.current_stream(value.device).record_event()

    def read() -> float:
        copied.synchronize()
        return float(copy)

    return read
