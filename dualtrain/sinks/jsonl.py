"""A sink that writes JSON lines to a locked file."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dualtrain.arguments import positive_int
from dualtrain.records import SCHEMA_VERSION, Record, arrays_of, part_of, parts_of, sidecar_of
from dualtrain.sinks.arrays import save_arrays
from dualtrain.sinks.rotation import LOG_FLAGS, end_torn_line, is_at, lock, open_log, unlock

_WAITING_LINES = 1000
"""Maximum number of pending lines before they are written without a flush."""


class JsonlSink:
    """Append records to a file, one strict JSON object per line.

    The constructor opens the file. An existing log of that name is renamed first, to the first
    free of ``name.1.jsonl``, ``name.2.jsonl``, ..., with its parts, its run information and
    its arrays; a log that another run is writing is refused. Missing folders are created. Devices
    and pipes are written to directly.

    A record's ``arrays`` are saved as ``<path>.arrays/step-000000050.npz``, except for devices
    and pipes. A second record with arrays of the same step replaces the first file. ``file`` and
    ``allow_pickle`` are invalid names of arrays, since they are arguments of ``numpy.savez``.

    A write that fails half-way, as on a full disk, leaves no incomplete line: the file is truncated
    after its last complete line, and the next successful write continues there. A child of ``fork``
    does not write to the file.

    Args:
        path: The file.
        append: Continue an existing log, for a resumed run.
        meta: Run information, written to ``<path>.meta.json``: one line of JSON, with the
            schema version. Not for devices and pipes; a continued log keeps its own.
        line_buffering: True: write each line immediately. False: lines wait for ``flush``, which
            writes them in one call; a failed flush keeps them for the next one, up to 1000.
        max_bytes: Maximum size of the file, except for a single longer line: the file is
            renamed to ``name.part1.jsonl``, ``name.part2.jsonl``, ... and a new one started.
            None: no limit. On a file system without hard links the file keeps growing, with an
            ``OSError``.

    Attributes:
        lost: Records missing in the file because of write errors; pending lines count after the
            sink is closed.

    Raises:
        LogInUseError: Another run is writing this file.
        OSError: The file cannot be opened or written.

    Cost: about 5 us per record for its JSON, and 3 us for the system calls, per line with
    ``line_buffering`` or else per flush. Arrays are not compressed: compression would save 10 to
    20 % of the size and take 5 to 80 times as long.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        append: bool = False,
        meta: dict[str, Any] | None = None,
        line_buffering: bool = True,
        max_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.line_buffering = line_buffering
        self.max_bytes = None if max_bytes is None else positive_int("JsonlSink", "max_bytes", max_bytes)
        self.lost = 0
        self._place = self.path.absolute()  # valid after a chdir
        self._lines: list[bytes] = []  # not yet in the file
        self._torn = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_log(self.path, append)
        try:
            self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if self._regular:
                end_torn_line(descriptor)
                sidecar = sidecar_of(self.path)
                if meta is not None and not (append and sidecar.exists()):
                    line = json.dumps({"schema": SCHEMA_VERSION, **meta}) + "\n"
                    sidecar.write_text(line, encoding="utf-8")
            self._size = os.lseek(descriptor, 0, os.SEEK_END) if self._regular else 0
        except BaseException:
            os.close(descriptor)  # which also releases the log
            raise
        self._descriptor: int | None = descriptor
        self._limit = self.max_bytes if self._regular else None
        _open_sinks.add(self)

    def write(self, record: Record) -> None:
        """Write one record's line, or keep it for ``flush``, and save its arrays.

        Raises:
            OSError: The line or an array could not be written. The line is written even if an
                array cannot be.
        """
        if self._descriptor is None:
            raise ValueError(f"the log {str(self.path)!r} is closed.")
        try:
            line = (record.to_json() + "\n").encode()
            if len(self._lines) >= _WAITING_LINES:
                self._write_out()
        except Exception:
            self.lost += 1
            raise
        self._lines.append(line)
        try:
            if self.line_buffering:
                self._write_out()
        except OSError:
            self._give_up()
            raise
        finally:
            if record.arrays and self._regular:
                save_arrays(arrays_of(self._place), record)

    def flush(self) -> None:
        """Write the pending lines in one call; lines that fail stay pending."""
        if self._descriptor is not None:
            self._write_out()

    def close(self) -> None:
        """Flush and close the file, and release its lock."""
        if self._descriptor is None:
            return
        try:
            self._write_out()
        finally:
            self._give_up()
            descriptor, self._descriptor = self._descriptor, None
            if self._regular:
                unlock(descriptor)
            os.close(descriptor)

    def disown(self) -> None:
        """Close the file without writing and without releasing its lock, for a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        self._lines = []
        if descriptor is not None:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"

    def _give_up(self) -> None:
        self.lost += len(self._lines)
        self._lines.clear()

    def _write_out(self) -> None:
        trouble = None
        while self._lines:
            count = self._fitting()
            if count:
                self._append(b"".join(self._lines[:count]), count)
                continue
            try:
                self._begin_part()
            except OSError as error:  # keep the lines: the file grows beyond its limit
                self._limit = self._size + (self.max_bytes or 0)
                trouble = error
        if trouble is not None:
            raise trouble

    def _fitting(self) -> int:
        """Return the number of pending lines that fit into this file; at least one if it is empty."""
        if self._limit is None:
            return len(self._lines)
        room = self._limit - self._size
        for count, line in enumerate(self._lines):
            room -= len(line)
            if room < 0:
                return count if count or self._size else 1
        return len(self._lines)

    def _append(self, data: bytes, count: int) -> None:
        descriptor = self._descriptor
        assert descriptor is not None
        if self._torn:
            self._size += os.write(descriptor, b"\n")
            self._torn = False
        done = self._already(descriptor, data) if self._regular else 0
        try:
            while done < len(data):
                done += os.write(descriptor, data[done:] if done else data)
        except OSError:
            whole = data.rfind(b"\n", 0, done) + 1
            self._torn = done > whole
            if self._torn and self._regular:
                with suppress(OSError):
                    os.ftruncate(descriptor, self._size + whole)
                    self._torn, done = False, whole
            self._size += done
            del self._lines[: data.count(b"\n", 0, whole)]
            raise
        self._size += len(data)
        del self._lines[:count]

    def _already(self, descriptor: int, data: bytes) -> int:
        """Return the bytes of ``data`` already in the file: all if Ctrl-C interrupted the bookkeeping."""
        size = os.lseek(descriptor, 0, os.SEEK_END)
        more = size - self._size
        if more > 0 and data.startswith(os.pread(descriptor, more, self._size)):
            return more
        self._size = size  # another process changed the file, or nothing was written
        return 0

    def _begin_part(self) -> None:
        """Rename the full file to a part, and start an empty one under the log's name.

        The log's name always refers to a locked file: the new file is locked before it replaces
        the full one atomically.
        """
        old = self._descriptor
        assert old is not None
        if not is_at(old, self._place):
            raise FileNotFoundError(f"the log {str(self.path)!r} has been moved or replaced: no new part.")
        fresh = self._place.with_name(self._place.name + ".next")
        descriptor = os.open(fresh, LOG_FLAGS, 0o666)
        try:
            lock(descriptor, fresh)
            os.ftruncate(descriptor, 0)  # a killed run may have left it
            number, part = ([(0, None), *parts_of(self._place).items()])[-1]
            if part is None or not is_at(old, part):  # the link exists if a run was killed at this point
                os.link(self._place, part_of(self._place, number + 1))
            os.replace(fresh, self._place)
        except BaseException:
            if not is_at(descriptor, self._place):
                os.close(descriptor)
                with suppress(OSError):
                    fresh.unlink()
                raise
            self._go_on_in(descriptor)
            raise
        self._go_on_in(descriptor)

    def _go_on_in(self, descriptor: int) -> None:
        old, self._descriptor = self._descriptor, descriptor
        self._size, self._limit = 0, self.max_bytes
        assert old is not None
        os.close(old)


_open_sinks: WeakSet[JsonlSink] = WeakSet()


def _leave_to_parent() -> None:
    for sink in list(_open_sinks):
        sink.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
