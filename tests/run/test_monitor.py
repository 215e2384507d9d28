"""A monitor knows the best value and when there has been no better one for too long."""

import copy
import math
import pickle

import pytest

from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.monitor import Monitor, find_metric

NAN, INF = math.nan, math.inf


def exhausted_at(monitor, values):
    """Observe until the monitor is exhausted, and return the number of observations, or None."""
    for number, value in enumerate(values, 1):
        monitor.improved(value)
        if monitor.exhausted:
            return number
    return None


# Which metric a name means.


@pytest.mark.parametrize(
    ("name", "results", "found"),
    [
        ("val_acc", {"acc": 0.5}, 0.5),
        ("eval_acc", {"acc": 0.5}, 0.5),
        ("acc", {"acc": 0.5}, 0.5),
        ("acc", {"val_acc": 0.5}, 0.5),
        ("val_loss", {"eval_loss": 1.25}, 1.25),
        ("eval_loss", {"val_loss": 1.25}, 1.25),
        ("val_accuracy", {"acc": 0.5}, 0.5),
        ("acc", {"accuracy": 0.5}, 0.5),
        ("val_acc", {"eval_accuracy": 0.5}, 0.5),
        ("f1", {"acc": 0.5, "f1": 0.0}, 0.0),
        ("val_f1", {"acc": 0.5, "f1": NAN}, NAN),
    ],
)
def test_names_with_and_without_a_prefix_mean_one_metric(name, results, found):
    assert str(find_metric(name, results)) == str(found)


@pytest.mark.parametrize("name", ["acc", "val_acc", "eval_acc", "accuracy"])
def test_the_exact_spelling_wins(name):
    results = {"acc": 1, "val_acc": 2, "eval_acc": 3, "accuracy": 4}
    assert find_metric(name, results) == results[name]
    assert find_metric(name, dict(reversed(results.items()))) == results[name]


@pytest.mark.parametrize("name", ["precision", "val_", "ac", "acc_val", "topacc", "ACC"])
def test_a_metric_that_is_not_there_is_an_error_that_lists_those_that_are(name):
    with pytest.raises(KeyError, match=f"'{name}'.*available: acc, eval_loss"):
        find_metric(name, {"acc": 0.5, "eval_loss": 1.25})


def test_where_there_is_no_metric_the_error_says_so():
    with pytest.raises(KeyError, match="available: none"):
        find_metric("acc", {})


# Better.


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("eval_loss", "min"),
        ("loss", "min"),
        ("val_error", "min"),
        ("mae", "min"),
        ("eval_mse", "min"),
        ("MSE", "min"),
        ("perplexity", "min"),
        ("acc", "max"),
        ("val_accuracy", "max"),
        ("top_5_accuracy", "max"),
        ("f1", "max"),
        ("precision", "max"),
        ("recall", "max"),
    ],
)
def test_the_name_decides_which_way_is_better(name, mode):
    assert Monitor(name).mode == mode


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_given_mode_wins_over_the_name(mode):
    assert Monitor("eval_loss", mode).mode == mode
    assert Monitor("acc", mode).mode == mode


@pytest.mark.parametrize(
    ("mode", "values", "improved", "best"),
    [
        ("min", [3.0, 2.0, 2.0, 2.5, 1.0], [True, True, False, False, True], 1.0),
        ("max", [0.1, 0.3, 0.3, 0.2, 0.4], [True, True, False, False, True], 0.4),
        ("min", [0.0, -1.0, -0.5], [True, True, False], -1.0),
        ("min", [0.5, 0.0, 0.0], [True, True, False], 0.0),
        ("max", [-3.0, -2.0, -1.0], [True, True, True], -1.0),
        ("max", [0.0, 0.0], [True, False], 0.0),
        ("min", [2, 1], [True, True], 1),
    ],
)
def test_only_a_better_value_improves(mode, values, improved, best):
    monitor = Monitor("metric", mode)
    assert [monitor.improved(value) for value in values] == improved
    assert monitor.best == best


