"""Log files: their rows, their columns, and the descriptors that are open on them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DEFAULT = "train_log.jsonl"
"""The file that StepLogger writes unless it is given another name."""


def rows_of(path: str | Path = DEFAULT) -> list[dict[str, Any]]:
    """Return the rows of a log, which must be whole lines of strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = Path(path).read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def column(name: str, path: str | Path = DEFAULT) -> list[Any]:
    """Return one value of each row of a log."""
    return [row[name] for row in rows_of(path)]


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
