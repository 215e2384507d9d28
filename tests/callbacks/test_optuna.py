"""OptunaCallback: what Optuna is told, how a pruned run ends, and what is refused."""

from __future__ import annotations

import copy
import importlib
import json
import math
import multiprocessing
import os
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import third_backend
from engines import ENGINES, At, Recorder, ones
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.trial import TrialState
from parity_data import batches as parity_batches
from parity_data import initial_weights
from paths import SUPPORT
from processes import run_two_ranks

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.callbacks import EarlyStopping, OptunaCallback, StepLogger
from dualtrain.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CapabilityError,
    MissingDependencyError,
    RunStateError,
)
from dualtrain.testing import FakeLoop

NAN, INF = math.nan, math.inf

pytestmark = [
    pytest.mark.filterwarnings("error"),  # Optuna only warns where a report is ignored
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)


class PruneAt(BasePruner):
    """Prune at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.last_step == self.step)


def losses(*values: float) -> list[dict[str, float]]:
    return [{"eval_loss": value} for value in values]


def loop(evaluations: list[Any], **options: Any) -> FakeLoop:
    options.setdefault("epochs", len(evaluations))
    return FakeLoop([1.0, 1.0], evaluations=evaluations, **options)


def run_trials(study: optuna.Study, *trials: tuple[float, ...], others: Any = ()) -> list[OptunaCallback]:
    """Run a trial for each tuple of evaluation losses."""
    left, made = list(trials), []

    def objective(trial: optuna.Trial) -> float:
        values = left.pop(0)
        made.append(OptunaCallback(trial, "val_loss"))
        loop(losses(*values)).run([made[-1], *others])
        return values[-1]

    study.optimize(objective, len(trials))
    return made


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def reports(study: optuna.Study) -> list[dict[int, float]]:
    return [trial.intermediate_values for trial in study.trials]


# What is reported.


def test_every_evaluation_is_reported_not_only_improvements() -> None:
    minimising = optuna.create_study()
    [callback] = run_trials(minimising, (0.9, 0.8, 0.85, 0.7, 0.95))
    assert reports(minimising) == [{1: 0.9, 2: 0.8, 3: 0.85, 4: 0.7, 5: 0.95}]
    assert (callback.best_metric, callback.best_step, callback.pruned) == (0.7, 4, False)

    maximising = optuna.create_study(direction="maximize")
    [callback] = run_trials(maximising, (-3.0, -2.0, -1.0))
    assert reports(maximising) == [{1: -3.0, 2: -2.0, 3: -1.0}]
    assert (callback.best_metric, callback.best_step) == (-1.0, 3)
    assert states(minimising) + states(maximising) == ["COMPLETE", "COMPLETE"]


def test_a_hopeless_trial_is_pruned_at_its_first_evaluation() -> None:
    study = optuna.create_study(pruner=MedianPruner(n_startup_trials=2))
    callbacks = run_trials(study, (0.5, 0.4), (0.6, 0.3), (5.0, 5.0))
    assert states(study) == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert reports(study)[2] == {1: 5.0}
    assert study.trials[2].value == 5.0
    assert [callback.pruned for callback in callbacks] == [False, False, True]


def test_the_step_is_the_number_of_the_evaluation_whatever_the_frequency() -> None:
    study = optuna.create_study()
    trial = study.ask()
    loop(losses(3, 2, 1), epochs=7, valid_frequency=2).run(OptunaCallback(trial, "loss"))
    assert reports(study) == [{1: 3.0, 2: 2.0, 3: 1.0}]
    assert trial.user_attrs["evaluations"] == 3


@pytest.mark.parametrize("result", [{"acc": 0.5}, {"accuracy": 0.5}, {"val_acc": np.float64(0.5)}])
def test_the_default_metric_is_the_accuracy_whatever_its_spelling(result: dict[str, Any]) -> None:
    study = optuna.create_study(direction="maximize")
    loop([{"eval_loss": 9.0, **result}]).run(OptunaCallback(study.ask()))
    assert reports(study) == [{1: 0.5}]


def test_what_ran_is_in_the_user_attributes() -> None:
    study = optuna.create_study()
    trial = study.ask()
    loggers = [StepLogger("one.jsonl"), StepLogger(Path("two.jsonl"), 1)]
    loop(losses(2, 1)).run([OptunaCallback(trial, "val_loss"), *loggers])
    assert study.trials[0].user_attrs == {
        "backend": "fake",
        "backend_version": "0",
        "dualtrain_version": dt.__version__,
        "python_version": sys.version.split()[0],
        "model": None,
        "metric_name": "val_loss",
        "epochs": 2,
        "batches_per_epoch": 2,
        "evaluations": 2,
        "log_files": [os.path.abspath("one.jsonl"), os.path.abspath("two.jsonl")],
    }
    json.dumps(study.trials[0].user_attrs)


# How a run ends.


def test_a_pruned_run_ends_in_the_ordinary_way_and_then_raises() -> None:
    class Leaving(Recorder):
        def __exit__(self, *error: Any) -> None:
            self.left = error[0]

        def __enter__(self) -> None: ...

    study, leaving = optuna.create_study(pruner=PruneAt(2)), Leaving()
    others = [StepLogger("log.jsonl", log_interval=1), leaving]
    [callback] = run_trials(study, (4.0, 3.0, 2.0, 1.0), others=others)
    assert (states(study), reports(study)) == (["PRUNED"], [{1: 4.0, 2: 3.0}])
    assert study.trials[0].value == 3.0
    assert callback.pruned
    assert leaving.calls.count("on_train_epoch_end") == 2
    assert leaving.calls[-3:] == ["on_train_epoch_end", "on_train_end", "on_teardown"]
    assert leaving.left is optuna.TrialPruned
    assert [record.step for record in dt.logs.read_log("log.jsonl").records if record.mode == "train"] == [
        1,
        2,
        3,
        4,
    ]
    assert Path("log.jsonl").read_text().endswith("}\n")


def test_the_reason_says_where_and_with_what() -> None:
    study = optuna.create_study(pruner=PruneAt(1))
    with pytest.raises(optuna.TrialPruned, match=r"^pruned at evaluation 1, with val_loss 0\.25$"):
        loop(losses(0.25, 0)).run(OptunaCallback(study.ask(), "val_loss"))


def test_a_stop_of_another_callback_leaves_the_trial_complete() -> None:
    study = optuna.create_study()
    [callback] = run_trials(study, (1.0, 2.0, 0.5), others=[EarlyStopping("eval_loss", patience=1)])
    assert states(study) == ["COMPLETE"]
    assert reports(study) == [{1: 1.0, 2: 2.0}]
    assert not callback.pruned


def test_another_error_stays_what_it_is() -> None:
    def fail(run_context: Any) -> None:
        raise ZeroDivisionError("odd")

    study = optuna.create_study()
    with pytest.raises(ZeroDivisionError, match="odd"):
        run_trials(study, (1.0, 2.0, 3.0), others=[At("on_train_step_end", fail, step=3)])
    assert (states(study), reports(study)) == (["FAIL"], [{1: 1.0}])


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_is_reported_is_never_the_best_and_prunes(value: float, direction: str) -> None:
    study = optuna.create_study(direction=direction, pruner=NopPruner())
    callbacks = run_trials(study, (0.5, 0.75), (0.5, value, 0.5), (value,))
    assert states(study) == ["COMPLETE", "PRUNED", "PRUNED"]
    assert str(reports(study)[1:]) == str([{1: 0.5, 2: value}, {1: value}])
    assert str(study.trials[1].value) == ("None" if math.isnan(value) else str(value))
    assert study.best_trial.number == 0
    assert [(one.best_metric, one.best_step) for one in callbacks[1:]] == [(0.5, 1), (None, None)]
    assert [one.pruned for one in callbacks] == [False, True, True]


# What is refused.


def test_a_missing_metric_is_an_error_that_lists_what_there_is() -> None:
    study = optuna.create_study()
    with pytest.raises(ArgumentValueError, match=r"no metric 'val_f1' .*; available: eval_loss, acc\."):
        loop([{"eval_loss": 1.0, "acc": 0.5}] * 2).run(OptunaCallback(study.ask(), "val_f1"))
    assert reports(study) == [{}]


@pytest.mark.parametrize("value", [np.array([0.5, 0.25]), "0.5%", None])
def test_a_metric_that_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"'f1'\) reports one number for an evaluation, but got"):
        loop([{"f1": value}]).run(OptunaCallback(optuna.create_study().ask(), "f1"))


@pytest.mark.parametrize("options", [{"evaluations": None}, {"evaluations": [], "valid_frequency": 3}])
def test_a_run_without_evaluations_is_an_error_before_the_first_step(options: dict[str, Any]) -> None:
    seen = Recorder()
    with pytest.raises(ArgumentValueError, match="this run makes none: call fit with a valid_dataset"):
        FakeLoop([1.0], epochs=2, **options).run([OptunaCallback(optuna.create_study().ask()), seen])
    assert "on_train_step_begin" not in seen.calls


def third_model() -> Any:
    network = third_backend.Linear([[0.0]])
    optimizer = third_backend.Descent(network, 0.25)
    return third_backend.ArrayModel(network, third_backend.SquaredError(), optimizer)


THIRD_DATA = [(np.ones((1, 1)), np.ones((1, 1)))]


def test_where_that_is_not_known_before_it_is_an_error_at_the_end() -> None:
    seen = Recorder()
    callback = OptunaCallback(optuna.create_study().ask(), "val_loss")

    def train() -> None:
        with dt.Run([seen, callback], epochs=1) as run:
            for _ in run.epochs():
                for batch in run.batches([0.5]):
                    run.outputs = batch

    with pytest.raises(RunStateError, match="this run has made none"):
        train()
    assert "on_train_step_end" in seen.calls


def test_a_third_backends_model_without_an_evaluation_is_refused_before_its_first_step() -> None:
    model = third_model()
    callback = OptunaCallback(optuna.create_study().ask(), "val_loss")
    with pytest.raises(ArgumentValueError, match="this run makes none"):
        model.fit(1, THIRD_DATA, callbacks=callback)
    assert model.predict(np.ones((1, 1))) == 0.0


def test_a_run_that_is_stopped_before_its_first_evaluation_is_no_error() -> None:
    stop = At("on_train_step_end", lambda run_context: run_context.request_stop(), step=1)
    loop([], epochs=3, valid_frequency=2).run([OptunaCallback(optuna.create_study().ask()), stop])


def test_a_study_with_several_objectives_is_refused() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ArgumentValueError, match="the study has 2 objectives"):
        OptunaCallback(study.ask())


@pytest.mark.parametrize("trial", [optuna.Trial, 3, "trial", object()])
def test_what_is_no_trial_is_refused(trial: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="takes the trial that the objective is called with"):
        OptunaCallback(trial)


def test_a_study_in_place_of_a_trial_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="Study object"):
        OptunaCallback(optuna.create_study())


def test_a_trial_whose_methods_are_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hang; the class is one of optuna-integration, which need not be installed."""

    class TorchDistributedTrial(optuna.trial.FixedTrial): ...

    module = types.SimpleNamespace(TorchDistributedTrial=TorchDistributedTrial)
    monkeypatch.setitem(sys.modules, "optuna_integration.pytorch_distributed", module)
    with pytest.raises(ArgumentTypeError, match="pass the study's own trial there, and None on the other"):
        OptunaCallback(TorchDistributedTrial({}))
    OptunaCallback(optuna.trial.FixedTrial({}))


