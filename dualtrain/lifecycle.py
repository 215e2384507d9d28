"""The way into a run and out of it: callbacks are entered, told of an error, torn down and left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualtrain.bus import EventBus, attempt
from dualtrain.context import RunContext
from dualtrain.errors import RunStateError
from dualtrain.events import Event

_in_open_runs: dict[int, Any] = {}
"""The callbacks of open runs, by ``id``."""


class Lifecycle:
    """Enter the callbacks of a run once, and leave them once, for every way in which the run can end.

    Args:
        bus: The callbacks.
        context: The run's context.

    Attributes:
        is_open: Whether the run has been entered and not left.
    """

    def __init__(self, bus: EventBus, context: RunContext) -> None:
        self._bus = bus
        self._context = context
        self._stages: list[Any] = []
        self._entered: list[Any] = []
        self._is_closed = False
        self.is_open = False

    def enter(self, stages: Sequence[Any], check: Callable[[], None]) -> None:
        """Enter the stages of the engine and then the callbacks, in order.

        Args:
            stages: Objects of the engine; those that have ``__enter__`` are entered.
            check: Refuses the run, before anything is entered.

        Raises:
            RunStateError: The run is open or has ended, or a callback is in another open run.
        """
        if self.is_open or self._is_closed:
            raise RunStateError(
                f"a run can be entered once, but this one {'has ended' if self._is_closed else 'is open'}: "
                f"make a new one."
            )
        check()
        callbacks = self._bus.callbacks
        for callback in callbacks:
            if id(callback) in _in_open_runs:
                raise RunStateError(
                    f"{type(callback).__name__} is in another open run: give each run callbacks of its own."
                )
        self.is_open = True
        _in_open_runs.update((id(callback), callback) for callback in callbacks)
        for stage in stages:
            if hasattr(stage, "__enter__"):
                stage.__enter__()
                self._stages.append(stage)
        for callback in callbacks:
            enter = getattr(callback, "__enter__", None)
            if enter is not None:
                enter()
            self._entered.append(callback)

    def leave(
        self, error: BaseException | None, at_success: Callable[[], BaseException | None]
    ) -> BaseException | None:
        """Leave the run. Never raises.

        An error goes to ``on_exception`` first; then comes ``on_teardown`` in reverse order, then each
        ``__exit__`` in reverse order, and last the engine's stages.

        Args:
            error: The error that has ended the run, if any.
            at_success: Returns the error to raise where there is none.

        Returns:
            The error to raise, with notes about failures on the way out; None for none.
        """
        if not self.is_open:
            return error
        self.is_open, self._is_closed = False, True
        if error is None:
            error = at_success()
        else:
            error = self._bus.emit_to_each(Event.EXCEPTION, error, self._context, error)
        error = self._bus.emit_to_each(Event.TEARDOWN, error, self._context)
        for callback in reversed(self._entered):
            error = self._bus.leave(callback, error)
        for stage in reversed(self._stages):
            details = (None,) * 3 if error is None else (type(error), error, error.__traceback__)
            error = attempt(error, f"{type(stage).__name__}.__exit__", stage.__exit__, *details)
        for callback in self._bus.callbacks:
            _in_open_runs.pop(id(callback), None)
        return error
