"""What a callback reads from its run context, and what it changes through it, on each engine.

That a learning rate has been set is shown by how far the weights move, not by what reads back.
"""

import copy
import math

import numpy as np
import pytest
from closeness import close
from engines import ENGINES, At, Recorder, batches, ones

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.protocol import STEP_CAPABILITIES, Capability


class Moves:
    """Note the rate that is shown at each step's end and how far the weight, or each of two, has moved."""

    def __init__(self, engine, network):
        pair = hasattr(network, "a")
        self._weights = lambda: engine.pair(network) if pair else (engine.value(network),)
        self.rates, self.moves = [], []
        self._before = None

    def on_train_step_begin(self, run_context):
        self._before = self._weights()

    def on_train_step_end(self, run_context):
        self.rates.append(run_context.lr)
        moved = tuple(before - after for before, after in zip(self._before, self._weights(), strict=True))
        self.moves.append(moved if len(moved) > 1 else moved[0])


def train(engine, optimizer, *callbacks, steps=4, epochs=1, network=None):
    """Train with gradient 1 on each weight; ``optimizer(network)`` makes the optimizer."""
    network = network or engine.weight()
    moves = Moves(engine, network)
    model = dt.Model(network, engine.loss_fn(), optimizer(network))
    model.train(epochs, ones(steps // epochs), [*callbacks, moves])
    return moves


def setting(value):
    """Return an action that sets the rate."""

    def action(run_context):
        run_context.lr = value

    return action


def close_pairs(pairs):
    """Differences of weights near 1, down to 0.008, of which float32 leaves five digits."""
    return [close(pair, rel=1e-5) for pair in pairs]


# What can be read at each event.


def everything(context):
    return {
        "event": context.event.value,
        "mode": context.mode,
        "epoch": context.epoch,
        "step": context.step,
        "step_in_epoch": context.step_in_epoch,
        "batches_per_epoch": context.batches_per_epoch,
        "global_step": context.global_step,
        "loss": None if context.event in NO_LOSS else context.loss,
        "lr": context.lr,
        "metrics": dict(context.metrics),
    }


NO_LOSS = {dt.Event.EVAL_STEP_BEGIN, dt.Event.EVAL_STEP_END, dt.Event.EVAL_EPOCH_END, dt.Event.EVAL_END}


def test_the_properties_at_each_event_of_a_run(engine):
    """Two epochs of two batches, then an evaluation of one after the second; weights 1, .75, .5, .25, 0."""
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25), metrics={"loss"})
    seen = Recorder(everything)
    model.fit(2, ones(2), ones(1), valid_frequency=2, callbacks=seen)
    keys = list(seen.calls[0])
    done = {"loss": 0.0, "eval_loss": 0.0}
    assert [tuple(call[key] for key in keys) for call in seen.calls] == [
        ("on_train_begin", "train", None, 0, 0, 2, 0, None, 0.25, {}),
        ("on_train_epoch_begin", "train", 1, 0, 0, 2, 0, None, 0.25, {}),
        ("on_train_step_begin", "train", 1, 1, 1, 2, 0, None, 0.25, {}),
        ("on_train_step_end", "train", 1, 1, 1, 2, 1, 1.0, 0.25, {}),
        ("on_train_step_begin", "train", 1, 2, 2, 2, 1, 1.0, 0.25, {}),
        ("on_train_step_end", "train", 1, 2, 2, 2, 2, 0.75, 0.25, {}),
        ("on_train_epoch_end", "train", 1, 2, 2, 2, 2, 0.75, 0.25, {}),
        ("on_train_epoch_begin", "train", 2, 2, 0, 2, 2, 0.75, 0.25, {}),
        ("on_train_step_begin", "train", 2, 3, 1, 2, 2, 0.75, 0.25, {}),
        ("on_train_step_end", "train", 2, 3, 1, 2, 3, 0.5, 0.25, {}),
        ("on_train_step_begin", "train", 2, 4, 2, 2, 3, 0.5, 0.25, {}),
        ("on_train_step_end", "train", 2, 4, 2, 2, 4, 0.25, 0.25, {}),
        ("on_eval_begin", "eval", 2, 0, 0, 1, 4, 0.25, 0.25, {}),
        ("on_eval_epoch_begin", "eval", 2, 0, 0, 1, 4, 0.25, 0.25, {}),
        ("on_eval_step_begin", "eval", 2, 1, 1, 1, 4, None, 0.25, {}),
        ("on_eval_step_end", "eval", 2, 1, 1, 1, 4, None, 0.25, {}),
        ("on_eval_epoch_end", "eval", 2, 1, 1, 1, 4, None, 0.25, {}),
        ("on_eval_end", "eval", 2, 1, 1, 1, 4, None, 0.25, done),
        ("on_train_epoch_end", "train", 2, 4, 2, 2, 4, 0.25, 0.25, done),
        ("on_train_end", "train", 2, 4, 2, 2, 4, 0.25, 0.25, done),
        ("on_teardown", "train", 2, 4, 2, 2, 4, 0.25, 0.25, done),
    ]


