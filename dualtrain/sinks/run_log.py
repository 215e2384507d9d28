"""A stand-in for the log of a run, until its own branch lands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dualtrain.context import RunContext
from dualtrain.records import Record
from dualtrain.sinks.jsonl import JsonlSink


class RunLog:
    """Write the records of one run to a file."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink

    @classmethod
    def open(
        cls,
        run_context: RunContext,
        log_file: str | os.PathLike[str],
        *,
        rank: str = "main",
        asynchronous: bool = True,
        append: bool = False,
        max_bytes: int | None = None,
        meta: dict[str, Any] | None = None,
    ) -> RunLog | None:
        """Open the log; None on ranks that do not write."""
        if rank == "main" and not run_context.is_main:
            return None
        path = Path(log_file)
        if run_context.rank > 0:
            path = path.with_name(f"{path.stem}.rank{run_context.rank}{path.suffix}")
        return cls(JsonlSink(path, append=append, meta=meta or {}))

    def write(self, record: Record) -> None:
        """Write one line."""
        self._sink.write(record)

    def close(self) -> None:
        """Close the file."""
        self._sink.close()
