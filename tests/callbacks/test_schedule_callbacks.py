"""Callbacks that schedule something: the warm-up of the rate, its check, and the smoothing of labels."""

import json
import logging
import math

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, batches, ones

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.callbacks import LabelSmoothing, LearningRateWarmup, LrCheck
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError


def scheduled(engine, rates, network=None, **options):
    network = network or engine.weight()
    optimizer, more = engine.scheduled_sgd(network, rates)
    return network, dt.Model(network, engine.loss_fn(), optimizer, **options, **more)


def constant(engine, rate=0.1, **options):
    network = engine.weight()
    return network, dt.Model(network, engine.loss_fn(), engine.sgd(network, rate), **options)


class Rates:
    """Note each step's rate and how far the weight has moved."""

    def __init__(self, engine, network):
        self._weight = lambda: engine.value(network)
        self.rates, self.moves = [], []

    def on_train_step_begin(self, run_context):
        self._before = self._weight()

    def on_train_step_end(self, run_context):
        self.rates.append(run_context.lr)
        self.moves.append(self._before - self._weight())


def moved(rates):
    return pytest.approx(rates, rel=1e-4, abs=1e-6)


# LearningRateWarmup.


WARM = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
"""Four updates from a fifth of .1 up to .1."""


def test_a_warm_up_grows_linearly_to_the_full_rate(engine):
    network, model = constant(engine)
    seen = Rates(engine, network)
    model.train(1, ones(6), [LearningRateWarmup(4, 0.2), seen])
    assert seen.rates == close(WARM)
    assert seen.moves == moved(WARM)


def test_a_second_run_warms_up_anew(engine):
    network, model = constant(engine)
    warmup = LearningRateWarmup(4, 0.2)
    for _ in range(2):
        seen = Rates(engine, network)
        model.train(2, ones(3), [warmup, seen])
        assert seen.rates == close(WARM)
        assert seen.moves == moved(WARM)


