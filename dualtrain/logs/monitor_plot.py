"""Draw the logs of a run's monitors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError
from dualtrain.logs._figure import colours, marker_of, named, new_figure, save
from dualtrain.logs.reader import Log, read_log

_USUAL_RATIO = 1e-3
_DASHED = (0, (4, 2))
_FIRST, _SECOND, _ALARM, _REFERENCE = "#123f6d", "#f2a285", "#c8553d", "#555555"

_Spread = tuple[float, float, float]
"""Mean, minimum and maximum."""


def plot_monitor(
    logs: Log | str | os.PathLike[str] | Sequence[Log | str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    grad_norm_threshold: float = 1e-3,
    explosion_threshold: float = 1e3,
    title: str | None = None,
) -> Path:
    """Draw the curves of one run: loss, gradient norms, entropy of attention, update ratios.

    There is one panel for each of these values in the logs: loss and learning rate; the norm of the
    gradients, before and after clipping, with the thresholds; the entropy of each attention layer, as
    mean and range of its heads, with the entropy of uniform attention; and the update ratio of each group
    of parameters, with the usual value 1e-3.

    Args:
        logs: The log of a TransformerMonitor, ParameterMonitor or StepLogger, or several logs of the same
            run; as paths or ``Log`` objects.
        output: The picture; its extension determines the format (.png, .svg, .pdf).
        grad_norm_threshold: Threshold of vanishing gradients; the default is TransformerMonitor's.
        explosion_threshold: Threshold of exploding gradients; the default is TransformerMonitor's.
        title: The title. None: model and backend, if the log contains them.

    Returns:
        The path of the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentValueError: The logs have none of these values.
    """
    read = [
        log if isinstance(log, Log) else read_log(log)
        for log in ([logs] if isinstance(logs, (Log, str, os.PathLike)) else logs)
    ]
    thresholds = (grad_norm_threshold, explosion_threshold)
    losses, rates = _numbers(read, "loss"), _numbers(read, "lr")
    norms, clipped = _numbers(read, "grad_norm"), _numbers(read, "grad_norm_clipped")
    entropies = _entropies(read)
    ratios = _update_ratios(read)
    draw: list[Callable[[Any], None]] = []
    if losses or rates:
        draw.append(lambda panel: _draw_loss(panel, losses, _numbers(read, "eval_loss"), rates))
    if norms:
        draw.append(lambda panel: _draw_norms(panel, norms, clipped, thresholds))
    if entropies:
        draw.append(lambda panel: _draw_entropies(panel, entropies, _numbers_of_keys(read)))
    if ratios:
        draw.append(lambda panel: _draw_ratios(panel, ratios))
    if not draw:
        there = ", ".join(dict.fromkeys(name for log in read for name in log.names)) or "no values"
        raise ArgumentValueError(
            f"nothing to draw: plot_monitor takes logs with loss, lr, grad_norm, attention or parameters, "
            f"but {', '.join(str(log.path) for log in read) or 'no log'} has {there}."
        )
    places = {1: "A", 2: "AB", 3: "AB\nCC", 4: "AB\nCD"}[len(draw)]
    figure = new_figure(5.6 if len(draw) == 1 else 10.4, 3.5 if len(draw) < 3 else 6.6)
    panels = figure.subplot_mosaic(places)
    for draw_panel, (_, panel) in zip(draw, sorted(panels.items()), strict=True):
        draw_panel(panel)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines["top"].set_visible(False)
    title = _title_of(read) if title is None else title
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize="large", fontweight="bold")
    return save(figure, output, dpi=110)


# Reading the logs.


def _numbers(logs: Sequence[Log], name: str) -> dict[int, tuple[float, ...]]:
    """Return step -> value, as a tuple with one item per group; values that are not numbers are NaN."""
    return {
        record.step: tuple(
            float(item) if isinstance(item, (int, float)) else math.nan
            for item in (value if isinstance(value, tuple) else (value,))
        )
        for log in logs
        for record in log.records
        if record.mode == "train" and (value := record.values.get(name)) is not None
    }


def _rows(logs: Sequence[Log], table: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table, with their steps."""
    for log in logs:
        for record in log.records:
            value = record.values.get(table) if record.mode == "train" else None
            for row in value if isinstance(value, tuple) else ():
                if isinstance(row, dict):
                    yield record.step, row