def test_what_is_the_same_all_through_a_run(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    seen = Recorder(
        lambda context: (
            str(context.backend),
            context.backend.name,
            context.epochs,
            context.rank,
            context.world_size,
            context.is_main,
            context.stop_reason,
            context.get_stop_requested(),
            Capability.STEP_EVENTS in context.capabilities,
            Capability.MANUAL_OPTIMIZATION in context.capabilities,
        )
    )
    model.fit(3, ones(1), ones(1), callbacks=seen, initial_epoch=1)
    framework = engine.framework
    assert set(seen.calls) == {(framework, framework, 3, 0, 1, True, None, False, True, False)}
    assert len(seen.calls) == 23  # every event of the run


def test_a_lone_evaluation_has_no_epoch_no_rate_and_no_updates(engine):
    seen = Recorder(
        lambda context: (
            context.mode,
            context.epoch,
            context.epochs,
            context.lr,
            context.global_step,
            context.batches_per_epoch,
        )
    )
    dt.Model(engine.weight(), engine.loss_fn()).eval(ones(2), seen)
    assert set(seen.calls) == {("eval", None, None, None, 0, 2)}


def test_a_rate_cannot_be_set_where_there_is_no_optimizer(engine):
    model = dt.Model(engine.weight(), engine.loss_fn())
    with pytest.raises(RunStateError, match="no optimizer"):
        model.eval(ones(1), At("on_eval_begin", setting(0.1)))


def test_steps_of_an_evaluation_count_its_batches(engine):
    seen = Recorder(lambda context: (context.event.value, context.step, context.step_in_epoch))
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.fit(2, ones(3), ones(2), callbacks=seen)
    steps = [call[1:] for call in seen.calls if call[0] == "on_eval_step_end"]
    assert steps == [(1, 1), (2, 2)] * 2


def test_an_evaluation_steps_loss_is_its_batchs(engine):
    seen = Recorder(lambda context: (context.event.value, context.loss))
    model = dt.Model(engine.weight(0.0), engine.loss_fn())
    model.eval(batches((0, 3), (0, -5)), seen)
    assert [loss for event, loss in seen.calls if event == "on_eval_step_end"] == [3.0, -5.0]


def test_the_loss_is_the_mean_over_a_batch(engine):
    seen = []
    network = engine.weight(2.0)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    batch = (np.array([1, 2, 6], np.float32), np.array([0, 0, 3], np.float32))
    model.train(1, [batch], At("on_train_step_end", lambda context: seen.append(context.loss)))
    assert seen == [2.0 * 3 + 1]


def test_outputs_are_the_native_value(engine):
    seen = []
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.train(1, ones(1), At("on_train_step_end", lambda context: seen.append(context.outputs)))
    [outputs] = seen
    assert isinstance(outputs, type(engine.as_tensor(np.float32(0))))
    assert outputs.shape == ()
    assert float(outputs) == 1.0
    assert outputs.asnumpy() == np.float32(1.0)


def test_a_mapping_from_train_step_has_its_loss_read(engine):
    seen = []
    network = engine.weight(3.0)
    step = engine.step_function("mapping")
    model = dt.Model(network, optimizer=engine.sgd(network), train_step=step)
    model.train(1, ones(1), At("on_train_step_end", lambda context: seen.append(context.loss)))
    assert seen == [3.0]


def test_the_loss_of_each_step_is_its_own_though_it_is_read_twice(engine):
    seen = []
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25))
    read = At("on_train_step_end", lambda context: seen.append((context.loss, context.loss)))
    model.train(1, ones(3), read)
    assert seen == [(1.0, 1.0), (0.75, 0.75), (0.5, 0.5)]


# The parameters.


def test_a_missing_parameter_is_a_missing_attribute(engine):
    seen = []

    def look(run_context):
        params = run_context.original_args()
        with pytest.raises(AttributeError):
            params.no_such_thing  # noqa: B018
        seen.append(
            (
                hasattr(params, "no_such_thing"),
                getattr(params, "no_such_thing", "default"),
                "no_such_thing" in params,
                hasattr(params, "cur_step_num"),
                params.get("no_such_thing"),
            )
        )

    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    looks = [At(f"on_{phase}_step_end", look) for phase in ("train", "eval")]
    model.fit(1, ones(1), ones(1), callbacks=looks)
    model.eval(ones(1), looks)
    assert seen == [(False, "default", False, True, None)] * 3


def test_the_parameters_can_be_deep_copied(engine):
    copies = []
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    keep = At("on_train_step_end", lambda context: copies.append(copy.deepcopy(context.original_args())))
    model.train(1, ones(2), keep)
    assert [params.cur_step_num for params in copies] == [1, 2]
    assert [params["cur_epoch_num"] for params in copies] == [1, 1]
    assert [engine.value(params.network) for params in copies] == close([0.9, 0.8])
    copies[0].mine = 1
    assert copies[0]["mine"] == 1
    assert not hasattr(copies[1], "mine")


def test_what_a_callback_adds_to_the_parameters_stays(engine):
    def add(run_context):
        run_context.original_args().mine = 1
        run_context.original_args()["yours"] = 2

    seen = Recorder(
        lambda context: (
            context.original_args().get("mine"),
            getattr(context.original_args(), "yours", None),
        )
    )
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.fit(2, ones(1), ones(1), callbacks=[At("on_train_begin", add), seen])
    assert set(seen.calls) == {(1, 2)}
    seen.calls.clear()
    model.fit(1, ones(1), callbacks=seen)
    assert set(seen.calls) == {(None, None)}