@pytest.mark.parametrize(
    ("mode", "values", "improved", "best"),
    [
        ("min", [1.0, 0.75, 0.5, 0.25], [True, False, True, False], 0.5),
        ("max", [1.0, 1.25, 1.5, 1.75], [True, False, True, False], 1.5),
    ],
)
def test_better_means_by_more_than_min_delta_against_the_best(mode, values, improved, best):
    monitor = Monitor("metric", mode, min_delta=0.25)
    assert [monitor.improved(value) for value in values] == improved
    assert monitor.best == best


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_what_is_not_finite_is_never_the_best(mode, bad):
    monitor = Monitor("metric", mode)
    assert monitor.improved(bad) is False
    assert monitor.best is None
    assert monitor.improved(0.5) is True
    assert monitor.improved(bad) is False
    assert monitor.best == 0.5


def test_nothing_is_best_before_the_first_value():
    monitor = Monitor("acc")
    assert (monitor.best, monitor.waited, monitor.exhausted) == (None, 0, False)


def test_the_wait_starts_anew_with_each_improvement():
    monitor, waited = Monitor("eval_loss", patience=5), []
    for value in (1.0, 1.0, NAN, 0.5, 0.5):
        monitor.improved(value)
        waited.append(monitor.waited)
    assert waited == [0, 1, 2, 0, 1]


# Patience.


@pytest.mark.parametrize(
    ("patience", "values", "at"),
    [
        (2, [1.0, 1.0, 1.0, 1.0], 3),
        (3, [1.0, 1.0, 1.0, 1.0, 1.0], 4),
        (1, [1.0, 1.0], 2),
        (0, [1.0, 1.0], 2),
        (0, [3.0, 2.0, 1.0], None),
        (2, [0.0, 0.0, 0.0], 3),
        (2, [1.0, NAN, NAN, NAN], 3),
        (3, [NAN, 0.5, 0.4, 0.3, 0.2], None),
        (2, [NAN, NAN, NAN], 2),
        (2, [3.0, 3.0, 2.0, 2.0, 1.0, 1.0], None),
        (2, [3.0, 3.0, 2.0, 2.0, 2.0], 5),
    ],
)
def test_patience_is_the_number_of_observations_without_improvement(patience, values, at):
    assert exhausted_at(Monitor("eval_loss", patience=patience), values) == at


def test_an_improvement_after_the_end_of_patience_restores_it():
    monitor = Monitor("eval_loss", patience=1)
    monitor.improved(1.0)
    monitor.improved(1.0)
    assert monitor.exhausted
    monitor.improved(0.5)
    assert not monitor.exhausted


def test_a_reset_forgets_everything_observed_and_no_setting():
    monitor = Monitor("acc", "min", min_delta=0.25, patience=1)
    monitor.improved(0.5)
    monitor.improved(0.5)
    monitor.reset()
    assert (monitor.best, monitor.waited, monitor.exhausted) == (None, 0, False)
    assert (monitor.name, monitor.mode, monitor.min_delta, monitor.patience) == ("acc", "min", 0.25, 1)
    assert monitor.improved(9.0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_goes_on_where_the_original_was(duplicate):
    monitor = Monitor("eval_loss", patience=2)
    monitor.improved(1.0)
    monitor.improved(1.0)
    twin = duplicate(monitor)
    twin.improved(1.0)
    assert (twin.exhausted, monitor.exhausted) == (True, False)
    assert twin.best == 1.0


# Arguments.


@pytest.mark.parametrize("mode", ["auto", "MIN", "", 1, True])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(ArgumentValueError, match="'min', 'max' or None"):
        Monitor("acc", mode)


@pytest.mark.parametrize("patience", [1.5, "2", None, True])
def test_a_patience_that_is_no_integer_is_refused(patience):
    with pytest.raises(ArgumentTypeError, match="patience takes an integer"):
        Monitor("acc", patience=patience)


@pytest.mark.parametrize(
    "settings", [{"patience": -1}, {"min_delta": -0.1}, {"min_delta": NAN}, {"min_delta": INF}], ids=str
)
def test_settings_below_zero_are_refused(settings):
    with pytest.raises(ArgumentValueError, match="must not be negative"):
        Monitor("acc", **settings)
