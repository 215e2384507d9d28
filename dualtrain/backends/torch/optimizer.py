"""The learning rate of PyTorch's optimizers, and its schedule."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.backends._arguments import checked_rates, foreign_parameters, lowered, not_this_optimizer
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.monitor import find_metric
from dualtrain.protocol import Native, Rate


class TorchLearningRate:
    """The learning rates of the parameter groups of one or more optimizers.

    It has the methods of MindSpore's ``optimizer.learning_rate`` (``float()``, ``asnumpy()``,
    ``set_data(x)``), so that callbacks written for MindSpore run unchanged.

    Args:
        optimizers: The optimizers, in the order of their groups.

    Attributes:
        used: The rates of the last update, while ``read`` returns them; otherwise None.
    """

    def __init__(self, *optimizers: Native) -> None:
        self._optimizers = optimizers
        self.used: list[float] | None = None
        self._schedule = ""
        self._factors: list[float] = []
        self._unscaled: list[float] = []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def read(self) -> Rate:
        rates = self.used
        if rates is None:
            rates = [float(group["lr"]) for one in self._optimizers for group in one.param_groups]
        return rates[0] if len(rates) == 1 else tuple(rates)

    def write(self, rate: Rate) -> None:
        if self._schedule:
            raise ArgumentValueError(
                f"the learning rate follows the schedule {self._schedule} and cannot be set to a value: "
                f"use scale_lr(factor), which multiplies its rates."
            )
        groups = self._groups
        for group, value in zip(groups, checked_rates(rate, len(groups)), strict=True):
            _write_group(group, value)
        self.used = None

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        groups = self._groups
        in_use = self.used or [float(group["lr"]) for group in groups]
        new = [lowered(rate, factor, min_lr) for rate in in_use]
        # A rate of 0, as at the begin of a warm-up, has no ratio: its later values are scaled.
        ratios = [
            after / before if before > 0 else factor for before, after in zip(in_use, new, strict=True)
        ]
        for i, (group, ratio) in enumerate(zip(groups, ratios, strict=True)):
            if self._schedule:
                self._factors[i] *= ratio
            _write_group(group, new[i] if self.used is None else float(group["lr"]) * ratio)
        if self.used is not None:
            self.used = new
        return self.read()

    def follow(self, schedule: Native) -> None:
        """Register a scheduler that writes these rates, for ``scale``."""
        self._schedule = type(schedule).__name__
        self._unscaled = [float(group["lr"]) for group in self._groups]
        self._factors = [1.0] * len(self._unscaled)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Restore the scheduler's own rates for its step, and scale its new rates afterwards."""
        groups = self._groups
        for group, factor, last in zip(groups, self._factors, self._unscaled, strict=True):
            if factor != 1.0:
                now = float(group["lr"])
                _write_group(group, last if now == last * factor else now / factor)
        yield
        self._unscaled = [float(group["lr"]) for group in groups]
        for group, factor, rate in zip(groups, self._factors, self._unscaled, strict=True):
            if factor != 1.0:
                _write_group(group, rate * factor)

    def hold(self) -> None:
        """Keep returning the rates of the last update after the schedule has changed them."""
        if self.used is None:
            self.used = [float(group["lr"]) for group in self._groups]

    def release(self) -> None:
        """Return the rates of the next update from now on."""
        self.used = None

    # MindSpore's methods.

    def __float__(self) -> float:
        rate = self.read()
        return rate[0] if isinstance(rate, tuple) else rate

    def asnumpy(self) -> Any:
        import numpy as np

        return np.asarray(self.read(), dtype=np.float32)

    def set_data(self, data: Any) -> None:
        self.write(float(data.asnumpy()) if hasattr(data, "asnumpy") else float(data))

    def __repr__(self) -> str:
        return f"TorchLearningRate({self.read()!r})"


