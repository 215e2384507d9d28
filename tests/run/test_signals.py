"""SIGTERM requests a stop, Ctrl-C ends a run at once, and the process's own handlers are restored.

The signals are real ones, sent to a process of its own. Parent and child keep in step through the
child's pipes: it says where it is and then waits for its input, which is closed after the signal.
"""

import signal
import subprocess
import sys
import threading

import pytest

from dualtrain.signals import EXIT_CODE, SignalWatch

PROGRAM = """
import os
import signal
import sys

from dualtrain.callback import Callback
from dualtrain.engine import RunEngine
from dualtrain.loop import run_training

# What the parent process does with signals is inherited, and is not what is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)


def say(*words):
    print(*words, flush=True)


def wait():
    say("waiting")
    sys.stdin.readline()


class Tells(Callback):
    def __init__(self, name):
        self.name = name

    def on_train_step_end(self, run_context):
        say(self.name, "step", run_context.step)

    def on_train_end(self, run_context):
        say(self.name, "train_end")

    def on_exception(self, run_context, error):
        say(self.name, "exception", repr(error))

    def on_teardown(self, run_context):
        say(self.name, "teardown")

    def __exit__(self, kind, error, traceback):
        say(self.name, "exit", repr(error))


def step(batch):
    if batch == 2:
        wait()


def run(callbacks, step=step):
    engine = RunEngine(callbacks, params={"batch_num": 3}, epochs=1)
    with engine:
        run_training(engine, step, [1, 2, 3], epoch=1)
"""

THE_WAY_OUT = [
    "a exception {error}",
    "b exception {error}",
    "b teardown",
    "a teardown",
    "b exit {error}",
    "a exit {error}",
]


class Child:
    """A process that runs the program above and then ``body``."""

    def __init__(self, body, **places):
        source = PROGRAM + body.format(**{name: repr(str(place)) for name, place in places.items()})
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_waiting(self):
        """Return the lines that the child says before it waits."""
        said = []
        for line in self.process.stdout:
            if line == "waiting\n":
                return said
            said.append(line.rstrip("\n"))
        raise AssertionError(f"the child ended before it waited: {said}\n{self.process.stderr.read()}")

    def send(self, signum):
        self.process.send_signal(signum)

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Let it go on, and return what it says until its end and its status."""
        out, self.errors = self.process.communicate()
        return out.splitlines(), self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_a_sigterm_ends_the_run_after_the_step_and_then_the_process_exits_143():
    with Child("run([Tells('a'), Tells('b')])\nsay('never here')") as child:
        assert child.until_waiting() == ["a step 1", "b step 1"]
        child.send(signal.SIGTERM)
        said, status = child.end()
    assert said == [
        "a step 2",
        "b step 2",
        "a train_end",
        "b train_end",
        "b teardown",
        "a teardown",
        "b exit SystemExit(143)",
        "a exit SystemExit(143)",
    ]
    assert status == 143


def test_a_second_sigterm_ends_the_run_at_once():
    body = """
def step(batch):
    if batch == 2:
        wait()
        wait()

run([Tells('a'), Tells('b')], step)
say('never here')
"""
    with Child(body) as child:
        assert child.until_waiting() == ["a step 1", "b step 1"]
        child.send(signal.SIGTERM)
        child.go_on()
        assert child.until_waiting() == []
        child.send(signal.SIGTERM)
        said, status = child.end()
    assert said == [line.format(error="SystemExit(143)") for line in THE_WAY_OUT]
    assert status == 143


def test_a_sigint_arrives_as_keyboard_interrupt_after_the_teardown():
    body = """
try:
    run([Tells('a'), Tells('b')])
except KeyboardInterrupt:
    say("KeyboardInterrupt out of the run")
"""
    with Child(body) as child:
        assert child.until_waiting() == ["a step 1", "b step 1"]
        child.send(signal.SIGINT)
        said, status = child.end()
    way_out = [line.format(error="KeyboardInterrupt()") for line in THE_WAY_OUT]
    assert said == [*way_out, "KeyboardInterrupt out of the run"]
    assert status == 0


def test_a_sigterm_does_not_lose_what_a_callback_holds_in_a_buffer(tmp_path):
    body = """
