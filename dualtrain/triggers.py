"""When something is due: pure decisions, told the step, the epoch and the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from dualtrain.errors import ArgumentTypeError, ArgumentValueError


def positive_int(owner: str, name: str, value: int) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise naming ``owner`` and ``name``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{owner}({name}=...) takes an integer, but got {value!r}.")
    if value < 1:
        raise ArgumentValueError(f"{owner}({name}=...) must be at least 1, but got {value}.")
    return value


class Every:
    """Due whenever at least so many steps, epochs or seconds have passed since the last time.

    Give exactly one of the three. Counters are compared with the last multiple, so
    ``steps=10`` is due at 10, 20, 30; where steps come in chunks (data sunk to the device)
    it is due at the first step at least 10 after the last one, and never skipped.

    Args:
        steps: Steps between two times.
        epochs: Epochs between two times.
        seconds: Seconds between two times.
        clock: Where seconds come from; monotonic.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        intervals = {"steps": steps, "epochs": epochs, "seconds": seconds}
        given = [name for name, value in intervals.items() if value is not None]
        if len(given) != 1:
            raise ArgumentTypeError(
                f"Every takes exactly one of steps, epochs, seconds, but got {given or 'none'}."
            )
        if steps is not None:
            positive_int("Every", "steps", steps)
        if epochs is not None:
            positive_int("Every", "epochs", epochs)
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ArgumentValueError(f"Every(seconds=...) must be positive, but got {seconds!r}.")
        self.steps, self.epochs, self.seconds = steps, epochs, seconds
        self._clock = clock
        self.reset()

    def reset(self, *, step: int = 0, epoch: int = 0) -> None:
        """Start counting anew, as if the last time had been due by then."""
        if self.seconds is not None:
            self._last: float = self._clock()
        elif self.steps is not None:
            self._last = step - step % self.steps
        else:
            assert self.epochs is not None
            self._last = epoch - epoch % self.epochs

    @property
    def next_step(self) -> float:
        """The first step at which it is due, if it goes by steps; before it there is no need to ask."""
        assert self.steps is not None
        return self._last + self.steps

    def due(self, *, step: int = 0, epoch: int = 0) -> bool:
        """Tell whether it is time; if so, count from here."""
        if self.seconds is not None:
            now, interval = self._clock(), self.seconds
        elif self.steps is not None:
            now, interval = step, self.steps
        else:
            assert self.epochs is not None
            now, interval = epoch, self.epochs
        if now < self._last:  # the counter was restarted
            self._last = 0
        if now - self._last < interval:
            return False
        self._last = now
        return True

    def __repr__(self) -> str:
        for name in ("steps", "epochs", "seconds"):
            if getattr(self, name) is not None:
                return f"Every({name}={getattr(self, name)!r})"
        raise AssertionError("unreachable")


class At:
    """Due at the given steps, each once.

    Args:
        steps: Step numbers, from 1.
    """

    def __init__(self, *steps: int) -> None:
        for step in steps:
            positive_int("At", "steps", step)
        self.steps = tuple(sorted(set(steps)))
        self.reset()

    def reset(self, *, step: int = 0) -> None:
        """Start anew after ``step``."""
        self._left = [s for s in self.steps if s > step]

    def due(self, *, step: int) -> bool:
        """Tell whether one of the steps has been reached since the last call."""
        passed = [s for s in self._left if s <= step]
        del self._left[: len(passed)]
        return bool(passed)

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, self.steps))})"
