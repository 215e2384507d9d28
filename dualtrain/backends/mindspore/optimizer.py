"""The learning rate of a MindSpore optimizer, in all its forms.

A float is a Parameter, a list a Cell with a table, a schedule a Cell, and groups are a tuple of
Parameters or a list of Cells with one entry per weight. In PYNATIVE mode the compiled optimizer keeps
reading its original storage: after ``set_data`` the Parameter has the new rate, but updates use the old
one. ``ops.assign`` writes into the original storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from dualtrain.backends._arguments import checked_rates, lowered
from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import Native, Rate


class MindSporeLearningRate:
    """The learning rate of an optimizer.

    Args:
        optimizer: A ``mindspore.nn.Optimizer``.
        steps_ahead: Returns the distance of the optimizer's step counter from the step whose rate is read:
            after an update the counter points to the next step.
    """

    def __init__(self, optimizer: Native, steps_ahead: Callable[[], int] = int) -> None:
        self._optimizer = optimizer
        self._steps_ahead = steps_ahead

    def read(self) -> Rate:
        rates = tuple(self._value(form) for form in self._forms())
        return rates[0] if len(rates) == 1 else rates

    def write(self, rate: Rate) -> None:
        forms = self._forms()
        rates = checked_rates(rate, len(forms))
        parameters = [_parameter_of(form) for form in forms]
        for form, parameter in zip(forms, parameters, strict=True):
            if parameter is None:
                raise ArgumentValueError(
                    f"the learning rate follows the schedule {_schedule_name(form)} and cannot be set to "
                    f"a value: use scale_lr(factor), which multiplies its rates."
                )
        for parameter, value in zip(parameters, rates, strict=True):
            _assign(parameter, np.full(parameter.shape, value))

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        forms = self._forms()
        for form in forms:
            if _parameter_of(form) is None and not isinstance(form, ScaledSchedule):
                raise ArgumentValueError(
                    f"the learning rate follows the schedule {_schedule_name(form)} of an optimizer that "
                    f"had taken steps before it was given to Model, so it cannot be scaled any more."
                )
        for form in forms:
            parameter = _parameter_of(form)
            if parameter is not None:
                old = map(_shortest, parameter.asnumpy().reshape(-1).tolist())
                _assign(parameter, [lowered(rate, factor, min_lr) for rate in old])
            else:
                rate = self._value(form)
                ratio = lowered(rate, factor, min_lr) / rate if rate > 0 else factor  # warm-ups begin at 0
                _assign(form.scale, form.scale.asnumpy() * ratio)
        return self.read()

    def _forms(self) -> list[Any]:
        return _forms_of(self._optimizer)

    def _value(self, form: Any) -> float:
        parameter = _parameter_of(form)
        if parameter is not None and not parameter.shape:
            return _shortest(parameter.item())
        step = max(int(self._optimizer.global_step.item()) - self._steps_ahead(), 0)
        if parameter is not None:
            table = parameter.asnumpy()
            return _shortest(table[min(step, len(table) - 1)].item())
        return _shortest(form(Tensor([step], mindspore.int32)).item())


class ScaledSchedule(nn.learning_rate_schedule.LearningRateSchedule):  # type: ignore[misc]
    """A schedule multiplied by a factor that can be changed during training.

    Args:
        schedule: The schedule.
        name: The name of the factor's Parameter.
    """

    def __init__(self, schedule: Native, name: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.scale = Parameter(Tensor(1.0, mindspore.float32), name=name, requires_grad=False)

    def construct(self, global_step: Native) -> Native:
        return self.schedule(global_step) * self.scale


def make_scalable(optimizer: Native) -> None:
    """Wrap an optimizer's schedules, before its first step, so that ``scale_lr`` works on them."""
    rate = optimizer.learning_rate
    if int(optimizer.global_step.item()) > 0:
        return  # already compiled: a new Cell would be silently ignored
    if isinstance(rate, nn.CellList):
        wrapped: dict[int, Any] = {}
        for form in rate:
            if id(form) not in wrapped:
                wrapped[id(form)] = _scaled(form, f"learning_rate_scale_{len(wrapped)}")
        optimizer.learning_rate = nn.CellList([wrapped[id(form)] for form in rate], auto_prefix=False)
    elif isinstance(rate, nn.Cell):
        optimizer.learning_rate = _scaled(rate, "learning_rate_scale")


@contextmanager
def working_set_data(optimizer: Native) -> Iterator[None]:
    """Make a user's ``optimizer.learning_rate.set_data(x)`` take effect for the duration of a run."""
    rate = optimizer.learning_rate
    forms = rate if isinstance(rate, (tuple, list, nn.CellList)) else [rate]
    parameters = {id(p): p for p in map(_parameter_of, forms) if p is not None}

    def forwarder(parameter: Any) -> Any:
        def set_data(data: Any, slice_shape: bool = False) -> Any:
            _assign(parameter, np.asarray(data.asnumpy() if hasattr(data, "asnumpy") else data))
            return parameter

        return set_data

    for parameter in parameters.values():
        parameter.set_data = forwarder(parameter)
    try:
        yield
    finally:
        for parameter in parameters.values():
            del parameter.set_data


def table_length(optimizer: Native) -> int | None:
    """Return the length of the optimizer's table of rates, if it has one."""
    forms = _forms_of(optimizer)
    lengths = [len(p) for p in map(_parameter_of, forms) if p is not None and p.ndim == 1]
    return min(lengths, default=None)


def _forms_of(optimizer: Native) -> list[Any]:
    """Return the distinct Parameters or schedule Cells, one per group."""
    rate = optimizer.learning_rate
    if isinstance(rate, (tuple, list, nn.CellList)):
        return list({id(form): form for form in rate}.values())
    return [rate]


def _scaled(form: Any, name: str) -> Any:
    return form if _parameter_of(form) is not None else ScaledSchedule(form, name)


def _schedule_name(form: Any) -> str:
    return type(form.schedule if isinstance(form, ScaledSchedule) else form).__name__


def _parameter_of(form: Any) -> Any:
    """Return the Parameter of a constant or a table; None for a schedule, which computes its rate."""
    if isinstance(form, Parameter):
        return form
    inner = getattr(form, "learning_rate", None)
    return inner if isinstance(inner, Parameter) else None


@lru_cache(maxsize=64)  # most rates are those of the step before
def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32: 0.1 reads as 0.1, as on PyTorch."""
    return float(str(np.float32(value)))


def _assign(parameter: Any, values: Any) -> None:
    ops.assign(parameter, Tensor(np.asarray(values, dtype=np.float32).reshape(parameter.shape)))
