"""Registration refuses what would never be called, dispatch keeps the list's order, one way leads out."""

import functools
import warnings

import pytest

from dualtrain.bus import EventBus
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError, UnknownEventError
from dualtrain.events import ALIASES, Event
from dualtrain.protocol import Capability


def new_context(step=3, epoch=1):
    return RunContext({"mode": "train", "cur_step_num": step, "cur_epoch_num": epoch})


def notes_of(error):
    return getattr(error, "__notes__", [])


def dispatch(bus, event):
    """Call whoever listens to an event, and return the context that they were given."""
    context = new_context()
    emitter = bus.emitter(event)
    if emitter is not None:
        emitter(context)
    return context


def duck(**methods):
    """An object of a class of its own, which inherits from nothing."""
    return type("Duck", (), methods)()


# What may be in the list.


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (lambda one, two: None, lambda one, two: []),
        (lambda one, two: one, lambda one, two: [one]),
        (lambda one, two: [one, two], lambda one, two: [one, two]),
        (lambda one, two: (two, one), lambda one, two: [two, one]),
        (lambda one, two: [], lambda one, two: []),
    ],
    ids=["none", "one", "list", "tuple", "empty"],
)
def test_callbacks_are_none_or_one_or_a_list_or_a_tuple(given, kept):
    one, two = Callback(), Callback()
    assert EventBus(given(one, two)).callbacks == kept(one, two)


def test_the_callers_list_is_not_kept():
    mine = [Callback()]
    bus = EventBus(mine)
    mine.append(Callback())
    assert len(bus.callbacks) == 1


@pytest.mark.parametrize(
    "wrong",
    [object(), 3, "StepLogger", {}, None, lambda run_context: None, [Callback()]],
    ids=["object", "int", "name", "dict", "none", "function", "nested list"],
)
def test_what_listens_to_nothing_is_not_a_callback(wrong):
    with pytest.raises(ArgumentTypeError, match=r"is not a callback.*on_train_step_end"):
        EventBus([Callback(), wrong])


def test_a_class_in_place_of_an_instance_is_refused_by_name():
    class Mine(Callback):
        pass

    with pytest.raises(ArgumentTypeError, match=r"Mine in callbacks is a class.*Mine\(\.\.\.\)"):
        EventBus([Mine])


def test_a_callback_that_overrides_nothing_is_accepted():
    assert EventBus([Callback()]).describe() == "no listeners"


# Names.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_train_step_ended", "on_train_step_end"),
        ("on_trian_step_end", "on_train_step_end"),
        ("on_eval_epoch_ends", "on_eval_epoch_end"),
        ("on_step_ends", "on_step_end"),
        ("on_exeption", "on_exception"),
        ("on_tear_down", "on_teardown"),
    ],
)
def test_a_method_that_names_no_event_is_an_error_with_the_nearest_event(name, meant):
    callback = duck(**{name: lambda self, run_context: None})
    with pytest.raises(UnknownEventError, match=rf"Duck\.{name} .*did you mean {meant}\?"):
        EventBus([callback])


def test_a_name_like_no_event_is_an_error_that_lists_the_events():
    callback = duck(on_qqqq=lambda self, run_context: None)
    with pytest.raises(UnknownEventError) as caught:
        EventBus([callback])
    assert "Duck.on_qqqq" in str(caught.value)
    assert all(event.value in str(caught.value) for event in Event)


def test_a_wrong_name_is_found_where_it_was_inherited_from():
    class Mixin:
        def on_train_step_ended(self, run_context):
            pass

    class Mine(Mixin, Callback):
        pass

    with pytest.raises(UnknownEventError, match=r"Mine\.on_train_step_ended"):
        EventBus([Mine()])


def test_a_wrong_name_is_found_on_the_instance():
    callback = Callback()
    callback.on_train_step_ended = lambda run_context: None
    with pytest.raises(UnknownEventError, match=r"Callback\.on_train_step_ended"):
        EventBus([callback])


