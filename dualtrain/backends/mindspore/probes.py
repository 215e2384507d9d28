"""Look into a MindSpore network from outside: an extra forward pass that leaves everything as it was."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import _no_grad, hook_handle
from mindspore.ops.function import nn_func

from dualtrain.backends._attention import calling_module, describe, not_probabilities
from dualtrain.protocol import AttentionLayer, Native

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
"""What a Cell may keep things in that is put back; subclasses may refuse to be changed."""


def sample_attention(
    network: Native,
    forward: Callable[[Native], Any],
    batch: tuple[Native, ...],
    samples: int | None,
    function: Callable[[Native], Sequence[Native]] | None,
) -> list[AttentionLayer]:
    """Describe the attention of each layer on samples of a batch.

    Args:
        network: The network.
        forward: Takes the columns of a batch and calls the network with them.
        batch: The columns.
        samples: How many of its samples are taken; None: all.
        function: Takes the columns and returns the probabilities of each layer, of shape (samples,
            heads, queries, keys). None: they are found in the forward pass.
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
    """Let a network be called without a trace: gradients, random state, buffers, attributes, flags.

    It is called in PYNATIVE mode, whatever mode MindSpore is in: GRAPH mode shows nothing of what
    happens inside, and a graph that is compiled already stays so. In evaluation mode and without
    gradients; or, for ``training``, each Cell in the mode that it is in, except that dropouts let
    everything through: the state of their random numbers is inside MindSpore's kernels, where it can be
    neither read nor put back.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    attributes = [dict(vars(cell)) for cell in cells]
    containers = [
        (value, value.copy()) for own in attributes for value in own.values() if type(value) in _CONTAINERS
    ]
    flags = [cell.training for cell in cells]
    values = [(p, p.asnumpy().copy()) for p in network.get_parameters() if not p.requires_grad]
    states = random.getstate(), np.random.get_state(), mindspore.get_rng_state()
    hooks = hook_handle._HOOK_VERSION
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    try:
        if training:
            for cell in cells:
                if isinstance(cell, _DROPOUTS):
                    cell.set_train(False)
            yield
        else:
            network.set_train(False)
            with _no_grad():
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
        # Hooks that have come and gone would have the graph compiled anew, in which MindSpore 2.7's dropout
        # begins its random numbers again.
        hook_handle._HOOK_VERSION = hooks
        mindspore.set_context(mode=mode)
        random.setstate(states[0])
        np.random.set_state(states[1])
        mindspore.set_rng_state(states[2])


@contextmanager
def _attention_watched(network: Native) -> Iterator[list[AttentionLayer]]:
    """Describe each softmax along the last of four dimensions, which is taken for attention.

    All of MindSpore's attention goes through one of two functions, which are replaced meanwhile.
    """
    names = {id(cell): name for name, cell in network.cells_and_names()}
    layers: list[AttentionLayer] = []
    function, method = nn_func.softmax_impl, ops.Softmax.__call__

    def watch(scores: Native, axis: Any) -> None:
        last = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
        if scores.ndim == 4 and last in (-1, 3):
            layers.append(describe(len(layers), calling_module(names), _on_host(scores)))

    def watched_function(scores: Native, axis: Any) -> Native:
        watch(scores, axis)
        return function(scores, axis)

    def watched_method(softmax: Native, scores: Native) -> Native:
        watch(scores, softmax.axis)
        return method(softmax, scores)

    nn_func.softmax_impl, ops.Softmax.__call__ = watched_function, watched_method
    try:
        yield layers
    finally:
        nn_func.softmax_impl, ops.Softmax.__call__ = function, method


def _describe_given(layer: int, probabilities: Native) -> AttentionLayer:
    """Describe the attention that a user's function has given."""
    if not isinstance(probabilities, Tensor) or probabilities.ndim != 4:
        raise not_probabilities(layer, probabilities)
    values = _on_host(probabilities).astype(np.float64)
    sums = values.sum(-1)
    one = (np.abs(sums - 1) < 0.01) | (sums == 0) | np.isnan(sums)  # a network that diverges has NaN
    if not one.all() or (values < 0).any():
        raise not_probabilities(layer, probabilities)
    scores = np.log(values, out=np.full_like(values, -np.inf), where=~(values <= 0))
    return describe(layer, "", scores)


def _first_samples(batch: tuple[Native, ...], samples: int | None) -> tuple[Native, ...]:
    """Return the first samples of a batch, if all its columns agree on their number."""
    sizes = {column.shape[0] for column in batch if column.ndim}
    if samples is None or len(sizes) != 1 or sizes.pop() <= samples:
        return tuple(batch)
    return tuple(column[:samples] if column.ndim else column for column in batch)


def _on_host(tensor: Native) -> Any:
    return (tensor.astype(mindspore.float32) if tensor.dtype == mindspore.bfloat16 else tensor).asnumpy()
