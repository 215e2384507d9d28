"""The Model for MindSpore networks: MindSpore's own, with our callbacks bridged into it."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, train
from mindspore.train.model import _pynative_executor

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
from dualtrain.backends._contract import check_contract, warn_of_batch_norm
from dualtrain.backends.mindspore.backend import BACKEND, graph_mode
from dualtrain.backends.mindspore.bridge import BridgedRun, is_native
from dualtrain.backends.mindspore.cells import CLAIM, EvalCell, ForwardCell, LossEvalCell, TrainStepCell
from dualtrain.backends.mindspore.data import as_dataset, closing_passes
from dualtrain.backends.mindspore.metrics import make_metrics
from dualtrain.backends.mindspore.optimizer import make_scalable, table_length, working_set_data
from dualtrain.backends.mindspore.probes import sample_attention
from dualtrain.backends.mindspore.signals import InterruptWatch
from dualtrain.backends.mindspore.step import GradientCheck, MindSporeStep, StepCell, batch_norm_names
from dualtrain.bus import EventBus, as_callbacks
from dualtrain.context import CallbackParams, RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, DualTrainError, RunStateError
from dualtrain.protocol import EVENT_CAPABILITY, Capability, Native

_training = threading.RLock()
_OURS = frozenset(
    {
        Capability.GRADIENT_EVENTS,
        Capability.GRAD_NORM,
        Capability.PARAMETER_GRAD_NORMS,
        Capability.ACCUMULATION,
        Capability.SKIP_NONFINITE,
    }
)
"""What needs a train step of ours in place of MindSpore's own."""


