"""Report evaluations to an Optuna trial, and end the run if the trial is pruned."""

from __future__ import annotations

import copy
import math
import os
import platform
import threading
from typing import Any

from dualtrain._lazy import loaded, require
from dualtrain._version import __version__
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.monitor import Monitor, find_metric
from dualtrain.protocol import Capability

_VERBS = ("report", "should_prune", "set_user_attr")


class OptunaCallback(Callback):
    """Report each evaluation of a run to its Optuna trial; stop the run if Optuna prunes the trial.

    Create one inside the objective, with the objective's trial. The reported step is the number of
    the evaluation in this trial, from 1 to n, for every ``valid_frequency``: a pruner's
    ``n_warmup_steps=5`` exempts the first four, and Hyperband's ``max_resource`` is the
    number of evaluations of a full run. Every evaluation is reported with its unchanged value.

    A pruned run ends normally, with ``on_train_end`` and complete logs, and then ``fit`` raises
    ``optuna.TrialPruned``. Other errors are unchanged, and Optuna counts the trial as failed.

    A NaN or infinite metric is reported, never becomes the best, and prunes the trial with every
    pruner: Optuna alone fails a trial whose objective is NaN, and accepts an infinite value as the
    study's best.

    The trial gets the user attributes ``backend``, ``backend_version``, ``dualtrain_version``,
    ``python_version``, ``model``, ``metric_name``, ``epochs``, ``batches_per_epoch``,
    ``evaluations`` and ``log_files`` (of every callback in the list with a ``log_file``).

    Args:
        trial: The trial. A ``FixedTrial`` or ``FrozenTrial`` is accepted too, and never pruned by a
            pruner. In a distributed run rank 0 has the trial, and other ranks pass None: rank 0
            reports its own metric, and all ranks stop and raise ``TrialPruned`` together.
        metric_name: A metric of the evaluation; ``val_x``, ``eval_x`` and ``x`` are the same metric.

    Attributes:
        best_metric: The best finite value so far, in the study's direction, or without a study in the
            direction inferred from the name (see ``dualtrain.monitor.Monitor``); None before the first.
        best_step: The number of the best evaluation.
        pruned: Whether this run was pruned.

    Raises:
        MissingDependencyError: Optuna is not installed.
        ArgumentTypeError, ArgumentValueError: An argument is invalid, the study has several
            objectives, the run has no evaluation, or an evaluation has no such metric.
        RunStateError: At train begin, if the trial is finished or already has reports of another
            run: their steps would be mixed. A run resumed by ``load_state_dict`` is allowed.
        CapabilityError: At train begin, in a thread other than the main thread, if the engine cannot
            train in threads (MindSpore with ``study.optimize(n_jobs=2)``): use processes.

    Cost: none per step; per evaluation one write and one read of the study's storage, per run one
    read and ten writes. Events: train begin, eval end, train end.
    """

    def __init__(self, trial: Any, metric_name: str = "val_acc") -> None:
        require("optuna", extra="optuna")
        if isinstance(trial, type) or not (
            trial is None or all(callable(getattr(trial, verb, None)) for verb in _VERBS)
        ):
            raise ArgumentTypeError(
                f"OptunaCallback(trial=...) takes the trial that the objective is called with, "
                f"but got {trial!r:.60}."
            )
        collective = loaded("optuna_integration.pytorch_distributed:TorchDistributedTrial")
        if collective is not None and isinstance(trial, collective):
            raise ArgumentTypeError(
                "OptunaCallback(trial=...) got a TorchDistributedTrial, which waits for all ranks at each "
                "call, while this callback reports on rank 0 alone: pass the study's own trial there, and "
                "None on the other ranks."
            )
        if not isinstance(metric_name, str):
            raise ArgumentTypeError(
                f"OptunaCallback(metric_name=...) takes a metric's name, but got {metric_name!r}."
            )
        self._monitor = Monitor(metric_name, _mode_of(trial))
        self.trial = trial
        self.metric_name = metric_name
        self.best_step: int | None = None
        self.pruned = False
        self._step = 0
        self._reported: frozenset[int] = frozenset()
        self._resuming = False

    @property
    def best_metric(self) -> float | None:
        """The best finite value so far."""
        return self._monitor.best

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Required capabilities: ``THREADS`` if this is not the main thread."""
        here, main = threading.current_thread(), threading.main_thread()
        return frozenset() if here is main else frozenset({Capability.THREADS})

    def on_train_begin(self, run_context: RunContext) -> None:
        resuming, self._resuming = self._resuming, False
        if not resuming:
            self._monitor.reset()
            self.best_step, self._step = None, 0
        self.pruned = False
        if run_context.evaluations == 0:
            raise ArgumentValueError(
                "OptunaCallback reports evaluations, but this run makes none: call fit with a "
                "valid_dataset and a valid_frequency of at most the number of epochs."
            )
        if run_context.is_main:
            self._bind(resuming)
            for name, value in _description(run_context).items():
                self.trial.set_user_attr(name, value)
            self.trial.set_user_attr("metric_name", self.metric_name)

    def on_eval_end(self, run_context: RunContext) -> None:
        if run_context.epoch is None:
            return  # a separate evaluation is not part of a run
        value = self._value(run_context)
        self._step += 1
        if self._monitor.improved(value):
            self.best_step = self._step
        prune = run_context.is_main and self._report(value)
        if run_context.any_rank(prune):
            self.pruned = True
            pruned = require("optuna", extra="optuna").TrialPruned
            reason = f"pruned at evaluation {self._step}, with {self.metric_name} {value:g}"
            run_context.request_stop(reason, raise_after=pruned(reason))

    def on_train_end(self, run_context: RunContext) -> None:
        if self._step == 0 and not run_context.get_stop_requested():
            raise RunStateError(
                "OptunaCallback reports evaluations, but this run has made none: call fit with a "
                "valid_dataset."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of evaluations, and the number and value of the best one."""
        return {"step": self._step, "best_step": self.best_step, "best_metric": self.best_metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the next run continues the trial's run."""
        self._step, self.best_step = state["step"], state["best_step"]
        self._monitor.best = state["best_metric"]
        self._resuming = self._step > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OptunaCallback:
        memo[id(self.trial)] = self.trial  # a copy of the trial would report to a copy of the study
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _bind(self, resuming: bool) -> None:
        """Check that the trial exists, is running, and has no reports of another run."""
        if self.trial is None:
            raise ArgumentTypeError(
                "OptunaCallback(trial=None) is for ranks above 0: rank 0 needs the trial."
            )
        study = getattr(self.trial, "study", None)
        if study is None:
            return  # a FixedTrial or FrozenTrial has no stored reports
        number = self.trial.number
        record = next(one for one in study.get_trials(deepcopy=False) if one.number == number)
        if record.state.is_finished():
            raise RunStateError(
                f"trial {number} has finished ({record.state.name}): make an OptunaCallback for each "
                f"trial, inside the objective."
            )
        if record.intermediate_values and not resuming:
            raise RunStateError(
                f"trial {number} has reports up to step {record.last_step} already: an OptunaCallback "
                f"serves one run of one trial, since a second run's steps would be mixed with the first's."
            )
        self._reported = frozenset(record.intermediate_values)

    def _value(self, run_context: RunContext) -> float:
        try:
            found = find_metric(self.metric_name, run_context.metrics)
        except KeyError as error:
            raise ArgumentValueError(f"OptunaCallback(metric_name=...): {error.args[0]}.") from None
        try:
            return float(found)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"OptunaCallback(metric_name={self.metric_name!r}) reports one number for an evaluation, "
                f"but got {found!r:.60}."
            ) from None

    def _report(self, value: float) -> bool:
        """Report a value, and return whether to prune the trial."""
        if self._step not in self._reported:  # a resumed run may repeat steps; Optuna keeps the first
            self.trial.report(value, self._step)
        return not math.isfinite(value) or bool(self.trial.should_prune())


def _mode_of(trial: Any) -> str | None:
    """Return the direction of a trial's study, or None without a study."""
    study = getattr(trial, "study", None)
    if study is None:
        return None
    directions = study.directions
    if len(directions) > 1:
        raise ArgumentValueError(
            f"OptunaCallback(trial=...): the study has {len(directions)} objectives, and Optuna takes "
            f"reports and prunes for one alone; leave the callback out of a multi-objective study."
        )
    return "max" if directions[0].name == "MAXIMIZE" else "min"


def _description(run_context: RunContext) -> dict[str, Any]:
    backend = run_context.backend
    network = run_context.original_args().get("network")
    logs = [getattr(callback, "log_file", None) for callback in run_context.callbacks]
    return {
        "backend": None if backend is None else str(backend),
        "backend_version": None if backend is None else backend.version(),
        "dualtrain_version": __version__,
        "python_version": platform.python_version(),
        "model": None if network is None else type(network).__name__,
        "epochs": run_context.epochs,
        "batches_per_epoch": run_context.batches_per_epoch,
        "evaluations": run_context.evaluations,
        "log_files": [os.path.abspath(log) for log in logs if isinstance(log, (str, os.PathLike))],
    }
