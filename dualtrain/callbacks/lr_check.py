"""Compare the actual learning rate with the expected one."""

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
    """Report the first update whose learning rate is not the expected one.

    The first difference is stored and logged as a warning; training continues. Place it in the list
    before callbacks that change the rate at step end; after them it would read the new rate.

    Args:
        expected: The expected rate of each update, counted from 0: a function of the update's
            number, or a sequence. A single rate applies to all parameter groups, a tuple has one per
            group. Updates after a sequence's end are not checked.
        rtol: Relative tolerance; rates in float32 need 1e-5.

    Attributes:
        first_difference: ``(step, update, expected, actual)``, or None if there is none; ``step``
            counts batches from 1.

    Cost: one read of the rate per update until the first difference. Events: train begin, train step end.
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
        if updates == self._checked:  # the window is not complete, or the update was skipped
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
        """Return whether each group has its expected rate."""
        rates = actual if isinstance(actual, tuple) else (actual,)
        intended = expected if isinstance(expected, (tuple, list)) else (expected,) * len(rates)
        return len(intended) == len(rates) and all(
            rate is not None and math.isclose(rate, float(wanted), rel_tol=self.rtol)
            for rate, wanted in zip(rates, intended, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the first difference and the number of checked updates."""
        found = self.first_difference
        return {"first_difference": None if found is None else list(found), "checked": self._checked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the next run continues from it."""
        found = state["first_difference"]
        self.first_difference = None if found is None else (found[0], found[1], found[2], found[3])
        self._checked = state["checked"]
        self._resuming = True
