"""Draw logs as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError
from dualtrain.logs._figure import marker_of, new_figure, save
from dualtrain.logs.reader import Log, read_log

_NOT_DRAWN = ("global_step", "elapsed_sec")
_MODES = ("train", "eval")


def plot_logs(
    logs: Sequence[Log | str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> Path:
    """Draw the values of one or more logs over steps, one panel per name, one line per log.

    Results of evaluations are dashed. ``eval_loss`` is drawn in the panel of ``loss``, if there is one;
    the same holds for other names with the prefix ``eval_`` or ``val_``.

    Args:
        logs: Logs, or paths of logs.
        output: The picture; its extension determines the format (.png, .svg, .pdf).
        names: The values to draw. None: all numbers in the logs, except counters and times. Tables of
            monitors are drawn by ``plot_monitor``, for one run.
        labels: The logs' names in the legend. None: the backend, or the name of the file.

    Returns:
        The path of the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentValueError: There is nothing to draw.
    """
    read = [log if isinstance(log, Log) else read_log(log) for log in logs]
    every = [(mode, name) for mode in _MODES for log in read for name in log.names_of(mode)]
    curves = [one for one in dict.fromkeys(every) if any(_has_numbers(log, *one) for log in read)]
    there = list(dict.fromkeys(name for _, name in curves))
    if names is None:
        names = [name for name in there if name not in _NOT_DRAWN]
    drawn = [name for name in names if name in there]
    if not there or not names:
        tables = ", ".join(dict.fromkeys(name for _, name in every if name not in there))
        raise ArgumentValueError(
            f"nothing to draw: the {len(read)} logs have no values"
            + (f" that are numbers; plot_monitor draws the tables of a run ({tables})." if tables else ".")
        )
    if len(drawn) < len(names):
        missing = ", ".join(repr(name) for name in names if name not in there)
        raise ArgumentValueError(f"no log has numbers named {missing}; they have {', '.join(there)}.")
    labels = labels if labels is not None else _labels(read)
    if len(labels) != len(read):
        raise ArgumentValueError(f"labels has {len(labels)} names for {len(read)} logs: give one for each.")
    curves = [(mode, name) for name in drawn for mode in _MODES if (mode, name) in curves]
    panel_of = {curve: _panel_of(*curve, curves) for curve in curves}
    titles = list(dict.fromkeys(panel_of.values()))
    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    figure = new_figure(6 * columns, 3.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for title, panel in zip(titles, panels, strict=False):
        for mode, name in (curve for curve in curves if panel_of[curve] == title):
            for log, label in zip(read, labels, strict=True):
                if _has_numbers(log, mode, name):
                    _draw(panel, *log.column(name, mode), mode, label)
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        panel.legend()
    for panel in list(panels):
        panel.set_visible(False)
    return save(figure, output, dpi=120)


def _panel_of(mode: str, name: str, curves: Sequence[tuple[str, str]]) -> str:
    """Return the panel of a curve: an evaluation's ``eval_loss`` belongs to ``loss``."""
    bare = name.removeprefix("eval_").removeprefix("val_")
    return bare if mode == "eval" and ("train", bare) in curves else name


def _has_numbers(log: Log, mode: str, name: str) -> bool:
    """Return whether a column of a log has numbers; other columns have texts or tables."""
    if name not in log.names_of(mode):
        return False
    values = [item for v in log.column(name, mode)[1] for item in (v if isinstance(v, tuple) else (v,))]
    return bool(values) and all(item is None or isinstance(item, (int, float)) for item in values)


def _draw(panel: Any, steps: list[int], values: list[Any], mode: str, label: str) -> None:
    if mode == "eval":
        label = f"{label} evaluation"
    marker = marker_of(steps)
    groups = max(len(v) if isinstance(v, tuple) else 1 for v in values)
    for group in range(groups):
        series = [v[group] if isinstance(v, tuple) else v for v in values]
        name = label if groups == 1 else f"{label} group {group}"
        panel.plot(
            steps,
            [float("nan") if v is None else v for v in series],
            marker=marker,
            ms=3,
            ls="--" if mode == "eval" else "-",
            label=name,
        )


def _labels(logs: Sequence[Log]) -> list[str]:
    backends = [log.meta.get("backend") for log in logs]
    if None not in backends and len(set(backends)) == len(backends):
        return [str(backend) for backend in backends]
    return [log.path.stem for log in logs]
