"""A log record, its conversion from and to a line of strict JSON, and the names of a log's files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError

SCHEMA_VERSION = 1
_to_json = json.JSONEncoder(allow_nan=False).encode  # json.dumps would create an encoder per line
_OWN_FIELDS = ("step", "epoch", "mode", "timestamp", "nonfinite")


@dataclass(frozen=True)
class Record:
    """Values of one step, as plain immutable Python values.

    Attributes:
        step: Batches so far, from 1.
        epoch: From 1; None in a separate evaluation.
        mode: ``"train"`` or ``"eval"``.
        time: Unix time in seconds.
        values: Name -> float, integer, tuple of floats (one per parameter group) or None; or a tuple of
            texts, or of mappings of such values (one per layer, say). Lists come back as tuples.
        arrays: Name -> numpy array, for large values. They are not part of the line or of
            comparisons; sinks may save them in separate files.
    """

    step: int
    epoch: int | None
    mode: str
    time: float
    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> str:
        """Return the record as one line of strict JSON, without the newline.

        Numbers keep their full precision. JSON has no NaN and no infinities: they become
        null, and a ``nonfinite`` object stores their values. ``mode`` is omitted in training.
        """
        row: dict[str, Any] = {"step": self.step, "epoch": self.epoch}
        if self.mode != "train":
            row["mode"] = self.mode
        row.update(self.values)
        row["timestamp"] = self.time
        try:
            return _to_json(row)
        except ValueError:
            pass
        nonfinite: dict[str, str] = {}
        for name, value in row.items():
            row[name] = _strict(name, value, nonfinite)
        row["nonfinite"] = nonfinite
        return _to_json(row)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read a record from its line, including NaN and infinities.

        Raises:
            ArgumentValueError: The line is not a complete JSON object with a ``step``.
        """
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ArgumentValueError(f"not a whole line of JSON: {line[:80]!r}") from error
        if not isinstance(row, dict) or "step" not in row:
            raise ArgumentValueError(f"not a log record (a JSON object with a step): {line[:80]!r}")
        for name, text in row.get("nonfinite", {}).items():
            _restore(row, name, float(text))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        return cls(
            step=row["step"],
            epoch=row.get("epoch"),
            mode=row.get("mode", "train"),
            time=row.get("timestamp", 0.0),
            values={k: v for k, v in values.items() if k not in _OWN_FIELDS},
        )


def _strict(path: str, value: Any, nonfinite: dict[str, str]) -> Any:
    """Return the value with null for non-finite numbers, which are recorded under their paths."""
    if isinstance(value, dict):
        return {key: _strict(f"{path}.{key}", item, nonfinite) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_strict(f"{path}.{i}", item, nonfinite) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = str(value)
        return None
    return value


# The files of a log with the name ``train_log.jsonl``.


def of_rank(path: Path, rank: int) -> Path:
    """Return the log of a rank: ``train_log.rank1.jsonl``; rank 0 has the given name."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def ranks_of(path: Path) -> dict[int, Path]:
    """Return the existing logs by rank, in order."""
    return ({0: path} if path.exists() else {}) | _numbered(path, "rank")


def part_of(path: Path, number: int) -> Path:
    """Return the name of a full part of a log: ``train_log.part1.jsonl``."""
    return path.with_name(f"{path.stem}.part{number}{path.suffix}")


def parts_of(path: Path) -> dict[int, Path]:
    """Return the existing full parts of a log by number, in order."""
    return _numbered(path, "part")


def sidecar_of(path: Path) -> Path:
    """Return the file of a log's run information: ``train_log.jsonl.meta.json``."""
    return path.with_name(path.name + ".meta.json")


def arrays_of(path: Path) -> Path:
    """Return the folder of a log's arrays: ``train_log.jsonl.arrays``."""
    return path.with_name(path.name + ".arrays")


def _numbered(path: Path, word: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(path.stem)}\.{word}([1-9]\d*){re.escape(path.suffix)}")
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except FileNotFoundError:
        return {}
    found = {int(match[1]): path.with_name(name) for name in names if (match := pattern.fullmatch(name))}
    return dict(sorted(found.items()))


def _restore(container: Any, path: str, value: float) -> bool:
    """Restore a value at the path recorded by ``_strict``, and return whether it was found.

    Names may contain dots, so every prefix of the path is tried.
    """
    items = enumerate(container) if isinstance(container, list) else container.items()
    named = {str(name): name for name, _ in items}
    if path in named:
        container[named[path]] = value
        return True
    return any(
        isinstance(container[name], (list, dict))
        and path.startswith(f"{text}.")
        and _restore(container[name], path[len(text) + 1 :], value)
        for text, name in named.items()
    )
