"""A loop without a framework, to run callbacks on losses that are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dualtrain.context import RunContext
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentValueError
from dualtrain.loop import is_due, run_evaluation, run_training
from dualtrain.protocol import Capability, LearningRate, Rate
from dualtrain.testing.fake_backend import FakeBackend, FakeLearningRate
from dualtrain.window import LookAhead, Window


class FakeLoop:
    """Run callbacks through the real loop and event bus, without a framework, on losses that are given.

    Nothing is trained. Where a callback uses ``Capability.SKIP_NONFINITE``, the update of a window with a
    loss that is not finite is skipped. The loop is its own training step, with gradients and accumulation.

    Args:
        losses: The losses of an epoch's steps, the same in every epoch.
        epochs: The epoch to end at.
        lr: The learning rate that callbacks read and set.
        evaluations: The results of the evaluations, one mapping each, in turn; None: no
            evaluation. Each evaluation has one batch.
        valid_frequency: As in ``Model.fit``.
        loss_fn: What callbacks find as ``loss_fn``; it is not called.
        parameters: Name -> numbers, which plain gradient descent moves by ``lr`` times the gradient
            at each update, anew from these values in each run. None: ``{"weight": [1.0]}``.
        gradients: The gradients of parameters, the same at every update; 1 where none is given.
        initial_epoch: Epochs before this run.

    Attributes:
        learning_rates: The learning rate that each step was taken with.
    """

    loss_scale: float | None = None

    def __init__(
        self,
        losses: Sequence[float],
        *,
        epochs: int = 1,
        lr: float = 0.1,
        evaluations: Sequence[dict[str, Any]] | None = None,
        valid_frequency: int | list[int] = 1,
        loss_fn: Any = None,
        parameters: Mapping[str, Sequence[float]] | None = None,
        gradients: Mapping[str, Sequence[float]] | None = None,
        initial_epoch: int = 0,
    ) -> None:
        self.losses = losses
        self.epochs = epochs
        self.initial_epoch = initial_epoch
        self.evaluations = evaluations
        self.valid_frequency = valid_frequency
        self.loss_fn = loss_fn
        self.parameters = {"weight": [1.0]} if parameters is None else parameters
        self._gradients = {**{n: [1.0] * len(v) for n, v in self.parameters.items()}, **(gradients or {})}
        self.learning_rate: LearningRate | None = FakeLearningRate(lr)
        self._batches = LookAhead()
        self._start()

    def _start(self) -> None:
        self.accumulation = Window(self._batches)
        self.gradients = self.parameter_norms = self
        self.global_step = 0
        self.is_update_step = True
        self.step_skipped = False
        self.learning_rates: list[Rate] = []
        self._moved = {name: list(values) for name, values in self.parameters.items()}
        self._requested = self._measured = self._guarded = False
        self._window_losses: list[float] = []

    def grad_norm(self) -> float | None:
        """Return the norm of all the gradients, at an update."""
        if not self.is_update_step:
            return None
        return math.hypot(*(value for name in self._moved for value in self._gradients[name]))

    def grad_norm_clipped(self) -> float | None:
        """Return the same: nothing is clipped."""
        return self.grad_norm()

    def trained_parameters(self) -> dict[str, list[float]]:
        """Return the parameters, as descent has moved them."""
        return self._moved

    def request_parameter_grad_norms(self) -> None:
        """Request the norms for the next update."""
        self._requested = True

    def parameter_grad_norms(self) -> dict[str, float] | None:
        """Return the norms of the given gradients, if they were requested."""
        if not self._measured:
            return None
        return {name: math.hypot(*self._gradients[name]) for name in self._moved}

    def run(self, callbacks: Any = None) -> RunContext:
        """Run once and return the context."""
        self._start()
        due = range(self.initial_epoch + 1, self.epochs + 1)
        evaluations = sum(is_due(epoch, self.valid_frequency) for epoch in due)
        backend = FakeBackend()
        engine = RunEngine(
            callbacks,
            params={"batch_num": len(self.losses), "loss_fn": self.loss_fn},
            backend=backend,
            step=self,
            capabilities=backend.capabilities(),
            epochs=self.epochs,
            initial_epoch=self.initial_epoch,
            evaluations=0 if self.evaluations is None else evaluations,
        )
        self._guarded = Capability.SKIP_NONFINITE in engine.bus.asked_for()
        results = iter(self.evaluations or ())

        def evaluate() -> None:
            found = next(results, None)
            if found is None:
                raise ArgumentValueError(
                    f"FakeLoop(evaluations=...) has {len(self.evaluations or ())} results, and one more "
                    f"evaluation is due at epoch {engine.context.epoch}: give one for each."
                )
            run_evaluation(
                engine,
                lambda batch: batch,
                [0.0],
                results=lambda: dict(found),
                batch_num=1,
                eval_network=None,
                valid_dataset=None,
            )

        with engine:
            run_training(
                engine,
                self._step,
                _Epoch(self._batches, self.losses),
                epoch=self.epochs,
                initial_epoch=self.initial_epoch,
                evaluate=None if self.evaluations is None else evaluate,
                valid_frequency=self.valid_frequency,
            )
        return engine.context

    def _step(self, loss: float) -> float:
        assert self.learning_rate is not None
        rate = self.learning_rate.read()
        self.learning_rates.append(rate)
        window = self.accumulation
        window.add()
        self._window_losses.append(loss)
        self.is_update_step = window.closes
        self.step_skipped = False
        self._measured = self._requested and self.is_update_step
        if self.is_update_step:
            window.filled = 0
            if self._guarded:
                losses = map(FakeBackend().to_float, self._window_losses)
                self.step_skipped = not all(map(math.isfinite, losses))
            self._requested = False
            self._window_losses.clear()
            if not self.step_skipped:
                self.global_step += 1
                self._descend(rate)
        return loss

    def _descend(self, lr: Any) -> None:
        for name, values in self._moved.items():
            values[:] = [v - lr * g for v, g in zip(values, self._gradients[name], strict=True)]


class _Epoch:
    """The steps of an epoch, with their look-ahead."""

    def __init__(self, batches: LookAhead, losses: Sequence[float]) -> None:
        self._batches, self._losses = batches, losses

    def __iter__(self) -> LookAhead:
        self._batches.begin(self._losses, len(self._losses))
        return self._batches
