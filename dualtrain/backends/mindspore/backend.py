"""The backend of MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore
import numpy as np

from dualtrain.backends._arguments import check_same_weights, first_array
from dualtrain.backends.mindspore import distributed, modes, tensors
from dualtrain.backends.mindspore.observed import ObservedMindSporeStep
from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate
from dualtrain.backends.mindspore.signals import InterruptWatch
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
        return modes.capabilities()

    def describe_mode(self) -> str:
        return modes.describe_mode()

    def version(self) -> str:
        return str(mindspore.__version__)

    def to_float(self, value: Native) -> float:
        return tensors.to_float(value)

    def to_numpy(self, value: Native) -> Any:
        return tensors.to_numpy(value)

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
            name: (
                tensors.norm(values),
                tensors.norm(np.subtract(self.to_numpy(now[name]), values, dtype=np.float64)),
            )
            for name, values in before.items()
        }

    def rank(self) -> int:
        return distributed.rank()

    def world_size(self) -> int:
        return distributed.world_size()

    def any_rank(self, flag: bool) -> bool:
        return distributed.any_rank(flag)

    def seed(self, seed: int) -> None:
        mindspore.set_seed(seed)

    def signal_watch(self, request_stop: Callable[[str], None]) -> InterruptWatch:
        return InterruptWatch(request_stop)

    def observe(
        self,
        optimizers: Mapping[str, Native],
        *,
        network: Native,
        lr_scheduler: Native,
        asked_for: frozenset[Capability],
    ) -> ObservedMindSporeStep:
        return ObservedMindSporeStep(optimizers, network, lr_scheduler)

    def as_outputs(self, value: Native) -> Native:
        return value  # tensors of MindSpore have no graph


BACKEND = MindSporeBackend()