def test_a_metric_that_is_no_name_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="metric's name, but got 3"):
        OptunaCallback(optuna.create_study().ask(), 3)  # type: ignore[arg-type]


def test_rank_0_needs_the_trial() -> None:
    with pytest.raises(ArgumentTypeError, match="for ranks above 0"):
        loop(losses(1)).run(OptunaCallback(None, "val_loss"))


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = optuna.create_study().ask()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'dualtrain\[optuna\]'"):
        OptunaCallback(trial)


# One run of one trial.


def test_a_second_run_of_a_trial_is_refused_and_spoils_nothing() -> None:
    study = optuna.create_study()
    trial, seen = study.ask(), Recorder()
    callback = OptunaCallback(trial, "val_loss")
    loop(losses(2, 1)).run(callback)
    for again in (callback, OptunaCallback(trial, "val_loss"), copy.deepcopy(callback)):
        with pytest.raises(RunStateError, match="trial 0 has reports up to step 2 already"):
            loop(losses(9, 9, 9)).run([again, seen])
    assert "on_train_step_begin" not in seen.calls
    assert reports(study) == [{1: 2.0, 2: 1.0}]


def test_a_callback_of_an_earlier_trial_is_refused() -> None:
    study = optuna.create_study()
    callback = OptunaCallback(study.ask(), "val_loss")

    def objective(trial: optuna.Trial) -> float:
        loop(losses(1)).run(callback)
        return 1.0

    study.tell(0, 1.0)
    with pytest.raises(
        RunStateError, match=r"trial 0 has finished \(COMPLETE\): make .* inside the objective"
    ):
        study.optimize(objective, 1)
    assert states(study) == ["COMPLETE", "FAIL"]
    assert reports(study) == [{}, {}]


