"""The part of a backend's acceptance test that is about runs: events, counters, stops, errors, the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import RunStateError
from dualtrain.events import LIFECYCLE, Event
from dualtrain.model import Model
from dualtrain.protocol import Backend, Capability
from dualtrain.testing.recording import RecordingCallback, assert_trace

_GRADIENTS = frozenset({Capability.GRAD_NORM, Capability.PARAMETER_GRAD_NORMS})
_OF_PARTS = _GRADIENTS | {Capability.ACCUMULATION, Capability.PROBING}

_BEFORE_EVALUATION = (
    *(Event.TRAIN_BEGIN, Event.TRAIN_EPOCH_BEGIN, Event.TRAIN_STEP_BEGIN, Event.TRAIN_STEP_END),
)
_CUTS_EVALUATION = (
    *(Event.EVAL_BEGIN, Event.EVAL_EPOCH_BEGIN, Event.EVAL_STEP_BEGIN, Event.EVAL_STEP_END),
)


def check_runs(backend: Backend, model: Model, batches: Sequence[Any]) -> dict[str, Any]:
    """Check the runs of a backend's Model.

    Returns:
        The parameters that the optimizer trains, by name; empty where the step has no gradients.
    """
    valid = batches[:2]
    recording, values, step = RecordingCallback(), _Values(backend), _Step(backend)
    model.fit(2, batches, valid, callbacks=[recording, values, step])
    _check_trace("a run of two epochs", recording, _trace(2, len(batches), len(valid)))
    values.check(batches)
    step.check()
    for event in LIFECYCLE:
        _check_stop(model, batches, valid, event)
    for event in (Event.TRAIN_STEP_END, Event.EVAL_STEP_END):
        _check_error(model, batches, valid, event)
    _check_initial_epoch(model, batches, valid)
    recording = RecordingCallback()
    results = model.eval(valid, callbacks=recording)
    assert list(results) == ["eval_loss"], "without metrics eval gives eval_loss alone"
    alone = [*_evaluation(None, len(valid)), "on_teardown"]
    _check_trace("a lone evaluation", recording, alone)
    return step.parameters


def _trace(
    epochs: int, steps: int, evaluated: int, *, initial_epoch: int = 0, batch_num: int | None = None
) -> Iterator[Any]:
    """Return (event, epoch, step, batch_num, mode) for each event.

    Args:
        epochs: The epoch to end at.
        steps: The steps of each epoch.
        evaluated: The steps of each evaluation.
        initial_epoch: Epochs before the run.
        batch_num: The batches of an epoch; None: as many as its steps.
    """
    batch_num, step = batch_num or steps, 0
    yield "on_train_begin", None, 0, batch_num, "train"
    for epoch in range(initial_epoch + 1, epochs + 1):
        yield "on_train_epoch_begin", epoch, step, batch_num, "train"
        for step in range(step + 1, step + steps + 1):  # noqa: B020 - continues after the last epoch
            yield "on_train_step_begin", epoch, step, batch_num, "train"
            yield "on_train_step_end", epoch, step, batch_num, "train"
        yield from _evaluation(epoch, evaluated)
        yield "on_train_epoch_end", epoch, step, batch_num, "train"
    yield "on_train_end", epochs, step, batch_num, "train"
    yield "on_teardown", epochs, step, batch_num, "train"


def _evaluation(epoch: int | None, steps: int) -> Iterator[Any]:
    yield "on_eval_begin", epoch, 0
    yield "on_eval_epoch_begin", epoch, 0
    for step in range(1, steps + 1):
        yield "on_eval_step_begin", epoch, step
        yield "on_eval_step_end", epoch, step
    yield "on_eval_epoch_end", epoch, steps
    yield "on_eval_end", epoch, steps


def _check_trace(run: str, recording: RecordingCallback, expected: Any) -> None:
    try:
        assert_trace(recording, expected)
    except AssertionError as error:
        raise AssertionError(f"in {run}, {error}") from None


def _check_stop(model: Model, batches: Sequence[Any], valid: Sequence[Any], event: Event) -> None:
    """Stop at an event: the current step, the evaluation and the epoch are ended, and no other begins."""
    steps = 1 if event in _BEFORE_EVALUATION else len(batches)
    evaluated = 1 if event in _CUTS_EVALUATION else len(valid)
    epochs = 2 if event is Event.TRAIN_END else 1
    recording = RecordingCallback()
    stop = _At(event, lambda context: context.request_stop("enough"))
    model.fit(2, batches, valid, callbacks=[recording, stop])
    expected = _trace(epochs, steps, evaluated, batch_num=len(batches))
    _check_trace(f"a run that is stopped in {event}", recording, expected)


def _check_error(model: Model, batches: Sequence[Any], valid: Sequence[Any], event: Event) -> None:
    """Raise an error at an event: it goes to on_exception, then comes teardown, and it arrives."""
    error = RuntimeError(f"the error of a callback in {event}")
    arrived: BaseException | None = None

    def fail(context: RunContext) -> None:
        raise error

    recording, told = RecordingCallback(), _Told()
    try:
        model.fit(2, batches, valid, callbacks=[recording, told, _At(event, fail)])
    except BaseException as raised:  # noqa: BLE001 - compared
        arrived = raised
    assert arrived is error, f"fit raises the error of a callback in {event} itself, but raised {arrived!r}"
    names = [name for name, *_ in _trace(1, len(batches), len(valid))]
    until = names[: names.index(event.value) + 1]
    _check_trace(f"a run that fails in {event}", recording, [*until, "on_exception", "on_teardown"])
    assert told.errors == [error], "on_exception is called once, with the error"


def _check_initial_epoch(model: Model, batches: Sequence[Any], valid: Sequence[Any]) -> None:
    recording, known = RecordingCallback(), []
    note = _At(Event.TRAIN_BEGIN, lambda context: known.append((context.epochs, context.evaluations)))
    model.fit(4, batches, valid, valid_frequency=1, callbacks=[recording, note], initial_epoch=2)
    expected = _trace(4, len(batches), len(valid), initial_epoch=2)
    _check_trace("a run with initial_epoch=2", recording, expected)
    assert known == [(4, 2)], (
        f"with initial_epoch=2 a run to epoch 4 knows of epochs 4 and evaluations 2, but not {known[0]}"
    )


class _At(Callback):
    """Do something when an event comes for the first time."""

    def __init__(self, event: Event, action: Callable[[RunContext], None]) -> None:
        self._action: Callable[[RunContext], None] | None = action
        setattr(self, event.value, self._act)

    def _act(self, run_context: RunContext) -> None:
        action, self._action = self._action, None
        if action is not None:
            action(run_context)


class _Told(Callback):
    """Keep the errors that ``on_exception`` is given."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_exception(self, run_context: RunContext, error: BaseException) -> None:
        self.errors.append(error)


