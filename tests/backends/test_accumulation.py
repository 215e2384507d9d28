"""Gradients of several batches in one update: how many updates, how large, and what is read meanwhile."""

import logging
import warnings

import numpy as np
import pytest
from closeness import close
from engines import ENGINES, At, Seen, Stream, batches, ones
from models import make

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.callbacks import GradientAccumulationScheduler, StepLogger
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError, RunStateError
from dualtrain.logs import read_log
from dualtrain.protocol import Capability


def rising(count):
    """Batches whose gradients are 1, 2, 3, ..."""
    return batches(*[(float(i), 0.0) for i in range(1, count + 1)])


# How many updates, and how large.


UPDATES = {
    # (batches, batches per update): the mean gradient of each window, where the gradients are 1, 2, 3, ...
    (10, 4): [2.5, 6.5, 9.5],
    (9, 3): [2, 5, 8],
    (7, 2): [1.5, 3.5, 5.5, 7],
    (3, 8): [2],
    (1, 1): [1],
}


@pytest.mark.parametrize(("count", "factor"), UPDATES, ids=str)
def test_updates_per_epoch(engine, count, factor):
    """Two epochs, each of which ends with an update over whatever its last window has."""
    means = UPDATES[count, factor]
    network, model = make(engine, accumulate_steps=factor)
    for data in (rising(count), Stream(rising(count))):
        weight = engine.value(network)
        seen = Seen(lambda c: (c.step, c.is_update_step, c.global_step, engine.value(network)))
        ends = Seen(lambda c: c.global_step, "on_train_epoch_end")
        model.train(2, data, [seen, ends])

        expected, updates = [], 0
        for step in range(1, 2 * count + 1):
            in_epoch = (step - 1) % count + 1
            closes = in_epoch % factor == 0 or in_epoch == count
            if closes:
                weight -= 0.1 * means[updates % len(means)]
                updates += 1
            expected.append((step, closes, updates, close(weight)))
        assert seen.values == expected
        assert ends.values == [len(means), 2 * len(means)]


def test_a_short_window_is_the_mean_of_what_it_has(engine):
    """Gradients 1 2 3 4 | 10 20: 1 - .1 * 2.5 - .1 * 15; a fixed divisor of 4 would give 0."""
    network, model = make(engine, accumulate_steps=4)
    ends = Seen(lambda c: c.global_step, "on_train_end")
    data = batches(*[(x, 0) for x in (1, 2, 3, 4, 10, 20)])
    model.train(1, data, ends)
    assert engine.value(network) == close(-0.75)
    model.train(1, Stream(data), ends)
    assert engine.value(network) == close(-0.75 - 1.75)
    assert ends.values == [2, 2]


def test_four_batches_of_one_are_one_batch_of_four(engine):
    xs = (1.0, 2.0, 3.0, 6.0)
    small, model = make(engine, accumulate_steps=4)
    model.train(3, batches(*[(x, 0.0) for x in xs]))
    large, model = make(engine, accumulate_steps=1)
    model.train(3, [(np.array(xs, np.float32), np.zeros(4, np.float32))])
    assert engine.value(small) == close(0.1)
    assert engine.value(large) == close(0.1)


def weights_of(network):
    backend = find_backend(network)
    return {name: backend.to_numpy(tensor) for name, tensor in backend.weights(network).items()}


