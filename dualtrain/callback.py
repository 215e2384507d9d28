"""The callback contract, whole."""

from __future__ import annotations

import inspect
from typing import Any

from dualtrain.context import RunContext
from dualtrain.protocol import Capability


class Callback:
    """Act on a run. Override the events you care about; subclassing is optional.

    Any object with methods of these names is a callback. Each gets the run context; stop
    the run with ``run_context.request_stop()``, record a number with ``run_context.log()``.
    A constructor validates and stores; files and the like are opened in ``on_train_begin``
    and closed in ``on_teardown``, so that one instance can serve a second run.
    """

    needs: frozenset[Capability] = frozenset()
    """What the engine must be able to do, checked at train begin."""

    wants: frozenset[Capability] = frozenset()
    """What the engine turns on for this callback where it has it, as for ``needs``, and is not refused
    for where it lacks it."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Before the first epoch; no step has been taken."""

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Before an epoch's first batch."""

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Before a batch is trained on; the step counter already counts it."""

    def on_train_step_end(self, run_context: RunContext) -> None:
        """After a batch was trained on."""

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """After an epoch's last batch and the evaluation that was due."""

    def on_train_end(self, run_context: RunContext) -> None:
        """After the last epoch, also when a stop was requested; not after an error."""

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Before an evaluation."""

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Before the evaluation's first batch."""

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Before a batch is evaluated."""

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """After a batch was evaluated."""

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """After the evaluation's last batch; the metrics are not known yet."""

    def on_eval_end(self, run_context: RunContext) -> None:
        """After an evaluation; ``run_context.metrics`` has its results."""

    def on_after_backward(self, run_context: RunContext) -> None:
        """After each backward; gradients are raw: perhaps scaled, perhaps of part of a window."""

    def on_gradients_ready(self, run_context: RunContext) -> None:
        """Once per update, when gradients are whole and unscaled, before they are clipped."""

    def on_before_optimizer_step(self, run_context: RunContext) -> None:
        """Once per update, after clipping."""

    def on_after_optimizer_step(self, run_context: RunContext) -> None:
        """Once per update, when ``step_skipped`` is known."""

    def on_checkpoint_save(self, run_context: RunContext) -> None:
        """After a checkpoint is complete on disk, where the engine writes them."""

    def on_checkpoint_load(self, run_context: RunContext) -> None:
        """After a checkpoint was loaded, where the engine does so."""

    def on_exception(self, run_context: RunContext, error: BaseException) -> None:
        """Once, when the run ends by an error, which is raised again afterwards."""

    def on_teardown(self, run_context: RunContext) -> None:
        """Always, once, in reverse order: after success, a stop or an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        """Release what is held; called once per ``train``, ``fit`` or ``eval``, in reverse order."""

    def __repr__(self) -> str:
        """Show the constructor call, each argument read from the attribute of its name."""
        parts = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if name == "self" or not hasattr(self, name):
                continue
            keyword = "" if parameter.kind is parameter.POSITIONAL_ONLY else f"{name}="
            parts.append(f"{keyword}{getattr(self, name)!r}")
        return f"{type(self).__name__}({', '.join(parts)})"
