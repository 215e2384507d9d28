"""Lock the log of a running run, and rename the log of an earlier one."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from dualtrain.errors import LogInUseError
from dualtrain.records import arrays_of, part_of, parts_of, sidecar_of

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, so a second writer is not detected there
    fcntl = None  # type: ignore[assignment]

LOG_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_log(path: Path, append: bool) -> int:
    """Open and lock a log; an existing one is renamed first.

    Args:
        path: The file.
        append: Continue an existing log.

    Returns:
        The descriptor.

    Raises:
        LogInUseError: Another run is writing this file.
        OSError: The file cannot be opened.
    """
    while True:
        special = path.exists() and not path.is_file()
        flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) if special else LOG_FLAGS
        descriptor = os.open(path, flags, 0o666)
        try:
            if special:
                return descriptor
            lock(descriptor, path)
            if not is_at(descriptor, path):
                os.close(descriptor)  # another run renamed it before it was locked here
                continue
            left = _belongings(path)
            if append or (os.fstat(descriptor).st_size == 0 and not left):
                return descriptor
            _move_aside(path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def lock(descriptor: int, path: Path) -> None:
    """Lock a log, or raise LogInUseError."""
    if fcntl is None:
        return
    try:
        # The lock belongs to the open descriptor: it also excludes a second run in this process, and
        # the system releases it when its process ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LogInUseError(
            f"the log {str(path)!r} is being written by another run: give this run another log_file, "
            f"or wait until the other one ends."
        ) from None


def unlock(descriptor: int) -> None:
    """Release a log before it is closed: a process being started may also have the descriptor."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _belongings(path: Path) -> list[Path]:
    """Return the existing parts and arrays of a log."""
    return [*parts_of(path).values(), *filter(Path.exists, [arrays_of(path)])]


def _move_aside(path: Path) -> None:
    """Rename a log with its files. The log itself is last, since it holds the lock."""
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


def end_torn_line(descriptor: int) -> None:
    """End an incomplete last line of a killed run, so that it does not corrupt the next one."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
