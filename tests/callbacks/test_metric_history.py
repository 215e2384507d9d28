"""MetricHistory: a column for each name, with one value for each epoch, on every engine.

The networks have one weight w, from 1, and plain SGD takes lr from it at each step on ``ones``; an
evaluation's loss is ``w * x + label`` and its mean absolute error ``|w * x - label|``.
"""

import copy
import json
import pickle

import pytest
from engines import At, batches, ones

import dualtrain as dt
from dualtrain.callbacks import MetricHistory
from dualtrain.testing import FakeLoop


def model_of(engine, lr=0.25, w=1.0, **options):
    network = engine.weight(w)
    return dt.Model(network, engine.loss_fn(), engine.sgd(network, lr), **options)


def history_of(engine, epochs, valid=None, *others, lr=0.25, metrics=None, count=2, **options):
    """Fit a network with one weight; return the history's columns."""
    history = MetricHistory()
    model = model_of(engine, lr, metrics=metrics)
    model.fit(epochs, ones(count), valid, callbacks=[history, *others], **options)
    return history.history


def test_each_epoch_has_its_last_loss_the_rate_and_the_evaluation(engine):
    columns = history_of(engine, 3, batches((2, 3), (4, 3)), metrics={"mae"})
    assert columns == {
        "epoch": [1, 2, 3],
        "loss": [0.75, 0.25, -0.25],
        "lr": [0.25, 0.25, 0.25],
        "mae": [1.5, 3.0, 4.5],  # w is 0.5, 0 and -0.5 at the epochs' ends
        "eval_loss": [4.5, 3.0, 1.5],
    }


def test_without_metrics_the_evaluation_is_its_loss(engine):
    assert history_of(engine, 2, batches((2, 3))) == {
        "epoch": [1, 2],
        "loss": [0.75, 0.25],
        "lr": [0.25, 0.25],
        "eval_loss": [4.0, 3.0],
    }


def test_without_an_evaluation_there_are_the_trainings_columns(engine):
    assert history_of(engine, 2) == {"epoch": [1, 2], "loss": [0.75, 0.25], "lr": [0.25, 0.25]}


@pytest.mark.parametrize(
    ("frequency", "column"),
    [(2, [None, 3.0, None, 1.0]), ([1, 4], [4.0, None, None, 1.0])],
)
def test_an_epoch_without_an_evaluation_has_none(engine, frequency, column):
    columns = history_of(engine, 4, batches((2, 3)), valid_frequency=frequency)
    assert columns == {
        "epoch": [1, 2, 3, 4],
        "loss": [0.75, 0.25, -0.25, -0.75],
        "lr": [0.25] * 4,
        "eval_loss": column,
    }


def test_a_rate_is_the_one_of_the_epochs_last_step_until_it_is_changed(engine):
    def halve(run_context):
        run_context.lr = 0.125

    before = history_of(engine, 3, None, At("on_train_epoch_end", halve, epoch=1))
    assert before["lr"] == [0.25, 0.125, 0.125]
    assert before["loss"] == [0.75, 0.375, 0.125]


def test_several_rates_are_kept_together(engine):
    network, history = engine.two_weights(), MetricHistory()
    model = dt.Model(network, engine.loss_fn(), engine.sgd_groups(network, 0.25, 0.125))
    model.train(2, ones(1), history)
    assert history.history == {
        "epoch": [1, 2],
        "loss": [2.0, 1.625],
        "lr": [(0.25, 0.125), (0.25, 0.125)],
    }


def test_epochs_are_absolute(engine):
    columns = history_of(engine, 4, initial_epoch=2)
    assert (columns["epoch"], columns["loss"]) == ([3, 4], [0.75, 0.25])


def test_a_stopped_epoch_has_its_row(engine):
    def stop(run_context):
        if run_context.step == 3:
            run_context.request_stop()

    columns = history_of(engine, 5, batches((2, 3)), At("on_train_step_end", stop))
    assert columns == {
        "epoch": [1, 2],
        "loss": [0.75, 0.5],
        "lr": [0.25, 0.25],
        "eval_loss": [4.0, 3.5],
    }


