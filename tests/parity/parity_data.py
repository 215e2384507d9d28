"""The weights and batches that both engines are given, made by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


def initial_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return float32 weights; biases and LayerNorms are not left at 0 and 1."""
    generator = np.random.default_rng(1)
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        if len(shape) == 2:
            values = generator.uniform(-1, 1, shape) * shape[1] ** -0.5
        else:
            is_scale = name.endswith("weight")
            values = is_scale + generator.normal(0, 0.02, shape)
        weights[name] = values.astype(np.float32)
    return weights


def batches(network: str, count: int, label_dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of 32 random samples that a linear map sorts into 10 classes."""
    generator = np.random.default_rng(2)
    shape = {"mlp": (16,), "transformer": (8, 8)}[network]
    teacher = generator.normal(size=(shape[-1], 10))
    result = []
    for _ in range(count):
        inputs = generator.normal(size=(32, *shape)).astype(np.float32)
        features = inputs if inputs.ndim == 2 else inputs.mean(1)
        result.append((inputs, (features @ teacher).argmax(1).astype(label_dtype)))
    return result
