"""The loop: batches in, events out. It knows no model, no optimizer and no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dualtrain.bus import EventBus
from dualtrain.context import RunContext
from dualtrain.events import Event

StepFunction = Callable[[Any], Any]
"""Takes a batch, returns what callbacks see as ``net_outputs``."""


def run_training(
    context: RunContext,
    bus: EventBus,
    step: StepFunction,
    batches: Iterable[Any],
    *,
    epoch: int,
    initial_epoch: int = 0,
    evaluate: Callable[[], None] | None = None,
    valid_frequency: int | list[int] = 1,
    agree: Callable[[bool], bool] | None = None,
    epoch_ended: Callable[[], None] | None = None,
) -> None:
    """Train from ``initial_epoch`` to ``epoch``, emitting the events of ``dualtrain.events``.

    Args:
        context: The run's context; its parameters are kept up to date here.
        bus: Who listens.
        step: Trains on one batch.
        batches: Iterated once per epoch.
        epoch: The epoch to end at; at least ``initial_epoch + 1``.
        initial_epoch: Epochs done before this run.
        evaluate: Evaluates once, emitting the eval events; None if there is nothing to evaluate.
        valid_frequency: Evaluate every so many epochs, or at the epochs listed.
        agree: Makes the ranks of a distributed run agree on a stop; called on every step. None: there is
            one rank.
        epoch_ended: Called after each ``on_train_epoch_end``, with the evaluation's results still there.
    """
    params = context.original_args()
    step_begin = bus.emitter(Event.TRAIN_STEP_BEGIN)
    step_end = bus.emitter(Event.TRAIN_STEP_END)
    should_stop = context.get_stop_requested
    if agree is not None:
        should_stop = lambda: agree(context.get_stop_requested())  # noqa: E731 - asked at every step

    bus.emit(Event.TRAIN_BEGIN, context)
    for number in range(initial_epoch + 1, epoch + 1):
        params["cur_epoch_num"] = number
        context._begin_epoch()
        bus.emit(Event.TRAIN_EPOCH_BEGIN, context)
        iterator = iter(batches)
        try:
            for batch in iterator:
                params["cur_step_num"] += 1
                params["train_dataset_element"] = batch
                if step_begin is not None:
                    step_begin(context)
                params["net_outputs"] = step(batch)
                if context._deferred:
                    context._run_deferred()
                if step_end is not None:
                    step_end(context)
                if should_stop():
                    context._stop_as_agreed()
                    break
        finally:
            end_pass(iterator, batches)
        if evaluate is not None and is_due(number, valid_frequency):
            evaluate()
        context._run_deferred()
        bus.emit(Event.TRAIN_EPOCH_END, context)
        if epoch_ended is not None:
            epoch_ended()
        params.pop("metrics", None)
        params.pop("eval_results", None)
        if should_stop():
            context._stop_as_agreed()
            break
    bus.emit(Event.TRAIN_END, context)


def run_evaluation(
    context: RunContext,
    bus: EventBus,
    step: StepFunction,
    batches: Iterable[Any],
    update: Callable[[Any], None],
    finish: Callable[[], None],
) -> None:
    """Evaluate once, emitting the six eval events.

    A stop requested during the evaluation cuts it short; one requested before does not.

    Args:
        context: The run's context; ``mode``, ``batch_num`` and ``cur_step_num`` are the caller's.
        bus: Who listens.
        step: Evaluates one batch.
        batches: Iterated once.
        update: Takes what the step returned into the metrics, after the step's event.
        finish: Puts the results into the parameters, before ``on_eval_end``.
    """
    params = context.original_args()
    step_begin = bus.emitter(Event.EVAL_STEP_BEGIN)
    step_end = bus.emitter(Event.EVAL_STEP_END)
    stop_requested = context.get_stop_requested
    stopping = stop_requested()

    bus.emit(Event.EVAL_BEGIN, context)
    bus.emit(Event.EVAL_EPOCH_BEGIN, context)
    iterator = iter(batches)
    try:
        for batch in iterator:
            params["cur_step_num"] += 1
            params["eval_dataset_element"] = batch
            if step_begin is not None:
                step_begin(context)
            params["net_outputs"] = outputs = step(batch)
            if step_end is not None:
                step_end(context)
            update(outputs)
            if stop_requested() and not stopping:
                break
    finally:
        end_pass(iterator, batches)
    bus.emit(Event.EVAL_EPOCH_END, context)
    finish()
    context._remember_metrics()
    bus.emit(Event.EVAL_END, context)


def end_pass(iterator: Iterator[Any], batches: Iterable[Any]) -> None:
    """Close an iterator over batches, however its pass has ended.

    Otherwise a pass that an error ends stays open, with its files and worker processes, for as long
    as somebody keeps the error. What is its own iterator is the caller's, and is left open.
    """
    close = getattr(iterator, "close", None)
    if close is not None and iterator is not batches:
        close()


def is_due(epoch: int, valid_frequency: int | list[int]) -> bool:
    """Tell whether an evaluation follows an epoch."""
    if isinstance(valid_frequency, int):
        return epoch % valid_frequency == 0
    return epoch in valid_frequency
