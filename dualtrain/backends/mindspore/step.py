"""What happens to one batch on MindSpore: which Cell runs, and the state of it that callbacks read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from dualtrain.backends._contract import (
    inside_window,
    norm_after_clipping,
    warn_of_batch_norm,
    warn_of_dropped_window,
)
from dualtrain.backends.mindspore.cells import AccumulateCell, Kept, UpdateCell, has_gradient
from dualtrain.backends.mindspore.data import Batches
from dualtrain.backends.mindspore.nonfinite import explain_nonfinite
from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate
from dualtrain.backends.mindspore.probes import out_of_band
from dualtrain.bus import EventBus
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentValueError, RunStateError
from dualtrain.events import Event
from dualtrain.protocol import AttentionLayer, Native


class Progress:
    """Where a run is in its window. Not in the Cell itself, where to set an attribute costs microseconds.

    Args:
        accumulate_steps: Batches per update.
    """

    def __init__(self, accumulate_steps: int) -> None:
        self.accumulate_steps = accumulate_steps
        self.filled = self.window = self.updates = 0
        self.left: float = float("inf")
        """Batches that are left of the epoch."""
        self.updated = False
        """Whether this batch ends a window, so that the norm is known."""
        self.applied = False
        """Whether the optimizer has been called for it, or would have been but for a skip."""


class StepCell(nn.TrainOneStepCell):  # type: ignore[misc]
    """The train step that Model is given where more is asked of it than MindSpore's own one does.

    Each call runs one of a few Cells: one that adds a batch's gradients to the window's totals,
    or one that updates with them. They are made, and in GRAPH mode compiled, when first needed.

    Args:
        native: MindSpore's own train step, with its loss, optimizer and mixed precision.
        clip_norm: The largest norm that the gradients of an update may have; None: any.
        scaler: A ``mindspore.amp.DynamicLossScaler``; None: the loss is not scaled.
        batch_norms: The names of the network's BatchNorm layers, for a warning.
    """

    def __init__(
        self,
        native: nn.TrainOneStepCell,
        clip_norm: float | None,
        scaler: Native,
        batch_norms: list[str],
    ) -> None:
        super().__init__(native.network, native.optimizer)
        self.batch_norms = batch_norms
        self.clip_norm = clip_norm
        self.scaler = scaler
        self.kept = Kept(len(self.weights))
        self._parts: dict[str, Any] = {}
        self.reset(1)

    def reset(self, accumulate_steps: int, *, parameter_norms: bool = False, guarded: bool = False) -> None:
        """Begin a run: nothing is accumulated.

        Args:
            accumulate_steps: Batches per update.
            parameter_norms: Whether each weight's gradient is measured.
            guarded: Whether an update whose loss or gradients are not finite is skipped.
        """
        self.progress = Progress(accumulate_steps)
        self.parameter_norms = parameter_norms
        self.guarded = guarded
        self._emitters: dict[Event, Callable[[RunContext], None]] = {}
        if "totals" in self._parts:
            for total in self._parts["totals"]:
                ops.assign(total, ops.zeros_like(total))
            ops.assign(self.kept.losses, ops.zeros_like(self.kept.losses))

    def listen(self, bus: EventBus, context: RunContext) -> None:
        """Emit the events inside a step to a bus, in PYNATIVE mode."""
        self._context = context
        inside = (
            Event.AFTER_BACKWARD,
            Event.GRADIENTS_READY,
            Event.BEFORE_OPTIMIZER_STEP,
            Event.AFTER_OPTIMIZER_STEP,
        )
        self._emitters = {e: emitter for e in inside if (emitter := bus.emitter(e)) is not None}

    def begin_epoch(self, dataset: Any) -> None:
        """Begin an epoch."""
        self.progress.left = dataset.get_dataset_size()
        self._dataset = dataset

    def __call__(self, *inputs: Native) -> Native:
        """Train on a batch and return its loss."""
        at = self.progress
        at.updated = at.applied = False
        if at.filled == 0:
            at.window = at.accumulate_steps
        at.filled += 1
        at.left -= 1
        share = rescale = None
        closes = at.filled >= at.window or self._is_last()
        if at.filled > 1 or not closes:
            share = _scalar(1 / at.window)
            rescale = _scalar(at.window / at.filled)  # the epoch may end before the window is full
        if not closes:
            loss = self._part("accumulate")(share, *inputs)
            self._emit(Event.AFTER_BACKWARD, loss)
            return loss
        part = self._part("update" if at.filled == 1 else "update with totals", self.parameter_norms)
        at.filled = 0
        if self._emitters:
            loss = self._update_by_parts(part, share, rescale, inputs)
        else:
            loss = part(share, rescale, *inputs)
            at.updated = at.applied = True
            at.updates += 1
        return loss

    def _update_by_parts(
        self, part: UpdateCell, share: Tensor | None, rescale: Tensor | None, inputs: Native
    ) -> Native:
        loss = part.network(*inputs)
        gradients = part.whole_gradients(loss, share, rescale, inputs)  # type: ignore[no-untyped-call]
        self._emit(Event.AFTER_BACKWARD, loss)
        norm = part.measure(gradients, loss)  # type: ignore[no-untyped-call]
        self.progress.updated = True
        self._emit(Event.GRADIENTS_READY, loss)
        gradients = part.clipped(gradients, norm)  # type: ignore[no-untyped-call]
        self._emit(Event.BEFORE_OPTIMIZER_STEP, loss)
        part.apply(loss, gradients)  # type: ignore[no-untyped-call]
        self.progress.applied = True
        self.progress.updates += 1
        self._emit(Event.AFTER_OPTIMIZER_STEP, loss)
        return loss

    def _is_last(self) -> bool:
        """Whether this batch is the epoch's last one."""
        if isinstance(self._dataset, Batches):
            return self._dataset.is_last()
        return self.progress.left <= 0

    def drop_window(self) -> None:
        """Drop what a stop has left in a window, and say so."""
        if self.progress.filled:
            warn_of_dropped_window(self.progress.filled, self.progress.window)

    def _part(self, name: str, parameter_norms: bool = False) -> Any:
        key = f"{name}, each weight measured" if parameter_norms else name
        if self.guarded:
            key += ", guarded"
        if key not in self._parts:
            if name == "update":
                totals = None
            else:
                if "totals" not in self._parts:
                    self._parts["totals"] = self.weights.clone("accumulated", init="zeros")
                totals = self._parts["totals"]
            if name == "accumulate":
                cell: nn.Cell = AccumulateCell(self, self.scaler, totals, self.kept, self.guarded)
            else:
                cell = UpdateCell(
                    self,
                    self.scaler,
                    totals,
                    self.clip_norm,
                    self.kept,
                    parameter_norms=parameter_norms,
                    guarded=self.guarded,
                )
            cell._jit_config_dict = self._jit_config_dict
            self._parts[key] = cell.set_train()
        return self._parts[key]

    def _emit(self, event: Event, loss: Native) -> None:
        emitter = self._emitters.get(event)
        if emitter is not None:
            self._context.original_args()["net_outputs"] = loss
            emitter(self._context)


