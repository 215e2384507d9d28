"""What both engines' steps have to say and to reckon alike."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.triggers import positive_int

logger = logging.getLogger(__name__)

EPSILON = 1e-6
"""Added to the norm that gradients are divided by when they are clipped, as torch does."""


def check_contract(accumulate_steps: Any, clip_norm: Any) -> None:
    """Check the numbers of the training contract."""
    positive_int("Model", "accumulate_steps", accumulate_steps)
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)):
        raise ArgumentTypeError(f"Model(clip_norm=...) takes a number or None, but got {clip_norm!r}.")
    if not 0 < clip_norm < float("inf"):
        raise ArgumentValueError(
            f"Model(clip_norm=...) has to be positive and finite, but got {clip_norm}."
        )


def norm_after_clipping(norm: float | None, clip_norm: float | None) -> float | None:
    """Return what clipping leaves of a norm."""
    if norm is None or clip_norm is None:
        return norm
    return norm * min(1.0, clip_norm / (norm + EPSILON))


def inside_window(filled: int, window: int) -> RunStateError:
    """Return the error for changing ``accumulate_steps`` at the wrong moment."""
    return RunStateError(
        f"accumulate_steps cannot change inside a window, of which {filled} of {window} batches are "
        f"done: set it in on_train_epoch_begin."
    )


def warn_of_dropped_window(filled: int, window: int) -> None:
    """Say that a stop has cut a window short."""
    logger.warning(
        "The run was stopped inside a window: the gradients of its %d batches, of %d, are dropped.",
        filled,
        window,
    )


def warn_of_batch_norm(names: Sequence[str], accumulate_steps: int) -> None:
    """Say that BatchNorm does not see a window as one batch.

    Args:
        names: The names of the BatchNorm layers.
        accumulate_steps: Batches per window.
    """
    if accumulate_steps == 1 or not names:
        return
    shown = ", ".join(name or "the network itself" for name in names[:3])
    warnings.warn(
        f"BatchNorm ({shown}{', ...' if len(names) > 3 else ''}) sees each batch of a window of "
        f"{accumulate_steps} by itself: its statistics are not those of one large batch.",
        stacklevel=5,
    )
