"""The event bus: registration of callbacks with its checks, the dispatch plan, and the dispatch."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakSet

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, CapabilityError, UnknownEventError
from dualtrain.events import ALIASES, Event
from dualtrain.protocol import CAPABILITY_ADVICE, EVENT_CAPABILITY, Capability

Hook = Callable[..., Any]

_ADVICE = "remove the callback or run it in a mode that has it"
_warned_classes: WeakSet[type] = WeakSet()


class Emitter:
    """The listeners of one event."""

    __slots__ = ("calls", "event")

    def __init__(self, event: Event, hooks: Sequence[tuple[Any, Hook]]) -> None:
        self.event = event
        self.calls = tuple(hooks)

    def emit(self, context: RunContext) -> None:
        """Call every hook, in list order. Costs one Python call and one more for each hook."""
        context.event = self.event
        owner = None
        try:
            for owner, hook in self.calls:  # noqa: B007 - read where an error is caught
                hook(context)
        except BaseException as error:
            _add_note(error, f"raised in {_where(owner, self.event, context)}")
            raise


class TimedEmitter(Emitter):
    """An emitter that adds up how long the hooks of each callback take.

    Args:
        event, hooks: As for ``Emitter``.
        times: Class name -> seconds, added to.
    """

    __slots__ = ("times",)

    def __init__(self, event: Event, hooks: Sequence[tuple[Any, Hook]], times: dict[str, float]) -> None:
        super().__init__(event, [(owner, self._timed(owner, hook)) for owner, hook in hooks])
        self.times = times

    def _timed(self, owner: Any, hook: Hook) -> Hook:
        name = _name(owner)

        def timed(context: RunContext, *error: BaseException) -> None:
            begin = perf_counter()
            try:
                hook(context, *error)
            finally:
                self.times[name] = self.times.get(name, 0.0) + perf_counter() - begin

        return timed


class Dispatch:
    """Call the listeners of events.

    Args:
        emitters: Event -> its emitter, for the events that have listeners.
    """

    def __init__(self, emitters: Mapping[Event, Emitter]) -> None:
        self._emitters = dict(emitters)

    def emitter(self, event: Event) -> Callable[[RunContext], None] | None:
        """Return the function that calls the listeners of an event, or None where there is no listener."""
        emitter = self._emitters.get(event)
        return None if emitter is None else emitter.emit

    def emit(self, event: Event, context: RunContext) -> None:
        """Call the listeners of an event. Loops keep the ``emitter`` of frequent events instead."""
        emitter = self._emitters.get(event)
        if emitter is not None:
            emitter.emit(context)


class EventBus(Dispatch):
    """Dispatch events to callbacks, in the order of the list.

    Args:
        callbacks: One callback, a list or tuple of them, or None.
        native_bases: Callback base classes of frameworks: a method that a callback merely inherits
            from one of these is not a hook.

    Attributes:
        callback_times: Class name -> seconds in its hooks; None where no callback needs
            ``Capability.CALLBACK_TIMES``.

    Raises:
        ArgumentTypeError: An item of the list is not a callback, or a hook cannot take
            ``(run_context)``.
        UnknownEventError: A callback has a public ``on_*`` method that names no event.
    """

    def __init__(self, callbacks: Any = None, *, native_bases: tuple[type, ...] = ()) -> None:
        self.callbacks = as_callbacks(callbacks)
        bases = (Callback, *native_bases)
        plan: dict[Event, list[tuple[Any, Hook]]] = {event: [] for event in Event}
        for callback in self.callbacks:
            for event, hook in _hooks_of(callback, bases).items():
                plan[event].append((callback, hook))
        times: dict[str, float] | None = {} if Capability.CALLBACK_TIMES in self.asked_for() else None
        self.callback_times = times
        super().__init__(
            {
                event: Emitter(event, hooks) if times is None else TimedEmitter(event, hooks, times)
                for event, hooks in plan.items()
                if hooks
            }
        )

    def part(self, callbacks: Sequence[Any]) -> Dispatch:
        """Return the dispatch to some of the callbacks alone."""
        members = set(map(id, callbacks))
        parts = {
            event: Emitter(event, [call for call in emitter.calls if id(call[0]) in members])
            for event, emitter in self._emitters.items()
        }
        return Dispatch({event: emitter for event, emitter in parts.items() if emitter.calls})

    def asked_for(self) -> frozenset[Capability]:
        """Return the capabilities that callbacks need, and those that they use if available."""
        return frozenset(
            capability
            for callback in self.callbacks
            for attribute in ("needs", "wants")
            for capability in getattr(callback, attribute, ())
        )

    def check_needs(self, capabilities: frozenset[Capability], mode: str) -> None:
        """Refuse callbacks that need a capability which the engine lacks.

        Args:
            capabilities: The capabilities of the run.
            mode: The engine and its mode in words, for the message.

        Raises:
            CapabilityError: Names callback, capability and mode, and says what to do.
        """
        for callback in self.callbacks:
            for capability in sorted(getattr(callback, "needs", ()), key=str):
                if capability not in capabilities:
                    raise CapabilityError(
                        f"{_name(callback)} needs {capability}, which {mode} does not have; "
                        f"it has {', '.join(sorted(map(str, capabilities))) or 'none'}: "
                        f"{CAPABILITY_ADVICE.get(capability, _ADVICE)}."
                    )
        for event, capability in EVENT_CAPABILITY.items():
            emitter = self._emitters.get(event)
            if emitter is not None and capability not in capabilities:
                owners = ", ".join(_name(owner) for owner, _ in emitter.calls)
                raise CapabilityError(
                    f"{event} of {owners} would never be called: {mode} has no {capability}; "
                    f"remove the method, or run in a mode that has it."
                )

    def emit_to_each(
        self, event: Event, error: BaseException | None, context: RunContext, *extra: Any
    ) -> BaseException | None:
        """Call every listener, also after one that failed; ``on_exception`` in list order, others reversed.

        Args:
            event: The event.
            error: The error on the way out, if there is one.
            context: The run's context.
            *extra: Further arguments of the hooks.

        Returns:
            The first error.
        """
        context.event = event
        emitter = self._emitters.get(event)
        calls = () if emitter is None else emitter.calls
        for owner, hook in calls if event is Event.EXCEPTION else reversed(calls):
            error = attempt(error, _where(owner, event, context), hook, context, *extra)
        return error

    def leave(self, callback: Any, error: BaseException | None) -> BaseException | None:
        """Call a callback's ``__exit__``, if it has one; return the first error."""
        leave = getattr(callback, "__exit__", None)
        if leave is None:
            return error
        details = (None,) * 3 if error is None else (type(error), error, error.__traceback__)
        return attempt(error, f"{_name(callback)}.__exit__", leave, *details)

    def describe(self) -> str:
        """Return the listeners of each event, a line per event, in call order."""
        width = max((len(e) for e in self._emitters), default=0)
        lines = [
            f"{event.value:<{width}}  {', '.join(_name(owner) for owner, _ in emitter.calls)}"
            for event, emitter in self._emitters.items()
        ]
        return "\n".join(lines) or "no listeners"

    def __repr__(self) -> str:
        return f"EventBus({self.callbacks!r})"


