"""The callback interface."""

from __future__ import annotations

import inspect
from typing import Any

from dualtrain.context import RunContext
from dualtrain.protocol import Capability


class Callback:
    """Act on the events of a run. Override the events of interest; subclassing is optional.

    Any object with methods of these names is a callback. Each method receives the run context;
    ``run_context.request_stop()`` stops the run, ``run_context.log()`` records a number.
    The constructor validates and stores arguments. Open files and other resources in
    ``on_train_begin`` and close them in ``on_teardown``, so that an instance can be used in
    several runs.
    """

    needs: frozenset[Capability] = frozenset()
    """Required capabilities of the engine, checked at train begin."""

    wants: frozenset[Capability] = frozenset()
    """Optional capabilities: enabled if available, ignored otherwise."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Before the first epoch and the first step."""

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Before an epoch's first batch."""

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Before each batch; ``run_context.step`` already counts it."""

    def on_train_step_end(self, run_context: RunContext) -> None:
        """After each batch's forward, backward and update."""

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """After an epoch's last batch and its evaluation, if any."""

    def on_train_end(self, run_context: RunContext) -> None:
        """After the last epoch or a requested stop; not after an error."""

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Before an evaluation."""

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Before the evaluation's first batch."""

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Before each batch of the evaluation."""

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """After each batch of the evaluation."""

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """After the evaluation's last batch; the metrics are not available yet."""

    def on_eval_end(self, run_context: RunContext) -> None:
        """After an evaluation; ``run_context.metrics`` has its results."""

    def on_after_backward(self, run_context: RunContext) -> None:
        """After each backward; gradients may be scaled, and may cover only part of a window."""

    def on_gradients_ready(self, run_context: RunContext) -> None:
        """Once per update, with complete, unscaled gradients, before clipping."""

    def on_before_optimizer_step(self, run_context: RunContext) -> None:
        """Once per update, after clipping."""

    def on_after_optimizer_step(self, run_context: RunContext) -> None:
        """Once per update, when ``step_skipped`` is known."""

    def on_exception(self, run_context: RunContext, error: BaseException) -> None:
        """Once, if the run ends with an error, which is re-raised afterwards."""

    def on_teardown(self, run_context: RunContext) -> None:
        """Always, once, in reverse order of the list: after success, a stop or an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        """Release resources; called once per ``train``, ``fit`` or ``eval``, in reverse order."""

    def __repr__(self) -> str:
        """Return the constructor call; each argument is read from the attribute of the same name."""
        parts = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if name == "self" or not hasattr(self, name):
                continue
            keyword = "" if parameter.kind is parameter.POSITIONAL_ONLY else f"{name}="
            parts.append(f"{keyword}{getattr(self, name)!r}")
        return f"{type(self).__name__}({', '.join(parts)})"