@lru_cache(maxsize=256)  # to make one costs as much as a small kernel
def _scalar(value: float) -> Tensor:
    return Tensor(value, mindspore.float32)


class MindSporeStep:
    """The state of a run's steps, as the run context reads it.

    Args:
        optimizer: A ``mindspore.nn.Optimizer``, or None.
        cell: The train step, where it is ours; None: it is MindSpore's own.
        network: The network.
        forward: The Cell that gives a batch's loss, if there is one.
        sample_attention: What ``attention`` calls.
        always_updates: Whether each of MindSpore's own steps is one update, so that counting here will do.
    """

    def __init__(
        self,
        optimizer: Native,
        cell: StepCell | None,
        network: nn.Cell,
        forward: nn.Cell | None,
        sample_attention: Callable[[int | None, Any], list[AttentionLayer]],
        *,
        always_updates: bool,
    ) -> None:
        self._optimizer = optimizer
        self._network = network
        self._forward = forward
        self._sample_attention = sample_attention
        self._weights = getattr(optimizer, "parameters", ())
        self._counter = getattr(optimizer, "global_step", None)
        self._start = self._count()
        self._cell = cell
        self._ended = False
        self._steps = 0
        self._always_updates = always_updates
        self.learning_rate = None
        if self._counter is not None:
            self.learning_rate = MindSporeLearningRate(optimizer, self._steps_ahead)

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run; read from the optimizer where an update may be skipped."""
        cell = self._cell
        if cell is None and self._always_updates:
            return self._steps
        if cell is not None and cell.scaler is None and not cell.guarded:
            return cell.progress.updates
        return self._count() - self._start

    def epoch_begins(self, dataset: Any) -> None:
        """Note that an epoch begins, over a dataset."""
        if self._cell is not None:
            self._cell.begin_epoch(dataset)

    def begins(self) -> None:
        """Note that a step begins."""
        self._ended = False
        if self._cell is not None:
            at = self._cell.progress
            at.updated = at.applied = False

    def ends(self) -> None:
        """Note that a step has ended."""
        self._ended = True
        self._steps += 1

    def _steps_ahead(self) -> int:
        """By how much the optimizer's counter is ahead of the step whose rate is asked for."""
        applied = self._ended if self._cell is None else self._cell.progress.applied
        return int(applied and not self.step_skipped)

    @property
    def is_update_step(self) -> bool:
        return self._ended if self._cell is None else self._cell.progress.updated

    @property
    def step_skipped(self) -> bool:
        cell = self._cell
        if cell is None or not cell.progress.applied or (cell.scaler is None and not cell.guarded):
            return False
        return not bool(cell.kept.made.item())

    @property
    def loss_scale(self) -> float | None:
        if self._cell is None or self._cell.scaler is None:
            return None
        return float(self._cell.scaler.scale_value.item())

    @property
    def accumulate_steps(self) -> int:
        return 1 if self._cell is None else self._cell.progress.accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        if self._cell is None:
            raise RunStateError(
                "accumulate_steps can be set on MindSpore only if the callback that sets it has "
                "Capability.ACCUMULATION in its needs, since the step is made for it at train begin."
            )
        if self._cell.progress.filled:
            raise inside_window(self._cell.progress.filled, self._cell.progress.window)
        warn_of_batch_norm(self._cell.batch_norms, value)
        self._cell.progress.accumulate_steps = value

    def grad_norm(self) -> float | None:
        if self._cell is None:
            raise RunStateError(
                "grad_norm is not computed in this run: MindSpore computes it inside the step, where a "
                "callback has Capability.GRAD_NORM in its needs or Model has clip_norm."
            )
        return float(self._cell.kept.norm.item()) if self._cell.progress.updated else None

    def grad_norm_clipped(self) -> float | None:
        norm = self.grad_norm()
        return norm_after_clipping(norm, None if self._cell is None else self._cell.clip_norm)

    def attention(
        self, samples: int | None, function: Callable[[Native, Native], Sequence[Native]] | None
    ) -> list[AttentionLayer]:
        return self._sample_attention(samples, function)

    def trained_parameters(self) -> dict[str, Native]:
        return {weight.name: weight for weight in self._weights if weight.requires_grad}

    def request_parameter_grad_norms(self) -> None:
        if self._cell is None or not self._cell.parameter_norms:
            raise RunStateError(
                "parameter_grad_norms are not computed in this run: MindSpore computes them inside the "
                "step, where a callback has Capability.PARAMETER_GRAD_NORMS in its needs."
            )

    def parameter_grad_norms(self) -> dict[str, float] | None:
        if self._cell is None or not self._cell.parameter_norms or not self._cell.progress.updated:
            return None
        kept = self._cell.kept
        # A sum of squares below 1e-45 is zero in float32, although the gradient is not.
        norms = np.maximum(np.sqrt(kept.square_sums.asnumpy()), kept.largest.asnumpy())
        return {
            weight.name: norm
            for weight, norm in zip(self._weights, norms.tolist(), strict=True)
            if weight.requires_grad
        }

    def explain_nonfinite(self, batch: Native) -> str:
        return explain_nonfinite(self._network, self._forward, self._optimizer, batch)

    def zero_grad(self, optimizer: Native) -> None:
        raise AssertionError("MindSpore has no manual optimisation")

    backward = optimizer_step = zero_grad

    def _count(self) -> int:
        return 0 if self._counter is None else int(self._counter.item())


