"""Keep the numbers of each epoch in memory."""

from __future__ import annotations

from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext


class MetricHistory(Callback):
    """Keep the last training loss, the learning rate and the evaluation's results of each epoch.

    ``history`` maps a name (``epoch``, ``loss``, ``lr``, ``eval_loss``, the metrics' names) to
    a list with one value per epoch; None means no value. A new run clears it.

    Cost: one device sync per epoch. Events: train begin, train epoch end.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self._resuming = False

    def on_train_begin(self, run_context: RunContext) -> None:
        if not self._resuming:
            self.history = {}
        self._resuming = False

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        row = {"epoch": run_context.epoch, "loss": run_context.loss, "lr": run_context.lr}
        if "eval_results" in params:  # of this epoch, not of an earlier one
            row.update(run_context.metrics)
        epochs_before = len(self.history.get("epoch", ()))
        for name in (*self.history, *row):
            values = self.history.setdefault(name, [None] * epochs_before)
            if len(values) == epochs_before:
                values.append(row.get(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the history so far."""
        return {"history": {name: list(values) for name, values in self.history.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a history; the next run continues it."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._resuming = True