def test_the_results_are_there_from_the_evaluations_end_to_the_epochs_end(engine):
    def present(context):
        params = context.original_args()
        return context.event.value, "metrics" in params, "eval_results" in params

    seen = Recorder(present)
    kept = Recorder(lambda context: (context.event.value, dict(context.metrics)))
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25), {"loss"})
    model.fit(2, ones(1), ones(2), callbacks=[seen, kept])
    with_them = [call for call in seen.calls if call[1] or call[2]]
    assert with_them == [("on_eval_end", True, True), ("on_train_epoch_end", True, True)] * 2
    first, second = {"loss": 0.75, "eval_loss": 0.75}, {"loss": 0.5, "eval_loss": 0.5}
    values = [metrics for event, metrics in kept.calls if event == "on_eval_end"]
    assert values == [first, second]
    assert kept.calls[-2:] == [("on_train_end", second), ("on_teardown", second)]
    assert [metrics for event, metrics in kept.calls if event == "on_train_step_begin"] == [{}, first]


def test_the_parameters_are_one_object_all_through_a_run(engine):
    seen = Recorder(lambda context: (id(context), id(context.original_args())))
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.fit(2, ones(1), ones(1), callbacks=seen)
    assert len(set(seen.calls)) == 1


# Evaluation results.


def test_the_evaluation_loss_is_the_mean_of_all_batches(engine):
    """MindSpore itself would report the last batch's."""
    results = []
    network = engine.weight(0.0)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network), {"loss"})
    read = At("on_eval_end", lambda context: results.append(dict(context.original_args().eval_results)))
    model.fit(1, batches((0, 0)), batches((0, 2.83), (0, -0.31)), callbacks=read)
    assert results == [{"loss": close(1.26), "eval_loss": close(1.26)}]


LOGITS = np.array(
    [
        [0.1, 2.0, 0.3, 0.2, 0.1, 0.7],
        [3.0, 0.2, 0.1, 1.0, 0.2, 0.3],
        [0.3, 0.1, 0.2, 0.4, 2.0, 0.1],
        [0.1, 0.2, 0.9, 0.3, 0.4, 0.8],
        [0.5, 0.6, 1.1, 0.7, 0.8, 0.9],
    ],
    np.float32,
)
CLASSES = [1, 2, 4, 2, 5]


def classified(engine, metrics):
    """Evaluate known logits against known classes, in batches of 2, 2 and 1."""
    labels = engine.class_labels(CLASSES)
    data = [(LOGITS[i : i + 2], labels[i : i + 2]) for i in (0, 2, 4)]
    return dt.Model(engine.identity(), engine.cross_entropy(), metrics=metrics).eval(data)


def test_the_classification_metrics_by_name(engine):
    """Predictions 1 0 4 2 2 against 1 2 4 2 5: class 2 is found once of two, and once wrongly."""
    expected = {
        "acc": 3 / 5,
        "top_1_accuracy": 3 / 5,
        "top_5_accuracy": 4 / 5,
        "precision": [0, 1, 1 / 2, 0, 1, 0],
        "recall": [0, 1, 1 / 2, 0, 1, 0],
        "f1": [0, 1, 1 / 2, 0, 1, 0],
    }
    results = classified(engine, tuple(expected))
    assert sorted(results) == sorted(expected)
    for name, value in expected.items():
        assert results[name] == close(value), name


def test_accuracy_keeps_the_name_that_was_given(engine):
    assert classified(engine, ["accuracy"]) == {"accuracy": close(3 / 5)}


def test_the_loss_as_a_metric(engine):
    losses = [
        math.log(np.exp(row.astype(float)).sum()) - float(row[c])
        for row, c in zip(LOGITS, CLASSES, strict=True)
    ]
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]]
    assert classified(engine, {"loss"}) == {"loss": close(sum(means) / 3)}


def test_acc_and_accuracy_are_one_key(engine):
    results = classified(engine, ["accuracy", "acc", "loss"])
    assert sorted(results) == ["acc", "loss"]
    assert results["acc"] == close(0.6)


OUTPUTS = np.array([[1, 2], [3, 5], [0, 0]], np.float32)
TARGETS = np.array([[1, 4], [0, 5], [1, -2]], np.float32)


@pytest.mark.parametrize(("name", "value"), [("mae", (2 + 3 + 3) / 3), ("mse", (4 + 9 + 5) / 3)])
def test_a_regression_metric_sums_a_samples_outputs_and_averages_the_samples(engine, name, value):
    data = [(OUTPUTS[:2], TARGETS[:2]), (OUTPUTS[2:], TARGETS[2:])]
    model = dt.Model(engine.identity(), engine.squared_error(), metrics=[name])
    assert model.eval(data) == {name: close(value)}
    assert model.eval(data) == {name: close(value)}  # an evaluation begins at nothing


@pytest.mark.parametrize(("name", "value"), [("mae", (0 + 3 + 1) / 3), ("mse", (0 + 9 + 1) / 3)])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["flat", "one output"])
def test_a_regression_metric_takes_one_number_a_sample(engine, name, value, shape):
    outputs, targets = OUTPUTS[:, 0].reshape(shape), TARGETS[:, 0].reshape(shape)
    data = [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])]
    model = dt.Model(engine.identity(), engine.squared_error(), metrics=[name])
    assert model.eval(data) == {name: close(value)}


@pytest.mark.torch
@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["mindspore-pynative", "mindspore-graph"])
def test_metrics_by_name_are_equal_on_both_frameworks(name):
    names = ["acc", "f1", "precision", "recall", "top_1_accuracy", "top_5_accuracy", "loss"]
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(60, 7)).astype(np.float32), random.integers(0, 7, 60)
    outputs, targets = random.normal(size=(2, 60, 3)).astype(np.float32)

    def evaluate(engine):
        classes = engine.class_labels(labels)
        data = [(logits[i : i + 16], classes[i : i + 16]) for i in range(0, 60, 16)]
        results = dt.Model(engine.identity(), engine.cross_entropy(), metrics=names).eval(data)
        data = [(outputs[i : i + 16], targets[i : i + 16]) for i in range(0, 60, 16)]
        model = dt.Model(engine.identity(), engine.squared_error(), metrics=["mae", "mse"])
        return {**results, **model.eval(data)}

    ours, theirs = evaluate(ENGINES["torch"]()), evaluate(ENGINES[name]())
    assert sorted(ours) == sorted(theirs) == sorted([*names, "mae", "mse"])
    for metric in ours:
        assert ours[metric] == close(theirs[metric]), metric
        assert np.shape(ours[metric]) == np.shape(theirs[metric]), metric


