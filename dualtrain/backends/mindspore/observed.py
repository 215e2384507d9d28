"""The training step of a hand-written loop on MindSpore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from mindspore import nn

from dualtrain.backends._arguments import checked_rates
from dualtrain.backends.mindspore.optimizer import MindSporeLearningRate, make_scalable, working_set_data
from dualtrain.backends.mindspore.reported import ReportedGradients
from dualtrain.counted_step import CountedStep
from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import Capability, LearningRate, Native, Rate


class ObservedMindSporeStep:
    """Read the updates of a loop from the step counters of its optimizers.

    An update that changes no counter is counted if the loop reports it by ``run.count_update()``. Cost: one
    host read of each counter per batch.

    Args:
        optimizers: Name -> optimizer; empty if the run has none.
        network: The network; None: all parameters of the optimizers belong to it.
        lr_scheduler: Has to be None: MindSpore's schedules are inside its optimizers.

    Attributes:
        learning_rate: The rate of all optimizers, in the order of the mapping; None without optimizers.
        gradients: The gradients that the loop reports.

    Raises:
        ArgumentValueError: There is an ``lr_scheduler``.
    """

    capabilities = frozenset({Capability.GRAD_NORM})

    def __init__(
        self, optimizers: Mapping[str, Native], network: Native = None, lr_scheduler: Native = None
    ) -> None:
        if lr_scheduler is not None:
            raise ArgumentValueError(
                "Run(lr_scheduler=...) is for PyTorch, but the backend is MindSpore: pass the schedule to "
                "the optimizer, as its learning_rate."
            )
        self._optimizers = [one for one in optimizers.values() if isinstance(one, nn.Optimizer)]
        for optimizer in self._optimizers:
            make_scalable(optimizer)
        self._reported = CountedStep()
        self._start = self._at_begin = self._counts()
        self._without_counter = 0
        """Reported updates of earlier batches that changed no counter."""
        rates = [
            MindSporeLearningRate(optimizer, partial(self._has_changed, i))
            for i, optimizer in enumerate(self._optimizers)
        ]
        self.learning_rate: LearningRate | None = None
        if rates:
            self.learning_rate = rates[0] if len(rates) == 1 else _SeveralRates(rates)
        self.gradients = ReportedGradients(lambda: self.is_update_step, list(optimizers.values()), network)
        self._stack = ExitStack()

    @property
    def global_step(self) -> int:
        return sum(self._counts()) - sum(self._start) + self._without_counter + self._uncounted()

    @property
    def is_update_step(self) -> bool:
        return self._reported.is_update_step or self._counts() != self._at_begin

    @property
    def step_skipped(self) -> bool:
        return self._reported.step_skipped

    def begin(self) -> None:
        """Begin a batch, without updates so far."""
        self._without_counter += self._uncounted()
        self._at_begin = self._counts()
        self._reported = CountedStep()
        self.gradients.forget()

    def count_update(self, gradients: Native = None, *, skipped: bool = False) -> None:
        """Count an update, and store its gradients."""
        self._reported.count_update(skipped=skipped)
        if gradients is not None:
            self.gradients.report(gradients)

    def clip(self, max_norm: float) -> None:
        """Refuse clipping, since the gradients are not known before the update."""
        self._reported.clip(max_norm)

    def __enter__(self) -> ObservedMindSporeStep:
        for optimizer in self._optimizers:
            self._stack.enter_context(working_set_data(optimizer))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _counts(self) -> list[int]:
        return [int(optimizer.global_step.item()) for optimizer in self._optimizers]

    def _uncounted(self) -> int:
        """Return the reported updates of this batch, if no counter has changed."""
        reported = self._reported.global_step
        return reported if reported and self._counts() == self._at_begin else 0

    def _has_changed(self, index: int) -> int:
        return int(self._counts()[index] != self._at_begin[index])


class _SeveralRates:
    """The learning rates of several optimizers, in order."""

    def __init__(self, rates: Sequence[MindSporeLearningRate]) -> None:
        self._rates = rates

    def read(self) -> Rate:
        return tuple(value for rate in self._rates for value in _as_tuple(rate.read()))

    def write(self, rate: Rate) -> None:
        sizes = [len(_as_tuple(one.read())) for one in self._rates]
        values = iter(checked_rates(rate, sum(sizes)))
        for one, size in zip(self._rates, sizes, strict=True):
            one.write(tuple(next(values) for _ in range(size)))

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        for rate in self._rates:
            rate.scale(factor, min_lr)
        return self.read()


def _as_tuple(rate: Rate) -> tuple[float, ...]:
    return rate if isinstance(rate, tuple) else (rate,)
