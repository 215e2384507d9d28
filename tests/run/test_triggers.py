"""Triggers are told the step and the time, and decide; nothing is due twice or never."""

import copy
import math
import pickle

import pytest
from clocks import Clock

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.triggers import Every


def due_steps(trigger, steps):
    return [step for step in steps if trigger.due(step=step)]


# Every so many steps.


@pytest.mark.parametrize(
    ("interval", "steps", "due"),
    [
        (10, 25, [10, 20]),
        (3, 14, [3, 6, 9, 12]),
        (1, 3, [1, 2, 3]),
        (7, 15, [7, 14]),
        (5, 4, []),
        (4, 4, [4]),
    ],
)
def test_every_n_steps_selects_the_multiples_from_the_first_step_on(interval, steps, due):
    assert due_steps(Every(steps=interval), range(1, steps + 1)) == due


@pytest.mark.parametrize(
    ("interval", "steps", "due"),
    [
        (10, [7, 14, 21, 28, 35], [14, 28]),
        (10, [20, 40, 60], [20, 40, 60]),
        (10, [3, 25, 26, 34, 35, 44, 45], [25, 35, 45]),
        (3, [4, 8, 12], [4, 8, 12]),
        (1, [5, 10], [5, 10]),
    ],
)
def test_where_steps_come_in_chunks_at_least_n_have_passed_since_the_last_time(interval, steps, due):
    """A remainder test would never fire where no chunk ends on a multiple."""
    assert due_steps(Every(steps=interval), steps) == due


def test_the_same_step_is_not_due_twice():
    every = Every(steps=5)
    assert [every.due(step=5), every.due(step=5), every.due(step=6)] == [True, False, False]


def test_a_counter_that_restarts_is_counted_from_its_beginning():
    every = Every(steps=10)
    assert due_steps(every, range(1, 26)) == [10, 20]
    assert due_steps(every, range(1, 26)) == [10, 20]


def test_a_reset_forgets_the_last_time():
    every = Every(steps=1)
    assert every.due(step=1)
    every.reset()
    assert every.due(step=1)


@pytest.mark.parametrize(
    ("start", "due"), [(0, [10, 20, 30]), (20, [30]), (25, [30]), (29, [30]), (30, [])]
)
def test_counting_from_a_step_keeps_to_the_multiples(start, due):
    every = Every(steps=10)
    every.reset(step=start)
    assert due_steps(every, range(start + 1, 36)) == due


# Every so many seconds.


def test_seconds_are_counted_from_construction_and_then_from_the_last_time():
    clock = Clock(100.0)
    every = Every(seconds=5.0, clock=clock)
    due = []
    for now in (100.0, 104.9, 105.0, 105.1, 109.9, 112.0, 116.9, 117.0):
        clock.now = now
        if every.due(step=1):
            due.append(now)
    assert due == [105.0, 112.0, 117.0]


def test_a_reset_starts_the_seconds_anew():
    clock = Clock(100.0)
    every = Every(seconds=5.0, clock=clock)
    clock.now = 104.0
    every.reset()
    clock.now = 108.0
    assert not every.due()
    clock.now = 109.0
    assert every.due()


def test_steps_never_ask_for_the_time():
    def clock():
        raise AssertionError("the time was asked for")

    assert due_steps(Every(steps=2, clock=clock), [1, 2]) == [2]


# Arguments.


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"steps": None},
        {"steps": 1, "seconds": 1.0},
    ],
    ids=str,
)
def test_exactly_one_interval_is_given(given):
    with pytest.raises(ArgumentTypeError, match="exactly one of steps and seconds"):
        Every(**given)


@pytest.mark.parametrize("value", [1.0, 2.5, "3", True, False, [1], math.nan], ids=repr)
def test_a_count_that_is_no_integer_is_refused_by_name(value):
    with pytest.raises(ArgumentTypeError, match=r"Every\(steps=\.\.\.\) takes an integer"):
        Every(steps=value)


@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused_by_name(value):
    with pytest.raises(ArgumentValueError, match=rf"Every\(steps=\.\.\.\) must be at least 1.*{value}"):
        Every(steps=value)


@pytest.mark.parametrize("seconds", [0, 0.0, -1.5, math.inf, math.nan])
def test_seconds_that_never_or_always_pass_are_refused(seconds):
    with pytest.raises(ArgumentValueError, match=r"Every\(seconds=\.\.\.\) must be positive"):
        Every(seconds=seconds)


def test_a_positive_integer_is_handed_back():
    assert positive_int("StepLogger", "log_interval", 10) == 10


def test_a_refused_integer_names_its_owner():
    with pytest.raises(ArgumentTypeError, match=r"StepLogger\(log_interval=\.\.\.\).*'ten'"):
        positive_int("StepLogger", "log_interval", "ten")
    with pytest.raises(ArgumentValueError, match=r"StepLogger\(log_interval=\.\.\.\).*0"):
        positive_int("StepLogger", "log_interval", 0)


# Every trigger.


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (Every(steps=10), "Every(steps=10)"),
        (Every(seconds=0.5), "Every(seconds=0.5)"),
    ],
    ids=repr,
)
def test_a_repr_shows_the_settings(trigger, text):
    assert repr(trigger) == text


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_goes_on_where_the_original_was(duplicate):
    trigger = Every(steps=10)
    due_steps(trigger, range(1, 13))
    twin = duplicate(trigger)
    assert due_steps(twin, range(13, 31)) == [20, 30]
    assert due_steps(trigger, range(13, 31)) == [20, 30]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_trigger_by_time_can_be_copied_with_its_default_clock(duplicate):
    assert repr(duplicate(Every(seconds=60))) == "Every(seconds=60)"