class Largest:
    """A metric of the user's own: the largest output, and of how many batches."""

    def clear(self):
        self.values = []

    def update(self, outputs, label):
        assert outputs.shape[0] == label.shape[0]
        self.values.append(float(outputs.max()))

    def eval(self):
        return max(self.values), len(self.values)


def test_a_metric_of_the_users_own_is_an_object_with_clear_update_and_eval(engine):
    metrics = {"largest": Largest()}
    assert classified(engine, metrics) == {"largest": (3.0, 3)}
    assert classified(engine, metrics) == {"largest": (3.0, 3)}


# The learning rate: a constant.


def test_a_constant_is_set_from_the_next_step_on(engine):
    set_at_two = At("on_train_step_end", setting(0.05), step=2)
    moves = train(engine, lambda network: engine.sgd(network, 0.1), set_at_two)
    assert moves.rates == [0.1, 0.05, 0.05, 0.05]
    assert moves.moves == close([0.1, 0.1, 0.05, 0.05])


def test_a_constant_set_at_a_steps_begin_is_used_by_that_step(engine):
    set_at_two = At("on_train_step_begin", setting(0.05), step=2)
    moves = train(engine, lambda network: engine.sgd(network, 0.1), set_at_two)
    assert moves.rates == [0.1, 0.05, 0.05, 0.05]
    assert moves.moves == close([0.1, 0.05, 0.05, 0.05])


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_epoch_begin"])
def test_a_rate_set_before_the_first_step_is_used_by_it(engine, event):
    moves = train(engine, lambda network: engine.sgd(network, 0.1), At(event, setting(0.05)), steps=2)
    assert moves.rates == [0.05, 0.05]
    assert moves.moves == close([0.05, 0.05])


def test_a_rate_set_after_an_evaluation_is_used_by_the_next_epoch(engine):
    network = engine.weight()
    moves = Moves(engine, network)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    model.fit(2, ones(2), ones(1), callbacks=[At("on_eval_end", setting(0.05)), moves])
    assert moves.moves == close([0.1, 0.1, 0.05, 0.05])


def test_a_rate_of_zero_stands_still(engine):
    moves = train(
        engine, lambda network: engine.sgd(network, 0.1), At("on_train_step_end", setting(0), step=1)
    )
    assert moves.rates == [0.0] * 4
    assert moves.moves == close([0.1, 0.0, 0.0, 0.0])


def test_a_constant_is_scaled(engine):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5)), step=2)
    moves = train(engine, lambda network: engine.sgd(network, 0.1), scale)
    assert returned == [0.05]
    assert moves.rates == [0.1, 0.05, 0.05, 0.05]
    assert moves.moves == close([0.1, 0.1, 0.05, 0.05])


def test_scaling_stops_at_the_floor(engine):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5, min_lr=0.04)))
    moves = train(engine, lambda network: engine.sgd(network, 0.1), scale)
    assert returned == [0.05, 0.04, 0.04, 0.04]
    assert moves.moves == close([0.1, 0.05, 0.04, 0.04])


def test_a_floor_above_the_rate_does_not_raise_it(engine):
    context = dt.RunContext({"optimizer": engine.sgd(engine.weight(), 0.1)})
    assert context.scale_lr(0.5, min_lr=0.2) == 0.1
    assert context.lr == 0.1


def test_a_rate_can_be_scaled_up(engine):
    moves = train(
        engine,
        lambda network: engine.sgd(network, 0.1),
        At("on_train_step_end", lambda context: context.scale_lr(2.0), step=1),
        steps=2,
    )
    assert moves.moves == close([0.1, 0.2])


def test_a_changed_rate_stays_with_the_optimizer_after_the_run(engine):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    model = dt.Model(network, engine.loss_fn(), optimizer)
    model.train(1, ones(1), At("on_train_step_end", setting(0.05)))
    moves = Moves(engine, network)
    model.train(1, ones(2), moves)
    assert moves.rates == [0.05, 0.05]
    assert moves.moves == close([0.05, 0.05])


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(engine, rate):
    context = dt.RunContext({"optimizer": engine.sgd(engine.weight(), 0.1)})
    with pytest.raises(ArgumentValueError, match="finite and not negative"):
        context.lr = rate
    assert context.lr == 0.1


@pytest.mark.parametrize("rate", ["fast", None])
def test_a_rate_of_the_wrong_kind_is_refused(engine, rate):
    context = dt.RunContext({"optimizer": engine.sgd(engine.weight(), 0.1)})
    with pytest.raises(ArgumentTypeError, match="a learning rate is a number"):
        context.lr = rate
    assert context.lr == 0.1


@pytest.mark.parametrize(
    "arguments", [(0,), (-1,), (math.nan,), (math.inf,), (0.5, -1), (0.5, math.nan)], ids=str
)
def test_a_factor_that_is_none_is_refused(engine, arguments):
    context = dt.RunContext({"optimizer": engine.sgd(engine.weight(), 0.1)})
    with pytest.raises(ArgumentValueError, match="scale_lr"):
        context.scale_lr(*arguments)
    assert context.lr == 0.1