def test_a_run_that_failed_before_its_first_report_may_be_tried_again() -> None:
    def fail(run_context: Any) -> None:
        raise MemoryError

    study = optuna.create_study()
    callback = OptunaCallback(study.ask(), "val_loss")
    with pytest.raises(MemoryError):
        loop(losses(1)).run([callback, At("on_train_step_end", fail)])
    loop(losses(2, 1)).run(callback)
    assert reports(study) == [{1: 2.0, 2: 1.0}]


def test_a_resumed_run_goes_on_with_the_steps() -> None:
    study = optuna.create_study()
    trial = study.ask()
    first = OptunaCallback(trial, "val_loss")
    loop(losses(3, 1)).run([first])
    state = json.loads(json.dumps(first.state_dict()))
    trial.report(2.5, 3)  # after the checkpoint, before the run broke off

    second = OptunaCallback(trial, "val_loss")
    second.load_state_dict(state)
    loop(losses(2.5, 2, 1.5)).run(second)
    assert reports(study) == [{1: 3.0, 2: 1.0, 3: 2.5, 4: 2.0, 5: 1.5}]
    assert (second.best_metric, second.best_step) == (1.0, 2)
    with pytest.raises(RunStateError, match="up to step 5 already"):  # taken up once
        loop(losses(1)).run(second)


