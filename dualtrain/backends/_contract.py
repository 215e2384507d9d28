"""What both engines' steps have to say and to reckon alike."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError

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


def describe_nonfinite(
    *,
    parameter: str | None,
    module: tuple[str, str, bool] | None,
    loss_is_finite: bool,
    gradients: Sequence[str],
) -> str:
    """Say where a step's values stop being finite.

    Args:
        parameter: The name of the first weight that is not finite itself.
        module: Of the first module whose output is not finite: its name, its class, and whether its input
            is finite.
        loss_is_finite: Whether the repeated forward pass gave a finite loss.
        gradients: The names of the parameters whose gradients are not finite.
    """
    weights = "" if parameter is None else f"parameter {parameter} is not finite already; "
    if module is not None:
        name, kind, input_is_finite = module
        where = f"{name} ({kind})" if name else f"the network itself ({kind})"
        blame = "" if input_is_finite else ", whose input is not finite either"
        return f"{weights}the first module whose output is not finite is {where}{blame}"
    if not loss_is_finite:
        return f"{weights}the output of every module is finite, the loss of it is not"
    if not gradients:
        return f"{weights}the forward pass and the gradients of this batch alone are finite"
    more = "" if len(gradients) <= 3 else f" and {len(gradients) - 3} more"
    return f"{weights}the forward pass is finite: the gradients of {', '.join(gradients[:3])}{more} are not"


def not_repeatable(reason: object) -> str:
    """Say that where values stop being finite is not known."""
    return f"the forward pass cannot be repeated to find where that begins ({reason})"


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