def batch_norm_names(network: nn.Cell) -> list[str]:
    """Return the names of a network's BatchNorm layers."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, cell in network.cells_and_names() if isinstance(cell, kinds)]


class GradientCheck:
    """Tell, around a run's first step, whether ``train_step`` gives a loss with a gradient.

    Weights that all stand still raise the suspicion; where weight decay moves them anyway, the
    suspicion is there from the start. What a gradient started from NaN does decides it, so that a
    gradient that is zero by chance passes. The network is left as if that had never run.

    Args:
        network: The network.
        cell: ``train_step`` as a Cell.
        optimizer: The optimizer, whose weights have to have gradients.
    """

    def __init__(self, network: nn.Cell, cell: nn.Cell, optimizer: Native) -> None:
        self._network = network
        self._cell = cell
        self._weights = optimizer.parameters
        self._decays = bool(getattr(optimizer, "exec_weight_decay", False))
        self._before = [self._sample(weight) for weight in self._weights]

    def before_first_step(self, batch: Native) -> None:
        """Check where the weights' movement will not tell."""
        if self._decays:
            self._check(batch)

    def after_first_step(self, batch: Native) -> None:
        """Check if no weight has moved."""
        still = (
            np.array_equal(b, self._sample(w)) for b, w in zip(self._before, self._weights, strict=True)
        )
        if not self._decays and all(still):
            self._check(batch)

    def _check(self, batch: Native) -> None:
        with out_of_band(self._network, training=True):
            connected = has_gradient(self._cell, self._weights, tuple(batch))
        if not connected:
            raise ArgumentValueError(
                "train_step gave a loss without a gradient, so there is nothing to train: it went through "
                "ops.stop_gradient, or depends on no weight of the optimizer."
            )

    @staticmethod
    def _sample(weight: Native) -> Any:
        """A few values of a weight: enough to see whether an update has moved it."""
        return weight.flatten()[:16].asnumpy().copy()
