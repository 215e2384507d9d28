"""The gradient values of a step on MindSpore, for the run context."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualtrain.backends._contract import norm_after_clipping
from dualtrain.backends.mindspore.step_cell import StepCell
from dualtrain.errors import RunStateError
from dualtrain.protocol import Native


class StepGradients:
    """The gradient norms of the last update, if the train step computes them.

    Args:
        cell: Our train step; None: MindSpore's own, which computes no norms.
        weights: The optimizer's parameters.
    """

    def __init__(self, cell: StepCell | None, weights: Any) -> None:
        self._cell = cell
        self._weights = weights

    @property
    def loss_scale(self) -> float | None:
        if self._cell is None or self._cell.scaler is None:
            return None
        return float(self._cell.scaler.scale_value.item())

    def grad_norm(self) -> float | None:
        if self._cell is None:
            raise RunStateError(
                "grad_norm is not computed in this run: MindSpore computes it inside the step, if a "
                "callback has Capability.GRAD_NORM in its needs or Model has clip_norm."
            )
        return float(self._cell.kept.norm.item()) if self._cell.progress.updated else None

    def grad_norm_clipped(self) -> float | None:
        norm = self.grad_norm()
        return norm_after_clipping(norm, None if self._cell is None else self._cell.clip_norm)

    def trained_parameters(self) -> dict[str, Native]:
        return {weight.name: weight for weight in self._weights if weight.requires_grad}

    def request_parameter_grad_norms(self) -> None:
        if self._cell is None or not self._cell.parameter_norms:
            raise RunStateError(
                "parameter_grad_norms are not computed in this run: MindSpore computes them inside the "
                "step, if a callback has Capability.PARAMETER_GRAD_NORMS in its needs."
            )

    def parameter_grad_norms(self) -> dict[str, float] | None:
        if self._cell is None or not self._cell.parameter_norms or not self._cell.progress.updated:
            return None
        kept = self._cell.kept
        # A sum of squares below 1e-45 underflows to zero in float32, although the gradient is not zero.
        norms = np.maximum(np.sqrt(kept.square_sums.asnumpy()), kept.largest.asnumpy())
        return {
            weight.name: norm
            for weight, norm in zip(self._weights, norms.tolist(), strict=True)
            if weight.requires_grad
        }
