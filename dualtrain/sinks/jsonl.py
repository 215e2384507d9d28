"""JSON lines in a file that nobody else is writing."""

from __future__ import annotations

import itertools
import json
import os
import stat
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dualtrain.errors import LogInUseError
from dualtrain.records import SCHEMA_VERSION, Record, arrays_of, part_of, parts_of, sidecar_of
from dualtrain.triggers import positive_int

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, so a second writer is not noticed there
    fcntl = None  # type: ignore[assignment]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_WAITING_LINES = 1000
"""How many lines wait for a flush before they are written without one."""


class JsonlSink:
    """Append records to a file, one strict JSON object a line.

    The file is opened here. A finished log of that name is moved aside first, to the first
    free of ``name.1.jsonl``, ``name.2.jsonl``, ..., with its parts, its run information and
    its arrays; a log that a live run is writing is refused. Missing folders are made. Devices
    and pipes are written to as they are.

    A record's ``arrays`` are saved as ``<path>.arrays/step-000000050.npz``, not for devices
    and pipes. A second record of a step with arrays replaces the first one's.

    A write that fails half-way, as on a full disk, leaves no torn line: the file is cut back
    to its last whole one, and the next write that succeeds goes on there. A child of ``fork``
    has no part in the file.

    Args:
        path: The file.
        append: Continue the log that is there, as a resumed run does.
        meta: Information about the run, written beside the log as ``<path>.meta.json``: one
            line of JSON, with the schema version. Not for devices and pipes; a log that is
            continued keeps what it has.
        line_buffering: Write each line at once. If not, lines wait for ``flush``, which writes
            them in one call; a flush that fails keeps them for the next one, up to 1000.
        max_bytes: The size that the file does not exceed, unless a single line does: it is
            renamed to ``name.part1.jsonl``, ``name.part2.jsonl``, ... and a new one begun.
            None: no limit. Where a file system has no hard links the file grows on, and an
            ``OSError`` says so.

    Attributes:
        lost: Records that are not in the file since it could not be written; those that wait
            for a flush count once the sink is closed.

    Raises:
        LogInUseError: Another live run is writing this file.
        OSError: The file cannot be opened or written.

    Cost: about 5 us a record for its JSON, and 3 us for the system calls with
    ``line_buffering``, or once a flush without. Arrays are not compressed: that would make
    them 10 to 20 % smaller and take 5 to 80 times as long.
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
        self._place = self.path.absolute()  # also after a chdir
        self._lines: list[bytes] = []  # not yet in the file
        self._torn = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_log(self.path, append)
        try:
            self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if self._regular:
                _end_torn_line(descriptor)
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
        """Take one record: write its line, or let it wait for ``flush``, and save its arrays.

        Raises:
            OSError: The line, or an array, could not be written. An array that could not does
                not keep the line out of the log.
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
                _save_arrays(arrays_of(self._place), record)

    def flush(self) -> None:
        """Write the lines that wait, in one call. What cannot be written waits on."""
        if self._descriptor is not None:
            self._write_out()

    def close(self) -> None:
        """Flush and close the file, which also releases it for other runs."""
        if self._descriptor is None:
            return
        try:
            self._write_out()
        finally:
            self._give_up()
            descriptor, self._descriptor = self._descriptor, None
            if fcntl is not None and self._regular:
                # Not left to the closing: a process that is being started may have the
                # descriptor too for a moment.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
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
            except OSError as error:  # no reason to lose lines: the file grows on
                self._limit = self._size + (self.max_bytes or 0)
                trouble = error
        if trouble is not None:
            raise trouble

    def _fitting(self) -> int:
        """Return how many of the lines fit into this file; at least one if it is empty."""
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
        """Return how much of it is in the file: all, where Ctrl-C came before that was noted."""
        size = os.lseek(descriptor, 0, os.SEEK_END)
        more = size - self._size
        if more > 0 and data.startswith(os.pread(descriptor, more, self._size)):
            return more
        self._size = size  # somebody has changed the file, or nothing has happened
        return 0

    def _begin_part(self) -> None:
        """Give the full file the name of a part, and begin an empty one under the log's name.

        The log's name is that of a locked file at every moment: the full one until the new
        one, locked already, takes its place in one step.
        """
        old = self._descriptor
        assert old is not None
        if not _is_at(old, self._place):
            raise FileNotFoundError(f"the log {str(self.path)!r} has been moved or replaced: no new part.")
        fresh = self._place.with_name(self._place.name + ".next")
        descriptor = os.open(fresh, _FLAGS, 0o666)
        try:
            _lock(descriptor, fresh)
            os.ftruncate(descriptor, 0)  # a killed run may have left it
            number, part = ([(0, None), *parts_of(self._place).items()])[-1]
            if part is None or not _is_at(old, part):  # as it is if a run was killed in between
                os.link(self._place, part_of(self._place, number + 1))
            os.replace(fresh, self._place)
        except BaseException:
            if not _is_at(descriptor, self._place):
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
    """In a forked child: have no part in the files of the parent, nor in their locks."""
    for sink in list(_open_sinks):
        descriptor, sink._descriptor = sink._descriptor, None
        sink._lines = []
        if descriptor is not None:
            os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _open_log(path: Path, append: bool) -> int:
    while True:
        special = path.exists() and not path.is_file()
        flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) if special else _FLAGS
        descriptor = os.open(path, flags, 0o666)
        try:
            if special:
                return descriptor
            _lock(descriptor, path)
            if not _is_at(descriptor, path):
                os.close(descriptor)  # moved aside by another run between our two looks
                continue
            left = _belongings(path)
            if append or (os.fstat(descriptor).st_size == 0 and not left):
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


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _belongings(path: Path) -> list[Path]:
    """Return the parts and the arrays of a log that there are."""
    return [*parts_of(path).values(), *filter(Path.exists, [arrays_of(path)])]


def _move_aside(path: Path) -> None:
    """Rename a log and what belongs to it. The log itself comes last: it is locked until then."""
    for number in itertools.count(1):
        moves = _moves(path, number)
        if not any(new.exists() for _, new in moves):
            break
    for old, new in moves:
        old.rename(new)


def _moves(path: Path, number: int) -> list[tuple[Path, Path]]:
    aside = path.with_name(f"{path.stem}.{number}{path.suffix}")
    moves = [(part, part_of(aside, n)) for n, part in parts_of(path).items()]
    moves += [(arrays_of(path), arrays_of(aside)), (sidecar_of(path), sidecar_of(aside))]
    return [(old, new) for old, new in moves if old.exists()] + [(path, aside)]


def _end_torn_line(descriptor: int) -> None:
    """End a last line that a killed run left torn, so that it cannot spoil the next one."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")


def _save_arrays(folder: Path, record: Record) -> None:
    """Write an npz file beside its place and rename it, so that it is never torn."""
    import numpy as np

    npy: Any = np.lib.format
    folder.mkdir(exist_ok=True)
    place = folder / f"step-{record.step:09d}.npz"
    beside = place.with_suffix(".npz.next")
    try:
        # As numpy.savez does it, which takes no array called "file".
        with zipfile.ZipFile(beside, "w") as archive:
            for name, array in record.arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    npy.write_array(member, np.asarray(array), allow_pickle=False)
        beside.replace(place)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
