"""Calculations, checks and messages shared by both engines' training steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError

EPSILON = 1e-6
"""Added to the norm in the denominator of the clipping factor, as in PyTorch."""


def check_contract(accumulate_steps: Any, clip_norm: Any) -> None:
    """Check ``accumulate_steps`` and ``clip_norm``."""
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
    """Return the norm after clipping."""
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
    """Return a message about the first non-finite values of a step.

    Args:
        parameter: The name of the first non-finite weight.
        module: The first module with a non-finite output: its name, its class, and whether its input
            is finite.
        loss_is_finite: Whether the repeated forward pass gave a finite loss.
        gradients: The names of the parameters with non-finite gradients.
    """
    weights = "" if parameter is None else f"parameter {parameter} is not finite already; "
    if module is not None:
        name, kind, input_is_finite = module
        where = f"{name} ({kind})" if name else f"the network itself ({kind})"
        blame = "" if input_is_finite else ", whose input is not finite either"
        return f"{weights}the first module whose output is not finite is {where}{blame}"
    if not loss_is_finite:
        return f"{weights}the output of every module is finite, the loss is not"
    if not gradients:
        return f"{weights}the forward pass and the gradients of this batch alone are finite"
    more = "" if len(gradients) <= 3 else f" and {len(gradients) - 3} more"
    return f"{weights}the forward pass is finite: the gradients of {', '.join(gradients[:3])}{more} are not"


def not_repeatable(reason: object) -> str:
    """Return the message for an unknown location of the first non-finite values."""
    return f"the forward pass cannot be repeated to locate the cause ({reason})"


def warn_of_batch_norm(names: Sequence[str], accumulate_steps: int) -> None:
    """Warn that BatchNorm does not normalise a window as one batch.

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
