"""PyTorch: a hand-written loop, dualtrain, and other trainers, each used according to its documentation.

Progress bars, checkpoints and the trainers' own loggers are disabled. The callbacks of each condition
follow the trainer's documentation.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch
from torch import nn

from loops.common import Condition, NotApplicable, Rows, TimedBatches, silent

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

SAME_WEIGHTS = True
"""Whether each run starts from the same weights, so that it has to end with the same."""


@dataclass
class Work:
    """A network with its loss, optimizer and batches, created for each run."""

    name: str
    network: nn.Module
    loss_fn: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Any]

    def weights(self) -> list[Any]:
        return [parameter.detach().numpy().copy() for parameter in self.network.parameters()]


def work(name: str) -> Work:
    torch.set_num_threads(1)  # some trainers set it
    torch.manual_seed(0)
    random = np.random.default_rng(0)

    def batches(rows: int, columns: int, classes: int = 10) -> list[Any]:
        return [
            (
                torch.from_numpy(random.standard_normal((rows, columns), np.float32)),
                torch.from_numpy(random.integers(0, classes, rows)),
            )
            for _ in range(32)
        ]

    if name == "W0":
        network = nn.Linear(1, 1, bias=False)
        data = [(x, x * 2) for x, _ in batches(1, 1)]
        return Work(name, network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=1e-3), data)
    if name == "W1":
        network = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
        data = batches(64, 128)
    else:
        from vit_torch import ViT  # examples/digits_vit

        network = ViT(dim=192, heads=3, layers=4)
        data = batches(32, 64)
    return Work(
        name, network, nn.CrossEntropyLoss(), torch.optim.AdamW(network.parameters(), lr=1e-3), data
    )


def total_norm(network: nn.Module) -> float:
    """Return the norm of all gradients, computed as recommended in the trainers' forums."""
    return torch.nn.utils.get_total_norm([p.grad for p in network.parameters()]).item()


