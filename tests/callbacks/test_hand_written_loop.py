"""The callbacks of dualtrain in a PyTorch loop that the user writes: what they do under ``dt.Model``."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from log_files import rows_of

import dualtrain as dt
from dualtrain.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateWarmup,
    LrCheck,
    MetricHistory,
    NanGuard,
    OptunaCallback,
    ParameterMonitor,
    ProgressBar,
    SmartTrainer,
    StepLogger,
    Throughput,
    TransformerMonitor,
)
from dualtrain.errors import CapabilityError

pytestmark = pytest.mark.torch

BATCHES = 6


class Task:
    """A network, its data and its optimizer, the same each time that they are made."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(3)
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.loss_fn = torch.nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.5)
        inputs = torch.randn(BATCHES + 2, 16, 4)
        batches = [(x, x.sum(1, keepdim=True)) for x in inputs]
        self.data, self.valid = batches[:BATCHES], batches[BATCHES:]

    def fit(self, callbacks: Any, epochs: int) -> None:
        raise NotImplementedError


class ByModel(Task):
    def fit(self, callbacks: Any, epochs: int) -> None:
        model = dt.Model(self.network, self.loss_fn, self.optimizer)
        model.fit(epochs, self.data, self.valid, callbacks=callbacks)


class ByHand(Task):
    def fit(self, callbacks: Any, epochs: int) -> None:
        import torch

        own = {"network": self.network, "optimizer": self.optimizer, "loss_fn": self.loss_fn}
        with dt.Run(callbacks, epochs=epochs, batches_per_epoch=BATCHES, evaluations=epochs, **own) as run:
            for _epoch in run.epochs():
                for x, y in run.batches(self.data):
                    self.optimizer.zero_grad()
                    loss = self.loss_fn(self.network(x), y)
                    loss.backward()
                    self.optimizer.step()
                    run.outputs = loss
                with torch.no_grad(), run.evaluation() as evaluation:
                    for x, y in evaluation.batches(self.valid):
                        evaluation.outputs = self.loss_fn(self.network(x), y)


def both(make: Any, read: Any, epochs: int = 3) -> Iterator[Any]:
    """Yield what is read after a run of each kind: of the callbacks and the task."""
    for kind in (ByModel, ByHand):
        task, callbacks = kind(), make()
        task.fit(callbacks, epochs)
        yield read(callbacks, task)


def assert_same(make: Any, read: Any, **options: Any) -> Any:
    model, hand = both(make, read, **options)
    assert hand == model
    return hand


def weights_of(task: Task) -> list[Any]:
    return [parameter.tolist() for parameter in task.network.parameters()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("timestamp", "elapsed_sec")} for row in rows]


def test_step_logger_and_history() -> None:
    def read(callbacks: Any, task: Task) -> Any:
        return without_times(rows_of("steps.jsonl")), callbacks[1].history, weights_of(task)

    rows, history, _ = assert_same(lambda: [StepLogger("steps.jsonl", 4), MetricHistory()], read)
    trained = [row["step"] for row in rows if "mode" not in row]
    assert trained == [4, 8, 12, 16, 18]
    assert history["epoch"] == [1, 2, 3]
    assert len(history["eval_loss"]) == 3


def test_smart_trainer() -> None:
    def make() -> Any:
        return [SmartTrainer(patience=2, loss_plateau_threshold=0.5, min_lr=0.01), MetricHistory()]

    cuts, rates, _ = assert_same(
        make, lambda c, task: (c[0].lr_history, c[1].history["lr"], weights_of(task))
    )
    assert len(cuts) > 2
    assert rates[-1] == cuts[-1][1]


def test_early_stopping_restores_the_best_weights() -> None:
    class Disturbing:
        """Make the network worse in the second epoch."""

        def on_train_epoch_begin(self, run_context: Any) -> None:
            if run_context.epoch == 2:
                run_context.network[2].bias.data.add_(100.0)
                run_context.optimizer.param_groups[0]["lr"] = 0.0

    def make() -> Any:
        return [EarlyStopping(patience=2, restore_best_weights=True), Disturbing(), MetricHistory()]

    best, losses, weights = assert_same(
        make, lambda c, task: (c[0].best, c[2].history["eval_loss"], weights_of(task)), epochs=6
    )
    assert len(losses) == 3
    assert best == losses[0]
    assert weights[3][0] < 50


def test_optuna_callback_prunes() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    outcomes = []
    for kind in (ByModel, ByHand):
        pruner = optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2)
        study = optuna.create_study(pruner=pruner)

        def objective(trial: Any, kind: type[Task] = kind) -> float:
            kind().fit(OptunaCallback(trial, "val_loss"), 5)
            raise AssertionError("the trial is pruned")

        study.optimize(objective, n_trials=1)
        (trial,) = study.trials
        outcomes.append((trial.state.name, trial.intermediate_values, trial.user_attrs["evaluations"]))

    assert outcomes[0] == outcomes[1]
    assert outcomes[1][0] == "PRUNED"
    assert sorted(outcomes[1][1]) == [1, 2]