def as_callbacks(callbacks: Any) -> list[Any]:
    """Return one callback, a list or tuple of them, or None as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _hooks_of(callback: Any, bases: tuple[type, ...]) -> dict[Event, Hook]:
    if isinstance(callback, type):
        raise ArgumentTypeError(
            f"{callback.__name__} in callbacks is a class, not an instance: pass {callback.__name__}(...)."
        )
    hooks: dict[Event, Hook] = {}
    aliases = []
    for name in _public_names(callback):
        unknown = name.startswith("on_") and name not in Event._value2member_map_ and name not in ALIASES
        if unknown and callable(getattr(callback, name)):
            raise UnknownEventError(_unknown(callback, name))
    for event in Event:
        if _defines(callback, event.value, bases):
            hooks[event] = _checked_hook(callback, event.value, event)
    for alias, events in ALIASES.items():
        if _defines(callback, alias, bases):
            missing = [event for event in events if event not in hooks]
            if missing:
                hook = _checked_hook(callback, alias, missing[0])
                hooks.update(dict.fromkeys(missing, hook))
                aliases.append(f"{alias} ({', '.join(map(str, missing))})")
    if not hooks and not isinstance(callback, bases):
        raise ArgumentTypeError(
            f"{callback!r} in callbacks is not a callback: {type(callback).__name__} has no method "
            f"that is named after an event, such as on_train_step_end(run_context)."
        )
    if aliases and type(callback) not in _warned_classes:
        _warned_classes.add(type(callback))
        warnings.warn(
            f"{_name(callback)} uses other names for events, which are called as: {'; '.join(aliases)}.",
            stacklevel=2,
        )
    return {event: hooks[event] for event in Event if event in hooks}


def _public_names(callback: Any) -> list[str]:
    names = set(getattr(callback, "__dict__", ()))
    for cls in type(callback).__mro__:
        names.update(vars(cls))
    return sorted(names)


def _defines(callback: Any, name: str, bases: tuple[type, ...]) -> bool:
    """Whether the instance, or a class of it other than the bases, has a callable of this name."""
    if name not in getattr(callback, "__dict__", ()):
        owner = next((cls for cls in type(callback).__mro__ if name in vars(cls)), None)
        if owner is None or owner in bases:
            return False
    return callable(getattr(callback, name))


def _checked_hook(callback: Any, name: str, event: Event) -> Hook:
    hook: Hook = getattr(callback, name)
    arguments = (None, None) if event is Event.EXCEPTION else (None,)
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError as error:
        expected = "(run_context, error)" if event is Event.EXCEPTION else "(run_context)"
        raise ArgumentTypeError(f"{_name(callback)}.{name} has to take {expected}, but {error}.") from None
    except ValueError:
        pass  # a builtin without a signature
    return hook


def _unknown(callback: Any, name: str) -> str:
    known = [event.value for event in Event] + [a for a in ALIASES if a.startswith("on_")]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the events are {', '.join(known)}."
    return (
        f"{_name(callback)}.{name} names no event and would never be called; {hint} "
        f"(Names that begin with _ are free.)"
    )


def _name(callback: Any) -> str:
    return type(callback).__name__


def _where(callback: Any, event: Event, context: RunContext) -> str:
    return f"{_name(callback)}.{event} at step {context.step}, epoch {context.epoch}"


def attempt(
    error: BaseException | None, where: str, action: Callable[..., Any], *args: Any
) -> BaseException | None:
    """Call an action on a run's way out; return the first error."""
    try:
        action(*args)
    except BaseException as failure:  # noqa: BLE001 - returned, and raised by the driver
        if error is None:
            error = failure
            _add_note(error, f"raised in {where}")
        elif failure is not error:
            _add_note(error, f"and on the way out, in {where}, {type(failure).__name__}: {failure}")
    return error


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)
