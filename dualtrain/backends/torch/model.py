"""The Model for PyTorch networks: MindSpore's API over a loop of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import torch

from dualtrain.backends._arguments import (
    NO_OPTIMIZER,
    check_epochs,
    check_limits,
    check_loss_and_step,
    check_valid_frequency,
    evaluations_due,
    metric_needs_outputs,
)
from dualtrain.backends._contract import check_contract
from dualtrain.backends.torch.choice import TrainingOptions, choose_step
from dualtrain.backends.torch.data import Batches, to_device
from dualtrain.backends.torch.forward import EvalStep
from dualtrain.backends.torch.metrics import LossMetric, make_metrics
from dualtrain.backends.torch.optimizer import (
    Schedule,
    TorchLearningRate,
    checked_optimizers,
    learning_rate_attribute,
)
from dualtrain.backends.torch.outputs import as_outputs
from dualtrain.backends.torch.precision import Precision
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentValueError, RunStateError
from dualtrain.loop import run_evaluation, run_training
from dualtrain.protocol import Backend, Capability, Native
from dualtrain.window import LookAhead

_MANUAL_DIFFERENCE = frozenset(
    {Capability.ACCUMULATION, Capability.SKIP_NONFINITE, Capability.MANUAL_OPTIMIZATION}
)


class TorchModel:
    """Train, fit, evaluate and predict with a ``torch.nn.Module``.

    Made by ``dt.Model(...)``, which documents the arguments.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Native = None,
        metrics: Any = None,
        *,
        backend: Backend,
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
        optimizers = checked_optimizers(network, optimizer, automatic=automatic_optimization)
        if not automatic_optimization:
            if train_step is None:
                raise ArgumentValueError("automatic_optimization=False needs a train_step that optimises.")
            if accumulate_steps != 1:
                raise RunStateError(
                    f"accumulate_steps={accumulate_steps} cannot be had with automatic_optimization=False: "
                    f"train_step itself decides when to update."
                )
        self._backend = backend
        self._network = network
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._train_step = train_step
        self._metrics = make_metrics(metrics)
        self._ahead = LookAhead()
        schedule = None if lr_scheduler is None else Schedule(lr_scheduler, [*optimizers.values()])
        learning_rate = TorchLearningRate(*optimizers.values())
        if schedule is not None:
            learning_rate.follow(schedule.scheduler)
        if device is None:
            self._device = _device_of(network)
        else:
            self._device = _chosen_device(device)
            network.to(self._device)
        self._options = TrainingOptions(
            network=network,
            loss_fn=loss_fn,
            optimizers=optimizers,
            train_step=train_step,
            accumulate_steps=accumulate_steps,
            clip_norm=clip_norm,
            learning_rate=learning_rate,
            schedule=schedule,
            precision=Precision(amp, self._device),
            automatic=automatic_optimization,
        )

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation. See ``dt.Model.train``."""
        self.fit(
            epoch,
            train_dataset,
            callbacks=callbacks,
            dataset_sink_mode=dataset_sink_mode,
            sink_size=sink_size,
            initial_epoch=initial_epoch,
            max_steps=max_steps,
            limit_batches=limit_batches,
        )

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | list[int] = 1,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """Train up to ``epoch`` epochs and evaluate in between. See ``dt.Model.fit``."""
        _refuse_sinking(dataset_sink_mode or valid_dataset_sink_mode, sink_size)
        passes = check_epochs(epoch, initial_epoch)
        check_valid_frequency(valid_frequency)
        check_limits(max_steps, limit_batches)
        options = self._options
        if not options.optimizers:
            raise ArgumentValueError(NO_OPTIMIZER)
        batches = Batches(
            "train_dataset",
            train_dataset,
            self._device,
            passes=passes,
            limit=limit_batches,
            ahead=self._ahead,
        )
        evaluations = 0
        valid_batches = None
        if valid_dataset is not None:
            evaluations = evaluations_due(epoch, initial_epoch, valid_frequency)
            valid_batches = self._valid_batches(valid_dataset, max(evaluations, 1), limit_batches)
        engine = self._engine(
            callbacks,
            params={
                "batch_num": _batch_num(batches),
                "train_network": self._network,
                "loss_fn": self._loss_fn,
                "optimizer": self._optimizer,
                "train_dataset": train_dataset,
            },
            epochs=epoch,
            initial_epoch=initial_epoch,
            evaluations=evaluations,
            max_steps=max_steps,
        )
        step = choose_step(options, engine, self._ahead)
        batches.looks_ahead |= step.looks_ahead
        batches.at_end = getattr(step.step, "end_pass", None)
        engine.use(step.step)

        def evaluate() -> None:
            assert valid_batches is not None
            self._evaluate(engine, valid_batches, eval_network=self._network, valid_dataset=valid_dataset)

        if not self._network.training:
            self._network.train()
        with (
            learning_rate_attribute([*options.optimizers.values()], options.learning_rate),
            closing(batches),
            nullcontext() if valid_batches is None else closing(valid_batches),
            step.guard,
            engine,
        ):
            run_training(
                engine,
                step.step,
                batches,
                epoch=epoch,
                initial_epoch=initial_epoch,
                evaluate=None if valid_batches is None else evaluate,
                valid_frequency=valid_frequency,
                epoch_ended=lambda: options.step_schedule(engine.context),
            )

    def eval(
        self,
        valid_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        *,
        limit_batches: int | None = None,
    ) -> dict[str, Any]:
        """Evaluate once and return the metrics. See ``dt.Model.eval``."""
        _refuse_sinking(dataset_sink_mode)
        check_limits(None, limit_batches)
        batches = self._valid_batches(valid_dataset, 1, limit_batches)
        engine = self._engine(callbacks, params={}, evaluations=None)
        with closing(batches), engine:
            self._evaluate(engine, batches, eval_network=self._network, valid_dataset=valid_dataset)
        return dict(engine.context.metrics)

    def predict(self, *inputs: Any) -> Any:
        """Return the network's output in evaluation mode, without gradients."""
        with _evaluation_mode(self._network):
            return self._network(*to_device(inputs, self._device))

    def _engine(self, callbacks: Any, params: dict[str, Any], **options: Any) -> RunEngine:
        difference = frozenset() if self._options.automatic else _MANUAL_DIFFERENCE
        return RunEngine(
            callbacks,
            params={"network": self._network, **params},
            backend=self._backend,
            capabilities=self._backend.capabilities() ^ difference,
            **options,
        )

    def _valid_batches(self, dataset: Any, passes: int, limit: int | None) -> Batches:
        return Batches("valid_dataset", dataset, self._device, passes=passes, limit=limit)

    def _evaluate(self, engine: RunEngine, batches: Batches, **params: Any) -> None:
        if self._loss_fn is None and not self._options.automatic:
            raise ArgumentValueError(
                "under automatic_optimization=False train_step cannot be evaluated: pass loss_fn=..."
            )
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

        def results() -> dict[str, Any]:
            return {name: metric.eval() for name, metric in metrics.items()} or {
                "eval_loss": loss_metric.eval()
            }

        evaluate = EvalStep(self._network, self._loss_fn, self._train_step)
        with _evaluation_mode(self._network), self._options.precision.autocast():
            run_evaluation(
                engine,
                lambda batch: as_outputs(evaluate(batch)),
                batches,
                update=update,
                results=results,
                eval_loss=loss_metric.eval,
                batch_num=_batch_num(batches),
                **params,
            )

    def __repr__(self) -> str:
        return (
            f"Model({type(self._network).__name__}, backend='torch', "
            f"optimizer={type(self._optimizer).__name__}, device='{self._device}')"
        )


def _refuse_sinking(sink: bool, sink_size: int = -1) -> None:
    if sink or sink_size != -1:
        name = "dataset_sink_mode=True" if sink else f"sink_size={sink_size}"
        raise ArgumentValueError(f"{name} is MindSpore's: PyTorch has no data sinking.")


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