def test_small_batches_train_a_layer_as_large_ones_do(engine):
    """10 batches of 2 in windows of 4, 4 and 2, against batches of 8, 8 and 4."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(20, 3)).astype(np.float32), random.normal(size=(20, 2)).astype(np.float32)

    def in_batches_of(size):
        return [(x[i : i + size], y[i : i + size]) for i in range(0, 20, size)]

    def model_of(network, factor):
        optimizer = engine.sgd(network, 0.1)
        return dt.Model(network, engine.squared_error(), optimizer, accumulate_steps=factor)

    networks = [engine.dense(3, 2) for _ in range(2)]
    start = weights_of(networks[0])
    small, large = [model_of(network, factor) for network, factor in zip(networks, (4, 1), strict=True)]
    for data in (list, Stream):
        for network in networks:
            find_backend(network).assign_weights(network, start)
        small.train(3, data(in_batches_of(2)))
        large.train(3, data(in_batches_of(8)))
        ours, theirs = map(weights_of, networks)
        for name, weight in ours.items():
            assert np.abs(weight - start[name]).max() > 0.05, name
            np.testing.assert_allclose(weight, theirs[name], rtol=0, atol=1e-6, err_msg=name)


# What is read meanwhile.


def test_losses_are_those_of_the_batches(engine):
    """A loss of 2 is shown and logged as 2, by every one of 8 batches."""
    _, model = make(engine, accumulate_steps=4)
    seen = Seen(lambda c: (c.loss, float(c.outputs)))
    model.train(1, batches(*[(0.0, 2.0)] * 8), [seen, StepLogger("log.jsonl", 1)])
    assert seen.values == [(2.0, 2.0)] * 8
    assert read_log("log.jsonl").column("loss") == ([1, 2, 3, 4, 5, 6, 7, 8], [2.0] * 8)


def test_a_row_counts_batches_and_updates(engine):
    _, model = make(engine, accumulate_steps=4)
    model.train(2, ones(6), StepLogger("log.jsonl", 3))
    rows = read_log("log.jsonl").records
    assert [(row.step, row.values["global_step"], row.epoch) for row in rows] == [
        (3, 0, 1),
        (6, 2, 1),
        (9, 2, 2),
        (12, 4, 2),
    ]


def test_a_schedule_moves_with_the_updates(engine):
    """Rates .1 .2 .3 .4; 8 batches of gradient 1 make 2 updates: 1 - .1 - .2."""
    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, [0.1, 0.2, 0.3, 0.4])
    model = dt.Model(network, engine.loss_fn(), optimizer, accumulate_steps=4, **options)
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    ends = Seen(lambda c: c.lr)
    model.train(1, ones(8), [begins, ends])
    assert engine.value(network) == close(0.7)
    assert begins.values == close([0.1] * 4 + [0.2] * 4)
    assert ends.values == close([0.1] * 4 + [0.2] * 4)


def test_batches_per_update_can_be_read(engine):
    network, model = make(engine, accumulate_steps=3)
    seen = Seen(lambda c: c.accumulate_steps)
    model.train(1, ones(2), seen)
    assert seen.values == [3, 3]
    plain = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    plain.train(1, ones(1), seen)
    assert seen.values == [3, 3, 1]


# A stop inside a window.


def dropped(caplog):
    return [record for record in caplog.records if "dropped" in record.message]


def test_a_stop_inside_a_window_drops_it_and_says_so(engine, caplog):
    """Gradients 1 2 3 | 4 5, stopped there: the second window moves nothing, in this run or the next."""
    network, model = make(engine, accumulate_steps=3)
    ends = Seen(lambda c: (c.step, c.global_step), "on_train_end")
    with caplog.at_level(logging.WARNING, logger="dualtrain"):
        model.train(1, rising(9), [At("on_train_step_end", lambda c: c.request_stop(), 5), ends])
    assert engine.value(network) == close(0.8)
    assert ends.values == [(5, 1)]
    [record] = dropped(caplog)
    assert record.levelno == logging.WARNING
    assert "2 batches" in record.message
    assert "3" in record.message
    caplog.clear()
    model.train(1, Stream(rising(3)), ends)
    assert engine.value(network) == close(0.6)
    assert ends.values == [(5, 1), (3, 1)]
    assert dropped(caplog) == []


def test_a_stop_at_a_windows_end_drops_nothing(engine, caplog):
    network, model = make(engine, accumulate_steps=3)
    with caplog.at_level(logging.WARNING, logger="dualtrain"):
        model.train(2, rising(4), At("on_train_step_end", lambda c: c.request_stop(), 3))
    assert engine.value(network) == close(0.8)
    assert dropped(caplog) == []


def test_a_run_after_one_that_failed_inside_a_window_starts_clean(engine):
    def fail(run_context):
        raise ZeroDivisionError

    network, model = make(engine, accumulate_steps=3)
    with pytest.raises(ZeroDivisionError):
        model.train(1, rising(6), At("on_train_step_end", fail, 2))
    assert engine.value(network) == 1.0
    model.train(1, ones(3))
    assert engine.value(network) == close(0.9)


# Lengths that are not true.


class Lying:
    """Batches that are more, or fewer, than their length says."""

    def __init__(self, given, length):
        self._given, self._length = given, length

    def __len__(self):
        return self._length

    def __iter__(self):
        return iter(self._given)


def test_a_length_that_is_not_true_changes_no_window(engine):
    """Gradients 1 2 3 4 | 5 6, whatever len() says: twice 1 - .1 * 2.5 - .1 * 5.5.

    On PyTorch a length is believed until it is reached. Where it is too large, the end of the pass comes
    as a surprise: the open window is updated then, after its last batch's events.
    """
    network, model = make(engine, accumulate_steps=4)
    for length in (3, 5, 50):
        before = engine.value(network)
        seen = Seen(lambda c: c.is_update_step)
        counted = Seen(lambda c: c.global_step, "on_train_epoch_end")
        model.train(2, Lying(rising(6), length), [seen, counted])
        surprised = engine.framework == "torch" and length == 50
        assert seen.values == [False, False, False, True, False, not surprised] * 2, length
        assert counted.values == [2, 4], length
        assert engine.value(network) == close(before - 2 * (0.25 + 0.55)), length


class Reusing:
    """Batches with gradients and losses 1 to 4 at a weight of 1, all in one array."""

    def __init__(self):
        self.x, self.label = np.zeros(1, np.float32), np.zeros(1, np.float32)

    def __iter__(self):
        for value in (1, 2, 3, 4):
            self.x[:] = value
            yield self.x, self.label


class SizedReusing(Reusing):
    def __len__(self):
        return 4


@pytest.mark.parametrize("accumulate_steps", [1, 2, 3])
@pytest.mark.parametrize("loader", [Reusing, SizedReusing])
def test_a_loader_may_reuse_the_buffer_of_its_last_batch(engine, loader, accumulate_steps):
    _, model = make(engine, rate=1e-9, accumulate_steps=accumulate_steps)
    seen = Seen(lambda c: c.loss)
    model.train(1, loader(), seen)
    assert seen.values == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.mindspore
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_a_dataset_of_mindspores_own_has_its_short_window_too(mode):
    """Gradients 1 2 3 4 | 5 6: its length is known and true, and it is not looked ahead in."""
    from mindspore.dataset import NumpySlicesDataset

    engine = ENGINES[f"mindspore-{mode}"]()
    network, model = make(engine, accumulate_steps=4)
    columns = (np.arange(1, 7, dtype=np.float32).reshape(-1, 1), np.zeros((6, 1), np.float32))
    seen = Seen(lambda c: (c.is_update_step, c.global_step))
    model.train(2, NumpySlicesDataset(columns, shuffle=False).batch(1), seen)
    assert [update for update, _ in seen.values] == [False, False, False, True, False, True] * 2
    assert seen.values[-1] == (True, 4)
    assert engine.value(network) == close(1 - 2 * (0.25 + 0.55))


# Data parallel.


@pytest.fixture
def process_group(tmp_path):
    from torch import distributed

    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("data", [list, Stream], ids=["sized", "unsized"])
def test_gradients_are_reduced_once_an_update(torch_engine, process_group, data):
    """A communication hook counts: 6 batches in windows of 4 and 2, in two epochs."""
    import torch

    reduced = []

    def hook(state, bucket):
        reduced.append(bucket.buffer().tolist())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    network = torch.nn.parallel.DistributedDataParallel(torch_engine.weight())
    network.register_comm_hook(None, hook)
    _, model = make(torch_engine, accumulate_steps=4, network=network)
    seen = Seen(lambda c: len(reduced))
    model.train(2, data(rising(6)), seen)
    assert seen.values == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    assert torch_engine.value(network.module) == close(1 - 2 * (0.25 + 0.55))


# Another number of batches per update, by epoch.


def updates_per_epoch(model, epochs, data, *callbacks, **options):
    ends = Seen(lambda c: c.global_step, "on_train_epoch_end")
    model.train(epochs, data, [*callbacks, ends], **options)
    return [after - before for before, after in zip([0, *ends.values], ends.values, strict=False)]


def test_the_scheduler_counts_epochs_from_0(engine):
    """Each epoch's 8 gradients of 1 take .1 times its number of updates."""
    network, model = make(engine, accumulate_steps=1)
    scheduler = GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})
    for data in (ones(8), Stream(ones(8))):
        assert updates_per_epoch(model, 10, data, scheduler) == [1, 1, 1, 1, 2, 2, 2, 2, 8, 8]
    assert engine.value(network) == close(1 - 2 * 2.8)


