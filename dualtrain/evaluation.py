"""An evaluation in a hand-written loop: ``with run.evaluation() as evaluation``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentTypeError, RunStateError
from dualtrain.events import Event
from dualtrain.protocol import Native
from dualtrain.window import end_pass


class Evaluation:
    """Emit the six eval events around the user's evaluation, and restore the counters of training.

    Args:
        engine: The run.
        as_outputs: Detaches a step's outputs.
        batches: The number of batches; None: known when the loader is given.
        limit: The largest number of batches; None: all.
    """

    def __init__(
        self,
        engine: RunEngine,
        as_outputs: Callable[[Native], Native],
        *,
        batches: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._engine = engine
        self._as_outputs = as_outputs
        self._batches = batches
        self._limit = limit
        self._losses: list[float] = []
        self._outputs: Native = None
        self._metrics: dict[str, Any] | None = None
        self._is_open = self._was_open = self._in_step = False

    @property
    def outputs(self) -> Native:
        """The detached outputs of the current evaluation step, such as its loss; None if not set."""
        return self._outputs

    @outputs.setter
    def outputs(self, value: Native) -> None:
        self._outputs = self._as_outputs(value)

    @property
    def metrics(self) -> dict[str, Any]:
        """The results: name -> value. If not set, ``eval_loss`` is the mean of the outputs' losses.

        Cost of the mean: one device sync per evaluation step.
        """
        if self._metrics is not None:
            return self._metrics
        return {"eval_loss": sum(self._losses) / len(self._losses)} if self._losses else {}

    @metrics.setter
    def metrics(self, value: dict[str, Any]) -> None:
        if not hasattr(value, "keys"):
            raise ArgumentTypeError(
                f"evaluation.metrics takes a mapping name -> result, but got {type(value).__name__}."
            )
        self._metrics = dict(value)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Go through the batches of the evaluation, with the step events around each body.

        Args:
            loader: Any iterable of batches.

        Raises:
            RunStateError: Outside of ``with run.evaluation()``.
        """
        self._check_open()
        self._end_step()
        length = length_of(loader, self._limit)
        self._engine.context.original_args().update(valid_dataset=loader, batch_num=length)
        return steps_over(loader, self._limit, self._begin_step, self._end_step, self._engine.should_stop)

    def _begin_step(self, batch: Any) -> None:
        self._check_open()
        self._end_step()
        self._engine.begin_eval_step(batch)
        self._in_step, self._outputs = True, None
        self._engine.emit(Event.EVAL_STEP_BEGIN)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RunStateError(
                "evaluation.batches() belongs inside `with run.evaluation() as evaluation:`, but the "
                "evaluation is not open."
            )

    def _end_step(self) -> None:
        if not self._in_step:
            return
        self._in_step = False
        self._engine.end_eval_step(self._outputs)
        self._engine.emit(Event.EVAL_STEP_END)
        if self._outputs is not None and self._metrics is None:
            loss: float | None = self._engine.context.loss
            if loss is not None:
                self._losses.append(loss)

    def __enter__(self) -> Evaluation:
        if self._was_open:
            raise RunStateError("an evaluation can be entered once: call run.evaluation() for each.")
        self._is_open = self._was_open = True
        network = self._engine.context.network
        self._engine.begin_evaluation(self._batches, eval_network=network, valid_dataset=None)
        self._engine.emit(Event.EVAL_BEGIN)
        self._engine.emit(Event.EVAL_EPOCH_BEGIN)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._is_open = False
        if error is not None:
            return  # the run reports it; if it is caught, the next verb restores the counters
        self._end_step()
        self._engine.emit(Event.EVAL_EPOCH_END)
        self._engine.end_evaluation(self.metrics)
        self._engine.emit(Event.EVAL_END)
        self._engine.leave_evaluation()


def steps_over(
    loader: Iterable[Any],
    limit: int | None,
    begin: Callable[[Any], None],
    end: Callable[[], None],
    should_stop: Callable[[], bool],
) -> Iterator[Any]:
    """Give the batches of a loader, with a step around the body of each.

    A step that the body leaves by ``break``, ``return`` or an error is not ended here: to a generator
    these look alike.

    Args:
        loader: Any iterable of batches.
        limit: The largest number of batches; None: all.
        begin, end: Begin and end a step.
        should_stop: Returns after a step whether to stop.
    """
    iterator = iter(loader)
    left = float("inf") if limit is None else limit
    try:
        for batch in iterator:
            begin(batch)
            yield batch
            end()
            left -= 1
            if left <= 0 or should_stop():
                return
    finally:
        end_pass(iterator, loader)


def length_of(loader: Iterable[Any], limit: int | None = None) -> int | None:
    """Return the number of batches, None where there is no length, at most ``limit``."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return length if limit is None else min(length, limit)
