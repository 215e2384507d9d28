"""A backend without a framework, whose tensors are plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dualtrain.errors import RunStateError
from dualtrain.protocol import BatchShape, Capability, LearningRate, Rate


class FakeLearningRate:
    """One learning rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def read(self) -> Rate:
        return self.rate

    def write(self, rate: Rate) -> None:
        self.rate = float(rate)  # type: ignore[arg-type]

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        self.rate = max(self.rate * factor, min(min_lr, self.rate))
        return self.rate


class FakeBackend:
    """A backend without a framework, for tensors that are plain numbers."""

    name = "fake"

    def __str__(self) -> str:
        return self.name

    def owns(self, obj: Any) -> bool:
        return False

    def model_class(self) -> Callable[..., Any]:
        raise RunStateError("the fake backend has no Model: use dualtrain.testing.FakeLoop.")

    def capabilities(self) -> frozenset[Capability]:
        return frozenset(
            {
                Capability.STEP_EVENTS,
                Capability.GRAD_NORM,
                Capability.PARAMETER_GRAD_NORMS,
                Capability.ACCUMULATION,
                Capability.SKIP_NONFINITE,
                Capability.CALLBACK_TIMES,
                Capability.EAGER,
                Capability.THREADS,
            }
        )

    def describe_mode(self) -> str:
        return "the fake loop"

    def version(self) -> str:
        return "0"

    def to_float(self, value: Any) -> float:
        return float(value.mean() if hasattr(value, "mean") else value)

    def to_numpy(self, value: Any) -> Any:
        import numpy as np

        return np.asarray(value)

    def batch_shape(self, batch: Any) -> BatchShape | None:
        array = self.to_numpy(batch)
        return BatchShape(array.shape, array.dtype.kind in "iu")

    def learning_rate(self, optimizer: Any) -> LearningRate:
        return FakeLearningRate(float(optimizer))

    def weights(self, network: Any) -> dict[str, Any]:
        return {}  # there is no network

    def assign_weights(self, network: Any, weights: dict[str, Any]) -> None:
        """Do nothing: there is no network."""

    def copy_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {name: list(values) for name, values in parameters.items()}

    def parameter_changes(
        self, before: dict[str, Any], now: dict[str, Any]
    ) -> dict[str, tuple[float, float]]:
        return {
            name: (math.hypot(*values), math.dist(now[name], values)) for name, values in before.items()
        }
