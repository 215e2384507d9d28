"""The results of the runs as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dualtrain.logs import Log

# Keep two equal curves visible: a wide pale line below a thin dark one.
STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "#f2a285", "linewidth": 4.5, "markersize": 10},
    "mindspore": {"color": "#123f6d", "linewidth": 1.1, "markersize": 4},
}


@dataclass(frozen=True)
class Run:
    """The results of one engine's run.

    Attributes:
        log: Its log.
        history: The values of each epoch, from MetricHistory.
        events: The number of calls of each event.
    """

    log: Log
    history: dict[str, list[Any]]
    events: Mapping[str, int]


def loss_differences(runs: Mapping[str, Run]) -> np.ndarray:
    """Return the absolute difference of the two runs' losses for each step."""
    first, second = (np.array(run.log.column("loss")[1]) for run in runs.values())
    return np.abs(first - second)


def table(runs: Mapping[str, Run]) -> str:
    """Return a table with one column per run and, for two runs, the difference of their losses."""
    rows = [("", *runs)]

    def row(name: str, *values: str) -> None:
        rows.append((name, *values))

    row("test accuracy", *(f"{run.history['acc'][-1]:.2%}" for run in runs.values()))
    row("final loss", *(f"{run.log.column('loss')[1][-1]:.6f}" for run in runs.values()))
    row("steps/s", *(f"{1 / median(_step_seconds(run)):.1f}" for run in runs.values()))
    row("first step, s", *(f"{run.log.column('elapsed_sec')[1][0]:.1f}" for run in runs.values()))
    row("events seen", *(str(sum(run.events.values())) for run in runs.values()))
    for event in dict.fromkeys(event for run in runs.values() for event in run.events):
        row(f"  {event}", *(str(run.events[event]) for run in runs.values()))

    lines = [f"{row[0]:<24}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    if len(runs) == 2:
        differences = loss_differences(runs)
        lines += [
            "",
            f"largest difference of the two losses, first 10 steps: {differences[:10].max():.1e}",
            f"largest difference of the two losses, all {len(differences)} steps: {differences.max():.1e}",
        ]
    return "\n".join(lines)


def draw(runs: Mapping[str, Run], path: Path) -> Path:
    """Draw loss and accuracy from the logs and, for two runs, the difference of the losses."""
    panels = 3 if len(runs) == 2 else 2
    figure = Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
    loss, accuracy, *rest = figure.subplots(1, panels)
    for engine, run in runs.items():
        loss.plot(*run.log.column("loss"), label=engine, **STYLES[engine])
        steps, values = run.log.column("acc")
        accuracy.plot(steps, [100 * value for value in values], label=engine, marker="o", **STYLES[engine])
    loss.set_title("training loss", loc="left")
    loss.set_yscale("log")
    accuracy.set_title("test accuracy, %", loc="left")
    for panel in rest:
        differences = loss_differences(runs)
        panel.plot(range(1, len(differences) + 1), differences, ".", color="#444444", markersize=3)
        panel.set_title("difference of the two losses", loc="left")
        panel.set_yscale("log")
    for panel in (loss, accuracy, *rest):
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False)
    accuracy.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    return path


def _step_seconds(run: Run) -> list[float]:
    """Return the median seconds per step, which excludes compilation and evaluations."""
    elapsed = run.log.column("elapsed_sec")[1]
    return [after - before for before, after in pairwise(elapsed)]
