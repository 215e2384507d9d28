"""Tell Ctrl-C from a SIGTERM while MindSpore runs.

Once an operator has run, MindSpore answers SIGINT in C by sending its own process a SIGTERM,
and it installs that answer anew at every step. So a SIGTERM that the process has sent itself
while MindSpore holds SIGINT was a Ctrl-C. Who sent a signal is known to the kernel, which
writes it, before the handler runs, onto the alternate signal stack; there we read it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualtrain.signals import EXIT_CODE, terminate_cleanly

_SA_SIGINFO = 4
_FLAGS_OFFSET = 8 + 128  # glibc's struct sigaction on 64 bits: handler, mask, flags
_ACTION_SIZE = 152
_STACK_SIZE = 1 << 16
_SI_USER = 0


class _Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


class InterruptWatch:
    """For the duration of a run, make SIGINT raise KeyboardInterrupt although MindSpore is in between."""

    def __init__(self) -> None:
        self._interrupt = signal.getsignal(signal.SIGINT)
        self._main = threading.current_thread() is threading.main_thread()
        self._libc = ctypes.CDLL(None) if self._main and sys.platform == "linux" else None
        self._python_handler = 0
        self._stack = _Stack()
        self._memory: Any = None
        self._raised: BaseException | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT inside, and put the previous handlers back at the end."""
        with terminate_cleanly(self._on_sigterm):
            self.retake()
            if self._libc is None:
                try:
                    yield
                finally:
                    self._give_back()
                return
            self._python_handler = self._c_handler(signal.SIGINT)
            previous = self._record_senders()
            try:
                yield
            finally:
                self._libc.sigaltstack(ctypes.byref(previous), None)
                self._give_back()

    def retake(self) -> None:
        """Take SIGINT back from MindSpore, so that Ctrl-C between its operators needs no guessing.

        Raises:
            KeyboardInterrupt, SystemExit: A signal came while MindSpore asked Python for an attribute, and
                its C code took the error for "there is none".
        """
        if self._main and callable(self._interrupt):
            signal.signal(signal.SIGINT, self._on_sigint)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _give_back(self) -> None:
        if self._main and callable(self._interrupt):
            signal.signal(signal.SIGINT, self._interrupt)

    def _on_sigint(self, signum: int, frame: Any) -> None:
        assert callable(self._interrupt)
        try:
            self._interrupt(signum, frame)
        except BaseException as error:
            self._note(error, frame)
            raise

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        if callable(self._interrupt) and self._from_mindspore():
            self._on_sigint(signal.SIGINT, frame)
        error = SystemExit(EXIT_CODE)
        self._note(error, frame)
        raise error

    def _note(self, error: BaseException, frame: Any) -> None:
        """Keep an error that is about to be raised inside MindSpore, in case that it gets lost there."""
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
        """Have the kernel write each SIGTERM's details onto an alternate stack of ours."""
        assert self._libc is not None
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
        assert self._libc is not None
        action = (ctypes.c_char * _ACTION_SIZE)()
        self._libc.sigaction(int(signum), None, action)
        return int(struct.unpack_from("Q", action)[0])
