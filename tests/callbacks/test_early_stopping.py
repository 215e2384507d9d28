"""EarlyStopping: when it stops, what it takes for the best, and which weights stay."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from engines import batches, ones

import dualtrain as dt
from dualtrain.callbacks import EarlyStopping
from dualtrain.testing import FakeLoop

NAN = math.nan


def epochs_run(values: list[float], callback: EarlyStopping, *, valid_frequency: int = 1) -> int | None:
    evaluations = [{"eval_loss": value, "acc": value} for value in values]
    loop = FakeLoop(
        [1.0],
        epochs=len(values) * valid_frequency,
        evaluations=evaluations,
        valid_frequency=valid_frequency,
    )
    return loop.run(callback).epoch


@pytest.mark.parametrize(
    ("values", "options", "epochs", "best"),
    [
        ([1.0] * 20, {"patience": 2}, 3, 1.0),
        ([0.0] * 8, {"patience": 2}, 3, 0.0),
        ([1.0, NAN, NAN, NAN], {"patience": 2}, 3, 1.0),
        ([NAN, 0.5, 0.4, 0.3, 0.2], {"patience": 3}, 5, 0.2),
        ([3.0, 2.0, 1.0], {"patience": 0}, 3, 1.0),
        ([3.0, 2.0, 2.0, 1.0], {"patience": 0}, 3, 2.0),
        ([1.0, 0.95, 0.9, 0.85], {"patience": 2, "min_delta": 0.2}, 3, 1.0),
        ([0.5, 0.6, 0.6, 0.6], {"monitor": "val_acc", "patience": 2}, 4, 0.6),
        ([-3.0, -2.0, -1.0], {"monitor": "acc", "patience": 1}, 3, -1.0),
        ([0.5, 0.6], {"monitor": "acc", "mode": "min", "patience": 1}, 2, 0.5),
    ],
)
def test_it_stops_after_patience_evaluations_without_improvement(
    values: list[float], options: dict[str, Any], epochs: int, best: float
) -> None:
    callback = EarlyStopping(**options)
    assert epochs_run(values, callback) == epochs
    assert callback.best == best


def test_epochs_without_an_evaluation_do_not_count() -> None:
    assert epochs_run([1.0] * 10, EarlyStopping(patience=2), valid_frequency=2) == 6


def test_the_reason_is_told() -> None:
    context = FakeLoop([1.0], epochs=3, evaluations=[{"eval_loss": 1.0}] * 3).run(EarlyStopping())
    assert context.stop_reason == "eval_loss has not improved on 1.0 for 1 evaluations"


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="no metric 'f1' in the evaluation; available: eval_loss, acc"):
        epochs_run([1.0], EarlyStopping("f1"))


@pytest.mark.parametrize("stops", [True, False])
def test_the_best_weights_come_back_and_training_can_go_on_from_them(engine: Any, stops: bool) -> None:
    """Also where the run ends by itself, and in MindSpore's PYNATIVE mode after late assignments."""

    class WorseAfterTwo:
        def clear(self) -> None:
            pass

        def update(self, *outputs: Any) -> None:
            pass

        def eval(self) -> float:
            values.append([3.0, 1.0, 2.0, 2.0, 2.0][len(values)])
            return values[-1]

    values: list[float] = []
    network = engine.weight(1.0)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network), {"m": WorseAfterTwo()})
    callback = EarlyStopping("m", 2 if stops else 9, mode="min", restore_best_weights=True)
    model.fit(5 if stops else 4, ones(1), ones(1), callbacks=callback)
    assert len(values) == 4
    assert engine.value(network) == pytest.approx(0.8)
    model.train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.6)


def test_an_evaluation_alone_is_not_its_business(engine: Any) -> None:
    callback = EarlyStopping()
    model = dt.Model(engine.weight(), engine.loss_fn())
    model.eval(batches((1.0, 0.0)), callback)
    assert callback.best is None


def test_the_state_goes_on_where_it_was() -> None:
    first = EarlyStopping(patience=3)
    epochs_run([1.0, 2.0, 2.0], first)
    second = EarlyStopping(patience=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert epochs_run([2.0, 2.0, 2.0], second) == 1
    assert epochs_run([2.0, 2.0, 2.0], second) == 3  # a second run starts anew


@pytest.mark.parametrize(
    "arguments",
    [{"monitor": 3}, {"patience": -1}, {"patience": 1.5}, {"mode": "auto"}, {"min_delta": -1.0}],
)
def test_arguments_are_checked_when_it_is_made(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        EarlyStopping(**arguments)
