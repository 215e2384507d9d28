"""The log of a run, used by logging callbacks."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dualtrain._version import __version__
from dualtrain.context import RunContext
from dualtrain.records import Record, of_rank
from dualtrain.sinks.async_ import AsyncSink
from dualtrain.sinks.fan_out import FanOut
from dualtrain.sinks.jsonl import JsonlSink
from dualtrain.sinks.sink import Sink

_logger = logging.getLogger(__name__)

Later = Callable[[], Mapping[str, Any]]
"""Function that returns a record's deferred values."""


class RunLog:
    """A log in a JSONL file, in other sinks, or in both, whose write errors do not end the run.

    Open it at train begin with ``RunLog.open``, and close it at teardown. An ``OSError`` while
    writing, as on a full disk, causes one warning; lost lines are counted, and logging resumes when
    there is space again.

    Args:
        sink: The sink of the records.
        path: The file, for messages; None: there is no file.
        run_context: The run, which determines when deferred values are read. None: they are read
            immediately.
        flush_each: Flush after each record.
    """

    def __init__(
        self,
        sink: Sink,
        path: str | os.PathLike[str] | None = None,
        *,
        run_context: RunContext | None = None,
        flush_each: bool = False,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._sink = sink
        self._run_context = run_context
        self._flush_each = flush_each
        self._waiting: deque[tuple[Record, Later | None]] = deque()
        self._warned = self._told = False

    @classmethod
    def open(
        cls,
        run_context: RunContext,
        log_file: str | os.PathLike[str] | None,
        *,
        sinks: Sequence[Sink] = (),
        rank: str = "main",
        asynchronous: bool = True,
        append: bool = False,
        max_bytes: int | None = None,
        meta: dict[str, Any] | None = None,
    ) -> RunLog | None:
        """Open the log of a run, and write its run information.

        Args:
            run_context: The run.
            log_file: The file of rank 0; other ranks write ``train_log.rank1.jsonl`` and so on. None:
                the records go only to ``sinks``.
            sinks: Further sinks of the records. They are closed with the log.
            rank: ``"main"``: only rank 0 writes. ``"all"``: every rank writes.
            asynchronous: True: write on one thread for all sinks, at least once per second. False:
                write each line immediately.
            append: Continue an existing log.
            max_bytes: As in ``JsonlSink``.
            meta: Additional run information.

        Returns:
            The log, or None on a rank that does not write, or without a file and sinks.

        Raises:
            LogInUseError: Another run is writing this file.
            OSError: The file cannot be opened or written.
        """
        if (rank == "main" and not run_context.is_main) or (log_file is None and not sinks):
            return None
        path, file = None, None
        if log_file is not None:
            path = of_rank(Path(log_file), run_context.rank)
            file = JsonlSink(
                path,
                append=append,
                meta={**_describe(run_context), **(meta or {})},
                line_buffering=not asynchronous,
                max_bytes=max_bytes,
            )
        every = list(sinks) if file is None else [file, *sinks]
        try:
            sink = every[0] if len(every) == 1 else FanOut(*every)
            if asynchronous:
                sink = AsyncSink(sink)
        except BaseException:
            if file is not None:
                file.close()
            raise
        return cls(sink, path, run_context=run_context, flush_each=bool(sinks) and not asynchronous)

    @property
    def lost(self) -> int:
        """Lines that could not be written; complete after the log is closed."""
        lost: int = getattr(self._sink, "lost", 0)
        return lost

    def write(self, record: Record, *, later: Later | None = None) -> None:
        """Write one record with its arrays. An ``OSError`` is not raised, but causes one warning.

        Args:
            record: The record.
            later: Returns the record's deferred values, which a device is still copying. It is called
                once, at the end of the next step, of the epoch or of the run; until then this record
                and all later ones are queued, in order.
        """
        if later is not None or self._waiting:
            self._waiting.append((record, later))
        else:
            self._pass_on(record)
        if later is not None:
            if self._run_context is None:
                self._complete()
            else:
                self._run_context.defer(self._complete)

    def flush(self) -> None:
        """Write all records so far to the file and the sinks."""
        self._complete()
        try:
            self._sink.flush()
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Flush and close the file and the sinks, and report lost lines, if any."""
        try:
            self._complete()
        finally:
            self._close()

    def __repr__(self) -> str:
        return f"RunLog({self._name})"

    @property
    def _name(self) -> str:
        return repr(self._sink) if self.path is None else repr(str(self.path))

    def _complete(self) -> None:
        """Write the queued records with their deferred values."""
        while self._waiting:
            record, later = self._waiting.popleft()
            if later is not None:
                record.values.update(later())
            self._pass_on(record)

    def _pass_on(self, record: Record) -> None:
        try:
            self._sink.write(record)
            if self._flush_each:
                self._sink.flush()
        except OSError as error:
            self._warn(error)

    def _close(self) -> None:
        try:
            self._sink.close()
        except OSError as error:
            self._warn(error)
        finally:
            if self.lost and not self._told:
                self._told = True
                name = self._name if self.path is None else self.path
                _logger.warning("the log %s could not be written; lines lost: %d.", name, self.lost)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the log {self._name} cannot be written ({error}): training continues, "
            f"and lines that cannot be written are lost.",
            RuntimeWarning,
            stacklevel=3,
        )


def _describe(run_context: RunContext) -> dict[str, Any]:
    backend = run_context.backend
    network = run_context.original_args().get("network")
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dualtrain": __version__,
        "python": platform.python_version(),
        "backend": None if backend is None else str(backend),
        "backend_version": None if backend is None else backend.version(),
        "model": None if network is None else type(network).__name__,
        "epochs": run_context.epochs,
        "batches_per_epoch": run_context.batches_per_epoch,
        "rank": run_context.rank,
        "world_size": run_context.world_size,
    }
