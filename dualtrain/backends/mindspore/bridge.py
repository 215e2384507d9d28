"""The way across: MindSpore's Model calls bridges, and each bridge calls a run of our callbacks.

MindSpore's own Model is the engine. It takes instances of its own Callback only, treats them by
their class names, and makes a new RunContext for every evaluation; a bridge hides all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import train

from dualtrain.backends.mindspore.step import GradientCheck
from dualtrain.bus import EventBus
from dualtrain.context import CallbackParams, RunContext
from dualtrain.events import Event
from dualtrain.protocol import Native


class DualTrainBridge(train.Callback):  # type: ignore[misc]
    """Forward MindSpore's events to a run of callbacks that stand side by side in the list.

    Args:
        run: The state that all bridges of one call share.
        callbacks: The callbacks behind this bridge.
        native_bases: Callback base classes of frameworks, whose own methods are no hooks.
        leading: Whether this is the first bridge, which keeps the shared state up to date.
        closing: Whether this is the last one, after which ranks agree on a stop.
    """

    def __init__(
        self,
        run: BridgedRun,
        callbacks: list[Any],
        native_bases: tuple[type, ...],
        *,
        leading: bool,
        closing: bool,
    ) -> None:
        self._run = run
        times = run.callback_times
        self._bus = EventBus(callbacks, native_bases=native_bases, callback_times=times)
        self._leading = leading
        self._closing = closing
        self._step_begin = self._bus.emitter(Event.TRAIN_STEP_BEGIN)
        self._step_end = self._bus.emitter(Event.TRAIN_STEP_END)

    def on_train_begin(self, run_context: Native) -> None:
        if self._leading:
            self._run.adopt(run_context)
        self._emit(Event.TRAIN_BEGIN, run_context)

    def on_train_epoch_begin(self, run_context: Native) -> None:
        if self._leading:
            self._run.epoch_begins()
        self._emit(Event.TRAIN_EPOCH_BEGIN, run_context)

    def on_train_step_begin(self, run_context: Native) -> None:
        run = self._run
        if self._leading:
            run.step_begins()
        if self._step_begin is not None:
            self._step_begin(run.context)
            run.pass_on_stop(run_context)

    def on_train_step_end(self, run_context: Native) -> None:
        run = self._run
        if self._leading:
            run.step_ends()
        if self._step_end is not None:
            self._step_end(run.context)
        run.pass_on_stop(run_context)
        if self._closing:
            run.agree_on_stop(run_context)

    def on_train_epoch_end(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_EPOCH_END, run_context)
        if self._closing:
            self._run.agree_on_stop(run_context)

    def on_train_end(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_END, run_context)

    def on_eval_begin(self, run_context: Native) -> None:
        if self._leading:
            self._run.eval_begins(run_context)
        self._emit(Event.EVAL_BEGIN, run_context)

    def on_eval_epoch_begin(self, run_context: Native) -> None:
        self._emit(Event.EVAL_EPOCH_BEGIN, run_context)

    def on_eval_step_begin(self, run_context: Native) -> None:
        if self._leading:
            self._run.interrupts.retake()
        self._emit(Event.EVAL_STEP_BEGIN, run_context)

    def on_eval_step_end(self, run_context: Native) -> None:
        if self._leading:
            self._run.eval_step_ends()
        self._emit(Event.EVAL_STEP_END, run_context)

    def on_eval_epoch_end(self, run_context: Native) -> None:
        self._emit(Event.EVAL_EPOCH_END, run_context)

    def on_eval_end(self, run_context: Native) -> None:
        if self._leading:
            self._run.eval_ends()
        self._emit(Event.EVAL_END, run_context)

    def _emit(self, event: Event, native: Native) -> None:
        self._bus.emit(event, self._run.context)
        self._run.pass_on_stop(native)


class BridgedRun:
    """What the bridges of one train, fit or eval call share.

    Args:
        context: The run's context, which takes over MindSpore's parameters at the first event.
        step: The state of its steps.
        interrupts: Who watches for Ctrl-C.
        loss_of: Takes an evaluation step's outputs, returns its mean loss; None where it is
            not known.
        any_rank: Makes the ranks agree on a stop; None where there is one rank.
        check: What a ``train_step`` is checked with around the first training step.
        callback_times: What all bridges add the times of their callbacks to; None: nobody asks.
    """

    def __init__(
        self,
        context: RunContext,
        step: Any,
        interrupts: Any,
        loss_of: Callable[[Native], float | None],
        any_rank: Callable[[bool], bool] | None,
        check: GradientCheck | None,
        callback_times: dict[str, float] | None,
    ) -> None:
        self.context = context
        self.callback_times = callback_times
        self.interrupts = interrupts
        self._step = step
        self._loss_of = loss_of
        self._any_rank = any_rank
        self._check = check
        self._eval_losses: list[float] = []
        self._stopping_before_eval = False

    def callbacks(self, callbacks: list[Any], native_bases: tuple[type, ...]) -> list[Any]:
        """Return the list for MindSpore: its own callbacks in their place, bridges for the others."""
        runs: list[Any] = [[]]  # the first bridge is always there
        for callback in callbacks:
            if is_native(callback):
                runs.append(callback)
            elif isinstance(runs[-1], list):
                runs[-1].append(callback)
            else:
                runs.append([callback])
        if self._any_rank is not None and not isinstance(runs[-1], list):
            runs.append([])
        last = max(i for i, run in enumerate(runs) if isinstance(run, list))
        return [
            DualTrainBridge(self, run, native_bases, leading=i == 0, closing=i == last)
            if isinstance(run, list)
            else run
            for i, run in enumerate(runs)
        ]

    def adopt(self, native: Native) -> None:
        """Make MindSpore's parameter bag one of ours, in place: the engine goes on writing to it.

        MindSpore's bag raises KeyError for a missing attribute and cannot be copied.
        """
        bag = native.original_args()
        object.__setattr__(bag, "__class__", CallbackParams)  # its own __setattr__ would add an item
        bag.__dict__ = bag
        self.context._args = bag

    def epoch_begins(self) -> None:
        """Note that a training epoch begins."""
        self.context._begin_epoch()
        self._step.epoch_begins(self.context.original_args()["train_dataset"])

    def step_begins(self) -> None:
        """Note that a training step begins."""
        self.interrupts.retake()
        self._step.begins()
        if self._check is not None:
            self._check.before_first_step(self.context.original_args()["train_dataset_element"])

    def step_ends(self) -> None:
        """Note that a training step has ended."""
        self.interrupts.retake()
        self._step.ends()
        if self._check is not None:
            self._check.after_first_step(self.context.original_args()["train_dataset_element"])
            self._check = None

    def eval_begins(self, native: Native) -> None:
        """Note that an evaluation begins, alone or inside fit."""
        if self.context.original_args() is not native.original_args():
            self.adopt(native)
        self._eval_losses.clear()
        self._stopping_before_eval = self.context.get_stop_requested()

    def eval_step_ends(self) -> None:
        """Take an evaluation step's loss."""
        self.interrupts.retake()
        loss = self._loss_of(self.context.outputs)
        if loss is not None:
            self._eval_losses.append(loss)

    def eval_ends(self) -> None:
        """Put the mean over the batches where MindSpore has put the last batch's loss."""
        params = self.context.original_args()
        if "eval_results" in params and self._eval_losses:
            params["eval_results"]["eval_loss"] = sum(self._eval_losses) / len(self._eval_losses)
        self.context._remember_metrics()

    def pass_on_stop(self, native: Native) -> None:
        """Carry stop requests across, in both directions.

        Each evaluation has a native context of its own: a stop from before it must not cut it
        short, and one requested in it is passed on to training by the next training event.
        """
        context = self.context
        if context._stop_requested:
            if not (self._stopping_before_eval and context.mode == "eval"):
                native.request_stop()
        elif native.get_stop_requested():
            context.request_stop("a MindSpore callback requested it")

    def agree_on_stop(self, native: Native) -> None:
        """Stop on every rank if one rank stops."""
        if self._any_rank is not None and self._any_rank(self.context.get_stop_requested()):
            self.context._stop_as_agreed()
            native.request_stop()


def is_native(callback: Any) -> bool:
    """Tell whether a callback is of a class that MindSpore ships, or of a subclass of one.

    A direct subclass of its Callback base is not: that is how users write their own.
    """
    return any(
        cls.__module__.split(".")[0] == "mindspore" and cls is not train.Callback
        for cls in type(callback).__mro__
    )
