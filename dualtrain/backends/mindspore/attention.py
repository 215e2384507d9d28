"""Describe the attention that a MindSpore network computes in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from dualtrain.backends._attention import calling_module, describe, not_probabilities
from dualtrain.backends.mindspore.borrowed import replaced_softmax
from dualtrain.backends.mindspore.tensors import to_numpy
from dualtrain.protocol import AttentionLayer, Native


@contextmanager
def attention_watched(network: Native) -> Iterator[list[AttentionLayer]]:
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


def describe_given(layer: int, probabilities: Native) -> AttentionLayer:
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
