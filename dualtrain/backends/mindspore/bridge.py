"""A callback of MindSpore's that forwards its events to dualtrain's callbacks.

MindSpore's own Model is the engine. It accepts only instances of its own Callback, selects them by class
name, and creates a new RunContext for every evaluation; a bridge hides these details.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import train

from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.protocol import Native


class DualTrainBridge(train.Callback):  # type: ignore[misc]
    """Forward MindSpore's events to a part of the callback list: consecutive callbacks.

    Args:
        engine: The run shared by all bridges of a call.
        callbacks: The callbacks of this part.
        closing: Whether this is the last part, after which the ranks agree on a stop.
    """

    def __init__(self, engine: RunEngine, callbacks: Sequence[Any], *, closing: bool) -> None:
        self._engine = engine
        self._part = engine.part(callbacks)
        self._closing = closing
        self._step_begins = engine.emitter(Event.TRAIN_STEP_BEGIN, self._part)
        self._step_ended = engine.emitter(Event.TRAIN_STEP_END, self._part)

    def on_train_begin(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_BEGIN, run_context)

    def on_train_epoch_begin(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_EPOCH_BEGIN, run_context)

    def on_train_step_begin(self, run_context: Native) -> None:
        if self._step_begins is not None:
            self._step_begins()

    def on_train_step_end(self, run_context: Native) -> None:
        if self._step_ended is not None:
            self._step_ended()
        # As _pass_on_stop and _agree_on_stop, with fewer calls.
        engine = self._engine
        if run_context.get_stop_requested():
            self._pass_on_stop(run_context)
        if engine.should_stop() if self._closing else engine.context.get_stop_requested():
            run_context.request_stop()

    def on_train_epoch_end(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_EPOCH_END, run_context)
        self._agree_on_stop(run_context)

    def on_train_end(self, run_context: Native) -> None:
        self._emit(Event.TRAIN_END, run_context)

    def on_eval_begin(self, run_context: Native) -> None:
        self._emit(Event.EVAL_BEGIN, run_context)

    def on_eval_epoch_begin(self, run_context: Native) -> None:
        self._emit(Event.EVAL_EPOCH_BEGIN, run_context)

    def on_eval_step_begin(self, run_context: Native) -> None:
        self._emit(Event.EVAL_STEP_BEGIN, run_context)

    def on_eval_step_end(self, run_context: Native) -> None:
        self._emit(Event.EVAL_STEP_END, run_context)

    def on_eval_epoch_end(self, run_context: Native) -> None:
        self._emit(Event.EVAL_EPOCH_END, run_context)

    def on_eval_end(self, run_context: Native) -> None:
        self._emit(Event.EVAL_END, run_context)

    def _emit(self, event: Event, native: Native) -> None:
        self._engine.emit(event, self._part)
        self._pass_on_stop(native)

    def _pass_on_stop(self, native: Native) -> None:
        """Pass stop requests between MindSpore and the run, in both directions.

        Each evaluation has its own native context: an earlier stop request must not end the evaluation,
        and a request inside it is passed to training by the next training event.
        """
        context = self._engine.context
        if not context.get_stop_requested():
            if native.get_stop_requested():
                context.request_stop("a MindSpore callback requested it")
        elif context.mode != "eval" or self._engine.should_stop():
            native.request_stop()

    def _agree_on_stop(self, native: Native) -> None:
        """Stop on every rank if one rank stops."""
        if self._closing and self._engine.should_stop():
            native.request_stop()
