"""Sinks: the three verbs of each, and what becomes of a record there."""

import io
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dualtrain as dt
from dualtrain.errors import LogInUseError
from dualtrain.records import Record
from dualtrain.sinks import AsyncSink, ConsoleSink, JsonlSink, MemorySink, Sink

LOG = Path("log.jsonl")


def record(step=1, epoch=1, mode="train", **values):
    return Record(step, epoch, mode, 1700000000.5, values)


def steps(path=LOG):
    """Return the steps in a log, each line of which has to be whole."""
    text = Path(path).read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


# The protocol.

SINKS = {
    "AsyncSink": lambda: AsyncSink(JsonlSink(LOG)),
    "ConsoleSink": lambda: ConsoleSink(io.StringIO()),
    "JsonlSink": lambda: JsonlSink(LOG),
    "MemorySink": MemorySink,
}


def test_every_public_sink_is_tested_here():
    assert {*SINKS, "Sink", "RunLog"} == set(dt.sinks.__all__)  # RunLog: tests/test_run_log.py


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_writes_flushes_and_closes_once_and_again(name):
    sink = SINKS[name]()
    assert isinstance(sink, Sink)
    sink.write(record(1, loss=0.5))
    sink.flush()
    sink.write(record(2, loss=0.25))
    sink.close()
    sink.close()


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_that_was_given_nothing_closes(name):
    sink = SINKS[name]()
    sink.flush()
    sink.close()


def test_what_lacks_a_verb_is_no_sink():
    assert not isinstance([], Sink)


# The console.


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (record(10, 2, loss=0.123456789, lr=0.001), "epoch 2  step 10  loss 0.123457  lr 0.001"),
        (record(3, 1, global_step=3, loss=1234567.0), "epoch 1  step 3  global_step 3  loss 1.23457e+06"),
        (record(3, 1, loss=0.0, lr=3e-10), "epoch 1  step 3  loss 0  lr 3e-10"),
        (record(3, 1, lr=(0.1, 0.01)), "epoch 1  step 3  lr 0.1/0.01"),
        (record(3, 1, loss=float("nan"), x=float("-inf")), "epoch 1  step 3  loss nan  x -inf"),
        (record(3, 1, loss=None), "epoch 1  step 3  loss None"),
        (record(3, 4, "eval", loss=2.0), "eval  epoch 4  step 3  loss 2"),
        (record(3, None, "eval", loss=2.0), "eval  step 3  loss 2"),
    ],
    ids=["floats", "large", "small", "groups", "not finite", "none", "evaluation", "no epoch"],
)
def test_the_console_shows_a_record_as_one_line(given, line):
    stream = io.StringIO()
    ConsoleSink(stream).write(given)
    assert stream.getvalue() == line + "\n"


def test_the_console_shows_records_in_order():
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream)
    for step in (1, 2):
        sink.write(record(step, loss=1.0 / step))
    assert stream.getvalue() == "epoch 1  step 1  loss 1\nepoch 1  step 2  loss 0.5\n"


def test_without_a_stream_it_is_what_stdout_is_at_the_time(capsys, monkeypatch):
    sink = ConsoleSink()
    sink.write(record(1, loss=1.0))
    assert capsys.readouterr() == ("epoch 1  step 1  loss 1\n", "")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stdout", replaced)
    sink.write(record(2, loss=1.0))
    sink.close()
    assert replaced.getvalue() == "epoch 1  step 2  loss 1\n"


class Lines(list):
    """A stream that is a list of what was written, and so is false while it is empty."""

    write = list.append

    def flush(self):
        pass


def test_a_stream_that_is_false_is_a_stream(capsys):
    stream = Lines()
    ConsoleSink(stream).write(record(1, loss=1.0))
    assert "".join(stream) == "epoch 1  step 1  loss 1\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["flush", "close"])
def test_flushing_and_closing_show_what_was_written_and_leave_the_stream_open(verb):
    with open("console.txt", "w", encoding="utf-8", buffering=1 << 16) as stream:
        sink = ConsoleSink(stream)
        sink.write(record(1, loss=1.0))
        assert Path("console.txt").read_text() == ""
        getattr(sink, verb)()
        assert Path("console.txt").read_text() == "epoch 1  step 1  loss 1\n"
        assert not stream.closed


