"""What is MindSpore's alone: its Model, its callbacks in their place, its threads, its options."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engines import ENGINES, Seen, Stream, ones
from models import make

import dualtrain as dt

pytestmark = pytest.mark.mindspore


@pytest.fixture(params=["mindspore-pynative", "mindspore-graph"])
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]()


def test_it_is_mindsporses_model(engine: Any) -> None:
    import mindspore

    _, model = make(engine)
    assert isinstance(model, mindspore.train.Model)
    assert isinstance(model, dt.Model)


def test_a_native_style_call_by_position_works(engine: Any) -> None:
    network = engine.weight()
    import mindspore

    evaluation = mindspore.nn.WithEvalCell(network, engine.loss_fn())
    model = dt.Model(
        network, engine.loss_fn(), engine.sgd(network), {"mae"}, evaluation, [0, 1, 2], "O0", "O0"
    )
    model.train(1, ones(2), None, False, -1)
    assert engine.value(network) == pytest.approx(0.8)
    model.fit(2, ones(2), ones(1), 1, None, False, False, -1, 1)
    assert engine.value(network) == pytest.approx(0.6)
    assert model.eval(ones(1), None, False) == {"mae": pytest.approx(0.6)}


def test_native_datasets_and_numpy_batches_train_alike(engine: Any) -> None:
    from mindspore.dataset import NumpySlicesDataset

    x, y = np.ones((6, 1), np.float32), np.zeros((6, 1), np.float32)
    native, model = make(engine)
    model.train(2, NumpySlicesDataset((x, y), shuffle=False).batch(2))
    ours, model = make(engine)
    model.train(2, [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)])
    assert engine.value(native) == engine.value(ours) == pytest.approx(0.4)


def test_mapping_batches_reach_train_step_as_mappings(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, optimizer=engine.sgd(network), train_step=engine.step_function("named"))
    batch = {"label": np.zeros(1, np.float32), "x": np.full(1, 2.0, np.float32)}
    model.train(1, [batch] * 2)
    assert engine.value(network) == pytest.approx(1.0 - 2 * 0.1 * 2.0)
    with pytest.raises(ValueError, match="compiled for batches with x, label"):
        model.train(1, ones(1))


def test_native_callbacks_stay_in_their_place_and_runs_of_ours_share_a_bridge(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import mindspore

    order: list[str] = []

    def note(name: str) -> Any:
        hook = staticmethod(lambda run_context: order.append(name))
        return type(name, (), {"on_train_step_end": hook})()

    class NativeSubclass(mindspore.train.LossMonitor):
        def on_train_step_end(self, run_context: Any) -> None:
            order.append("native")
            super().on_train_step_end(run_context)

    native, seen = NativeSubclass(), []

    class Look(dt.Callback):
        def on_train_begin(self, run_context: Any) -> None:
            seen.extend(run_context.original_args().list_callback)

    _, model = make(engine)
    model.train(1, ones(2), [note("a"), note("b"), native, note("c"), Look()])
    assert order == ["a", "b", "native", "c"] * 2
    kinds = [type(c).__name__ for c in seen]
    assert [k for k in kinds if not k.startswith("_")] == [
        "LeadingBridge",
        "NativeSubclass",
        "DualTrainBridge",
    ]
    assert native in seen
    assert "loss is 1.0" in capsys.readouterr().out


def test_native_callbacks_alone_work(engine: Any, tmp_path: Any) -> None:
    import mindspore

    network, model = make(engine)
    checkpoint = mindspore.train.ModelCheckpoint("m", str(tmp_path))
    model.train(1, ones(3), [mindspore.train.TimeMonitor(), checkpoint])
    saved = mindspore.load_checkpoint(checkpoint.latest_ckpt_file_name)
    assert float(saved["w"].asnumpy()) == pytest.approx(0.7) == engine.value(network)


def test_a_native_callbacks_stop_stops_our_context_too(engine: Any) -> None:
    import mindspore

    class Stopper(mindspore.train.LambdaCallback):
        pass

    stopper = Stopper(on_train_step_end=lambda run_context: run_context.request_stop())
    seen: list[bool] = []

    class Look(dt.Callback):
        def on_train_end(self, run_context: Any) -> None:
            seen.append(run_context.get_stop_requested())

    network, model = make(engine)
    model.train(3, ones(3), [stopper, Look()])
    assert engine.value(network) == pytest.approx(0.9)
    assert seen == [True]


def test_native_callbacks_see_the_mean_evaluation_loss(engine: Any) -> None:
    """MindSpore itself reports the last batch's loss; its own callbacks get the mean from us."""
    import mindspore

    seen: list[float] = []
    look = mindspore.train.LambdaCallback(
        on_train_epoch_end=lambda c: seen.append(c.original_args().eval_results["eval_loss"])
    )
    _, model = make(engine, engine.weight(0.0), metrics={"mae"})
    valid = [(np.zeros(1, np.float32), np.array([v], np.float32)) for v in (2.83, -0.31)]
    model.fit(1, [(np.zeros(1, np.float32),) * 2], valid, callbacks=[look])
    assert seen == [pytest.approx(1.26)]


