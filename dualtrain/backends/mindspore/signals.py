"""Detect Ctrl-C among the SIGTERMs of a process while MindSpore runs.

After the first operator, MindSpore handles SIGINT in C: it sends its own process a SIGTERM, and it
reinstalls this handler in every step. A SIGTERM that the process has sent itself while MindSpore handles
SIGINT was therefore a Ctrl-C. The kernel writes the sender of a signal to the alternate signal stack
before the handler runs; the sender is read from there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from dualtrain.backends.mindspore.borrowed import signal_setter
from dualtrain.signals import SignalWatch

_SA_SIGINFO = 4
_FLAGS_OFFSET = 8 + 128  # glibc's struct sigaction on 64 bits: handler, mask, flags
_ACTION_SIZE = 152
_STACK_SIZE = 1 << 16
_SI_USER = 0
_SIGINT = int(signal.SIGINT)


class _Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


class InterruptWatch(SignalWatch):
    """Handle SIGTERM for the duration of a run, and raise KeyboardInterrupt for a Ctrl-C.

    Args:
        request_stop: As for ``SignalWatch``.
    """

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        super().__init__(request_stop)
        self._interrupt: Any = None
        self._libc: Any = None
        self._set_handler = signal_setter()
        self._python_handler = 0
        self._stack = _Stack()
        self._previous: _Stack | None = None
        self._memory: Any = None
        self._raised: BaseException | None = None

    def __enter__(self) -> InterruptWatch:
        super().__enter__()
        if threading.current_thread() is threading.main_thread():
            self._interrupt = signal.getsignal(signal.SIGINT)
            self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.retake()
        if self._libc is not None and self._is_set:
            self._python_handler = self._c_handler(signal.SIGINT)
            self._previous = self._record_senders()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._libc is not None and self._previous is not None:
            self._libc.sigaltstack(ctypes.byref(self._previous), None)
            self._previous = None
        super().__exit__(*error)
        if callable(self._interrupt):
            signal.signal(signal.SIGINT, self._interrupt)

    def retake(self) -> None:
        """Restore Python's SIGINT handler, so that a Ctrl-C between MindSpore's operators reaches Python.

        Raises:
            KeyboardInterrupt, SystemExit: The error of a signal that arrived while MindSpore's C code read
                a Python attribute, and that MindSpore handled as a missing attribute.
        """
        if callable(self._interrupt):
            self._set_handler(_SIGINT, self._on_sigint)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def on_sigterm(self, signum: int, frame: Any) -> None:
        """Raise KeyboardInterrupt for a Ctrl-C; otherwise handle SIGTERM as ``SignalWatch`` does."""
        if callable(self._interrupt) and self._from_mindspore():
            self._on_sigint(signal.SIGINT, frame)
            return
        try:
            super().on_sigterm(signum, frame)
        except SystemExit as error:
            self._note(error, frame)
            raise

    def _on_sigint(self, signum: int, frame: Any) -> None:
        try:
            self._interrupt(signum, frame)
        except BaseException as error:
            self._note(error, frame)
            raise

    def _note(self, error: BaseException, frame: Any) -> None:
        """Keep an error that is about to be raised inside MindSpore, which may suppress it."""
        inside = frame is not None and frame.f_globals.get("__name__", "").startswith("mindspore.")
        self._raised = error if inside else None

    def _from_mindspore(self) -> bool:
        if self._libc is None or self._c_handler(signal.SIGINT) == self._python_handler:
            return False
        frame = ctypes.string_at(self._stack.address, self._stack.size)
        sent = struct.pack("iiii", signal.SIGTERM, 0, _SI_USER, 0)[:12]  # si_signo, si_errno, si_code
        at = frame.rfind(sent)
        while at >= 0:
            if at % 8 == 0 and struct.unpack_from("i", frame, at + 16)[0] == os.getpid():  # si_pid
                return True
            at = frame.rfind(sent, 0, at)
        return False

    def _record_senders(self) -> _Stack:
        """Make the kernel write the sender of each SIGTERM to an alternate signal stack."""
        previous = _Stack()
        self._memory = ctypes.create_string_buffer(_STACK_SIZE)
        self._stack = _Stack(ctypes.addressof(self._memory), 0, _STACK_SIZE)
        self._libc.sigaltstack(ctypes.byref(self._stack), ctypes.byref(previous))
        action = (ctypes.c_char * _ACTION_SIZE)()
        self._libc.sigaction(int(signal.SIGTERM), None, action)
        flags = struct.unpack_from("i", action, _FLAGS_OFFSET)[0]
        struct.pack_into("i", action, _FLAGS_OFFSET, flags | _SA_SIGINFO)
        self._libc.sigaction(int(signal.SIGTERM), action, None)
        return previous

    def _c_handler(self, signum: int) -> int:
        action = (ctypes.c_char * _ACTION_SIZE)()
        self._libc.sigaction(int(signum), None, action)
        return int(struct.unpack_from("Q", action)[0])
