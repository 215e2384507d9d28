"""The acceptance test of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualtrain.model import Model
from dualtrain.protocol import Backend, ParameterCopies, Ranks, Weights
from dualtrain.testing.run_contract import check_runs

_PARTS: dict[type, tuple[str, ...]] = {
    Weights: ("weights", "assign_weights"),
    ParameterCopies: ("copy_parameters", "parameter_changes"),
    Ranks: ("rank", "world_size", "any_rank"),
}


def backend_contract(
    backend: Backend, make: Callable[[], tuple[Any, Any, Any]], batches: Sequence[Any]
) -> None:
    """Check that a backend keeps the contract: the acceptance test of a new one.

    Optional parts (``Weights``, ``ParameterCopies``, ``Ranks``, a step's gradients, accumulation and
    probing) are checked where the backend has them, or has their capability.

    Args:
        backend: The backend.
        make: Makes a network, a loss function and an optimizer with one constant learning rate.
        batches: Batches ``(inputs, label)`` that the network can be trained on; at least two.

    Raises:
        AssertionError: Says which part of the contract does not hold.
    """
    assert len(batches) > 1, "backend_contract(batches=...) needs at least two batches"
    network, loss_fn, optimizer = make()
    _check_core(backend, network, optimizer)
    for part, verbs in _PARTS.items():
        missing = [verb for verb in verbs if not hasattr(backend, verb)]
        assert not missing or len(missing) == len(verbs), (
            f"a backend has all verbs of {part.__name__} or none, but {', '.join(missing)} is missing"
        )
    if isinstance(backend, Ranks):
        _check_ranks(backend)
    _check_rate(backend, optimizer)
    model_class: Any = backend.model_class()
    model = Model(network, loss_fn, optimizer)
    assert isinstance(model, Model), "what Model returns has to be a dualtrain.Model"
    assert isinstance(model, model_class), "model_class() is the class of what Model returns"
    saved = _weights_of(backend, network)
    if isinstance(backend, Weights):
        assert saved, "weights(network) has the network's weights by name"
    parameters = check_runs(backend, model, batches)
    if isinstance(backend, Weights):
        _check_weights(backend, network, saved)
        assert set(parameters) <= set(saved), "trained_parameters has the names of weights(network)"
    if isinstance(backend, ParameterCopies):
        assert parameters, "trained_parameters has the parameters that parameter_changes is called with"
        _check_changes(backend, network, parameters)


def _check_core(backend: Backend, network: Any, optimizer: Any) -> None:
    assert isinstance(backend, Backend), "it lacks a verb of dualtrain.protocol.Backend"
    assert str(backend) == backend.name, "str(backend) has to be its name"
    assert backend.owns(network), "it has to own its networks"
    assert backend.owns(optimizer), "it has to own its optimizers"
    assert not backend.owns(object()), "it must not own just anything"
    assert isinstance(backend.capabilities(), frozenset), "capabilities() gives a frozenset of Capability"
    for verb in ("describe_mode", "version"):
        told = getattr(backend, verb)()
        assert told and type(told) is str, f"{verb}() gives a text that is not empty"  # noqa: PT018


def _check_ranks(backend: Ranks) -> None:
    rank, world_size = backend.rank(), backend.world_size()
    assert 0 <= rank < world_size, f"rank() is from 0 to world_size() - 1, but is {rank} of {world_size}"
    assert backend.any_rank(True), "any_rank(True) is true, since it is true on this rank"
    assert not backend.any_rank(False), "any_rank(False) is false where no rank says true"


def _check_rate(backend: Backend, optimizer: Any) -> None:
    rate = backend.learning_rate(optimizer)
    before = rate.read()
    assert isinstance(before, float), "a single constant learning rate reads as a float"
    rate.write(before / 2)
    assert abs(float(rate.read()) - before / 2) < 1e-6, "a learning rate reads back as it was written"  # type: ignore[arg-type]
    rate.scale(2.0)
    assert abs(float(rate.read()) - before) < 1e-6, "scale multiplies the learning rate"  # type: ignore[arg-type]


def _weights_of(backend: Backend, network: Any) -> dict[str, Any]:
    native = backend.weights(network) if isinstance(backend, Weights) else {}
    return {name: backend.to_numpy(value) for name, value in native.items()}


def _check_weights(backend: Backend, network: Any, saved: dict[str, Any]) -> None:
    assert isinstance(backend, Weights)
    backend.assign_weights(network, saved)
    again = _weights_of(backend, network)
    same = list(again) == list(saved) and all((again[name] == saved[name]).all() for name in saved)
    assert same, "assign_weights restores what weights returned"


def _check_changes(backend: Backend, network: Any, parameters: dict[str, Any]) -> None:
    """Move the parameters to zero where the backend can, and compare the norms."""
    assert isinstance(backend, ParameterCopies)
    arrays = {name: backend.to_numpy(value).astype(float) for name, value in parameters.items()}
    sizes = {name: float((array**2).sum() ** 0.5) for name, array in arrays.items()}
    copied = backend.copy_parameters(parameters)
    moved = isinstance(backend, Weights)
    if isinstance(backend, Weights):
        zeros = {name: array * 0 for name, array in _weights_of(backend, network).items()}
        backend.assign_weights(network, zeros)
    changes = backend.parameter_changes(copied, parameters)
    told = set(changes) == set(parameters) and all(
        abs(norm - sizes[name]) < 1e-5 * sizes[name] + 1e-30
        and abs(change - moved * sizes[name]) < 1e-5 * sizes[name] + 1e-30
        for name, (norm, change) in changes.items()
    )
    assert told, "parameter_changes gives the norms of parameters before and of their change to zero"
