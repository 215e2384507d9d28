"""Sinks: the three verbs of each, and what becomes of a record there."""

import io
import json
import math
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from log_files import LINE, LOG, record, room_for, steps

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, LogInUseError
from dualtrain.sinks import AsyncSink, ConsoleSink, FanOut, JsonlSink, MemorySink, Sink

# The protocol.

SINKS = {
    "AsyncSink": lambda: AsyncSink(JsonlSink(LOG)),
    "ConsoleSink": lambda: ConsoleSink(io.StringIO()),
    "FanOut": lambda: FanOut(JsonlSink(LOG), MemorySink()),
    "JsonlSink": lambda: JsonlSink(LOG),
    "MemorySink": MemorySink,
}


def test_every_public_sink_is_tested_here():
    assert {*SINKS, "Sink", "RunLog"} == set(dt.sinks.__all__)  # RunLog: tests/sinks/test_run_log.py


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


# Many lines in one write.


def test_lines_wait_for_a_flush_where_that_is_asked_for():
    sink = JsonlSink(LOG, line_buffering=False)
    for step in (1, 2, 3):
        sink.write(record(step))
    assert LOG.read_text() == ""
    sink.flush()
    assert steps() == [1, 2, 3]
    sink.write(record(4))
    assert steps() == [1, 2, 3]
    sink.close()
    assert steps() == [1, 2, 3, 4]


def test_not_ever_more_lines_wait():
    sink = JsonlSink(LOG, line_buffering=False)
    for step in range(1, 2502):
        sink.write(record(step))
    assert steps() == list(range(1, 2001))
    sink.close()
    assert steps() == list(range(1, 2502))


# A full disk, which is a limit to the size of files here.


def test_a_line_that_finds_no_room_leaves_no_part_of_it_and_the_log_goes_on_afterwards():
    sink = JsonlSink(LOG)
    with room_for(2.5):
        for step in (1, 2):
            sink.write(record(step))
        for step in (3, 4):
            with pytest.raises(OSError, match="too large"):
                sink.write(record(step))
            assert steps() == [1, 2]
    assert sink.lost == 2
    sink.write(record(5))
    sink.close()
    assert steps() == [1, 2, 5]
    assert sink.lost == 2


def test_lines_that_find_no_room_wait_for_the_next_flush():
    sink = JsonlSink(LOG, line_buffering=False)
    for step in range(1, 8):
        sink.write(record(step))
    with room_for(3.5):
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                sink.flush()
            assert steps() == [1, 2, 3]
    sink.write(record(8))
    sink.flush()
    assert steps() == list(range(1, 9))
    sink.close()
    assert sink.lost == 0


def test_lines_for_which_there_is_no_room_when_the_log_is_closed_are_lost_and_counted():
    sink = JsonlSink(LOG, line_buffering=False)
    for step in range(1, 8):
        sink.write(record(step))
    with room_for(3.5):
        with pytest.raises(OSError, match="too large"):
            sink.close()
    assert steps() == [1, 2, 3]
    assert sink.lost == 4
    sink.close()
    write_log(LOG, 8, append=True)  # it has been released
    assert steps() == [1, 2, 3, 8]


def test_only_so_many_lines_wait_for_room():
    sink = JsonlSink(LOG, line_buffering=False)
    with room_for(0):
        for step in range(1, 1001):
            sink.write(record(step))
        with pytest.raises(OSError, match="too large"):
            sink.write(record(1001))
    sink.close()
    assert steps() == list(range(1, 1001))
    assert sink.lost == 1


def test_a_record_that_is_no_json_is_lost_alone():
    sink = JsonlSink(LOG)
    with pytest.raises(TypeError):
        sink.write(record(1, x=object()))
    sink.write(record(2))
    sink.close()
    assert steps() == [2]
    assert sink.lost == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
@pytest.mark.parametrize("line_buffering", [True, False])
def test_a_full_device_is_an_error(line_buffering):
    sink = JsonlSink("/dev/full", line_buffering=line_buffering)
    if line_buffering:
        with pytest.raises(OSError, match="No space left"):
            sink.write(record(1))
        sink.close()
    else:
        sink.write(record(1))
        for end in (sink.flush, sink.close):
            with pytest.raises(OSError, match="No space left"):
                end()
    assert sink.lost == 1


