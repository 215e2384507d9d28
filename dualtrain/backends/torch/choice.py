"""The choice of a run's training step: the simplest one with all features that the run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dualtrain.backends.torch import distributed
from dualtrain.backends.torch.forward import SkippedBatches, TrainStepGuard, forward_of, source_of
from dualtrain.backends.torch.gradients import UpdateGradients, change_in_step
from dualtrain.backends.torch.manual import ManualStep
from dualtrain.backends.torch.optimizer import Schedule, TorchLearningRate
from dualtrain.backends.torch.precision import Precision
from dualtrain.backends.torch.probes import TorchProbe
from dualtrain.backends.torch.step import PlainStep, WindowStep, warn_of_split_batch_norm
from dualtrain.backends.torch.update import Update
from dualtrain.context import RunContext
from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.protocol import Capability, Native
from dualtrain.window import LookAhead, Window

_EVENTS_INSIDE = (
    Event.AFTER_BACKWARD,
    Event.GRADIENTS_READY,
    Event.BEFORE_OPTIMIZER_STEP,
    Event.AFTER_OPTIMIZER_STEP,
)


@dataclass(frozen=True)
class TrainingOptions:
    """The arguments of a Model that concern training, as ``dt.Model`` documents them."""

    network: torch.nn.Module
    loss_fn: Callable[..., Any] | None
    optimizers: Mapping[str, Native]
    train_step: Callable[..., Any] | None
    accumulate_steps: int
    clip_norm: float | None
    learning_rate: TorchLearningRate
    schedule: Schedule | None
    precision: Precision
    automatic: bool

    def step_schedule(self, context: RunContext) -> None:
        """Step a schedule that goes by epochs, at an epoch's end."""
        schedule = self.schedule
        if schedule is not None and schedule.interval == "epoch":
            params = context.original_args()
            metrics = params.get("eval_results") or params.get("metrics") or {}
            loss = context.loss if schedule.monitor == "loss" else None
            schedule.advance(self.learning_rate, metrics, loss)


class ChosenStep(NamedTuple):
    """A training step, and what the run needs for it."""

    step: Any
    looks_ahead: bool
    """Whether it has to know an epoch's last batch."""
    guard: AbstractContextManager[Any]
    """Refuses an optimizer step inside ``train_step``; entered around the run."""


def choose_step(options: TrainingOptions, engine: RunEngine, ahead: LookAhead) -> ChosenStep:
    """Return the training step of a run.

    Args:
        options: The Model's arguments.
        engine: The run, with its callbacks.
        ahead: Gives the batches of an epoch.
    """
    network, optimizers, precision = options.network, options.optimizers, options.precision
    rate, schedule, clip_norm = options.learning_rate, options.schedule, options.clip_norm
    rate.release()
    warn_of_split_batch_norm(network, options.accumulate_steps)
    gradients = UpdateGradients(network, optimizers, clip_norm, precision)
    probing = TorchProbe(
        network, options.loss_fn, options.train_step, precision, automatic=options.automatic
    )
    update = Update(engine, gradients, rate, schedule, clip_norm, precision, automatic=options.automatic)
    if not options.automatic:
        assert options.train_step is not None
        manual = ManualStep(
            engine, options.train_step, network, optimizers, rate, update, gradients, probing, precision
        )
        return ChosenStep(manual, False, nullcontext())

    optimizer = next(iter(optimizers.values()))
    forward = forward_of(network, options.loss_fn, options.train_step)
    guard: AbstractContextManager[Any] = nullcontext()
    if options.train_step is not None:  # only there somebody may step the optimizer in between
        forward = guard = TrainStepGuard(forward, optimizer)
    source = source_of(options.loss_fn, options.train_step)
    data_parallel = distributed.world_size() > 1
    skipped = SkippedBatches(source, data_parallel=data_parallel)
    if _is_plain(options, engine, optimizer):
        plain = PlainStep(forward, source, optimizer, rate, gradients, probing, skipped)
        return ChosenStep(plain, False, guard)
    window = Window(ahead, options.accumulate_steps)
    step = WindowStep(
        engine,
        forward,
        source,
        network,
        optimizer,
        rate,
        window,
        update,
        gradients,
        probing,
        precision,
        skipped,
    )
    return ChosenStep(step, True, guard)


def _is_plain(options: TrainingOptions, engine: RunEngine, optimizer: Native) -> bool:
    """Return whether nothing happens between a batch's backward and its update."""
    asked_for = engine.bus.asked_for()
    norm_needed = Capability.GRAD_NORM in asked_for or bool(engine.bus.callbacks)
    return not (
        options.accumulate_steps != 1
        or options.clip_norm is not None
        or options.precision.amp is not None
        or (options.schedule is not None and options.schedule.interval == "update")
        or asked_for & {Capability.ACCUMULATION, Capability.SKIP_NONFINITE}
        or any(engine.emitter(event) is not None for event in _EVENTS_INSIDE)
        or (norm_needed and change_in_step(optimizer))
        or hasattr(options.network, "no_sync")
    )
