"""Draw attention maps over the steps of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualtrain._lazy import require
from dualtrain.errors import ArgumentValueError
from dualtrain.logs._figure import new_figure, save
from dualtrain.logs.reader import Log, read_log

_COLUMNS = 6
_HIGHEST = 99.5


def plot_attention(
    log: Log | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    head: int | None = None,
    grid: tuple[int, int] | bool | None = None,
    title: str | None = None,
) -> Path:
    """Draw the mean attention per key as heat maps: one row per layer, one column per step.

    The map of a Vision Transformer is the grid of the image's patches, with the mean over heads; other
    maps have a row for each head and a column for each key. Colours are multiples of uniform attention,
    with one scale for all maps of the picture.

    Args:
        log: The log of a TransformerMonitor, or its path, with its arrays.
        output: The picture; its extension determines the format (.png, .svg, .pdf).
        layers: The layers to draw. None: all.
        steps: The steps to draw. None: up to 6, evenly spaced from the first sample to the last.
        head: The only head to draw. None: all heads, and on a grid their mean.
        grid: Rows and columns of patches; a class token before them is left out. None: a square, if
            the number of keys, or one less, is a square number. False: always heads by keys.
        title: The title. None: model and backend, if the log contains them.

    Returns:
        The path of the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentValueError: The log has no arrays, or not the requested ones.
    """
    log = log if isinstance(log, Log) else read_log(log)
    arrays = log.arrays()
    if not arrays:
        raise ArgumentValueError(
            f"nothing to draw: {log.path} has no arrays beside it, as TransformerMonitor(log_file=...) "
            f"writes them when it finds attention."
        )
    drawn = _spaced([*arrays]) if steps is None else list(steps)
    if missing := [step for step in drawn if step not in arrays]:
        raise ArgumentValueError(
            f"{log.path} has no attention of step {missing[0]}; it has {', '.join(map(str, arrays))}."
        )
    sampled = [arrays[step] for step in drawn]
    there = sorted({int(name[5:]) for own in sampled for name in own if _is_layer(name)})
    rows = there if layers is None else list(layers)
    if missing := [layer for layer in rows if layer not in there] or ([] if rows else [0]):
        raise ArgumentValueError(
            f"{log.path} has no layer {missing[0]}; it has {', '.join(map(str, there)) or 'none'}."
        )
    maps = [[_map_of(own.get(f"layer{layer}"), head, grid) for own in sampled] for layer in rows]
    title = title if title is not None else _title_of(log)
    return save(_draw(maps, [f"layer {layer}" for layer in rows], drawn, title), output, dpi=110)


def _is_layer(name: str) -> bool:
    return name.startswith("layer") and name[5:].isdigit()


def _spaced(steps: list[int]) -> list[int]:
    """Return evenly spaced steps up to a number, including the first and the last."""
    count = min(_COLUMNS, len(steps))
    places = {round(index * (len(steps) - 1) / max(1, count - 1)) for index in range(count)}
    return [steps[place] for place in sorted(places)]


def _map_of(per_key: Any, head: int | None, grid: tuple[int, int] | bool | None) -> tuple[Any, bool] | None:
    """Return a layer's map in multiples of uniform attention, and whether it is a grid of patches."""
    if per_key is None:
        return None
    heads, keys = per_key.shape
    if head is not None and not 0 <= head < heads:
        raise ArgumentValueError(f"plot_attention(head=...) is from 0 to {heads - 1}, but got {head!r}.")
    shares = np.asarray(per_key, np.float64) * keys
    shape = _grid_of(keys) if grid is None or grid is True else grid
    if not shape:
        return shares if head is None else shares[head : head + 1], False
    cells = shape[0] * shape[1]
    if keys - cells not in (0, 1):
        raise ArgumentValueError(
            f"plot_attention(grid=...) takes the rows and columns of {keys} patches, or of {keys - 1} and "
            f"a class token, but got {grid!r}."
        )
    real = shares[np.isfinite(shares).all(axis=1)]  # a head without any visible key has NaN
    own = shares[head or 0] if head is not None or not len(real) else real.mean(axis=0)
    return own[keys - cells :].reshape(shape), True


def _grid_of(keys: int) -> tuple[int, int] | None:
    for cells in (keys, keys - 1):
        side = math.isqrt(max(0, cells))
        if side > 1 and side * side == cells:
            return side, side
    return None


def _title_of(log: Log) -> str:
    told = log.meta.get("model"), log.meta.get("backend")
    return "attention" if None in told else f"attention: {told[0]} on {told[1]}"


def _draw(maps: list[list[tuple[Any, bool] | None]], names: list[str], steps: list[int], title: str) -> Any:
    known = [found for row in maps for found in row if found is not None]
    image = all(is_grid for _, is_grid in known)
    values = np.concatenate([shares[np.isfinite(shares)] for shares, _ in known])
    highest = float(np.percentile(values, _HIGHEST)) if values.size else 1.0
    lowest = float(values.min()) if image and values.size else 0.0
    width = 1.45 if image else max(1.6, 9.0 / len(steps))
    figure = new_figure(1.5 + width * len(steps), 0.85 + 1.45 * len(maps))
    # A single key, such as a sentence's first, often gets most of the attention; keep the others visible.
    scale = require("matplotlib.colors", extra="plot").PowerNorm(1.0 if image else 0.5, lowest, highest)
    panels = [list(row) for row in figure.subplots(len(maps), len(steps), squeeze=False)]
    bottom = panels[-1]
    picture = None
    for row, name, line in zip(panels, names, maps, strict=True):
        for panel, found in zip(row, line, strict=True):
            if found is not None:
                shares, is_grid = found
                aspect = "equal" if is_grid else "auto"
                picture = panel.imshow(
                    shares, cmap="magma", norm=scale, aspect=aspect, interpolation="nearest"
                )
            if image:
                panel.set_xticks([])
                panel.set_yticks([])
            panel.tick_params(labelsize="x-small", labelbottom=row is bottom, labelleft=panel is row[0])
        row[0].set_ylabel(name if image else f"{name}\nhead")
    for panel, step in zip(panels[0], steps, strict=True):
        panel.set_title(f"step {step}", fontsize="medium")
    for panel in () if image else bottom:
        panel.set_xlabel("key position")
    if picture is not None:
        beyond = "max" if values.max(initial=0.0) > highest else "neither"
        every = [panel for row in panels for panel in row]
        bar = figure.colorbar(picture, ax=every, aspect=30, pad=0.02, extend=beyond)
        bar.set_label(f"attention per {'patch' if image else 'key'} (uniform: 1)")
    figure.suptitle(title, x=0.01, ha="left", fontsize="large", fontweight="bold")
    return figure
