"""The Model for MindSpore networks: MindSpore's own, with dualtrain's callbacks bridged into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, train

from dualtrain.backends._arguments import (
    NO_OPTIMIZER,
    check_epochs,
    check_loss_and_step,
    check_valid_frequency,
    evaluations_due,
    metric_needs_outputs,
)
from dualtrain.backends._contract import check_contract, warn_of_batch_norm
from dualtrain.backends.mindspore.arguments import (
    MINDSPORES_CHOICE,
    check_engine,
    check_limits,
    check_optimizer,
    explain_train_step_error,
    mixed_precision,
    warn_of_short_table,
)
from dualtrain.backends.mindspore.borrowed import (
    has_train_network,
    replace_train_network,
    replaced_network,
    stop_recording,
)
from dualtrain.backends.mindspore.cells import EvalCell, ForwardCell, LossEvalCell, TrainStepCell
from dualtrain.backends.mindspore.check import GradientCheck
from dualtrain.backends.mindspore.data import as_dataset, closing_passes
from dualtrain.backends.mindspore.leading_bridge import bridged, is_native
from dualtrain.backends.mindspore.metrics import make_metrics
from dualtrain.backends.mindspore.modes import STEP_CELL_CAPABILITIES, graph_mode, sinks_steps
from dualtrain.backends.mindspore.optimizer import make_scalable, working_set_data
from dualtrain.backends.mindspore.probes import MindSporeProbe, trains_itself
from dualtrain.backends.mindspore.step import MindSporeStep, batch_norm_names
from dualtrain.backends.mindspore.step_cell import StepCell, asked_of_step
from dualtrain.backends.mindspore.tensors import to_float
from dualtrain.backends.mindspore.threads import one_thread_at_a_time
from dualtrain.bus import as_callbacks
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentValueError
from dualtrain.protocol import Backend, Capability, Native


class MindSporeModel(train.Model):  # type: ignore[misc]
    """Train, fit, evaluate and predict with a ``mindspore.nn.Cell``.

    Created by ``dt.Model(...)``, which documents the arguments. A schedule of the optimizer is wrapped for
    ``scale_lr``. The private parts of the superclass are in ``borrowed``.
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
        backend: Backend,
        train_step: Callable[..., Any] | None = None,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        lr_scheduler: None = None,
        amp: str | None = None,
        automatic_optimization: bool = True,
        loss_scale_manager: Any = MINDSPORES_CHOICE,
        keep_batchnorm_fp32: Any = MINDSPORES_CHOICE,
        boost_config_dict: Any = MINDSPORES_CHOICE,
        acc_level: Any = MINDSPORES_CHOICE,
    ) -> None:
        check_loss_and_step(loss_fn, train_step)
        check_contract(accumulate_steps, clip_norm)
        check_engine(lr_scheduler, automatic_optimization)
        check_optimizer(network, optimizer)
        own = {
            "loss_scale_manager": loss_scale_manager,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "boost_config_dict": boost_config_dict,
            "acc_level": acc_level,
        }
        native = {name: value for name, value in own.items() if value is not MINDSPORES_CHOICE}
        self._backend = backend
        self._own_network, self._own_optimizer = network, optimizer
        self._has_loss_fn = loss_fn is not None
        self._accumulate_steps = accumulate_steps
        self._clip_norm = clip_norm
        self._scaler = None
        if amp is not None:
            self._scaler, amp_level = mixed_precision(amp, amp_level, native)
        self._own_metrics = metrics = make_metrics(metrics, has_default=eval_network is None)
        self._step_cells: list[TrainStepCell] = []
        if train_step is not None:
            self._step_cells = [ForwardCell(network, train_step), EvalCell(network, train_step)]
        self._loss_index = 0 if eval_network is None else None if eval_indexes is None else eval_indexes[0]
        if eval_network is None and loss_fn is None:
            eval_network = self._step_cells[1] if self._step_cells else LossEvalCell(network)
            eval_indexes = [0, 1, 2]
        if isinstance(optimizer, nn.Optimizer):
            make_scalable(optimizer)
        self._is_built = False
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
        if self._step_cells and not self._is_built:
            raise ArgumentValueError(
                f"train_step needs a way to replace the network in MindSpore's train step, which MindSpore "
                f"{mindspore.__version__} does not have: pass loss_fn instead."
            )
        self._native_network = self.train_network
        self._step_cell: StepCell | None = None
        if accumulate_steps > 1 or clip_norm is not None or self._scaler is not None:
            if optimizer is not None and not self._takes_step_cell(sink=False):
                raise ArgumentValueError(
                    "accumulate_steps, clip_norm and amp cannot be combined with loss_scale_manager or "
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
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation. See ``dt.Model.train``."""
        check_limits("train", max_steps, limit_batches)
        passes = check_epochs(epoch, initial_epoch)
        dataset = self._training_data(train_dataset, passes, limit_batches)
        run = {"initial_epoch": initial_epoch, "evaluations": 0, "max_steps": max_steps}
        with self._training(callbacks, dataset_sink_mode, dataset, passes, **run) as bridges:
            super().train(epoch, dataset, bridges, dataset_sink_mode, sink_size, initial_epoch)

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
        check_limits("fit", max_steps, limit_batches)
        check_valid_frequency(valid_frequency)
        passes = check_epochs(epoch, initial_epoch)
        evaluations = 0
        if valid_dataset is not None:
            evaluations = evaluations_due(epoch, initial_epoch, valid_frequency)
            valid_dataset = self._dataset(
                "valid_dataset", valid_dataset, max(evaluations, 1), limit_batches
            )
        with closing_passes(valid_dataset):
            dataset = self._training_data(train_dataset, passes, limit_batches)
            run = {"initial_epoch": initial_epoch, "evaluations": evaluations, "max_steps": max_steps}
            with self._training(callbacks, dataset_sink_mode, dataset, passes, **run) as bridges:
                super().fit(
                    epoch,
                    dataset,
                    valid_dataset,
                    valid_frequency,
                    bridges,
                    dataset_sink_mode,
                    valid_dataset_sink_mode,
                    sink_size,
                    initial_epoch,
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
        check_limits("eval", None, limit_batches)
        dataset = self._dataset("valid_dataset", valid_dataset, 1, limit_batches)
        with closing_passes(dataset), one_thread_at_a_time():
            engine = self._engine(callbacks, dataset_sink_mode)
            bridges = bridged(
                as_callbacks(callbacks), engine, step=None, loss_of=self._eval_loss, check=None
            )
            with engine:
                return dict(super().eval(dataset, bridges, dataset_sink_mode))

    def predict(self, *inputs: Any, **native: Any) -> Any:
        """Return the network's output in evaluation mode. Numpy inputs are converted to tensors."""
        tensors = [mindspore.Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
        return super().predict(*tensors, **native)

    @contextmanager
    def _training(
        self, callbacks: Any, sink: bool, dataset: Any, passes: int, **run: Any
    ) -> Iterator[list[Any]]:
        """Enter a run of training, with the callback list for MindSpore."""
        optimizer = self._own_optimizer
        warn_of_short_table(optimizer, passes, dataset.get_dataset_size(), self._accumulate_steps)
        set_data = nullcontext() if optimizer is None else working_set_data(optimizer)
        check = None
        if self._step_cells and optimizer is not None:
            check = GradientCheck(self._own_network, self._step_cells[0], optimizer)
        with closing_passes(dataset), set_data, one_thread_at_a_time():
            engine = self._engine(callbacks, sink, **run)
            step = self._step(engine, dataset, sink)
            engine.use(step)
            bridges = bridged(
                as_callbacks(callbacks), engine, step=step, loss_of=self._eval_loss, check=check
            )
            with engine:
                try:
                    yield bridges
                except BaseException as error:
                    if not graph_mode():
                        stop_recording()
                    untaken = self._step_cells and step.global_step == 0
                    explained = explain_train_step_error(error) if untaken else None
                    if explained is None:
                        raise
                    raise explained from error
                step.drop_window()

    def _engine(self, callbacks: Any, sink: bool, **run: Any) -> RunEngine:
        """Return the run of our part of a train, fit or eval call."""
        capabilities = self._backend.capabilities()
        if sinks_steps(sink):
            capabilities -= {Capability.STEP_EVENTS}
        if not self._takes_step_cell(sink):
            capabilities -= STEP_CELL_CAPABILITIES
        listed = as_callbacks(callbacks)
        ours = [callback for callback in listed if not is_native(callback)]
        return RunEngine(ours, listed=listed, backend=self._backend, capabilities=capabilities, **run)

    def _takes_step_cell(self, sink: bool) -> bool:
        """Return whether a StepCell can replace MindSpore's own train step."""
        native = self._native_network
        plain = type(native) is nn.TrainOneStepCell and not native.sense_flag
        return plain and not sink and has_train_network(self)

    def _step(self, engine: RunEngine, dataset: Any, sink: bool) -> MindSporeStep:
        """Return the step of a run, with our own train step if a callback or an argument needs it."""
        cell = self._step_cell_for(engine, dataset)
        replace_train_network(self, self._native_network if cell is None else cell)
        probing = MindSporeProbe(
            self._own_network,
            self._step_cells[0] if self._step_cells else None,
            getattr(self._native_network, "network", None),
            self._own_optimizer,
            has_label=self._has_loss_fn,
        )
        return MindSporeStep(self._own_optimizer, cell, probing, always_updates=self._takes_step_cell(sink))

    def _step_cell_for(self, engine: RunEngine, dataset: Any) -> StepCell | None:
        asked_for = asked_of_step(engine)
        by_argument = self._accumulate_steps > 1 or self._clip_norm is not None or self._scaler is not None
        if not (asked_for or by_argument) or self._own_optimizer is None:
            return None
        if self._step_cell is None:
            names = batch_norm_names(self._own_network)
            self._step_cell = StepCell(self._native_network, self._clip_norm, self._scaler, names)
        self._step_cell.reset(
            dataset,
            self._accumulate_steps,
            parameter_norms=Capability.PARAMETER_GRAD_NORMS in asked_for,
            guarded=Capability.SKIP_NONFINITE in asked_for,
        )
        self._step_cell.listen(engine)
        return self._step_cell

    def _training_data(self, dataset: Any, passes: int, limit: int | None) -> Any:
        if self._own_optimizer is None and not trains_itself(self._own_network):
            raise ArgumentValueError(NO_OPTIMIZER)
        return self._dataset("train_dataset", dataset, passes, limit)

    def _dataset(self, role: str, dataset: Any, passes: int, limit: int | None) -> Any:
        dataset = as_dataset(role, dataset, passes=passes, limit=limit)
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
        """Build MindSpore's train step around ``train_step``, if there is one."""
        if not self._step_cells:
            return super()._build_train_network()
        with replaced_network(self, self._step_cells[0]) as self._is_built:
            return super()._build_train_network()

    def _update_metrics(self, outputs: Native) -> None:
        """Update the metrics, also from only a loss, as returned by EvalCell and LossEvalCell."""
        if not (isinstance(outputs, tuple) and len(outputs) == 1):
            super()._update_metrics(outputs)
            return
        for name, metric in (self._own_metrics or {}).items():
            if not isinstance(metric, train.Loss):
                raise metric_needs_outputs(name)
            metric.update(outputs[0])

    def _eval_loss(self, outputs: Native) -> float | None:
        return None if self._loss_index is None else to_float(outputs[self._loss_index])

    def __repr__(self) -> str:
        return (
            f"Model({type(self._own_network).__name__}, backend='mindspore', "
            f"optimizer={type(self._own_optimizer).__name__})"
        )
