"""One row of a log, to and from one line of strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from dualtrain.errors import ArgumentValueError

SCHEMA_VERSION = 1
_OWN_FIELDS = ("step", "epoch", "mode", "timestamp", "nonfinite")


@dataclass(frozen=True)
class Record:
    """Numbers of one step, as plain Python values that nobody mutates.

    Attributes:
        step: Batches so far, from 1.
        epoch: From 1; None in a lone evaluation.
        mode: ``"train"`` or ``"eval"``.
        time: Unix time in seconds.
        values: Name -> float, integer, tuple of floats (one per parameter group) or None; or a tuple of
            texts, or of mappings of such values (one per layer, say). Lists come back as tuples.
    """

    step: int
    epoch: int | None
    mode: str
    time: float
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line of strict JSON, without the newline.

        Numbers keep their full precision. JSON has no NaN and no infinities: they become
        null, and a ``nonfinite`` object says which it was. ``mode`` is left out in training.
        """
        row: dict[str, Any] = {"step": self.step, "epoch": self.epoch}
        if self.mode != "train":
            row["mode"] = self.mode
        row.update(self.values)
        row["timestamp"] = self.time
        try:
            return json.dumps(row, allow_nan=False)
        except ValueError:
            pass
        nonfinite: dict[str, str] = {}
        for name, value in row.items():
            row[name] = _strict(name, value, nonfinite)
        row["nonfinite"] = nonfinite
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read a record back from its line, NaN and infinities included.

        Raises:
            ArgumentValueError: The line is not a whole JSON object with a ``step``.
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
    """Return the value with null for what JSON does not have, which is noted under its path."""
    if isinstance(value, dict):
        return {key: _strict(f"{path}.{key}", item, nonfinite) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_strict(f"{path}.{i}", item, nonfinite) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = str(value)
        return None
    return value


def _restore(container: Any, path: str, value: float) -> bool:
    """Put a value where ``_strict`` has noted it; names may have dots, and tell whether it was found."""
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
