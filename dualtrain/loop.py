"""The loop: batches in, verbs of a run called. It knows no model, no optimizer and no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.window import end_pass

StepFunction = Callable[[Any], Any]
"""Takes a batch and returns its outputs, which callbacks see as ``net_outputs``."""


def run_training(
    engine: RunEngine,
    step: StepFunction,
    batches: Iterable[Any],
    *,
    epoch: int,
    initial_epoch: int = 0,
    evaluate: Callable[[], None] | None = None,
    valid_frequency: int | list[int] = 1,
    epoch_ended: Callable[[], None] | None = None,
) -> None:
    """Train from ``initial_epoch`` to ``epoch``, emitting the events of ``dualtrain.events``.

    Args:
        engine: The run, open.
        step: Trains on one batch.
        batches: Iterated once per epoch.
        epoch: The epoch to end at; at least ``initial_epoch + 1``.
        initial_epoch: Epochs before this run.
        evaluate: Evaluates once (see ``run_evaluation``); None: no evaluation.
        valid_frequency: Evaluate every so many epochs, or at the epochs listed.
        epoch_ended: Called after each ``on_train_epoch_end``, while the evaluation's results are readable.
    """
    begin_step, end_step, should_stop = engine.begin_step, engine.end_step, engine.should_stop
    step_begins = engine.emitter(Event.TRAIN_STEP_BEGIN)
    step_ended = engine.emitter(Event.TRAIN_STEP_END)

    engine.begin()
    engine.emit(Event.TRAIN_BEGIN)
    for number in range(initial_epoch + 1, epoch + 1):
        engine.begin_epoch(number)
        engine.emit(Event.TRAIN_EPOCH_BEGIN)
        iterator = iter(batches)
        try:
            for batch in iterator:
                begin_step(batch)
                if step_begins is not None:
                    step_begins()
                end_step(step(batch))
                if step_ended is not None:
                    step_ended()
                if should_stop():
                    break
        finally:
            end_pass(iterator, batches)
        if evaluate is not None and is_due(number, valid_frequency):
            evaluate()
        engine.end_epoch()
        engine.emit(Event.TRAIN_EPOCH_END)
        if epoch_ended is not None:
            epoch_ended()
        if should_stop():
            break
    engine.end()
    engine.emit(Event.TRAIN_END)


def run_evaluation(
    engine: RunEngine,
    step: StepFunction,
    batches: Iterable[Any],
    *,
    update: Callable[[Any], None] | None = None,
    results: Callable[[], dict[str, Any]],
    eval_loss: Callable[[], float | None] = lambda: None,
    batch_num: int | float | None = None,
    **params: Any,
) -> None:
    """Evaluate once, emitting the six eval events, and return to training if the run is in training.

    A stop requested during the evaluation cuts it short; one requested before does not.

    Args:
        engine: The run, open.
        step: Evaluates one batch.
        batches: Iterated once.
        update: Adds a step's outputs to the metrics, after the step's event.
        results: Returns the metrics, when the last batch is done.
        eval_loss: Returns the mean loss, for ``eval_results``.
        batch_num: The number of batches; None: not known.
        **params: Further values for the parameter bag.
    """
    step_begins = engine.emitter(Event.EVAL_STEP_BEGIN)
    step_ended = engine.emitter(Event.EVAL_STEP_END)

    engine.begin_evaluation(batch_num, **params)
    engine.emit(Event.EVAL_BEGIN)
    engine.emit(Event.EVAL_EPOCH_BEGIN)
    iterator = iter(batches)
    try:
        for batch in iterator:
            engine.begin_eval_step(batch)
            if step_begins is not None:
                step_begins()
            outputs = step(batch)
            engine.end_eval_step(outputs)
            if step_ended is not None:
                step_ended()
            if update is not None:
                update(outputs)
            if engine.should_stop():
                break
    finally:
        end_pass(iterator, batches)
    engine.emit(Event.EVAL_EPOCH_END)
    engine.end_evaluation(results(), eval_loss=eval_loss())
    engine.emit(Event.EVAL_END)
    engine.leave_evaluation()


def is_due(epoch: int, valid_frequency: int | list[int]) -> bool:
    """Return whether an evaluation follows an epoch."""
    if isinstance(valid_frequency, int):
        return epoch % valid_frequency == 0
    return epoch in valid_frequency
