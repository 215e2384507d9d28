"""Measure what callbacks add to a step of the ViT, which varies too much for overhead.py to tell.

On PyTorch. In one run they are called in every other block of ten steps, and each block without them is
compared with its two neighbours, so that what else the machine does for longer than that cancels.

    .venv-bench/bin/python benchmarks/alternating.py
    .venv-bench/bin/python benchmarks/alternating.py --conditions all --steps 400
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits_vit"))

from loops import torch_loops
from loops.common import CONDITIONS
from loops.dualtrain_callbacks import callbacks as callbacks_for
from overhead import names

import dualtrain as dt
from dualtrain.events import Event
from dualtrain.protocol import Capability

BLOCK = 10
LOGGING = [name for name, condition in CONDITIONS.items() if condition.log_interval]


class Alternating(dt.Callback):
    """Call other callbacks at every event, but at those of steps in every other block alone."""

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
    """Tell whether callbacks are called in a step, counted from 1."""
    return (step - 1) // BLOCK % 2 == 1


class NotedBatches:
    """Batches for one epoch, which note when each of them is asked for."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        self._batches, self._steps = batches, steps
        self.times: list[float] = []

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(cycle(self._batches), self._steps):
            self.times.append(perf_counter())
            yield batch
        self.times.append(perf_counter())


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
            data = NotedBatches(work.batches, options.steps)
            model = dt.Model(work.network, work.loss_fn, work.optimizer)
            model.train(1, data, Alternating(callbacks))
        added = list(differences([after - before for before, after in pairwise(data.times)]))
        error = stdev(added) / len(added) ** 0.5
        print(f"{name:8} {mean(added):+.1f} ±{error:.1f}   ({CONDITIONS[name].words})", flush=True)


def differences(seconds: list[float]) -> Iterator[float]:
    """Yield, for each block without callbacks, by how many percent its neighbours are slower."""
    blocks = [mean(seconds[i : i + BLOCK]) for i in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    for i in range(2, len(blocks) - 1, 2):  # the first one warms up
        yield 100 * ((blocks[i - 1] + blocks[i + 1]) / 2 / blocks[i] - 1)


if __name__ == "__main__":
    main()
