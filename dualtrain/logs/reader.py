"""Read logs, including incomplete logs of killed runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError
from dualtrain.records import Record, arrays_of, parts_of, ranks_of, sidecar_of


@dataclass(frozen=True)
class Log:
    """The contents of a log.

    Attributes:
        path: The file.
        records: Its records, in order.
        meta: The run information; empty if there is none.
        torn: Incomplete lines left by a killed run, as text.
    """

    path: Path
    records: list[Record]
    meta: dict[str, Any] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the values of training, in order of appearance."""
        return self.names_of("train")

    def names_of(self, mode: str) -> list[str]:
        """Return the names of the values of ``"train"`` or ``"eval"``, in order of appearance."""
        of_mode = (record for record in self.records if record.mode == mode)
        return list(dict.fromkeys(name for record in of_mode for name in record.values))

    def column(self, name: str, mode: str = "train") -> tuple[list[int], list[Any]]:
        """Return the steps of a value's records, and its values.

        Args:
            name: The name of the value.
            mode: ``"train"``: rows of training. ``"eval"``: rows of evaluations; their step is the
                last training step before the evaluation.

        Raises:
            ArgumentValueError: No record of that mode has the value; the message lists the names.
        """
        rows = [record for record in self.records if record.mode == mode and name in record.values]
        if not rows:
            raise ArgumentValueError(self._no_such(name, mode))
        return [row.step for row in rows], [row.values[name] for row in rows]

    def arrays(self) -> Mapping[int, dict[str, Any]]:
        """Return the log's arrays, by step and name; empty if there are none.

        Each access reads a step's arrays from disk, as numpy arrays.
        """
        return _Arrays(arrays_of(self.path))

    def _no_such(self, name: str, mode: str) -> str:
        named = {"train": self.names, "eval": self.names_of("eval")}
        there = ", ".join(named.pop(mode, [])) or "no values"
        others = [f"; of mode {other!r}: {', '.join(names)}" for other, names in named.items() if names]
        of_mode = "" if mode == "train" else f" of mode {mode!r}"
        return f"{self.path} has no {name!r}{of_mode}; it has {there}{''.join(others)}."


class _Arrays(Mapping[int, dict[str, Any]]):
    """Step -> its arrays, read on access."""

    def __init__(self, folder: Path) -> None:
        found = (re.fullmatch(r"step-(\d+)\.npz", path.name) for path in sorted(folder.glob("step-*.npz")))
        self._files = {int(match[1]): folder / match[0] for match in found if match}

    def __getitem__(self, step: int) -> dict[str, Any]:
        path = self._files[step]
        import numpy as np

        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __repr__(self) -> str:
        return f"arrays of steps {list(self._files)}"


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a JSONL log and its run information.

    The parts of a split log are joined, in order. Incomplete lines, as left by killed runs, are
    collected in ``torn``; there may be several, since a resumed run continues after them.

    Raises:
        FileNotFoundError: There is no such file.
        ArgumentValueError: The file has lines, and none of them is a record.
    """
    path = Path(path)
    records, torn = [], []
    for raw in _lines_of(path):
        line = raw.decode(errors="replace")
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(line))
        except ArgumentValueError:
            torn.append(line.rstrip("\r\n"))
    if torn and not records:
        raise ArgumentValueError(f"{path} is no log: none of its {len(torn)} lines is a record.")
    return Log(path, records, _read_meta(sidecar_of(path)), torn)


def read_ranks(path: str | os.PathLike[str]) -> dict[int, Log]:
    """Read the logs of all ranks of a run, by rank.

    Args:
        path: The log of rank 0, ``train_log.jsonl``; the others are ``train_log.rank1.jsonl``
            and so on.

    Raises:
        FileNotFoundError: No rank has a log of that name.
        ArgumentValueError: One of the files has lines, and none of them is a record.
    """
    path = Path(path)
    logs = {rank: read_log(log) for rank, log in ranks_of(path).items()}
    return logs or {0: read_log(path)}  # which raises


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log's parts, in order, and then of the log itself.

    The log itself is opened first: if a run renames it to a part meanwhile, it is read once, and
    newer files are not read.
    """
    with path.open("rb") as last:
        for part in parts_of(path).values():
            if os.path.samestat(part.stat(), os.fstat(last.fileno())):
                break
            with part.open("rb") as lines:
                yield from lines
        yield from last


def _read_meta(sidecar: Path) -> dict[str, Any]:
    try:
        meta = json.loads(sidecar.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a killed run may leave it incomplete
        return {}
    return meta if isinstance(meta, dict) else {}
