"""Shared parts of all pictures of logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrain._lazy import require

_FEW = 30
_NAMED = 14


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure with a size in inches, without a display."""
    return require("matplotlib.figure", extra="plot").Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, output: str | os.PathLike[str], dpi: int) -> Path:
    """Write a picture in the format of its file extension. Missing folders are created."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=dpi)
    return output


def marker_of(points: Sequence[Any]) -> str | None:
    """Return a marker for curves with few points, which are not visible as a line."""
    return "o" if len(points) < _FEW else None


def colours(count: int) -> list[Any]:
    """Return colours for an ordered series, from dark to light."""
    shades = require("matplotlib", extra="plot").colormaps["viridis"]
    return [shades(0.88 * index / max(1, count - 1)) for index in range(count)]


def named(count: int) -> list[bool]:
    """Return the curves to name in a legend: all of a few, otherwise the first, middle and last."""
    return [count <= _NAMED or index in (0, count // 2, count - 1) for index in range(count)]
