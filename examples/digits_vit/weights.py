"""Initial weights for both frameworks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights for parameters with PyTorch's names: matrices, biases, norms, positions."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        if name.endswith("bias"):
            values = np.zeros(shape)
        elif len(shape) == 1:  # the scale of a LayerNorm
            values = np.ones(shape)
        elif name.endswith("weight"):  # both frameworks' own choice for a linear layer
            bound = shape[1] ** -0.5
            values = generator.uniform(-bound, bound, shape)
        else:
            values = generator.normal(0, 0.02, shape)
        weights[name] = values.astype(np.float32)
    return weights