def test_a_rate_in_a_tensor_stays_in_that_tensor(torch_engine):
    """A compiled step reads the very tensor that the optimizer was made with."""
    import torch

    rate = torch.tensor(0.1)
    set_at_two = At("on_train_step_end", setting(0.05), step=2)
    moves = train(torch_engine, lambda network: torch_engine.sgd(network, rate), set_at_two)
    assert moves.rates == close([0.1, 0.05, 0.05, 0.05])
    assert all(type(shown) is float for shown in moves.rates)
    assert moves.moves == close([0.1, 0.1, 0.05, 0.05])
    assert rate.item() == close(0.05)


# The learning rate: parameter groups.


def grouped(engine, *callbacks, rates=(0.1, 0.01), steps=4):
    return train(
        engine,
        lambda network: engine.sgd_groups(network, *rates),
        *callbacks,
        steps=steps,
        network=engine.two_weights(),
    )


def test_groups_read_as_a_tuple(engine):
    moves = grouped(engine, steps=2)
    assert moves.rates == [(0.1, 0.01)] * 2
    assert moves.moves == close_pairs([(0.1, 0.01)] * 2)


def test_groups_are_set_to_one_rate_each(engine):
    moves = grouped(engine, At("on_train_step_end", setting((0.02, 0.2)), step=2))
    assert moves.rates == [(0.1, 0.01), (0.02, 0.2), (0.02, 0.2), (0.02, 0.2)]
    assert moves.moves == close_pairs([(0.1, 0.01), (0.1, 0.01), (0.02, 0.2), (0.02, 0.2)])


def test_groups_are_set_to_one_rate_for_all(engine):
    moves = grouped(engine, At("on_train_step_end", setting(0.03), step=1), steps=2)
    assert moves.rates == [(0.03, 0.03)] * 2
    assert moves.moves == close_pairs([(0.1, 0.01), (0.03, 0.03)])


def test_groups_are_scaled_each_down_to_the_floor(engine):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5, 0.008)))
    moves = grouped(engine, scale, steps=3)
    assert returned == [(0.05, 0.008), (0.025, 0.008), (0.0125, 0.008)]
    assert moves.moves == close_pairs([(0.1, 0.01), (0.05, 0.008), (0.025, 0.008)])


def test_a_wrong_number_of_rates_is_refused_and_changes_nothing(engine):
    messages = []

    def refused(run_context):
        with pytest.raises(ArgumentValueError) as error:
            run_context.lr = (0.1, 0.2, 0.3)
        messages.append(str(error.value))

    moves = grouped(engine, At("on_train_step_end", refused, step=1), steps=2)
    assert "expected one learning rate or 2" in messages[0]
    assert "got 3" in messages[0]
    assert moves.moves == close_pairs([(0.1, 0.01)] * 2)


def test_a_rate_that_cannot_be_used_changes_no_group(engine):
    def refused(run_context):
        with pytest.raises(ArgumentValueError):
            run_context.lr = (0.5, -1)

    moves = grouped(engine, At("on_train_step_end", refused, step=1), steps=2)
    assert moves.rates == [(0.1, 0.01)] * 2
    assert moves.moves == close_pairs([(0.1, 0.01)] * 2)


# The learning rate: a table (MindSpore).


TABLE = [0.1, 0.2, 0.3, 0.4]


def test_a_table_shows_the_rate_that_the_step_used_the_last_one_too(mindspore_engine):
    begins = []
    look = At("on_train_step_begin", lambda context: begins.append(context.lr))
    last = []
    end = At("on_train_end", lambda context: last.append(context.lr))
    moves = train(mindspore_engine, lambda network: mindspore_engine.sgd(network, TABLE), look, end)
    assert begins == TABLE
    assert moves.rates == TABLE
    assert last == [0.4]
    assert moves.moves == close(TABLE)


def test_a_table_that_is_used_up_shows_its_last_rate(mindspore_engine):
    network = mindspore_engine.weight()
    optimizer = mindspore_engine.sgd(network, [0.1, 0.2])
    dt.Model(network, mindspore_engine.loss_fn(), optimizer).train(1, ones(2))
    assert dt.RunContext({"optimizer": optimizer}).lr == 0.2


def test_a_table_is_set_to_one_value_from_the_next_step_on(mindspore_engine):
    set_at_two = At("on_train_step_end", setting(0.05), step=2)
    moves = train(mindspore_engine, lambda network: mindspore_engine.sgd(network, TABLE), set_at_two)
    assert moves.rates == [0.1, 0.05, 0.05, 0.05]
    assert moves.moves == close([0.1, 0.2, 0.05, 0.05])


def test_a_table_is_scaled_as_a_whole(mindspore_engine):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5)), step=2)
    moves = train(mindspore_engine, lambda network: mindspore_engine.sgd(network, TABLE), scale)
    assert returned == [0.1]
    assert moves.rates == [0.1, 0.1, 0.15, 0.2]
    assert moves.moves == close([0.1, 0.2, 0.15, 0.2])


def test_a_table_is_scaled_down_to_the_floor(mindspore_engine):
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.1, min_lr=0.035), step=2)
    moves = train(mindspore_engine, lambda network: mindspore_engine.sgd(network, TABLE), scale)
    assert moves.moves == close([0.1, 0.2, 0.035, 0.04])


