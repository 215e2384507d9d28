"""Numbers that a GPU copies to the host between its other work, instead of the host waiting for them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def to_float_later(value: torch.Tensor) -> Callable[[], float] | None:
    """Begin to copy a scalar, or the mean of a larger tensor, to the host.

    What comes behind it in the stream may overwrite the tensor, as a captured graph does: the copy is made
    before.

    Returns:
        What waits for the copy, and for nothing behind it, and returns the number; None where the
        tensor is not on a GPU.
    """
    if not value.is_cuda:
        return None
    value = value.detach()
    if value.numel() != 1:
        value = value.float().mean()
    copy = value.to("cpu", non_blocking=True)  # into pinned memory, without which it would be waited for
    copied = torch.cuda.current_stream(value.device).record_event()

    def read() -> float:
        copied.synchronize()
        return float(copy)

    return read
