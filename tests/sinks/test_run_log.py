"""RunLog: whose file it is, and that an error while it is written costs lines and nothing else."""

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from contexts import context_of
from log_files import LOG, open_descriptors, record, room_for, steps
from ranks import Rank

import dualtrain as dt
from dualtrain.errors import LogInUseError
from dualtrain.records import Record
from dualtrain.sinks import MemorySink, RunLog

each_way = pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])


def context(rank=0, **parameters):
    return context_of({"mode": "train", "epoch_num": 3, "batch_num": 5, **parameters}, backend=Rank(rank))


def opened(path=LOG, **options):
    log = RunLog.open(context(), path, **options)
    assert log is not None
    return log


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# Whose file.


@each_way
def test_what_is_written_is_in_the_file_when_the_log_is_closed(asynchronous):
    log = opened(asynchronous=asynchronous)
    for step in range(1, 251):
        log.write(record(step))
    log.close()
    log.close()
    assert steps() == list(range(1, 251))
    assert log.lost == 0
    assert open_descriptors(LOG) == []


@each_way
def test_what_is_written_is_in_the_file_when_the_log_is_flushed(asynchronous):
    log = opened(asynchronous=asynchronous)
    for step in (1, 2, 3):
        log.write(record(step))
    log.flush()
    assert steps() == [1, 2, 3]
    log.close()


def test_rank_0_alone_writes_unless_all_do():
    assert RunLog.open(context(1), LOG) is None
    assert os.listdir() == []
    for rank in (0, 1, 11):
        log = RunLog.open(context(rank), LOG, rank="all")
        log.write(record(rank + 1))
        log.close()
    found = dt.logs.read_ranks(LOG)
    assert {rank: [one.step for one in log.records] for rank, log in found.items()} == {
        0: [1],
        1: [2],
        11: [12],
    }
    assert [log.meta["rank"] for log in found.values()] == [0, 1, 11]
    assert [log.path.name for log in found.values()] == [
        "log.jsonl",
        "log.rank1.jsonl",
        "log.rank11.jsonl",
    ]


def test_it_describes_the_run_and_what_is_added():
    opened(meta={"log_interval": 7, "epochs": 4}).close()
    meta = json.loads(Path("log.jsonl.meta.json").read_text())
    assert datetime.fromisoformat(meta.pop("started")).tzinfo is not None
    assert meta.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert meta == {
        "schema": 1,
        "dualtrain": dt.__version__,
        "backend": "ranked",
        "backend_version": "1",
        "model": None,
        "epochs": 4,
        "batches_per_epoch": 5,
        "rank": 0,
        "world_size": 2,
        "log_interval": 7,
    }


@each_way
def test_it_goes_on_with_a_log_in_parts_and_keeps_arrays(asynchronous):
    for first in (1, 4):
        log = opened(append=first > 1, max_bytes=200, asynchronous=asynchronous)
        for step in range(first, first + 3):
            values = Record(step, 1, "train", 0.0, {"x": 1.0}, {"a": np.arange(step)})
            log.write(values)
        log.close()
    read = dt.logs.read_log(LOG)
    assert [one.step for one in read.records] == [1, 2, 3, 4, 5, 6]
    assert {step: arrays["a"].size for step, arrays in read.arrays().items()} == {n: n for n in range(1, 7)}
    parts = sorted(Path().glob("log*.jsonl"))
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) <= 200


@each_way
@pytest.mark.parametrize("path", ["file/log.jsonl", "folder"])
def test_a_path_that_cannot_be_written_is_an_error(asynchronous, path):
    Path("file").write_text("a regular file")
    Path("folder").mkdir()
    with pytest.raises(OSError, match=r"file|folder"):
        opened(path, asynchronous=asynchronous)


@each_way
def test_a_log_that_is_being_written_is_an_error(asynchronous):
    log = opened()
    with pytest.raises(LogInUseError):
        opened(asynchronous=asynchronous)
    log.write(record(1))
    log.close()
    assert steps() == [1]