def test_a_callback_whose_class_has_a_native_name_gets_evaluation_events(engine: Any) -> None:
    class EarlyStopping:
        def __init__(self) -> None:
            self.calls = 0

        def on_eval_end(self, run_context: Any) -> None:
            self.calls += 1

    callback = EarlyStopping()
    _, model = make(engine)
    model.fit(2, ones(1), ones(1), callbacks=callback)
    assert callback.calls == 2


def test_a_second_thread_is_refused_and_a_nested_evaluation_is_not(engine: Any) -> None:
    errors: list[BaseException] = []
    results: list[Any] = []
    _, model = make(engine)
    _, other = make(engine)

    def train_other() -> None:
        try:
            other.train(1, ones(1))
        except BaseException as error:
            errors.append(error)

    class Nested(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            results.append(model.eval(ones(1)))
            thread = threading.Thread(target=train_other)
            thread.start()
            thread.join()

    model.train(1, ones(1), Nested())
    assert results == [{"eval_loss": pytest.approx(0.9)}]
    assert [type(e).__mro__[2] for e in errors] == [RuntimeError]
    assert "another thread" in str(errors[0])
    other.train(1, ones(1))  # free again


def test_predict_takes_numpy(engine: Any) -> None:
    _, model = make(engine, engine.weight(3.0))
    assert float(model.predict(np.array([2.0], np.float32)).asnumpy()[0]) == 6.0


def test_a_network_that_gives_its_loss_trains_and_evaluates_without_loss_fn(engine: Any) -> None:
    import mindspore
    from networks_mindspore import Weight

    network = Weight(1.0)
    cell = mindspore.nn.WithLossCell(network, engine.loss_fn())
    model = dt.Model(cell, optimizer=engine.sgd(network))
    model.fit(1, ones(2), ones(1))
    assert engine.value(network) == pytest.approx(0.8)
    assert model.eval(ones(1)) == {"eval_loss": pytest.approx(0.8)}


def test_a_list_of_rates_that_is_too_short_is_announced(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, [0.1, 0.2]))
    with pytest.warns(UserWarning, match="rates for 2 more updates, but this run has 3"):
        with pytest.raises(Exception):  # noqa: B017 - whatever MindSpore makes of it
            model.train(1, ones(3))


def test_amp_level_is_passed_on(engine: Any) -> None:
    network, model = make(engine, amp_level="O3")
    model.train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.8, abs=1e-3)
    with pytest.raises(ValueError, match="amp_level"):
        dt.Model(engine.weight(), engine.loss_fn(), amp_level="O2")


def test_nothing_stays_on_the_learning_rate_after_the_run(engine: Any) -> None:
    network = engine.weight()
    optimizer = engine.sgd(network)
    model = dt.Model(network, engine.loss_fn(), optimizer)
    inside: list[bool] = []

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            inside.append("set_data" in vars(optimizer.learning_rate))

    model.train(1, ones(1), Look())
    assert inside == [True]
    assert "set_data" not in vars(optimizer.learning_rate)


def test_a_networks_jit_config_is_that_of_our_train_step(engine: Any) -> None:
    import mindspore

    network = engine.weight()
    network.set_jit_config(mindspore.JitConfig(jit_level="O0"))
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network), clip_norm=5.0)
    model.train(1, ones(1))
    (part,) = vars(model.train_network)["_parts"].values()
    for cell in (model.train_network, part):
        assert cell.jit_config_dict["jit_level"] == "O0"


def test_limits_of_a_dry_run(engine: Any) -> None:
    """Two batches of three per epoch, of numpy and of MindSpore's own data; then a stop in an epoch."""
    from mindspore.dataset import GeneratorDataset, NumpySlicesDataset

    x, y = np.ones((3, 1), np.float32), np.array([[0], [0], [9]], np.float32)
    rows = list(zip(x, y, strict=True))
    native = NumpySlicesDataset((x, y), shuffle=False).batch(1)
    generated = GeneratorDataset(rows, ["x", "label"], shuffle=False).map(lambda x: x, ["x"]).batch(1)
    for data in (native, generated, rows):
        network, model = make(engine)
        seen = Seen(lambda c: (c.step, c.epoch, c.batches_per_epoch, c.stop_reason), "on_train_epoch_end")
        model.train(2, data, seen, limit_batches=2)
        assert seen.values == [(2, 1, 2, None), (4, 2, 2, None)]
        assert engine.value(network) == pytest.approx(0.6)
        assert model.eval(data, limit_batches=2) == {"eval_loss": pytest.approx(0.6)}
        results = Seen(lambda c: c.metrics["eval_loss"], "on_eval_end")
        model.fit(1, data, data, callbacks=results, limit_batches=2)
        assert results.values == [pytest.approx(0.4)]
        ended = Seen(lambda c: (c.step, c.epoch, c.stop_reason), "on_train_end")
        model.train(3, data, ended, max_steps=4)
        assert ended.values == [(4, 2, "max_steps=4 is reached")]
        assert engine.value(network) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="limit_batches"):
        model.eval(ones(1), limit_batches=0)


def test_a_limit_closes_the_window(engine: Any) -> None:
    network, model = make(engine, accumulate_steps=2)
    seen = Seen(lambda c: c.is_update_step)
    model.train(2, Stream(ones(5)), seen, limit_batches=3)
    assert seen.values == [False, True, True] * 2
    assert engine.value(network) == pytest.approx(0.6)
