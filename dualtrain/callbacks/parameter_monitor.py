"""Record weight norms, gradient norms and update ratios of each layer."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dualtrain.arguments import checked_path, checked_sinks, positive_int
from dualtrain.callbacks._log_writing import LogWriting
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.protocol import Capability, Native, ParameterCopies
from dualtrain.records import Record
from dualtrain.sinks.run_log import RunLog
from dualtrain.sinks.sink import Sink

_SHOWN = 5


class ParameterMonitor(LogWriting):
    """Record weight norm, gradient norm and update ratio of each layer at a sample of the updates.

    A sample is due at the first step, then every ``interval`` steps, and is taken at the next update
    (with accumulation at the end of the window). A skipped update is not sampled; the next one is.
    A sample has for each group of parameters

    - ``weight_norm``: the L2 norm of its weights before the update,
    - ``grad_norm``: the L2 norm of their gradients, unscaled and before clipping,
    - ``update_ratio``: the norm of the weights' change, divided by ``weight_norm``. It is measured
      from the weights, so it is correct for every optimizer, with decay and clipping. About 1e-3 is
      usual; 0.0 means no change. If all weights were zero and change, it is infinite,

    and ``dead_gradients``: the names of parameters whose gradient is all zero or missing.
    Frozen parameters and parameters without an optimizer are left out; tied weights count once.

    Args:
        interval: Steps between two samples, counted across epochs. At 50 the cost is negligible, and a
            learning rate that is ten times too high is visible early.
        patterns: Groups of parameters: name -> regular expression, or a sequence of expressions that
            are also the groups' names. A parameter belongs to every group whose expression is found in
            its name (``re.search``); parameters without a match are left out. None: one group per
            module, named by its path (``blocks.0.attn.qkv`` for its ``weight`` and ``bias``); each
            parameter of the network itself is a group.
        log_file: File of the samples, one row each: ``step``, ``epoch``, ``global_step``,
            ``parameters`` (a list of ``group``, ``weight_norm``, ``grad_norm``, ``update_ratio``) and
            ``dead_gradients``. None, without ``sinks``: the numbers go to ``run_context.log`` as
            ``update_ratio/<group>`` and so on, for loggers after this callback in the list.
        sinks: Further sinks for each row, on rank 0. They are closed at the end of the run: create
            new ones for each run. A ``MemorySink`` stays readable.

    Attributes:
        last: The last sample, as in a row of the log; None before the first.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid.
        ArgumentValueError: At train begin, if a pattern matches no trained parameter.
        LogInUseError, OSError: At train begin, if the log cannot be opened.

    Under manual optimisation a sample covers the whole batch, with the gradients of each optimizer's
    last update in it; parameters of an optimizer without an update are left out.

    Memory: from the begin of a sampled update to its end, one copy of the watched weights, on their
    device (MindSpore: on the host). With accumulation it is taken at the first batch of the sample,
    since weights do not change before the update.

    Cost: a sample copies the weights and reads them and their gradients, with two device syncs: on
    one CPU core about 1 ms for a small network, and 8 ms (MindSpore 20 ms) per million weights. Any
    other step costs a comparison on PyTorch; on MindSpore gradient norms are computed inside every
    step, at 1 to 1.5 times the cost of ``Capability.GRAD_NORM``.
    Events: train begin, step begin, step end, epoch end, teardown.
    """

    needs = frozenset({Capability.STEP_EVENTS, Capability.PARAMETER_GRAD_NORMS})

    def __init__(
        self,
        interval: int = 50,
        patterns: Mapping[str, str] | Sequence[str] | None = None,
        log_file: str | os.PathLike[str] | None = None,
        *,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.interval = positive_int("ParameterMonitor", "interval", interval)
        self.patterns = _checked_patterns(patterns)
        self.log_file = checked_path("ParameterMonitor", "log_file", log_file, optional=True)
        self.sinks = checked_sinks("ParameterMonitor", sinks)
        self.last: dict[str, Any] | None = None
        self._forget_run()

    def _forget_run(self) -> None:
        self._run_log: RunLog | None = None
        self._next_sample = 0
        self._due = False
        self._release()

    def _release(self) -> None:
        self._watched: dict[str, Native] = {}
        self._before: dict[str, Native] | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        resuming, self._resuming = self._resuming, False
        self._forget_run()
        if not resuming:
            self.last = None
        self._check_patterns(list(run_context.trained_parameters))
        meta = {"interval": self.interval, "patterns": self.patterns}
        self._run_log = RunLog.open(
            run_context, self.log_file, sinks=self.sinks, append=resuming, meta=meta
        )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        step = run_context.step or 0
        if not self._due and step >= self._next_sample:
            self._due, self._next_sample = True, step + self.interval
        if self._due and self._before is None:
            backend = run_context.backend
            assert isinstance(backend, ParameterCopies)  # implied by the capability
            parameters = run_context.trained_parameters
            self._watched = {name: parameters[name] for name in parameters if self._groups_of(name)}
            self._before = backend.copy_parameters(self._watched)
            run_context.request_parameter_grad_norms()

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._before is None or not run_context.is_update_step:
            return
        before, watched = self._before, self._watched
        self._release()
        if run_context.step_skipped:
            return
        self._due = False
        backend = run_context.backend
        assert isinstance(backend, ParameterCopies)
        gradients = run_context.parameter_grad_norms or {}
        changes = backend.parameter_changes(before, watched)
        self._record(run_context, changes, {name: gradients[name] for name in changes if name in gradients})

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._release()  # the copy of an incomplete window

    def _end_log(self) -> None:
        run_log = self._run_log
        self._forget_run()
        if run_log is not None:
            run_log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the last sample; if there is one, a resumed run continues the log."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the log in the next run instead of starting a new one."""
        self.last = state["last"]
        self._resuming = self.last is not None

    def _record(
        self,
        run_context: RunContext,
        changes: dict[str, tuple[float, float]],
        gradients: dict[str, float],
    ) -> None:
        members: dict[str, list[str]] = {group: [] for group in self._named_patterns()}
        for name in gradients:
            for group in self._groups_of(name):
                members.setdefault(group, []).append(name)
        parameters: list[dict[str, Any]] = []
        for group, names in members.items():
            if names:
                weight_norm = math.hypot(*(changes[name][0] for name in names))
                change = math.hypot(*(changes[name][1] for name in names))
                parameters.append(
                    {
                        "group": group,
                        "weight_norm": weight_norm,
                        "grad_norm": math.hypot(*(gradients[name] for name in names)),
                        "update_ratio": _ratio(change, weight_norm),
                    }
                )
        values = {
            "global_step": run_context.global_step,
            "parameters": parameters,
            "dead_gradients": [name for name, norm in gradients.items() if norm == 0],
        }
        self.last = {"step": run_context.step, "epoch": run_context.epoch, **values}
        if self._run_log is not None:
            record = Record(run_context.step or 0, run_context.epoch, "train", time.time(), values)
            self._run_log.write(record)
        elif self.log_file is None and not self.sinks:
            for row in parameters:
                for quantity in ("update_ratio", "grad_norm", "weight_norm"):
                    run_context.log(f"{quantity}/{row['group']}", row[quantity])

    def _named_patterns(self) -> dict[str, str]:
        if isinstance(self.patterns, dict):
            return self.patterns
        return {pattern: pattern for pattern in self.patterns or ()}

    def _groups_of(self, name: str) -> list[str]:
        if self.patterns is None:
            return [name.rpartition(".")[0] or name]
        return [group for group, pattern in self._named_patterns().items() if re.search(pattern, name)]

    def _check_patterns(self, names: list[str]) -> None:
        for group, pattern in self._named_patterns().items():
            if not any(re.search(pattern, name) for name in names):
                of = "" if group == pattern else f" of group {group!r}"
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise ArgumentValueError(
                    f"ParameterMonitor(patterns=...): {pattern!r}{of} matches none of the trained "
                    f"parameters, which are {', '.join(names[:_SHOWN]) or 'none'}{more}."
                )


def _ratio(change: float, weight_norm: float) -> float:
    if weight_norm == 0:
        return math.inf if change else 0.0
    return change / weight_norm


def _checked_patterns(patterns: Any) -> dict[str, str] | list[str] | None:
    if patterns is None:
        return None
    if isinstance(patterns, (str, bytes)) or not isinstance(patterns, (Mapping, Sequence)):
        raise ArgumentTypeError(
            f"ParameterMonitor(patterns=...) takes a mapping name -> regular expression or a list of "
            f"expressions, but got {patterns!r}."
        )
    own = dict(patterns) if isinstance(patterns, Mapping) else list(patterns)
    if not own:
        raise ArgumentValueError(
            "ParameterMonitor(patterns=...) is empty, so nothing would be watched: leave it out, or "
            "give an expression."
        )
    for text in (*own, *own.values()) if isinstance(own, dict) else own:
        if not isinstance(text, str):
            raise ArgumentTypeError(f"ParameterMonitor(patterns=...) takes texts, but got {text!r}.")
    for pattern in own.values() if isinstance(own, dict) else own:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentValueError(
                f"ParameterMonitor(patterns=...) has {pattern!r}, which is no regular expression: {error}."
            ) from error
    return own
