"""Intervals in steps or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError


class Every:
    """A trigger that is due after an interval of steps or seconds.

    Exactly one of the two is required. Steps are counted from multiples of the interval, so
    ``steps=10`` is due at 10, 20, 30; if steps advance in chunks (data sinking) it is due at the
    first step at least 10 after the last one, and never skipped.

    Args:
        steps: Interval in steps.
        seconds: Interval in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        intervals = {"steps": steps, "seconds": seconds}
        given = [name for name, value in intervals.items() if value is not None]
        if len(given) != 1:
            raise ArgumentTypeError(
                f"Every takes exactly one of steps and seconds, but got {given or 'none'}."
            )
        if steps is not None:
            positive_int("Every", "steps", steps)
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ArgumentValueError(f"Every(seconds=...) must be positive, but got {seconds!r}.")
        self.steps, self.seconds = steps, seconds
        self._clock = clock
        self.reset()

    def reset(self, *, step: int = 0) -> None:
        """Restart the interval at a step or, with seconds, now."""
        if self.seconds is not None:
            self._last: float = self._clock()
        else:
            assert self.steps is not None
            self._last = step - step % self.steps

    @property
    def next_step(self) -> float:
        """The next step at which a trigger in steps is due."""
        assert self.steps is not None
        return self._last + self.steps

    def due(self, *, step: int = 0) -> bool:
        """Return whether the interval is over; if so, start the next one."""
        if self.seconds is not None:
            now, interval = self._clock(), self.seconds
        else:
            assert self.steps is not None
            now, interval = step, self.steps
        if now < self._last:  # the counter was restarted
            self._last = 0
        if now - self._last < interval:
            return False
        self._last = now
        return True

    def __repr__(self) -> str:
        return f"Every(seconds={self.seconds!r})" if self.steps is None else f"Every(steps={self.steps})"