class Writes(Callback):
    def on_train_begin(self, run_context):
        self.file = open({path}, "w")

    def on_train_step_end(self, run_context):
        self.file.write(f"step {{run_context.step}}\\n")

    def on_teardown(self, run_context):
        self.file.write("the end\\n")
        self.file.close()

run([Writes()])
"""
    path = tmp_path / "log.txt"
    with Child(body, path=path) as child:
        child.until_waiting()
        assert path.read_text() == ""
        child.send(signal.SIGTERM)
        assert child.end()[1] == 143
    assert path.read_text() == "step 1\nstep 2\nthe end\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_second_signal_during_the_way_out_does_not_cut_the_others_off(signum):
    body = """
class Lingers(Tells):
    def on_teardown(self, run_context):
        wait()

run([Tells('a'), Lingers('b')])
"""
    with Child(body) as child:
        child.until_waiting()
        child.send(signal.SIGTERM)
        child.go_on()
        child.until_waiting()
        child.send(signum)
        said, status = child.end()
    assert said == ["a teardown", "b exit SystemExit(143)", "a exit SystemExit(143)"]
    assert status == 143


def test_a_sigterm_after_the_run_ends_the_process_as_it_always_does():
    with Child("run([Tells('a')], step=lambda batch: None)\nwait()\nsay('never here')") as child:
        assert child.until_waiting()[-3:] == ["a train_end", "a teardown", "a exit None"]
        child.send(signal.SIGTERM)
        said, status = child.end()
    assert said == []
    assert status == -signal.SIGTERM


def test_after_a_run_that_failed_sigterm_is_the_systems_own_again():
    body = """
try:
    run([], step=lambda batch: 1 / 0)
except ZeroDivisionError:
    say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
wait()
"""
    with Child(body) as child:
        assert child.until_waiting() == ["True"]
        child.send(signal.SIGTERM)
        assert child.end() == ([], -signal.SIGTERM)


@pytest.mark.parametrize(
    ("handler", "heard"),
    # print() cannot be entered again from a handler that interrupts one.
    [("lambda *_: os.write(1, b'mine\\n')", ["mine"]), ("signal.SIG_IGN", [])],
    ids=["own", "ignore"],
)
def test_what_the_user_does_with_sigterm_goes_before(handler, heard):
    body = f"""
signal.signal(signal.SIGTERM, {handler})
run([Tells('a')])
say("went on")
"""
    with Child(body) as child:
        child.until_waiting()
        child.send(signal.SIGTERM)
        said, status = child.end()
    assert said == [*heard, "a step 2", "a step 3", "a train_end", "a teardown", "a exit None", "went on"]
    assert status == 0


def test_a_run_without_a_signal_ends_with_status_zero():
    with Child("run([Tells('a')])") as child:
        child.until_waiting()
        child.go_on()
        said, status = child.end()
    assert said == ["a step 2", "a step 3", "a train_end", "a teardown", "a exit None"]
    assert status == 0


def test_the_exit_code_is_the_one_a_shell_reports_for_sigterm():
    assert EXIT_CODE == 143


# Within this process, where no signal is sent unless a handler is known to be there.


@pytest.fixture
def default_handler():
    """SIGTERM as the system has it, whatever this process had made of it before."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_handler")
def test_the_handler_is_there_for_the_run_and_gone_after_it():
    requests = []
    with SignalWatch(requests.append) as watch:
        during = signal.getsignal(signal.SIGTERM)
        assert not watch.terminated
        during(signal.SIGTERM, None)
        assert (watch.terminated, requests) == (True, ["SIGTERM"])
        with pytest.raises(SystemExit) as caught:
            during(signal.SIGTERM, None)
    assert caught.value.code == 143
    assert requests == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_handler_is_gone_after_an_error_too(kind):
    with pytest.raises(kind):
        with SignalWatch(print):
            raise kind
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_a_run_within_a_run_leaves_the_outer_ones_handler():
    with SignalWatch(print):
        outer = signal.getsignal(signal.SIGTERM)
        with SignalWatch(print):
            assert signal.getsignal(signal.SIGTERM) is outer
        assert signal.getsignal(signal.SIGTERM) is outer
        assert outer is not signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_in_another_thread_nothing_is_touched():
    seen = []

    def work():
        with SignalWatch(print):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


@pytest.mark.usefixtures("default_handler")
def test_sigint_is_left_to_python():
    before = signal.getsignal(signal.SIGINT)
    with SignalWatch(print):
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before
