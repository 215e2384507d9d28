"""Worker processes with one task at a time, which are replaced when they are killed."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


class Workers:
    """Start processes on demand; they end when the context is left.

    They are spawned, since neither framework works in a forked process after it has computed something.

    Args:
        target: Called in each process as ``target(number, connection)``. It waits for a message, does a
            task, sends a message, and repeats this until the connection is closed.
    """

    def __init__(self, target: Callable[[int, Connection], None]) -> None:
        self._target = target
        self._spawn = multiprocessing.get_context("spawn")
        self._numbers = itertools.count(1)
        self._idle: dict[Any, BaseProcess] = {}
        self._busy: dict[Any, BaseProcess] = {}

    @property
    def busy(self) -> set[int | None]:
        """The process ids of the busy workers."""
        return {process.pid for process in self._busy.values()}

    def hand_out(self, pieces: int) -> None:
        """Give one task to each of several workers."""
        for _ in range(pieces):
            connection, process = self._idle.popitem() if self._idle else self._start()
            connection.send(None)
            self._busy[connection] = process

    def wait(self, seconds: float) -> None:
        """Wait until a worker has finished its task or has been killed, or until the timeout.

        Raises:
            SystemExit: A worker has ended with an error, which it has printed.
        """
        for connection in wait([*self._busy, *self._idle], seconds):
            workers = self._busy if connection in self._busy else self._idle
            process = workers.pop(connection)
            try:
                connection.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                if process.exitcode is not None and process.exitcode >= 0:
                    raise SystemExit(f"a worker has ended with exit code {process.exitcode}") from None
                print(f"worker {process.pid} was killed by signal {-(process.exitcode or 0)}", flush=True)
            else:
                self._idle[connection] = process

    def _start(self) -> tuple[Connection, BaseProcess]:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=self._target, args=(next(self._numbers), theirs), daemon=True)
        process.start()
        theirs.close()  # so that ours is closed when the process is gone
        return ours, process

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        for connection, process in {**self._idle, **self._busy}.items():
            connection.close()
            if error[0] is not None:
                process.terminate()
            process.join()
