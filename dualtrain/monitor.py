"""Track a metric's best value and the observations without improvement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dualtrain.errors import ArgumentTypeError, ArgumentValueError

PREFIXES = ("val_", "eval_")
SYNONYMS = {"accuracy": "acc"}


def find_metric(name: str, results: Mapping[str, Any]) -> Any:
    """Return the evaluation result of a name.

    ``val_x``, ``eval_x`` and ``x`` are the same metric, and so are ``acc`` and ``accuracy``.
    An exact match takes precedence.

    Raises:
        KeyError: There is no such result; the message lists the available ones.
    """
    if name in results:
        return results[name]
    for key, value in results.items():
        if _bare(key) == _bare(name):
            return value
    raise KeyError(f"no metric {name!r} in the evaluation; available: {', '.join(results) or 'none'}")


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return SYNONYMS.get(name, name)


class Monitor:
    """Keep the best value of a metric and count the observations without improvement.

    Args:
        name: The metric's name; determines the mode if ``mode`` is None.
        mode: ``"min"`` or ``"max"``. None: ``"min"`` for names containing ``loss``, ``error``,
            ``mae``, ``mse`` or ``perplexity``, otherwise ``"max"``.
        min_delta: A value is an improvement only if it exceeds the best by more than this.
        patience: Observations without improvement after which the monitor is exhausted;
            0 means after the first.
    """

    def __init__(
        self, name: str, mode: str | None = None, min_delta: float = 0.0, patience: int = 0
    ) -> None:
        if mode not in (None, "min", "max"):
            raise ArgumentValueError(f"mode must be 'min', 'max' or None, but got {mode!r}.")
        if isinstance(patience, bool) or not isinstance(patience, int):
            raise ArgumentTypeError(f"patience takes an integer, but got {patience!r}.")
        if patience < 0 or not 0 <= min_delta < math.inf:
            raise ArgumentValueError(
                f"patience and min_delta must not be negative, but got {patience} and {min_delta}."
            )
        self.name = name
        self.mode = mode or self._mode_of(name)
        self.min_delta = min_delta
        self.patience = patience
        self.best: float | None = None
        """The best finite value so far; None before the first."""
        self.waited = 0
        """Observations since the last improvement."""

    @staticmethod
    def _mode_of(name: str) -> str:
        lower = name.lower()
        falls = ("loss", "error", "mae", "mse", "perplexity")
        return "min" if any(word in lower for word in falls) else "max"

    def improved(self, value: float) -> bool:
        """Observe a value and return whether it is an improvement.

        NaN and infinities are never an improvement.
        """
        if math.isfinite(value) and (self.best is None or self._gain(value) > self.min_delta):
            self.best = value
            self.waited = 0
            return True
        self.waited += 1
        return False

    def _gain(self, value: float) -> float:
        assert self.best is not None
        return self.best - value if self.mode == "min" else value - self.best

    @property
    def exhausted(self) -> bool:
        """Whether the last ``patience`` observations were no improvement."""
        return self.waited >= max(self.patience, 1)

    def reset(self) -> None:
        """Clear all observations."""
        self.best, self.waited = None, 0
