"""The training steps whose update the Model drives: a plain one, and one with a window and all options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualtrain.backends._contract import warn_of_batch_norm
from dualtrain.backends.torch.forward import SkippedBatches, checked_loss
from dualtrain.backends.torch.gradients import UpdateGradients, gradients_of
from dualtrain.backends.torch.optimizer import TorchLearningRate
from dualtrain.backends.torch.outputs import as_outputs
from dualtrain.backends.torch.precision import Precision
from dualtrain.backends.torch.probes import TorchProbe
from dualtrain.backends.torch.update import Update
from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.protocol import Native
from dualtrain.window import Window

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


class PlainStep:
    """Train on a batch and update, as by hand: for runs that ask for nothing in between.

    Args:
        forward: Gives a batch's loss, or a mapping or tuple with it.
        source: What gives the loss, for messages.
        optimizer: The optimizer.
        learning_rate: Its learning rate.
        gradients: Its gradients, as callbacks read them.
        probing: Calls the network outside of the step.
        skipped_batches: Counts batches without a loss.
    """

    step_skipped = False

    def __init__(
        self,
        forward: Callable[[Any], Any],
        source: str,
        optimizer: Native,
        learning_rate: TorchLearningRate,
        gradients: UpdateGradients,
        probing: TorchProbe,
        skipped_batches: SkippedBatches,
    ) -> None:
        self._forward = forward
        self._source = source
        self._optimizer = optimizer
        self.learning_rate = learning_rate
        self.gradients, self.parameter_norms = gradients, gradients.parameters
        self.probing = probing
        self._skipped_batches = skipped_batches
        self._loss: torch.Tensor | None = None
        self.global_step = 0
        self.is_update_step = False

    def begin(self) -> None:
        """Begin a batch."""
        self.is_update_step = self.gradients.due = False
        if self.learning_rate.used is not None:
            self.learning_rate.release()
        if self.parameter_norms.measured:
            self.parameter_norms.forget()

    def __call__(self, batch: Native) -> Native:
        """Train on a batch and return its outputs, detached."""
        optimizer, gradients = self._optimizer, self.gradients
        optimizer.zero_grad()
        outputs = loss = self._forward(batch)
        if type(loss) is not torch.Tensor or loss.ndim != 0 or not loss.requires_grad:
            if outputs is None:
                return self._skipped_batches.add()
            loss = checked_loss(outputs, self._source)
        # Kept until the next one, as by hand: without a graph autograd makes its nodes of weights anew.
        self._loss = loss
        loss.backward()  # type: ignore[no-untyped-call]
        if self.parameter_norms.requested:
            self.parameter_norms.measure(optimizer)
        optimizer.step()
        self.global_step += 1
        self.is_update_step = gradients.due = True
        gradients.norm = None
        return as_outputs(outputs)

    def __enter__(self) -> PlainStep:
        return self

    def __exit__(self, *error: Any) -> None:
        self._loss = None


class UpdatingStep:
    """A step whose updates are made by ``Update``: what the run reads of them.

    Args:
        update: Makes the updates.
        learning_rate: The optimizers' learning rate.
        gradients: The gradients, as callbacks read them.
        probing: Calls the network outside of the step.
    """

    def __init__(
        self,
        update: Update,
        learning_rate: TorchLearningRate,
        gradients: UpdateGradients,
        probing: TorchProbe,
    ) -> None:
        self._update = update
        self.learning_rate = learning_rate
        self.gradients, self.parameter_norms = gradients, gradients.parameters
        self.probing = probing

    @property
    def global_step(self) -> int:
        """Updates of this run, of any optimizer."""
        return self._update.count

    @property
    def is_update_step(self) -> bool:
        """Whether this batch has made an update, or skipped one."""
        return self._update.made

    @property
    def step_skipped(self) -> bool:
        """Whether this batch's last update was skipped."""
        return self._update.skipped

    def begin(self) -> None:
        """Begin a batch."""
        self._update.begin()