class _Values(Callback):
    """Read what a run shows of batches and outputs, in every form."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._losses: list[Any] = []
        self._converted: list[Any] = []
        self._arrays: list[Any] = []
        self._shapes: list[Any] = []
        self._restored: list[bool] = []
        self._metrics: list[Any] = []

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._losses.append(run_context.loss)
        self._converted.append(self._backend.to_float(run_context.outputs))
        self._arrays.append(self._backend.to_numpy(run_context.outputs))
        batch_shape = getattr(self._backend, "batch_shape", None)
        if batch_shape is not None:
            told = batch_shape(run_context.batch)
            self._shapes.append(None if told is None else tuple(told.shape))

    def on_eval_end(self, run_context: RunContext) -> None:
        self._metrics.append(list(run_context.metrics))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._restored.append(run_context.loss == self._losses[-1])

    def check(self, batches: Sequence[Any]) -> None:
        """Check what was read in a run of two epochs."""
        losses = self._losses
        assert all(isinstance(loss, float) for loss in losses), "losses read as floats"
        exact = all(isinstance(value, float) for value in self._converted) and self._converted == losses
        assert exact, "to_float gives a scalar tensor's value as a float"
        for array, loss in zip(self._arrays, losses, strict=True):
            whole = type(array).__module__ == "numpy" and abs(float(array.mean()) - loss) < 1e-6
            assert whole, "to_numpy gives a tensor's values as a numpy array"
        if hasattr(self._backend, "batch_shape"):
            shapes = [tuple(batch[0].shape) for batch in batches] * 2
            assert self._shapes == shapes, "batch_shape gives the shape of a batch's first array"
        assert all("eval_loss" in names for names in self._metrics), "metrics has eval_loss at on_eval_end"
        assert all(self._restored), "after an evaluation the outputs are those of the last training step"


class _Step(Callback):
    """Read what a run shows of its training step: the core, and the parts that its capabilities promise."""

    def __init__(self, backend: Backend) -> None:
        self.needs = backend.capabilities() & _OF_PARTS
        self.parameters: dict[str, Any] = {}
        self._global_steps: list[Any] = []
        self._rates: list[Any] = []
        self._norms: list[Any] = []
        self._explanation: Any = None
        self._trouble: list[str] = []

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        if Capability.ACCUMULATION in self.needs:
            try:
                run_context.accumulate_steps = 1
            except RunStateError:
                self._trouble.append("a step with the capability accumulation has the part accumulation")

    def on_train_step_begin(self, run_context: RunContext) -> None:
        if Capability.PARAMETER_GRAD_NORMS in self.needs:
            try:
                run_context.request_parameter_grad_norms()
            except RunStateError:
                self._trouble.append(
                    "a step with the capability parameter_grad_norms has the part parameter_norms"
                )

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._global_steps.append((run_context.global_step, run_context.is_update_step))
        self._rates.append(run_context.lr)
        self.parameters = run_context.trained_parameters
        if Capability.GRAD_NORM in self.needs:
            self._norms += [run_context.grad_norm, run_context.grad_norm_clipped]
        if Capability.PARAMETER_GRAD_NORMS in self.needs:
            norms = run_context.parameter_grad_norms
            if norms is None or set(norms) != set(self.parameters):
                self._trouble.append("parameter_grad_norms has the names of trained_parameters")
        if run_context.step == 1:
            self._check_probing(run_context)

    def _check_probing(self, run_context: RunContext) -> None:
        self._explanation = run_context.explain_nonfinite()
        try:
            run_context.attention(1)
            has_probing = True
        except RunStateError:
            has_probing = False
        if has_probing is not (Capability.PROBING in self.needs):
            self._trouble.append("a step has the part probing if it has the capability, and not otherwise")

    def check(self) -> None:
        """Check what was read in a run without accumulation."""
        assert not self._trouble, self._trouble[0]
        expected = [(number, True) for number in range(1, len(self._global_steps) + 1)]
        assert self._global_steps == expected, (
            "a step counts its updates in global_step, and is_update_step is true where one is made"
        )
        assert all(isinstance(rate, float) for rate in self._rates), "a step has a learning_rate"
        assert isinstance(self._explanation, str), "a step's explain_nonfinite gives a text"
        assert all(isinstance(norm, float) for norm in self._norms), "grad_norm is a float at an update"
        has_gradients = bool(self.parameters)
        assert has_gradients is bool(self.needs & _GRADIENTS), (
            "a step has gradients, and with them trained_parameters, if it has the capability of norms, "
            "and not otherwise"
        )