def test_a_table_goes_on_in_the_next_run(mindspore_engine):
    network = mindspore_engine.weight()
    model = dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network, TABLE))
    model.train(1, ones(2))
    moves = Moves(mindspore_engine, network)
    model.train(1, ones(2), moves)
    assert moves.rates == [0.3, 0.4]
    assert moves.moves == close([0.3, 0.4])


# The learning rate: a schedule (MindSpore).


def cosine(step, *, low=0.1, high=0.5, steps=4):
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * min(step, steps) / steps))


COSINE = [cosine(step) for step in range(4)]


@pytest.fixture
def cosine_sgd(mindspore_engine):
    import mindspore

    return lambda network: mindspore_engine.sgd(network, mindspore.nn.CosineDecayLR(0.1, 0.5, 4))


def test_a_schedule_shows_the_rate_that_the_step_used(mindspore_engine, cosine_sgd):
    begins, last = [], []
    moves = train(
        mindspore_engine,
        cosine_sgd,
        At("on_train_step_begin", lambda context: begins.append(context.lr)),
        At("on_train_end", lambda context: last.append(context.lr)),
    )
    assert begins == close(COSINE)
    assert moves.rates == begins
    assert last == [begins[-1]]
    assert moves.moves == close(COSINE)


def test_a_schedule_is_scaled_and_goes_on(mindspore_engine, cosine_sgd):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5)), step=2)
    moves = train(mindspore_engine, cosine_sgd, scale)
    expected = [COSINE[0], COSINE[1], COSINE[2] / 2, COSINE[3] / 2]
    assert returned == close([COSINE[1] / 2])
    assert moves.rates == close([COSINE[0], COSINE[1] / 2, *expected[2:]])
    assert moves.moves == close(expected)


def test_a_schedule_is_scaled_twice(mindspore_engine, cosine_sgd):
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5))
    moves = train(mindspore_engine, cosine_sgd, scale)
    assert moves.moves == close([rate / 2**step for step, rate in enumerate(COSINE)])


def test_a_schedule_is_not_scaled_below_the_floor(mindspore_engine, cosine_sgd):
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.1, 0.3)), step=1)
    moves = train(mindspore_engine, cosine_sgd, scale, steps=2)
    assert returned == close([0.3])
    assert moves.moves == close([COSINE[0], COSINE[1] * 0.3 / COSINE[0]])


def test_a_schedule_cannot_be_set_to_a_value_and_says_what_to_do(mindspore_engine, cosine_sgd):
    messages = []

    def refused(run_context):
        with pytest.raises(ArgumentValueError) as error:
            run_context.lr = 0.1
        messages.append(str(error.value))

    moves = train(mindspore_engine, cosine_sgd, At("on_train_step_end", refused, step=1), steps=2)
    assert "CosineDecayLR" in messages[0]
    assert "scale_lr" in messages[0]
    assert moves.moves == close(COSINE[:2])


def test_a_schedule_that_begins_at_zero_can_be_scaled_there(mindspore_engine):
    """A warm-up's first rate is 0; a scale asked for then still holds for the rates to come."""
    import mindspore

    warm_up = mindspore.nn.WarmUpLR(0.3, 3)
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5), step=1)
    moves = train(mindspore_engine, lambda network: mindspore_engine.sgd(network, warm_up), scale)
    assert moves.moves == close([0.0, 0.05, 0.1, 0.15])


def test_the_users_schedule_is_left_as_it_was(mindspore_engine, cosine_sgd):
    """The wrapping is the optimizer's: the schedule itself gives what it gave."""
    import mindspore

    schedule = mindspore.nn.CosineDecayLR(0.1, 0.5, 4)
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5))
    train(mindspore_engine, lambda network: mindspore_engine.sgd(network, schedule), scale, steps=2)
    now = schedule(mindspore.Tensor([1], mindspore.int32)).asnumpy().item()
    assert now == close(COSINE[1])


def test_an_optimizer_with_a_schedule_that_has_taken_steps_is_refused_to_scale(
    mindspore_engine, cosine_sgd
):
    """Its step is compiled, and a new schedule would be ignored without a word."""
    import mindspore

    network = mindspore_engine.weight()
    optimizer = cosine_sgd(network)
    native = mindspore.train.Model(network, mindspore_engine.loss_fn(), optimizer)
    columns = (np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32))
    native.train(1, mindspore.dataset.NumpySlicesDataset(columns, shuffle=False).batch(1))
    model = dt.Model(network, mindspore_engine.loss_fn(), optimizer)
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5))
    with pytest.raises(ArgumentValueError, match=r"CosineDecayLR.*cannot be scaled"):
        model.train(1, ones(1), scale)


def test_groups_with_schedules_are_scaled_each(mindspore_engine):
    import mindspore

    schedules = mindspore.nn.CosineDecayLR(0.1, 0.5, 4), mindspore.nn.CosineDecayLR(0.01, 0.05, 4)
    returned = []
    scale = At("on_train_step_end", lambda context: returned.append(context.scale_lr(0.5)), step=2)
    moves = grouped(mindspore_engine, scale, rates=schedules)
    pairs = [(rate, rate / 10) for rate in COSINE]
    halved = [(a / 2, b / 2) for a, b in pairs]
    assert returned == close_pairs([halved[1]])
    assert moves.rates == close_pairs([pairs[0], halved[1], halved[2], halved[3]])
    assert moves.moves == close_pairs([pairs[0], pairs[1], halved[2], halved[3]])


