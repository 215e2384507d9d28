"""A callback that records every event, and the check of what it recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.events import LIFECYCLE, Event


class TracedEvent(NamedTuple):
    """The state of a run at one event."""

    event: str
    epoch: int | None
    step: int | None
    batch_num: Any
    mode: str | None
    keys: frozenset[str]
    """The parameters that existed."""


class RecordingCallback(Callback):
    """Record every event of a run, in order, as ``trace``."""

    def __init__(self) -> None:
        self.trace: list[TracedEvent] = []

    def _record(self, event: Event, run_context: Any) -> None:
        params = run_context.original_args()
        self.trace.append(
            TracedEvent(
                event.value,
                params.get("cur_epoch_num"),
                params.get("cur_step_num"),
                params.get("batch_num"),
                params.get("mode"),
                frozenset(params),
            )
        )

    @property
    def names(self) -> list[str]:
        """The events' names alone."""
        return [traced.event for traced in self.trace]


def _recorder(event: Event) -> Callable[..., None]:
    def hook(self: RecordingCallback, run_context: RunContext, *error: BaseException) -> None:
        self._record(event, run_context)

    hook.__name__ = event.value
    return hook


for _event in (*LIFECYCLE, Event.EXCEPTION, Event.TEARDOWN):
    setattr(RecordingCallback, _event.value, _recorder(_event))


def assert_trace(recording: RecordingCallback, expected: Iterable[Any]) -> None:
    """Check a recorded trace, and report the first difference.

    Args:
        recording: The callback that recorded.
        expected: For each event its name, or a tuple that is compared with the beginning of
            ``(event, epoch, step, batch_num, mode, keys)``.

    Raises:
        AssertionError: Names the first event that differs, with the ones before it.
    """
    wanted = [
        (e.value,) if isinstance(e, Event) else (e,) if isinstance(e, str) else tuple(e) for e in expected
    ]
    seen = [tuple(traced) for traced in recording.trace]
    for i, want in enumerate(wanted):
        got = seen[i][: len(want)] if i < len(seen) else "the end"
        if got != want:
            raise AssertionError(
                f"event {i}: expected {want}, got {got}; before it: {recording.names[:i][-5:]}"
            )
    if len(seen) > len(wanted):
        raise AssertionError(f"expected the end after {len(wanted)} events, got {seen[len(wanted)]}")
