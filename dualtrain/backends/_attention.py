"""The statistics of attention on the host, as defined by ``dualtrain.protocol.AttentionLayer``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import AttentionLayer

MASKED = -9000.0
"""Scores up to this value are masked: frameworks use -inf, the smallest float, -1e9 and -1e4."""


def describe(layer: int, name: str, scores: Any) -> AttentionLayer:
    """Return the statistics of a layer's attention.

    Args:
        layer: The layer's index.
        name: The name of its module.
        scores: The input of the softmax, of shape (samples, heads, queries, keys).
    """
    _, heads, queries, keys = scores.shape
    one_sequence = queries == keys
    positions = np.arange(keys)
    rows = np.zeros((heads, 1))
    sums = np.zeros((heads, 4))
    per_key = np.zeros((heads, keys))
    for sample in scores:
        sample = np.asarray(sample, np.float64)
        visible = ~(sample <= MASKED)  # NaN is not a mask
        real = visible.any(axis=(0, 1))
        counted = visible.any(axis=-1)
        if one_sequence:
            counted &= real
        exponentials = np.exp(sample - sample.max(axis=-1, keepdims=True, initial=MASKED))
        exponentials = np.where(counted[..., None], exponentials, 0.0)
        p = exponentials / np.maximum(exponentials.sum(axis=-1, keepdims=True), 1e-30)
        rows += counted.sum(axis=-1, keepdims=True)
        surprise = np.log(p, out=np.zeros_like(p), where=~(p <= 0))
        sums[:, 0] -= (p * surprise).sum(axis=(1, 2))
        sums[:, 1] += p.max(axis=-1).sum(axis=-1)
        sums[:, 2] += p[..., real.argmax()].sum(axis=-1)
        if one_sequence:
            sums[:, 3] += (p * np.abs(positions[:, None] - positions)).sum(axis=(1, 2))
        per_key += p.sum(axis=1)
    return finished(layer, name, rows, sums, per_key, one_sequence)


def finished(
    layer: int, name: str, rows: Any, sums: Any, per_key: Any, one_sequence: bool
) -> AttentionLayer:
    """Divide sums over rows by the number of rows; a head without rows has NaN."""
    rows = np.where(rows > 0, rows, np.nan)
    entropy, maximum, first, distance = (tuple(means) for means in (sums / rows).T.tolist())
    return AttentionLayer(
        layer=layer,
        name=name,
        entropy=entropy,
        maximum=maximum,
        first=first,
        distance=distance if one_sequence else None,
        per_key=(per_key / rows).astype(np.float32),
    )


def not_probabilities(layer: int, given: Any) -> ArgumentValueError:
    """Return the error for an ``attention_fn`` whose result is not attention."""
    shape = getattr(given, "shape", None)
    return ArgumentValueError(
        f"attention_fn has to return a tensor of probabilities for each layer, of shape (samples, heads, "
        f"queries, keys) and with rows that sum to 1, but item {layer} is "
        f"{type(given).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}."
    )


def calling_module(names: Mapping[int, str]) -> str:
    """Return the name of the innermost module with a method on the call stack.

    Args:
        names: The modules' names by ``id``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return ""
