"""The Model for MindSpore networks: MindSpore's own, with our callbacks bridged into it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, train

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
from dualtrain.backends.mindspore.backend import BACKEND, graph_mode
from dualtrain.backends.mindspore.bridge import BridgedRun, is_native
from dualtrain.backends.mindspore.data import as_dataset
from dualtrain.backends.mindspore.metrics import make_metrics
from dualtrain.backends.mindspore.optimizer import make_scalable, table_length, working_set_data
from dualtrain.backends.mindspore.signals import InterruptWatch
from dualtrain.backends.mindspore.step import (
    CLAIM,
    EvalCell,
    ForwardCell,
    LossEvalCell,
    MindSporeStep,
    TrainStepCell,
    has_gradient,
)
from dualtrain.bus import EventBus, as_callbacks
from dualtrain.context import CallbackParams, RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.protocol import Capability, Native

_training = threading.RLock()


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
        **native: Any,
    ) -> None:
        check_loss_and_step(loss_fn, train_step)
        self._check_optimizer(network, optimizer)
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
        with self._training(epoch, train_dataset, callbacks, dataset_sink_mode, initial_epoch) as run:
            dataset, bridged = run
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
        passes = check_epochs(epoch, initial_epoch)
        if valid_dataset is not None:
            valid_dataset = self._dataset("valid_dataset", valid_dataset, passes)
        with self._training(epoch, train_dataset, callbacks, dataset_sink_mode, initial_epoch) as run:
            dataset, bridged = run
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
        with self._run(callbacks, MindSporeStep(None), 0, dataset_sink_mode) as bridged:
            return dict(super().eval(dataset, bridged, dataset_sink_mode))

    def predict(self, *inputs: Any, **native: Any) -> Any:
        """Return the network's output in evaluation mode. Numpy inputs are made tensors."""
        tensors = [mindspore.Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
        return super().predict(*tensors, **native)

    @contextmanager
    def _training(
        self, epoch: int, train_dataset: Any, callbacks: Any, sink: bool, initial_epoch: int
    ) -> Iterator[tuple[Any, list[Any]]]:
        passes = check_epochs(epoch, initial_epoch)
        dataset = self._dataset("train_dataset", train_dataset, passes)
        if self._optimizer is None and not _trains_itself(self._network):
            raise ArgumentValueError(NO_OPTIMIZER)
        step = MindSporeStep(self._optimizer)
        self._warn_of_short_table(passes * dataset.get_dataset_size())
        set_data = nullcontext() if self._optimizer is None else working_set_data(self._optimizer)
        check = self._gradient_check() if self._train_step is not None else None
        with set_data, self._run(callbacks, step, initial_epoch, sink, first_step=check) as bridged:
            try:
                yield dataset, bridged
            except Exception as error:
                if self._train_step is not None and step.global_step == 0:
                    raise _compilation_error(error) from error
                raise

    @contextmanager
    def _run(
        self,
        callbacks: Any,
        step: MindSporeStep,
        initial_epoch: int,
        sink: bool,
        first_step: Callable[[Any], None] | None = None,
    ) -> Iterator[list[Any]]:
        given = as_callbacks(callbacks)
        bases = callback_bases()
        bus = EventBus([c for c in given if not is_native(c)], native_bases=bases)
        capabilities = BACKEND.capabilities()
        if sink and graph_mode() and mindspore.get_context("device_target") != "CPU":
            capabilities -= {Capability.STEP_EVENTS}
        context = RunContext(
            CallbackParams(),
            backend=BACKEND,
            step=step,
            initial_epoch=initial_epoch,
            capabilities=capabilities,
        )
        bus.check_needs(capabilities, BACKEND.describe_mode())
        if not _training.acquire(blocking=False):
            raise RunStateError(
                "another thread of this process is running a MindSpore Model; MindSpore crashes or hangs "
                "when two threads train: use processes instead."
            )
        interrupts = InterruptWatch()
        any_rank = BACKEND.any_rank if BACKEND.world_size() > 1 else None
        run = BridgedRun(context, step, interrupts, self._eval_loss, any_rank, first_step)
        try:
            with interrupts.watching(), bus.lifecycle(context):
                yield run.callbacks(given, bases)
        finally:
            _training.release()

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

    def _gradient_check(self) -> Callable[[Any], None]:
        """Return a check, after the first step, that ``train_step`` gave a loss with a gradient.

        Weights that all stand still raise the suspicion; what a gradient started from NaN does
        decides it, so that a gradient that is zero by chance passes.
        """
        weights = self._optimizer.parameters
        before = [_sample(weight) for weight in weights]

        def check(params: Any) -> None:
            if any(not np.array_equal(b, _sample(w)) for b, w in zip(before, weights, strict=True)):
                return
            if not has_gradient(self._step_cells[0], weights, tuple(params["train_dataset_element"])):
                raise ArgumentValueError(
                    "train_step gave a loss without a gradient, so there is nothing to train: it went "
                    "through ops.stop_gradient, or depends on no weight of the optimizer."
                )

        return check

    def _warn_of_short_table(self, steps: float) -> None:
        length = table_length(self._optimizer) if isinstance(self._optimizer, nn.Optimizer) else None
        if length is not None and steps != float("inf"):
            left = length - int(self._optimizer.global_step.asnumpy().item())
            if left < steps:
                warnings.warn(
                    f"the optimizer's list of learning rates is good for {left} more steps and this run "
                    f"has {steps:.0f}: MindSpore fails after the last rate.",
                    stacklevel=5,
                )

    @staticmethod
    def _check_optimizer(network: nn.Cell, optimizer: Native) -> None:
        if optimizer is None:
            return
        if not isinstance(optimizer, nn.Cell):
            raise not_this_optimizer("mindspore", optimizer, find_backend(optimizer, missing_ok=True))
        own = {id(parameter) for parameter in network.get_parameters()}
        parameters = getattr(optimizer, "parameters", None)
        if parameters is not None and not any(id(parameter) in own for parameter in parameters):
            raise foreign_parameters(network, "trainable_params()")

    def __repr__(self) -> str:
        return (
            f"Model({type(self._network).__name__}, backend='mindspore', "
            f"optimizer={type(self._optimizer).__name__})"
        )


def _trains_itself(network: nn.Cell) -> bool:
    return getattr(network, "optimizer", None) is not None  # a TrainOneStepCell, as MindSpore allows


def _sample(weight: Native) -> Any:
    """A few values of a weight: enough to see whether an update has moved it."""
    return weight.flatten()[:16].asnumpy().copy()


def _compilation_error(error: Exception) -> Exception:
    """Say in one sentence why the first step with ``train_step`` failed, unless it says so itself."""
    text = str(error).strip().lstrip("'")
    sentence = text.splitlines()[0].rstrip("'") if text else ""
    if sentence.startswith(CLAIM):
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        return kind(sentence + ".")
    if getattr(error, "__notes__", None) or not graph_mode():
        return error
    return RunStateError(
        f"train_step failed in MindSpore's GRAPH mode, which compiles it; write it with operations that "
        f"GRAPH mode knows, in a file, or use PYNATIVE mode: {type(error).__name__}: {sentence}"
    )
