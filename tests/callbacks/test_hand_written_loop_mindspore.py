"""The callbacks of dualtrain in a MindSpore loop that the user writes: what they do under ``dt.Model``.

PYNATIVE mode: a compiled step has no Python between its stages, and reports its update as this loop does.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from log_files import rows_of

import dualtrain as dt
from dualtrain.callbacks import (
    EarlyStopping,
    LearningRateWarmup,
    LrCheck,
    MetricHistory,
    NanGuard,
    OptunaCallback,
    ProgressBar,
    SmartTrainer,
    StepLogger,
    Throughput,
    TransformerMonitor,
)

pytestmark = pytest.mark.mindspore

BATCHES = 4


class Task:
    """A network, its data and its optimizer, the same each time that they are made."""

    def __init__(self, poisoned: int | None = None) -> None:
        import mindspore
        from mindspore import nn

        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        mindspore.set_seed(3)
        self.network = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 1))
        self.loss_fn = nn.MSELoss()
        self.optimizer = nn.SGD(self.network.trainable_params(), 0.25)
        inputs = np.random.default_rng(3).standard_normal((BATCHES + 1, 16, 4)).astype(np.float32)
        batches = [(x, x.sum(1, keepdims=True)) for x in inputs]
        if poisoned is not None:
            batches[poisoned][0][:] = np.nan
        self.data, self.valid = batches[:BATCHES], batches[BATCHES:]

    def weights(self) -> list[float]:
        return [v for p in self.network.get_parameters() for v in p.asnumpy().ravel().tolist()]


def by_model(task: Task, callbacks: Any, epochs: int) -> None:
    model = dt.Model(task.network, task.loss_fn, task.optimizer)
    model.fit(epochs, task.data, task.valid, callbacks=callbacks)


def by_hand(task: Task, callbacks: Any, epochs: int) -> None:
    import mindspore
    from mindspore import Tensor

    network, optimizer = task.network, task.optimizer

    def loss_of(x: Any, y: Any) -> Any:
        return task.loss_fn(network(x), y)

    gradient = mindspore.value_and_grad(loss_of, None, optimizer.parameters)
    own = {"network": network, "optimizer": optimizer, "loss_fn": task.loss_fn}
    with dt.Run(callbacks, epochs=epochs, batches_per_epoch=BATCHES, evaluations=epochs, **own) as run:
        for _epoch in run.epochs():
            network.set_train()
            for x, y in run.batches(task.data):
                run.outputs, gradients = gradient(Tensor(x), Tensor(y))
                optimizer(gradients)
                run.count_update(gradients)
            network.set_train(False)
            with run.evaluation() as evaluation:
                for x, y in evaluation.batches(task.valid):
                    evaluation.outputs = loss_of(Tensor(x), Tensor(y))


def both(make: Callable[[], Any], read: Callable[[Any, Task], Any], epochs: int = 3) -> tuple[Any, Any]:
    """Return what is read after a run of each kind: of the callbacks and the task."""
    found = []
    for fit in (by_model, by_hand):
        task, callbacks = Task(), make()
        fit(task, callbacks, epochs)
        found.append(read(callbacks, task))
    return found[0], found[1]


def close(expected: Any) -> Any:
    """Compare numbers of two ways through float32."""
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_step_logger_and_history() -> None:
    def read(callbacks: Any, task: Task) -> Any:
        return rows_of("steps.jsonl"), callbacks[1].history, task.weights()

    model, hand = both(lambda: [StepLogger("steps.jsonl", 3), MetricHistory()], read)
    places = [(row["step"], row["epoch"], row.get("mode"), row.get("global_step")) for row in hand[0]]
    assert places == [(r["step"], r["epoch"], r.get("mode"), r.get("global_step")) for r in model[0]]
    assert [row["step"] for row in hand[0] if "mode" not in row] == [3, 6, 9, 12]
    assert [row["step"] for row in hand[0] if "mode" in row] == [4, 8, 12]
    for name in ("loss", "lr", "eval_loss"):
        assert [r[name] for r in hand[0] if name in r] == close([r[name] for r in model[0] if name in r])
        assert hand[1][name] == close(model[1][name])
    assert hand[2] == close(model[2])


def test_smart_trainer() -> None:
    def make() -> Any:
        return [SmartTrainer(patience=2, loss_plateau_threshold=0.5, min_lr=0.01)]

    model, hand = both(make, lambda c, task: (c[0].lr_history, task.weights()))
    assert hand[0] == model[0]
    assert len(hand[0]) > 2
    assert hand[1] == close(model[1])


def test_early_stopping_restores_the_best_weights() -> None:
    class Worsen:
        """Move the network away from its best in the second epoch, at a rate that leaves it there."""

        def on_train_epoch_begin(self, run_context: Any) -> None:
            import mindspore

            if run_context.epoch == 2:
                bias = run_context.network[2].bias
                mindspore.ops.assign(bias, bias + 100)
                run_context.scale_lr(1e-6)

    def make() -> Any:
        return [EarlyStopping(patience=2, restore_best_weights=True), Worsen(), MetricHistory()]

    model, hand = both(make, lambda c, task: (c[2].history["epoch"], c[0].best, task.weights()), epochs=6)
    assert hand[0] == model[0] == [1, 2, 3]
    assert hand[1] == close(model[1])
    assert hand[2] == close(model[2])
    assert max(map(abs, hand[2])) < 50


def test_optuna_callback_prunes() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    reports = []
    for fit in (by_model, by_hand):
        study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2))

        def objective(trial: Any, fit: Any = fit) -> float:
            reporting = OptunaCallback(trial, "eval_loss")
            fit(Task(), [reporting], 5)
            raise AssertionError("the trial is pruned")

        study.optimize(objective, n_trials=1)
        assert study.trials[0].state is optuna.trial.TrialState.PRUNED
        reports.append(study.trials[0].intermediate_values)
    assert list(reports[1]) == [1, 2]
    assert reports[1] == close(reports[0])


def test_transformer_monitor_records_the_reported_norms_and_warns_once() -> None:
    def make() -> Any:
        return [TransformerMonitor(log_file="monitor.jsonl", attention_interval=2)]

    with pytest.warns(UserWarning, match="only gradient norms are recorded") as warned:
        model, hand = both(make, lambda c, task: [row["grad_norm"] for row in rows_of("monitor.jsonl")])
    assert len(warned) == 2  # one of each run
    assert len(hand) == 3 * BATCHES
    assert hand == close(model)


def test_throughput() -> None:
    model, hand = both(lambda: [Throughput(interval=4)], lambda c, task: c[0].summary)
    assert set(hand) == set(model)
    assert hand["steps"] == model["steps"] == 4
    assert hand["samples_per_sec"] > 0


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []

    def make() -> Any:
        outputs.append(io.StringIO())
        monkeypatch.setattr(sys, "stdout", outputs[-1])
        return [ProgressBar()]

    both(make, lambda c, task: None)
    monkeypatch.undo()
    for output in outputs:
        lines = output.getvalue().splitlines()
        assert [line.split("  ")[:2] for line in lines] == [
            [f"epoch {epoch}/3", f"step {BATCHES}/{BATCHES}"] for epoch in (1, 2, 3)
        ]


def test_warm_up_and_lr_check() -> None:
    expected = [0.25 * factor for factor in (0.25, 0.4375, 0.625, 0.8125)] + [0.25] * 8

    def make() -> Any:
        return [LearningRateWarmup(4, 0.25), LrCheck(expected)]

    model, hand = both(make, lambda c, task: (c[1].first_difference, task.weights()))
    assert hand[0] is model[0] is None
    assert hand[1] == close(model[1])
    _, (difference, _) = both(
        lambda: [LearningRateWarmup(4, 0.25), LrCheck([0.25] * 12)], lambda c, t: (c[1].first_difference, c)
    )
    assert difference[:3] == (1, 0, 0.25)


def test_nan_guard_stops() -> None:
    task = Task(poisoned=1)
    guard, history = NanGuard("stop"), MetricHistory()
    by_hand(task, [guard, history], 3)
    assert history.history["epoch"] == [1]
