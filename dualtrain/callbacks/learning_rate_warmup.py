"""Increase the learning rate linearly at the start of training."""

from __future__ import annotations

from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentValueError


class LearningRateWarmup(Callback):
    """Scale the learning rate linearly from ``start_factor`` to 1 over the first updates.

    At update ``i``, counted from 0, the rate is multiplied by
    ``start_factor + (1 - start_factor) * min(i / steps, 1)``, with or without a schedule.

    Args:
        steps: Updates until the full rate.
        start_factor: The first update's factor; positive, at most 1.

    Cost: one comparison per step; during the warm-up also a write of the rate.
    Events: train begin, train step begin, train step end, teardown.
    """

    def __init__(self, steps: int, start_factor: float) -> None:
        self.steps = positive_int("LearningRateWarmup", "steps", steps)
        if not 0 < start_factor <= 1:
            raise ArgumentValueError(
                f"LearningRateWarmup(start_factor=...) is above 0 and at most 1, but got {start_factor!r}."
            )
        self.start_factor = start_factor
        self._resuming = False
        self._factor = 1.0
        self._updates = self._updates_before = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        if not self._resuming:
            self._factor, self._updates = 1.0, 0
        self._resuming = False
        self._updates_before = self._updates

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if self._updates >= self.steps and self._factor == 1.0:
            return
        progress = min(self._updates / self.steps, 1.0)
        factor = self.start_factor + (1 - self.start_factor) * progress
        if factor != self._factor:
            run_context.scale_lr(factor / self._factor)
            self._factor = factor

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._factor != 1.0:
            self._updates = self._updates_before + (run_context.global_step or 0)

    def on_teardown(self, run_context: RunContext) -> None:
        factor, self._factor = self._factor, 1.0
        if factor != 1.0:  # the run has ended during the warm-up: restore the unscaled rate
            run_context.scale_lr(1 / factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the current factor of the rate."""
        return {"updates": self._updates, "factor": self._factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the next run's optimizer is expected to have the saved, scaled rate."""
        self._updates, self._factor = state["updates"], state["factor"]
        self._resuming = True
