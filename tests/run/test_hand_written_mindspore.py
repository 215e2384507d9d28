"""A loop that a user writes with ``value_and_grad`` in PYNATIVE mode, inside ``dt.Run``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import ENGINES, At, Seen, batches, columns, ones

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError, RunStateError
from dualtrain.protocol import Capability
from dualtrain.testing import RecordingCallback

pytestmark = pytest.mark.mindspore


@pytest.fixture
def engine() -> Any:
    return ENGINES["mindspore-pynative"]()


def train(
    engine: Any,
    network: Any,
    optimizer: Any,
    callbacks: Any = None,
    data: Any = None,
    valid: Any = None,
    *,
    epochs: int = 1,
    report: bool = True,
    **options: Any,
) -> dt.Run:
    """Train as a user does, with ``report`` by ``count_update``."""
    import mindspore

    loss_fn = engine.loss_fn()

    def forward(x: Any, label: Any) -> Any:
        return loss_fn(network(x), label)

    gradients_of = mindspore.value_and_grad(forward, None, optimizer.parameters)
    with dt.Run(callbacks, network=network, optimizer=optimizer, epochs=epochs, **options) as run:
        for _ in run.epochs():
            for batch in run.batches(ones(3) if data is None else data):
                loss, gradients = gradients_of(*map(mindspore.Tensor, batch))
                optimizer(gradients)
                if report:
                    run.count_update(gradients)
                run.outputs = loss
            if valid is not None:
                with run.evaluation(len(valid)) as evaluation:
                    for batch in evaluation.batches(valid):
                        evaluation.outputs = forward(*map(mindspore.Tensor, batch))
    return run


def test_the_trace_is_that_of_the_model(engine: Any) -> None:
    by_hand, by_model = RecordingCallback(), RecordingCallback()
    network = engine.weight()
    train(engine, network, engine.sgd(network), by_hand, valid=ones(2), epochs=2, batches_per_epoch=3)
    other = engine.weight()
    dt.Model(other, engine.loss_fn(), engine.sgd(other)).fit(2, ones(3), ones(2), callbacks=by_model)
    assert [e[:5] for e in by_hand.trace] == [e[:5] for e in by_model.trace]
    for ours, theirs in zip(by_hand.trace, by_model.trace, strict=True):
        assert sorted(ours.keys) == sorted(theirs.keys), ours.event
    assert engine.value(network) == engine.value(other) == pytest.approx(0.4)


@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_end", "on_train_epoch_end"])
def test_the_values_are_those_of_the_model(engine: Any, event: str) -> None:
    """The gradients are x: 3 and 4 in turn, on two weights: the norms are by hand, too."""

    def read(c: Any) -> Any:
        values = (c.step, c.epoch, c.global_step, c.is_update_step, c.loss, c.lr, dict(c.metrics))
        return (*values, c.grad_norm, c.grad_norm_clipped) if event == "on_train_step_end" else values

    data = columns((3, 4), (6, 8))
    rows = []
    for by_hand in (True, False):
        network = engine.plane()
        seen = Seen(read, event, needs={Capability.GRAD_NORM})
        optimizer = engine.sgd(network, 0.01)
        if by_hand:
            train(engine, network, optimizer, seen, data, columns((1, 1), (2, 2)), epochs=2)
        else:
            model = dt.Model(network, engine.loss_fn(), optimizer)
            model.fit(2, data, columns((1, 1), (2, 2)), callbacks=seen)
        rows.append((seen.values, engine.pair(network)))
    hand, model_rows = rows
    assert hand[1] == model_rows[1] == pytest.approx((1 - 0.18, 1 - 0.24))
    assert len(hand[0]) == (4 if event == "on_train_step_end" else 2)
    for ours, theirs in zip(hand[0], model_rows[0], strict=True):
        assert ours[:4] == theirs[:4]
        assert ours[4:6] == pytest.approx(theirs[4:6])
        assert ours[6] == pytest.approx(theirs[6])
        assert ours[7:] == pytest.approx(theirs[7:])
    if event == "on_train_step_end":
        assert [row[7] for row in hand[0]] == pytest.approx([5, 10, 5, 10])


def test_a_norm_that_was_not_reported_is_an_error_with_advice(engine: Any) -> None:
    network = engine.weight()
    with pytest.raises(RunStateError, match=r"run\.count_update\(gradients\)"):
        train(engine, network, engine.sgd(network), Seen(lambda c: c.grad_norm), report=False)


def test_without_a_report_updates_are_counted_by_the_optimizer(engine: Any) -> None:
    network = engine.weight()
    at_begin = Seen(lambda c: (c.global_step, c.is_update_step, c.grad_norm), "on_train_step_begin")
    at_end = Seen(lambda c: (c.global_step, c.is_update_step, c.step_skipped))
    train(engine, network, engine.sgd(network), [at_begin, at_end], report=False)
    assert at_begin.values == [(0, False, None), (1, False, None), (2, False, None)]
    assert at_end.values == [(1, True, False), (2, True, False), (3, True, False)]


def test_a_second_run_counts_from_zero(engine: Any) -> None:
    network = engine.weight()
    optimizer = engine.sgd(network)
    for _ in range(2):
        seen = Seen(lambda c: c.global_step)
        train(engine, network, optimizer, seen)
        assert seen.values == [1, 2, 3]


def test_an_update_without_a_counter_counts_where_it_is_reported(engine: Any) -> None:
    import mindspore

    seen = Seen(lambda c: (c.global_step, c.is_update_step, c.step_skipped, c.lr))
    norms = Seen(lambda c: c.grad_norm)
    gradients = {"a": (mindspore.Tensor([3.0]), None), "b": [mindspore.Tensor([4.0])]}
    with dt.Run([seen, norms], network=engine.weight(), epochs=1) as run:
        for _ in run.epochs():
            for number, _ in enumerate(run.batches(ones(4))):
                if number != 1:
                    run.count_update(gradients, skipped=number == 2)
    assert seen.values == [
        (1, True, False, None),
        (1, False, False, None),
        (1, True, True, None),
        (2, True, False, None),
    ]
    assert norms.values == [5, None, 5, 5]


def test_gradients_that_are_not_tensors_are_refused(engine: Any) -> None:
    with dt.Run(network=engine.weight(), epochs=1) as run, run.step():
        with pytest.raises(ArgumentTypeError, match="but got float"):
            run.count_update((1.0,))


def test_the_rate_at_a_steps_end_is_the_one_it_used(engine: Any) -> None:
    """Rates from a table; .scale_lr() after the second step halves what follows, on top of it."""
    network = engine.weight()
    optimizer = engine.sgd(network, [0.1, 0.2, 0.3, 0.4])
    seen, values = Seen(lambda c: c.lr), Seen(lambda c: engine.value(network))
    halve = At("on_train_step_end", lambda c: c.scale_lr(0.5), step=2)
    train(engine, network, optimizer, [seen, values, halve], ones(4))
    assert seen.values == pytest.approx([0.1, 0.2, 0.15, 0.2])
    assert -np.diff([1.0, *values.values]) == pytest.approx([0.1, 0.2, 0.15, 0.2], abs=1e-6)


def test_a_schedule_is_scaled_too(engine: Any) -> None:
    import mindspore

    network = engine.weight()
    schedule = mindspore.nn.ExponentialDecayLR(0.1, 0.5, 1)
    optimizer = mindspore.nn.SGD(network.trainable_params(), schedule)
    seen, values = Seen(lambda c: c.lr), Seen(lambda c: engine.value(network))
    train(
        engine,
        network,
        optimizer,
        [seen, values, At("on_train_step_end", lambda c: c.scale_lr(0.1), step=1)],
    )
    assert seen.values == pytest.approx([0.1, 0.005, 0.0025])
    assert -np.diff([1.0, *values.values]) == pytest.approx([0.1, 0.005, 0.0025], abs=1e-6)


def test_set_data_of_the_rate_works_during_the_run_alone(engine: Any) -> None:
    """In PYNATIVE mode MindSpore's own ``set_data`` is ignored by the compiled optimizer."""
    import mindspore

    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    values = Seen(lambda c: engine.value(network))

    def lower(run_context: Any) -> None:
        run_context.optimizer.learning_rate.set_data(mindspore.Tensor(0.01, mindspore.float32))

    train(engine, network, optimizer, [values, At("on_train_step_end", lower, step=1)])
    assert -np.diff([1.0, *values.values]) == pytest.approx([0.1, 0.01, 0.01], abs=1e-6)
    assert "set_data" not in vars(optimizer.learning_rate)