def test_the_schedulers_first_epochs_have_one_batch_an_update_without_a_key_0(engine):
    network, model = make(engine, accumulate_steps=1)
    scheduler = GradientAccumulationScheduler({2: 3})
    assert updates_per_epoch(model, 4, ones(6), scheduler) == [6, 6, 2, 2]
    assert engine.value(network) == close(1 - 1.6)
    assert updates_per_epoch(model, 3, ones(6), scheduler) == [6, 6, 2]  # a second run begins anew


def test_the_schedulers_epochs_are_absolute(engine):
    _, model = make(engine, accumulate_steps=1)
    scheduler = GradientAccumulationScheduler({0: 8, 2: 4})
    assert updates_per_epoch(model, 4, ones(8), scheduler, initial_epoch=1) == [1, 2, 2]


def test_the_schedulers_mapping_is_the_callers(engine):
    given = {2: 4, 0: 2}
    scheduler = GradientAccumulationScheduler(given)
    _, model = make(engine, accumulate_steps=1)
    assert updates_per_epoch(model, 3, ones(4), scheduler) == [2, 2, 1]
    assert list(given.items()) == [(2, 4), (0, 2)]
    given[0] = 4
    assert updates_per_epoch(model, 1, ones(4), scheduler) == [2]


@pytest.mark.parametrize(
    ("scheduling", "kind"),
    [
        ({}, ValueError),
        ({-1: 2}, ValueError),
        ({0: 0}, ValueError),
        ({0: -4}, ValueError),
        ({0: 2.5}, TypeError),
        ({0: 2.0}, TypeError),
        ({0: "2"}, TypeError),
        ({0: None}, TypeError),
        ({0: True}, TypeError),
        ({True: 2}, TypeError),
        ({0.5: 2}, TypeError),
        ({"0": 2}, TypeError),
        ({0: 8, 4: 0}, ValueError),
        ([(0, 2)], TypeError),
        (4, TypeError),
        (None, TypeError),
    ],
    ids=repr,
)
def test_a_schedule_that_makes_no_sense_is_refused_when_it_is_given(scheduling, kind):
    with pytest.raises(kind, match="GradientAccumulationScheduler") as error:
        GradientAccumulationScheduler(scheduling)
    assert isinstance(error.value, (ArgumentTypeError, ArgumentValueError))


