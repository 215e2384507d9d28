"""The Model for PyTorch networks: MindSpore's API over a loop of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dualtrain.backends import callback_bases, find_backend
from dualtrain.backends._arguments import (
    NO_OPTIMIZER,
    check_epochs,
    check_loss_and_step,
    check_valid_frequency,
    foreign_parameters,
    metric_needs_outputs,
    not_this_optimizer,
)
from dualtrain.backends.torch.backend import BACKEND
from dualtrain.backends.torch.data import Batches, to_device
from dualtrain.backends.torch.metrics import LossMetric, make_metrics
from dualtrain.backends.torch.optimizer import learning_rate_attribute
from dualtrain.backends.torch.step import EvalStep, TrainStep
from dualtrain.bus import EventBus
from dualtrain.context import CallbackParams, RunContext
from dualtrain.errors import ArgumentValueError
from dualtrain.loop import run_evaluation, run_training
from dualtrain.protocol import Native
from dualtrain.signals import terminate_cleanly


class TorchModel:
    """Train, fit, evaluate and predict with a ``torch.nn.Module``.

    Made by ``dt.Model(...)``, which documents the arguments.

    Args:
        device: None: where the network's parameters are. ``"auto"``: the accelerator that
            ``torch.accelerator`` finds (cuda, npu, mps, ...), else the CPU. Or a device. The
            network is moved there once; batches are moved as they come.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Native = None,
        metrics: Any = None,
        *,
        train_step: Callable[..., Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        check_loss_and_step(loss_fn, train_step)
        self._check_optimizer(network, optimizer)
        self._network = network
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._train_step = train_step
        self._metrics = make_metrics(metrics)
        if device is None:
            self._device = _device_of(network)
        else:
            self._device = _chosen_device(device)
            network.to(self._device)

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        *,
        initial_epoch: int = 0,
        dataset_sink_mode: bool = False,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation. See ``dt.Model.train``."""
        self.fit(
            epoch,
            train_dataset,
            callbacks=callbacks,
            initial_epoch=initial_epoch,
            dataset_sink_mode=dataset_sink_mode,
        )

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | list[int] = 1,
        callbacks: Any = None,
        *,
        initial_epoch: int = 0,
        dataset_sink_mode: bool = False,
    ) -> None:
        """Train up to ``epoch`` epochs and evaluate in between. See ``dt.Model.fit``."""
        if dataset_sink_mode:
            raise ArgumentValueError("dataset_sink_mode=True is MindSpore's: PyTorch has no data sinking.")
        passes = check_epochs(epoch, initial_epoch)
        check_valid_frequency(valid_frequency)
        if self._optimizer is None:
            raise ArgumentValueError(NO_OPTIMIZER)
        bus = EventBus(callbacks, native_bases=callback_bases())
        train_batches = Batches("train_dataset", train_dataset, self._device, passes=passes)
        evaluate = None
        if valid_dataset is not None:
            valid_batches = Batches("valid_dataset", valid_dataset, self._device, passes=passes)

            def evaluate() -> None:
                self._evaluate_in_fit(context, bus, valid_dataset, valid_batches)

        step = TrainStep(self._network, self._loss_fn, self._optimizer, self._train_step)
        params = CallbackParams(
            mode="train",
            cur_step_num=0,
            epoch_num=passes,
            batch_num=_batch_num(train_batches),
            network=self._network,
            train_network=self._network,
            loss_fn=self._loss_fn,
            optimizer=self._optimizer,
            train_dataset=train_dataset,
            train_dataset_element=None,
            list_callback=bus.callbacks,
            parallel_mode="stand_alone" if BACKEND.world_size() == 1 else "data_parallel",
            device_number=BACKEND.world_size(),
            dataset_sink_mode=False,
            initial_step=None,
            last_save_ckpt_step=None,
            latest_ckpt_file=None,
            loss_scale_mananger=None,  # MindSpore's spelling
        )
        context = RunContext(
            params,
            backend=BACKEND,
            step=step,
            initial_epoch=initial_epoch,
            capabilities=BACKEND.capabilities(),
        )
        bus.check_needs(context.capabilities, BACKEND.describe_mode())
        if not self._network.training:
            self._network.train()
        with (
            terminate_cleanly(),
            learning_rate_attribute(self._optimizer, step.learning_rate),
            bus.lifecycle(context),
        ):
            run_training(
                context,
                bus,
                step,
                train_batches,
                epoch=epoch,
                initial_epoch=initial_epoch,
                evaluate=evaluate,
                valid_frequency=valid_frequency,
                agree=bool if BACKEND.world_size() == 1 else BACKEND.any_rank,
            )

    def eval(
        self, valid_dataset: Any, callbacks: Any = None, *, dataset_sink_mode: bool = False
    ) -> dict[str, Any]:
        """Evaluate once and return the metrics. See ``dt.Model.eval``."""
        if dataset_sink_mode:
            raise ArgumentValueError("dataset_sink_mode=True is MindSpore's: PyTorch has no data sinking.")
        bus = EventBus(callbacks, native_bases=callback_bases())
        batches = Batches("valid_dataset", valid_dataset, self._device, passes=1)
        params = CallbackParams(
            mode="eval",
            cur_step_num=0,
            batch_num=_batch_num(batches),
            network=self._network,
            eval_network=self._network,
            valid_dataset=valid_dataset,
            list_callback=bus.callbacks,
            dataset_sink_mode=False,
        )
        context = RunContext(params, backend=BACKEND, capabilities=BACKEND.capabilities())
        bus.check_needs(context.capabilities, BACKEND.describe_mode())
        with terminate_cleanly(), bus.lifecycle(context):
            self._evaluate(context, bus, batches)
        return dict(params["metrics"])

    def predict(self, *inputs: Any) -> Any:
        """Return the network's output in evaluation mode, without gradients."""
        with _evaluation_mode(self._network):
            return self._network(*to_device(inputs, self._device))

    def _evaluate_in_fit(
        self, context: RunContext, bus: EventBus, valid_dataset: Any, batches: Batches
    ) -> None:
        params = context.original_args()
        training = {key: params[key] for key in ("cur_step_num", "batch_num", "net_outputs")}
        params.update(
            mode="eval",
            cur_step_num=0,
            batch_num=_batch_num(batches),
            eval_network=self._network,
            valid_dataset=valid_dataset,
        )
        self._evaluate(context, bus, batches, in_fit=True)
        params.update(training, mode="train")

    def _evaluate(
        self, context: RunContext, bus: EventBus, batches: Batches, *, in_fit: bool = False
    ) -> None:
        params = context.original_args()
        loss_metric = LossMetric()
        metrics = self._metrics
        for metric in metrics.values():
            metric.clear()

        def update(outputs: tuple[Any, Any, Any]) -> None:
            loss, prediction, label = outputs
            if loss is not None:
                loss_metric.update(loss)
            for name, metric in metrics.items():
                if isinstance(metric, LossMetric):
                    metric.update(loss)
                elif prediction is None or label is None:
                    raise metric_needs_outputs(name)
                else:
                    metric.update(prediction, label)

        def finish() -> None:
            eval_loss = {"eval_loss": loss_metric.eval()}
            results = {name: metric.eval() for name, metric in metrics.items()} or eval_loss
            params["metrics"] = results
            if in_fit:
                params["eval_results"] = {**results, **eval_loss}

        step = EvalStep(self._network, self._loss_fn, self._train_step)
        with _evaluation_mode(self._network):
            run_evaluation(context, bus, step, batches, update, finish)

    @staticmethod
    def _check_optimizer(network: torch.nn.Module, optimizer: Native) -> None:
        if optimizer is None:
            return
        if not all(hasattr(optimizer, verb) for verb in ("param_groups", "step", "zero_grad")):
            raise not_this_optimizer("torch", optimizer, find_backend(optimizer, missing_ok=True))
        own = {id(parameter) for parameter in network.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise foreign_parameters(network, "parameters()")

    def __repr__(self) -> str:
        return (
            f"Model({type(self._network).__name__}, backend='torch', "
            f"optimizer={type(self._optimizer).__name__}, device='{self._device}')"
        )


@contextmanager
def _evaluation_mode(network: torch.nn.Module) -> Iterator[None]:
    """Evaluate without gradients, and give each submodule its own train/eval flag back."""
    flags = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def _device_of(network: torch.nn.Module) -> torch.device:
    for tensor in (*network.parameters(), *network.buffers()):
        return tensor.device
    return torch.device("cpu")


def _chosen_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        chosen = torch.device(device)
        return torch.empty(0, device=chosen).device  # with its index, and only if it works
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentValueError(f"device={device!r} cannot be used: {error}") from error


def _batch_num(batches: Batches) -> float:
    """MindSpore's ``batch_num``; infinite where there is no length, so that comparing still works."""
    return float("inf") if batches.length is None else batches.length
