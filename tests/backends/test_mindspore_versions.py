"""What MindSpore's versions do by themselves, and what holds with dualtrain on each of them.

Each environment of ``tox.ini`` runs this with its own version: 2.7 to 2.10. A test whose first half
fails on a new version says that MindSpore has mended something, and which of our ways round it can go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import ENGINES, At, ones

import dualtrain as dt

pytestmark = pytest.mark.mindspore

VALID = [(np.zeros(1, np.float32), np.array([loss], np.float32)) for loss in (2.0, 1.0, 0.0)]
"""Batches whose losses are their labels: the mean is 1, the last one's is 0."""


@pytest.fixture(params=["mindspore-pynative", "mindspore-graph"])
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]()


def version() -> tuple[int, ...]:
    """Return MindSpore's version as two numbers."""
    import mindspore

    return tuple(int(part) for part in mindspore.__version__.split(".")[:2])


def native(engine: Any, network: Any, metrics: Any = None) -> tuple[Any, Any]:
    """Return MindSpore's own Model, plain SGD at .1 on gradients of 1, and the optimizer."""
    import mindspore

    optimizer = engine.sgd(network, 0.1)
    return mindspore.train.Model(network, engine.loss_fn(), optimizer, metrics), optimizer


def as_dataset(batches: list[Any]) -> Any:
    from mindspore.dataset import NumpySlicesDataset

    columns = tuple(np.concatenate(column) for column in zip(*batches, strict=True))
    return NumpySlicesDataset(columns, shuffle=False).batch(1)


def callback(event: str, action: Any) -> Any:
    """Return a callback of MindSpore's own."""
    import mindspore

    return mindspore.train.LambdaCallback(**{event: action})


def lower(run_context: Any) -> None:
    """Set the rate to .01 after the second step, in MindSpore's words."""
    import mindspore

    if run_context.original_args().cur_step_num == 2:
        run_context.original_args().optimizer.learning_rate.set_data(
            mindspore.Tensor(0.01, mindspore.float32)
        )


def test_natively_a_late_rate_is_heard_in_graph_mode_alone(engine: Any) -> None:
    network = engine.weight()
    model, _ = native(engine, network)
    values: list[float] = []

    def follow(run_context: Any) -> None:
        values.append(engine.value(network))
        lower(run_context)

    model.train(1, as_dataset(ones(4)), [callback("on_train_step_end", follow)], dataset_sink_mode=False)
    moved = -np.diff([1.0, *values])
    assert moved[:2] == pytest.approx([0.1, 0.1], abs=1e-6)
    if "graph" in engine.name:
        assert moved[2:] == pytest.approx([0.01, 0.01], abs=1e-6)
    elif version() >= (2, 8):
        assert moved[2:] == pytest.approx([0.1, 0.1], abs=1e-6)
    else:  # 2.7 reads memory that it has given back: any number may be there
        assert moved[2:] != pytest.approx([0.01, 0.01], abs=1e-6)


def test_with_us_a_late_rate_is_heard(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    values: list[float] = []

    class Follow:
        def on_train_step_end(self, run_context: Any) -> None:
            values.append(engine.value(network))
            lower(run_context)

    model.train(1, ones(4), Follow())
    assert -np.diff([1.0, *values]) == pytest.approx([0.1, 0.1, 0.01, 0.01], abs=1e-6)


def test_natively_late_weights_stop_pynative_training(engine: Any) -> None:
    """GRAPH mode goes on from them. With us ``assign_weights`` does in both modes: test_schedules.py."""
    import mindspore

    network = engine.weight()
    model, _ = native(engine, network)
    values: list[float] = []

    def restore(run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 2:
            network.w.set_data(mindspore.Tensor(5.0, mindspore.float32))
        values.append(engine.value(network))

    model.train(1, as_dataset(ones(4)), [callback("on_train_step_end", restore)], dataset_sink_mode=False)
    assert values[:2] == pytest.approx([0.9, 5.0])
    expected = [4.9, 4.8] if "graph" in engine.name else [5.0, 5.0]
    assert values[2:] == pytest.approx(expected, abs=1e-6)


def test_with_us_late_weights_are_trained_on(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))

    def restore(run_context: Any) -> None:
        run_context.backend.assign_weights(network, {"w": np.array(5, np.float32)})

    model.train(1, ones(4), At("on_train_step_end", restore, step=2))
    assert engine.value(network) == pytest.approx(4.8, abs=1e-6)


def test_the_evaluations_loss_is_natively_the_last_batchs_and_with_us_the_mean(engine: Any) -> None:
    seen: list[float] = []

    def look(run_context: Any) -> None:
        seen.append(float(run_context.original_args().eval_results["eval_loss"]))

    train = [(np.zeros(1, np.float32),) * 2]
    model, _ = native(engine, engine.weight(0.0), {"mae"})
    model.fit(
        1,
        as_dataset(train),
        as_dataset(VALID),
        callbacks=[callback("on_train_epoch_end", look)],
        dataset_sink_mode=False,
        valid_dataset_sink_mode=False,
    )
    network = engine.weight(0.0)
    ours = dt.Model(network, engine.loss_fn(), engine.sgd(network), {"mae"})
    ours.fit(1, train, VALID, callbacks=[callback("on_train_epoch_end", look)])
    assert seen == pytest.approx([0.0, 1.0])


class Scalars:
    """Rows of two columns, each of which is one number."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.float32(1), np.float32(0)


def test_scalar_columns_need_numpy_1_and_arrays_any(engine: Any) -> None:
    """``dualtrain doctor`` warns of numpy 2; batches from Python do without MindSpore's datasets."""
    from mindspore.dataset import GeneratorDataset

    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    scalars = GeneratorDataset(Scalars(), ["x", "label"], shuffle=False).batch(1)
    if int(np.__version__.partition(".")[0]) >= 2:
        with pytest.raises(Exception, match="copy"):
            model.train(1, scalars)
        assert engine.value(network) == 1.0
    else:
        model.train(1, scalars)
        assert engine.value(network) == pytest.approx(0.7)
    other = engine.weight()
    dt.Model(other, engine.loss_fn(), engine.sgd(other, 0.1)).train(1, ones(3))
    assert engine.value(other) == pytest.approx(0.7)
