"""Measure the speed of a run, and the time spent in its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError
from dualtrain.protocol import Capability
from dualtrain.triggers import Every


class Throughput(Callback):
    """Log the speed of a run, and the time of a step's parts, every ``interval`` steps and at the end.

    Values, logged for the loggers after this callback in the list: ``samples_per_sec``,
    ``tokens_per_sec`` if tokens can be counted, and seconds per step: ``data_sec`` (waiting for the
    next batch), ``step_sec`` (forward, backward and update), ``callbacks_sec`` (all callbacks), and
    ``callback_sec/<ClassName>`` (the slowest callback). The first three add up to the time of a step
    without evaluations. All values are of this process; with accumulation each batch counts.

    On an accelerator operations are asynchronous: ``step_sec`` is the time to launch a step, and the
    first read of a value, such as a logger's read of the loss, waits for the device and counts as time of
    that callback. This callback reads the loss at the end of each interval, so the rates and the sum of
    the three times are correct. The time of MindSpore's own callbacks counts as data.

    Args:
        interval: Steps between two reports, counted across epochs. 50 averages single slow steps, and
            still shows a slow begin of an epoch.
        tokens: Function that returns the number of tokens in a batch. None: the size of the first input
            if it has two dimensions of integers, such as token ids; otherwise tokens are not counted.

    Attributes:
        summary: The last report, name -> number, with ``steps`` (the number of steps in it) and
            ``slowest``.
        slowest: The class name of the slowest callback in the last report.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid; or in the run, ``tokens`` does not
            return a number.

    Cost: two reads of the clock per step and two more for each callback and event, a few microseconds;
    one device sync every ``interval`` steps.
    Events: train begin, train step begin and end, eval begin and end, train end.
    """

    needs = frozenset({Capability.CALLBACK_TIMES})

    _clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, interval: int = 50, *, tokens: Callable[[Any], float] | None = None) -> None:
        self.interval = positive_int("Throughput", "interval", interval)
        if tokens is not None and not callable(tokens):
            raise ArgumentTypeError(f"Throughput(tokens=...) takes a function, but got {tokens!r}.")
        self.tokens = tokens
        self._summary: dict[str, Any] = {}

    @property
    def summary(self) -> dict[str, Any]:
        """The last report; empty before the first."""
        return dict(self._summary)

    @property
    def slowest(self) -> str | None:
        """The class name of the slowest callback in the last report."""
        return self._summary.get("slowest")

    def on_train_begin(self, run_context: RunContext) -> None:
        self._summary = {}
        self._every = Every(steps=self.interval)
        self._every.reset(step=run_context.step or 0)
        self._last_step = run_context.step or 0
        self._begin_interval(run_context)
        self._begin_lap(run_context)

    def _begin_interval(self, run_context: RunContext) -> None:
        self._steps = 0
        self._samples: int | None = 0
        self._tokens: float | None = 0
        self._data = self._step = self._callbacks = 0.0
        self._times_before = dict(run_context.callback_times)

    def _begin_lap(self, run_context: RunContext) -> None:
        self._lap_begin = self._clock()
        self._spent = sum(run_context.callback_times.values())

    def _lap(self, run_context: RunContext) -> float:
        """End a lap and begin the next; return the lap's seconds outside of callbacks."""
        begin, spent = self._lap_begin, self._spent
        self._begin_lap(run_context)
        in_callbacks = self._spent - spent
        self._callbacks += in_callbacks
        return self._lap_begin - begin - in_callbacks

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self._data += self._lap(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        due = self._every.due(step=run_context.step or 0)
        if due:
            _ = run_context.loss  # wait for the device
        self._step += self._lap(run_context)
        self._count(run_context)
        if due:
            self._report(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        if self._in_training(run_context):
            self._lap(run_context)

    def on_eval_end(self, run_context: RunContext) -> None:
        if self._in_training(run_context):
            self._begin_lap(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        if self._steps:
            self._report(run_context)

    @staticmethod
    def _in_training(run_context: RunContext) -> bool:
        return run_context.epoch is not None

    def _count(self, run_context: RunContext) -> None:
        step = run_context.step or 0
        self._steps += step - self._last_step  # more than one with data sinking
        self._last_step = step
        batch = run_context.original_args().get("train_dataset_element")
        batch_shape = getattr(run_context.backend, "batch_shape", None)
        first = None if batch_shape is None else batch_shape(batch)
        tokens: float | None = None
        if first is not None:
            shape = first.shape
            if self._samples is not None:
                self._samples += shape[0] if shape else 1
            if first.integers and len(shape) == 2:
                tokens = shape[0] * shape[1]
        else:
            self._samples = None
        if self.tokens is not None:
            tokens = self._counted(batch)
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    def _counted(self, batch: Any) -> float:
        assert self.tokens is not None
        number = self.tokens(batch)
        try:
            return float(number)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(
                f"Throughput(tokens=...) has to give the number of tokens, but gave {number!r:.60}."
            ) from error

    def _report(self, run_context: RunContext) -> None:
        steps, total = self._steps, self._data + self._step + self._callbacks
        values: dict[str, float] = {}
        if total > 0:
            if self._samples is not None:
                values["samples_per_sec"] = self._samples / total
            if self._tokens is not None:
                values["tokens_per_sec"] = self._tokens / total
        values["data_sec"] = self._data / steps
        values["step_sec"] = self._step / steps
        values["callbacks_sec"] = self._callbacks / steps
        before = self._times_before
        taken = {n: seconds - before.get(n, 0.0) for n, seconds in run_context.callback_times.items()}
        slowest = max(taken, key=taken.__getitem__, default=None)
        if slowest is not None:
            values[f"callback_sec/{slowest}"] = taken[slowest] / steps
        for name, value in values.items():
            run_context.log(name, value)
        self._summary = {"steps": steps, **values, "slowest": slowest}
        self._begin_interval(run_context)