# Memory.


def test_memory_keeps_the_records_themselves_in_order():
    sink, other = MemorySink(), MemorySink()
    given = [record(step, loss=float(step)) for step in (1, 2, 3)]
    for one in given:
        sink.write(one)
    sink.close()
    assert len(sink.records) == 3
    assert all(kept is one for kept, one in zip(sink.records, given, strict=True))
    assert other.records == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ConsoleSink(), "ConsoleSink(stream=None)"),
        (lambda: JsonlSink("log.jsonl"), "JsonlSink('log.jsonl')"),
        (lambda: MemorySink(), "MemorySink(0 records)"),
    ],
)
def test_a_sink_says_what_it_is(make, text):
    assert repr(make()) == text


# JSON lines.


def test_a_line_is_the_record_and_can_be_read_at_once():
    sink = JsonlSink(LOG)
    given = [record(1, loss=0.1, lr=(0.1, 0.01)), record(2, None, "eval", loss=float("nan"))]
    for count, one in enumerate(given, 1):
        sink.write(one)
        assert LOG.read_text(encoding="utf-8").splitlines() == [r.to_json() for r in given[:count]]
    sink.close()
    assert LOG.read_text(encoding="utf-8") == "".join(r.to_json() + "\n" for r in given)


def test_a_closed_log_takes_no_record():
    sink = JsonlSink(LOG)
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(record())


def test_missing_folders_are_made():
    JsonlSink("a/b/log.jsonl").close()
    assert Path("a/b/log.jsonl").is_file()


def write_log(path=LOG, *numbers, **options):
    sink = JsonlSink(path, **options)
    for number in numbers:
        sink.write(record(number))
    sink.close()


@pytest.mark.parametrize(
    ("path", "aside"),
    [
        ("log.jsonl", ["log.1.jsonl", "log.2.jsonl"]),
        ("my.run.jsonl", ["my.run.1.jsonl", "my.run.2.jsonl"]),
        ("log", ["log.1", "log.2"]),
        ("deep/log.jsonl", ["deep/log.1.jsonl", "deep/log.2.jsonl"]),
    ],
)
def test_finished_logs_are_moved_aside_with_what_belongs_to_them(path, aside):
    for number in (1, 2, 3):
        write_log(path, number, meta={"run": number})
    for file, number in ((aside[0], 1), (aside[1], 2), (path, 3)):
        assert steps(file) == [number]
        assert json.loads(Path(file + ".meta.json").read_text())["run"] == number
    assert len(list(Path(path).parent.iterdir())) == 6


def test_the_first_free_number_is_taken():
    for name in ("log.jsonl", "log.1.jsonl", "log.3.jsonl"):
        Path(name).write_text('{"step": 7}\n')
    write_log(LOG, 1)
    assert sorted(os.listdir()) == ["log.1.jsonl", "log.2.jsonl", "log.3.jsonl", "log.jsonl"]
    assert steps("log.2.jsonl") == [7]


def test_an_empty_log_is_not_moved_aside():
    LOG.touch()
    write_log(LOG, 1)
    assert os.listdir() == ["log.jsonl"]


def test_a_log_can_be_appended_to():
    write_log(LOG, 1, 2)
    write_log(LOG, 3, append=True)
    assert os.listdir() == ["log.jsonl"]
    assert steps() == [1, 2, 3]


def test_appending_to_what_is_not_there_begins_it():
    write_log(LOG, 1, append=True)
    assert steps() == [1]


def test_a_torn_last_line_is_ended_before_the_next_one():
    write_log(LOG, 1)
    with LOG.open("a") as log:
        log.write('{"step": 2, "los')
    write_log(LOG, 3, append=True)
    lines = LOG.read_text().splitlines()
    assert lines == [record(1).to_json(), '{"step": 2, "los', record(3).to_json()]


def test_no_line_is_added_where_none_is_torn():
    write_log(LOG, 1)
    JsonlSink(LOG, append=True).close()
    assert LOG.read_text() == record(1).to_json() + "\n"


