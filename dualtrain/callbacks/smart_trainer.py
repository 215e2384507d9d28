"""Reduce the learning rate when the training loss stops falling, and continue training."""

from __future__ import annotations

import math
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentValueError
from dualtrain.monitor import Monitor


class SmartTrainer(Callback):
    """Multiply the learning rate by ``factor`` after ``patience`` steps without improvement.

    The first loss is the reference. A step improves if ``loss < best - loss_plateau_threshold``.
    After ``patience`` steps without improvement, the rate of every parameter group becomes
    ``max(rate * factor, min_lr)``, the count restarts, and training continues; a rate that is already
    at the minimum is not changed or recorded. NaN and infinities are never an improvement.

    Args:
        patience: Steps without improvement before a reduction.
        min_lr: Minimum of the rate.
        loss_plateau_threshold: Required decrease of the loss; 1e-4 is well below the change per step
            of a healthy run, and well above float32's rounding.
        factor: Multiplier of the rate; above 0 and below 1.
        smoothing: Weight of the past in an exponential mean of the loss, from 0 (no smoothing) up to
            but not including 1. Losses of single steps are noisy; 0.9 removes most of the noise.
        cooldown: Steps after a reduction that are not counted.

    Attributes:
        lr_history: ``[(step, rate)]`` of each reduction; the rate is a tuple with several groups.
        best_loss: The lowest loss so far, smoothed if ``smoothing`` is set; None before the first.

    Cost: one device sync per step, shared with other callbacks that read the loss.
    Events: train begin, train step end.
    """

    def __init__(
        self,
        patience: int = 5,
        min_lr: float = 1e-6,
        loss_plateau_threshold: float = 1e-4,
        *,
        factor: float = 0.5,
        smoothing: float = 0.0,
        cooldown: int = 0,
    ) -> None:
        self.patience = positive_int("SmartTrainer", "patience", patience)
        if not 0 <= min_lr < math.inf or not 0 <= loss_plateau_threshold < math.inf:
            raise ArgumentValueError(
                f"SmartTrainer takes min_lr and loss_plateau_threshold of at least 0, "
                f"but got {min_lr!r} and {loss_plateau_threshold!r}."
            )
        if not 0 < factor < 1 or not 0 <= smoothing < 1:
            raise ArgumentValueError(
                f"SmartTrainer takes a factor between 0 and 1 and a smoothing from 0 up to 1, "
                f"but got {factor!r} and {smoothing!r}."
            )
        if isinstance(cooldown, bool) or not isinstance(cooldown, int) or cooldown < 0:
            raise ArgumentValueError(f"SmartTrainer(cooldown=...) counts steps, but got {cooldown!r}.")
        self.min_lr = min_lr
        self.loss_plateau_threshold = loss_plateau_threshold
        self.factor = factor
        self.smoothing = smoothing
        self.cooldown = cooldown
        self._resuming = False
        self._begin()

    def _begin(self) -> None:
        self.lr_history: list[tuple[int, Any]] = []
        self._monitor = Monitor("loss", "min", self.loss_plateau_threshold, self.patience)
        self._smoothed: float | None = None
        self._cooling = 0

    @property
    def best_loss(self) -> float | None:
        """The lowest loss so far."""
        return self._monitor.best

    def on_train_begin(self, run_context: RunContext) -> None:
        if not self._resuming:
            self._begin()
        self._resuming = False

    def on_train_step_end(self, run_context: RunContext) -> None:
        loss = run_context.loss
        if loss is None:
            return
        if self._smoothed is None or not math.isfinite(loss):
            smoothed = loss
        else:
            smoothed = self.smoothing * self._smoothed + (1 - self.smoothing) * loss
        if math.isfinite(smoothed):
            self._smoothed = smoothed
        if self._cooling:
            self._cooling -= 1
            return
        if self._monitor.improved(smoothed) or not self._monitor.exhausted:
            return
        self._monitor.waited = 0
        self._cooling = self.cooldown
        rates = run_context.lr
        if any(rate > self.min_lr for rate in (rates if isinstance(rates, tuple) else (rates or 0.0,))):
            self.lr_history.append((run_context.step or 0, run_context.scale_lr(self.factor, self.min_lr)))

    def state_dict(self) -> dict[str, Any]:
        """Return the plateau's state: the best loss, the count and the reductions."""
        return {
            "best": self._monitor.best,
            "waited": self._monitor.waited,
            "smoothed": self._smoothed,
            "cooling": self._cooling,
            "lr_history": [list(cut) for cut in self.lr_history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the next run continues from it."""
        self._begin()
        self._monitor.best, self._monitor.waited = state["best"], state["waited"]
        self._smoothed, self._cooling = state["smoothed"], state["cooling"]
        self.lr_history = [
            (step, tuple(r) if isinstance(r, list) else r) for step, r in state["lr_history"]
        ]
        self._resuming = True
