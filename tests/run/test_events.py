"""The events are MindSpore's twelve, in MindSpore's order, and the other names for them are data."""

import pickle
import re

import pytest

from dualtrain import events
from dualtrain.callback import Callback
from dualtrain.events import ALIASES, LIFECYCLE, Event

MINDSPORE_EVENTS = [
    "on_train_begin",
    "on_train_epoch_begin",
    "on_train_step_begin",
    "on_train_step_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_eval_begin",
    "on_eval_epoch_begin",
    "on_eval_step_begin",
    "on_eval_step_end",
    "on_eval_epoch_end",
    "on_eval_end",
]
GRADIENT_EVENTS = [
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
]
OWN_EVENTS = [*GRADIENT_EVENTS, "on_exception", "on_teardown"]


def test_lifecycle_is_mindspores_twelve_names_in_order():
    assert [event.value for event in LIFECYCLE] == MINDSPORE_EVENTS


def test_the_enum_is_the_lifecycle_and_then_the_extension_events():
    assert [event.value for event in Event] == MINDSPORE_EVENTS + OWN_EVENTS


@pytest.mark.parametrize("event", Event, ids=str)
def test_an_event_is_the_name_of_its_method(event):
    assert event == event.value
    assert str(event) == event.value
    assert f"{event}" == event.value
    assert Event(event.value) is event


@pytest.mark.parametrize("event", Event, ids=str)
def test_an_event_pickles_to_itself(event):
    assert pickle.loads(pickle.dumps(event)) is event


@pytest.mark.parametrize("event", Event, ids=str)
def test_the_base_class_has_a_documented_method_for_every_event(event):
    assert getattr(Callback, event.value).__doc__


def test_the_base_class_has_no_hook_that_is_not_an_event():
    hooks = {name for name in vars(Callback) if name.startswith("on_")}
    assert hooks == {event.value for event in Event}


@pytest.mark.parametrize(
    ("alias", "meaning"),
    [
        # A tutorial's name means the training event alone: in evaluation it would count batches twice.
        ("on_step_begin", ["on_train_step_begin"]),
        ("on_step_end", ["on_train_step_end"]),
        ("on_epoch_begin", ["on_train_epoch_begin"]),
        ("on_epoch_end", ["on_train_epoch_end"]),
        # MindSpore's legacy names are called in both phases, as there.
        ("begin", ["on_train_begin", "on_eval_begin"]),
        ("epoch_begin", ["on_train_epoch_begin", "on_eval_epoch_begin"]),
        ("step_begin", ["on_train_step_begin", "on_eval_step_begin"]),
        ("step_end", ["on_train_step_end", "on_eval_step_end"]),
        ("epoch_end", ["on_train_epoch_end", "on_eval_epoch_end"]),
        ("end", ["on_train_end", "on_eval_end"]),
    ],
)
def test_alias_means(alias, meaning):
    assert [event.value for event in ALIASES[alias]] == meaning


def test_there_are_no_other_aliases():
    assert len(ALIASES) == 10
    assert not set(ALIASES) & {event.value for event in Event}


def test_the_module_docstring_draws_the_events_of_a_fit_in_order():
    drawing = events.__doc__.partition("What each way of ending")[0].partition("``eval`` alone")[0]
    drawn = re.findall(r"^ +(on_\w+)", drawing, flags=re.MULTILINE)
    evaluation = MINDSPORE_EVENTS[6:]
    training = [*MINDSPORE_EVENTS[:3], *GRADIENT_EVENTS, MINDSPORE_EVENTS[3]]
    assert drawn == training + evaluation + MINDSPORE_EVENTS[4:6]
