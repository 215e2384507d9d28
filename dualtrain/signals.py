"""A SIGTERM ends a run the way an error does: callbacks are torn down, then the process exits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM


def _exit(signum: int, frame: Any) -> None:
    raise SystemExit(EXIT_CODE)


@contextmanager
def terminate_cleanly(handler: Callable[[int, Any], None] = _exit) -> Iterator[None]:
    """Turn SIGTERM into an exception in the main thread for the duration of a run.

    ``SystemExit(143)`` passes through the run's way out like any error, so logs are flushed
    and each ``__exit__`` runs before the process ends with the status that SIGTERM gives.
    Does nothing in other threads, and leaves a handler alone that the user has set.

    Args:
        handler: What to do instead of raising ``SystemExit(143)``.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
