"""The gradients of an update as callbacks read them: norms before and after clipping, per parameter too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dualtrain.backends._contract import norm_after_clipping
from dualtrain.backends.torch.borrowed import COMPILED_PREFIX, may_have_step_hooks
from dualtrain.backends.torch.late import to_float_later
from dualtrain.backends.torch.norms import total_norm
from dualtrain.backends.torch.parameter_norms import MeasuredParameters
from dualtrain.backends.torch.precision import Precision
from dualtrain.protocol import Native


class UpdateGradients:
    """Read the gradients of the last update.

    The norm is computed when it is read. Where the gradients may have changed by then (see
    ``change_in_step``) the step takes it before.

    Args:
        network: The network.
        optimizers: Name -> optimizer.
        clip_norm: The largest norm that the step leaves; None: any.
        precision: Mixed precision.

    Attributes:
        due: Whether this batch has made an update.
        norm: The norm before clipping; None where it has not been computed.
        optimizer: The optimizer of the last update.
        parameters: The norm of each parameter's gradient.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        optimizers: Mapping[str, Native],
        clip_norm: float | None,
        precision: Precision,
    ) -> None:
        self._network = network
        self._optimizers = optimizers
        self._clip_norm = clip_norm
        self._precision = precision
        self.due = False
        self.norm: torch.Tensor | float | None = None
        self.optimizer: Native = next(iter(optimizers.values()))
        self.parameters = MeasuredParameters(self.trained_parameters)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of mixed precision; None without one."""
        return self._precision.loss_scale

    def grad_norm(self) -> float | None:
        """Return the norm before clipping; None where this batch makes no update."""
        norm = self._taken()
        if norm is not None:
            self.norm = norm = float(norm)
        return norm

    def grad_norm_clipped(self) -> float | None:
        """Return the norm after clipping."""
        return norm_after_clipping(self.grad_norm(), self._clip_norm)

    def grad_norms_later(self) -> Callable[[], tuple[float | None, float | None]] | None:
        """Begin to copy the norms to the host; None where that gains nothing."""
        norm = self._taken()
        read = to_float_later(norm) if isinstance(norm, torch.Tensor) else None
        if read is None:
            return None

        def norms() -> tuple[float | None, float | None]:
            norm = read()
            return norm, norm_after_clipping(norm, self._clip_norm)

        return norms

    def _taken(self) -> torch.Tensor | float | None:
        """Return the norm, on the gradients' device where nobody has read it."""
        if not self.due:
            return None
        if self.norm is None:
            self.norm = total_norm(gradients_of(self.optimizer))
        return self.norm

    def trained_parameters(self) -> dict[str, Native]:
        """Return the network's parameters that an optimizer has and that are not frozen."""
        return trained_parameters(self._network, self._optimizers.values())


def gradients_of(*optimizers: Native) -> list[torch.Tensor]:
    """Return the gradients that optimizers receive."""
    return [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def trained_parameters(network: torch.nn.Module, optimizers: Iterable[Native]) -> dict[str, Native]:
    """Return a network's parameters that an optimizer has and that are not frozen, by name."""
    optimized = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name.replace(COMPILED_PREFIX, ""): parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and id(parameter) in optimized
    }


def change_in_step(optimizer: Any) -> bool:
    """Return whether gradients may differ after an optimizer's step from what it has received.

    PyTorch's own optimizers leave them alone, but for Nesterov momentum, which is added in place.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or may_have_step_hooks(optimizer):
        return True
    return any(group.get("nesterov") for group in optimizer.param_groups)