def test_a_copy_reports_to_the_same_trial() -> None:
    study = optuna.create_study()
    callback = OptunaCallback(study.ask(), "val_loss")
    twin = copy.deepcopy(callback)
    assert twin.trial is callback.trial
    loop(losses(2, 1)).run(twin)
    assert reports(study) == [{1: 2.0, 2: 1.0}]
    assert (twin.best_step, callback.best_step) == (2, None)


def test_it_can_be_pickled_where_the_trial_can() -> None:
    study = optuna.create_study(storage="sqlite:///study.db")
    callback = pickle.loads(pickle.dumps(OptunaCallback(study.ask(), "val_loss")))
    loop(losses(2, 1)).run(callback)
    assert reports(study) == [{1: 2.0, 2: 1.0}]


def frozen_trial() -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(value=1.0)


@pytest.mark.parametrize(
    "make", [lambda: optuna.trial.FixedTrial({}), frozen_trial], ids=["fixed", "frozen"]
)
def test_a_trial_without_a_study_runs_and_runs_again(make: Any) -> None:
    callback = OptunaCallback(make(), "val_loss")
    for _ in range(2):
        loop(losses(2, 1, 3)).run(callback)
        assert (callback.best_metric, callback.best_step, callback.pruned) == (1.0, 2, False)
    assert callback.trial.user_attrs["backend"] == "fake"
    with pytest.raises(optuna.TrialPruned):  # one policy
        loop(losses(2, NAN, 1)).run(callback)


