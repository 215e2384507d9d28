"""Stop training when a metric stops improving."""

from __future__ import annotations

from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.monitor import Monitor, find_metric
from dualtrain.protocol import Weights


class EarlyStopping(Callback):
    """Request a stop after ``patience`` evaluations without improvement.

    Only evaluations count; epochs without an evaluation are ignored. NaN and infinities are never an
    improvement.

    Args:
        monitor: A metric of the evaluation; ``val_x``, ``eval_x`` and ``x`` are the same metric.
        patience: Evaluations without improvement before the stop; 0 stops at the first.
        mode: ``"min"``, ``"max"``, or None: inferred from the name (see ``dualtrain.monitor.Monitor``).
        min_delta: A value is an improvement only if it exceeds the best by more than this.
        restore_best_weights: Restore the weights of the best evaluation at train end, also if this
            callback did not stop the run. Cost: one copy of the weights per improvement.

    Attributes:
        best: The best finite value so far; None before the first.

    Cost: none per step. Events: train begin, eval end, train end.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        patience: int = 0,
        *,
        mode: str | None = None,
        min_delta: float = 0.0,
        restore_best_weights: bool = False,
    ) -> None:
        if not isinstance(monitor, str):
            raise ArgumentTypeError(
                f"EarlyStopping(monitor=...) takes a metric's name, but got {monitor!r}."
            )
        self._monitor = Monitor(monitor, mode, min_delta, patience)
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.restore_best_weights = restore_best_weights
        self._weights: dict[str, Any] | None = None
        self._resuming = False

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._monitor.best

    def on_train_begin(self, run_context: RunContext) -> None:
        if self.restore_best_weights and not isinstance(run_context.backend, Weights):
            raise RunStateError(
                f"EarlyStopping(restore_best_weights=True) needs a backend that copies weights, but this "
                f"run has {run_context.backend}: give the run its network, or leave the option out."
            )
        if not self._resuming:
            self._monitor.reset()
        self._resuming = False
        self._weights = None

    def on_eval_end(self, run_context: RunContext) -> None:
        if run_context.epoch is None:
            return  # a separate evaluation: there is nothing to stop
        try:
            value = float(find_metric(self.monitor, run_context.metrics))
        except KeyError as error:
            raise ArgumentValueError(f"EarlyStopping(monitor=...): {error.args[0]}.") from None
        if self._monitor.improved(value):
            backend = run_context.backend
            if self.restore_best_weights and isinstance(backend, Weights):
                self._weights = backend.weights(run_context.network)
        elif self._monitor.exhausted:
            run_context.request_stop(
                f"{self.monitor} has not improved on {self.best} for {self._monitor.waited} evaluations"
            )

    def on_train_end(self, run_context: RunContext) -> None:
        backend = run_context.backend
        if self._weights is not None and isinstance(backend, Weights):
            backend.assign_weights(run_context.network, self._weights)
            self._weights = None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since."""
        return {"best": self._monitor.best, "waited": self._monitor.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the next run continues from it."""
        self._monitor.best, self._monitor.waited = state["best"], state["waited"]
        self._resuming = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None}  # native tensors stay with the run
