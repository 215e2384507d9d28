"""Mixed precision: autocast, and for fp16 a loss scale."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import Native

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Compute losses in mixed precision, and scale them for fp16.

    Args:
        amp: None, ``"bf16"`` or ``"fp16"``.
        device: The network's device.

    Attributes:
        scaler: The ``torch.amp.GradScaler`` of fp16, else None.
    """

    def __init__(self, amp: str | None, device: torch.device) -> None:
        if amp is not None and amp not in _DTYPES:
            raise ArgumentValueError(f"amp is None, 'fp16' or 'bf16', but got {amp!r}.")
        self.amp = amp
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self._stepped = False

    def autocast(self) -> Any:
        """Return the context to compute a loss in."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=_DTYPES[self.amp])

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to start backward from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Native) -> None:
        """Unscale an optimizer's gradients, which finds overflows."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Native) -> bool:
        """Step the optimizer, unless its gradients have overflowed; return whether it has stepped."""
        if self.scaler is None:
            optimizer.step()
            return True
        self._stepped = False
        hook = optimizer.register_step_post_hook(self._after_step)
        try:
            self.scaler.step(optimizer)
        finally:
            hook.remove()
        return self._stepped

    def _after_step(self, optimizer: Native, *args: Any) -> None:
        # A fused optimizer is called on an overflow too: it gets ``found_inf`` and does nothing.
        overflow = getattr(optimizer, "found_inf", None)
        self._stepped = overflow is None or not bool(overflow)

    def update(self) -> None:
        """Adapt the loss scale after an update."""
        if self.scaler is not None:
            self.scaler.update()

    def forget(self) -> None:
        """Let the next run unscale anew, where an error has come between unscaling and update."""
        try:
            self.update()
        except AssertionError:
            pass  # nothing had been unscaled

    @property
    def loss_scale(self) -> float | None:
        """The loss scale; None without one."""
        return None if self.scaler is None else float(self.scaler.get_scale())
