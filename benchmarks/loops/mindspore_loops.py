"""MindSpore: a loop over its train step, its own Model, and dualtrain, in GRAPH or PYNATIVE mode.

``pynative`` runs with ``launch_blocking``, without which (``pynative-async``) it is slower on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, train

from loops.common import Condition, NotApplicable, Rows, TimedBatches, silent
from loops.mindspore_cells import StepWithNorm

warnings.filterwarnings("ignore")

SAME_WEIGHTS = False
"""Compiling costs seconds, so a compiled network is trained on from run to run."""


@dataclass
class Work:
    """A factory of a network with its loss and optimizer, and the batches."""

    name: str
    network: Callable[[], nn.Cell]
    loss_fn: Callable[[], nn.Cell]
    optimizer: Callable[[nn.Cell], nn.Cell]
    batches: list[Any]
    _kept: dict[Any, Any] = field(default_factory=dict)

    def kept(self, make: Callable[[Work, Condition], Any], condition: Condition) -> Any:
        """Return the cached result of ``make`` for a condition, with its compiled Cells."""
        key = make, condition.norm
        if key not in self._kept:
            self._kept[key] = make(self, condition)
        return self._kept[key]

    def parts(self) -> tuple[nn.Cell, nn.Cell, nn.Cell]:
        network = self.network()
        return network, self.loss_fn(), self.optimizer(network)


def set_mode(engine: str) -> None:
    mode = mindspore.GRAPH_MODE if engine == "graph" else mindspore.PYNATIVE_MODE
    mindspore.set_context(mode=mode, device_target="CPU")
    if engine != "pynative-async":
        mindspore.runtime.launch_blocking()


@cache
def work(name: str) -> Work:
    mindspore.set_seed(0)
    random = np.random.default_rng(0)

    def batches(rows: int, columns: int) -> list[Any]:
        return [
            (
                Tensor(random.standard_normal((rows, columns), np.float32)),
                Tensor(random.integers(0, 10, rows).astype(np.int32)),
            )
            for _ in range(32)
        ]

    def adam(network: nn.Cell) -> nn.Cell:
        return nn.AdamWeightDecay(network.trainable_params(), 1e-3, weight_decay=0.01)

    if name == "W0":
        return Work(
            name,
            lambda: nn.Dense(1, 1, has_bias=False),
            nn.MSELoss,
            lambda network: nn.SGD(network.trainable_params(), 1e-3),
            [(x, x * 2) for x, _ in batches(1, 1)],
        )
    if name == "W1":

        def mlp() -> nn.Cell:
            return nn.SequentialCell(nn.Dense(128, 256), nn.ReLU(), nn.Dense(256, 10))

        return Work(name, mlp, nn.CrossEntropyLoss, adam, batches(64, 128))
    from vit_mindspore import ViT  # examples/digits_vit

    return Work(name, lambda: ViT(dim=192, heads=3, layers=4), nn.CrossEntropyLoss, adam, batches(32, 64))


def _step(work: Work, condition: Condition) -> Any:
    network, loss_fn, optimizer = work.parts()
    kind = StepWithNorm if condition.norm else nn.TrainOneStepCell
    step = kind(nn.WithLossCell(network, loss_fn), optimizer)
    step.set_train()
    return step


def _native(work: Work, condition: Condition) -> Any:
    if condition.norm:  # callbacks have no access to gradients, so the step returns the norm
        return train.Model(_step(work, condition))
    return train.Model(*work.parts())


def _ours(work: Work, condition: Condition) -> Any:
    import dualtrain as dt

    return dt.Model(*work.parts())


def bare(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    if condition.callbacks or condition.monitor:
        raise NotApplicable("there are no callbacks")
    step = work.kept(_step, condition)
    if not condition.log_interval:
        for x, y in data:
            step(x, y)
        return
    rows = Rows(log, condition.log_interval)
    rate = step.optimizer.learning_rate
    for number, (x, y) in enumerate(data, 1):
        outputs = step(x, y)
        if rows.due(number):
            write(rows, number, outputs, rate)


def write(rows: Rows, step: int, outputs: Any, rate: Any) -> None:
    loss, norm = outputs if isinstance(outputs, tuple) else (outputs, None)
    norm = None if norm is None else float(norm.asnumpy())
    rows.write(step, float(loss.asnumpy()), float(rate.asnumpy()), norm)


class Dataset:
    """The methods of a ``mindspore.dataset`` that Model calls, without the cost of a pipeline."""

    def __init__(self, data: TimedBatches) -> None:
        self._data = data

    def get_dataset_size(self) -> int:
        return len(self._data)

    def create_tuple_iterator(self, num_epochs: int = -1, do_copy: bool = False) -> Any:
        return iter(self._data)

    def reset(self) -> None:
        """Do nothing: there is one epoch."""


def model(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    """Train with MindSpore's own Model and its own callback."""
    if condition.monitor:
        raise NotApplicable("has no such callback")
    native = work.kept(_native, condition)

    class Log(train.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Rows(log, condition.log_interval)

        def on_train_step_end(self, run_context: Any) -> None:
            params = run_context.original_args()
            if self.rows.due(params.cur_step_num):
                optimizer = params.optimizer or params.network.optimizer
                write(self.rows, params.cur_step_num, params.net_outputs, optimizer.learning_rate)

    callbacks = silent(train.Callback, condition, lambda name: name.startswith(("on_train_", "on_eval_")))
    if condition.log_interval:
        callbacks.append(Log())
    native.train(1, Dataset(data), callbacks, dataset_sink_mode=False)


def dualtrain(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    from loops.dualtrain_callbacks import callbacks

    work.kept(_ours, condition).train(1, data, callbacks(condition, log))


LOOPS = {"bare": bare, "model": model, "dualtrain": dualtrain}