META = Path("log.jsonl.meta.json")


def test_run_information_is_one_line_beside_the_log():
    write_log(LOG, 1, meta={"model": "Größe", "epochs": None})
    text = META.read_text(encoding="utf-8")
    assert json.loads(text) == {"schema": 1, "model": "Größe", "epochs": None}
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert steps() == [1]


def test_without_run_information_there_is_no_file_for_it():
    write_log(LOG, 1)
    assert os.listdir() == ["log.jsonl"]


def test_a_log_that_is_appended_to_keeps_its_run_information():
    write_log(LOG, 1, meta={"run": 1})
    write_log(LOG, 2, append=True, meta={"run": 2})
    assert json.loads(META.read_text()) == {"schema": 1, "run": 1}


def test_a_log_that_had_none_gets_its_run_information_when_it_is_appended_to():
    write_log(LOG, 1)
    write_log(LOG, 2, append=True, meta={"run": 2})
    assert json.loads(META.read_text()) == {"schema": 1, "run": 2}


@pytest.mark.parametrize("append", [False, True])
def test_a_log_that_is_being_written_is_refused_and_left_as_it_is(append):
    sink = JsonlSink(LOG, meta={"run": 1})
    sink.write(record(1))
    with pytest.raises(LogInUseError) as caught:
        JsonlSink(LOG, append=append, meta={"run": 2})
    assert str(caught.value) == (
        "the log 'log.jsonl' is being written by another run: give this run another log_file, "
        "or wait until the other one ends."
    )
    sink.write(record(2))
    assert steps() == [1, 2]
    assert json.loads(META.read_text())["run"] == 1
    assert sorted(os.listdir()) == ["log.jsonl", "log.jsonl.meta.json"]
    sink.close()
    write_log(LOG, 3, append=append)
    assert steps() == ([1, 2, 3] if append else [3])


def test_a_log_that_another_process_is_writing_is_refused():
    code = (
        "import sys\n"
        "from dualtrain.sinks import JsonlSink\n"
        "sink = JsonlSink('log.jsonl')\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(LogInUseError):
            JsonlSink(LOG)
        other.kill()  # an owner that dies without closing it
    write_log(LOG, 1)
    assert steps() == [1]


def test_a_log_that_could_not_be_begun_is_not_held():
    """Its run information cannot be written; once that is put right, the log is free."""
    META.mkdir()
    with pytest.raises(OSError, match="meta"):
        JsonlSink(LOG, meta={"run": 1})
    META.rmdir()
    write_log(LOG, 1, meta={"run": 2})
    assert steps() == [1]


def test_run_information_that_is_no_json_is_refused_and_the_log_is_not_held():
    with pytest.raises(TypeError):
        JsonlSink(LOG, meta={"run": object()})
    write_log(LOG, 1)
    assert steps() == [1]


def test_a_folder_is_no_log():
    LOG.mkdir()
    with pytest.raises(IsADirectoryError):
        JsonlSink(LOG, meta={"run": 1})
    assert os.listdir() == ["log.jsonl"]


def test_a_device_is_written_to_as_it_is():
    """A terminal of the test's own: nothing can be moved or made beside it."""
    screen, terminal = os.openpty()
    sink = JsonlSink(os.ttyname(terminal), meta={"run": 1})
    sink.write(record(1))
    sink.close()
    assert stat.S_ISCHR(os.stat(os.ttyname(terminal)).st_mode)
    assert os.read(screen, 1000) == record(1).to_json().encode() + b"\r\n"
    os.close(terminal)
    os.close(screen)


def test_a_pipe_is_written_to_as_it_is():
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    write_log("pipe", 1, 2, meta={"run": 1})
    reader.join(60)
    assert read == [record(1).to_json() + "\n" + record(2).to_json() + "\n"]
    assert os.listdir() == ["pipe"]


def test_two_logs_can_be_written_side_by_side():
    first, second = JsonlSink("a.jsonl"), JsonlSink("b.jsonl")
    first.write(record(1))
    second.write(record(2))
    first.close()
    second.close()
    assert (steps("a.jsonl"), steps("b.jsonl")) == ([1], [2])
