"""What monitoring costs: dualtrain's monitors beside MindStudio Probe's, over one training loop.

    pip install mindstudio-probe   # into an environment of its own: it brings a good deal along
    python benchmarks/mindstudio_probe.py [--rounds 10] [--steps 12]

A small Vision Transformer (dim 192, depth 4, 16 patches, batch 8) is trained on the CPU, one thread. In
each round every contender trains the same network on the same batches, in turn. What is printed is the
CPU time of the whole process for a step, the median over rounds, and what a contender adds to the step
without a monitor; every contender writes to disk at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch

import dualtrain as dt
from dualtrain.callbacks import ParameterMonitor, TransformerMonitor

DIM, HEADS, DEPTH, PATCH, SIZE = 192, 3, 4, 8, 32


class VisionTransformer(torch.nn.Module):
    """Ten classes from images of three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, DIM, PATCH, PATCH)
        self.positions = torch.nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2, DIM))
        layer = torch.nn.TransformerEncoderLayer(
            DIM, HEADS, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = torch.nn.Linear(DIM, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(1))


class Probe:
    """MindStudio Probe's monitor as a callback.

    Args:
        monitors: Its monitors, as in its configuration.
    """

    def __init__(self, **monitors: dict[str, Any]) -> None:
        self.monitors = monitors

    def on_train_begin(self, run_context: dt.RunContext) -> None:
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        os.mkdir("probe")
        with open("probe.json", "w", encoding="utf-8") as file:
            json.dump(
                {
                    "framework": "pytorch",
                    "output_dir": os.path.abspath("probe"),
                    "patch_optimizer_step": True,
                    "monitors": self.monitors,
                },
                file,
            )
        params = run_context.original_args()
        self._monitor = TrainerMonitorV2("probe.json", fr="pytorch")
        # It counts steps by the calls of the optimizer, which it replaces.
        self._monitor.start(model=params.network, optimizer=params.optimizer)

    def on_teardown(self, run_context: dt.RunContext) -> None:
        self._monitor.stop()


class Clock:
    """Keep the CPU time of each step, from the third on."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_step_begin(self, run_context: dt.RunContext) -> None:
        if (run_context.step or 0) > 2:
            self.marks.append(time.process_time())

    def milliseconds(self) -> float:
        """Return what a step has taken."""
        return (self.marks[-1] - self.marks[0]) / (len(self.marks) - 1) * 1e3


OPS = ["min", "max", "mean", "norm"]
CONTENDERS: dict[str, Any] = {
    "no monitor": list,
    "dualtrain: gradient norm, parameters": lambda: [
        TransformerMonitor(log_file="transformer.jsonl", grad_interval=1),
        ParameterMonitor(interval=1, log_file="parameters.jsonl"),
    ],
    "msprobe: weight gradients": lambda: [Probe(weight_grad={"enabled": True, "ops": OPS})],
    "msprobe: modules": lambda: [Probe(module={"enabled": True, "targets": [], "ops": OPS})],
}


def measure(callbacks: list[Any], batches: list[Any]) -> float:
    """Train in a folder of its own and return the milliseconds of a step."""
    torch.manual_seed(0)
    network = VisionTransformer()
    model = dt.Model(network, torch.nn.CrossEntropyLoss(), torch.optim.AdamW(network.parameters(), 3e-4))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model.train(1, batches, [clock, *callbacks])
        os.chdir("/")
    return clock.milliseconds()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    numbers = np.random.default_rng(0)
    batches = [
        (numbers.normal(size=(8, 3, SIZE, SIZE)).astype(np.float32), numbers.integers(0, 10, 8))
        for _ in range(arguments.steps)
    ]
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name, make in CONTENDERS.items():
            times[name].append(measure(make(), batches))
    plain = times["no monitor"]
    for name, own in times.items():
        added = statistics.median(a - b for a, b in zip(own, plain, strict=True))
        print(f"{name:40} {statistics.median(own):8.2f} ms a step, {added:+7.2f}")


if __name__ == "__main__":
    main()
