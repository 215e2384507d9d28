"""dualtrain's callbacks for a condition: the same on both frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dualtrain as dt
from dualtrain.protocol import Capability
from loops.common import Condition, NotApplicable, silent


class LogNorm(dt.Callback):
    """Log the gradient norm of every step."""

    needs = frozenset({Capability.GRAD_NORM})

    def on_train_step_end(self, run_context: dt.RunContext) -> None:
        run_context.log("grad_norm", run_context.grad_norm)


def callbacks(condition: Condition, log: Path, *, attention_interval: int = 50) -> list[Any]:
    """Return the callback list of a condition."""
    if condition.callbacks:
        return silent_on_lifecycle(condition)
    if not condition.log_interval:
        return []
    found: list[Any] = [LogNorm()] if condition.norm else []
    found.append(dt.callbacks.StepLogger(log, log_interval=condition.log_interval))
    if condition.monitor:
        if not hasattr(dt.callbacks, "TransformerMonitor"):
            raise NotApplicable("this version has no TransformerMonitor")
        monitor = dt.callbacks.TransformerMonitor(
            log_file=log.with_suffix(".monitor.jsonl"), attention_interval=attention_interval
        )
        found.append(monitor)
    return found


def silent_on_lifecycle(condition: Condition) -> list[Any]:
    """Return callbacks that do nothing at the twelve events of MindSpore."""
    return silent(dt.Callback, condition, lambda name: name.startswith(("on_train_", "on_eval_")))
