"""What every loop is given: a condition, a data set that keeps the time, and a file for rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any


@dataclass(frozen=True)
class Condition:
    """What a run is given to do beside training.

    Attributes:
        name: For the command line and tables.
        words: What it is.
        callbacks: How many callbacks that do nothing.
        listening: Whether these override every event.
        log_interval: Write loss and learning rate every so many steps; 0: never.
        norm: Write the global gradient norm of each of these steps too.
        monitor: Watch the network with dualtrain's TransformerMonitor.
    """

    name: str
    words: str
    callbacks: int = 0
    listening: bool = False
    log_interval: int = 0
    norm: bool = False
    monitor: bool = False


CONDITIONS = {
    condition.name: condition
    for condition in (
        Condition("none", "no callback"),
        Condition("idle", "ten callbacks that override nothing", callbacks=10),
        Condition("listening", "ten callbacks that override every event", callbacks=10, listening=True),
        Condition("log10", "loss and rate as a JSON line every 10 steps", log_interval=10),
        Condition("all", "loss, rate and gradient norm of every step", log_interval=1, norm=True),
        Condition("monitor", "log10 and TransformerMonitor(50)", log_interval=10, monitor=True),
    )
}


class NotApplicable(Exception):
    """A loop has no such thing as the condition asks for; the message says why."""


CLOCKS = {
    "cpu": "time that all threads of the process have worked",
    "quiet": "the same in the least disturbed tenth of the steps, for a busy machine; what a thread does "
    "now and then, such as writing a log, is hardly in it",
    "wall": "time by the clock on the wall, for a quiet machine",
}

BLOCKS = 20
"""Into how many blocks, if there are enough steps, a measurement is cut."""


class TimedBatches:
    """Batches for one epoch, which note the time when certain ones are asked for.

    Every loop has to ask for the next batch, so none needs a hook, and what it does before and after
    the epoch stays outside. Some loops look at the data first: a new iterator starts the clocks anew.
    One more batch ends the epoch, since some loops stop by count.

    Args:
        batches: The batches, given out in turn.
        warm: Steps before the clocks start.
        steps: Steps to measure.
        block: Steps between two looks at the clocks; None: as many as make ``BLOCKS`` blocks.
    """

    def __init__(self, batches: list[Any], warm: int, steps: int, *, block: int | None = None) -> None:
        self.batches = batches
        self._warm = warm
        self._block = block or max(1, steps // BLOCKS)
        self._blocks = steps // self._block
        self._times: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self._warm + self._blocks * self._block + 1

    def __iter__(self) -> Iterator[Any]:
        self._times.clear()
        batches = cycle(self.batches)
        yield from islice(batches, self._warm)
        for _ in range(self._blocks):
            self._times.append((perf_counter(), process_time()))
            yield from islice(batches, self._block)
        self._times.append((perf_counter(), process_time()))
        yield next(batches)

    def blocks(self) -> list[float]:
        """Return how many seconds each block has worked, on all threads."""
        return [after[1] - before[1] for before, after in pairwise(self._times)]

    def microseconds(self) -> dict[str, float]:
        """Return the time of a step by each of the clocks."""
        (wall, cpu), (wall_end, cpu_end) = self._times[0], self._times[-1]
        scale = 1e6 / (self._blocks * self._block)
        blocks = sorted(self.blocks())
        return {
            "cpu": (cpu_end - cpu) * scale,
            "quiet": blocks[len(blocks) // 10] * 1e6 / self._block,
            "wall": (wall_end - wall) * scale,
        }


class Rows:
    """What a user writes by hand: a JSON line per row, in the file as soon as it is written."""

    def __init__(self, path: Path, interval: int) -> None:
        self._file = path.open("w", buffering=1)
        self.interval = interval

    def due(self, step: int) -> bool:
        return step % self.interval == 0

    def write(self, step: int, loss: float, lr: float, norm: float | None = None) -> None:
        row = {"step": step, "loss": loss, "lr": lr}
        if norm is not None:
            row["grad_norm"] = norm
        self._file.write(json.dumps(row) + "\n")


def silent(base: type, condition: Condition, event: Callable[[str], bool] | None = None) -> list[Any]:
    """Return the condition's callbacks that do nothing.

    Args:
        base: The callback class.
        condition: How many, and whether they override the events.
        event: Tells the name of an event from others; None: whatever begins with ``on_``.
    """
    kind = base
    if condition.listening:
        is_event = event or (lambda name: name.startswith("on_"))
        names = [name for name in dir(base) if is_event(name)]
        kind = type("Listener", (base,), {name: lambda self, *args, **kwargs: None for name in names})
    return [kind() for _ in range(condition.callbacks)]
