"""What happens to one batch on MindSpore: the Cells around ``train_step``, and the step's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate
from dualtrain.protocol import Native

# MindSpore's GRAPH mode compiles the Cells below from their source: `construct` keeps to what
# its compiler knows, and the messages are constants, which it can raise while compiling.
CLAIM = "train_step has to give "


class TrainStepCell(nn.Cell):  # type: ignore[misc]
    """``train_step(network, batch)`` as a Cell.

    Args:
        network: The network.
        train_step: Returns a scalar loss, or a mapping with it under ``"loss"``.
    """

    def __init__(self, network: nn.Cell, train_step: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.train_step = train_step
        self.keys: tuple[str, ...] = ()
        """The keys of mapping batches, whose columns come in in this order; set before the first call."""

    def run(self, batch):  # type: ignore[no-untyped-def]
        if len(self.keys) == 0:
            return self.train_step(self.network, batch)
        named = {}
        for i in range(len(self.keys)):
            named[self.keys[i]] = batch[i]
        return self.train_step(self.network, named)


class ForwardCell(TrainStepCell):
    """``train_step`` in training: gives the loss, checked."""

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        out = self.run(batch)  # type: ignore[no-untyped-call]
        if isinstance(out, dict):
            if "loss" not in out:
                raise ValueError("train_step has to give a mapping with 'loss', but that key is missing")
            out = out["loss"]
        if not isinstance(out, Tensor):
            raise TypeError(
                "train_step has to give a scalar loss tensor, but gave something else "
                "(was .item(), .asnumpy() or float() called on it, or nothing returned?)"
            )
        if out.ndim != 0:
            raise ValueError("train_step has to give a scalar loss, but gave a larger tensor: reduce it")
        return out


class EvalCell(TrainStepCell):
    """``train_step`` in an evaluation: ``(loss, outputs, label)`` where known, else ``(loss,)``."""

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        out = self.run(batch)  # type: ignore[no-untyped-call]
        if isinstance(out, dict):
            if "outputs" in out and "label" in out:
                return out["loss"], out["outputs"], out["label"]
            return (out["loss"],)
        return (out,)


class LossEvalCell(nn.Cell):  # type: ignore[misc]
    """A network that gives the loss itself, in an evaluation: ``(loss,)``."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        return (self.network(*batch),)


def has_gradient(cell: nn.Cell, weights: Native, batch: tuple[Native, ...]) -> bool:
    """Tell whether a Cell's scalar output depends on any of the weights.

    A gradient that is zero by chance and one that was cut look the same; started from NaN
    instead of one, only the first comes out as NaN.
    """
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)(cell, weights)
    gradients = gradient(*batch, Tensor(float("nan"), mindspore.float32))
    return any(bool(np.isnan(g.asnumpy()).any()) for g in gradients)


class MindSporeStep:
    """The state of a run's steps, as the run context reads it.

    Args:
        optimizer: A ``mindspore.nn.Optimizer``, or None.
    """

    def __init__(self, optimizer: Native) -> None:
        self._counter = getattr(optimizer, "global_step", None)
        self._start = self._count()
        self.learning_rate = None if self._counter is None else MindSporeLearningRate(optimizer)

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run, read from the optimizer: one host read."""
        return self._count() - self._start

    def begins(self) -> None:
        """Note that a step begins: the optimizer's counter points to its rate."""
        if self.learning_rate is not None:
            self.learning_rate.steps_ahead = 0

    def ends(self) -> None:
        """Note that a step has ended: the optimizer's counter points to the next one's rate."""
        if self.learning_rate is not None:
            self.learning_rate.steps_ahead = 1

    def _count(self) -> int:
        return 0 if self._counter is None else int(self._counter.asnumpy().item())
