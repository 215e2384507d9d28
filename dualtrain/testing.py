"""Tools to test callbacks and backends with; the project's own tests use them too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dualtrain.bus import EventBus
from dualtrain.callback import Callback
from dualtrain.context import CallbackParams, RunContext
from dualtrain.errors import ArgumentValueError
from dualtrain.events import LIFECYCLE, Event
from dualtrain.loop import is_due, run_evaluation, run_training
from dualtrain.model import Model
from dualtrain.protocol import AttentionLayer, Backend, BatchShape, Capability, LearningRate, Rate


class TracedEvent(NamedTuple):
    """What was seen at one event."""

    event: str
    epoch: int | None
    step: int | None
    batch_num: Any
    mode: str | None
    keys: frozenset[str]
    """The parameters that were there."""


class RecordingCallback(Callback):
    """Record every event of a run, in order, as ``trace``."""

    def __init__(self) -> None:
        self.trace: list[TracedEvent] = []

    def _record(self, event: Event, run_context: Any) -> None:
        params = run_context.original_args()
        self.trace.append(
            TracedEvent(
                event.value,
                params.get("cur_epoch_num"),
                params.get("cur_step_num"),
                params.get("batch_num"),
                params.get("mode"),
                frozenset(params),
            )
        )

    @property
    def names(self) -> list[str]:
        """The events' names alone."""
        return [traced.event for traced in self.trace]


def _recorder(event: Event) -> Callable[..., None]:
    def hook(self: RecordingCallback, run_context: RunContext, *error: BaseException) -> None:
        self._record(event, run_context)

    hook.__name__ = event.value
    return hook


for _event in (*LIFECYCLE, Event.EXCEPTION, Event.TEARDOWN):
    setattr(RecordingCallback, _event.value, _recorder(_event))


def assert_trace(recording: RecordingCallback, expected: Iterable[Any]) -> None:
    """Check a recorded trace, saying where it first differs.

    Args:
        recording: What was recorded.
        expected: For each event its name, or a tuple that is compared with the beginning of
            ``(event, epoch, step, batch_num, mode, keys)``.

    Raises:
        AssertionError: Names the first event that differs, with the ones before it.
    """
    wanted = [
        (e.value,) if isinstance(e, Event) else (e,) if isinstance(e, str) else tuple(e) for e in expected
    ]
    seen = [tuple(traced) for traced in recording.trace]
    for i, want in enumerate(wanted):
        got = seen[i][: len(want)] if i < len(seen) else "the end"
        if got != want:
            raise AssertionError(
                f"event {i}: expected {want}, got {got}; before it: {recording.names[:i][-5:]}"
            )
    if len(seen) > len(wanted):
        raise AssertionError(f"expected the end after {len(wanted)} events, got {seen[len(wanted)]}")