def test_one_group_with_a_schedule_and_one_with_a_constant(mindspore_engine):
    import mindspore

    rates = (mindspore.nn.CosineDecayLR(0.1, 0.5, 4), 0.02)
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5), step=2)
    moves = grouped(mindspore_engine, scale, rates=rates)
    expected = [(COSINE[0], 0.02), (COSINE[1], 0.02), (COSINE[2] / 2, 0.01), (COSINE[3] / 2, 0.01)]
    assert moves.moves == close_pairs(expected)


def test_groups_with_tables(mindspore_engine):
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5), step=2)
    moves = grouped(mindspore_engine, scale, rates=(TABLE, [0.01, 0.02, 0.03, 0.04]))
    assert moves.rates == close_pairs([(0.1, 0.01), (0.1, 0.01), (0.15, 0.015), (0.2, 0.02)])
    assert moves.moves == close_pairs([(0.1, 0.01), (0.2, 0.02), (0.15, 0.015), (0.2, 0.02)])


def test_groups_that_share_one_schedule_are_scaled_once(mindspore_engine):
    import mindspore

    schedule = mindspore.nn.CosineDecayLR(0.1, 0.5, 4)
    scale = At("on_train_step_end", lambda context: context.scale_lr(0.5), step=2)
    moves = grouped(mindspore_engine, scale, rates=(schedule, schedule))
    expected = [COSINE[0], COSINE[1], COSINE[2] / 2, COSINE[3] / 2]
    assert moves.moves == close_pairs([(rate, rate) for rate in expected])


# The optimizer's learning rate, as MindSpore's callbacks use it.


def assigning(value):
    def action(run_context):
        run_context.original_args().optimizer.learning_rate.set_data(value)

    return action


def test_set_data_is_heard_by_the_next_step(engine):
    value = engine.as_tensor(np.float32(0.05)) if engine.framework == "mindspore" else 0.05
    moves = train(
        engine, lambda network: engine.sgd(network, 0.1), At("on_train_step_end", assigning(value), step=2)
    )
    assert moves.rates == [0.1, 0.05, 0.05, 0.05]
    assert moves.moves == close([0.1, 0.1, 0.05, 0.05])


def test_set_data_and_the_contexts_own_rate_can_be_mixed(engine):
    moves = train(
        engine,
        lambda network: engine.sgd(network, 0.1),
        At("on_train_step_end", assigning(0.05), step=1),
        At("on_train_step_end", setting(0.02), step=2),
        At("on_train_step_end", assigning(0.03), step=3),
    )
    assert moves.moves == close([0.1, 0.05, 0.02, 0.03])


def test_the_rate_can_be_read_as_mindspores_callbacks_read_it(engine):
    seen = []

    def look(run_context):
        rate = run_context.original_args().optimizer.learning_rate
        seen.append((float(rate), rate.asnumpy().item(), rate.asnumpy().dtype))

    train(engine, lambda network: engine.sgd(network, 0.25), At("on_train_step_end", look), steps=2)
    assert seen == [(0.25, 0.25, np.float32)] * 2


def test_set_data_on_groups_is_heard_by_the_next_step(mindspore_engine):
    def action(run_context):
        import mindspore

        a, b = run_context.original_args().optimizer.learning_rate
        a.set_data(mindspore.Tensor(0.05, mindspore.float32))
        b.set_data(mindspore.Tensor(0.2, mindspore.float32))

    moves = grouped(mindspore_engine, At("on_train_step_end", action, step=2))
    assert moves.rates == [(0.1, 0.01), (0.05, 0.2), (0.05, 0.2), (0.05, 0.2)]
    assert moves.moves == close_pairs([(0.1, 0.01), (0.1, 0.01), (0.05, 0.2), (0.05, 0.2)])


def test_set_data_on_a_torch_optimizer_sets_every_group(torch_engine):
    moves = grouped(torch_engine, At("on_train_step_end", assigning(0.05), step=1), steps=2)
    assert moves.moves == close_pairs([(0.1, 0.01), (0.05, 0.05)])


class Failing:
    def on_train_step_end(self, run_context):
        raise ZeroDivisionError


@pytest.mark.parametrize("callbacks", [[], [Failing()]], ids=["after an end", "after an error"])
def test_nothing_stays_on_the_optimizer(engine, callbacks):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    before = set(vars(optimizer))
    inside = []
    look = At("on_train_step_end", lambda _: inside.append(hasattr(optimizer, "learning_rate")))
    model = dt.Model(network, engine.loss_fn(), optimizer)
    try:
        model.train(1, ones(1), [look, *callbacks])
    except ZeroDivisionError:
        assert callbacks
    assert inside == [True]
    if engine.framework == "torch":
        assert set(vars(optimizer)) == before
    else:
        assert "set_data" not in vars(optimizer.learning_rate)


@pytest.mark.parametrize("callbacks", [[], [Failing()]], ids=["after an end", "after an error"])
def test_nothing_stays_on_the_rates_of_groups(mindspore_engine, callbacks):
    network = mindspore_engine.two_weights()
    optimizer = mindspore_engine.sgd_groups(network, 0.1, 0.01)
    inside = []
    look = At(
        "on_train_step_end", lambda _: inside.extend("set_data" in vars(p) for p in optimizer.learning_rate)
    )
    model = dt.Model(network, mindspore_engine.loss_fn(), optimizer)
    try:
        model.train(1, ones(1), [look, *callbacks])
    except ZeroDivisionError:
        assert callbacks
    assert inside == [True, True]
    assert not any("set_data" in vars(rate) for rate in optimizer.learning_rate)


# A context by itself.


