"""Report evaluations to an Optuna trial, and end the run when the trial is to be pruned."""

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
    """Report each evaluation of a run to its Optuna trial; stop the run where Optuna prunes it.

    Make one inside the objective, for the trial that the objective is called with. The step that is
    reported is the number of the evaluation in this trial, from 1 to n, whatever ``valid_frequency``
    is: a pruner's ``n_warmup_steps=5`` spares the first four, and Hyperband's ``max_resource`` is the
    number of evaluations of a whole run. Every evaluation is reported, with the value as it is.

    A pruned run ends in the ordinary way: ``on_train_end`` comes, logs are whole, and then
    ``optuna.TrialPruned`` is raised from ``fit``. Any other error stays what it is, so that Optuna
    counts the trial as failed.

    A metric that is NaN or infinite is reported, never becomes the best, and prunes the trial,
    whatever the pruner says: Optuna fails a trial whose objective is NaN, and takes an infinite one
    for the study's best.

    The trial gets the user attributes ``backend``, ``backend_version``, ``dualtrain_version``,
    ``python_version``, ``model``, ``metric_name``, ``epochs``, ``batches_per_epoch``,
    ``evaluations`` and ``log_files`` (of every callback in the list that has a ``log_file``).

    Args:
        trial: The trial. A ``FixedTrial`` or ``FrozenTrial`` is taken too, and never pruned by a
            pruner. In a distributed run rank 0 has the trial, and other ranks pass None: rank 0
            reports, with its own metric, and all ranks stop and raise ``TrialPruned`` together.
        metric_name: A metric of the evaluation; ``val_x``, ``eval_x`` and ``x`` are one.

    Attributes:
        best_metric: The best finite value so far, in the study's direction, or without a study in
            that which goes by the name (see ``dualtrain.monitor.Monitor``); None before there is one.
        best_step: The number of the evaluation that it is of.
        pruned: Whether this run was pruned.

    Raises:
        MissingDependencyError: Optuna is not installed.
        ArgumentTypeError, ArgumentValueError: An argument cannot be used, the study has several
            objectives, the run makes no evaluation, or an evaluation has no such metric.
        RunStateError: At train begin, if the trial has finished or has reports of another run
            already: their steps would be mixed. (A run that goes on from ``load_state_dict`` may.)
        CapabilityError: At train begin, in a thread where the engine cannot train in threads
            (MindSpore with ``study.optimize(n_jobs=2)``): use processes.

    Cost: none per step; per evaluation one write and one read of the study's storage, per run a
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
        """What the engine must be able to do: train in threads, if this is not the main one."""
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
                "valid_dataset and a valid_frequency that comes up within its epochs."
            )
        if run_context.is_main:
            self._bind(resuming)
            for name, value in _description(run_context).items():
                self.trial.set_user_attr(name, value)
            self.trial.set_user_attr("metric_name", self.metric_name)

    def on_eval_end(self, run_context: RunContext) -> None:
        if run_context.epoch is None:
            return  # an evaluation alone is none of a run
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
        """Return the number of evaluations so far, and the best one's number and value."""
        return {"step": self._step, "best_step": self.best_step, "best_metric": self.best_metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there in the next run, which continues the trial's run."""
        self._step, self.best_step = state["step"], state["best_step"]
        self._monitor.best = state["best_metric"]
        self._resuming = self._step > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OptunaCallback:
        memo[id(self.trial)] = self.trial  # a copied trial would report to a copied study
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _bind(self, resuming: bool) -> None:
        """Check that the trial is there, running, and this run's alone."""
        if self.trial is None:
            raise ArgumentTypeError(
                "OptunaCallback(trial=None) is for ranks above 0: rank 0 needs the trial."
            )
        study = getattr(self.trial, "study", None)
        if study is None:
            return  # a FixedTrial or FrozenTrial has no record that could be spoiled
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
        """Report a value, and tell whether the trial is to be pruned."""
        if self._step not in self._reported:  # a resumed run may repeat some; Optuna keeps the first
            self.trial.report(value, self._step)
        return not math.isfinite(value) or bool(self.trial.should_prune())


def _mode_of(trial: Any) -> str | None:
    """Return the direction of a trial's study; None where there is no study."""
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
