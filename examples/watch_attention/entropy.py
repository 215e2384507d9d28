"""The entropy of every head, from the logs, as arrays and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dualtrain.logs import read_log


def entropies(log_file: Path) -> dict[int, np.ndarray]:
    """Return step -> entropies, (layers, heads), from the log of a TransformerMonitor."""
    sampled = {}
    for step, heads in zip(*read_log(log_file).column("attention"), strict=True):
        layers = max(head["layer"] for head in heads) + 1
        sampled[step] = np.array([head["attention_entropy"] for head in heads]).reshape(layers, -1)
    return sampled


def draw(sampled: Mapping[str, Mapping[int, np.ndarray]], path: Path) -> Path:
    """Draw the entropies of the first and the last sample and their difference, one row per engine."""
    figure = Figure(figsize=(10.4, 0.9 + 2.0 * len(sampled)), layout="constrained")
    panels = [list(row) for row in figure.subplots(len(sampled), 3, squeeze=False)]
    shown = {}
    for engine, steps in sampled.items():
        first, last = min(steps), max(steps)
        shown[engine] = (first, steps[first], last, steps[last], steps[last] - steps[first])
    highest = max(values.max() for _, first, _, last, _ in shown.values() for values in (first, last))
    largest = max(abs(change).max() for *_, change in shown.values()) or 1.0
    for row, (engine, (first, before, last, after, change)) in zip(panels, shown.items(), strict=True):
        absolute = {"cmap": "viridis", "vmin": 0, "vmax": highest}
        relative = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        drawn = (
            (f"step {first}", before, absolute),
            (f"step {last}", after, absolute),
            (f"change from step {first} to {last}", change, relative),
        )
        for panel, (title, values, colours) in zip(row, drawn, strict=True):
            picture = panel.imshow(values, aspect="auto", **colours)
            panel.set_xticks(range(0, values.shape[1], 2))
            panel.set_yticks(range(values.shape[0]))
            if row is panels[0]:
                panel.set_title(title, fontsize="medium")
            if row is panels[-1]:
                panel.set_xlabel("head")
            if panel is row[0]:
                panel.set_ylabel(f"{engine}\nlayer")
            if panel is row[1]:
                levels = picture
    figure.colorbar(levels, ax=[panel for row in panels for panel in row[:2]], pad=0.02, label="nats")
    figure.colorbar(picture, ax=[row[2] for row in panels], pad=0.02, label="nats")
    figure.suptitle("MiniLM: entropy of attention by layer and head", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    return path