def test_the_scheduler_and_a_fixed_number_are_refused_together(engine):
    network, model = make(engine, accumulate_steps=2)
    scheduler = GradientAccumulationScheduler({0: 4})
    with pytest.raises(ArgumentValueError, match="accumulate_steps=2") as error:
        model.train(1, ones(4), scheduler)
    assert "GradientAccumulationScheduler" in str(error.value)
    assert engine.value(network) == 1.0


def test_the_scheduler_is_refused_under_manual_optimisation(torch_engine):
    network = torch_engine.weight()
    model = dt.Model(
        network,
        optimizer=torch_engine.sgd(network),
        train_step=lambda network, batch, run_context: None,
        automatic_optimization=False,
    )
    with pytest.raises(CapabilityError, match="GradientAccumulationScheduler") as error:
        model.train(1, ones(4), GradientAccumulationScheduler({0: 4}))
    assert isinstance(error.value, RuntimeError)
    assert "accumulation" in str(error.value)


class Setting:
    """Set the batches per update at an event."""

    needs = frozenset({Capability.ACCUMULATION})

    def __init__(self, value, event="on_train_epoch_begin", step=None):
        def hook(run_context):
            if step is None or run_context.step == step:
                run_context.accumulate_steps = value

        setattr(self, event, hook)


def test_a_callback_of_the_users_own_sets_the_number(engine):
    network, model = make(engine, accumulate_steps=2)
    assert updates_per_epoch(model, 2, ones(6), Setting(3)) == [2, 2]
    assert engine.value(network) == close(0.6)
    assert updates_per_epoch(model, 1, ones(6)) == [3]  # the Model's own number is in force again


def test_a_number_set_between_windows_holds_from_the_next_one_on(engine):
    network, model = make(engine, accumulate_steps=1)
    seen = Seen(lambda c: c.is_update_step)
    model.train(1, ones(7), [Setting(2, "on_train_step_end", step=2), seen])
    assert seen.values == [True, True, False, True, False, True, True]
    assert engine.value(network) == close(0.5)