def test_a_second_run_starts_anew(engine):
    history, model = MetricHistory(), model_of(engine)
    model.fit(2, ones(2), batches((2, 3)), callbacks=history)
    first = history.history
    model.train(1, ones(2), history)
    assert history.history == {"epoch": [1], "loss": [-0.25], "lr": [0.25]}
    assert first["eval_loss"] == [4.0, 3.0]  # who kept the first run's columns keeps them


def test_a_lone_evaluation_leaves_the_history(engine):
    history, model = MetricHistory(), model_of(engine)
    model.train(1, ones(2), history)
    model.eval(batches((2, 3)), history)
    assert history.history == {"epoch": [1], "loss": [0.75], "lr": [0.25]}


def test_a_history_that_takes_up_its_state_goes_on(engine):
    first, model = MetricHistory(), model_of(engine)
    model.fit(2, ones(2), batches((2, 3)), callbacks=first)
    second = MetricHistory()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history
    model.fit(4, ones(2), batches((2, 3)), valid_frequency=4, callbacks=second, initial_epoch=2)
    assert second.history == {
        "epoch": [1, 2, 3, 4],
        "loss": [0.75, 0.25, -0.25, -0.75],
        "lr": [0.25] * 4,
        "eval_loss": [4.0, 3.0, None, 1.0],
    }
    assert first.history["epoch"] == [1, 2]
    model.train(1, ones(2), second)  # the run after that one starts anew
    assert second.history["epoch"] == [1]


# What is the same on every engine, without one.


def run(history, epochs=2, **options):
    FakeLoop([2.0, 1.0], epochs=epochs, **options).run(history)
    return history


def test_a_new_history_is_empty():
    history = MetricHistory()
    assert history.history == {}
    assert history.state_dict() == {"history": {}}
    assert repr(history) == "MetricHistory()"


def test_a_failed_run_leaves_the_epochs_that_it_finished():
    def fail(run_context):
        raise ValueError("odd")

    history = MetricHistory()
    with pytest.raises(ValueError, match="odd"):
        run([history, At("on_train_epoch_begin", fail, epoch=3)], epochs=5)
    assert history.history == {"epoch": [1, 2], "loss": [1.0, 1.0], "lr": [0.1, 0.1]}


def test_a_name_that_appears_later_has_none_before():
    results = [{"acc": 0.5}, {"acc": 0.75, "f1": 0.0}, {"f1": 0.25}]
    history = run(MetricHistory(), epochs=3, evaluations=results)
    assert history.history["acc"] == [0.5, 0.75, None]
    assert history.history["f1"] == [None, 0.0, 0.25]


def test_a_state_is_a_snapshot():
    history = run(MetricHistory())
    state = history.state_dict()
    kept = copy.deepcopy(state)
    history.on_train_epoch_end(dt.RunContext({"cur_epoch_num": 3, "net_outputs": 0.5}))
    assert history.history["epoch"] == [1, 2, 3]
    assert state == kept
    other = MetricHistory()
    other.load_state_dict(state)
    other.history["loss"].append(0.0)
    assert state == kept


def test_the_state_of_an_unfinished_resumption_goes_on_too():
    """A run that is killed before its first epoch ends has the history that it was given."""
    first = run(MetricHistory())
    second = MetricHistory()
    second.load_state_dict(first.state_dict())
    third = MetricHistory()
    third.load_state_dict(second.state_dict())
    assert run(third).history["epoch"] == [1, 2, 1, 2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda history: pickle.loads(pickle.dumps(history))])
def test_a_copy_has_the_history_and_does_not_share_it(duplicate):
    history = run(MetricHistory())
    twin = duplicate(history)
    assert twin.history == history.history
    run(twin, epochs=1)
    assert (twin.history["epoch"], history.history["epoch"]) == ([1], [1, 2])


def test_two_histories_in_one_list_are_alike_and_apart():
    first, second = MetricHistory(), MetricHistory()
    run([first, second])
    assert first.history == second.history
    assert first.history["loss"] is not second.history["loss"]
