"""A sink that writes to another sink on a background thread."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.records import Record
from dualtrain.sinks.sink import Sink

_POLL = 0.1
"""Seconds between two polls of an empty queue."""
_BATCH = 100
_BREATH = 0.005
"""Seconds of pause after ``_BATCH`` records: a thread busy in pure Python slows down training."""


class AsyncSink:
    """Queue records and write them, in order, on a worker thread.

    The inner sink is flushed at least every ``flush_interval`` seconds, by ``flush`` and
    ``close``, and at interpreter exit if it is still open. An error of the inner sink is raised
    once, from the next ``write``, ``flush`` or ``close``; a record given to that ``write`` is still
    queued. In a child of ``fork`` nothing is written.

    Args:
        sink: The inner sink. Only the worker uses it from now on; it is closed with this one.
        queue_size: Maximum number of queued records. ``write`` blocks while the queue is full, so
            that no record is lost.
        flush_interval: Seconds between flushes; the maximum age of records lost by a killed process.

    Attributes:
        lost: Records that the inner sink could not write: its own ``lost`` if it has one,
            otherwise the number of failed calls of its ``write``.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid.

    Cost: 0.15 us per record. The worker is not woken for each record: it polls ten times per second,
    and pauses after each hundred records.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        queue_size: int = 10_000,
        flush_interval: float = 1.0,
    ) -> None:
        if not isinstance(sink, Sink):
            raise ArgumentTypeError(f"AsyncSink takes a sink with write, flush, close, but got {sink!r}.")
        if not 0 < flush_interval < float("inf"):
            raise ArgumentValueError(
                f"AsyncSink(flush_interval=...) must be positive, but got {flush_interval!r}."
            )
        self.queue_size = positive_int("AsyncSink", "queue_size", queue_size)
        self.flush_interval = flush_interval
        self._sink = sink
        self._queue: deque[Record | threading.Event | None] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # a wait for it is a tenth of one for an Event
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._failed = 0
        self._closed = self._forked = False
        self._thread = threading.Thread(target=self._work, name=f"AsyncSink of {sink!r}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _open_sinks.add(self)

    @property
    def lost(self) -> int:
        """Records that the inner sink could not write."""
        lost: int = getattr(self._sink, "lost", self._failed)
        return lost

    def write(self, record: Record) -> None:
        """Queue one record."""
        if self._closed:
            if self._forked:
                return
            raise ValueError("this AsyncSink is closed.")
        if len(self._queue) >= self.queue_size:
            self._drain()
        self._queue.append(record)
        if self._error is not None:
            self._raise_error()

    def flush(self) -> None:
        """Wait until all queued records are written and the inner sink is flushed."""
        if not self._closed:
            self._drain()
        self._raise_error()

    def close(self) -> None:
        """Write the queued records, close the inner sink, and end the thread."""
        with self._lock:
            first, self._closed = not self._closed, True
        if self._forked:
            return
        if first:
            self._queue.append(None)
            self._wake.put(None)
        self._thread.join()
        atexit.unregister(self.close)
        self._raise_error()

    def disown(self) -> None:
        """Write nothing from now on, for a forked child, which has no worker."""
        self._closed = self._forked = True
        self._queue = deque()
        self._lock = threading.Lock()  # the old one may be held by a thread of the parent
        atexit.unregister(self.close)

    def __repr__(self) -> str:
        return (
            f"AsyncSink({self._sink!r}, queue_size={self.queue_size}, flush_interval={self.flush_interval})"
        )

    def _drain(self) -> None:
        done = threading.Event()
        self._queue.append(done)
        self._wake.put(None)
        while not done.wait(1.0) and self._thread.is_alive():
            pass  # the worker has ended if another thread closed this sink meanwhile

    def _raise_error(self) -> None:
        if self._forked:
            return
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    # The worker.

    def _work(self) -> None:
        flushed, unflushed, ending = time.monotonic(), False, False
        while not ending or self._queue:
            hurried = self._is_woken(_BREATH if self._queue else min(_POLL, self.flush_interval))
            waiting = len(self._queue)
            for _ in range(waiting if hurried else min(waiting, _BATCH)):
                item = self._queue.popleft()
                if item is None:
                    ending = True
                elif isinstance(item, Record):
                    self._attempt(self._sink.write, item)
                    unflushed = True
                else:
                    self._attempt(self._sink.flush)
                    item.set()
            if ending or (unflushed and time.monotonic() - flushed >= self.flush_interval):
                self._attempt(self._sink.flush)
                flushed, unflushed = time.monotonic(), False
        self._attempt(self._sink.close)

    def _is_woken(self, timeout: float) -> bool:
        try:
            self._wake.get(timeout=timeout)
        except Empty:
            return False
        return True

    def _attempt(self, action: Callable[..., None], *record: Any) -> None:
        try:
            action(*record)
        except BaseException as error:  # noqa: BLE001 - re-raised on the training thread
            with self._lock:
                self._failed += len(record)
                if self._error is None:
                    self._error = error


_open_sinks: WeakSet[AsyncSink] = WeakSet()


def _leave_to_parent() -> None:
    for sink in list(_open_sinks):
        sink.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
