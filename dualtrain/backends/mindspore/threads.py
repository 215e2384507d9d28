"""Allow only one training at a time in a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dualtrain.errors import RunStateError

_lock = threading.RLock()


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """Refuse a second thread: MindSpore crashes or hangs when two threads train."""
    if not _lock.acquire(blocking=False):
        raise RunStateError(
            "another thread of this process is running a MindSpore Model; MindSpore crashes or hangs "
            "when two threads train: use processes instead."
        )
    try:
        yield
    finally:
        _lock.release()