def bare(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    network, loss_fn, optimizer = work.network, work.loss_fn, work.optimizer
    if condition.callbacks or condition.monitor:
        raise NotApplicable("there are no callbacks")
    if not condition.log_interval:
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_fn(network(x), y)
            loss.backward()
            optimizer.step()
        return
    rows = Rows(log, condition.log_interval)
    for step, (x, y) in enumerate(data, 1):
        optimizer.zero_grad()
        loss = loss_fn(network(x), y)
        loss.backward()
        norm = total_norm(network) if condition.norm else None
        optimizer.step()
        if rows.due(step):
            rows.write(step, loss.item(), optimizer.param_groups[0]["lr"], norm)


def dualtrain(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    import dualtrain as dt
    from loops.dualtrain_callbacks import callbacks

    model = dt.Model(work.network, work.loss_fn, work.optimizer)
    model.train(1, data, callbacks(condition, log))


def ignite(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    from ignite.engine import Engine, Events

    if condition.callbacks and not condition.listening:
        raise NotApplicable("handlers are added to an event each")
    network, loss_fn, optimizer = work.network, work.loss_fn, work.optimizer

    def update(engine: Any, batch: Any) -> Any:
        x, y = batch
        optimizer.zero_grad()
        loss = loss_fn(network(x), y)
        loss.backward()
        if condition.norm:
            engine.state.norm = total_norm(network)
        optimizer.step()
        return loss

    engine = Engine(update)
    for _ in range(condition.callbacks):
        for event in Events:
            engine.add_event_handler(event, lambda engine: None)
    if condition.log_interval:
        rows = Rows(log, condition.log_interval)

        @engine.on(Events.ITERATION_COMPLETED(every=condition.log_interval))
        def write(engine: Any) -> None:
            state = engine.state
            norm = state.norm if condition.norm else None
            rows.write(state.iteration, state.output.item(), optimizer.param_groups[0]["lr"], norm)

    engine.run(data, max_epochs=1)


def skorch(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    from skorch import NeuralNet
    from skorch.callbacks import Callback

    class Net(NeuralNet):
        _default_callbacks: ClassVar[list[Any]] = []

        def get_iterator(self, dataset: Any, training: bool = False) -> Any:
            return data

    class Log(Callback):
        def initialize(self) -> Any:
            self.rows, self.step, self.norm = Rows(log, condition.log_interval), 0, None
            return self

        def on_grad_computed(self, net: Any, **kwargs: Any) -> None:
            if condition.norm:
                self.norm = total_norm(net.module_)

        def on_batch_end(self, net: Any, loss: Any = None, **kwargs: Any) -> None:
            self.step += 1
            if self.rows.due(self.step):
                self.rows.write(self.step, loss.item(), net.optimizer_.param_groups[0]["lr"], self.norm)

    callbacks = [(f"silent{i}", callback) for i, callback in enumerate(silent(Callback, condition))]
    if condition.log_interval:
        callbacks.append(("log", Log()))
    net = Net(
        work.network,
        criterion=lambda: work.loss_fn,
        optimizer=lambda groups, **options: work.optimizer,
        max_epochs=1,
        train_split=None,
        callbacks=callbacks,
        verbose=0,
    )
    net.initialize()
    assert net.module_ is work.network
    x, y = work.batches[0]
    net.partial_fit(x, y)  # the batches come from get_iterator


def lightning(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss_fn = work.network, work.loss_fn

        def training_step(self, batch: Any, batch_index: int) -> Any:
            x, y = batch
            return self.loss_fn(self.network(x), y)

        def configure_optimizers(self) -> Any:
            return work.optimizer

    class Log(pl.Callback):
        def __init__(self) -> None:
            self.rows, self.norm = Rows(log, condition.log_interval), None

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if condition.norm:
                self.norm = total_norm(module)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            if self.rows.due(index + 1):
                lr = trainer.optimizers[0].param_groups[0]["lr"]
                self.rows.write(index + 1, outputs["loss"].item(), lr, self.norm)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*silent(pl.Callback, condition), *([Log()] if condition.log_interval else [])],
    )
    trainer.fit(Module(), data)


def trainer(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    """Hugging Face's Trainer; its callbacks receive the loss only through its own logging."""
    import transformers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss_fn = work.network, work.loss_fn

        def forward(self, x: Any, labels: Any) -> Any:
            logits = self.network(x)
            return {"loss": self.loss_fn(logits, labels), "logits": logits}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return data

    class Log(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.rows, self.norm = Rows(log, condition.log_interval), None

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if condition.norm:
                self.norm = total_norm(kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.rows.write(state.global_step, logs["loss"], logs["learning_rate"], self.norm)

    data.batches = [{"x": x, "labels": y} for x, y in data.batches]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            save_strategy="no",
            logging_strategy="steps" if condition.log_interval else "no",
            logging_steps=condition.log_interval or 500,
            report_to="none",
            disable_tqdm=True,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            remove_unused_columns=False,
        )
        own = Trainer(
            Net(),
            arguments,
            train_dataset=torch.utils.data.TensorDataset(torch.zeros(len(data))),
            optimizers=(work.optimizer, None),
            callbacks=[
                *silent(transformers.TrainerCallback, condition),
                *([Log()] if condition.log_interval else []),
            ],
        )
        own.remove_callback(transformers.PrinterCallback)
        own.train()


def keras(work: Work, condition: Condition, data: TimedBatches, log: Path) -> None:
    """Keras on PyTorch, with its own optimizer and loss, as in its guides."""
    import keras

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network = keras.layers.TorchModuleWrapper(work.network)

        def call(self, x: Any) -> Any:
            return self.network(x)

    class Log(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Rows(log, condition.log_interval)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.rows.due(batch + 1):
                lr = float(self.model.optimizer.learning_rate)
                norm = total_norm(work.network) if condition.norm else None
                self.rows.write(batch + 1, float(logs["loss"]), lr, norm)

    class Loader(torch.utils.data.DataLoader):
        """The dataset for ``fit``, with the timed batches."""

        def __init__(self) -> None:
            super().__init__(range(len(data)), batch_size=None)

        def __iter__(self) -> Any:
            return iter(data)

        def __len__(self) -> int:
            return len(data)

    if work.name == "W0":
        optimizer, loss = keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError()
    else:
        optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-8)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net = Net()
    net(work.batches[0][0])
    net.compile(optimizer, loss)
    callbacks = silent(keras.callbacks.Callback, condition)
    if condition.log_interval:
        callbacks.append(Log())
    net.fit(Loader(), epochs=1, verbose=0, callbacks=callbacks, shuffle=False)


def _of_dualtrain_alone(loop: Callable[..., None], work: Work, condition: Condition, *rest: Any) -> None:
    if condition.monitor:
        raise NotApplicable("has no such callback")
    loop(work, condition, *rest)


LOOPS = {"bare": bare, "dualtrain": dualtrain} | {
    loop.__name__: partial(_of_dualtrain_alone, loop)
    for loop in (ignite, skorch, lightning, trainer, keras)
}
