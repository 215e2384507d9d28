"""SIGTERM during a run: the first one requests a stop, a second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM


class SignalWatch:
    """Handle SIGTERM in the main thread for the duration of a run.

    Does nothing in other threads, and does not replace a handler that the user has set. Ctrl-C stays
    Python's: it raises KeyboardInterrupt at once.

    Args:
        request_stop: Called at the first SIGTERM, with the reason. At the second one ``SystemExit(143)``
            is raised, which passes through the run's way out like any error.

    Attributes:
        terminated: Whether a SIGTERM has come.
    """

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        self._request_stop = request_stop
        self._is_set = False
        self.terminated = False

    def __enter__(self) -> SignalWatch:
        self._is_set = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._is_set:
            signal.signal(signal.SIGTERM, self.on_sigterm)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._is_set = False

    def on_sigterm(self, signum: int, frame: Any) -> None:
        """Request a stop, or raise ``SystemExit(143)`` where one was requested by a signal already."""
        if self.terminated:
            raise SystemExit(EXIT_CODE)
        self.terminated = True
        self._request_stop("SIGTERM")
