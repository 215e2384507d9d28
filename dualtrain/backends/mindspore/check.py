"""The check that ``train_step`` returns a loss with a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import nn

from dualtrain.backends.mindspore.cells import has_gradient
from dualtrain.backends.mindspore.out_of_band import out_of_band
from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import Native


class GradientCheck:
    """Check, around the first step of a run, that the loss of ``train_step`` has a gradient.

    The gradient is computed if no weight has changed, or if weight decay changes weights in any case. The
    backward pass starts from NaN, so that a gradient that is zero by chance passes. The network is restored
    afterwards.

    Args:
        network: The network.
        cell: ``train_step`` as a Cell.
        optimizer: The optimizer, whose weights need gradients.
    """

    def __init__(self, network: nn.Cell, cell: nn.Cell, optimizer: Native) -> None:
        self._network = network
        self._cell = cell
        self._weights = optimizer.parameters
        self._decays = bool(getattr(optimizer, "exec_weight_decay", False))
        self._before = [self._sample(weight) for weight in self._weights]

    def before_first_step(self, batch: Native) -> None:
        """Check if changes of the weights are no evidence, because of weight decay."""
        if self._decays:
            self._check(batch)

    def after_first_step(self, batch: Native) -> None:
        """Check if no weight has changed."""
        still = (
            np.array_equal(b, self._sample(w)) for b, w in zip(self._before, self._weights, strict=True)
        )
        if not self._decays and all(still):
            self._check(batch)

    def _check(self, batch: Native) -> None:
        with out_of_band(self._network, training=True):
            connected = has_gradient(self._cell, self._weights, tuple(batch))
        if not connected:
            raise ArgumentValueError(
                "train_step gave a loss without a gradient, so there is nothing to train: it went through "
                "ops.stop_gradient, or depends on no weight of the optimizer."
            )

    @staticmethod
    def _sample(weight: Native) -> Any:
        """Return a few values of a weight, enough to detect an update."""
        return weight.flatten()[:16].asnumpy().copy()