def test_a_warm_up_is_on_top_of_a_schedule(engine):
    rates = [0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    expected = [0.1, 0.16, 0.18, 0.16, 0.1, 0.05]
    network, model = scheduled(engine, rates)
    seen = Rates(engine, network)
    model.train(1, ones(6), [LearningRateWarmup(4, 0.2), seen])
    assert seen.rates == close(expected)
    assert seen.moves == moved(expected)


def test_a_warm_up_is_on_top_of_a_schedule_that_begins_at_0(engine):
    network, model = scheduled(engine, [0.0, 0.1, 0.2, 0.3, 0.4])
    seen = Rates(engine, network)
    model.train(1, ones(5), [LearningRateWarmup(4, 0.2), seen])
    assert seen.rates == close([0.0, 0.04, 0.12, 0.24, 0.4])
    assert seen.moves == moved([0.0, 0.04, 0.12, 0.24, 0.4])


def test_a_warm_up_is_on_top_of_mindspores_own_schedule(mindspore_engine):
    import mindspore

    network = mindspore_engine.weight()
    optimizer = mindspore_engine.sgd(network, mindspore.nn.CosineDecayLR(0.1, 0.5, 8))
    seen = Rates(mindspore_engine, network)
    model = dt.Model(network, mindspore_engine.loss_fn(), optimizer)
    model.train(1, ones(6), [LearningRateWarmup(4, 0.2), seen])
    cosine = [0.1 + 0.2 * (1 + math.cos(math.pi * update / 8)) for update in range(6)]
    expected = [rate * factor for rate, factor in zip(cosine, (0.2, 0.4, 0.6, 0.8, 1, 1), strict=True)]
    assert seen.rates == close(expected)
    assert seen.moves == moved(expected)


def test_a_warm_up_counts_updates(engine):
    """Windows of 2, and an overflow in the second: the third has the rate that it would have had."""
    network, model = constant(engine, accumulate_steps=2, amp="fp16")
    seen = Rates(engine, network)
    data = batches(*[(x, 0) for x in (1, 1, 1, math.inf, 1, 1, 1, 1)])
    model.train(1, data, [LearningRateWarmup(2, 0.5), seen])
    assert seen.rates == close([0.05, 0.05, 0.075, 0.075, 0.075, 0.075, 0.1, 0.1])
    assert seen.moves == moved([0, 0.05, 0, 0, 0, 0.075, 0, 0.1])


def test_a_warm_up_scales_each_group(engine):
    network = engine.two_weights()
    optimizer = engine.sgd_groups(network, 0.1, 0.01)
    seen = Seen(lambda c: c.lr)
    model = dt.Model(network, engine.loss_fn(), optimizer)
    model.train(1, ones(3), [LearningRateWarmup(2, 0.5), seen])
    assert seen.values == [close((0.05, 0.005)), close((0.075, 0.0075)), close((0.1, 0.01))]
    assert engine.pair(network) == moved((1 - 0.225, 1 - 0.0225))


def test_a_warm_up_and_a_cut_multiply(engine):
    network, model = constant(engine)
    seen = Rates(engine, network)
    cut = At("on_train_step_end", lambda c: c.scale_lr(0.5), step=2)
    model.train(1, ones(6), [LearningRateWarmup(4, 0.2), seen, cut])
    assert seen.moves == moved([0.02, 0.04, 0.03, 0.04, 0.05, 0.05])


def test_a_warm_up_that_a_stop_cut_short_leaves_the_whole_rate(engine):
    network, model = constant(engine)
    warmup = LearningRateWarmup(4, 0.2)
    model.train(1, ones(6), [warmup, At("on_train_step_end", lambda c: c.request_stop(), step=2)])
    seen = Rates(engine, network)
    model.train(1, ones(2), seen)
    assert seen.rates == close([0.1, 0.1])
    seen = Rates(engine, network)
    model.train(1, ones(2), [warmup, seen])
    assert seen.rates == close(WARM[:2])
    assert seen.moves == moved(WARM[:2])


def test_a_warm_up_goes_on_where_its_state_says(engine):
    """The state and the rate as they are at the second step's end, taken up by new objects."""
    _, model = constant(engine)
    first, kept = LearningRateWarmup(4, 0.2), []
    keep = At("on_train_step_end", lambda c: kept.extend([c.lr, first.state_dict()]), step=2)
    model.train(1, ones(4), [first, keep])
    rate, state = kept
    second = LearningRateWarmup(4, 0.2)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    network, model = constant(engine, rate)
    seen = Rates(engine, network)
    model.train(1, ones(4), [second, seen])
    assert seen.rates == close(WARM[2:])
    assert seen.moves == moved(WARM[2:])


def test_a_warm_up_goes_on_after_a_run_that_ended_inside_it(engine):
    network, model = constant(engine)
    first = LearningRateWarmup(4, 0.2)
    model.train(1, ones(2), first)
    second = LearningRateWarmup(4, 0.2)
    second.load_state_dict(first.state_dict())
    seen = Rates(engine, network)
    model.train(1, ones(4), [second, seen])
    assert seen.rates == close(WARM[2:])
    assert seen.moves == moved(WARM[2:])


def test_a_warm_up_that_is_over_stays_over_in_a_resumed_run(engine):
    network, model = constant(engine)
    first = LearningRateWarmup(2, 0.5)
    model.train(1, ones(4), first)
    second = LearningRateWarmup(2, 0.5)
    second.load_state_dict(first.state_dict())
    seen = Rates(engine, network)
    model.train(1, ones(2), [second, seen])
    assert seen.rates == close([0.1, 0.1])
    assert seen.moves == moved([0.1, 0.1])


@pytest.mark.parametrize(
    "arguments", [(0, 0.5), (-1, 0.5), (2, 0), (2, -0.5), (2, 1.5), (2, math.nan)], ids=str
)
def test_a_warm_up_that_makes_no_sense_is_refused(arguments):
    with pytest.raises(ArgumentValueError, match="LearningRateWarmup"):
        LearningRateWarmup(*arguments)


@pytest.mark.parametrize("steps", [2.5, "2", True, None])
def test_steps_of_the_wrong_kind_are_refused(steps):
    with pytest.raises(ArgumentTypeError, match=r"LearningRateWarmup\(steps"):
        LearningRateWarmup(steps, 0.5)


# LrCheck.


def parted(caplog):
    return [record for record in caplog.records if "was intended" in record.message]


def halve(step, event="on_train_step_end"):
    return At(event, lambda c: c.scale_lr(0.5), step=step)


RATES = [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    "expected", [RATES, tuple(RATES), lambda update: RATES[update]], ids=["list", "tuple", "function"]
)
def test_rates_that_are_as_intended_are_passed_over_in_silence(engine, expected, caplog):
    _, model = scheduled(engine, RATES)
    check = LrCheck(expected)
    with caplog.at_level(logging.WARNING, logger="dualtrain"):
        model.train(1, ones(4), check)
    assert check.first_difference is None
    assert parted(caplog) == []


@pytest.mark.parametrize("expected", [RATES, lambda update: RATES[update]], ids=["sequence", "function"])
def test_the_first_update_where_they_part_is_named_once(engine, expected, caplog):
    """Halved after the second step, so the third has .1 instead of .2."""
    network, model = scheduled(engine, RATES)
    check = LrCheck(expected)
    with caplog.at_level(logging.WARNING, logger="dualtrain"):
        model.train(1, ones(4), [check, halve(2)])
    step, update, intended, actual = check.first_difference
    assert (step, update, intended) == (3, 2, 0.2)
    assert actual == close(0.1)
    [record] = parted(caplog)
    assert record.levelno == logging.WARNING
    assert "update 2 (step 3) is 0.1, but 0.2 was intended" in record.message
    assert engine.value(network) == moved(1 - 0.4 - 0.3 - 0.1 - 0.05)  # training went on


def test_the_first_update_too_is_checked(engine):
    _, model = constant(engine)
    check = LrCheck([0.2])
    model.train(1, ones(1), check)
    assert check.first_difference == (1, 0, 0.2, close(0.1))


def test_updates_are_checked_and_not_batches(engine):
    """Windows of 2 of a schedule per update; a schedule meant per batch parts at the second update."""
    _, model = scheduled(engine, RATES, accumulate_steps=2)
    check, per_batch = LrCheck(RATES), LrCheck([0.4, 0.4, 0.3, 0.3])
    model.train(1, ones(6), [check, per_batch])
    assert check.first_difference is None
    assert per_batch.first_difference == (4, 1, 0.4, close(0.3))


def test_an_update_that_was_skipped_is_not_checked(engine):
    _, model = scheduled(engine, RATES, amp="fp16")
    check = LrCheck(RATES)
    model.train(1, batches((1, 0), (math.inf, 0), (1, 0), (1, 0)), check)
    assert check.first_difference is None


def test_after_a_sequences_end_nothing_is_checked(engine):
    _, model = constant(engine)
    check = LrCheck([0.1, 0.1])
    model.train(1, ones(4), [check, halve(2)])
    assert check.first_difference is None


def test_the_tolerance_is_relative(engine):
    _, model = constant(engine)
    close_by, strict = LrCheck([0.1001], rtol=0.01), LrCheck([0.1001], rtol=1e-4)
    model.train(1, ones(1), [close_by, strict])
    assert close_by.first_difference is None
    assert strict.first_difference is not None


def test_a_second_run_is_checked_anew(engine):
    network, model = constant(engine)
    check = LrCheck([0.1] * 3)
    model.train(1, ones(3), [check, halve(1)])
    assert check.first_difference == (2, 1, 0.1, close(0.05))
    second = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    second.train(1, ones(3), check)
    assert check.first_difference is None


def grouped(engine, rate_of_a, rate_of_b):
    network = engine.two_weights()
    optimizer = engine.sgd_groups(network, rate_of_a, rate_of_b)
    return dt.Model(network, engine.loss_fn(), optimizer)


def test_groups_are_checked_each(engine):
    """One intended rate means every group; a group that parts alone is named too."""

    def slow_down_b(run_context):
        run_context.lr = (0.1, 0.05)

    check = LrCheck([0.1] * 3)
    grouped(engine, 0.1, 0.1).train(1, ones(3), [check, At("on_train_step_end", slow_down_b, step=1)])
    step, update, intended, actual = check.first_difference
    assert (step, update, intended) == (2, 1, 0.1)
    assert actual == close((0.1, 0.05))


def test_groups_have_an_intended_rate_each(engine):
    check = LrCheck([(0.1, 0.01)] * 3)
    function = LrCheck(lambda update: (0.1, 0.01))
    grouped(engine, 0.1, 0.01).train(1, ones(3), [check, function, halve(2)])
    for each in (check, function):
        step, update, intended, actual = each.first_difference
        assert (step, update) == (3, 2)
        assert tuple(intended) == (0.1, 0.01)
        assert actual == close((0.05, 0.005))


def test_a_check_goes_on_where_its_state_says(engine):
    """Two updates of a schedule, then the other two in a new run: nothing parts."""
    _, model = scheduled(engine, RATES)
    first = LrCheck(RATES)
    model.train(1, ones(2), first)
    second = LrCheck(RATES)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    model.train(1, ones(2), second)
    assert second.first_difference is None
    third = LrCheck([0.4, 0.3, 0.2, 0.7])
    third.load_state_dict(json.loads(json.dumps(first.state_dict())))
    _, model = scheduled(engine, RATES[2:])
    model.train(1, ones(2), third)
    assert third.first_difference == (2, 3, 0.7, close(0.1))


@pytest.mark.parametrize("expected", [0.1, None, {0: 0.1}.keys()], ids=repr)
def test_what_is_neither_a_function_nor_a_sequence_is_refused(expected):
    with pytest.raises(ArgumentTypeError, match="LrCheck"):
        LrCheck(expected)


# LabelSmoothing.


def classifier(engine, smoothing=0.0, loss_fn=None):
    """A layer whose logits are 0, 1 and 2, and stay so: its rate is too small to move them."""
    network = engine.dense(1, 3)
    weights = {"weight": np.array([[0], [1], [2]], np.float32), "bias": np.zeros(3, np.float32)}
    find_backend(network).assign_weights(network, weights)
    loss_fn = loss_fn or engine.smooth_cross_entropy(smoothing)
    return loss_fn, dt.Model(network, loss_fn, engine.sgd(network, 1e-30), {"loss"})


def one_of_class_2(engine):
    return [(np.ones((1, 1), np.float32), engine.class_labels([2]))]


def smoothed(smoothing):
    """The loss of the logits 0, 1, 2 for class 2: log(1 + e + e**2) - 2, and a third of all three."""
    logs = [math.log(1 + math.e + math.e**2) - logit for logit in (0, 1, 2)]
    return close((1 - smoothing) * logs[2] + smoothing * sum(logs) / 3, rel=1e-5)


def test_labels_are_smoothed_by_epoch(eager_engine):
    """Its own .25 in epoch 0, then .5, .5 and 0; evaluations have what is in force."""
    loss_fn, model = classifier(eager_engine, 0.25)
    losses = Seen(lambda c: c.loss)
    results = Seen(lambda c: c.metrics["loss"], "on_eval_end")
    data = one_of_class_2(eager_engine)
    smoothing = LabelSmoothing({3: 0.0, 1: 0.5})
    model.fit(4, data, data, callbacks=[smoothing, losses, results])
    expected = [smoothed(value) for value in (0.25, 0.5, 0.5, 0.0)]
    assert losses.values == expected
    assert results.values == expected
    assert loss_fn.label_smoothing == 0.25


def test_smoothing_starts_anew_in_a_second_run(eager_engine):
    loss_fn, model = classifier(eager_engine)
    data = one_of_class_2(eager_engine)
    smoothing, losses = LabelSmoothing({1: 0.5}), Seen(lambda c: c.loss)
    for _ in range(2):
        model.train(2, data, [smoothing, losses])
    assert losses.values == [smoothed(0), smoothed(0.5)] * 2
    assert loss_fn.label_smoothing == 0.0


def test_smoothing_counts_epochs_absolutely(eager_engine):
    _, model = classifier(eager_engine)
    losses = Seen(lambda c: c.loss)
    model.train(
        3, one_of_class_2(eager_engine), [LabelSmoothing({0: 0.25, 2: 0.5}), losses], initial_epoch=1
    )
    assert losses.values == [smoothed(0.25), smoothed(0.5)]


@pytest.mark.parametrize(
    "event", ["on_train_epoch_begin", "on_train_step_end", "on_eval_end", "on_train_end"]
)
def test_the_losss_own_smoothing_is_put_back_after_an_error(eager_engine, event):
    def fail(run_context):
        raise ZeroDivisionError

    loss_fn, model = classifier(eager_engine, 0.25)
    data = one_of_class_2(eager_engine)
    inside = Seen(lambda c: loss_fn.label_smoothing, event)
    with pytest.raises(ZeroDivisionError):
        model.fit(1, data, data, callbacks=[LabelSmoothing({0: 0.5}), inside, At(event, fail)])
    assert inside.values == [0.5]
    assert loss_fn.label_smoothing == 0.25


def test_the_losss_own_smoothing_is_put_back_after_a_stop(eager_engine):
    loss_fn, model = classifier(eager_engine, 0.25)
    stop = At("on_train_step_end", lambda c: c.request_stop())
    model.train(3, one_of_class_2(eager_engine), [LabelSmoothing({0: 0.5}), stop])
    assert loss_fn.label_smoothing == 0.25


def test_a_loss_without_smoothing_is_refused_before_the_first_step(eager_engine):
    network = eager_engine.weight()
    optimizer = eager_engine.sgd(network)
    for options in (
        {"loss_fn": eager_engine.loss_fn()},
        {"loss_fn": eager_engine.squared_error()},
        {"train_step": eager_engine.step_function("ok")},
    ):
        model = dt.Model(network, optimizer=optimizer, **options)
        with pytest.raises(ArgumentValueError, match="label_smoothing") as error:
            model.train(1, ones(1), LabelSmoothing({0: 0.1}))
        assert "LabelSmoothing" in str(error.value)
    assert eager_engine.value(network) == 1.0


def test_graph_mode_refuses_to_smooth_before_the_first_step(graph_engine):
    loss_fn, model = classifier(graph_engine, 0.25)
    with pytest.raises(CapabilityError, match="LabelSmoothing") as error:
        model.train(1, one_of_class_2(graph_engine), LabelSmoothing({0: 0.5}))
    assert "MindSpore GRAPH mode" in str(error.value)
    assert loss_fn.label_smoothing == 0.25


@pytest.mark.parametrize(
    ("scheduling", "kind"),
    [
        ({}, ArgumentValueError),
        ({-1: 0.1}, ArgumentValueError),
        ({0: -0.1}, ArgumentValueError),
        ({0: 1.0}, ArgumentValueError),
        ({0: math.nan}, ArgumentValueError),
        ({0.5: 0.1}, ArgumentTypeError),
        ({True: 0.1}, ArgumentTypeError),
        ({"0": 0.1}, ArgumentTypeError),
        ({0: "0.1"}, ArgumentTypeError),
        ({0: None}, ArgumentTypeError),
        (0.1, ArgumentTypeError),
        (None, ArgumentTypeError),
        ([(0, 0.1)], ArgumentTypeError),
    ],
    ids=repr,
)
def test_smoothing_that_makes_no_sense_is_refused(scheduling, kind):
    with pytest.raises(kind, match="LabelSmoothing"):
        LabelSmoothing(scheduling)


def test_the_mapping_of_smoothings_is_the_callers(eager_engine):
    given = {1: 0.5, 0: 0.25}
    smoothing = LabelSmoothing(given)
    _, model = classifier(eager_engine)
    model.train(1, one_of_class_2(eager_engine), smoothing)
    assert list(given.items()) == [(1, 0.5), (0, 0.25)]
