"""FanOut: each record reaches every sink, whatever becomes of the others."""

import pytest

from dualtrain.errors import ArgumentTypeError
from dualtrain.records import Record
from dualtrain.sinks import AsyncSink, FanOut, JsonlSink, MemorySink


def record(step):
    return Record(step, 1, "train", 1700000000.5, {"loss": 0.5})


class Failing(MemorySink):
    """Notes its calls, and raises in each of the verbs given."""

    def __init__(self, name, *verbs, calls=None):
        super().__init__()
        self.name, self.verbs, self.calls = name, verbs, [] if calls is None else calls

    def note(self, verb):
        self.calls.append((self.name, verb))
        if verb in self.verbs:
            raise OSError(f"{self.name} cannot {verb}")

    def write(self, record):
        self.note("write")
        super().write(record)

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")


class Losing(MemorySink):
    """Counts by itself what is lost."""

    lost = 5


@pytest.mark.parametrize("verb", ["write", "flush", "close"])
def test_every_sink_is_called_in_order_and_the_first_error_is_raised(verb):
    calls = []
    sinks = [Failing("a", calls=calls), Failing("b", verb, calls=calls), Failing("c", verb, calls=calls)]
    sinks.append(Failing("d", calls=calls))
    fan_out = FanOut(*sinks)
    arguments = [record(1)] if verb == "write" else []
    with pytest.raises(OSError, match=f"b cannot {verb}"):
        getattr(fan_out, verb)(*arguments)
    assert calls == [(name, verb) for name in "abcd"]


def test_records_reach_the_sinks_that_work():
    good, bad, other = MemorySink(), Failing("bad", "write"), MemorySink()
    fan_out = FanOut(good, bad, other)
    for step in (1, 2, 3):
        with pytest.raises(OSError, match="bad cannot write"):
            fan_out.write(record(step))
    assert good.records == other.records == [record(1), record(2), record(3)]
    assert bad.records == []
    assert fan_out.lost == 3


def test_lost_is_the_sum_of_what_sinks_count_and_of_failed_writes():
    fan_out = FanOut(MemorySink(), Losing(), Failing("bad", "write", "flush"))
    assert fan_out.lost == 5
    with pytest.raises(OSError, match="cannot write"):
        fan_out.write(record(1))
    with pytest.raises(OSError, match="cannot flush"):
        fan_out.flush()
    assert fan_out.lost == 6


def test_a_thread_can_write_to_several_sinks():
    memory = MemorySink()
    sink = AsyncSink(FanOut(JsonlSink("log.jsonl"), memory))
    for step in range(1, 51):
        sink.write(record(step))
    sink.close()
    assert memory.records == [record(step) for step in range(1, 51)]
    with open("log.jsonl") as file:
        assert file.read().splitlines() == [one.to_json() for one in memory.records]
    assert sink.lost == 0


@pytest.mark.parametrize("sink", [None, [], "log.jsonl", MemorySink])
def test_what_is_no_sink_is_refused(sink):
    with pytest.raises(ArgumentTypeError, match="FanOut takes sinks with write, flush, close"):
        FanOut(MemorySink(), sink)


def test_its_repr_names_the_sinks():
    assert repr(FanOut(MemorySink(), JsonlSink("/dev/null"))) == (
        "FanOut(MemorySink(0 records), JsonlSink('/dev/null'))"
    )