def test_a_log_without_its_thread_is_not_held(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            opened()
    assert open_descriptors(LOG) == []
    opened().close()


def test_its_repr_names_the_file():
    log = opened()
    assert repr(log) == "RunLog('log.jsonl')"
    log.close()


# Errors while it is written.


@each_way
def test_a_full_disk_is_warned_of_once_and_lost_lines_are_counted(asynchronous, caplog):
    log = opened(asynchronous=asynchronous)
    with warnings.catch_warnings(record=True) as caught, room_for(2.5):
        warnings.simplefilter("always")
        for step in range(1, 8):
            log.write(record(step))
            log.flush()
        log.close()
    [warning] = caught
    assert warning.category is RuntimeWarning
    assert "'log.jsonl'" in str(warning.message)
    assert "too large" in str(warning.message)
    assert steps() == [1, 2]
    assert log.lost == 5
    log.close()
    [told] = caplog.records
    assert (told.name, told.levelno) == ("dualtrain.sinks.run_log", logging.WARNING)
    assert told.getMessage() == "the log log.jsonl could not be written; lines lost: 5."
    assert open_descriptors(LOG) == []


@each_way
def test_the_log_goes_on_when_there_is_room_again(asynchronous, caplog):
    log = opened(asynchronous=asynchronous)

    def write_five():
        for step in range(1, 6):
            log.write(record(step))
            log.flush()

    with pytest.warns(RuntimeWarning, match="cannot be written"), room_for(2.5):
        write_five()
    for step in range(6, 9):
        log.write(record(step))
    log.close()
    # On the thread, lines wait for room; each line at once is in the file or lost.
    assert steps() == (list(range(1, 9)) if asynchronous else [1, 2, 6, 7, 8])
    assert log.lost == (0 if asynchronous else 3)
    assert len(caplog.records) == (0 if asynchronous else 1)


@each_way
def test_an_error_when_the_log_is_closed_is_warned_of(asynchronous, caplog):
    log = opened(asynchronous=asynchronous)

    def write_and_close():
        log.write(record(1))
        log.close()

    with pytest.warns(RuntimeWarning, match="cannot be written"), room_for(0):
        write_and_close()
    assert log.lost == 1
    assert "lines lost: 1" in caplog.text


@each_way
def test_another_error_is_an_error(asynchronous):
    log = opened(asynchronous=asynchronous)

    def write():
        log.write(record(1, x=object()))
        log.flush()

    with pytest.raises(TypeError, match="not JSON serializable"):
        write()
    log.write(record(2))
    log.close()
    assert steps() == [2]
    assert log.lost == 1


def test_any_sink_can_be_written_through():
    memory = MemorySink()
    log = RunLog(memory, "somewhere")
    log.write(record(1))
    log.close()
    assert [one.step for one in memory.records] == [1]
    assert log.lost == 0


# Further sinks.


@each_way
def test_records_go_to_the_file_and_to_each_sink(asynchronous):
    sinks = [MemorySink(), MemorySink()]
    log = opened(sinks=sinks, asynchronous=asynchronous)
    for step in (1, 2, 3):
        log.write(record(step))
    log.close()
    assert steps() == [1, 2, 3]
    assert sinks[0].records == sinks[1].records == [record(1), record(2), record(3)]
    assert repr(log) == "RunLog('log.jsonl')"


@each_way
def test_records_go_to_sinks_alone_where_there_is_no_file(asynchronous):
    memory = MemorySink()
    log = opened(None, sinks=[memory], asynchronous=asynchronous)
    log.write(record(1))
    log.close()
    assert memory.records == [record(1)]
    assert os.listdir() == []


def test_there_is_no_log_without_file_and_sinks():
    assert RunLog.open(context(), None) is None


# Values that are still missing.


def test_records_wait_in_order_for_values_that_come_later():
    memory, read = MemorySink(), []
    run_context = context()
    log = RunLog.open(run_context, None, sinks=[memory], asynchronous=False)
    assert log is not None

    def later(step):
        return lambda: read.append(step) or {"loss": step / 4}

    log.write(record(1, loss=None, lr=0.5), later=later(1))
    log.write(record(2))
    log.write(record(3, loss=None), later=later(3))
    assert (memory.records, read) == ([], [])
    log.flush()
    expected = [record(1, loss=0.25, lr=0.5), record(2), record(3, loss=0.75)]
    assert (memory.records, read) == (expected, [1, 3])
    log.write(record(4))
    assert memory.records == [*expected, record(4)]
    log.write(record(5), later=later(5))
    log.close()
    assert memory.records == [*expected, record(4), record(5, loss=1.25)]
    assert list(memory.records[0].values) == ["loss", "lr"]


def test_values_that_come_later_are_read_when_the_run_says_so():
    actions = []
    run_context = context()
    run_context.defer = actions.append
    memory = MemorySink()
    log = RunLog.open(run_context, None, sinks=[memory], asynchronous=False)
    log.write(record(1), later=lambda: {"loss": 0.5})
    assert memory.records == []
    [action] = actions
    action()
    assert memory.records == [record(1, loss=0.5)]
    log.close()


def test_values_that_cannot_be_read_are_an_error_and_the_log_is_closed():
    def later():
        raise RuntimeError("the device is lost")

    log = opened()
    log.write(record(1), later=later)
    with pytest.raises(RuntimeError, match="the device is lost"):
        log.close()
    assert open_descriptors(LOG) == []


# kill -9.

KILLED = """
import os, signal, sys
import dualtrain as dt
from dualtrain.records import Record
from dualtrain.sinks import RunLog

log = RunLog.open(dt.RunContext({"mode": "train"}), "log.jsonl")
for step in range(1, 201):
    log.write(Record(step, 1, "train", 0.0, {"loss": 0.5}))
log.flush()
for step in range(201, 251):
    log.write(Record(step, 1, "train", 0.0, {"loss": 0.5}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_all_that_was_flushed_and_no_line_out_of_order():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    read = dt.logs.read_log(LOG)
    found = [one.step for one in read.records]
    assert len(found) >= 200
    assert found == list(range(1, len(found) + 1))
    assert len(read.torn) <= 1
    log = opened(append=True)  # it is not held by the dead
    log.write(record(251))
    log.close()
    assert [one.step for one in dt.logs.read_log(LOG).records] == [*found, 251]
