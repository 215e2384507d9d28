"""The learning rate of a PyTorch optimizer, read and written in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.backends._arguments import checked_rates, lowered
from dualtrain.protocol import Native, Rate


class TorchLearningRate:
    """The rates of an optimizer's parameter groups.

    It also answers what MindSpore's ``optimizer.learning_rate`` answers (``float()``,
    ``asnumpy()``, ``set_data(x)``), so that callbacks written for MindSpore run unchanged.
    """

    def __init__(self, optimizer: Native) -> None:
        self._groups = optimizer.param_groups

    def read(self) -> Rate:
        if len(self._groups) == 1:
            return float(self._groups[0]["lr"])
        return tuple(float(group["lr"]) for group in self._groups)

    def write(self, rate: Rate) -> None:
        for group, value in zip(self._groups, checked_rates(rate, len(self._groups)), strict=True):
            _write_group(group, value)

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        for group in self._groups:
            _write_group(group, lowered(float(group["lr"]), factor, min_lr))
        return self.read()

    # As MindSpore's.

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


@contextmanager
def learning_rate_attribute(optimizer: Native, rate: TorchLearningRate | None) -> Iterator[None]:
    """Give an optimizer MindSpore's ``learning_rate`` attribute for the duration of a run."""
    if rate is None or hasattr(optimizer, "learning_rate"):
        yield
        return
    optimizer.learning_rate = rate
    try:
        yield
    finally:
        del optimizer.learning_rate


def _write_group(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # a compiled or captured step reads this very tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
