"""Draw a study: the result and the evaluations of each trial."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import optuna
from matplotlib.figure import Figure
from optuna.trial import TrialState

COLOURS = {"torch": "#e4572e", "mindspore": "#123f6d"}
GREY = "#b5b5b5"


def draw(study: optuna.Study, path: Path) -> Path:
    """Draw the optimisation history and every trial's evaluations; pruned trials are grey."""
    figure = Figure(figsize=(10.5, 4), layout="constrained")
    history, curves = figure.subplots(1, 2)
    done = [t for t in study.trials if t.value is not None]
    completed = [t for t in done if t.state is TrialState.COMPLETE]
    for trial in done:
        pruned = trial.state is TrialState.PRUNED
        colour = COLOURS[trial.params["backend"]]
        history.scatter(trial.number, 100 * trial.value, color=colour, marker="x" if pruned else "o", s=28)
        steps, values = zip(*sorted(trial.intermediate_values.items()), strict=True)
        values = [100 * value for value in values]
        style = {"color": GREY, "linewidth": 1, "zorder": 1} if pruned else {"color": colour}
        curves.plot(steps, values, **style)
        if pruned:
            curves.plot(steps[-1], values[-1], "x", color=GREY, zorder=1)
    if completed:
        best = [*accumulate((100 * t.value for t in completed if t.value is not None), max)]
        history.step([t.number for t in completed], best, where="post", color="#444444", linewidth=1)
    for engine, colour in COLOURS.items():
        history.scatter([], [], color=colour, label=engine)
    history.scatter([], [], color="#444444", marker="x", label="pruned")
    history.plot([], [], color="#444444", linewidth=1, label="best so far")
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    history.set_title("validation accuracy of each trial, %", loc="left")
    history.set_xlabel("trial")
    curves.set_title("evaluations of each trial, %; grey: pruned", loc="left")
    curves.set_xlabel("evaluation")
    for panel in (history, curves):
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path
