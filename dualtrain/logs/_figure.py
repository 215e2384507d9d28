"""What all pictures of logs have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrain._lazy import require

_FEW = 30
_NAMED = 14


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches, without a display."""
    return require("matplotlib.figure", extra="plot").Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, output: str | os.PathLike[str], dpi: int) -> Path:
    """Write a picture, in the format that its ending says. Missing folders are made."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=dpi)
    return output


def marker_of(points: Sequence[Any]) -> str | None:
    """Return a marker for curves of few points, which would not be seen as a line."""
    return "o" if len(points) < _FEW else None


def colours(count: int) -> list[Any]:
    """Return colours for things that have an order, from the first, dark, to the last, light."""
    shades = require("matplotlib", extra="plot").colormaps["viridis"]
    return [shades(0.88 * index / max(1, count - 1)) for index in range(count)]


def named(count: int) -> list[bool]:
    """Return which of many curves a legend names: all if they are few, else first, middle and last."""
    return [count <= _NAMED or index in (0, count // 2, count - 1) for index in range(count)]
