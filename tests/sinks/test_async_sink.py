"""AsyncSink: nothing is lost or out of order, errors come back, and neither thread nor fork is in the way.

Where a moment matters it is waited for with an event; the limits of waiting are there so that a
defect ends as a failure.
"""

import os
import threading

import pytest
from log_files import LOG, record, steps
from processes import run_python

from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.sinks import AsyncSink, JsonlSink, MemorySink

LIMIT = 60


class Scripted:
    """A sink that notes what is done with it, and does what it is told at a step, flush or close."""

    def __init__(self, **at):
        self.calls = []
        self._at = at

    def _do(self, name):
        self.calls.append(name)
        if name in self._at:
            self._at[name]()

    def write(self, record):
        self._do(f"write_{record.step}")

    def flush(self):
        self._do("flush")

    def close(self):
        self._do("close")

    @property
    def written(self):
        return [int(call[6:]) for call in self.calls if call.startswith("write")]


def raising(error):
    def fail():
        raise error

    return fail


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def made():
    """A function that makes sinks, which are closed afterwards, also where a test failed."""
    sinks = []

    def make(sink, **options):
        sinks.append(AsyncSink(sink, **options))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def test_records_arrive_all_and_in_order(made):
    memory = MemorySink()
    sink = made(memory)
    given = [record(step) for step in range(1, 1001)]
    for one in given[:250]:
        sink.write(one)
    sink.flush()
    assert [id(one) for one in memory.records] == [id(one) for one in given[:250]]
    for one in given[250:]:
        sink.write(one)
    sink.close()
    assert [id(one) for one in memory.records] == [id(one) for one in given]
    assert sink.lost == 0


def test_flushing_flushes_after_the_last_record_and_closing_closes_last(made):
    inner = Scripted()
    sink = made(inner, flush_interval=1000.0)
    sink.write(record(1))
    sink.write(record(2))
    sink.flush()
    assert inner.calls == ["write_1", "write_2", "flush"]
    sink.write(record(3))
    sink.close()
    assert inner.calls == ["write_1", "write_2", "flush", "write_3", "flush", "close"]


def test_the_inner_sink_is_used_on_another_thread_alone(made):
    who = set()
    inner = Scripted(
        **{name: lambda: who.add(threading.get_ident()) for name in ("write_1", "flush", "close")}
    )
    sink = made(inner)
    sink.write(record(1))
    sink.flush()
    sink.close()
    assert len(inner.calls) == 4
    assert len(who) == 1
    assert threading.get_ident() not in who


def test_without_being_asked_it_flushes_after_the_interval(made):
    flushed = threading.Event()
    sink = made(Scripted(flush=flushed.set), flush_interval=0.01)
    sink.write(record(1))
    assert flushed.wait(LIMIT)


def test_with_a_long_interval_records_are_passed_on_but_not_flushed(made):
    passed_on = threading.Event()
    inner = Scripted(write_1=passed_on.set)
    sink = made(inner, flush_interval=1000.0)
    sink.write(record(1))
    assert passed_on.wait(LIMIT)
    assert inner.calls == ["write_1"]


@pytest.mark.parametrize("verb", ["flush", "close"])
def test_closing_twice_and_flushing_a_closed_sink_are_harmless(made, verb):
    inner = Scripted()
    sink = made(inner)
    sink.write(record(1))
    sink.close()
    getattr(sink, verb)()
    assert inner.calls == ["write_1", "flush", "close"]


def test_a_closed_sink_takes_no_record(made):
    sink = made(MemorySink())
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(record())


