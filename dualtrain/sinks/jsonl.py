"""JSON lines in a file that nobody else is writing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from dualtrain.errors import LogInUseError
from dualtrain.records import SCHEMA_VERSION, Record

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, so a second writer is not noticed there
    fcntl = None  # type: ignore[assignment]


class JsonlSink:
    """Append records to a file, one strict JSON object a line, each line written at once.

    The file is opened here. A finished log of that name is moved aside first, to the first
    free of ``name.1.jsonl``, ``name.2.jsonl``, ...; a log that a live run is writing is
    refused. Missing folders are made. Devices and pipes are written to as they are.

    Args:
        path: The file.
        append: Continue the log that is there, as a resumed run does.
        meta: Information about the run, written beside the log as ``<path>.meta.json``: one
            line of JSON, with the schema version. Not for devices and pipes; a log that is
            continued keeps what it has.

    Raises:
        LogInUseError: Another live run is writing this file.
        OSError: The file cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, append: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_log(self.path, append)
        try:
            if _is_regular(descriptor):
                _end_torn_line(descriptor)
                sidecar = sidecar_of(self.path)
                if meta is not None and not (append and sidecar.exists()):
                    line = json.dumps({"schema": SCHEMA_VERSION, **meta}) + "\n"
                    sidecar.write_text(line, encoding="utf-8")
            self._file = os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", newline="\n")
        except BaseException:
            os.close(descriptor)  # which also releases the log
            raise

    def write(self, record: Record) -> None:
        """Write one line."""
        self._file.write(record.to_json() + "\n")

    def flush(self) -> None:
        """Flush the file's buffer."""
        self._file.flush()

    def close(self) -> None:
        """Close the file, which also releases it for other runs."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"


def sidecar_of(path: Path) -> Path:
    """Return where the run information of a log is kept."""
    return path.with_name(path.name + ".meta.json")


def _open_log(path: Path, append: bool) -> int:
    while True:
        special = path.exists() and not path.is_file()
        flags = os.O_WRONLY if special else os.O_RDWR | os.O_CREAT | os.O_APPEND
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if special:
                return descriptor
            _lock(descriptor, path)
            if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
                os.close(descriptor)  # moved aside by another run between our two looks
                continue
            if append or os.fstat(descriptor).st_size == 0:
                return descriptor
            _move_aside(path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        # On the open descriptor: refused to a second run in this process too, and released
        # by the system when its owner dies.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LogInUseError(
            f"the log {str(path)!r} is being written by another run: give this run another log_file, "
            f"or wait until the other one ends."
        ) from None


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    if sidecar_of(path).exists():
        sidecar_of(path).replace(sidecar_of(aside))


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _end_torn_line(descriptor: int) -> None:
    """End a last line that a killed run left torn, so that it cannot spoil the next one."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