class Schedule:
    """A ``torch.optim.lr_scheduler`` with its interval and metric.

    Args:
        argument: The argument ``lr_scheduler``: a scheduler, stepped once per update, or
            ``{"scheduler": s, "interval": "update" | "epoch", "monitor": name}``.
        optimizers: The Model's optimizers; the scheduler has to belong to one of them.

    Raises:
        ArgumentTypeError: The argument is not a scheduler.
        ArgumentValueError: It belongs to another optimizer, the interval is unknown, or a
            ReduceLROnPlateau has no metric.
    """

    def __init__(self, argument: Any, optimizers: Sequence[Native]) -> None:
        options = dict(argument) if isinstance(argument, Mapping) else {"scheduler": argument}
        scheduler = options.pop("scheduler", None)
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "optimizer"):
            raise ArgumentTypeError(
                f"lr_scheduler takes a torch.optim.lr_scheduler or a mapping with one under 'scheduler', "
                f"but got {argument!r:.80}."
            )
        self._on_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.monitor: str | None = options.pop("monitor", None)
        self.interval: str = options.pop("interval", "epoch" if self._on_plateau else "update")
        if options or self.interval not in ("update", "epoch"):
            raise ArgumentValueError(
                f"lr_scheduler takes 'scheduler', 'interval' ('update' or 'epoch') and 'monitor', "
                f"but got {argument!r:.80}."
            )
        if self._on_plateau and self.monitor is None:
            raise ArgumentValueError(
                "ReduceLROnPlateau needs a metric: pass "
                "lr_scheduler={'scheduler': s, 'monitor': 'eval_loss'} or another metric's name."
            )
        if self._on_plateau and self.interval == "update" and self.monitor != "loss":
            raise ArgumentValueError(
                f"ReduceLROnPlateau with interval 'update' can only monitor the training 'loss', since "
                f"{self.monitor!r} is computed once per epoch: leave interval out."
            )
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ArgumentValueError(
                "lr_scheduler belongs to another optimizer than this Model's, so it would change nothing."
            )
        self.scheduler = scheduler

    def belongs_to(self, optimizer: Native) -> bool:
        """Return whether the schedule belongs to this optimizer."""
        return self.scheduler.optimizer is optimizer

    def advance(self, rate: TorchLearningRate, metrics: Mapping[str, Any], loss: float | None) -> None:
        """Step the scheduler.

        Args:
            rate: The learning rate that it writes.
            metrics: The results of this epoch's evaluation; empty without an evaluation: a plateau
                scheduler with a metric of the evaluation is then not stepped.
            loss: The training loss, for ``monitor="loss"``.
        """
        value: Any = None
        if self._on_plateau:
            if self.monitor == "loss":
                value = loss
            elif metrics:
                try:
                    value = find_metric(str(self.monitor), metrics)
                except KeyError as error:
                    raise ArgumentValueError(f"lr_scheduler's monitor: {error.args[0]}.") from None
            if value is None:
                return
        rate.hold()
        with rate.unscaled():
            self.scheduler.step(*(() if value is None else (float(value),)))


def checked_optimizers(
    network: torch.nn.Module, optimizer: Native, *, automatic: bool
) -> dict[str, Native]:
    """Return name -> optimizer for the Model's argument, or refuse it.

    Raises:
        ArgumentTypeError: It is no optimizer of PyTorch's, or several under automatic optimisation.
        ArgumentValueError: It has none of the network's parameters, or its step needs a closure.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        if automatic:
            raise ArgumentTypeError(
                "several optimizers need automatic_optimization=False, with a train_step that says "
                "when each of them steps."
            )
        optimizers = dict(optimizer)
    else:
        optimizers = {"optimizer": optimizer}
    own = {id(parameter) for parameter in network.parameters()}
    for native in optimizers.values():
        if not all(hasattr(native, verb) for verb in ("param_groups", "step", "zero_grad")):
            raise not_this_optimizer("torch", native)
        if not any(id(p) in own for group in native.param_groups for p in group["params"]):
            raise foreign_parameters(network, "parameters()")
        if automatic:
            check_steps_without_closure(native)
    return optimizers


def check_steps_without_closure(optimizer: Native) -> None:
    """Refuse optimizers that need a closure, such as LBFGS.

    Raises:
        ArgumentValueError: ``step`` needs a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentValueError(
            f"{type(optimizer).__name__}.step needs a closure, which the Model does not pass: use "
            f"automatic_optimization=False and call it in train_step."
        )


@contextmanager
def learning_rate_attribute(optimizers: Sequence[Native], rate: TorchLearningRate) -> Iterator[None]:
    """Give optimizers MindSpore's ``learning_rate`` attribute for the duration of a run."""
    given = [optimizer for optimizer in optimizers if not hasattr(optimizer, "learning_rate")]
    for optimizer in given:
        optimizer.learning_rate = rate if len(optimizers) == 1 else TorchLearningRate(optimizer)
    try:
        yield
    finally:
        for optimizer in given:
            del optimizer.learning_rate


@contextmanager
def following(schedule: Native, rate: TorchLearningRate) -> Iterator[None]:
    """Make ``scale`` work with a schedule that the user's loop steps, for the duration of a run."""
    rate.follow(schedule)
    step, state_dict = schedule.step, schedule.state_dict
    replaced = {name: vars(schedule)[name] for name in ("step", "state_dict") if name in vars(schedule)}

    def scaled_step(*args: Any, **kwargs: Any) -> None:
        with rate.unscaled():
            step(*args, **kwargs)

    def own_state() -> dict[str, Any]:  # PyTorch's has all attributes, including these two functions
        return {name: value for name, value in state_dict().items() if name not in ("step", "state_dict")}

    schedule.step, schedule.state_dict = scaled_step, own_state
    try:
        yield
    finally:
        del schedule.step, schedule.state_dict
        schedule.__dict__.update(replaced)


def _write_group(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # a compiled or captured step reads this tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
