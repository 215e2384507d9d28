"""A clock that tests set."""

from __future__ import annotations


class Clock:
    """A clock that stands still unless it is moved; binary fractions add up exactly."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let some seconds pass."""
        self.now += seconds
