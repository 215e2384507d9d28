"""When something is due: pure decisions from the step and the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError


class Every:
    """Due whenever at least so many steps or seconds have passed since the last time.

    Give exactly one of the two. The step is compared with the last multiple, so
    ``steps=10`` is due at 10, 20, 30; where steps come in chunks (data sunk to the device)
    it is due at the first step at least 10 after the last one, and never skipped.

    Args:
        steps: Steps between two times.
        seconds: Seconds between two times.
        clock: Where seconds come from; monotonic.
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
        """Start counting anew, as if the last time had been due by then."""
        if self.seconds is not None:
            self._last: float = self._clock()
        else:
            assert self.steps is not None
            self._last = step - step % self.steps

    @property
    def next_step(self) -> float:
        """The first step at which it is due, if it goes by steps; before it there is no need to ask."""
        assert self.steps is not None
        return self._last + self.steps

    def due(self, *, step: int = 0) -> bool:
        """Tell whether it is time; if so, count from here."""
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
