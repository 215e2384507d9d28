"""Call a MindSpore network outside of the training step, and restore its state afterwards."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from dualtrain.backends._attention import calling_module, describe, not_probabilities
from dualtrain.backends.mindspore.borrowed import no_grad, replaced_softmax, same_hook_version
from dualtrain.backends.mindspore.tensors import to_numpy
from dualtrain.protocol import AttentionLayer, Native

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
"""The containers in a Cell's attributes that are restored; subclasses may not allow it."""


def sample_attention(
    network: Native,
    forward: Callable[[Native], Any],
    batch: tuple[Native, ...],
    samples: int | None,
    function: Callable[[Native], Sequence[Native]] | None,
) -> list[AttentionLayer]:
    """Return the statistics of each layer's attention on samples of a batch.

    Args:
        network: The network.
        forward: Calls the network with the columns of a batch.
        batch: The columns.
        samples: The number of samples to use; None: all.
        function: Returns the probabilities of each layer for the columns, of shape (samples, heads,
            queries, keys). None: attention is detected in the forward pass.
    """
    with out_of_band(network):
        batch = _first_samples(batch, samples)
        if function is not None:
            return [_describe_given(i, given) for i, given in enumerate(function(batch))]
        with _attention_watched(network) as layers:
            forward(batch)
        return layers


@contextmanager
def out_of_band(network: Native, *, training: bool = False) -> Iterator[None]:
    """Restore gradients, random state, buffers, attributes and flags of a network after calls of it.

    MindSpore is in PYNATIVE mode meanwhile: GRAPH mode would hide intermediate values and recompile.
    The network is in evaluation mode, and no gradients are recorded. With ``training`` each Cell keeps
    its own mode, but dropouts are off: the state of their random numbers is inside MindSpore's
    kernels, and can be neither read nor restored.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    attributes = [dict(vars(cell)) for cell in cells]
    containers = [
        (value, value.copy()) for own in attributes for value in own.values() if type(value) in _CONTAINERS
    ]
    flags = [cell.training for cell in cells]
    values = [(p, p.asnumpy().copy()) for p in network.get_parameters() if not p.requires_grad]
    states = random.getstate(), np.random.get_state(), mindspore.get_rng_state()
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    try:
        # Adding and removing hooks would recompile the graph, and MindSpore 2.7's dropout would restart
        # its random numbers.
        with same_hook_version():
            if training:
                for cell in cells:
                    if isinstance(cell, _DROPOUTS):
                        cell.set_train(False)
                yield
            else:
                network.set_train(False)
                with no_grad():
                    yield
    finally:
        for parameter, value in values:
            if not np.array_equal(parameter.asnumpy(), value, equal_nan=value.dtype.kind == "f"):
                ops.assign(parameter, Tensor(value))
        for cell, own, flag in zip(cells, attributes, flags, strict=True):
            cell.add_flags(training=flag)
            vars(cell).clear()
            vars(cell).update(own)
        for container, content in containers:
            container.clear()
            (container.update if hasattr(container, "update") else container.extend)(content)
        mindspore.set_context(mode=mode)
        random.setstate(states[0])
        np.random.set_state(states[1])
        mindspore.set_rng_state(states[2])


@contextmanager
def _attention_watched(network: Native) -> Iterator[list[AttentionLayer]]:
    """Record each softmax along the last of four dimensions as attention.

    All of MindSpore's attention calls one of two functions, which are replaced inside this context.
    """
    names = {id(cell): name for name, cell in network.cells_and_names()}
    layers: list[AttentionLayer] = []
    method = ops.Softmax.__call__

    def watch(scores: Native, axis: Any) -> None:
        last = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
        if scores.ndim == 4 and last in (-1, 3):
            layers.append(describe(len(layers), calling_module(names), to_numpy(scores)))

    def watched(function: Callable[..., Native]) -> Callable[..., Native]:
        def softmax(scores: Native, axis: Any) -> Native:
            watch(scores, axis)
            return function(scores, axis)

        return softmax

    def watched_method(softmax: Native, scores: Native) -> Native:
        watch(scores, softmax.axis)
        return method(softmax, scores)

    with replaced_softmax(watched):
        ops.Softmax.__call__ = watched_method
        try:
            yield layers
        finally:
            ops.Softmax.__call__ = method


def _describe_given(layer: int, probabilities: Native) -> AttentionLayer:
    """Return the statistics of the attention returned by the user's ``attention_fn``."""
    if not isinstance(probabilities, Tensor) or probabilities.ndim != 4:
        raise not_probabilities(layer, probabilities)
    values = to_numpy(probabilities).astype(np.float64)
    sums = values.sum(-1)
    one = (np.abs(sums - 1) < 0.01) | (sums == 0) | np.isnan(sums)  # a network that diverges has NaN
    if not one.all() or (values < 0).any():
        raise not_probabilities(layer, probabilities)
    scores = np.log(values, out=np.full_like(values, -np.inf), where=~(values <= 0))
    return describe(layer, "", scores)


def _first_samples(batch: tuple[Native, ...], samples: int | None) -> tuple[Native, ...]:
    """Return the first samples of a batch, if all its columns have the same length."""
    sizes = {column.shape[0] for column in batch if column.ndim}
    if samples is None or len(sizes) != 1 or sizes.pop() <= samples:
        return tuple(batch)
    return tuple(column[:samples] if column.ndim else column for column in batch)
