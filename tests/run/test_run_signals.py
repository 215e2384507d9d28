"""SIGTERM and Ctrl-C in a hand-written loop: an ordinary stop first, the way of an error second.

The signals are real ones, in a process of its own.
"""

from __future__ import annotations

import signal

import pytest
from processes import run_python

import dualtrain as dt
from dualtrain.testing import RecordingCallback

PROGRAM = """
import os, signal, sys
import dualtrain as dt

# What the parent process does with signals is inherited, and is not what is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

class Tells(dt.Callback):
    def on_train_step_end(self, run_context):
        print("step", run_context.step)

    def on_train_end(self, run_context):
        print("train_end", run_context.stop_reason)

    def on_exception(self, run_context, error):
        print("exception", repr(error))

    def on_teardown(self, run_context):
        print("teardown")

signals = [getattr(signal, name) for name in sys.argv[1:]]
with dt.Run(Tells(), epochs=2, handle_signals=HANDLE) as run:
    for epoch in run.epochs():
        for batch in run.batches([1, 2, 3]):
            if batch == 2:
                for number in signals:
                    os.kill(os.getpid(), number)
                print("body")
print("after")
"""


def told(*signals: str, handle: bool = True) -> tuple[list[str], int]:
    result = run_python(PROGRAM.replace("HANDLE", str(handle)), *signals, timeout=100)
    return result.stdout.splitlines(), result.returncode


def test_first_sigterm_is_an_ordinary_stop_and_then_status_143() -> None:
    lines, status = told("SIGTERM")

    assert lines == ["step 1", "body", "step 2", "train_end SIGTERM", "teardown"]
    assert status == 143


def test_second_sigterm_ends_the_run_at_once() -> None:
    lines, status = told("SIGTERM", "SIGTERM")

    assert lines == ["step 1", "exception SystemExit(143)", "teardown"]
    assert status == 143


def test_ctrl_c_ends_the_run_at_once() -> None:
    lines, status = told("SIGINT")

    assert lines == ["step 1", "exception KeyboardInterrupt()", "teardown"]
    assert status == -signal.SIGINT


def test_sigterm_is_left_alone_on_request() -> None:
    lines, status = told("SIGTERM", handle=False)

    assert "teardown" not in lines
    assert status == -signal.SIGTERM


@pytest.mark.skipif(
    signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, reason="the test run handles SIGTERM itself"
)
def test_handler_is_set_for_the_run_alone() -> None:
    with dt.Run():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with dt.Run(handle_signals=False):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_keyboard_interrupt_leaves_as_itself() -> None:
    recording = RecordingCallback()
    interrupt = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        with dt.Run(recording) as run, run.step():
            raise interrupt

    assert caught.value is interrupt
    assert recording.names[-3:] == ["on_train_step_begin", "on_exception", "on_teardown"]