def test_several_threads_may_write(made):
    memory = MemorySink()
    sink = made(memory, queue_size=50)

    def write(epoch):
        for step in range(1, 251):
            sink.write(record(step, epoch))

    threads = [threading.Thread(target=write, args=(epoch,)) for epoch in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    sink.close()
    for epoch in range(4):
        assert [one.step for one in memory.records if one.epoch == epoch] == list(range(1, 251))


# A full queue.


def test_a_full_queue_blocks_and_loses_nothing(made):
    """Never are more records taken than those that arrived and those that may wait."""
    accepted, ahead = [], []

    class Counting(MemorySink):
        def write(self, record):
            super().write(record)
            ahead.append(len(accepted) - len(self.records))

    memory = Counting()
    sink = made(memory, queue_size=3)
    for step in range(1, 101):
        sink.write(record(step))
        accepted.append(step)
    sink.close()
    assert [one.step for one in memory.records] == list(range(1, 101))
    assert max(ahead) <= 3
    assert sink.lost == 0


# Errors.


def test_an_error_comes_out_of_the_next_write_which_is_taken_all_the_same(made):
    error, later = OSError("no space"), threading.Event()
    inner = Scripted(write_1=raising(error), write_2=later.set)
    sink = made(inner)
    sink.write(record(1))
    sink.write(record(2))
    assert later.wait(LIMIT)
    with pytest.raises(OSError, match="no space") as caught:
        sink.write(record(3))
    assert caught.value is error
    sink.write(record(4))
    sink.close()
    assert inner.written == [1, 2, 3, 4]
    assert sink.lost == 1


@pytest.mark.parametrize("verb", ["flush", "close"])
@pytest.mark.parametrize("error", [OSError("no space"), KeyError("a bug")], ids=["OSError", "KeyError"])
def test_an_error_comes_out_of_flushing_and_closing_once(made, verb, error):
    inner = Scripted(write_2=raising(error))
    sink = made(inner)
    for step in (1, 2, 3):
        sink.write(record(step))
    with pytest.raises(type(error)) as caught:
        getattr(sink, verb)()
    assert caught.value is error
    assert inner.written == [1, 2, 3]
    assert sink.lost == 1
    sink.flush()
    sink.close()
    assert inner.calls[-1] == "close"


@pytest.mark.parametrize("where", ["flush", "close"])
def test_an_error_while_the_inner_sink_flushes_or_closes_comes_out_of_closing(made, where):
    error = OSError("no space")
    inner = Scripted(**{where: raising(error)})
    sink = made(inner)
    sink.write(record(1))
    with pytest.raises(OSError, match="no space") as caught:
        sink.close()
    assert caught.value is error
    assert inner.calls == ["write_1", "flush", "close"]
    sink.close()


def test_of_several_errors_the_first_is_told_and_all_are_counted(made):
    first = OSError("the first")
    sink = made(Scripted(write_1=raising(first), write_2=raising(OSError("the second"))))
    sink.write(record(1))
    sink.write(record(2))
    with pytest.raises(OSError, match="the first"):
        sink.flush()
    sink.flush()
    assert sink.lost == 2


# Ways out.

UNCLOSED = """
import sys
from dualtrain.records import Record
from dualtrain.sinks import AsyncSink, JsonlSink

sink = AsyncSink(JsonlSink("log.jsonl", line_buffering=False), flush_interval=1000.0)
for step in range(1, 251):
    sink.write(Record(step, 1, "train", 0.0, {}))
sys.exit(3)
"""


def test_what_nobody_closed_is_written_when_the_interpreter_ends():
    done = run_python(UNCLOSED, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (3, "")
    assert steps() == list(range(1, 251))


FORKED = """
import os, signal, sys
from dualtrain.records import Record
from dualtrain.sinks import AsyncSink, JsonlSink

def record(step):
    return Record(step, 1, "train", 0.0, {})

inner = JsonlSink("log.jsonl", line_buffering=False)
sink = AsyncSink(inner, flush_interval=1000.0)
sink.write(record(1))
sink.flush()
inner.write(record(2))  # waits in the inner sink, and so in a copy of it in the child
sink.write(record(3))
wait, go_on = os.pipe()
said, say = os.pipe()
child = os.fork()
if not child:
    signal.alarm(50)
    os.close(go_on)
    sink.write(record(100))
    sink.flush()
    sink.close()
    try:
        inner.write(record(101))
    except ValueError:
        pass
    inner.close()
    os.write(say, b"x")
    os.read(wait, 1)  # until the parent has begun the next log
    sys.exit(7)  # with all that is done at the end of an interpreter
os.read(said, 1)
sink.write(record(4))
sink.close()
following = JsonlSink("log.jsonl", append=True)  # though the child lives
following.write(record(5))
os.close(go_on)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
following.write(record(6))
following.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_neither_writes_nor_hangs_nor_holds_the_log():
    done = run_python(FORKED, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "7\n"
    assert steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_error_that_is_waiting_is_the_parents(made):
    later = threading.Event()
    sink = made(Scripted(write_1=raising(OSError("no space")), write_2=later.set))
    sink.write(record(1))
    sink.write(record(2))
    assert later.wait(LIMIT)
    child = os.fork()
    if not child:
        try:
            sink.flush()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(OSError, match="no space"):
        sink.flush()


# The constructor.


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"queue_size": 0}, ArgumentValueError, ["queue_size", "at least 1", "0"]),
        ({"queue_size": 1.5}, ArgumentTypeError, ["queue_size", "an integer", "1.5"]),
        ({"flush_interval": 0}, ArgumentValueError, ["flush_interval", "positive", "0"]),
        ({"flush_interval": float("nan")}, ArgumentValueError, ["flush_interval", "positive", "nan"]),
        ({"sink": []}, ArgumentTypeError, ["write, flush, close", "[]"]),
    ],
)
def test_arguments_are_checked(options, kind, words):
    with pytest.raises(kind) as caught:
        AsyncSink(**{"sink": MemorySink(), **options})
    assert all(word in str(caught.value) for word in words)


def test_its_repr_shows_its_settings(made):
    sink = made(JsonlSink(LOG), queue_size=5, flush_interval=2.0)
    assert repr(sink) == "AsyncSink(JsonlSink('log.jsonl'), queue_size=5, flush_interval=2.0)"