class MindSporeModel(train.Model):  # type: ignore[misc]
    """Train, fit, evaluate and predict with a ``mindspore.nn.Cell``.

    Made by ``dt.Model(...)``, which documents the common arguments. It is a
    ``mindspore.train.Model`` and takes that Model's own arguments too, by position or by name.
    A schedule of the optimizer is wrapped, so that ``scale_lr`` works on top of it.
    """

    def __init__(
        self,
        network: nn.Cell,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Native = None,
        metrics: Any = None,
        eval_network: nn.Cell | None = None,
        eval_indexes: list[int] | None = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
        *,
        train_step: Callable[..., Any] | None = None,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        lr_scheduler: None = None,
        amp: str | None = None,
        automatic_optimization: bool = True,
        **native: Any,
    ) -> None:
        check_loss_and_step(loss_fn, train_step)
        check_contract(accumulate_steps, clip_norm)
        if lr_scheduler is not None:
            raise ArgumentValueError(
                "lr_scheduler is PyTorch's: a MindSpore optimizer takes its schedule as learning_rate."
            )
        if not automatic_optimization:
            raise ArgumentValueError(
                "automatic_optimization=False is PyTorch's: in MindSpore pass a network that trains "
                "itself, such as a TrainOneStepCell of your own, without an optimizer."
            )
        self._check_optimizer(network, optimizer)
        self._accumulate_steps = accumulate_steps
        self._clip_norm = clip_norm
        self._scaler = None
        if amp is not None:
            self._scaler, amp_level = _mixed_precision(amp, amp_level, native)
        self._train_step = train_step
        self._default_metrics = metrics is None and eval_network is None
        metrics = make_metrics(metrics)
        if self._default_metrics:
            metrics = {"eval_loss": train.Loss()}
        self._step_cells: list[TrainStepCell] = []
        if train_step is not None:
            self._step_cells = [ForwardCell(network, train_step), EvalCell(network, train_step)]
        if eval_network is None and loss_fn is None:
            eval_network = self._step_cells[1] if self._step_cells else LossEvalCell(network)
            eval_indexes = [0, 1, 2]
        if isinstance(optimizer, nn.Optimizer):
            make_scalable(optimizer)
        super().__init__(
            network,
            loss_fn,
            optimizer,
            metrics,
            eval_network,
            eval_indexes,
            amp_level,
            boost_level,
            **native,
        )
        self._native_network = self._train_network  # type: ignore[has-type]
        self._step_cell: StepCell | None = None
        if accumulate_steps > 1 or clip_norm is not None or self._scaler is not None:
            if optimizer is not None and not self._steps_can_be_ours(sink=False):
                raise ArgumentValueError(
                    "accumulate_steps, clip_norm and amp cannot be had together with loss_scale_manager or "
                    "boost_level, for which MindSpore uses train steps of its own."
                )
            warn_of_batch_norm(batch_norm_names(network), accumulate_steps)

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation. See ``dt.Model.train``."""
        training = self._training(epoch, train_dataset, callbacks, dataset_sink_mode, initial_epoch, 0)
        with training as (dataset, bridged):
            super().train(epoch, dataset, bridged, dataset_sink_mode, sink_size, initial_epoch)

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
    ) -> None:
        """Train up to ``epoch`` epochs and evaluate in between. See ``dt.Model.fit``."""
        check_valid_frequency(valid_frequency)
        check_epochs(epoch, initial_epoch)
        evaluations = 0
        if valid_dataset is not None:
            evaluations = evaluations_due(epoch, initial_epoch, valid_frequency)
            valid_dataset = self._dataset("valid_dataset", valid_dataset, max(evaluations, 1))
        training = self._training(
            epoch, train_dataset, callbacks, dataset_sink_mode, initial_epoch, evaluations
        )
        with closing_passes(valid_dataset), training as (dataset, bridged):
            super().fit(
                epoch,
                dataset,
                valid_dataset,
                valid_frequency,
                bridged,
                dataset_sink_mode,
                valid_dataset_sink_mode,
                sink_size,
                initial_epoch,
            )

    def eval(
        self, valid_dataset: Any, callbacks: Any = None, dataset_sink_mode: bool = False
    ) -> dict[str, Any]:
        """Evaluate once and return the metrics. See ``dt.Model.eval``."""
        dataset = self._dataset("valid_dataset", valid_dataset, 1)
        with closing_passes(dataset), self._run(callbacks, 0, dataset_sink_mode) as (bridged, _):
            return dict(super().eval(dataset, bridged, dataset_sink_mode))

    def predict(self, *inputs: Any, **native: Any) -> Any:
        """Return the network's output in evaluation mode. Numpy inputs are made tensors."""
        tensors = [mindspore.Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
        return super().predict(*tensors, **native)

    @contextmanager
    def _training(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any,
        sink: bool,
        initial_epoch: int,
        evaluations: int,
    ) -> Iterator[tuple[Any, list[Any]]]:
        passes = check_epochs(epoch, initial_epoch)
        if self._optimizer is None and not _trains_itself(self._network):
            raise ArgumentValueError(NO_OPTIMIZER)
        dataset = self._dataset("train_dataset", train_dataset, passes)
        self._warn_of_short_table(passes, dataset.get_dataset_size())
        set_data = nullcontext() if self._optimizer is None else working_set_data(self._optimizer)
        check = None
        if self._train_step is not None and self._optimizer is not None:
            check = GradientCheck(self._network, self._step_cells[0], self._optimizer)
        run = self._run(callbacks, initial_epoch, sink, dataset, check, evaluations)
        with closing_passes(dataset), set_data, run as (bridged, step):
            try:
                yield dataset, bridged
            except BaseException as error:
                if not graph_mode():
                    # An error inside a Cell leaves MindSpore recording, and the next run's forward
                    # passes would run twice.
                    _pynative_executor.clear_res()
                untaken = self._train_step is not None and step.global_step == 0
                explained = _explained(error) if untaken else None
                if explained is None:
                    raise
                raise explained from error
            if self._train_network is self._step_cell:
                self._step_cell.drop_window()

    @contextmanager
    def _run(
        self,
        callbacks: Any,
        initial_epoch: int,
        sink: bool,
        dataset: Any = None,
        check: GradientCheck | None = None,
        evaluations: int | None = None,
    ) -> Iterator[tuple[list[Any], MindSporeStep]]:
        """Run our part of a train, fit or eval call; without a dataset it is an evaluation."""
        given = as_callbacks(callbacks)
        bases = callback_bases()
        bus = EventBus([c for c in given if not is_native(c)], native_bases=bases)
        capabilities = BACKEND.capabilities()
        if sink and graph_mode() and mindspore.get_context("device_target") != "CPU":
            capabilities -= {Capability.STEP_EVENTS}
        if not self._steps_can_be_ours(sink):
            capabilities -= _OURS
        bus.check_needs(capabilities, BACKEND.describe_mode())
        if not _training.acquire(blocking=False):
            raise RunStateError(
                "another thread of this process is running a MindSpore Model; MindSpore crashes or hangs "
                "when two threads train: use processes instead."
            )
        try:
            cell = None if dataset is None else self._choose_step_cell(bus, capabilities)
            step = MindSporeStep(
                None if dataset is None else self._optimizer,
                cell,
                self._network,
                getattr(self._native_network, "network", None),
                lambda samples, function: self._sample_attention(context, samples, function),
                always_updates=self._steps_can_be_ours(sink),
            )
            context = RunContext(
                CallbackParams(),
                backend=BACKEND,
                step=step,
                initial_epoch=initial_epoch,
                capabilities=capabilities,
                callbacks=given,
                evaluations=evaluations,
            )
            if cell is not None:
                cell.listen(bus, context)
            interrupts = InterruptWatch()
            any_rank = BACKEND.any_rank if BACKEND.world_size() > 1 else None
            run = BridgedRun(
                context, step, interrupts, self._eval_loss, any_rank, check, bus.callback_times
            )
            with interrupts.watching(), bus.lifecycle(context):
                yield run.callbacks(given, bases), step
        finally:
            _training.release()

    def _sample_attention(self, context: RunContext, samples: int | None, function: Any) -> Any:
        batch = tuple(context.original_args()["train_dataset_element"])
        if function is None:
            return sample_attention(self._network, self._forward_alone, batch, samples, None)

        def given(columns: tuple[Native, ...]) -> Any:
            keys = self._step_cells[0].keys if self._step_cells else ()
            named = dict(zip(keys, columns, strict=True)) if keys else columns
            return function(self._network, named)

        return sample_attention(self._network, self._forward_alone, batch, samples, given)

    def _forward_alone(self, batch: tuple[Native, ...]) -> Native:
        """Call the network as the step does; without the loss, where that is apart."""
        network = self._network
        if self._step_cells:
            return self._step_cells[0].run(batch)  # type: ignore[no-untyped-call]
        if self._optimizer is None and _trains_itself(network):
            return network.network(*batch)
        return network(*(batch if self._loss_fn is None else batch[:-1]))

    def _steps_can_be_ours(self, sink: bool) -> bool:
        """Whether a StepCell can stand in for MindSpore's own train step."""
        native = self._native_network
        return type(native) is nn.TrainOneStepCell and not native.sense_flag and not sink

    def _choose_step_cell(self, bus: EventBus, capabilities: frozenset[Capability]) -> StepCell | None:
        """Give Model our train step for this run if something in it needs it, else MindSpore's own."""
        needed = bus.asked_for() & capabilities
        events = any(
            bus.emitter(event) is not None
            for event, capability in EVENT_CAPABILITY.items()
            if capability is Capability.GRADIENT_EVENTS
        )
        asked = self._accumulate_steps > 1 or self._clip_norm is not None or self._scaler is not None
        self._train_network = self._native_network
        if not (asked or events or needed & _OURS) or self._optimizer is None:
            return None
        if self._step_cell is None:
            names = batch_norm_names(self._network)  # type: ignore[has-type]
            self._step_cell = StepCell(self._native_network, self._clip_norm, self._scaler, names)
            self._step_cell._jit_config_dict = self._native_network._jit_config_dict
        self._step_cell.reset(
            self._accumulate_steps,
            parameter_norms=Capability.PARAMETER_GRAD_NORMS in needed,
            guarded=Capability.SKIP_NONFINITE in needed,
        )
        self._train_network = self._step_cell
        return self._step_cell

    def _dataset(self, role: str, dataset: Any, passes: int) -> Any:
        dataset = as_dataset(role, dataset, passes=passes)
        keys = getattr(dataset, "keys", ())
        for cell in self._step_cells:
            if cell.keys and cell.keys != keys:
                raise ArgumentValueError(
                    f"{role} has batches with {', '.join(keys) or 'no keys'}, but train_step was compiled "
                    f"for batches with {', '.join(cell.keys)}."
                )
            cell.keys = keys
        return dataset

    def _build_train_network(self) -> nn.Cell:
        if not self._step_cells:
            return super()._build_train_network()
        network = self._network  # type: ignore[has-type]
        self._network = self._step_cells[0]
        try:
            return super()._build_train_network()
        finally:
            self._network = network

    def _update_metrics(self, outputs: Native) -> None:
        if isinstance(outputs, tuple) and len(outputs) == 1:  # a loss alone, from EvalCell or LossEvalCell
            for name, metric in self._metric_fns.items():
                if not isinstance(metric, train.Loss):
                    raise metric_needs_outputs(name)
                metric.update(outputs[0])
            return
        super()._update_metrics(outputs)

    def _eval_loss(self, outputs: Native) -> float | None:
        if self._eval_indexes is None:
            return None
        return BACKEND.to_float(outputs[self._eval_indexes[0]])

    def _warn_of_short_table(self, epochs: int, batches: float) -> None:
        length = table_length(self._optimizer) if isinstance(self._optimizer, nn.Optimizer) else None
        if length is None or batches == float("inf"):
            return
        left = length - int(self._optimizer.global_step.item())
        updates = epochs * math.ceil(batches / self._accumulate_steps)
        if left < updates:
            warnings.warn(
                f"the optimizer's list of learning rates is good for {left} more updates and this run "
                f"has {updates}: MindSpore fails after the last rate.",
                stacklevel=5,
            )

    @staticmethod
    def _check_optimizer(network: nn.Cell, optimizer: Native) -> None:
        if optimizer is None:
            return
        parameters = getattr(optimizer, "parameters", None)
        if not isinstance(optimizer, nn.Cell) or parameters is None:
            raise not_this_optimizer("mindspore", optimizer, find_backend(optimizer, missing_ok=True))
        own = {id(parameter) for parameter in network.get_parameters()}
        if not any(id(parameter) in own for parameter in parameters):
            raise foreign_parameters(network, "trainable_params()")

    def __repr__(self) -> str:
        return (
            f"Model({type(self._network).__name__}, backend='mindspore', "
            f"optimizer={type(self._optimizer).__name__})"
        )


def _mixed_precision(amp: str, amp_level: str, native: dict[str, Any]) -> tuple[Any, str]:
    """Return the loss scaler and the amp_level for ``amp``."""
    if amp not in ("fp16", "bf16"):
        raise ArgumentValueError(f"amp is None, 'fp16' or 'bf16', but got {amp!r}.")
    if amp == "bf16":
        raise ArgumentValueError(
            "amp='bf16' is PyTorch's: MindSpore's Model has no bfloat16 level; use amp='fp16' or amp_level."
        )
    if amp_level != "O0" or "loss_scale_manager" in native:
        raise ArgumentValueError(
            "amp and MindSpore's own amp_level or loss_scale_manager ask for the same thing: pass one."
        )
    native["loss_scale_manager"] = None  # O2 would bring one that MindSpore's CPU does not have
    # From the largest power of two that float16 holds; window and factor are those of torch's GradScaler.
    return mindspore.amp.DynamicLossScaler(2.0**15, 2, 2000), "O2"


def _trains_itself(network: nn.Cell) -> bool:
    return getattr(network, "optimizer", None) is not None  # a TrainOneStepCell, as MindSpore allows


def _explained(error: BaseException) -> Exception | None:
    """Say in one sentence why the first step with ``train_step`` failed; None where it says so itself."""
    if not isinstance(error, Exception) or isinstance(error, DualTrainError):
        return None
    text = str(error).strip().lstrip("'")
    sentence = text.splitlines()[0].rstrip("'") if text else ""
    if sentence.startswith(CLAIM):
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        return kind(sentence + ".")
    if getattr(error, "__notes__", None) or not graph_mode():
        return None  # a callback's, or the user's own
    return RunStateError(
        f"train_step failed in MindSpore's GRAPH mode, which compiles it; write it with operations that "
        f"GRAPH mode knows, in a file, or use PYNATIVE mode: {type(error).__name__}: {sentence}"
    )
