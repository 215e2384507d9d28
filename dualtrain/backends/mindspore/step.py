"""The training step of MindSpore's Model, as a run reads it."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from dualtrain.backends._contract import warn_of_batch_norm
from dualtrain.backends.mindspore.gradients import StepGradients
from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate
from dualtrain.backends.mindspore.step_cell import StepCell
from dualtrain.protocol import Native


class MindSporeStep:
    """The state of a run's steps.

    Args:
        optimizer: A ``mindspore.nn.Optimizer``; None for a network that trains itself.
        cell: Our train step; None: MindSpore's own is used.
        probing: The calls of the network outside of the step.
        always_updates: Whether each of MindSpore's own steps makes one update, so that counting steps is
            enough.

    Attributes:
        gradients, parameter_norms, accumulation, probing: The optional parts; ``accumulation`` is None
            without a StepCell.
    """

    def __init__(
        self, optimizer: Native, cell: StepCell | None, probing: Any, *, always_updates: bool
    ) -> None:
        self.gradients = self.parameter_norms = StepGradients(cell, getattr(optimizer, "parameters", ()))
        self.accumulation = None if cell is None else _Accumulation(cell)
        self.probing = probing
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

    @property
    def is_update_step(self) -> bool:
        return self._ended if self._cell is None else self._cell.progress.updated

    @property
    def step_skipped(self) -> bool:
        cell = self._cell
        if cell is None or not cell.progress.applied or (cell.scaler is None and not cell.guarded):
            return False
        return not bool(cell.kept.made.item())

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        if self._cell is not None:
            self._cell.begin_epoch()

    def begin(self) -> None:
        """Begin a batch."""
        self._ended = False
        if self._cell is not None:
            at = self._cell.progress
            at.updated = at.applied = False

    def end(self) -> None:
        """End a batch."""
        self._ended = True
        self._steps += 1

    def drop_window(self) -> None:
        """Drop the window that a stop has left open."""
        if self._cell is not None:
            self._cell.progress.window.drop()

    def _steps_ahead(self) -> int:
        """Return the distance of the optimizer's counter from the step whose rate is read."""
        applied = self._ended if self._cell is None else self._cell.progress.applied
        return int(applied and not self.step_skipped)

    def _count(self) -> int:
        return 0 if self._counter is None else int(self._counter.item())


class _Accumulation:
    """The number of batches per update."""

    def __init__(self, cell: StepCell) -> None:
        self._cell = cell

    @property
    def accumulate_steps(self) -> int:
        return self._cell.progress.window.accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        self._cell.progress.window.accumulate_steps = value
        warn_of_batch_norm(self._cell.batch_norms, value)


def batch_norm_names(network: nn.Cell) -> list[str]:
    """Return the names of a network's BatchNorm layers."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, cell in network.cells_and_names() if isinstance(cell, kinds)]
