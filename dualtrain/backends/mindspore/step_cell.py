"""The train step of the Model if callbacks or arguments need more than MindSpore's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mindspore
from mindspore import Tensor, nn, ops

from dualtrain.backends.mindspore.cells import AccumulateCell, Kept, UpdateCell
from dualtrain.backends.mindspore.data import Batches
from dualtrain.backends.mindspore.modes import STEP_CELL_CAPABILITIES
from dualtrain.engine import RunEngine
from dualtrain.events import Event
from dualtrain.protocol import EVENT_CAPABILITY, Capability, Native
from dualtrain.window import LookAhead, Window

_EVENTS = (
    Event.AFTER_BACKWARD,
    Event.GRADIENTS_READY,
    Event.BEFORE_OPTIMIZER_STEP,
    Event.AFTER_OPTIMIZER_STEP,
)


class _Progress:
    """The position of a run in its window; separate from the Cell, whose attributes are slow to set."""

    def __init__(self, dataset: Any, accumulate_steps: int) -> None:
        self.dataset = dataset
        self.counted = LookAhead()
        """Counts the batches of a ``mindspore.dataset``; ``Batches`` count themselves."""
        batches = dataset.ahead if isinstance(dataset, Batches) else self.counted
        self.window = Window(batches, accumulate_steps)
        self.updates = 0
        self.updated = False
        """Whether this batch ends a window; the norm is then known."""
        self.applied = False
        """Whether the optimizer has been called in this batch, or its call was skipped."""


class StepCell(nn.TrainOneStepCell):  # type: ignore[misc]
    """Accumulate, measure, clip and skip around MindSpore's own train step.

    Each call runs one of a few Cells: one adds a batch's gradients to the totals of the window, another
    makes the update. They are built, and in GRAPH mode compiled, on first use.

    Args:
        native: MindSpore's own train step, with its loss, optimizer and mixed precision.
        clip_norm: The maximum norm of an update's gradients; None: no clipping.
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
        _share_jit_config(self, native)
        self.batch_norms = batch_norms
        self.clip_norm = clip_norm
        self.scaler = scaler
        self.kept = Kept(len(self.weights))
        self._parts: dict[str, Any] = {}

    def reset(
        self,
        dataset: Any,
        accumulate_steps: int,
        *,
        parameter_norms: bool = False,
        guarded: bool = False,
    ) -> None:
        """Begin a run with an empty window.

        Args:
            dataset: The training data.
            accumulate_steps: Batches per update.
            parameter_norms: Whether the norm of each weight's gradient is computed.
            guarded: Whether updates with a non-finite loss or gradients are skipped.
        """
        self.progress = _Progress(dataset, accumulate_steps)
        self.parameter_norms = parameter_norms
        self.guarded = guarded
        self._emitters: dict[Event, Callable[[], None]] = {}
        if "totals" in self._parts:
            for total in self._parts["totals"]:
                ops.assign(total, ops.zeros_like(total))
            ops.assign(self.kept.losses, ops.zeros_like(self.kept.losses))

    def listen(self, engine: RunEngine) -> None:
        """Emit the events inside a step, in PYNATIVE mode."""
        self._context = engine.context
        self._emitters = {e: emitter for e in _EVENTS if (emitter := engine.emitter(e)) is not None}

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        at = self.progress
        if not isinstance(at.dataset, Batches):
            size = at.dataset.get_dataset_size()
            at.counted.begin(range(size), size)

    def __call__(self, *inputs: Native) -> Native:
        """Train on a batch and return its loss."""
        at = self.progress
        window = at.window
        at.updated = at.applied = False
        if not isinstance(at.dataset, Batches):
            next(at.counted, None)
        window.add()
        share = rescale = None
        closes = window.closes
        if window.filled > 1 or not closes:
            share = _scalar(1 / window.size)
            rescale = _scalar(window.size / window.filled)  # the epoch may end before the window is full
        if not closes:
            loss = self._part("accumulate")(share, *inputs)
            self._emit(Event.AFTER_BACKWARD, loss)
            return loss
        part = self._part("update" if window.filled == 1 else "update with totals", self.parameter_norms)
        window.filled = 0
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
            _share_jit_config(cell, self)
            self._parts[key] = cell.set_train()
        return self._parts[key]

    def _emit(self, event: Event, loss: Native) -> None:
        emit = self._emitters.get(event)
        if emit is not None:
            self._context.original_args()["net_outputs"] = loss
            emit()


def asked_of_step(engine: RunEngine) -> frozenset[Capability]:
    """Return the capabilities requested by callbacks that need a StepCell."""
    asked_for = engine.bus.asked_for() | {
        capability
        for event, capability in EVENT_CAPABILITY.items()
        if engine.bus.emitter(event) is not None
    }
    return asked_for & engine.context.capabilities & STEP_CELL_CAPABILITIES


def _share_jit_config(cell: nn.Cell, source: nn.Cell) -> None:
    """Compile a Cell with the ``jit_config`` of another one."""
    if source.jit_config_dict and not cell.jit_config_dict:
        cell.set_jit_config(source)  # it only reads ``jit_config_dict``, which a Cell also has


@lru_cache(maxsize=256)  # creating a tensor costs as much as a small kernel
def _scalar(value: float) -> Tensor:
    return Tensor(value, mindspore.float32)
