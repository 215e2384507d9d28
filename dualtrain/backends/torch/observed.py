"""The training step of a hand-written loop, watched through the hooks of its optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

from dualtrain.backends._contract import norm_after_clipping
from dualtrain.backends.torch.borrowed import version_of
from dualtrain.backends.torch.gradients import gradients_of, trained_parameters
from dualtrain.backends.torch.norms import total_norm
from dualtrain.backends.torch.optimizer import TorchLearningRate, following, learning_rate_attribute
from dualtrain.backends.torch.parameter_norms import MeasuredParameters
from dualtrain.counted_step import CountedStep
from dualtrain.errors import ArgumentValueError, RunStateError
from dualtrain.protocol import Capability, Native


class ObservedTorchStep(CountedStep):
    """Count updates, and take rates and gradient norms when an optimizer steps.

    Args:
        optimizers: Name -> optimizer.
        network: The network, or None.
        lr_scheduler: The schedule that the loop steps, or None.
        asked_for: Capabilities that callbacks need or use if available.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Native],
        *,
        network: torch.nn.Module | None,
        lr_scheduler: Native,
        asked_for: frozenset[Capability],
    ) -> None:
        if lr_scheduler is not None and not any(
            getattr(lr_scheduler, "optimizer", None) is one for one in optimizers.values()
        ):
            raise ArgumentValueError(
                f"Run(lr_scheduler=...) takes a scheduler of an optimizer that is given as optimizer=..., "
                f"but got {type(lr_scheduler).__name__} of another one."
            )
        super().__init__(TorchLearningRate(*optimizers.values()) if optimizers else None)
        self._optimizers = optimizers
        self._schedule = lr_scheduler
        self._hooks = ExitStack()
        self.gradients: ObservedGradients | None = None
        self.parameter_norms: MeasuredParameters | None = None
        if optimizers:
            needed = Capability.GRAD_NORM in asked_for
            self.gradients = ObservedGradients(optimizers, network, needed=needed)
            self.parameter_norms = self.gradients.parameters
            self.capabilities = frozenset({Capability.GRAD_NORM, Capability.PARAMETER_GRAD_NORMS})

    def begin(self) -> None:
        """Begin a batch."""
        super().begin()
        if self.gradients is not None:
            self.gradients.forget()
            self._rate.release()

    @property
    def _rate(self) -> TorchLearningRate:
        assert isinstance(self.learning_rate, TorchLearningRate)
        return self.learning_rate

    def clip(self, max_norm: float) -> None:
        """Scale the gradients of all optimizers by one factor."""
        if self.gradients is None:
            super().clip(max_norm)
        else:
            self.gradients.clip(max_norm)

    def __enter__(self) -> ObservedTorchStep:
        optimizers = [*self._optimizers.values()]
        if optimizers:
            self._hooks.enter_context(learning_rate_attribute(optimizers, self._rate))
            if self._schedule is not None:
                self._hooks.enter_context(following(self._schedule, self._rate))
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
                self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()

    def _before_step(self, optimizer: Native, *args: Any) -> None:
        assert self.gradients is not None
        self.gradients.take(optimizer)

    def _after_step(self, optimizer: Native, *args: Any) -> None:
        # A fused optimizer is called on an overflow too: it gets ``found_inf`` and does nothing.
        overflow = getattr(optimizer, "found_inf", None)
        self.count_update(skipped=overflow is not None and bool(overflow))
        self._rate.hold()  # the loop may step its schedule before the step ends


class ObservedGradients:
    """The gradients that an optimizer has received in this step of a hand-written loop.

    The norm is computed when it is read, or at the update where a callback needs it or the optimizer
    changes gradients.

    Args:
        optimizers: Name -> optimizer.
        network: The network, or None.
        needed: Whether a callback needs the norm.

    Attributes:
        parameters: The norm of each parameter's gradient.
    """

    loss_scale: float | None = None

    def __init__(
        self, optimizers: Mapping[str, Native], network: torch.nn.Module | None, *, needed: bool
    ) -> None:
        self._optimizers = optimizers
        self._network = network
        self._needed = needed
        self.parameters = MeasuredParameters(self.trained_parameters)
        self.forget()

    def forget(self) -> None:
        """Begin a batch."""
        self._taken = False
        self._norm: torch.Tensor | float | None = None
        self._max_norm: float | None = None
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        if self.parameters.measured:
            self.parameters.forget()

    def take(self, optimizer: Native) -> None:
        """Take the gradients that an optimizer is about to receive."""
        self._taken = True
        if self.parameters.requested:
            self.parameters.measure(optimizer)
        if self._max_norm is not None:
            return  # clip() has taken the norm before clipping
        gradients = gradients_of(optimizer)
        self._norm = None
        self._versions = [(gradient, version_of(gradient)) for gradient in gradients]
        unknown = any(version is None for _, version in self._versions)
        nesterov = any(group.get("nesterov") for group in optimizer.param_groups)  # added in place
        if self._needed or unknown or nesterov:
            self._norm = total_norm(gradients)
            self._versions = []

    def clip(self, max_norm: float) -> None:
        """Scale the gradients of all optimizers so that their global norm is at most ``max_norm``."""
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise ArgumentValueError(f"clip_gradients() takes a positive norm, but got {max_norm!r}.")
        optimizers = self._optimizers.values()
        self._norm = norm = total_norm(gradients_of(*optimizers))
        self._max_norm = max_norm
        parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        clip_grads_with_norm_(parameters, max_norm, norm)

    def grad_norm(self) -> float | None:
        """Return the norm before ``clip``; None where this step has made no update."""
        if not self._taken:
            return None
        if self._norm is None:
            if any(version_of(gradient) != version for gradient, version in self._versions):
                raise RunStateError(
                    "grad_norm is not known: the gradients have changed since the update, as by "
                    "zero_grad(set_to_none=False); list Capability.GRAD_NORM in the callback's needs, so "
                    "that the norm is taken at the update."
                )
            self._norm = total_norm([gradient for gradient, _ in self._versions])
        self._norm = norm = float(self._norm)
        return norm

    def grad_norm_clipped(self) -> float | None:
        """Return the norm after ``clip``."""
        return norm_after_clipping(self.grad_norm(), self._max_norm)

    def trained_parameters(self) -> dict[str, Native]:
        """Return the network's parameters that an optimizer has and that are not frozen."""
        return {} if self._network is None else trained_parameters(self._network, self._optimizers.values())