def _named_numbers(logs: Sequence[Log], table: str) -> Iterator[tuple[int, str, float]]:
    """Yield values that a monitor without its own log gave to a logger, named ``table/name``."""
    for name in dict.fromkeys(name for log in logs for name in log.names):
        if name.startswith(f"{table}/"):
            for step, values in _numbers(logs, name).items():
                yield step, name.partition("/")[2], values[0]


def _entropies(logs: Sequence[Log]) -> dict[int, dict[int, _Spread]]:
    """Return layer -> step -> mean, minimum and maximum entropy of its heads."""
    heads: dict[int, dict[int, list[float]]] = {}

    def add(layer: Any, step: int, entropy: Any) -> None:
        if isinstance(entropy, (int, float)) and math.isfinite(entropy):
            heads.setdefault(int(layer), {}).setdefault(step, []).append(entropy)

    for step, row in _rows(logs, "attention"):
        add(row.get("layer", 0), step, row.get("attention_entropy"))
    for step, layer, mean in _named_numbers(logs, "attention_entropy"):
        if layer.isdigit():
            add(layer, step, mean)
    return {
        layer: {step: (sum(own) / len(own), min(own), max(own)) for step, own in sorted(steps.items())}
        for layer, steps in sorted(heads.items())
    }


def _numbers_of_keys(logs: Sequence[Log]) -> list[int]:
    """Return the numbers of keys of the attention arrays, if there are any."""
    arrays = (next(iter(log.arrays().values()), {}) for log in logs)
    return sorted({array.shape[-1] for own in arrays for array in own.values() if array.ndim == 2})


def _update_ratios(logs: Sequence[Log]) -> dict[str, dict[int, float]]:
    """Return group -> step -> update ratio, in order of appearance of the groups."""
    groups: dict[str, dict[int, float]] = {}
    for step, row in _rows(logs, "parameters"):
        if isinstance(ratio := row.get("update_ratio"), (int, float)):
            groups.setdefault(str(row.get("group")), {})[step] = ratio
    for step, group, ratio in _named_numbers(logs, "update_ratio"):
        groups.setdefault(group, {})[step] = ratio
    return groups


def _title_of(logs: Sequence[Log]) -> str:
    for log in logs:
        if log.meta.get("model") and log.meta.get("backend"):
            return f"{log.meta['model']} on {log.meta['backend']}"
    return ""


# Panels.


def _draw_loss(
    panel: Any,
    losses: dict[int, tuple[float, ...]],
    evaluated: dict[int, tuple[float, ...]],
    rates: dict[int, tuple[float, ...]],
) -> None:
    for values, label, colour in ((losses, "loss", _FIRST), (evaluated, "eval_loss", _SECOND)):
        if losses and values:
            numbers = [value[0] for value in values.values()]
            panel.plot([*values], numbers, color=colour, label=label, marker=marker_of(numbers), ms=3)
    rate_panel = panel.twinx() if losses and rates else panel
    for group in range(max((len(rate) for rate in rates.values()), default=0)):
        numbers = [rate[group] if group < len(rate) else math.nan for rate in rates.values()]
        rate_panel.plot([*rates], numbers, color=_ALARM, lw=1.2, ls=_DASHED, label="lr")
    rate_panel.spines["top"].set_visible(False)
    drawn = (["loss"] if losses else []) + (["learning rate"] if rates else [])
    panel.set_title(" and ".join(drawn), loc="left")
    panel.set_ylabel("loss", color=_FIRST)
    if losses and evaluated:
        panel.legend(frameon=False)
    if rates:
        rate_panel.set_ylabel("learning rate", color=_ALARM)
        rate_panel.set_ylim(bottom=0)
    if rate_panel is not panel:
        rate_panel.grid(False)


