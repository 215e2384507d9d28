"""Read a log back, whatever ended the run that wrote it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError
from dualtrain.records import Record


@dataclass(frozen=True)
class Log:
    """A log that was read.

    Attributes:
        path: The file.
        records: Its records, in order.
        meta: The run information beside it; empty if there is none.
        torn: Lines that a killed run left torn, as text; they are no records.
    """

    path: Path
    records: list[Record]
    meta: dict[str, Any] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the values, in the order in which they first appear."""
        return list(dict.fromkeys(name for record in self.records for name in record.values))

    def column(self, name: str) -> tuple[list[int], list[Any]]:
        """Return the steps at which a value was recorded, and the values.

        Raises:
            ArgumentValueError: No record has it; the message lists what there is.
        """
        if name not in self.names:
            raise ArgumentValueError(
                f"{self.path} has no {name!r}; it has {', '.join(self.names) or 'no values'}."
            )
        rows = [r for r in self.records if name in r.values]
        return [r.step for r in rows], [r.values[name] for r in rows]


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a JSONL log and the run information beside it.

    A line that is no whole record, as a killed run may leave one, is kept in ``torn``; any
    number of them is tolerated, since a resumed run goes on after it.

    Raises:
        FileNotFoundError: There is no such file.
        ArgumentValueError: The file has lines, and none of them is a record.
    """
    path = Path(path)
    records, torn = [], []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                records.append(Record.from_json(line))
            except ArgumentValueError:
                torn.append(line.rstrip("\n"))
    if torn and not records:
        raise ArgumentValueError(f"{path} is no log: none of its {len(torn)} lines is a record.")
    sidecar = path.with_name(path.name + ".meta.json")
    return Log(path, records, _read_meta(sidecar), torn)


def _read_meta(sidecar: Path) -> dict[str, Any]:
    try:
        meta = json.loads(sidecar.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a killed run may leave it torn
        return {}
    return meta if isinstance(meta, dict) else {}
