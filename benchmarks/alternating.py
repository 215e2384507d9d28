"""Measure the cost of callbacks in a step of the ViT, which varies too much for overhead.py.

On PyTorch. Callbacks are called in every other block of ten steps of a run, and each block without them is
compared with its two neighbours by the CPU time of all threads, so that slower disturbances by other
programs cancel.

    .venv-bench/bin/python benchmarks/alternating.py
    .venv-bench/bin/python benchmarks/alternating.py --conditions all --steps 400
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from loops import torch_loops
from loops.common import CONDITIONS, TimedBatches
from loops.dualtrain_callbacks import callbacks as callbacks_for
from overhead import names

import dualtrain as dt
from dualtrain.events import Event
from dualtrain.protocol import Capability

BLOCK = 10
LOGGING = [name for name, condition in CONDITIONS.items() if condition.log_interval]


class Alternating(dt.Callback):
    """Call other callbacks at every event, but at step events only in every other block."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks
        self.needs: frozenset[Capability] = frozenset().union(*(own.needs for own in callbacks))


def _forwarder(event: Event) -> Any:
    of_steps = event in (Event.TRAIN_STEP_BEGIN, Event.TRAIN_STEP_END)

    def forward(self: Alternating, run_context: dt.RunContext) -> None:
        if not of_steps or is_on(run_context.step or 0):
            for callback in self.callbacks:
                getattr(callback, event.value)(run_context)

    return forward


for _event in Event:
    if _event.value.startswith("on_train_") or _event is Event.TEARDOWN:
        setattr(Alternating, _event.value, _forwarder(_event))


def is_on(step: int) -> bool:
    """Return whether callbacks are called in a step, counted from 1."""
    return (step - 1) // BLOCK % 2 == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conditions", **names(LOGGING))
    parser.add_argument("--steps", type=int, default=1600)
    options = parser.parse_args()
    print("Added to a step where the callbacks are called, %, with the standard error:\n")
    for name in options.conditions:
        with tempfile.TemporaryDirectory() as folder:
            # Half of the steps are seen, so that one of 50 which are is one of 100.
            callbacks = callbacks_for(CONDITIONS[name], Path(folder) / "log.jsonl", attention_interval=100)
            work = torch_loops.work("W2")
            data = TimedBatches(work.batches, 0, options.steps, block=BLOCK)
            model = dt.Model(work.network, work.loss_fn, work.optimizer)
            model.train(1, data, Alternating(callbacks))
        added = list(differences(data.blocks()))
        error = stdev(added) / len(added) ** 0.5
        print(f"{name:8} {mean(added):+.1f} ±{error:.1f}   ({CONDITIONS[name].words})", flush=True)


def differences(blocks: list[float]) -> Iterator[float]:
    """Yield, for each block without callbacks, the slowdown of its neighbours in percent."""
    for i in range(2, len(blocks) - 1, 2):  # the first one warms up
        yield 100 * ((blocks[i - 1] + blocks[i + 1]) / 2 / blocks[i] - 1)


if __name__ == "__main__":
    main()