def test_an_evaluation_alone_is_not_reported() -> None:
    study = optuna.create_study()
    third_model().eval(THIRD_DATA, OptunaCallback(study.ask(), "val_loss"))
    assert reports(study) == [{}]


# The engines.


class Start(dt.Callback):
    """Begin a run with a weight and a rate, so that one Model serves all trials."""

    def __init__(self, w: float, lr: float) -> None:
        self.w, self.lr = w, lr

    def on_train_begin(self, run_context: Any) -> None:
        network = run_context.original_args().network
        run_context.backend.assign_weights(network, {"w": np.array(self.w, np.float32)})
        run_context.lr = self.lr


class Opened:
    """Batches that know how many passes over them are open."""

    def __init__(self, given: list[Any]) -> None:
        self.given, self.passes, self.open = given, 0, 0

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Any:
        self.passes += 1
        self.open += 1
        try:
            yield from self.given
        finally:
            self.open -= 1


def test_each_trial_ends_as_it_should_on_every_engine(engine: Any) -> None:
    """The loss is the weight, which loses the rate at each of an epoch's two steps."""
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    data = Opened(ones(2))
    pruner = MedianPruner(n_startup_trials=2)
    study = optuna.create_study(pruner=pruner)
    trials = [(1.0, 0.5), (1.0, 0.25), (1.0, 0.125), (1.0, 0.5), (NAN, 0.5), (2.0, 1.0)]

    def fail(run_context: Any) -> None:
        if trial_number == 3:
            raise ZeroDivisionError

    def objective(trial: optuna.Trial) -> float:
        nonlocal trial_number
        trial_number = trial.number
        reporting = OptunaCallback(trial, "val_loss")
        log = StepLogger(f"{trial.number}.jsonl", log_interval=1)
        callbacks = [Start(*trials[trial.number]), reporting, At("on_train_step_end", fail, step=3), log]
        model.fit(2, data, ones(1), callbacks=callbacks)
        assert reporting.best_metric is not None
        return reporting.best_metric

    trial_number = 0
    study.optimize(objective, len(trials), catch=(ZeroDivisionError,))
    assert states(study) == ["COMPLETE", "COMPLETE", "PRUNED", "FAIL", "PRUNED", "COMPLETE"]
    assert str(reports(study)) == str(
        [{1: 0.0, 2: -1.0}, {1: 0.5, 2: 0.0}, {1: 0.75}, {1: 0.0}, {1: NAN}, {1: 0.0, 2: -2.0}]
    )
    assert [trial.value for trial in study.trials] == [-1.0, 0.0, 0.75, None, None, -2.0]
    # Logs are whole, and no pass over the data is left open.
    steps = [
        [record.step for record in dt.logs.read_log(f"{n}.jsonl").records if record.mode == "train"]
        for n in range(len(trials))
    ]
    assert steps == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [1, 2], [1, 2], [1, 2, 3, 4]]
    assert data.passes > 0
    if engine.framework == "torch":
        assert data.open == 0
    # What ran.
    attributes = study.trials[2].user_attrs
    assert attributes["backend"] == engine.framework
    assert attributes["backend_version"] == find_backend(engine.framework).version()
    assert attributes["model"] == "Weight"
    assert (attributes["epochs"], attributes["batches_per_epoch"], attributes["evaluations"]) == (2, 2, 2)
    assert attributes["log_files"] == [os.path.abspath("2.jsonl")]
    # A run without a validation set is refused before the first step.
    for run in (model.train, model.fit):
        with pytest.raises(ArgumentValueError, match="this run makes none"):
            run(1, ones(1), callbacks=OptunaCallback(study.ask(), "val_loss"))
    assert math.isclose(engine.value(network), -2.0)
    with pytest.raises(ArgumentValueError, match="this run makes none"):
        model.fit(1, ones(1), ones(1), 2, callbacks=OptunaCallback(study.ask(), "val_loss"))
    # A missing metric is an error at the first evaluation.
    with pytest.raises(ArgumentValueError, match="available: eval_loss"):
        model.fit(1, ones(1), ones(1), callbacks=OptunaCallback(study.ask()))


