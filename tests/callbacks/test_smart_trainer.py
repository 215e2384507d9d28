"""SmartTrainer: when it cuts the learning rate, by how much, and that training goes on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from engines import batches

import dualtrain as dt
from dualtrain.callbacks import SmartTrainer, StepLogger
from dualtrain.logs import read_log
from dualtrain.testing import FakeLoop


def constant(steps: int) -> list[Any]:
    """Return batches whose loss is 1 whatever the weight is: the gradient is 0."""
    return batches(*[(0.0, 1.0)] * steps)


@pytest.mark.parametrize(
    ("losses", "patience", "lr", "history"),
    [
        ([1.0] * 12, 3, 0.1, [(4, 0.05), (7, 0.025), (10, 0.0125)]),
        ([1.0] * 12, 3, 4e-6, [(4, 2e-6), (7, 1e-6)]),
        ([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5], 3, 0.1, [(7, 0.05)]),
        ([1.0, 0.99997, 0.99994, 0.99991], 3, 0.1, [(4, 0.05)]),
        ([1.0, 0.9, 0.8, 0.7], 1, 0.1, []),
        ([math.nan, math.nan, 1.0, 0.5], 3, 0.1, []),
        ([1.0, math.nan, math.inf, -math.inf], 3, 0.1, [(4, 0.05)]),
    ],
)
def test_cuts_come_after_patience_steps_without_improvement(
    losses: list[float], patience: int, lr: float, history: list[Any]
) -> None:
    callback = SmartTrainer(patience)
    FakeLoop(losses, lr=lr).run(callback)
    assert callback.lr_history == [(step, pytest.approx(rate, rel=1e-12)) for step, rate in history]
    assert callback.best_loss is None or math.isfinite(callback.best_loss)


def test_the_factor_smoothing_and_cooldown() -> None:
    callback = SmartTrainer(2, factor=0.1, cooldown=2)
    FakeLoop([1.0] * 9).run(callback)
    assert callback.lr_history == [(3, pytest.approx(0.01)), (7, pytest.approx(0.001))]
    noisy = [1.0, 0.0, 1.0, 0.0]  # running means 1, 0.5, 0.75, 0.375
    callback = SmartTrainer(1, smoothing=0.5)
    FakeLoop(noisy).run(callback)
    assert [step for step, _ in callback.lr_history] == [3]
    assert callback.best_loss == 0.375


def test_a_cut_is_used_from_the_next_step_on_and_is_in_the_same_row(engine: Any) -> None:
    """After the logger the callback's cut shows in the next row; the rate is what the weights move by."""
    moving = [(1.0, 0.0)] * 2  # two steps that move the weight, behind six that do not
    for order in (1, -1):
        network = engine.weight(0.0)
        callbacks = [StepLogger("log.jsonl", 1), SmartTrainer(3)][::order]
        data = constant(6) + batches(*moving)
        dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, data, callbacks)
        rates = read_log("log.jsonl").column("lr")[1]
        cut = [0.1] * (4 if order == 1 else 3)
        assert rates[:6] == pytest.approx((cut + [0.05] * 6)[:6], rel=1e-6)
        assert engine.value(network) == pytest.approx(-sum(rates[6:]), rel=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize(("rates", "cut"), [((0.1, 0.01), (0.05, 0.005)), ((0.1, 1.5e-6), (0.05, 1e-6))])
def test_every_group_is_cut(rates: tuple[float, float], cut: tuple[float, float]) -> None:
    import torch

    network = torch.nn.Linear(1, 1)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(network.parameters(), rates, strict=True)]
    callback = SmartTrainer(3, min_lr=1e-6)
    model = dt.Model(network, lambda output, label: 0 * output.sum() + 1, torch.optim.SGD(groups, 0.1))
    model.train(1, batches(*[((0.0), 0.0)] * 4), callback)
    assert callback.lr_history == [(4, pytest.approx(cut))]


def test_the_state_goes_on_where_it_was() -> None:
    whole = SmartTrainer(4)
    FakeLoop([1.0] * 6).run(whole)
    first = SmartTrainer(4)
    FakeLoop([1.0] * 3).run(first)
    second = SmartTrainer(4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    loop = FakeLoop([1.0] * 3)
    loop.run(second)
    assert [rate for _, rate in second.lr_history] == [rate for _, rate in whole.lr_history]
    assert loop.learning_rates == [0.1, 0.1, 0.05]


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 0},
        {"patience": 1.5},
        {"min_lr": -1.0},
        {"loss_plateau_threshold": math.nan},
        {"factor": 1.0},
        {"factor": 0.0},
        {"smoothing": 1.0},
        {"cooldown": -1},
    ],
)
def test_arguments_are_checked_when_it_is_made(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"SmartTrainer.*{next(iter(arguments))}"):
        SmartTrainer(**arguments)