def test_several_optimizers_have_a_rate_each_and_count_together(engine: Any) -> None:
    import mindspore

    network = engine.two_weights()
    optimizers = {
        "a": mindspore.nn.SGD([network.a], 0.1),
        "b": mindspore.nn.SGD([network.b], [0.01, 0.02, 0.03, 0.04]),
    }
    one = mindspore.Tensor([1.0])
    seen = Seen(lambda c: (c.global_step, c.lr))
    names = Seen(lambda c: sorted(c.trained_parameters), "on_train_begin")

    def change(run_context: Any) -> None:
        run_context.lr = (0.2, 0.05)

    with dt.Run(
        [seen, names, At("on_train_step_end", change, step=3)],
        network=network,
        optimizer=optimizers,
        epochs=1,
    ) as run:
        for _ in run.epochs():
            for number, _ in enumerate(run.batches(ones(4))):
                optimizers["a"]((one.reshape(()),))
                if number % 2 == 0:
                    optimizers["b"]((one.reshape(()),))
    assert names.values == [["a", "b"]]
    assert [row[0] for row in seen.values] == [2, 3, 5, 6]
    # b has not updated in the second and fourth batch, so its rate is that of its next update
    rates = [(0.1, 0.01), (0.1, 0.02), (0.1, 0.02), (0.2, 0.05)]
    assert [row[1] for row in seen.values] == [pytest.approx(rate) for rate in rates]
    assert engine.pair(network) == pytest.approx((1 - 0.1 * 3 - 0.2, 1 - 0.01 - 0.02))