def test_an_interrupt_between_writing_and_noting_it_writes_no_line_twice(monkeypatch):
    """Ctrl-C raises when the system call returns, with the line in the file already."""
    write = os.write

    def interrupted(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    sink = JsonlSink(LOG)
    sink.write(record(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sink.write(record(2))
    sink.write(record(3))
    sink.close()
    assert steps() == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b'{"step": 7}\n' * 9])
def test_a_log_that_somebody_else_changes_is_gone_on_with(content):
    sink = JsonlSink(LOG)
    sink.write(record(1))
    LOG.write_bytes(content)
    sink.write(record(2))
    sink.close()
    assert LOG.read_bytes() == content + record(2).to_json().encode() + b"\n"


# Parts.


def part(number, path=LOG):
    return path.with_name(f"{path.stem}.part{number}{path.suffix}")


@pytest.mark.parametrize("line_buffering", [True, False])
def test_a_log_that_would_grow_too_large_goes_on_in_a_new_file(line_buffering):
    sink = JsonlSink(LOG, max_bytes=3 * LINE + 1, line_buffering=line_buffering, meta={"run": 1})
    for step in range(1, 9):
        sink.write(record(step))
    sink.close()
    assert [steps(part(1)), steps(part(2)), steps()] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert sorted(os.listdir()) == [
        "log.jsonl",
        "log.jsonl.meta.json",
        "log.part1.jsonl",
        "log.part2.jsonl",
    ]


def test_a_file_is_filled_to_the_last_byte():
    sink = JsonlSink(LOG, max_bytes=2 * LINE)
    for step in (1, 2, 3):
        sink.write(record(step))
    sink.close()
    assert [steps(part(1)), steps()] == [[1, 2], [3]]


def test_a_line_longer_than_a_file_has_one_of_its_own():
    sink = JsonlSink(LOG, max_bytes=LINE)
    for step in (1, 2, 3):
        sink.write(record(step, note="x" * (LINE if step == 2 else 0)))
    sink.close()
    assert [steps(part(1)), steps(part(2)), steps()] == [[1], [2], [3]]


def test_a_log_that_is_gone_on_with_counts_its_parts_on():
    for first in (1, 5):
        sink = JsonlSink(LOG, append=True, max_bytes=2 * LINE)
        for step in range(first, first + 4):
            sink.write(record(step))
        sink.close()
    parts = [steps(part(number)) for number in (1, 2, 3)]
    assert [*parts, steps()] == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_a_log_with_two_digits_of_parts_reads_as_one():
    sink = JsonlSink(LOG, max_bytes=LINE)
    for step in range(1, 13):
        sink.write(record(step))
    sink.close()
    assert part(11).exists()
    assert [one.step for one in dt.logs.read_log(LOG).records] == list(range(1, 13))


def test_at_no_moment_can_another_run_take_a_log_that_goes_on_in_a_new_file():
    sink = JsonlSink(LOG, max_bytes=LINE)
    sink.write(record(1))
    trying, written = threading.Event(), threading.Event()
    outcomes = set()

    def take():
        while not written.is_set():
            try:
                JsonlSink(LOG, append=True).close()
                outcomes.add("taken")
            except LogInUseError:
                outcomes.add("refused")
            trying.set()

    taker = threading.Thread(target=take)
    taker.start()
    assert trying.wait(60)
    for step in range(2, 102):
        sink.write(record(step))
    written.set()
    taker.join(60)
    assert outcomes == {"refused"}
    sink.close()
    assert [one.step for one in dt.logs.read_log(LOG).records] == list(range(1, 102))


def test_a_run_killed_between_the_two_steps_to_a_new_part_leaves_no_row_twice():
    """The full file has both names then, and what was to be the new one is there too."""
    write_log(LOG, 1, 2, max_bytes=2 * LINE)
    os.link(LOG, part(1))
    Path("log.jsonl.next").write_text("left")
    assert [one.step for one in dt.logs.read_log(LOG).records] == [1, 2]
    write_log(LOG, 3, 4, append=True, max_bytes=2 * LINE)
    assert [one.step for one in dt.logs.read_log(LOG).records] == [1, 2, 3, 4]
    assert sorted(os.listdir()) == ["log.jsonl", "log.part1.jsonl"]


def test_where_a_file_cannot_have_two_names_the_log_grows_on_and_says_so(monkeypatch):
    def refuse(*names):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    sink = JsonlSink(LOG, max_bytes=2 * LINE)
    told = []
    for step in range(1, 7):
        try:
            sink.write(record(step, arrays={"a": np.zeros(1)} if step == 3 else None))
        except PermissionError:
            told.append(step)
    sink.close()
    assert steps() == [1, 2, 3, 4, 5, 6]
    assert told == [3, 5]  # each time that a part would be due
    assert sink.lost == 0
    assert sorted(os.listdir()) == ["log.jsonl", "log.jsonl.arrays"]
    assert list(dt.logs.read_log(LOG).arrays()) == [3]


def test_a_log_that_somebody_has_moved_away_is_written_on_there():
    sink = JsonlSink(LOG, max_bytes=2 * LINE)
    for step in (1, 2):
        sink.write(record(step))
    LOG.rename("moved.jsonl")
    LOG.write_text("another")
    with pytest.raises(OSError, match=r"log\.jsonl.*moved"):
        sink.write(record(3))
    sink.close()
    assert steps("moved.jsonl") == [1, 2, 3]
    assert LOG.read_text() == "another"


def test_the_folder_may_change_meanwhile():
    sink = JsonlSink(LOG, max_bytes=LINE)
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    for step in (1, 2):
        sink.write(record(step, arrays={"a": np.zeros(2)}))
    sink.close()
    assert os.listdir() == []
    assert sorted(os.listdir("..")) == ["elsewhere", "log.jsonl", "log.jsonl.arrays", "log.part1.jsonl"]


@pytest.mark.parametrize("left", ["all", "an empty log", "no log"])
def test_a_finished_log_is_moved_aside_with_its_parts_and_arrays(left):
    sink = JsonlSink(LOG, max_bytes=LINE, meta={"run": 1})
    for step in (1, 2, 3):
        sink.write(record(step, arrays={"a": np.full(2, step)}))
    sink.close()
    if left == "an empty log":  # as a run leaves it that is killed as it begins a new file
        LOG.write_text("")
    elif left == "no log":
        LOG.unlink()
    write_log(LOG, 4, meta={"run": 2})
    assert sorted(os.listdir()) == [
        "log.1.jsonl",
        "log.1.jsonl.arrays",
        "log.1.jsonl.meta.json",
        "log.1.part1.jsonl",
        "log.1.part2.jsonl",
        "log.jsonl",
        "log.jsonl.meta.json",
    ]
    old = dt.logs.read_log("log.1.jsonl")
    assert [one.step for one in old.records] == ([1, 2, 3] if left == "all" else [1, 2])
    assert old.meta["run"] == 1
    assert {step: arrays["a"].tolist() for step, arrays in old.arrays().items()} == {
        1: [1, 1],
        2: [2, 2],
        3: [3, 3],
    }
    assert [one.step for one in dt.logs.read_log(LOG).records] == [4]
    assert not dt.logs.read_log(LOG).arrays()


@pytest.mark.parametrize(
    ("max_bytes", "kind"), [(0, ArgumentValueError), (1.5, ArgumentTypeError), (True, ArgumentTypeError)]
)
def test_a_limit_that_is_none_is_refused_and_nothing_is_made(max_bytes, kind):
    with pytest.raises(kind, match="max_bytes"):
        JsonlSink(LOG, max_bytes=max_bytes)
    assert os.listdir() == []


# Arrays.

ARRAYS = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "keys": np.array([math.nan, math.inf]),
    "encoder.0/attention": np.zeros((0, 2), np.int64),
    "scalar": np.float64(0.1),
}


