"""The backend of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dualtrain.backends._arguments import check_same_weights, first_array
from dualtrain.backends.torch import distributed
from dualtrain.backends.torch.late import to_float_later
from dualtrain.backends.torch.norms import HALVES, Norms
from dualtrain.backends.torch.observed import ObservedTorchStep
from dualtrain.backends.torch.optimizer import TorchLearningRate
from dualtrain.backends.torch.outputs import as_outputs
from dualtrain.protocol import BatchShape, Capability, Native


class TorchBackend:
    """PyTorch, on any device of its accelerator API."""

    name = "torch"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return "TorchBackend()"

    def owns(self, obj: Native) -> bool:
        return isinstance(obj, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))

    def model_class(self) -> Callable[..., Any]:
        from dualtrain.backends.torch.model import TorchModel

        return TorchModel

    def capabilities(self) -> frozenset[Capability]:
        return frozenset(
            {
                Capability.STEP_EVENTS,
                Capability.GRADIENT_EVENTS,
                Capability.GRAD_NORM,
                Capability.PARAMETER_GRAD_NORMS,
                Capability.ACCUMULATION,
                Capability.SKIP_NONFINITE,
                Capability.CALLBACK_TIMES,
                Capability.PROBING,
                Capability.EAGER,
                Capability.THREADS,
            }
        )

    def describe_mode(self) -> str:
        return "PyTorch"

    def version(self) -> str:
        return str(torch.__version__)

    def to_float(self, value: Native) -> float:
        if isinstance(value, torch.Tensor) and value.ndim == 0:  # as a loss is
            return float(value)
        tensor = torch.as_tensor(value)
        if tensor.numel() != 1:
            tensor = tensor.float().mean()
        return float(tensor.item())

    def to_float_later(self, value: Native) -> Callable[[], float] | None:
        return to_float_later(value) if isinstance(value, torch.Tensor) else None

    def to_numpy(self, value: Native) -> Any:
        tensor = torch.as_tensor(value).detach()
        if tensor.dtype is torch.bfloat16:  # numpy has none
            tensor = tensor.float()
        return tensor.cpu().numpy()

    def batch_shape(self, batch: Native) -> BatchShape | None:
        array = first_array(batch)
        if array is None:
            return None
        if not isinstance(array, torch.Tensor):
            return BatchShape(tuple(array.shape), array.dtype.kind in "iu")
        others = array.is_floating_point() or array.is_complex() or array.dtype is torch.bool
        return BatchShape(tuple(array.shape), not others)

    def learning_rate(self, optimizer: Native) -> TorchLearningRate:
        return TorchLearningRate(optimizer)

    def weights(self, network: Native) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    def assign_weights(self, network: Native, weights: dict[str, Any]) -> None:
        own = network.state_dict()
        check_same_weights({name: tuple(t.shape) for name, t in own.items()}, weights)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(torch.as_tensor(weights[name]))

    def copy_parameters(self, parameters: dict[str, Native]) -> dict[str, Native]:
        return {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def parameter_changes(
        self, before: dict[str, Native], now: dict[str, Native]
    ) -> dict[str, tuple[float, float]]:
        changes = [tensor.float() if tensor.dtype in HALVES else tensor for tensor in before.values()]
        norms = Norms(changes)
        if changes:
            for name, change in zip(before, changes, strict=True):
                change.sub_(now[name].detach())
        return dict(zip(before, zip(*Norms.read(norms, Norms(changes)), strict=True), strict=True))

    def rank(self) -> int:
        return distributed.rank()

    def world_size(self) -> int:
        return distributed.world_size()

    def any_rank(self, flag: bool) -> bool:
        return distributed.any_rank(flag)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # every device's

    def observe(
        self,
        optimizers: Mapping[str, Native],
        *,
        network: Native,
        lr_scheduler: Native,
        asked_for: frozenset[Capability],
    ) -> ObservedTorchStep:
        return ObservedTorchStep(
            optimizers, network=network, lr_scheduler=lr_scheduler, asked_for=asked_for
        )

    def as_outputs(self, value: Native) -> Native:
        return as_outputs(value)


BACKEND = TorchBackend()