def test_transformer_monitor_records_norms_and_warns_once() -> None:
    def read(callbacks: Any, task: Task) -> Any:
        return without_times(rows_of("monitor.jsonl"))

    def make() -> Any:
        return TransformerMonitor(log_file="monitor.jsonl", attention_interval=2)

    with pytest.warns(UserWarning, match="only gradient norms are recorded") as warned:
        rows = assert_same(make, read)

    assert len(rows) == 3 * BATCHES
    assert all(row["grad_norm"] == row["grad_norm_clipped"] > 0 for row in rows)
    # One of each run.
    assert [str(warning.message).partition(": only")[0] for warning in warned] == [
        "TransformerMonitor found no attention in Sequential",
        "TransformerMonitor found no attention: this run cannot call the network outside of its training "
        "step",
    ]


def test_parameter_monitor() -> None:
    rows = assert_same(
        lambda: ParameterMonitor(interval=5, log_file="parameters.jsonl"),
        lambda c, task: without_times(rows_of("parameters.jsonl")),
    )
    assert [row["step"] for row in rows] == [1, 6, 11, 16]


def test_throughput() -> None:
    throughput = Throughput(interval=4)
    ByHand().fit([throughput, MetricHistory()], 3)

    assert throughput.summary["steps"] == 2  # of the last interval: 18 = 4 * 4 + 2
    assert throughput.summary["samples_per_sec"] > 0
    assert throughput.slowest in ("Throughput", "MetricHistory")


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(kind: type[Task]) -> list[list[str]]:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        kind().fit(ProgressBar(), 2)
        # Without the speed, which is each run's own.
        return [line.split("  ")[:-1] for line in stream.getvalue().splitlines()]

    lines = printed(ByHand)
    assert lines == printed(ByModel)
    assert [line[:2] for line in lines] == [["epoch 1/2", "step 6/6"], ["epoch 2/2", "step 6/6"]]


def test_warm_up_and_lr_check() -> None:
    def make() -> Any:
        expected = [0.5 * (0.2 + 0.8 * min(i / 4, 1)) for i in range(18)]
        return [LearningRateWarmup(4, 0.2), LrCheck(expected), StepLogger("steps.jsonl", 1)]

    found, rates, _ = assert_same(
        make,
        lambda c, t: (
            c[1].first_difference,
            [row["lr"] for row in rows_of("steps.jsonl") if "mode" not in row],
            weights_of(t),
        ),
    )
    assert found is None
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == 0.5


def test_nan_guard_stops() -> None:
    task = ByHand()
    task.data[2][1].fill_(float("nan"))
    history = MetricHistory()
    guard = NanGuard("stop")
    reasons: list[Any] = []

    class Noting:
        def on_train_end(self, run_context: Any) -> None:
            reasons.append((run_context.step, run_context.stop_reason))

    task.fit([guard, history, Noting()], 3)

    assert reasons == [(3, "At step 3, epoch 1, batch 3, the loss is nan")]
    assert history.history["epoch"] == [1]


@pytest.mark.parametrize("outputs", [None, {"kl": 1.0}])
def test_steps_without_a_loss_do_no_harm(outputs: Any) -> None:
    callbacks = [
        *(StepLogger("steps.jsonl", 1), MetricHistory(), SmartTrainer(), NanGuard("stop"), Throughput(1)),
        *(ProgressBar(), LrCheck([0.1])),
    ]
    with dt.Run(callbacks) as run:
        for _ in range(2):
            with run.step():
                run.outputs = outputs

    assert {(row["step"], row["loss"]) for row in rows_of("steps.jsonl")} == {(1, None), (2, None)}


class Counting:
    def on_gradients_ready(self, run_context: Any) -> None:
        raise AssertionError("a hand-written loop has no such event")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: NanGuard("skip"),
            "NanGuard needs skip_nonfinite, which a hand-written loop (PyTorch) does ",
        ),
        (
            lambda: GradientAccumulationScheduler({0: 2}),
            "GradientAccumulationScheduler needs accumulation, which a hand-written loop (PyTorch) does ",
        ),
        (
            Counting,
            "on_gradients_ready of Counting would never be called: a hand-written loop (PyTorch) has no ",
        ),
    ],
    ids=["NanGuard", "GradientAccumulationScheduler", "gradient event"],
)
def test_what_a_loop_cannot_do_is_refused_by_name(make: Any, message: str) -> None:
    task = ByHand()
    before = weights_of(task)

    with pytest.raises(CapabilityError) as caught:
        task.fit(make(), 1)

    assert str(caught.value).startswith(message)
    assert weights_of(task) == before
