"""Compare the cost of dualtrain's monitors with MindStudio Probe's in one training loop.

    python benchmarks/mindstudio_probe.py 10 12  # rounds, steps; after pip install mindstudio-probe

A small Vision Transformer (dim 192, depth 4, batch 8) is trained on the CPU with one thread. In each round
all monitors train the same network on the same batches, and write at every step. The output is the CPU time
of the process per step, as the median over the rounds, and the added time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualtrain as dt
from dualtrain.callbacks import ParameterMonitor, TransformerMonitor

DIM, PATCHES = 192, 16


def vision_transformer() -> torch.nn.Module:
    """Return a network to ten classes, from patches of 8 x 8 pixels in three channels."""
    layer = torch.nn.TransformerEncoderLayer(DIM, 3, 4 * DIM, 0.0, "gelu", batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Linear(3 * 8 * 8, DIM),
        torch.nn.TransformerEncoder(layer, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(PATCHES * DIM, 10),
    )


class Probe:
    """MindStudio Probe's monitors as one callback, with the names and settings of its configuration."""

    def __init__(self, **monitors: dict[str, Any]) -> None:
        self.settings = {"framework": "pytorch", "patch_optimizer_step": True, "monitors": monitors}

    def on_train_begin(self, run_context: dt.RunContext) -> None:
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        folder = Path("probe").absolute()
        folder.mkdir()
        Path("probe.json").write_text(json.dumps({**self.settings, "output_dir": str(folder)}))
        params = run_context.original_args()
        self._monitor = TrainerMonitorV2("probe.json", fr="pytorch")
        self._monitor.start(model=params.network, optimizer=params.optimizer)

    def on_train_end(self, run_context: dt.RunContext) -> None:
        self._monitor.stop()


class Clock:
    """Record the CPU time at the begin of each step, from the third on, without set-up and samples."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_step_begin(self, run_context: dt.RunContext) -> None:
        if (run_context.step or 0) > 2:
            self.marks.append(time.process_time())


OPS = ["min", "max", "mean", "norm"]
CONTENDERS: dict[str, Any] = {
    "no monitor": list,
    "dualtrain: gradient norm": lambda: [TransformerMonitor(log_file="t.jsonl", grad_interval=1)],
    "dualtrain: gradient norm, parameters": lambda: [
        TransformerMonitor(log_file="transformer.jsonl", grad_interval=1),
        ParameterMonitor(interval=1, log_file="parameters.jsonl"),
    ],
    "msprobe: weight gradients": lambda: [Probe(weight_grad={"enabled": True, "ops": OPS})],
    "msprobe: modules": lambda: [Probe(module={"enabled": True, "targets": [], "ops": OPS})],
}


def measure(callbacks: list[Any], batches: list[Any]) -> float:
    """Train in a separate folder and return the milliseconds per step."""
    torch.manual_seed(0)
    network = vision_transformer()
    model = dt.Model(network, torch.nn.CrossEntropyLoss(), torch.optim.AdamW(network.parameters(), 3e-4))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model.train(1, batches, [clock, *callbacks])
        os.chdir("/")
    return (clock.marks[-1] - clock.marks[0]) / (len(clock.marks) - 1) * 1e3


def main() -> None:
    rounds, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    numbers = np.random.default_rng(0)
    batches = [
        (numbers.normal(size=(8, PATCHES, 3 * 8 * 8)).astype(np.float32), numbers.integers(0, 10, 8))
        for _ in range(steps)
    ]
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, make in CONTENDERS.items():
            times[name].append(measure(make(), batches))
    plain = times["no monitor"]
    for name, own in times.items():
        added = statistics.median(a - b for a, b in zip(own, plain, strict=True))
        print(f"{name:40} {statistics.median(own):8.2f} ms a step, {added:+7.2f}")


if __name__ == "__main__":
    main()
