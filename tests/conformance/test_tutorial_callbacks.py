"""Callbacks as tutorials write them run unchanged, on both engines, whatever class they derive from."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from engines import ones

import dualtrain as dt


class StepNames:
    """The names that tutorials write and MindSpore never calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, run_context: Any) -> None:
        self.seen.append(("step begin", run_context.original_args().cur_step_num))

    def on_step_end(self, run_context: Any) -> None:
        self.seen.append(("step end", run_context.original_args().cur_step_num))

    def on_epoch_begin(self, run_context: Any) -> None:
        self.seen.append(("epoch begin", run_context.original_args().cur_epoch_num))

    def on_epoch_end(self, run_context: Any) -> None:
        self.seen.append(("epoch end", run_context.original_args().cur_epoch_num))


class LegacyNames:
    """MindSpore's older names, which it calls in training and in evaluation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, run_context: Any) -> None:
        self.seen.append(("begin", run_context.original_args().mode))

    def step_end(self, run_context: Any) -> None:
        self.seen.append(("step_end", run_context.original_args().mode))

    def epoch_end(self, run_context: Any) -> None:
        self.seen.append(("epoch_end", run_context.original_args().mode))

    def end(self, run_context: Any) -> None:
        self.seen.append(("end", run_context.original_args().mode))


class Reader:
    """Reads the loss, the rate and the metrics the way MindSpore's tutorials do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_step_end(self, run_context: Any) -> None:
        cb_params = run_context.original_args()
        loss = float(cb_params.net_outputs.asnumpy())
        rate = float(cb_params.optimizer.learning_rate.asnumpy())
        self.seen.append((loss, float(cb_params.net_outputs), rate, hasattr(cb_params, "metrics")))

    def on_eval_end(self, run_context: Any) -> None:
        self.seen.append(hasattr(run_context.original_args(), "metrics"))


class RateSetter:
    """Sets the rate the way tutorials do, which in MindSpore's PYNATIVE mode does nothing by itself."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_step_end(self, run_context: Any) -> None:
        cb_params = run_context.original_args()
        if cb_params.cur_step_num == 2:
            from mindspore import Tensor, float32

            cb_params.optimizer.learning_rate.set_data(Tensor(0.01, float32))


def derived(cls: type, base: str) -> Any:
    """Return an instance of a tutorial callback as a plain class, or derived from a Callback base."""
    if base == "plain class":
        return cls()
    if base == "dualtrain.Callback":
        return type(cls.__name__, (cls, dt.Callback), {})()
    import mindspore

    return type(cls.__name__, (cls, mindspore.train.Callback), {})()


@pytest.fixture(
    params=[
        "plain class",
        "dualtrain.Callback",
        pytest.param("mindspore.train.Callback", marks=pytest.mark.mindspore),
    ]
)
def base(request: pytest.FixtureRequest) -> str:
    return request.param


def fit(engine: Any, callback: Any, w: float = 1.0) -> float:
    """Train one epoch of four steps from gradient 1 and lr 0.1, evaluate two batches, return the weight."""
    network = engine.weight(w)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1), {"mae"})
    model.fit(1, ones(4), ones(2), callbacks=callback)
    return engine.value(network)


@pytest.mark.filterwarnings("ignore:.*uses other names for events")
def test_step_and_epoch_names_mean_the_training_events(engine: Any, base: str) -> None:
    callback = derived(StepNames, base)
    fit(engine, callback)
    steps = [(name, i) for i in (1, 2, 3, 4) for name in ("step begin", "step end")]
    assert callback.seen == [("epoch begin", 1), *steps, ("epoch end", 1)]


@pytest.mark.filterwarnings("ignore:.*uses other names for events")
def test_legacy_names_are_called_in_training_and_evaluation(engine: Any, base: str) -> None:
    callback = derived(LegacyNames, base)
    fit(engine, callback)
    evaluation = [("begin", "eval"), *[("step_end", "eval")] * 2, ("epoch_end", "eval"), ("end", "eval")]
    training = [("begin", "train"), *[("step_end", "train")] * 4]
    assert callback.seen == [*training, *evaluation, ("epoch_end", "train"), ("end", "train")]


def test_the_native_way_of_reading_works(engine: Any, base: str) -> None:
    callback = derived(Reader, base)
    fit(engine, callback)
    losses = [1.0, 0.9, 0.8, 0.7]
    assert callback.seen[-1] is True
    for seen, loss in zip(callback.seen, losses, strict=False):
        assert seen == (pytest.approx(loss), pytest.approx(loss), pytest.approx(0.1), False)


@pytest.mark.mindspore  # the callback itself makes a mindspore.Tensor
def test_set_data_on_the_learning_rate_is_used_from_the_next_step_on(engine: Any, base: str) -> None:
    weight = fit(engine, derived(RateSetter, base))
    assert weight == pytest.approx(1.0 - 2 * 0.1 - 2 * 0.01, abs=1e-6)


def test_other_names_are_announced_once_per_class(engine: Any) -> None:
    class Announced(StepNames):
        pass

    with pytest.warns(UserWarning, match=r"Announced.*on_step_end \(on_train_step_end\)") as caught:
        fit(engine, [Announced(), Announced()])
    assert len([w for w in caught if "Announced" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(engine, Announced())


def test_the_events_own_name_wins_over_the_alias(engine: Any, base: str) -> None:
    class Both:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_train_step_end(self, run_context: Any) -> None:
            self.seen.append("on_train_step_end")

        def on_step_end(self, run_context: Any) -> None:
            self.seen.append("on_step_end")

        def on_eval_step_end(self, run_context: Any) -> None:
            self.seen.append("on_eval_step_end")

    callback = derived(Both, base)
    fit(engine, callback)
    assert callback.seen == ["on_train_step_end"] * 4 + ["on_eval_step_end"] * 2


@pytest.mark.mindspore
def test_what_a_mindspore_callback_inherits_is_no_hook(engine: Any) -> None:
    import mindspore

    class Quiet(mindspore.train.Callback):
        pass

    fit(engine, Quiet())  # it is a callback, with nothing to call
    from dualtrain.backends import callback_bases
    from dualtrain.bus import EventBus

    assert EventBus(Quiet(), native_bases=callback_bases()).describe() == "no listeners"