def _draw_norms(
    panel: Any,
    norms: dict[int, tuple[float, ...]],
    clipped: dict[int, tuple[float, ...]],
    thresholds: tuple[float, float],
) -> None:
    numbers = [value[0] for value in norms.values()]
    panel.plot([*norms], numbers, color=_FIRST, lw=1.2, label="grad_norm", marker=marker_of(numbers), ms=3)
    after = [clipped.get(step, (math.nan,))[0] for step in norms]
    if any(not math.isclose(a, b, rel_tol=1e-5) for a, b in zip(numbers, after, strict=True) if b == b):
        panel.plot([*norms], after, color=_SECOND, lw=1.2, label="grad_norm_clipped")
        panel.legend(frameon=False, loc="center right")
    finite = [number for number in (*numbers, *after) if 0 < number < math.inf]
    low, high = thresholds
    floor = min([*finite, *([low] if low > 0 else [])], default=1.0) / 4
    ceiling = max([*finite, high], default=1.0) * 4
    panel.set_ylim(floor, ceiling)
    panel.set_yscale("log", nonpositive="mask")
    if low > 0:
        panel.axhspan(floor, low, color=_ALARM, alpha=0.1, lw=0)
        _mark(panel, low, f"vanishing: below {low:g}", _ALARM, below=True)
    panel.axhspan(high, ceiling, color=_ALARM, alpha=0.1, lw=0)
    _mark(panel, high, f"exploding: above {high:g}", _ALARM)
    panel.set_title("gradient norm", loc="left")
    panel.set_ylabel("L2 norm of all gradients")


def _draw_entropies(panel: Any, layers: dict[int, dict[int, _Spread]], keys: list[int]) -> None:
    for (layer, steps), colour, is_named in zip(
        layers.items(), colours(len(layers)), named(len(layers)), strict=True
    ):
        means, least, greatest = zip(*steps.values(), strict=True)
        label = f"layer {layer}" if is_named else None
        panel.plot([*steps], means, color=colour, label=label, marker=marker_of(means), ms=3)
        panel.fill_between([*steps], least, greatest, color=colour, alpha=0.12, lw=0)
    for count in keys:
        _mark(panel, math.log(count), f"uniform over {count} keys: {math.log(count):.2f}", _REFERENCE)
    low, high = panel.get_ylim()
    panel.set_ylim(0 if low < high / 2 else low, high + (high - low) * 0.06)
    panel.set_title("entropy of attention: mean and range of the heads", loc="left")
    panel.set_ylabel("nats")
    _name_beside(panel)


def _draw_ratios(panel: Any, groups: dict[str, dict[int, float]]) -> None:
    for (group, steps), colour, is_named in zip(
        groups.items(), colours(len(groups)), named(len(groups)), strict=True
    ):
        ratios = [*steps.values()]
        label = group if is_named else None
        panel.plot([*steps], ratios, color=colour, lw=1.2, label=label, marker=marker_of(ratios), ms=3)
    _mark(panel, _USUAL_RATIO, f"usual: about {_USUAL_RATIO:g}", _REFERENCE)
    panel.set_yscale("log", nonpositive="mask")
    panel.set_title("change of the weights per update", loc="left")
    panel.set_ylabel("update ratio")
    _name_beside(panel)


def _name_beside(panel: Any) -> None:
    """Place a legend at the right of a panel, where it cannot cover the curves."""
    panel.legend(
        frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0
    )


def _mark(panel: Any, value: float, text: str, colour: str, *, below: bool = False) -> None:
    """Draw a line at a value of the vertical axis, with a label at its right end."""
    panel.axhline(value, color=colour, lw=1, ls=_DASHED)
    panel.annotate(
        text,
        (0.99, value),
        xycoords=panel.get_yaxis_transform(),
        xytext=(0, -3 if below else 2),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        color=colour,
        fontsize="small",
        bbox={"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.5},
    )
