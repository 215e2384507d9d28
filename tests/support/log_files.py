"""Log files: records for them, their rows and columns, and the descriptors that are open on them."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualtrain.records import Record

DEFAULT = "train_log.jsonl"
"""The file that StepLogger writes unless it is given another name."""


LOG = Path("log.jsonl")
"""The file that tests of sinks write."""


def record(step: int = 1, epoch: int = 1, mode: str = "train", arrays: Any = None, **values: Any) -> Record:
    """Return a record, always of the same time."""
    return Record(step, epoch, mode, 1700000000.5, values, arrays or {})


LINE = len(record(1).to_json()) + 1
"""The length of a log's shortest line."""


def rows_of(path: str | Path = DEFAULT) -> list[dict[str, Any]]:
    """Return the rows of a log, which must be whole lines of strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = Path(path).read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def training_rows(path: str | Path = DEFAULT) -> list[dict[str, Any]]:
    """Return the rows of training steps."""
    return [row for row in rows_of(path) if "mode" not in row]


def column(name: str, path: str | Path = DEFAULT) -> list[Any]:
    """Return one value of each training row of a log."""
    return [row[name] for row in training_rows(path)]


def steps(path: str | Path = LOG) -> list[int]:
    """Return the steps in a log."""
    return column("step", path)


@contextmanager
def room_for(lines: float) -> Iterator[None]:
    """Let no file of this process grow beyond so many lines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(lines * LINE), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_descriptors(path: str | Path) -> list[str]:
    """Return this process's descriptors that are open on a file."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = descriptor.stat()
        except FileNotFoundError:  # the listing's own
            continue
        if os.path.samestat(target, os.stat(path)):
            found.append(descriptor.name)
    return found
