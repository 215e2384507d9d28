"""Shared parts of all loops: conditions, batches that measure the time, and a file for rows."""

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
    """Additional work of a run.

    Attributes:
        name: The name for the command line and tables.
        words: A description.
        callbacks: The number of callbacks that do nothing.
        listening: Whether these override every event.
        log_interval: Steps between two rows of loss and learning rate; 0: none.
        norm: Whether rows also have the global gradient norm.
        monitor: Whether dualtrain's TransformerMonitor is used.
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
    """A loop does not support a condition; the message has the reason."""


CLOCKS = {
    "cpu": "time that all threads of the process have worked",
    "quiet": "the same in the least disturbed tenth of the steps, for a busy machine; what a thread does "
    "now and then, such as writing a log, is hardly in it",
    "wall": "time by the clock on the wall, for a quiet machine",
}

BLOCKS = 20
"""Into how many blocks, if there are enough steps, a measurement is cut."""


class TimedBatches:
    """Batches for one epoch that record the time at the requests for certain batches.

    Every loop requests the next batch, so hooks are not needed, and work before and after the epoch is
    excluded. Some loops inspect the data first, so a new iterator restarts the clocks. One more batch ends
    the epoch, since some loops stop by count.

    Args:
        batches: The batches, in rotation.
        warm: Steps before the clocks start.
        steps: Steps to measure.
        block: Steps between two reads of the clocks; None: as needed for ``BLOCKS`` blocks.
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
        """Return the CPU seconds of each block, on all threads."""
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
    """A hand-written log: one JSON line per row, written immediately."""

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
        condition: Their number, and whether they override the events.
        event: Returns whether a name is an event; None: all names with the prefix ``on_``.
    """
    kind = base
    if condition.listening:
        is_event = event or (lambda name: name.startswith("on_"))
        names = [name for name in dir(base) if is_event(name)]
        kind = type("Listener", (base,), {name: lambda self, *args, **kwargs: None for name in names})
    return [kind() for _ in range(condition.callbacks)]