def test_arrays_are_beside_the_log_and_not_in_it():
    sink = JsonlSink(LOG)
    sink.write(record(49, loss=0.5))
    assert os.listdir() == ["log.jsonl"]
    sink.write(record(50, loss=0.25, arrays=ARRAYS))
    sink.close()
    assert os.listdir("log.jsonl.arrays") == ["step-000000050.npz"]
    assert LOG.read_text().splitlines() == [record(49, loss=0.5).to_json(), record(50, loss=0.25).to_json()]
    with np.load("log.jsonl.arrays/step-000000050.npz", allow_pickle=False) as read:
        assert sorted(read) == sorted(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(read[name], array)
            assert read[name].dtype == array.dtype


def test_arrays_that_find_no_room_leave_nothing_and_the_line_is_there():
    sink = JsonlSink(LOG)
    with room_for(3):
        with pytest.raises(OSError, match="too large"):
            sink.write(record(1, arrays={"a": np.zeros(1000)}))
    assert os.listdir("log.jsonl.arrays") == []
    sink.write(record(2, arrays={"a": np.zeros(1000)}))
    sink.close()
    assert os.listdir("log.jsonl.arrays") == ["step-000000002.npz"]
    assert steps() == [1, 2]


def test_arrays_that_would_need_pickle_are_refused():
    sink = JsonlSink(LOG)
    with pytest.raises(ValueError, match="Object arrays"):
        sink.write(record(1, arrays={"a": np.array([{}])}))
    sink.close()
    assert os.listdir("log.jsonl.arrays") == []
    assert steps() == [1]


@pytest.mark.parametrize("name", ["file", "allow_pickle"])
def test_an_array_with_a_name_that_numpy_refuses_is_an_error_that_says_so(name):
    sink = JsonlSink(LOG)
    with pytest.raises(ArgumentValueError, match=f"step 3 is called '{name}', but numpy.savez"):
        sink.write(record(3, arrays={"a": np.zeros(1), name: np.zeros(1)}))
    sink.close()
    assert os.listdir("log.jsonl.arrays") == []
    assert steps() == [3]


def test_a_device_gets_no_arrays():
    sink = JsonlSink("/dev/null")
    sink.write(record(1, arrays=ARRAYS))
    sink.close()
    assert not os.path.exists("/dev/null.arrays")
