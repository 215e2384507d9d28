"""One update: norm, clipping, optimizer step and schedule, with the events around them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.utils import clip_grads_with_norm_

from dualtrain.backends.torch import distributed
from dualtrain.backends.torch.gradients import UpdateGradients, change_in_step, gradients_of
from dualtrain.backends.torch.norms import total_norm
from dualtrain.backends.torch.optimizer import Schedule, TorchLearningRate
from dualtrain.backends.torch.precision import Precision
from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.protocol import Capability, Native


class Update:
    """Make the updates of a run, from gradients that are whole and unscaled.

    Args:
        engine: The run, whose callbacks listen.
        gradients: The gradients, as callbacks read them.
        learning_rate: The optimizers' learning rate.
        schedule: Its schedule, if there is one.
        clip_norm: The largest norm that gradients may have; None: any.
        precision: Mixed precision.
        automatic: Whether the step drives the update, and not the user's ``train_step``.

    Attributes:
        count: Updates of this run.
        made: Whether this batch has made an update, or skipped one.
        skipped: Whether it was skipped.
        driving: Whether the optimizer is being stepped from here.
        losses: The sum of the losses of the window, where updates are guarded.
        guarded: Whether an update whose loss or gradients are not finite is skipped.
    """

    def __init__(
        self,
        engine: RunEngine,
        gradients: UpdateGradients,
        learning_rate: TorchLearningRate,
        schedule: Schedule | None,
        clip_norm: float | None,
        precision: Precision,
        *,
        automatic: bool,
    ) -> None:
        self._context = engine.context
        self._gradients = gradients
        self._learning_rate = learning_rate
        self._schedule = schedule
        self._clip_norm = clip_norm
        self._precision = precision
        self._gradients_ready = engine.emitter(Event.GRADIENTS_READY)
        self._before_step = engine.emitter(Event.BEFORE_OPTIMIZER_STEP)
        self._after_step = engine.emitter(Event.AFTER_OPTIMIZER_STEP)
        asked_for = engine.bus.asked_for()
        self.guarded = automatic and Capability.SKIP_NONFINITE in asked_for
        self._listened = self._before_step is not None or self._after_step is not None
        self._norm_is_needed = Capability.GRAD_NORM in asked_for
        self._has_callbacks = bool(engine.bus.callbacks)
        self._automatic = automatic
        # Gradients are the same on all ranks, losses are not.
        several = self.guarded and distributed.world_size() > 1
        self._any_rank: Callable[[bool], bool] | None = distributed.any_rank if several else None
        self.count = 0
        self.made = self.skipped = self.driving = False
        self.losses: torch.Tensor | None = None

    def begin(self) -> None:
        """Begin a batch."""
        if self._schedule is not None:
            self._learning_rate.release()
        self.made = self.skipped = self._gradients.due = False
        if self._gradients.parameters.measured:
            self._gradients.parameters.forget()

    def make(self, optimizer: Native) -> None:
        """Make an update."""
        gradients = self._gradients
        self.made, self.skipped = True, False
        gradients.due, gradients.norm, gradients.optimizer = True, None, optimizer
        if self._gradients_ready is not None:
            self._gradients_ready()
            gradients.norm = None  # a callback may have read it and then changed the gradients
        if gradients.parameters.requested:
            gradients.parameters.measure(optimizer)
        if self.guarded or self._clip_norm is not None or self._needs_norm_before(optimizer):
            gradients.norm = norm = total_norm(gradients_of(optimizer))
            self.skipped = self.guarded and not self._is_finite(norm)
            if self._clip_norm is not None and not self.skipped:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                clip_grads_with_norm_(parameters, self._clip_norm, norm)
        if self._before_step is not None:
            self._before_step()
        if not self.skipped:
            self.driving = True
            try:
                self.skipped = not self._precision.step(optimizer)
            finally:
                self.driving = False
        if self._automatic:
            self._precision.update()
        if not self.skipped:
            self.count_update(optimizer)
        if self._after_step is not None:
            self._after_step()

    def count_update(self, optimizer: Native) -> None:
        """Count an update that was made, and step the schedule that goes by updates."""
        self.made = True
        self.count += 1
        schedule = self._schedule
        if schedule is not None and schedule.interval == "update" and schedule.belongs_to(optimizer):
            loss = self._context.loss if schedule.monitor == "loss" else None
            schedule.advance(self._learning_rate, {}, loss)

    def _needs_norm_before(self, optimizer: Native) -> bool:
        """Return whether the norm is taken here, since gradients may change before it is read."""
        if self._norm_is_needed:
            return not self._automatic or self._listened or change_in_step(optimizer)
        return self._has_callbacks and any(group.get("nesterov") for group in optimizer.param_groups)

    def _is_finite(self, norm: torch.Tensor) -> bool:
        """Return whether the norm and the losses of the window are finite, on all ranks. One sync."""
        assert self.losses is not None
        values = torch.stack((norm, self.losses.to(norm.device))).tolist()
        self._gradients.norm = values[0]
        finite = all(map(math.isfinite, values))
        return finite if self._any_rank is None else not self._any_rank(not finite)