def weight_objective(trial: optuna.Trial, name: str) -> float:
    """Train one weight for two epochs of two steps, each of which takes the rate from it."""
    engine = ENGINES[name]()
    network = engine.weight(1.0)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, trial.suggest_float("lr", 0.125, 0.5)))
    callback = OptunaCallback(trial, "val_loss")
    model.fit(2, ones(2), ones(1), callbacks=[callback, StepLogger(f"{trial.number}.jsonl", 1)])
    assert callback.best_metric is not None
    return callback.best_metric


@pytest.mark.torch
def test_threads_of_one_study_train_with_torch() -> None:
    """Each with its own model and callbacks; a barrier keeps four of them training at once."""
    together = threading.Barrier(4, timeout=60)

    def objective(trial: optuna.Trial) -> float:
        engine = ENGINES["torch"]()
        network = engine.weight(1.0)
        lr = trial.suggest_float("lr", 0.125, 0.5)
        model = dt.Model(network, engine.loss_fn(), engine.sgd(network, lr))
        meet = At("on_train_step_end", lambda run_context: together.wait())
        callback = OptunaCallback(trial, "val_loss")
        log = StepLogger(f"{trial.number}.jsonl", 1)
        model.fit(2, ones(2), ones(1), callbacks=[meet, callback, log])
        return callback.best_metric  # type: ignore[return-value]

    study = optuna.create_study(pruner=NopPruner())
    study.optimize(objective, n_trials=8, n_jobs=4)
    assert states(study) == ["COMPLETE"] * 8
    for trial in study.trials:
        lr = trial.params["lr"]
        assert trial.intermediate_values == pytest.approx({1: 1 - 2 * lr, 2: 1 - 4 * lr}, abs=1e-6)
        assert [r.step for r in dt.logs.read_log(f"{trial.number}.jsonl").records if r.mode == "train"] == [
            1,
            2,
            3,
            4,
        ]


@pytest.mark.mindspore
def test_threads_of_one_study_are_refused_with_mindspore() -> None:
    ENGINES["mindspore-graph"]()
    errors = []

    def objective(trial: optuna.Trial) -> float:
        try:
            return weight_objective(trial, "mindspore-graph")
        except CapabilityError as error:
            errors.append(str(error))
            raise

    study = optuna.create_study()
    study.optimize(objective, n_trials=4, n_jobs=2, catch=(CapabilityError,))
    assert states(study) == ["FAIL"] * 4
    assert reports(study) == [{}] * 4
    assert all(
        "OptunaCallback needs threads, which MindSpore GRAPH mode does not have" in e for e in errors
    )
    assert all("train in the main thread (n_jobs=1), or in several processes" in e for e in errors)


