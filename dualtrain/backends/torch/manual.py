"""Manual optimisation: the user's ``train_step`` drives backward and updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from dualtrain.backends.torch.forward import checked_loss
from dualtrain.backends.torch.gradients import UpdateGradients
from dualtrain.backends.torch.optimizer import TorchLearningRate
from dualtrain.backends.torch.outputs import as_outputs
from dualtrain.backends.torch.precision import Precision
from dualtrain.backends.torch.probes import TorchProbe
from dualtrain.backends.torch.step import UpdatingStep
from dualtrain.backends.torch.update import Update
from dualtrain.context import RunContext
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentValueError
from dualtrain.events import Event
from dualtrain.protocol import Capability, Native


class ManualStep(UpdatingStep):
    """Call the user's ``train_step``, and offer it the stages of an update.

    Args:
        engine: The run, whose callbacks listen.
        train_step: ``train_step(network, batch, run_context)``.
        network: The network.
        optimizers: Name -> optimizer.
        learning_rate: Their learning rate.
        update: Makes the updates.
        gradients: The gradients, as callbacks read them.
        probing: Calls the network outside of the step.
        precision: Mixed precision.
    """

    def __init__(
        self,
        engine: RunEngine,
        train_step: Callable[[Native, Native, RunContext], Any],
        network: torch.nn.Module,
        optimizers: Mapping[str, Native],
        learning_rate: TorchLearningRate,
        update: Update,
        gradients: UpdateGradients,
        probing: TorchProbe,
        precision: Precision,
    ) -> None:
        super().__init__(update, learning_rate, gradients, probing)
        self._context = engine.context
        self._params = engine.context.original_args()
        self._after_backward = engine.emitter(Event.AFTER_BACKWARD)
        self._measures = Capability.PARAMETER_GRAD_NORMS in engine.bus.asked_for()
        self._train_step = train_step
        self._network = network
        self._optimizers = optimizers
        self._precision = precision
        self._scaled_in_batch = False
        self._hooks = ExitStack()
        self.manual = self

    def __call__(self, batch: Native) -> Native:
        """Call ``train_step`` and return its outputs, detached."""
        self._scaled_in_batch = False
        with self._precision.autocast():
            outputs = self._train_step(self._network, batch, self._context)
        if self._scaled_in_batch:
            self._precision.update()
        return as_outputs(outputs)

    def zero_grad(self, optimizer: Native) -> None:
        """Clear an optimizer's gradients."""
        self._named(optimizer).zero_grad()

    def backward(self, loss: Native) -> None:
        """Compute the gradients of a loss."""
        checked_loss(loss, "backward(loss)")
        self._params["net_outputs"] = as_outputs(loss)
        self._precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        if self._after_backward is not None:
            self._after_backward()

    def optimizer_step(self, optimizer: Native) -> None:
        """Unscale, clip and update."""
        native = self._named(optimizer)
        self.learning_rate.release()  # the batch may have updated before, and a schedule moved on
        if self._precision.scaler is not None:
            self._precision.unscale(native)
            self._scaled_in_batch = True
        self._update.make(native)

    def _named(self, optimizer: Native) -> Native:
        if isinstance(optimizer, str) and optimizer in self._optimizers:
            return self._optimizers[optimizer]
        if optimizer is None and len(self._optimizers) == 1:
            return next(iter(self._optimizers.values()))
        if any(optimizer is own for own in self._optimizers.values()):
            return optimizer
        raise ArgumentValueError(
            f"expected one of this Model's optimizers ({', '.join(map(repr, self._optimizers))}) or its "
            f"name, but got {optimizer!r:.60}."
        )

    def __enter__(self) -> ManualStep:
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, torch.optim.Optimizer):  # train_step may call its step itself
                if self._measures:
                    self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
                self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._hooks.close()
        if error is not None:
            self._precision.forget()

    def _before_step(self, optimizer: Native, *args: Any) -> None:
        if self.parameter_norms.requested and not self._update.driving:
            self.parameter_norms.measure(optimizer)

    def _after_step(self, optimizer: Native, *args: Any) -> None:
        if not self._update.driving:
            self._update.count_update(optimizer)