class WindowStep(UpdatingStep):
    """Train on a batch, and update once per window of ``accumulate_steps`` batches.

    An update is: zero gradients, then for each batch of the window forward, loss / window and
    backward, then unscale, norm, clip, optimizer step, schedule. The window that an epoch ends
    in may be shorter; its gradients are the mean over the batches that it has.

    Args:
        engine: The run, whose callbacks listen.
        forward: Gives a batch's loss, or a mapping or tuple with it.
        source: What gives the loss, for messages.
        network: The network.
        optimizer: The optimizer.
        learning_rate: Its learning rate.
        window: The window.
        update: Makes the updates.
        gradients: The gradients, as callbacks read them.
        probing: Calls the network outside of the step.
        precision: Mixed precision.
        skipped_batches: Counts batches without a loss.
    """

    def __init__(
        self,
        engine: RunEngine,
        forward: Callable[[Any], Any],
        source: str,
        network: torch.nn.Module,
        optimizer: Native,
        learning_rate: TorchLearningRate,
        window: Window,
        update: Update,
        gradients: UpdateGradients,
        probing: TorchProbe,
        precision: Precision,
        skipped_batches: SkippedBatches,
    ) -> None:
        super().__init__(update, learning_rate, gradients, probing)
        self._params = engine.context.original_args()
        self._after_backward = engine.emitter(Event.AFTER_BACKWARD)
        self._forward = forward
        self._source = source
        self._optimizer = optimizer
        self._window = window
        self._precision = precision
        self._skipped_batches = skipped_batches
        # Under DistributedDataParallel gradients are reduced once, in the window's last backward.
        self._no_sync = getattr(network, "no_sync", None)
        self._loss: torch.Tensor | None = None
        self.accumulation = AccumulateSteps(network, window)

    def __call__(self, batch: Native) -> Native:
        """Train on a batch and return its outputs, detached."""
        window = self._window
        if window.filled == 0:
            self._optimizer.zero_grad()
            self._update.losses = None
        window.add()
        if self._no_sync is None or window.closes:
            return self._train(batch)
        with self._no_sync():
            return self._train(batch)

    def _train(self, batch: Native) -> Native:
        window, update, precision = self._window, self._update, self._precision
        with precision.autocast():
            outputs = self._forward(batch)
        if outputs is None:
            return self._skip_batch()
        self._loss = loss = checked_loss(outputs, self._source)
        self._params["net_outputs"] = outputs = as_outputs(outputs)
        if update.guarded:
            native = loss.detach()
            update.losses = native if update.losses is None else update.losses + native
        if window.size != 1:
            loss = loss / window.size
        precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        if self._after_backward is not None:
            self._after_backward()
        if window.closes:
            self._finish_window()
        return outputs

    def _skip_batch(self) -> None:
        self._skipped_batches.add()
        self._params["net_outputs"] = None
        self._window.filled -= 1
        if self._window.filled and self._window.closes:
            self._finish_window()

    def end_pass(self) -> None:
        """Update with an open window, which a loader has left that gave fewer batches than its length."""
        if self._window.filled:
            self._finish_window()

    def _finish_window(self) -> None:
        window, optimizer = self._window, self._optimizer
        self._precision.unscale(optimizer)
        if window.filled != window.size:  # the epoch has ended before the window was full
            factor = window.size / window.filled
            for gradient in gradients_of(optimizer):
                gradient.mul_(factor)
        window.filled = 0
        self._update.make(optimizer)

    def __enter__(self) -> WindowStep:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._loss = None
        if error is not None:
            self._precision.forget()
        elif self._window.filled:
            self._window.drop()
            self._optimizer.zero_grad()
        self._window.filled = 0


class AccumulateSteps:
    """The batches per update, with a warning where BatchNorm does not see them as one batch.

    Args:
        network: The network.
        window: The window.
    """

    def __init__(self, network: torch.nn.Module, window: Window) -> None:
        self._network = network
        self._window = window

    @property
    def accumulate_steps(self) -> int:
        """Batches per update, from the next window on."""
        return self._window.accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        self._window.accumulate_steps = value
        warn_of_split_batch_norm(self._network, value)


def warn_of_split_batch_norm(network: torch.nn.Module, accumulate_steps: int) -> None:
    """Warn where a network has BatchNorm, which sees each batch of a window by itself."""
    names = [name for name, module in network.named_modules() if isinstance(module, _BATCH_NORMS)]
    warn_of_batch_norm(names, accumulate_steps)