def work(name: str, url: str, trials: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    optuna.load_study(study_name="spawned", storage=url).optimize(
        lambda trial: weight_objective(trial, name), trials
    )


@pytest.mark.torch
@pytest.mark.mindspore
def test_spawned_processes_share_a_study_whatever_their_engine() -> None:
    url = "sqlite:///study.db"
    optuna.create_study(storage=url, study_name="spawned")
    context = multiprocessing.get_context("spawn")
    names = ("torch", "mindspore-graph")
    workers = [context.Process(target=work, args=(name, url, 2)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    study = optuna.load_study(study_name="spawned", storage=url)
    assert states(study) == ["COMPLETE"] * 4
    assert [trial.number for trial in study.trials] == [0, 1, 2, 3]
    backends = sorted(trial.user_attrs["backend"] for trial in study.trials)
    assert backends == ["mindspore", "mindspore", "torch", "torch"]
    for trial in study.trials:
        lr = trial.params["lr"]
        assert trial.intermediate_values == pytest.approx({1: 1 - 2 * lr, 2: 1 - 4 * lr}, abs=1e-6)
        assert [r.step for r in dt.logs.read_log(f"{trial.number}.jsonl").records if r.mode == "train"] == [
            1,
            2,
            3,
            4,
        ]


@pytest.mark.torch
@pytest.mark.mindspore
@pytest.mark.parametrize(
    ("optimizer", "sampler"),
    [
        ("sgd", lambda: optuna.samplers.TPESampler(n_startup_trials=3, seed=5)),
        ("adam", lambda: optuna.samplers.RandomSampler(seed=5)),
    ],
    ids=["sgd", "adam"],
)
def test_both_engines_prune_the_same_trials(optimizer: str, sampler: Any) -> None:
    """On an MLP with the same weights; the rate and the pruning depend on what was reported before."""
    ENGINES["mindspore-pynative"]()
    scale = {"sgd": 0.1, "adam": 0.001}[optimizer]

    def outcome(engine: str) -> list[Any]:
        side = importlib.import_module(f"parity_networks_{engine}")
        data = parity_batches("mlp", 4, side.LABEL_DTYPE)

        def objective(trial: optuna.Trial) -> float:
            network = side.mlp()
            side.load(network, initial_weights(side.shapes(network)))
            rate = trial.suggest_float("rate", 0.1 * scale, 10 * scale, log=True)
            callback = OptunaCallback(trial, "val_loss")
            side.model(network, optimizer, rate, torch_own=False).fit(
                2, data[:3], data[3:], callbacks=callback
            )
            assert callback.best_metric is not None
            return callback.best_metric

        pruner = MedianPruner(n_startup_trials=2)
        study = optuna.create_study(sampler=sampler(), pruner=pruner)
        study.optimize(objective, 6)
        return study.trials

    ours, theirs = outcome("torch"), outcome("mindspore")
    assert {trial.state for trial in ours} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert [trial.state for trial in ours] == [trial.state for trial in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.params == pytest.approx(other.params, rel=1e-9)
        assert one.intermediate_values == pytest.approx(other.intermediate_values, abs=2e-4)
        assert list(one.intermediate_values) == list(range(1, len(one.intermediate_values) + 1))


RANKS = """
import sys
sys.path.insert(0, {support!r})
import optuna, torch
import torch.distributed as dist
from engines import ENGINES, ones
import dualtrain as dt

dist.init_process_group("gloo")
rank = dist.get_rank()
engine = ENGINES["torch"]()
network = torch.nn.parallel.DistributedDataParallel(engine.weight())
study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.25)) if rank == 0 else None
callback = dt.callbacks.OptunaCallback(study.ask() if study else None, "val_loss")
model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25))
try:
    model.fit(3, ones(2), ones(1), callbacks=callback)
    end = "complete"
except optuna.TrialPruned:
    end = "pruned"
told = (end, callback.pruned, callback.best_step, study and study.trials[0].intermediate_values)
with open(f"rank{{rank}}.txt", "w") as file:
    file.write(repr(told))
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_rank_0_reports_and_all_ranks_are_pruned(tmp_path: Path) -> None:
    folder = run_two_ranks(RANKS.format(support=str(SUPPORT)), tmp_path)
    assert (folder / "rank0.txt").read_text() == "('pruned', True, 1, {1: 0.5})"
    assert (folder / "rank1.txt").read_text() == "('pruned', True, 1, None)"
