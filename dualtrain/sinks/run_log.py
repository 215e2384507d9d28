"""The log of a run: what logging callbacks write through."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dualtrain._version import __version__
from dualtrain.context import RunContext
from dualtrain.records import Record, of_rank
from dualtrain.sinks.async_ import AsyncSink
from dualtrain.sinks.jsonl import JsonlSink
from dualtrain.sinks.sink import Sink

_logger = logging.getLogger(__name__)


class RunLog:
    """A JSONL log that never ends the run it tells of.

    Open it at train begin with ``RunLog.open``, and close it at teardown. An ``OSError`` while
    it is written, as on a full disk, is warned of once; lines that find no room are counted,
    and the log goes on when there is room again.

    Args:
        sink: What writes the file.
        path: The file, for messages.
    """

    def __init__(self, sink: Sink, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._sink = sink
        self._warned = self._told = False

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
        """Open the log of a run, with information about the run beside it.

        Args:
            run_context: The run.
            log_file: The file of rank 0; other ranks write ``train_log.rank1.jsonl`` and so on.
            rank: ``"main"``: rank 0 alone writes. ``"all"``: every rank does.
            asynchronous: Write on a thread, at least once a second. If not, each line at once.
            append: Continue the log that is there.
            max_bytes: As in ``JsonlSink``.
            meta: What to add to the run information.

        Returns:
            The log, or None on a rank that does not write.

        Raises:
            LogInUseError: Another live run is writing this file.
            OSError: The file cannot be opened or written.
        """
        if rank == "main" and not run_context.is_main:
            return None
        path = of_rank(Path(log_file), run_context.rank)
        sink: Sink = JsonlSink(
            path,
            append=append,
            meta={**_describe(run_context), **(meta or {})},
            line_buffering=not asynchronous,
            max_bytes=max_bytes,
        )
        if asynchronous:
            try:
                sink = AsyncSink(sink)
            except BaseException:
                sink.close()
                raise
        return cls(sink, path)

    @property
    def lost(self) -> int:
        """Lines that could not be written; all of them are known once the log is closed."""
        lost: int = getattr(self._sink, "lost", 0)
        return lost

    def write(self, record: Record) -> None:
        """Take one record, with its arrays. An ``OSError`` is not raised but warned of, once."""
        try:
            self._sink.write(record)
        except OSError as error:
            self._warn(error)

    def flush(self) -> None:
        """Wait until everything written so far is in the file, as far as that can be."""
        try:
            self._sink.flush()
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Flush and close the file, and say how many lines are lost, if any are."""
        try:
            self._sink.close()
        except OSError as error:
            self._warn(error)
        finally:
            if self.lost and not self._told:
                self._told = True
                _logger.warning("the log %s could not be written; lines lost: %d.", self.path, self.lost)

    def __repr__(self) -> str:
        return f"RunLog({str(self.path)!r})"

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the log {str(self.path)!r} cannot be written ({error}): training goes on, "
            f"and lines that find no room are lost.",
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
