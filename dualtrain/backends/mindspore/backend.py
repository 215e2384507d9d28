"""The backend of MindSpore."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np

from dualtrain.backends._arguments import check_same_weights, first_array
from dualtrain.backends.mindspore import distributed
from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate
from dualtrain.protocol import BatchShape, Capability, Native


class MindSporeBackend:
    """MindSpore 2.7 to 2.10, in PYNATIVE and GRAPH mode."""

    name = "mindspore"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return "MindSporeBackend()"

    def owns(self, obj: Native) -> bool:
        return isinstance(obj, (mindspore.nn.Cell, mindspore.Tensor))  # optimizers are Cells

    def model_class(self) -> type:
        from dualtrain.backends.mindspore.model import MindSporeModel

        return MindSporeModel

    def capabilities(self) -> frozenset[Capability]:
        both = {
            Capability.STEP_EVENTS,
            Capability.GRAD_NORM,
            Capability.PARAMETER_GRAD_NORMS,
            Capability.ACCUMULATION,
            Capability.SKIP_NONFINITE,
            Capability.CALLBACK_TIMES,
        }
        eager = set() if graph_mode() else {Capability.GRADIENT_EVENTS, Capability.EAGER}
        return frozenset(both | eager)

    def describe_mode(self) -> str:
        return f"MindSpore {'GRAPH' if graph_mode() else 'PYNATIVE'} mode"

    def version(self) -> str:
        return str(mindspore.__version__)

    def to_float(self, value: Native) -> float:
        if isinstance(value, mindspore.Tensor) and value.size == 1:
            return float(value.item())  # a tenth of what asnumpy() takes
        return float(np.mean(self.to_numpy(value)))

    def to_numpy(self, value: Native) -> Any:
        tensor = value if isinstance(value, mindspore.Tensor) else mindspore.Tensor(value)
        if tensor.dtype == mindspore.bfloat16:  # numpy has none
            tensor = tensor.astype(mindspore.float32)
        return tensor.asnumpy()

    def batch_shape(self, batch: Native) -> BatchShape | None:
        array = first_array(batch)
        if array is None:
            return None
        if not isinstance(array, mindspore.Tensor):
            return BatchShape(tuple(array.shape), array.dtype.kind in "iu")
        integers = (*mindspore.common.dtype.int_type, *mindspore.common.dtype.uint_type)
        return BatchShape(tuple(array.shape), array.dtype in integers)

    def learning_rate(self, optimizer: Native) -> MindSporeLearningRate:
        return MindSporeLearningRate(optimizer)

    def weights(self, network: Native) -> dict[str, Any]:
        return {p.name: mindspore.Tensor(p.asnumpy().copy()) for p in network.get_parameters()}

    def assign_weights(self, network: Native, weights: dict[str, Any]) -> None:
        own = {p.name: p for p in network.get_parameters()}
        check_same_weights({name: tuple(p.shape) for name, p in own.items()}, weights)
        for name, parameter in own.items():
            mindspore.ops.assign(parameter, mindspore.Tensor(weights[name], parameter.dtype))

    def copy_parameters(self, parameters: dict[str, Native]) -> dict[str, Native]:
        return {name: self.to_numpy(tensor).copy() for name, tensor in parameters.items()}

    def parameter_changes(
        self, before: dict[str, Native], now: dict[str, Native]
    ) -> dict[str, tuple[float, float]]:
        return {
            name: (_norm(values), _norm(np.subtract(self.to_numpy(now[name]), values, dtype=np.float64)))
            for name, values in before.items()
        }

    def rank(self) -> int:
        return distributed.rank()

    def world_size(self) -> int:
        return distributed.world_size()

    def any_rank(self, flag: bool) -> bool:
        return distributed.any_rank(flag)


def _norm(values: Any) -> float:
    # numpy's own norm is a dot product in the array's precision: it is off by 0.1 % at 40 million.
    return float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def graph_mode() -> bool:
    """Tell whether MindSpore is in GRAPH mode now."""
    return bool(mindspore.get_context("mode") == mindspore.GRAPH_MODE)


BACKEND = MindSporeBackend()
