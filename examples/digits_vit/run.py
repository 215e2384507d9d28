"""Train the same Vision Transformer with PyTorch and with MindSpore, with the same callbacks.

Writes a log for each engine and a picture of both, and prints a table of both.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from collections import Counter
from pathlib import Path

# The networks are small: a second thread for one operator costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level: only errors

from data import load_batches
from report import Run, draw, table

import dualtrain as dt

ENGINES = ("torch", "mindspore")
LEARNING_RATE = 2e-3


class CosineRate:
    """Increase the learning rate over the first steps, then reduce it to 0 along a cosine."""

    def __init__(self, highest: float, warmup_steps: int = 30) -> None:
        self.highest = highest
        self.warmup_steps = warmup_steps

    def on_train_step_begin(self, run_context: dt.RunContext) -> None:
        done = (run_context.step - 1) / (run_context.epochs * run_context.batches_per_epoch)
        warmup = min(1, run_context.step / self.warmup_steps)
        run_context.lr = self.highest * warmup * (1 + math.cos(math.pi * done)) / 2


class EventCounter:
    """Count the events, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def _count(self, run_context: dt.RunContext) -> None:
        self.counts[str(run_context.event)] += 1

    on_train_begin = on_train_epoch_begin = on_train_step_begin = _count
    on_train_step_end = on_train_epoch_end = on_train_end = _count
    on_eval_begin = on_eval_epoch_begin = on_eval_step_begin = _count
    on_eval_step_end = on_eval_epoch_end = on_eval_end = _count


class Accuracy:
    """Print and log the accuracy of each evaluation."""

    def on_eval_end(self, run_context: dt.RunContext) -> None:
        accuracy = run_context.metrics["acc"]
        run_context.log("acc", accuracy)
        print(
            f"{run_context.backend!s:<9}  epoch {run_context.epoch:>2} of {run_context.epochs}  "
            f"test accuracy {accuracy:7.2%}",
            flush=True,
        )


def train(engine: str, epochs: int, seed: int, log_file: Path) -> Run:
    """Train on one engine; the differences are in vit_torch.py and vit_mindspore.py."""
    network, loss_fn, optimizer = importlib.import_module(f"vit_{engine}").build(seed, LEARNING_RATE)
    train_batches, test_batches = load_batches(seed)
    events, history = EventCounter(), dt.callbacks.MetricHistory()
    callbacks = [
        CosineRate(LEARNING_RATE),
        events,
        Accuracy(),
        history,
        dt.callbacks.StepLogger(log_file, log_interval=1),
    ]
    model = dt.Model(network, loss_fn, optimizer, {"acc"})
    model.fit(epochs, train_batches, test_batches, callbacks=callbacks)
    return Run(dt.logs.read_log(log_file), history.history, events.counts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the shuffling")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    arguments = parser.parse_args()

    engines = ENGINES if arguments.engine == "both" else (arguments.engine,)
    runs = {
        engine: train(engine, arguments.epochs, arguments.seed, arguments.out / f"{engine}.jsonl")
        for engine in engines
    }
    print(f"\n{table(runs)}\n")
    for run in runs.values():
        print(run.log.path)
    print(draw(runs, arguments.out / "digits_vit.png"))


if __name__ == "__main__":
    main()