def test_a_context_needs_no_engine(engine):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.25)
    outputs = engine.as_tensor(np.float32(1.5))
    args = {"optimizer": optimizer, "network": network, "net_outputs": outputs, "cur_step_num": 3}
    context = dt.RunContext(args)
    assert context.original_args() is args
    assert str(context.backend) == engine.framework
    assert context.lr == 0.25
    assert context.loss == 1.5
    assert context.outputs is outputs
    assert (context.step, context.step_in_epoch) == (3, 3)
    assert (context.rank, context.world_size, context.is_main) == (0, 1, True)
    # Without a step there is nothing that could clip, accumulate or skip.
    assert context.capabilities == context.backend.capabilities() - STEP_CAPABILITIES
    assert context.capabilities < context.backend.capabilities()
    unknown = ("epoch", "epochs", "mode", "global_step", "batches_per_epoch", "event", "stop_reason")
    assert {name: getattr(context, name) for name in unknown} == dict.fromkeys(unknown)
    assert context.metrics == {}


@pytest.mark.parametrize("key", ["optimizer", "network", "train_network", "net_outputs"])
def test_the_backend_is_found_from_whatever_is_there(engine, key):
    network = engine.weight()
    found = {
        "optimizer": engine.sgd(network),
        "network": network,
        "train_network": network,
        "net_outputs": engine.as_tensor(np.float32(1)),
    }
    assert str(dt.RunContext({key: found[key]}).backend) == engine.framework


def test_a_context_by_itself_counts_steps_in_an_epoch_by_its_length(engine):
    args = {"network": engine.weight(), "cur_step_num": 0, "batch_num": 3, "mode": "train"}
    context = dt.RunContext(args)
    seen = []
    for step in range(8):
        args["cur_step_num"] = step
        seen.append(context.step_in_epoch)
    assert seen == [0, 1, 2, 3, 1, 2, 3, 1]


LOSSES = {
    "scalar": (lambda tensor: tensor(2.5), 2.5),
    "vector": (lambda tensor: tensor([1, 2, 6]), 3.0),
    "matrix": (lambda tensor: tensor([[1, 2], [3, 6]]), 3.0),
    "tuple": (lambda tensor: (tensor(2.5), tensor([7, 7])), 2.5),
    "list": (lambda tensor: [tensor([1, 2]), tensor(7)], 1.5),
    "mapping": (lambda tensor: {"outputs": tensor([7, 7]), "loss": tensor(2.5)}, 2.5),
    "mapping without": (lambda tensor: {"outputs": tensor([7, 7])}, None),
    "empty": (lambda tensor: (), None),
    "nan": (lambda tensor: tensor(math.nan), math.nan),
    "none": (lambda tensor: None, None),
    "number": (lambda tensor: 2, 2.0),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_what_the_loss_of_native_outputs_is(engine, kind):
    make, expected = LOSSES[kind]
    outputs = make(lambda values: engine.as_tensor(np.asarray(values, np.float32)))
    loss = dt.RunContext({"net_outputs": outputs, "network": engine.weight(), "cur_step_num": 1}).loss
    assert loss == (expected if expected is None else pytest.approx(expected, nan_ok=True))
    assert loss is None or type(loss) is float


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_a_loss_of_another_type_is_a_float(engine, dtype):
    context = dt.RunContext({"net_outputs": engine.as_tensor(np.asarray(2, dtype)), "cur_step_num": 1})
    assert context.loss == 2.0
    assert type(context.loss) is float


def test_a_bfloat16_loss_is_a_float(engine):
    if engine.framework == "torch":
        import torch

        outputs = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    else:
        import mindspore

        outputs = mindspore.Tensor([1.0, 2.0], mindspore.bfloat16)
    assert dt.RunContext({"net_outputs": outputs, "cur_step_num": 1}).loss == 1.5


@pytest.mark.torch
def test_a_loss_that_carries_a_graph_can_be_read():
    import torch

    outputs = torch.tensor([1.0, 2.0], requires_grad=True)
    assert dt.RunContext({"net_outputs": outputs, "cur_step_num": 1}).loss == 1.5


def test_a_context_by_itself_writes_the_rate_that_the_optimizer_uses(engine):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    context = dt.RunContext({"optimizer": optimizer})
    context.lr = 0.5
    assert context.lr == 0.5
    assert context.scale_lr(0.5) == 0.25
    assert context.scale_lr(0.5, min_lr=0.2) == 0.2
    context.lr = 0.25
    dt.Model(network, engine.loss_fn(), optimizer).train(1, ones(1))
    assert engine.value(network) == 0.75


def test_a_context_by_itself_reads_groups(engine):
    network = engine.two_weights()
    context = dt.RunContext({"optimizer": engine.sgd_groups(network, 0.1, 0.01)})
    assert context.lr == (0.1, 0.01)
    assert context.scale_lr(0.5) == (0.05, 0.005)


def test_a_context_without_an_optimizer_has_no_rate(engine):
    context = dt.RunContext({"network": engine.weight()})
    assert context.lr is None
    with pytest.raises(RunStateError, match="no optimizer"):
        context.lr = 0.1
    with pytest.raises(RunStateError, match="no optimizer"):
        context.scale_lr(0.5)


def test_a_context_by_itself_reads_a_native_value_to_log(engine):
    context = dt.RunContext({"network": engine.weight()})
    context.log("x", engine.as_tensor(np.float32(1.5)))
    assert context.logged_since(0) == (1, {"x": 1.5})
    with pytest.raises(ArgumentTypeError, match="a number or a scalar tensor"):
        context.log("x", engine.as_tensor(np.ones(3, np.float32)))