def test_a_stop_ends_the_loop_after_the_step(engine: Any) -> None:
    network = engine.weight()
    recording = RecordingCallback()
    stop = At("on_train_step_end", lambda c: c.request_stop("enough"), step=2)
    run = train(engine, network, engine.sgd(network, 0.1), [stop, recording], epochs=3)
    assert engine.value(network) == pytest.approx(0.8)
    assert run.context.stop_reason == "enough"
    assert recording.names[-4:] == [
        "on_train_step_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_teardown",
    ]


def test_an_evaluation_gives_the_mean_loss(engine: Any) -> None:
    network = engine.weight()
    seen = Seen(lambda c: dict(c.metrics), "on_train_end")
    valid = batches((0, 2), (0, 1), (0, 0))
    train(engine, network, engine.sgd(network), seen, valid=valid)
    assert seen.values == [{"eval_loss": 1.0}]


def test_limits_of_a_dry_run(engine: Any) -> None:
    network = engine.weight()
    train(engine, network, engine.sgd(network, 0.1), epochs=2, limit_batches=2)
    assert engine.value(network) == pytest.approx(0.6)
    train(engine, network, engine.sgd(network, 0.1), epochs=2, max_steps=4)
    assert engine.value(network) == pytest.approx(0.2)


def test_what_a_loop_does_not_have_is_refused(engine: Any) -> None:
    network = engine.weight()
    optimizer = engine.sgd(network)
    for capability in (Capability.GRADIENT_EVENTS, Capability.ACCUMULATION, Capability.PROBING):
        with pytest.raises(CapabilityError, match=f"needs {capability}, which a hand-written loop"):
            train(engine, network, optimizer, Seen(lambda c: None, needs={capability}))
    with pytest.raises(ArgumentValueError, match="pass the schedule to the optimizer"):
        dt.Run(network=network, optimizer=optimizer, lr_scheduler=object())
    with dt.Run(network=network, optimizer=optimizer) as run, pytest.raises(RunStateError, match="PyTorch"):
        run.clip_gradients(1.0)


def test_seed_everything_seeds_mindspore(engine: Any) -> None:
    import mindspore

    drawn = []
    for _ in range(2):
        dt.seed_everything(7)
        drawn.append(mindspore.ops.rand(3).asnumpy().tolist())
    assert drawn[0] == drawn[1]
