"""The Model for PyTorch networks: MindSpore's API over a loop of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch

from dualtrain.backends import callback_bases, find_backend
from dualtrain.backends._arguments import (
    NO_OPTIMIZER,
    check_epochs,
    check_loss_and_step,
    check_valid_frequency,
    evaluations_due,
    foreign_parameters,
    metric_needs_outputs,
    not_this_optimizer,
)
from dualtrain.backends._contract import check_contract
from dualtrain.backends.torch.backend import BACKEND
from dualtrain.backends.torch.data import Batches, to_device
from dualtrain.backends.torch.metrics import LossMetric, make_metrics
from dualtrain.backends.torch.optimizer import Schedule, TorchLearningRate, learning_rate_attribute
from dualtrain.backends.torch.step import EvalStep, Precision, TrainStep, check_steps_without_closure
from dualtrain.bus import EventBus
from dualtrain.context import CallbackParams, RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.loop import run_evaluation, run_training
from dualtrain.protocol import Capability, Native
from dualtrain.signals import terminate_cleanly

_MANUAL_DIFFERENCE = frozenset(
    {Capability.ACCUMULATION, Capability.SKIP_NONFINITE, Capability.MANUAL_OPTIMIZATION}
)


class TorchModel:
    """Train, fit, evaluate and predict with a ``torch.nn.Module``.

    Made by ``dt.Model(...)``, which documents the arguments.

    Args:
        accumulate_steps: Batches per update.
        clip_norm: The largest norm that an update's gradients may have; larger ones are scaled down.
        lr_scheduler: A ``torch.optim.lr_scheduler``, stepped once per update, or
            ``{"scheduler": s, "interval": "update" | "epoch", "monitor": name}``; a
            ReduceLROnPlateau steps by epochs, with the metric that ``monitor`` names.
        amp: ``"bf16"`` or ``"fp16"`` for mixed precision; fp16 scales the loss and skips an update
            whose gradients overflow.
        automatic_optimization: False: ``train_step(network, batch, run_context)`` drives
            ``run_context.zero_grad``, ``backward`` and ``optimizer_step``; ``optimizer`` may then be
            a mapping name -> optimizer, and ``loss_fn`` serves evaluation alone.
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
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        lr_scheduler: Any = None,
        amp: str | None = None,
        automatic_optimization: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        check_loss_and_step(loss_fn, train_step, automatic_optimization)
        check_contract(accumulate_steps, clip_norm)
        self._automatic = automatic_optimization
        self._optimizers = self._checked_optimizers(network, optimizer)
        if not self._automatic:
            if train_step is None:
                raise ArgumentValueError("automatic_optimization=False needs a train_step that optimises.")
            if accumulate_steps != 1:
                raise RunStateError(
                    f"accumulate_steps={accumulate_steps} cannot be had with automatic_optimization=False: "
                    f"train_step itself decides when to update."
                )
        self._network = network
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._train_step = train_step
        self._accumulate_steps = accumulate_steps
        self._clip_norm = clip_norm
        self._schedule = (
            None if lr_scheduler is None else Schedule(lr_scheduler, [*self._optimizers.values()])
        )
        self._metrics = make_metrics(metrics)
        self._learning_rate = TorchLearningRate(*self._optimizers.values())
        if self._schedule is not None:
            self._learning_rate.follow(self._schedule.scheduler)
        if device is None:
            self._device = _device_of(network)
        else:
            self._device = _chosen_device(device)
            network.to(self._device)
        self._precision = Precision(amp, self._device)

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
        if not self._optimizers:
            raise ArgumentValueError(NO_OPTIMIZER)
        bus = EventBus(callbacks, native_bases=callback_bases())
        train_batches = Batches("train_dataset", train_dataset, self._device, passes=passes)
        valid_batches = evaluate = None
        evaluations = 0
        if valid_dataset is not None:
            evaluations = evaluations_due(epoch, initial_epoch, valid_frequency)
            valid_batches = Batches(
                "valid_dataset", valid_dataset, self._device, passes=max(evaluations, 1)
            )

            def evaluate() -> None:
                self._evaluate_in_fit(context, bus, valid_dataset, valid_batches)

        step = TrainStep(
            self._network,
            self._loss_fn,
            self._optimizers,
            self._train_step,
            train_batches,
            accumulate_steps=self._accumulate_steps,
            clip_norm=self._clip_norm,
            learning_rate=self._learning_rate,
            schedule=self._schedule,
            precision=self._precision,
            automatic=self._automatic,
        )
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
            capabilities=BACKEND.capabilities() ^ (frozenset() if self._automatic else _MANUAL_DIFFERENCE),
            callbacks=bus.callbacks,
            evaluations=evaluations,
        )
        bus.check_needs(context.capabilities, BACKEND.describe_mode())
        if not self._network.training:
            self._network.train()
        with (
            terminate_cleanly(),
            learning_rate_attribute([*self._optimizers.values()], step.learning_rate),
            closing(train_batches),
            nullcontext() if valid_batches is None else closing(valid_batches),
            bus.lifecycle(context),
            step.listening(bus, context),
        ):
            run_training(
                context,
                bus,
                step,
                step,
                epoch=epoch,
                initial_epoch=initial_epoch,
                evaluate=evaluate,
                valid_frequency=valid_frequency,
                agree=None if BACKEND.world_size() == 1 else BACKEND.any_rank,
                epoch_ended=step.epoch_ended,
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
        context = RunContext(
            params, backend=BACKEND, capabilities=BACKEND.capabilities(), callbacks=bus.callbacks
        )
        bus.check_needs(context.capabilities, BACKEND.describe_mode())
        with terminate_cleanly(), closing(batches), bus.lifecycle(context):
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

        if self._loss_fn is None and not self._automatic:
            raise ArgumentValueError(
                "under automatic_optimization=False train_step cannot be evaluated: pass loss_fn=..."
            )
        step = EvalStep(self._network, self._loss_fn, self._train_step)
        with _evaluation_mode(self._network), self._precision.autocast():
            run_evaluation(context, bus, step, batches, update, finish)

    def _checked_optimizers(self, network: torch.nn.Module, optimizer: Native) -> dict[str, Native]:
        if optimizer is None:
            return {}
        if isinstance(optimizer, Mapping):
            if self._automatic:
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
                raise not_this_optimizer("torch", native, find_backend(native, missing_ok=True))
            if not any(id(p) in own for group in native.param_groups for p in group["params"]):
                raise foreign_parameters(network, "parameters()")
            if self._automatic:
                check_steps_without_closure(native)
        return optimizers

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
