"""Compare the learning rate in use with the one that was intended."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError
from dualtrain.protocol import Rate

logger = logging.getLogger(__name__)


class LrCheck(Callback):
    """Name the first update whose learning rate is not the intended one.

    The first difference is logged as a warning and kept; training goes on. Put it before callbacks
    that change the rate at step end: behind them it sees the new rate already.

    Args:
        expected: The intended rate of each update, counted from 0: a function of the update's
            number, or a sequence. One rate is meant for every parameter group, a tuple has one for
            each. After a sequence's end nothing is checked.
        rtol: The relative difference that is tolerated; 1e-5 is what float32 rates need.

    Attributes:
        first_difference: ``(step, update, expected, actual)``, or None while there is none; ``step``
            counts batches from 1.

    Cost: one read of the rate per update until they part, then none. Events: train begin, train step end.
    """

    def __init__(self, expected: Callable[[int], Rate] | Sequence[Rate], *, rtol: float = 1e-5) -> None:
        if not callable(expected) and not isinstance(expected, Sequence):
            raise ArgumentTypeError(
                f"LrCheck takes a function of the update's number or a sequence, but got {expected!r}."
            )
        self.expected = expected
        self.rtol = rtol
        self.first_difference: tuple[int, int, Any, Any] | None = None
        self._checked = self._updates_before = 0
        self._resuming = False

    def on_train_begin(self, run_context: RunContext) -> None:
        if not self._resuming:
            self.first_difference, self._checked = None, 0
        self._resuming = False
        self._updates_before = self._checked

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self.first_difference is not None:
            return
        updates = self._updates_before + (run_context.global_step or 0)
        if updates == self._checked:  # a window goes on, or the update was skipped
            return
        self._checked = updates
        update = updates - 1
        if callable(self.expected):
            expected = self.expected(update)
        elif update < len(self.expected):
            expected = self.expected[update]
        else:
            return
        actual = run_context.lr
        if not self._agree(expected, actual):
            self.first_difference = (run_context.step or 0, update, expected, actual)
            logger.warning(
                "The learning rate of update %d (step %s) is %s, but %s was intended.",
                update,
                run_context.step,
                actual,
                expected,
            )

    def _agree(self, expected: Any, actual: Any) -> bool:
        """Whether each group has the intended rate: its own, or the one for all."""
        rates = actual if isinstance(actual, tuple) else (actual,)
        intended = expected if isinstance(expected, (tuple, list)) else (expected,) * len(rates)
        return len(intended) == len(rates) and all(
            rate is not None and math.isclose(rate, float(wanted), rel_tol=self.rtol)
            for rate, wanted in zip(rates, intended, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the first difference, and how many updates have been checked."""
        found = self.first_difference
        return {"first_difference": None if found is None else list(found), "checked": self._checked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there in the next run."""
        found = state["first_difference"]
        self.first_difference = None if found is None else (found[0], found[1], found[2], found[3])
        self._checked = state["checked"]
        self._resuming = True
