"""The acceptance test of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.model import Model
from dualtrain.protocol import Backend
from dualtrain.testing.recording import RecordingCallback, assert_trace


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