@pytest.mark.parametrize("event", ["on_train_step_begin", "on_train_step_end"])
def test_the_number_cannot_change_inside_a_window(engine, event):
    network, model = make(engine, accumulate_steps=3)
    with pytest.raises(RunStateError, match="inside a window") as error:
        model.train(1, ones(6), Setting(2, event, step=2))
    assert "on_train_epoch_begin" in str(error.value)
    assert engine.value(network) == 1.0


@pytest.mark.parametrize(
    ("value", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_number_that_is_none_is_refused(engine, value, kind):
    with pytest.raises(kind, match="accumulate_steps"):
        make(engine, accumulate_steps=value)
    network, model = make(engine, accumulate_steps=1)
    with pytest.raises(kind, match="accumulate_steps"):
        model.train(1, ones(1), Setting(value))
    assert engine.value(network) == 1.0


# Layers that look at a whole batch, or draw.


def sample_pairs(*pairs):
    return [(np.array(pair, np.float32).reshape(-1, 1), np.zeros((2, 1), np.float32)) for pair in pairs]


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if "BatchNorm" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_batch_norm_sees_each_batch_of_a_window_by_itself(engine):
    """Means 11 and 21, variances 2: .9 m + .1 batch, twice; one batch of 4 would give a mean of 1.6."""
    network = engine.normed()
    seen = Seen(lambda c: engine.statistics(network))
    _, model = make(engine, accumulate_steps=2, network=network)
    model.train(1, sample_pairs((10, 12), (20, 22)), seen)
    assert seen.values == [(close(1.1), close(1.1)), (close(3.09), close(1.19))]


def test_a_warning_names_the_batch_norms_of_longer_windows(engine):
    def given_to_model():
        _, model = make(engine, accumulate_steps=2, network=engine.normed())
        model.train(1, sample_pairs((10, 12), (20, 22)))

    [message] = warnings_of(given_to_model)
    assert "(norm" in message
    assert "window of 2" in message
    assert "one large batch" in message


def test_the_warning_comes_when_the_scheduler_makes_windows_longer(engine):
    _, model = make(engine, accumulate_steps=1, network=engine.normed())
    data = sample_pairs((10, 12), (20, 22))
    scheduler = GradientAccumulationScheduler({1: 2})
    messages = warnings_of(lambda: model.train(2, data, scheduler))
    assert len(messages) == 1
    assert "(norm" in messages[0]
    assert "window of 2" in messages[0]


def test_no_warning_without_windows_or_without_batch_norm(engine):
    data = sample_pairs((10, 12))
    _, model = make(engine, accumulate_steps=1, network=engine.normed())
    assert warnings_of(lambda: model.train(1, data)) == []
    _, model = make(engine, accumulate_steps=2)
    assert warnings_of(lambda: model.train(1, data)) == []


def test_dropout_draws_anew_for_each_batch_of_a_window(engine):
    """At w = 1 a batch's gradient is its loss, so an update is .1 times the mean of its losses."""
    network, model = make(engine, accumulate_steps=3, network=engine.dropped())
    losses = Seen(lambda c: (c.loss, engine.value(network)))
    batch = (np.arange(1, 65, dtype=np.float32), np.zeros(64, np.float32))
    model.train(1, [batch] * 3, losses)
    drawn = [loss for loss, _ in losses.values]
    assert drawn[0] != drawn[1] != drawn[2]  # seeded, each of GRAPH mode's two graphs draws the same series
    assert losses.values[-1][1] == pytest.approx(1 - 0.1 * sum(drawn) / 3, rel=1e-5)


def test_dropout_is_back_after_an_evaluation(engine):
    network, model = make(engine, accumulate_steps=2, network=engine.dropped())
    losses = Seen(lambda c: c.loss / before[-1])
    before = []
    note = At("on_train_step_begin", lambda c: before.append(engine.value(network)))
    batch = (np.arange(1, 65, dtype=np.float32), np.zeros(64, np.float32))
    model.fit(2, [batch] * 2, [batch], callbacks=[note, losses])
    assert len(losses.values) == 4
    assert all(abs(loss - 32.5) > 0.01 for loss in losses.values)  # which it would be without dropout