def test_private_names_and_plain_values_are_free():
    class Mine(Callback):
        on_gpu = True

        def _on_anything(self):
            raise AssertionError("a private method is nobody's hook")

        def onwards(self):
            raise AssertionError("this name has no on_ before it")

    assert EventBus([Mine()]).describe() == "no listeners"


# Signatures.


@pytest.mark.parametrize(
    ("event", "hook", "expected"),
    [
        ("on_train_end", lambda self: None, r"\(run_context\)"),
        ("on_train_end", lambda self, run_context, more: None, r"\(run_context\)"),
        ("on_train_end", lambda self, *, run_context: None, r"\(run_context\)"),
        ("on_teardown", lambda self, run_context, error: None, r"\(run_context\)"),
        ("on_exception", lambda self, run_context: None, r"\(run_context, error\)"),
        ("on_exception", lambda self, run_context, error, more: None, r"\(run_context, error\)"),
        ("step_end", lambda self: None, r"\(run_context\)"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_at_registration(event, hook, expected):
    with pytest.raises(ArgumentTypeError, match=rf"Duck\.{event} has to take {expected}"):
        EventBus([duck(**{event: hook})])


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, run_context: self.seen.append(run_context),
        lambda self, run_context, verbose=False: self.seen.append(run_context),
        lambda self, *args, **kwargs: self.seen.append(args[0]),
        lambda self, anything: self.seen.append(anything),
    ],
    ids=["plain", "with a default", "open", "other name"],
)
def test_a_hook_that_takes_a_context_is_accepted(hook):
    callback = duck(on_train_end=hook, seen=[])
    bus = EventBus([callback])
    context = dispatch(bus, Event.TRAIN_END)
    assert callback.seen == [context]


# Who listens.


@pytest.mark.parametrize("event", Event, ids=str)
def test_the_base_classs_own_methods_are_not_hooks(event):
    assert EventBus([Callback()]).emitter(event) is None


# Only ``RunEngine.close`` has an error to pass on.
@pytest.mark.parametrize("event", [event for event in Event if event is not Event.EXCEPTION], ids=str)
@pytest.mark.parametrize("bases", [(), (Callback,)], ids=["duck", "subclass"])
def test_an_overridden_method_is_called_once_with_the_context(event, bases):
    seen = []
    kind = type("Mine", bases, {event.value: lambda self, *args: seen.append(args)})
    bus = EventBus([kind()])
    context = dispatch(bus, event)
    assert seen == [(context,)]
    assert [e for e in Event if bus.emitter(e) is not None] == [event]


def test_an_override_on_the_instance_is_a_hook_and_hides_the_classs():
    seen = []

    class Mine(Callback):
        def on_train_end(self, run_context):
            seen.append("class")

    mine = Mine()
    mine.on_train_end = lambda run_context: seen.append("instance")
    dispatch(EventBus([mine]), Event.TRAIN_END)
    assert seen == ["instance"]


def test_an_override_on_an_instance_of_the_base_class_is_a_hook():
    seen, callback = [], Callback()
    callback.on_train_end = seen.append
    context = dispatch(EventBus([callback]), Event.TRAIN_END)
    assert seen == [context]


def test_a_hook_inherited_from_the_users_own_base_class_is_a_hook():
    class Base(Callback):
        def on_train_end(self, run_context):
            self.seen = run_context

    class Mine(Base):
        pass

    mine = Mine()
    context = dispatch(EventBus([mine]), Event.TRAIN_END)
    assert mine.seen is context


def test_a_hook_set_to_none_is_switched_off():
    class Base(Callback):
        def on_train_end(self, run_context):
            raise AssertionError("it was switched off")

    class Mine(Base):
        on_train_end = None

    assert EventBus([Mine()]).emitter(Event.TRAIN_END) is None


def test_static_methods_class_methods_and_callable_attributes_are_hooks():
    seen = []

    class Mine:
        on_train_begin = staticmethod(lambda run_context: seen.append("static"))
        on_train_end = classmethod(lambda cls, run_context: seen.append(cls.__name__))

        def __init__(self):
            self.on_train_step_end = functools.partial(self.note, "partial")

        def note(self, text, run_context):
            seen.append(text)

    bus = EventBus([Mine()])
    for event in (Event.TRAIN_BEGIN, Event.TRAIN_STEP_END, Event.TRAIN_END):
        dispatch(bus, event)
    assert seen == ["static", "partial", "Mine"]


class NativeBase:
    """Stands for a framework's own callback class, whose methods do nothing of interest here."""

    def on_train_end(self, run_context):
        raise AssertionError("what a native base does by itself is not a hook")

    def on_eval_end(self, run_context):
        raise AssertionError("what a native base does by itself is not a hook")


def test_what_a_native_base_class_brings_along_is_not_a_hook():
    class Mine(NativeBase):
        def on_train_end(self, run_context):
            self.seen = run_context

    mine = Mine()
    bus = EventBus([NativeBase(), mine], native_bases=(NativeBase,))
    context = dispatch(bus, Event.TRAIN_END)
    assert mine.seen is context
    assert bus.emitter(Event.EVAL_END) is None


# Aliases.


@pytest.mark.parametrize(("alias", "events"), ALIASES.items(), ids=list(ALIASES))
def test_an_alias_is_called_for_its_events_and_no_others(alias, events):
    seen = []
    callback = duck(**{alias: lambda self, run_context: seen.append(run_context.event)})
    with pytest.warns(UserWarning, match=rf"Duck .*\b{alias} \({', '.join(map(str, events))}\)"):
        bus = EventBus([callback])
    for event in Event:
        dispatch(bus, event)
    assert seen == list(events)


@pytest.mark.parametrize(("alias", "events"), ALIASES.items(), ids=list(ALIASES))
def test_the_events_own_name_wins_over_an_alias_and_nothing_is_called_twice(alias, events):
    seen = []
    methods = {event.value: lambda self, run_context: seen.append("own") for event in events}
    callback = duck(**methods, **{alias: lambda self, run_context: seen.append("alias")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bus = EventBus([callback])
    for event in Event:
        dispatch(bus, event)
    assert seen == ["own"] * len(events)


def test_an_alias_still_serves_the_event_that_has_no_method_of_its_own():
    seen = []
    callback = duck(
        on_train_end=lambda self, run_context: seen.append(("own", run_context.event)),
        end=lambda self, run_context: seen.append(("alias", run_context.event)),
    )
    with pytest.warns(UserWarning, match=r"end \(on_eval_end\)"):
        bus = EventBus([callback])
    dispatch(bus, Event.TRAIN_END)
    dispatch(bus, Event.EVAL_END)
    assert seen == [("own", Event.TRAIN_END), ("alias", Event.EVAL_END)]


def test_of_two_aliases_for_an_event_the_more_particular_one_is_called():
    seen = []
    callback = duck(
        on_step_end=lambda self, run_context: seen.append("on_step_end"),
        step_end=lambda self, run_context: seen.append("step_end"),
    )
    with pytest.warns(
        UserWarning, match=r"on_step_end \(on_train_step_end\); step_end \(on_eval_step_end\)"
    ):
        bus = EventBus([callback])
    dispatch(bus, Event.TRAIN_STEP_END)
    dispatch(bus, Event.EVAL_STEP_END)
    assert seen == ["on_step_end", "step_end"]


def test_aliases_warn_once_per_class():
    kinds = [type(name, (), {"step_end": lambda self, run_context: None}) for name in ("One", "Two")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in (*kinds, *kinds):
            EventBus([kind(), kind()])
    assert [str(w.message).split()[0] for w in caught] == ["One", "Two"]


# Dispatch.


def test_the_order_of_the_list_is_the_order_of_calls():
    seen = []

    class Mine(Callback):
        def __init__(self, name):
            self.name = name

        def on_train_step_end(self, run_context):
            seen.append(self.name)

    one, two = Mine("one"), Mine("two")
    dispatch(EventBus([two, one, two]), Event.TRAIN_STEP_END)
    assert seen == ["two", "one", "two"]


@pytest.mark.parametrize("event", [e for e in Event if e is not Event.EXCEPTION], ids=str)
def test_the_context_tells_which_event_is_being_dispatched(event):
    seen = []
    bus = EventBus([duck(**{event.value: lambda self, run_context: seen.append(run_context.event)})])
    bus.emit(event, new_context())
    assert seen == [event]


def test_emitting_to_nobody_does_nothing():
    context = new_context()
    EventBus([Callback()]).emit(Event.TRAIN_BEGIN, context)
    assert context.event is None


def test_an_error_ends_the_event_and_says_who_raised_it_and_when():
    seen = []

    class First(Callback):
        def on_train_step_end(self, run_context):
            seen.append("first")

    class Failing(Callback):
        def on_train_step_end(self, run_context):
            raise RuntimeError("boom")

    class Last(Callback):
        def on_train_step_end(self, run_context):
            seen.append("last")

    bus = EventBus([First(), Failing(), Last()])
    with pytest.raises(RuntimeError) as caught:
        bus.emit(Event.TRAIN_STEP_END, new_context(step=3, epoch=2))
    assert str(caught.value) == "boom"
    assert seen == ["first"]
    assert len(notes_of(caught.value)) == 1
    for part in ("Failing", "on_train_step_end", "step 3", "epoch 2"):
        assert part in notes_of(caught.value)[0]


def test_an_error_in_an_alias_is_attributed_to_the_event():
    class Legacy:
        def step_end(self, run_context):
            raise RuntimeError("boom")

    with pytest.warns(UserWarning, match="step_end"):
        bus = EventBus([Legacy()])
    with pytest.raises(RuntimeError) as caught:
        bus.emit(Event.EVAL_STEP_END, new_context())
    assert "Legacy" in notes_of(caught.value)[0]
    assert "on_eval_step_end" in notes_of(caught.value)[0]


def test_an_error_in_a_shared_function_is_attributed_to_the_callback_at_hand():
    calls = []

    def shared(run_context):
        calls.append(run_context)
        if len(calls) == 2:
            raise RuntimeError("boom")

    class Innocent(Callback):
        on_train_end = staticmethod(shared)

    class Guilty(Callback):
        on_train_end = staticmethod(shared)

    with pytest.raises(RuntimeError) as caught:
        EventBus([Innocent(), Guilty()]).emit(Event.TRAIN_END, new_context())
    assert "Guilty" in notes_of(caught.value)[0]
    assert "Innocent" not in notes_of(caught.value)[0]


# Capabilities.


def test_a_callback_that_needs_what_the_engine_lacks_is_refused_in_one_sentence():
    class Greedy(Callback):
        needs = frozenset({Capability.STEP_EVENTS})

    with pytest.raises(CapabilityError) as caught:
        EventBus([Callback(), Greedy()]).check_needs(frozenset(), "MindSpore GRAPH mode")
    for part in ("Greedy", "step_events", "MindSpore GRAPH mode", "remove the callback"):
        assert part in str(caught.value)


def test_the_refusal_lists_what_the_engine_has():
    class Greedy(Callback):
        needs = frozenset({Capability.MANUAL_OPTIMIZATION})

    with pytest.raises(CapabilityError, match="it has step_events"):
        EventBus([Greedy()]).check_needs(frozenset({Capability.STEP_EVENTS}), "PyTorch")


def test_of_several_needs_the_first_by_name_is_refused_in_every_process():
    """Sets of names have another order in each process, and a message should not."""

    class Greedy(Callback):
        needs = frozenset(Capability)

    with pytest.raises(CapabilityError, match=f"Greedy needs {min(map(str, Capability))},.*it has none"):
        EventBus([Greedy()]).check_needs(frozenset(), "PyTorch")


def test_met_needs_and_callbacks_without_needs_pass():
    class Modest(Callback):
        needs = frozenset({Capability.STEP_EVENTS})

    bus = EventBus([Modest(), Callback(), duck(on_train_end=lambda self, run_context: None)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bus.check_needs(frozenset({Capability.STEP_EVENTS}), "PyTorch")


# Describing.


def test_describe_tells_who_is_called_when_in_order():
    class One(Callback):
        def on_train_end(self, run_context):
            pass

        def on_train_begin(self, run_context):
            pass

    class Two(Callback):
        def on_train_end(self, run_context):
            pass

    assert EventBus([Two(), One()]).describe().splitlines() == [
        "on_train_begin  One",
        "on_train_end    Two, One",
    ]


def test_the_repr_of_a_bus_shows_its_callbacks():
    assert repr(EventBus([Callback(), Callback()])) == "EventBus([Callback(), Callback()])"


# The way in and the way out.


class Journal(Callback):
    """Note what happens to it in a list that several share."""

    def __init__(self, name, events, fails=(), swallows=False):
        self.name = name
        self.events = events
        self.fails = fails
        self.swallows = swallows

    def _note(self, what, *more):
        self.events.append((self.name, what, *more))
        if what in self.fails:
            raise self.failure(what)

    def failure(self, what):
        return OSError(f"{what} of {self.name}")

    def __enter__(self):
        self._note("enter")

    def __exit__(self, *details):
        self._note("exit", *details)
        return self.swallows

    def on_exception(self, run_context, error):
        self._note("exception", error)

    def on_teardown(self, run_context):
        self._note("teardown")


def three(fails=(), swallows=False):
    """Return the callbacks a, b, c, of which b misbehaves, and the list that they write to."""
    events = []
    callbacks = [Journal("a", events), Journal("b", events, fails, swallows), Journal("c", events)]
    return callbacks, events


def brief(events):
    """Return the events without their arguments."""
    return [f"{name} {what}" for name, what, *_ in events]


ENTER = ["a enter", "b enter", "c enter"]
EXCEPTION = ["a exception", "b exception", "c exception"]
TEARDOWN = ["c teardown", "b teardown", "a teardown"]
EXIT = ["c exit", "b exit", "a exit"]


def exits_of(events):
    return [details for _, what, *details in events if what == "exit"]


def new_engine(callbacks):
    """Return a run of these callbacks that is at step 3 of its first epoch."""
    return RunEngine(callbacks, params={"mode": "train", "cur_step_num": 3, "cur_epoch_num": 1})


def run(callbacks, error=None, engine=None):
    """Go through a whole run, with an error inside if there is one, and return what came out."""
    try:
        with engine or new_engine(callbacks):
            if error is not None:
                raise error
    except BaseException as caught:
        return caught
    return None


def test_after_success_come_teardown_and_exit_in_reverse_order():
    callbacks, events = three()
    assert run(callbacks) is None
    assert brief(events) == ENTER + TEARDOWN + EXIT
    assert exits_of(events) == [[None, None, None]] * 3


# The last two mean something else to a generator, which the way out is not.
@pytest.mark.parametrize(
    "kind", [RuntimeError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit]
)
def test_after_an_error_come_on_exception_and_then_the_same_way_out(kind):
    callbacks, events = three()
    error = kind("boom")
    assert run(callbacks, error) is error
    assert brief(events) == ENTER + EXCEPTION + TEARDOWN + EXIT
    assert [details for _, what, *details in events if what == "exception"] == [[error]] * 3
    for details in exits_of(events):
        assert details[:2] == [kind, error]
        assert details[2] is not None


class FalsyError(Exception):
    """An error that is false in a condition, as one that holds an empty collection is."""

    def __len__(self):
        return 0


def test_an_error_that_is_false_is_still_an_error():
    callbacks, events = three()
    error = FalsyError("boom")
    assert run(callbacks, error) is error
    assert brief(events) == ENTER + EXCEPTION + TEARDOWN + EXIT
    assert [details[:2] for details in exits_of(events)] == [[FalsyError, error]] * 3


def test_an_error_keeps_its_traceback():
    def deep_inside():
        raise RuntimeError("boom")

    callbacks, _ = three()
    with pytest.raises(RuntimeError, match="boom") as caught:
        with new_engine(callbacks):
            deep_inside()
    assert caught.traceback[-1].name == "deep_inside"


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_truthy_exit_does_not_swallow(error):
    callbacks, events = three(swallows=True)
    assert run(callbacks, error) is error
    assert [details[1] for details in exits_of(events)] == [error] * 3


@pytest.mark.parametrize("place", ["exception", "teardown", "exit"])
def test_a_failure_on_the_way_out_leaves_the_original_error_with_a_note(place):
    callbacks, events = three(fails=(place,))
    error = RuntimeError("boom")
    assert run(callbacks, error) is error
    assert brief(events) == ENTER + EXCEPTION + TEARDOWN + EXIT
    assert [details[1] for details in exits_of(events)] == [error] * 3
    assert [note for note in notes_of(error) if f"OSError: {place} of b" in note]


def test_every_failure_on_the_way_out_has_its_note():
    callbacks, _ = three(fails=("exception", "teardown", "exit"))
    error = RuntimeError("boom")
    assert run(callbacks, error) is error
    text = "\n".join(notes_of(error))
    assert text.index("exception of b") < text.index("teardown of b") < text.index("exit of b")


def test_raising_the_same_error_again_changes_nothing():
    class Again(Callback):
        def on_exception(self, run_context, error):
            raise error

        def __exit__(self, kind, error, traceback):
            raise error

    callbacks, events = three()
    error = RuntimeError("boom")
    assert run([*callbacks, Again()], error) is error
    assert brief(events) == ENTER + EXCEPTION + TEARDOWN + EXIT
    assert not [note for note in notes_of(error) if "on the way out" in note]


def test_a_failing_teardown_after_success_is_the_error_that_arrives():
    callbacks, events = three(fails=("teardown",))
    error = run(callbacks)
    assert (type(error), str(error)) == (OSError, "teardown of b")
    assert brief(events) == ENTER + TEARDOWN + EXIT
    assert [details[:2] for details in exits_of(events)] == [[OSError, error]] * 3


def test_a_failing_teardown_after_success_says_who_and_when():
    callbacks, _ = three(fails=("teardown",))
    text = "\n".join(notes_of(run(callbacks)))
    for part in ("Journal", "on_teardown", "step 3"):
        assert part in text


def test_a_failing_exit_after_success_is_the_error_that_arrives():
    callbacks, events = three(fails=("exit",))
    error = run(callbacks)
    assert (type(error), str(error)) == (OSError, "exit of b")
    assert brief(events) == ENTER + TEARDOWN + EXIT
    assert [details[1] for details in exits_of(events)] == [None, None, error]


def test_the_first_failure_after_success_wins_and_notes_the_second():
    callbacks, _ = three(fails=("teardown", "exit"))
    error = run(callbacks)
    assert str(error) == "teardown of b"
    assert [note for note in notes_of(error) if "OSError: exit of b" in note]


def test_a_failing_enter_leaves_the_callbacks_that_were_entered():
    callbacks, events = three(fails=("enter",))
    error = run(callbacks)
    assert (type(error), str(error)) == (OSError, "enter of b")
    assert brief(events) == ["a enter", "b enter", *EXCEPTION, *TEARDOWN, "a exit"]
    assert [details[:2] for details in exits_of(events)] == [[OSError, error]]


def test_teardown_comes_also_where_the_first_callback_could_not_be_entered():
    events = []
    callbacks = [Journal("a", events, fails=("enter",)), Journal("b", events), Journal("c", events)]
    error = run(callbacks)
    assert str(error) == "enter of a"
    assert brief(events) == ["a enter", *EXCEPTION, *TEARDOWN]


def test_the_body_does_not_run_where_a_callback_could_not_be_entered():
    callbacks, _ = three(fails=("enter",))
    body = []
    with pytest.raises(OSError, match="enter of b"):
        with new_engine(callbacks):
            body.append("ran")
    assert body == []


def test_raise_after_arrives_after_a_normal_end_and_every_exit_sees_it():
    callbacks, events = three()
    engine, pruned = new_engine(callbacks), ArgumentValueError("pruned")
    engine.context.request_stop("pruned", raise_after=pruned)
    assert run(callbacks, engine=engine) is pruned
    assert brief(events) == ENTER + TEARDOWN + EXIT
    assert [details[:2] for details in exits_of(events)] == [[ArgumentValueError, pruned]] * 3


def test_the_first_raise_after_is_the_one_that_arrives():
    first, second, engine = ValueError("first"), ValueError("second"), new_engine([Callback()])
    engine.context.request_stop()
    engine.context.request_stop(raise_after=first)
    engine.context.request_stop(raise_after=second)
    assert run([Callback()], engine=engine) is first


def test_an_error_goes_before_raise_after():
    callbacks, events = three()
    engine, error = new_engine(callbacks), RuntimeError("boom")
    engine.context.request_stop(raise_after=ValueError("pruned"))
    assert run(callbacks, error, engine) is error
    assert [details[1] for details in exits_of(events)] == [error] * 3


@pytest.mark.parametrize("place", ["teardown", "exit"])
def test_a_failure_on_the_way_out_leaves_raise_after_with_a_note(place):
    callbacks, _ = three(fails=(place,))
    engine, pruned = new_engine(callbacks), ValueError("pruned")
    engine.context.request_stop(raise_after=pruned)
    assert run(callbacks, engine=engine) is pruned
    assert [note for note in notes_of(pruned) if f"OSError: {place} of b" in note]


def test_a_stop_without_raise_after_is_an_ordinary_end():
    callbacks, events = three()
    engine = new_engine(callbacks)
    engine.context.request_stop("patience ran out")
    assert run(callbacks, engine=engine) is None
    assert exits_of(events) == [[None, None, None]] * 3


def test_the_context_tells_exception_and_teardown_apart():
    seen = []

    class Mine(Callback):
        def on_exception(self, run_context, error):
            seen.append(run_context.event)

        def on_teardown(self, run_context):
            seen.append(run_context.event)

    run([Mine()], RuntimeError("boom"))
    assert seen == [Event.EXCEPTION, Event.TEARDOWN]


def test_objects_without_enter_and_exit_are_torn_down_too():
    seen = []
    callback = duck(on_teardown=lambda self, run_context: seen.append(run_context))
    engine = new_engine([callback])
    assert run([callback], engine=engine) is None
    assert seen == [engine.context]


def test_one_list_of_callbacks_serves_a_second_run():
    callbacks, events = three()
    for _ in range(2):
        with new_engine(callbacks):
            events.append(("body", "ran"))
    assert brief(events) == 2 * [*ENTER, "body ran", *TEARDOWN, *EXIT]


# The base class.


def test_a_repr_shows_the_settings():
    class Mine(Callback):
        def __init__(self, every, *, name="x", hidden=None):
            self.every = every
            self.name = name

    class Positional(Callback):
        def __init__(self, every, /):
            self.every = every

    assert repr(Mine(3)) == "Mine(every=3, name='x')"
    assert repr(Positional(3)) == "Positional(3)"
    assert repr(Callback()) == "Callback()"


def test_a_stateless_callback_saves_an_empty_state_and_takes_it_back():
    callback = Callback()
    assert callback.state_dict() == {}
    assert callback.load_state_dict({}) is None


def test_the_base_class_enters_as_itself_and_swallows_nothing():
    callback = Callback()
    assert callback.__enter__() is callback
    assert not callback.__exit__(RuntimeError, RuntimeError("boom"), None)