class _FakeLearningRate:
    """One learning rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def read(self) -> Rate:
        return self.rate

    def write(self, rate: Rate) -> None:
        self.rate = float(rate)  # type: ignore[arg-type]

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        self.rate = max(self.rate * factor, min(min_lr, self.rate))
        return self.rate


class _FakeBackend:
    """A backend without a framework, for tensors that are plain numbers."""

    name = "fake"

    def __str__(self) -> str:
        return self.name

    def owns(self, obj: Any) -> bool:
        return False

    def model_class(self) -> type:
        return FakeLoop

    def capabilities(self) -> frozenset[Capability]:
        return frozenset(
            {
                Capability.STEP_EVENTS,
                Capability.GRAD_NORM,
                Capability.PARAMETER_GRAD_NORMS,
                Capability.ACCUMULATION,
                Capability.SKIP_NONFINITE,
                Capability.CALLBACK_TIMES,
                Capability.EAGER,
                Capability.THREADS,
            }
        )

    def describe_mode(self) -> str:
        return "the fake loop"

    def version(self) -> str:
        return "0"

    def to_float(self, value: Any) -> float:
        return float(value.mean() if hasattr(value, "mean") else value)

    def to_numpy(self, value: Any) -> Any:
        import numpy as np

        return np.asarray(value)

    def batch_shape(self, batch: Any) -> BatchShape | None:
        array = self.to_numpy(batch)
        return BatchShape(array.shape, array.dtype.kind in "iu")

    def learning_rate(self, optimizer: Any) -> LearningRate:
        return _FakeLearningRate(float(optimizer))

    def weights(self, network: Any) -> dict[str, Any]:
        return {}

    def assign_weights(self, network: Any, weights: dict[str, Any]) -> None:
        """Do nothing: there are none."""

    def copy_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {name: list(values) for name, values in parameters.items()}

    def parameter_changes(
        self, before: dict[str, Any], now: dict[str, Any]
    ) -> dict[str, tuple[float, float]]:
        return {
            name: (math.hypot(*values), math.dist(now[name], values)) for name, values in before.items()
        }

    def rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1

    def any_rank(self, flag: bool) -> bool:
        return flag


class FakeLoop:
    """Run callbacks through the real loop and bus, without a framework, with losses that you give.

    Nothing is trained. Where a callback asks for ``Capability.SKIP_NONFINITE``, a window with a loss that
    is not finite ends in a step that is skipped.

    Args:
        losses: The losses of an epoch's steps, the same in every epoch.
        epochs: How many epochs.
        lr: The learning rate that callbacks read and set.
        evaluations: The results of the evaluations, one mapping each, in turn; None: no
            evaluation. Each evaluation has one batch.
        valid_frequency: As in ``Model.fit``.
        loss_fn: What callbacks find as ``loss_fn``; it is not called.
        parameters: Name -> numbers, which plain gradient descent moves by ``lr`` times the gradient
            at each update, anew from these values in each run. None: ``{"weight": [1.0]}``.
        gradients: The gradients of parameters, the same at every update; 1 where none is given.

    Attributes:
        learning_rates: The learning rate that each step was taken with.
    """

    def __init__(
        self,
        losses: Sequence[float],
        *,
        epochs: int = 1,
        lr: float = 0.1,
        evaluations: Sequence[dict[str, Any]] | None = None,
        valid_frequency: int | list[int] = 1,
        loss_fn: Any = None,
        parameters: Mapping[str, Sequence[float]] | None = None,
        gradients: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.losses = losses
        self.epochs = epochs
        self.evaluations = evaluations
        self.valid_frequency = valid_frequency
        self.loss_fn = loss_fn
        self.parameters = {"weight": [1.0]} if parameters is None else parameters
        self.gradients = {**{n: [1.0] * len(v) for n, v in self.parameters.items()}, **(gradients or {})}
        self._moved: dict[str, list[float]] = {}
        self._requested = self._measured = False
        self.learning_rate: LearningRate | None = _FakeLearningRate(lr)
        self.global_step = 0
        self.accumulate_steps = 1
        self.is_update_step = True
        self.step_skipped = False
        self.loss_scale: float | None = None
        self.learning_rates: list[Rate] = []

    def grad_norm(self) -> float | None:
        """Return the norm of all the gradients, at an update."""
        if not self.is_update_step:
            return None
        return math.hypot(*(value for name in self._moved for value in self.gradients[name]))

    def grad_norm_clipped(self) -> float | None:
        """Return the same: nothing is clipped."""
        return self.grad_norm()

    def attention(self, samples: int | None, function: Any) -> list[AttentionLayer]:
        """There is no network."""
        return []

    def trained_parameters(self) -> dict[str, list[float]]:
        """Return the parameters where descent has brought them."""
        return self._moved

    def request_parameter_grad_norms(self) -> None:
        """Ask for the norms at the next update."""
        self._requested = True

    def parameter_grad_norms(self) -> dict[str, float] | None:
        """Return the norms of the gradients that were given, if they were asked for."""
        if not self._measured:
            return None
        return {name: math.hypot(*self.gradients[name]) for name in self._moved}

    def explain_nonfinite(self, batch: Any) -> str:
        """There is no network to explain anything."""
        return ""

    def zero_grad(self, optimizer: Any) -> None:
        """Do nothing."""

    def backward(self, loss: Any) -> None:
        """Do nothing."""

    def optimizer_step(self, optimizer: Any) -> None:
        """Do nothing."""

    def run(self, callbacks: Any = None) -> RunContext:
        """Run once and return the context."""
        self.global_step, self.learning_rates, self.accumulate_steps = 0, [], 1
        self._moved = {name: list(values) for name, values in self.parameters.items()}
        self._requested = self._measured = False
        self.step_skipped = False
        bus = EventBus(callbacks)
        params = CallbackParams(
            mode="train",
            cur_step_num=0,
            epoch_num=self.epochs,
            batch_num=len(self.losses),
            list_callback=[],
            network=None,
            loss_fn=self.loss_fn,
        )
        backend = _FakeBackend()
        due = sum(is_due(epoch, self.valid_frequency) for epoch in range(1, self.epochs + 1))
        context = RunContext(
            params,
            backend=backend,
            step=self,
            callbacks=bus.callbacks,
            evaluations=0 if self.evaluations is None else due,
        )
        bus.check_needs(backend.capabilities(), backend.describe_mode())
        guarded = Capability.SKIP_NONFINITE in bus.asked_for()
        losses_of_window: list[float] = []
        results = iter(self.evaluations or ())

        def step(loss: float) -> float:
            assert self.learning_rate is not None
            rate = self.learning_rate.read()
            self.learning_rates.append(rate)
            done = context.step_in_epoch or 0
            self.is_update_step = done == len(self.losses) or done % self.accumulate_steps == 0
            losses_of_window.append(loss)
            self.step_skipped = False
            self._measured = self._requested and self.is_update_step
            if self.is_update_step:
                if guarded:
                    finite = [math.isfinite(backend.to_float(one)) for one in losses_of_window]
                    self.step_skipped = not all(finite)
                self._requested = False
                losses_of_window.clear()
                if not self.step_skipped:
                    self.global_step += 1
                    self._descend(rate)
            return loss

        def evaluate() -> None:
            found = next(results, None)
            if found is None:
                raise ArgumentValueError(
                    f"FakeLoop(evaluations=...) has {len(self.evaluations or ())} results, and one more "
                    f"evaluation is due at epoch {context.epoch}: give one for each."
                )
            result = dict(found)
            training = {key: params[key] for key in ("cur_step_num", "batch_num", "net_outputs")}
            params.update(mode="eval", cur_step_num=0, batch_num=1)

            def finish() -> None:
                params.update(metrics=result, eval_results=result)

            run_evaluation(context, bus, lambda batch: batch, [0.0], lambda outputs: None, finish)
            params.update(training, mode="train")

        with bus.lifecycle(context):
            run_training(
                context,
                bus,
                step,
                self.losses,
                epoch=self.epochs,
                evaluate=None if self.evaluations is None else evaluate,
                valid_frequency=self.valid_frequency,
            )
        return context

    def _descend(self, lr: Any) -> None:
        for name, values in self._moved.items():
            values[:] = [v - lr * g for v, g in zip(values, self.gradients[name], strict=True)]


def backend_contract(
    backend: Backend, make: Callable[[], tuple[Any, Any, Any]], batches: Sequence[Any]
) -> None:
    """Check that a backend keeps the contract: the acceptance test of a new one.

    Args:
        backend: The backend.
        make: Makes a network, a loss function and an optimizer with one constant learning rate.
        batches: Batches ``(inputs, label)`` that the network can be trained on.

    Raises:
        AssertionError: Says which part of the contract does not hold.
    """
    network, loss_fn, optimizer = make()
    assert isinstance(backend, Backend), "it lacks a verb of dualtrain.protocol.Backend"
    assert str(backend) == backend.name, "str(backend) has to be its name"
    assert backend.owns(network), "it has to own its networks"
    assert backend.owns(optimizer), "it has to own its optimizers"
    assert not backend.owns(object()), "it must not own just anything"
    assert isinstance(backend.capabilities(), frozenset), "capabilities() gives a frozenset of Capability"
    for verb in ("describe_mode", "version"):
        told = getattr(backend, verb)()
        assert told and type(told) is str, f"{verb}() gives a text that is not empty"  # noqa: PT018
    rank, world_size = backend.rank(), backend.world_size()
    assert 0 <= rank < world_size, f"rank() is from 0 to world_size() - 1, but is {rank} of {world_size}"
    assert backend.any_rank(True), "any_rank(True) is true, since it is true on this rank"
    assert not backend.any_rank(False), "any_rank(False) is false where no rank says true"

    rate = backend.learning_rate(optimizer)
    before = rate.read()
    assert isinstance(before, float), "a single constant learning rate reads as a float"
    rate.write(before / 2)
    assert abs(float(rate.read()) - before / 2) < 1e-6, "a learning rate reads back as it was written"  # type: ignore[arg-type]
    rate.scale(2.0)
    assert abs(float(rate.read()) - before) < 1e-6, "scale multiplies the learning rate"  # type: ignore[arg-type]

    model = Model(network, loss_fn, optimizer)
    assert isinstance(model, Model), "what Model returns has to be a dualtrain.Model"
    assert isinstance(model, backend.model_class()), "model_class() is the class of what Model returns"
    recording, losses = RecordingCallback(), _LossesOf(backend)
    saved = _weights_of(backend, network)
    assert saved, "weights(network) has the network's weights by name"
    model.fit(2, batches, batches[:1], callbacks=[recording, losses])
    evaluation = ["on_eval_begin", "on_eval_epoch_begin", "on_eval_step_begin", "on_eval_step_end"]
    epoch = [
        "on_train_epoch_begin",
        *["on_train_step_begin", "on_train_step_end"] * len(batches),
        *evaluation,
        "on_eval_epoch_end",
        "on_eval_end",
        "on_train_epoch_end",
    ]
    assert_trace(recording, ["on_train_begin", *epoch * 2, "on_train_end", "on_teardown"])
    assert losses.shapes == [tuple(batch[0].shape) for batch in batches] * 2, (
        "batch_shape gives the shape of a batch's first array"
    )
    assert isinstance(losses.explanation, str), "a step's explain_nonfinite gives a text"
    assert len(losses.losses) == 2 * len(batches)
    assert all(isinstance(loss, float) for loss in losses.losses), "losses read as floats"
    exact = (
        all(isinstance(value, float) for value in losses.converted) and losses.converted == losses.losses
    )
    assert exact, "to_float gives a scalar tensor's value as a float"
    for array, loss in zip(losses.arrays, losses.losses, strict=True):
        whole = type(array).__module__ == "numpy" and abs(float(array.mean()) - loss) < 1e-6
        assert whole, "to_numpy gives a tensor's values as a numpy array"
    backend.assign_weights(network, saved)
    again = _weights_of(backend, network)
    same = list(again) == list(saved) and all((again[name] == saved[name]).all() for name in saved)
    assert same, "assign_weights puts back what weights returned"
    parameters = losses.parameters
    assert parameters, "trained_parameters has the parameters that the optimizer trains"
    assert set(parameters) <= set(saved), "trained_parameters has the names of weights(network)"
    sizes = {name: float((array.astype(float) ** 2).sum() ** 0.5) for name, array in saved.items()}
    zeros = {name: array * 0 for name, array in saved.items()}
    copied = backend.copy_parameters(parameters)
    backend.assign_weights(network, zeros)
    changes = backend.parameter_changes(copied, parameters)
    told = set(changes) == set(parameters) and all(
        abs(norm - sizes[name]) < 1e-5 * sizes[name] + 1e-30 for name in changes for norm in changes[name]
    )
    assert told, "parameter_changes gives the norms of parameters before and of their change to zero"
    backend.assign_weights(network, saved)
    assert list(model.eval(batches[:1])) == ["eval_loss"], "without metrics eval gives eval_loss alone"


def _weights_of(backend: Backend, network: Any) -> dict[str, Any]:
    return {name: backend.to_numpy(value) for name, value in backend.weights(network).items()}


class _LossesOf(Callback):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.losses: list[Any] = []
        self.converted: list[Any] = []
        self.arrays: list[Any] = []
        self.parameters: dict[str, Any] = {}
        self.shapes: list[Any] = []
        self.explanation: Any = None

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.step == 1:
            self.explanation = run_context.explain_nonfinite()
        told = self._backend.batch_shape(run_context.original_args()["train_dataset_element"])
        self.shapes.append(None if told is None else tuple(told.shape))
        self.losses.append(run_context.loss)
        self.converted.append(self._backend.to_float(run_context.outputs))
        self.arrays.append(self._backend.to_numpy(run_context.outputs))
        self.parameters = run_context.trained_parameters
