"""StepLogger: which steps it writes, what a row holds, whose file it is, and what survives a failure."""

import copy
import json
import math
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from contexts import context_of
from engines import At, Recorder, Stream, batches, ones
from log_files import column, open_descriptors, rows_of, training_rows
from ranks import Rank

import dualtrain as dt
from dualtrain.callbacks import StepLogger
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, LogInUseError
from dualtrain.records import Record
from dualtrain.sinks import MemorySink
from dualtrain.testing import FakeLoop

LOG = Path("train_log.jsonl")
OWN_KEYS = ["step", "epoch", "global_step", "loss", "lr", "elapsed_sec", "timestamp"]


def run(engine, *callbacks, epochs=1, data=None, valid=None, lr=0.25, w=1.0, **options):
    """Fit a network with one weight; return the network."""
    network = engine.weight(w)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, lr))
    model.fit(epochs, ones(3) if data is None else data, valid, callbacks=list(callbacks), **options)
    return network


# Which steps.


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "interval", "steps"),
    [(1, 25, 10, [10, 20, 25]), (2, 7, 3, [3, 6, 9, 12, 14]), (1, 3, 1, [1, 2, 3]), (1, 2, 10, [2])],
    ids=[
        "last step beside the interval",
        "counted across epochs",
        "every step",
        "shorter than the interval",
    ],
)
def test_multiples_of_the_interval_and_the_very_last_step_are_logged(
    engine, epochs, per_epoch, interval, steps
):
    run(engine, StepLogger(log_interval=interval), epochs=epochs, data=ones(per_epoch))
    assert column("step") == steps
    assert column("epoch") == [(step - 1) // per_epoch + 1 for step in steps]


def test_the_default_interval_is_ten(torch_engine):
    run(torch_engine, StepLogger(), data=ones(20))
    assert column("step") == [10, 20]


def test_a_last_step_that_is_a_multiple_is_logged_once(engine):
    run(engine, StepLogger(log_interval=2), epochs=2, data=ones(2), valid=ones(1))
    assert column("step") == [2, 4]


def test_data_without_a_length_are_logged_as_sized_data_are(engine):
    watcher = Recorder()
    network = run(
        engine, StepLogger(log_interval=3), watcher, epochs=2, data=Stream(ones(7)), valid=Stream(ones(2))
    )
    assert column("step") == [3, 6, 9, 12, 14]
    assert column("epoch") == [1, 1, 2, 2, 2]
    assert engine.value(network) == 1.0 - 14 * 0.25
    assert watcher.calls.count("on_train_epoch_end") == 2
    assert watcher.calls.count("on_eval_step_end") == 4


def test_a_stream_whose_last_step_is_a_multiple_is_logged_once_though_the_evaluation_logs(engine):
    noter = At("on_eval_end", lambda run_context: run_context.log("note", 7))
    run(engine, StepLogger(log_interval=2), noter, data=Stream(ones(4)), valid=ones(1))
    assert column("step") == [2, 4]
    assert training_rows()[-1]["note"] == 7


def test_a_stop_is_logged_at_its_step(engine):
    stopper = At("on_train_step_end", lambda run_context: run_context.request_stop(), step=4)
    run(engine, StepLogger(log_interval=3), stopper, epochs=3, data=ones(10))
    assert column("step") == [3, 4]


def stopped_at_a_due_step(engine, *callbacks):
    noter = At("on_eval_end", lambda run_context: run_context.log("note", 7))
    run(engine, *callbacks, noter, epochs=2, data=ones(10), valid=ones(1))
    return [(row["step"], row.get("note")) for row in training_rows()]


def test_a_stop_asked_before_the_logger_runs_gives_one_last_row_with_what_the_evaluation_logs(engine):
    stopper = At("on_train_step_end", lambda run_context: run_context.request_stop(), step=4)
    rows = stopped_at_a_due_step(engine, stopper, StepLogger(log_interval=2))
    assert rows == [(2, None), (4, 7.0)]


def test_a_stop_asked_after_the_logger_ran_loses_nothing_that_the_evaluation_logs(torch_engine):
    """The row of that step has been written by then: what comes later is in a second one."""
    stopper = At("on_train_step_end", lambda run_context: run_context.request_stop(), step=4)
    rows = stopped_at_a_due_step(torch_engine, StepLogger(log_interval=2), stopper)
    assert rows == [(2, None), (4, None), (4, 7.0)]


def test_an_evaluation_adds_a_row_behind_that_of_its_step_and_moves_no_counter(engine):
    before = time.time()
    run(engine, StepLogger(log_interval=1), epochs=2, data=ones(3), valid=ones(2))
    assert column("step") == [1, 2, 3, 4, 5, 6]
    assert column("epoch") == [1, 1, 1, 2, 2, 2]
    assert [row.get("mode") for row in rows_of()] == [None, None, None, "eval"] * 2
    first, second = (row for row in rows_of() if "mode" in row)
    assert [list(row) for row in (first, second)] == [
        ["step", "epoch", "mode", "eval_loss", "timestamp"]
    ] * 2
    assert (first["step"], first["epoch"], first["eval_loss"]) == (3, 1, 0.25)
    assert (second["step"], second["epoch"], second["eval_loss"]) == (6, 2, -0.5)
    assert before <= first["timestamp"] <= second["timestamp"] <= time.time()


def test_an_evaluations_row_is_there_where_its_steps_row_is_not(engine):
    run(engine, StepLogger(log_interval=2), epochs=2, data=ones(3), valid=ones(2), valid_frequency=1)
    assert [(row["step"], row["epoch"], row.get("mode")) for row in rows_of()] == [
        (2, 1, None),
        (3, 1, "eval"),
        (4, 2, None),
        (6, 2, None),
        (6, 2, "eval"),
    ]


def test_a_stop_in_an_evaluation_has_the_row_of_its_step_before_that_of_the_evaluation(engine):
    stopper = At("on_eval_end", lambda run_context: run_context.request_stop())
    run(engine, StepLogger(log_interval=2), stopper, epochs=2, data=ones(3), valid=ones(2))
    assert [(row["step"], row.get("mode")) for row in rows_of()] == [(2, None), (3, None), (3, "eval")]


def test_results_that_are_no_numbers_are_left_out_and_arrays_become_lists():
    results = {
        "acc": np.float32(0.5),
        "loss": 2,
        "per_class": np.array([0.25, 1.0]),
        "scalar": np.array(0.125),
        "step": 7.0,
        "confusion": np.eye(2),
        "text": "1.5",
        "nothing": None,
        "bad": math.nan,
    }
    FakeLoop([1.0], evaluations=[results]).run(StepLogger())
    [trained, evaluated] = rows_of()
    assert trained["loss"] == 1.0
    del evaluated["timestamp"]
    assert evaluated == {
        "step": 1,
        "epoch": 1,
        "mode": "eval",
        "acc": 0.5,
        "loss": 2.0,
        "per_class": [0.25, 1.0],
        "scalar": 0.125,
        "eval_step": 7.0,
        "bad": None,
        "nonfinite": {"bad": "nan"},
    }


def evaluate(logger, context, loss):
    """Evaluate between two steps, as a loop of the user's may."""
    params = context.original_args()
    training = dict(params)
    params.update(mode="eval", cur_step_num=9, eval_results={"eval_loss": loss})
    logger.on_eval_end(context)
    params.clear()
    params.update(training)


def test_evaluations_between_steps_and_before_the_first_one_are_logged():
    params = dt.context.CallbackParams(mode="train", cur_step_num=0, cur_epoch_num=1, net_outputs=1.0)
    params["batch_num"] = 4
    context, logger = context_of(params, backend=Rank(0)), StepLogger(log_interval=2)
    logger.on_train_begin(context)
    logger.on_train_epoch_begin(context)
    evaluate(logger, context, 4.0)
    for step in (1, 2, 3, 4):
        params["cur_step_num"] = step
        logger.on_train_step_end(context)
        if step in (2, 3):
            evaluate(logger, context, 1 / step)
    logger.on_train_epoch_end(context)
    logger.on_train_end(context)
    logger.on_teardown(context)
    assert [(row["step"], row.get("mode"), row.get("eval_loss")) for row in rows_of()] == [
        (0, "eval", 4.0),
        (2, None, None),
        (2, "eval", 0.5),
        (3, "eval", 1 / 3),
        (4, None, None),
    ]


def test_a_lone_evaluation_within_a_run_adds_no_row():
    logger = StepLogger(log_interval=1)

    def evaluate_alone(run_context):
        logger.on_eval_end(dt.RunContext({"mode": "eval", "cur_step_num": 3, "metrics": {"acc": 0.5}}))

    FakeLoop([1.0, 2.0]).run([logger, At("on_train_step_end", evaluate_alone, step=1)])
    assert [(row["step"], row.get("mode")) for row in rows_of()] == [(1, None), (2, None)]


# Further sinks.


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_row_goes_to_the_file_and_to_each_sink(engine, asynchronous):
    sinks = [MemorySink(), MemorySink()]
    logger = StepLogger(log_interval=2, asynchronous=asynchronous, sinks=sinks)
    run(engine, logger, epochs=2, data=ones(3), valid=ones(1))
    assert [json.loads(record.to_json()) for record in sinks[0].records] == rows_of()
    assert [(one.step, one.mode) for one in sinks[1].records] == [
        (2, "train"),
        (3, "eval"),
        (4, "train"),
        (6, "train"),
        (6, "eval"),
    ]


class Calls(MemorySink):
    """Notes which of its verbs were called, and how many rows there were."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def flush(self):
        self.calls.append(("flush", len(self.records)))

    def close(self):
        self.calls.append(("close", len(self.records)))


def test_sinks_are_flushed_at_each_row_without_a_thread_and_closed_once():
    sink = Calls()
    FakeLoop([1.0] * 3).run(StepLogger(log_interval=1, asynchronous=False, sinks=(sink,)))
    assert sink.calls == [("flush", 1), ("flush", 2), ("flush", 3), ("close", 3)]


def test_sinks_are_left_alone_on_a_rank_that_does_not_write():
    sink = Calls()
    logger = StepLogger(sinks=[sink])
    context = context_of({"mode": "train", "cur_step_num": 0}, backend=Rank(1))
    logger.on_train_begin(context)
    logger.on_teardown(context)
    assert sink.calls == []
    assert not LOG.exists()


def test_a_sink_that_fails_costs_the_file_no_row():
    class Full(MemorySink):
        def write(self, record):
            raise OSError("no room")

    with pytest.warns(RuntimeWarning, match="no room"):
        FakeLoop([1.0] * 3).run(StepLogger(log_interval=1, sinks=[Full()]))
    assert column("step") == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (StepLogger, "StepLogger"),
        (dt.callbacks.TransformerMonitor, "TransformerMonitor"),
        (dt.callbacks.ParameterMonitor, "ParameterMonitor"),
    ],
)
@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (MemorySink(), "takes a list of sinks, but got MemorySink"),
        (None, "takes a list of sinks, but got None"),
        ([MemorySink], "takes sinks, objects with write, flush and close, but got <class"),
        ([MemorySink(), "log.csv"], "write, flush and close, but got 'log.csv'"),
    ],
    ids=["no list", "None", "a class", "a path"],
)
def test_what_is_no_sink_is_refused_when_the_callback_is_made(make, name, sinks, message):
    with pytest.raises(ArgumentTypeError, match=rf"{name}\(sinks=...\) .*{message}"):
        make(sinks=sinks)


def test_a_lone_evaluation_leaves_no_log(torch_engine):
    network = torch_engine.weight()
    dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network)).eval(
        ones(2), StepLogger(log_interval=1)
    )
    assert not LOG.exists()


def test_steps_count_from_one_again_after_an_initial_epoch(torch_engine):
    run(torch_engine, StepLogger(log_interval=2), epochs=4, initial_epoch=2, data=ones(3))
    assert column("step") == [2, 4, 6]
    assert column("epoch") == [3, 4, 4]


# What a row holds.


def test_a_row_holds_these_values(engine):
    clock, before = time.monotonic(), time.time()
    run(engine, StepLogger(log_interval=1), data=batches((1, 0.5), (2, -1), (-4, 0)), w=1.0, lr=0.25)
    took, after = time.monotonic() - clock, time.time()
    rows = rows_of()
    assert [list(row) for row in rows] == [OWN_KEYS] * 3
    assert column("loss") == [1.0 + 0.5, 0.75 * 2 - 1, 0.25 * -4]
    assert column("lr") == [0.25] * 3
    assert column("global_step") == [1, 2, 3]
    assert column("epoch") == [1, 1, 1]
    elapsed, times = column("elapsed_sec"), column("timestamp")
    assert 0 <= elapsed[0] <= elapsed[1] <= elapsed[2] <= took
    assert before <= times[0] <= times[1] <= times[2] <= after


def test_the_rate_reads_as_it_was_written(engine):
    run(engine, StepLogger(log_interval=1), lr=0.1)
    assert column("lr") == [0.1] * 3
    assert '"lr": 0.1,' in LOG.read_text()


def test_a_tiny_rate_is_not_zero(engine):
    run(engine, StepLogger(log_interval=1), lr=3e-10)
    assert column("lr") == [3e-10] * 3


def test_a_rate_is_the_one_that_the_step_used(engine):
    def change(run_context):
        run_context.lr = 0.5

    changer = At("on_train_step_end", change, step=2)
    run(engine, StepLogger("before.jsonl", 1), changer, StepLogger("after.jsonl", 1), lr=0.25)
    assert column("lr", "before.jsonl") == [0.25, 0.25, 0.5]
    assert column("lr", "after.jsonl") == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_end", "on_train_epoch_end"])
def test_a_last_row_beside_the_interval_shows_the_rate_that_its_step_used(torch_engine, event):
    def change(run_context):
        run_context.lr = 0.5

    changer = At(event, change, step=None if event == "on_eval_end" else 3)
    run(torch_engine, StepLogger(log_interval=2), changer, valid=ones(1))
    assert [(row["step"], row["lr"]) for row in training_rows()] == [(2, 0.25), (3, 0.25)]


def test_several_parameter_groups_give_a_list_of_rates(engine):
    network = engine.two_weights()
    model = dt.Model(network, engine.loss_fn(), engine.sgd_groups(network, 0.1, 0.01))
    model.train(1, ones(2), StepLogger(log_interval=1))
    assert column("lr") == [[0.1, 0.01], [0.1, 0.01]]


def test_full_precision_is_kept(torch_engine):
    run(torch_engine, StepLogger(log_interval=1), data=batches((0.1, 0)), w=1 / 3, lr=0.1)
    assert column("loss") == [float(np.float32(1 / 3) * np.float32(0.1))]


def test_a_value_logged_before_the_logger_ran_is_in_the_same_row(engine):
    def log(run_context):
        run_context.log("double", 2 * run_context.step)

    run(engine, At("on_train_step_end", log), StepLogger(log_interval=2), data=ones(4))
    assert [(row["step"], row["double"]) for row in rows_of()] == [(2, 4.0), (4, 8.0)]


def test_a_value_logged_after_the_logger_ran_is_in_its_next_row(engine):
    def log(run_context):
        run_context.log("seen", 10 * run_context.step)

    run(engine, StepLogger(log_interval=1), At("on_train_step_end", log, step=1), data=ones(3))
    rows = rows_of()
    assert "seen" not in rows[0]
    assert rows[1]["seen"] == 10.0
    assert "seen" not in rows[2]


def test_what_was_logged_between_two_rows_is_in_the_later_one(torch_engine):
    def log(run_context):
        run_context.log("seen", run_context.step)

    run(torch_engine, At("on_train_step_end", log, step=2), StepLogger(log_interval=4), data=ones(4))
    assert [(row["step"], row["seen"]) for row in rows_of()] == [(4, 2.0)]


def test_a_value_is_in_one_row_alone(torch_engine):
    def log(run_context):
        run_context.log(f"at_{run_context.step}", 1)

    run(torch_engine, At("on_train_step_end", log), StepLogger(log_interval=1))
    assert [[name for name in row if name.startswith("at_")] for row in rows_of()] == [
        ["at_1"],
        ["at_2"],
        ["at_3"],
    ]


def test_of_several_values_for_a_name_the_last_one_wins(torch_engine):
    def log(run_context):
        for value in (1, 3, 2):
            run_context.log("x", value)

    run(torch_engine, At("on_train_step_end", log, step=1), StepLogger(log_interval=1), data=ones(2))
    assert [row.get("x") for row in rows_of()] == [2.0, None]


def test_each_logger_gets_every_value_once(torch_engine):
    def log(run_context):
        run_context.log("x", run_context.step)

    loggers = StepLogger("every.jsonl", 1), StepLogger("second.jsonl", 2)
    run(torch_engine, loggers[0], At("on_train_step_end", log), loggers[1], data=ones(4))
    assert [row.get("x") for row in rows_of("every.jsonl")] == [None, 1.0, 2.0, 4.0]
    assert [row.get("x") for row in rows_of("second.jsonl")] == [2.0, 4.0]


def test_what_the_last_evaluation_logs_is_in_the_last_row(engine):
    def log(run_context):
        run_context.log("score", 10 * run_context.epoch)

    run(engine, StepLogger(log_interval=1), At("on_eval_end", log), epochs=2, data=ones(2), valid=ones(1))
    assert [(row["step"], row.get("score")) for row in training_rows()] == [
        (1, None),
        (2, None),
        (3, 10.0),
        (4, 20.0),
    ]


def test_what_the_last_evaluation_logs_is_in_a_last_row_beside_the_interval(torch_engine):
    log = At("on_eval_end", lambda run_context: run_context.log("score", 1.5))
    run(torch_engine, log, StepLogger(log_interval=2), data=ones(3), valid=ones(1))
    assert [(row["step"], row.get("score")) for row in training_rows()] == [(2, None), (3, 1.5)]


def test_a_native_scalar_can_be_logged(engine):
    log = At("on_train_step_end", lambda run_context: run_context.log("x", run_context.outputs))
    run(engine, log, StepLogger(log_interval=1), data=ones(2))
    assert column("x") == [1.0, 0.75]


# Values that JSON does not have.


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_is_null_and_says_which(engine, value):
    run(engine, StepLogger(log_interval=1), data=batches((0, 1), (0, float(value)), (0, 2)))
    rows = rows_of()
    assert column("loss") == [1.0, None, 2.0]
    assert rows[1]["nonfinite"] == {"loss": value}
    assert "nonfinite" not in rows[0]
    assert "nonfinite" not in rows[2]


def test_a_log_reads_back_as_it_was_recorded(engine):
    def log(run_context):
        run_context.log("gap", [math.nan, math.inf, -math.inf, 0.1][run_context.step - 1])

    network = engine.two_weights()
    model = dt.Model(network, engine.loss_fn(), engine.sgd_groups(network, 0.25, 0.5))
    model.train(1, ones(4), [At("on_train_step_end", log), StepLogger(log_interval=1)])
    records = dt.logs.read_log(LOG).records
    assert records[0].values["gap"] != records[0].values["gap"]
    assert [record.values["gap"] for record in records[1:]] == [math.inf, -math.inf, 0.1]
    assert [record.values["lr"] for record in records] == [(0.25, 0.5)] * 4
    assert [record.values["loss"] for record in records] == [2.0, 1.25, 0.5, -0.25]
    assert [(record.step, record.epoch, record.mode) for record in records] == [
        (1, 1, "train"),
        (2, 1, "train"),
        (3, 1, "train"),
        (4, 1, "train"),
    ]
    lines = LOG.read_text().splitlines()
    assert [Record.from_json(line).to_json() for line in lines] == lines
    assert [record.time for record in records] == column("timestamp")


def test_names_with_a_dot_read_back_beside_a_list_of_rates(torch_engine):
    def log(run_context):
        run_context.log("lr.mean", math.nan)
        run_context.log("lr.0", math.inf)

    network = torch_engine.two_weights()
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd_groups(network, 0.25, 0.5))
    model.train(1, ones(1), [At("on_train_step_end", log), StepLogger(log_interval=1)])
    [record] = dt.logs.read_log(LOG).records
    assert math.isnan(record.values["lr.mean"])
    assert record.values["lr.0"] == math.inf
    assert record.values["lr"] == (0.25, 0.5)


# The run information beside the log.


def test_the_sidecar_is_one_line_about_the_run(engine):
    run(engine, StepLogger(log_interval=2), epochs=3, data=ones(2))
    text = Path("train_log.jsonl.meta.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    meta = json.loads(text)
    assert "step" not in meta
    framework = sys.modules[engine.framework]
    expected = {
        "schema": 1,
        "dualtrain": dt.__version__,
        "backend": engine.framework,
        "backend_version": framework.__version__,
        "model": "Weight",
        "epochs": 3,
        "batches_per_epoch": 2,
        "log_interval": 2,
        "rank": 0,
        "world_size": 1,
    }
    assert {key: meta[key] for key in expected} == expected
    assert datetime.fromisoformat(meta["started"]).tzinfo is not None
    assert dt.logs.read_log(LOG).meta == meta


def test_the_sidecar_of_data_without_a_length_says_so(torch_engine):
    run(torch_engine, StepLogger(), data=Stream(ones(2)))
    meta = json.loads(Path("train_log.jsonl.meta.json").read_text())
    assert meta["batches_per_epoch"] is None


# Whose file it is.


def test_an_older_log_is_moved_aside_with_its_sidecar(torch_engine):
    for rate in (0.5, 0.25, 0.125):
        run(torch_engine, StepLogger(log_interval=1), lr=rate)
    logs = {"train_log.1.jsonl": 0.5, "train_log.2.jsonl": 0.25, "train_log.jsonl": 0.125}
    sidecars = {f"{name}.meta.json" for name in logs}
    assert {path.name for path in Path().iterdir()} == {*logs, *sidecars}
    for name, rate in logs.items():
        assert column("lr", name) == [rate] * 3
    started = [dt.logs.read_log(name).meta["started"] for name in logs]
    assert started == sorted(started)


def test_an_older_log_keeps_its_own_sidecar(torch_engine):
    run(torch_engine, StepLogger(log_interval=1))
    run(torch_engine, StepLogger(log_interval=3))
    assert dt.logs.read_log("train_log.1.jsonl").meta["log_interval"] == 1
    assert dt.logs.read_log("train_log.jsonl").meta["log_interval"] == 3


def test_an_older_log_without_a_sidecar_is_moved_aside_too(torch_engine):
    LOG.write_text("anything that somebody kept here\n")
    run(torch_engine, StepLogger(log_interval=1))
    assert Path("train_log.1.jsonl").read_text() == "anything that somebody kept here\n"
    assert not Path("train_log.1.jsonl.meta.json").exists()
    assert column("step") == [1, 2, 3]


def test_one_logger_can_serve_a_second_run(engine):
    logger = StepLogger(log_interval=2)
    run(engine, logger, data=ones(3))
    run(engine, logger, data=ones(5))
    assert column("step", "train_log.1.jsonl") == [2, 3]
    assert column("step") == [2, 4, 5]


def test_a_second_run_that_is_just_like_the_first_has_just_such_a_log(torch_engine):
    logger = StepLogger(log_interval=10)
    note = At("on_train_step_begin", lambda run_context: run_context.log("x", run_context.step), step=2)
    for _ in range(2):
        run(torch_engine, logger, note)
    for name in ("train_log.1.jsonl", "train_log.jsonl"):
        assert [(row["step"], row.get("x")) for row in rows_of(name)] == [(3, 2.0)]


def test_nothing_logged_in_one_run_shows_up_in_the_next(torch_engine):
    logger = StepLogger(log_interval=1)
    run(torch_engine, logger, At("on_train_end", lambda run_context: run_context.log("late", 1)))
    run(torch_engine, logger)
    assert all("late" not in row for row in rows_of())


def test_an_empty_file_is_used_as_it_is(torch_engine):
    LOG.touch()
    run(torch_engine, StepLogger(log_interval=1))
    assert column("step") == [1, 2, 3]
    assert not Path("train_log.1.jsonl").exists()


def test_the_name_is_read_at_train_begin(torch_engine):
    logger = StepLogger("early.jsonl", 1)
    for name in ("late.jsonl", "later.jsonl"):
        logger.log_file = Path(name)
        run(torch_engine, logger)
        assert column("step", name) == [1, 2, 3]
    assert not Path("early.jsonl").exists()


def test_missing_folders_are_made(torch_engine):
    run(torch_engine, StepLogger(Path("runs/of/today/log.jsonl"), 1))
    assert column("step", "runs/of/today/log.jsonl") == [1, 2, 3]


def test_a_second_run_inside_a_callback_is_refused_the_log_and_the_first_one_is_whole(engine):
    refused = []

    def nested(run_context):
        network = engine.weight()
        inner = dt.Model(network, engine.loss_fn(), engine.sgd(network))
        watcher = Recorder()
        with pytest.raises(LogInUseError) as error:
            inner.train(1, ones(2), [StepLogger(log_interval=1), watcher])
        refused.append((str(error.value), engine.value(network), watcher.calls))

    run(engine, StepLogger(log_interval=1), At("on_train_step_end", nested, step=5), data=ones(10))
    [(message, weight, calls)] = refused
    assert isinstance(LogInUseError(), OSError)
    assert "train_log.jsonl" in message
    assert "another run" in message
    assert weight == 1.0
    assert "on_train_step_begin" not in calls
    assert column("step") == list(range(1, 11))
    assert sorted(path.name for path in Path().glob("train_log*")) == [
        "train_log.jsonl",
        "train_log.jsonl.meta.json",
    ]


HOLDER = """
import sys
import dualtrain as dt

logger = dt.callbacks.StepLogger("train_log.jsonl", 1, asynchronous=False)
parameters = {"mode": "train", "cur_step_num": 0, "cur_epoch_num": 1, "epoch_num": 1}
parameters["batch_num"] = 3
run_context = dt.RunContext(parameters)
logger.on_train_begin(run_context)
for step in (1, 2):
    parameters["cur_step_num"] = step
    logger.on_train_step_end(run_context)
print("writing", flush=True)
sys.stdin.readline()
logger.on_train_end(run_context)
logger.on_teardown(run_context)
"""


def held_log():
    """Start another process that is writing the log, and return once it is."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "writing\n"
    return holder


def test_a_log_that_another_process_is_writing_is_refused(torch_engine):
    holder = held_log()
    with holder:
        for _ in range(2):
            network, watcher = torch_engine.weight(), Recorder()
            model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
            with pytest.raises(OSError, match="is being written by another run"):
                model.train(1, ones(2), [StepLogger(log_interval=1), watcher])
            assert torch_engine.value(network) == 1.0
            assert "on_train_step_begin" not in watcher.calls
            assert open_descriptors(LOG) == []
        holder.communicate("go on\n")
    assert holder.returncode == 0
    assert column("step") == [1, 2]
    run(torch_engine, StepLogger(log_interval=1))
    assert column("step") == [1, 2, 3]
    assert column("step", "train_log.1.jsonl") == [1, 2]


def test_a_killed_run_holds_its_log_no_longer(torch_engine):
    holder = held_log()
    with holder:
        holder.kill()
    run(torch_engine, StepLogger(log_interval=1))
    assert column("step") == [1, 2, 3]
    assert column("step", "train_log.1.jsonl") == [1, 2]


def test_two_loggers_of_one_run_cannot_write_one_file(torch_engine):
    network = torch_engine.weight()
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
    with pytest.raises(LogInUseError):
        model.train(1, ones(2), [StepLogger(log_interval=1), StepLogger(log_interval=2)])
    assert torch_engine.value(network) == 1.0
    assert rows_of() == []


def test_a_refused_run_releases_the_files_it_had(torch_engine):
    with held_log() as holder:
        network = torch_engine.weight()
        model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
        with pytest.raises(LogInUseError):
            model.train(1, ones(2), [StepLogger("mine.jsonl", 1), StepLogger(LOG, 1)])
        assert not open_descriptors("mine.jsonl")
        holder.communicate("go on\n")
    run(torch_engine, StepLogger("mine.jsonl", 1))
    assert column("step", "mine.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("path", ["file/log.jsonl", "file/deeper/log.jsonl", "folder"])
def test_a_path_that_cannot_be_written_is_refused_before_the_first_step(engine, path):
    Path("file").write_text("a regular file")
    Path("folder").mkdir()
    network, watcher = engine.weight(), Recorder()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(OSError, match=r"file|folder"):
        model.train(1, ones(2), [StepLogger(path, 1), watcher])
    assert engine.value(network) == 1.0
    assert watcher.calls == ["on_exception", "on_teardown"]
    assert Path("file").read_text() == "a regular file"


# Devices and pipes.


def test_the_null_device_is_written_to_and_left_where_it_is(torch_engine):
    before = os.stat("/dev/null")
    for _ in range(2):
        run(torch_engine, StepLogger("/dev/null", 1))
    assert os.path.samestat(os.stat("/dev/null"), before)
    assert not [name for name in os.listdir("/dev") if name.startswith("null") and name != "null"]


def test_a_pipe_gets_the_rows_and_is_left_where_it_is(torch_engine):
    os.mkfifo("pipe.jsonl")
    reader = os.open("pipe.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(2):
            run(torch_engine, StepLogger("pipe.jsonl", 1))
            assert select.select([reader], [], [], 0)[0]
            lines = os.read(reader, 1 << 16).decode().splitlines()
            assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    finally:
        os.close(reader)
    assert os.listdir() == ["pipe.jsonl"]
    assert Path("pipe.jsonl").is_fifo()


def test_two_runs_may_write_to_one_device(torch_engine):
    nested = At("on_train_step_end", lambda _: run(torch_engine, StepLogger("/dev/null", 1)), step=1)
    assert torch_engine.value(run(torch_engine, StepLogger("/dev/null", 1), nested)) == 0.25


# Names that are not ASCII.


def test_a_chinese_name_works(torch_engine):
    path = Path("日志") / "训练.jsonl"
    for _ in range(2):
        run(torch_engine, StepLogger(path, 1))
    assert column("step", path) == [1, 2, 3]
    assert sorted(os.listdir("日志")) == [
        "训练.1.jsonl",
        "训练.1.jsonl.meta.json",
        "训练.jsonl",
        "训练.jsonl.meta.json",
    ]


def test_a_model_whose_name_is_not_ascii_works(torch_engine):
    import torch

    class Größe(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x, label):
            return (self.w * x + label).mean()

    network = Größe()
    model = dt.Model(network, optimizer=torch_engine.sgd(network))
    model.train(1, ones(2), StepLogger(log_interval=1))
    assert dt.logs.read_log(LOG).meta["model"] == "Größe"


IN_A_C_LOCALE = """
import locale, sys
import torch, numpy
import dualtrain as dt

assert locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
path = sys.argv[1]
assert not path.isascii() and not path.isprintable()  # it came as surrogates
network = torch.nn.Linear(1, 1)
model = dt.Model(network, torch.nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1))
batch = (numpy.ones((1, 1), numpy.float32), numpy.ones((1, 1), numpy.float32))
model.train(1, [batch] * 3, dt.callbacks.StepLogger(path, 1))
"""


@pytest.mark.torch
def test_a_chinese_name_works_in_a_locale_that_cannot_spell_it():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    path = Path("日志") / "训练.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", IN_A_C_LOCALE, os.fsencode(path)],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr
    assert column("step", path) == [1, 2, 3]
    assert dt.logs.read_log(path).meta["model"] == "Linear"


# When something fails.


class Leaving(dt.Callback):
    """A callback that notes how it is left."""

    def __init__(self, name, left):
        self.name, self._left = name, left

    def __exit__(self, *error):
        self._left.append((self.name, error[0]))


class LeavingLogger(StepLogger):
    def __exit__(self, *error):
        self.left.append(("logger", error[0]))
        return super().__exit__(*error)


class Failing(Leaving):
    def __init__(self, name, left, error, step):
        super().__init__(name, left)
        self._error, self._step = error, step

    def on_train_step_end(self, run_context):
        if run_context.step == self._step:
            raise self._error


class FailingCleanUp(Leaving):
    def __exit__(self, *error):
        super().__exit__(*error)
        raise OSError("the clean-up failed as well")


def failing_run(engine, *callbacks):
    """Run until a callback fails; return the error, as the caller gets it."""
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(Exception) as caught:
        model.train(2, ones(4), list(callbacks))
    return caught.value


def test_a_failing_callback_leaves_a_whole_log_and_every_callback_is_left_once(engine):
    left, error = [], RuntimeError("the third step")
    logger = LeavingLogger(log_interval=1)
    logger.left = left
    held = []
    look = At("on_train_step_begin", lambda _: held.append(len(open_descriptors(LOG))), step=1)
    a, b, c = Leaving("a", left), Failing("b", left, error, 3), Leaving("c", left)
    caught = failing_run(engine, logger, look, a, b, c)
    assert caught is error
    assert str(caught) == "the third step"
    assert left == [(name, RuntimeError) for name in ("c", "b", "a", "logger")]
    notes = " ".join(caught.__notes__)
    assert "Failing" in notes
    assert "on_train_step_end" in notes
    assert "step 3" in notes
    assert column("step") == [1, 2, 3]
    assert held == [1]
    assert open_descriptors(LOG) == []


def test_a_failing_clean_up_does_not_hide_the_error(engine):
    left, error = [], RuntimeError("the third step")
    logger = LeavingLogger(log_interval=1)
    logger.left = left
    callbacks = [FailingCleanUp("a", left), Failing("b", left, error, 3), FailingCleanUp("c", left)]
    caught = failing_run(engine, logger, *callbacks)
    assert caught is error
    assert left == [(name, RuntimeError) for name in ("c", "b", "a", "logger")]
    assert sum("the clean-up failed as well" in note for note in caught.__notes__) == 2
    assert column("step") == [1, 2, 3]
    assert open_descriptors(LOG) == []


def test_a_failing_clean_up_alone_is_an_error_and_the_log_is_whole(torch_engine):
    left = []
    caught = failing_run(
        torch_engine, StepLogger(log_interval=1), FailingCleanUp("a", left), Leaving("b", left)
    )
    assert str(caught) == "the clean-up failed as well"
    assert left == [("b", None), ("a", None)]
    assert column("step") == list(range(1, 9))
    assert open_descriptors(LOG) == []


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_at_step_five_leaves_five_whole_lines(engine, error):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(type(error)) as caught:
        model.train(2, ones(4), [Failing("b", [], error, 5), StepLogger("behind.jsonl", 1)])
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        model.train(2, ones(4), [StepLogger(log_interval=1), Failing("b", [], error, 5)])
    assert caught.value is error
    assert column("step", "behind.jsonl") == [1, 2, 3, 4]
    assert column("step") == [1, 2, 3, 4, 5]
    assert column("epoch") == [1, 1, 1, 1, 2]
    assert open_descriptors(LOG) == []


def test_an_error_in_the_last_evaluation_leaves_the_last_row(engine):
    def fail(run_context):
        raise ValueError("odd")

    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(ValueError, match="odd"):
        model.fit(1, ones(3), ones(1), callbacks=[StepLogger(log_interval=1), At("on_eval_end", fail)])
    assert column("step") == [1, 2, 3]


def test_rows_can_be_read_while_the_run_goes_on(torch_engine):
    seen = []
    look = At("on_train_step_begin", lambda _: seen.append(column("step")))
    run(torch_engine, StepLogger(log_interval=1, asynchronous=False), look, epochs=2, data=ones(2))
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


def test_rows_written_on_a_thread_are_all_there_when_the_run_ends(engine):
    threads = set(threading.enumerate())
    during = []
    look = At("on_train_step_end", lambda _: during.append(set(threading.enumerate()) - threads), step=9)
    run(engine, StepLogger(log_interval=1), look, data=ones(250))
    assert column("step") == list(range(1, 251))
    assert [len(new) for new in during] == [1]
    assert set(threading.enumerate()) == threads
    assert open_descriptors(LOG) == []


def test_without_a_thread_there_is_none(torch_engine):
    threads = set(threading.enumerate())
    during = []
    look = At("on_train_step_end", lambda _: during.append(set(threading.enumerate())), step=2)
    run(torch_engine, StepLogger(log_interval=1, asynchronous=False), look)
    assert during == [threads]


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)], ids=["error", "exit"])
def test_an_end_at_step_250_leaves_250_rows_and_no_thread(engine, error):
    threads = set(threading.enumerate())
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(type(error)) as caught:
        model.train(1, ones(300), [StepLogger(log_interval=1), Failing("b", [], error, 250)])
    assert caught.value is error
    assert column("step") == list(range(1, 251))
    assert set(threading.enumerate()) == threads
    assert open_descriptors(LOG) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_full_device_costs_rows_and_not_the_training(engine, asynchronous, caplog):
    logger = StepLogger("/dev/full", 1, asynchronous=asynchronous)
    with pytest.warns(RuntimeWarning) as warned:
        network = run(engine, logger, data=ones(20), lr=0.03)
    assert engine.value(network) == engine.value(run(engine, data=ones(20), lr=0.03))
    [message] = [str(one.message) for one in warned if "written" in str(one.message)]
    assert message.startswith("the log '/dev/full' cannot be written ([Errno 28] No space left on device)")
    assert [one.getMessage() for one in caplog.records if one.name.startswith("dualtrain")] == [
        "the log /dev/full could not be written; lines lost: 20."
    ]


def test_a_log_that_would_grow_too_large_goes_on_in_a_new_file(torch_engine):
    run(torch_engine, StepLogger(log_interval=1, max_bytes=500), data=ones(9))
    parts = sorted(Path().glob("train_log.part*.jsonl"))
    assert parts
    assert max(path.stat().st_size for path in [LOG, *parts]) <= 500
    assert [record.step for record in dt.logs.read_log(LOG).records] == list(range(1, 10))
    run(torch_engine, StepLogger(log_interval=1, max_bytes=500), data=ones(2))
    assert column("step") == [1, 2]
    aside = dt.logs.read_log("train_log.1.jsonl")
    assert [record.step for record in aside.records] == list(range(1, 10))


# Copies.


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda logger: pickle.loads(pickle.dumps(logger))}


@pytest.fixture(params=COPIES)
def copied(request):
    return COPIES[request.param]


def test_a_copy_of_a_new_logger_keeps_its_settings(torch_engine, copied):
    twin = copied(StepLogger("other.jsonl", 7, rank="all"))
    assert (twin.log_file, twin.log_interval, twin.rank) == ("other.jsonl", 7, "all")
    run(torch_engine, twin, data=ones(15))
    assert column("step", "other.jsonl") == [7, 14, 15]


def test_a_copy_of_a_used_logger_serves_a_run(torch_engine, copied):
    logger = StepLogger(log_interval=7)
    run(torch_engine, logger, data=ones(15))
    twin = copied(logger)
    assert repr(twin) == repr(logger)
    run(torch_engine, twin, data=ones(15))
    assert column("step", "train_log.1.jsonl") == [7, 14, 15]
    assert column("step") == [7, 14, 15]


def test_a_copy_made_while_the_run_goes_on_does_it_no_harm(engine, copied):
    logger = StepLogger(log_interval=1)
    twins = []
    copier = At("on_train_step_end", lambda _: twins.append(copied(logger)), step=3)
    run(engine, logger, copier, data=ones(5))
    assert column("step") == [1, 2, 3, 4, 5]
    assert open_descriptors(LOG) == []
    [twin] = twins
    twin.log_file = "twin.jsonl"
    run(engine, twin, data=ones(2))
    assert column("step", "twin.jsonl") == [1, 2]
    assert column("step") == [1, 2, 3, 4, 5]


class TaggedLogger(StepLogger):
    """A subclass with a constructor of its own, as users write them."""

    def __init__(self, tag):
        super().__init__(f"{tag}.jsonl", 2)
        self.tag = tag


def test_a_subclass_with_its_own_constructor_can_be_copied(torch_engine, copied):
    logger = TaggedLogger("mine")
    twin = copied(logger)
    assert (twin.tag, twin.log_interval) == ("mine", 2)
    run(torch_engine, twin, data=ones(3))
    assert column("step", "mine.jsonl") == [2, 3]


# Going on with a log.


def test_a_logger_that_takes_up_its_state_goes_on_with_the_log(engine):
    def restore(run_context):
        run_context.original_args()["cur_step_num"] = 4

    first = StepLogger(log_interval=1)
    run(engine, first, data=ones(4))
    meta = dt.logs.read_log(LOG).meta
    state = json.loads(json.dumps(first.state_dict()))
    second = StepLogger(log_interval=1)
    second.load_state_dict(state)
    run(engine, At("on_train_begin", restore), second, epochs=2, initial_epoch=1, data=ones(4))
    assert column("step") == list(range(1, 9))
    assert column("epoch") == [1] * 4 + [2] * 4
    assert dt.logs.read_log(LOG).meta == meta
    assert sorted(os.listdir()) == ["train_log.jsonl", "train_log.jsonl.meta.json"]


def test_an_interval_is_counted_on_when_a_log_is_gone_on_with(torch_engine):
    def restore(run_context):
        run_context.original_args()["cur_step_num"] = 4

    first = StepLogger(log_interval=3)
    run(torch_engine, first, data=ones(4))
    second = StepLogger(log_interval=3)
    second.load_state_dict(first.state_dict())
    run(torch_engine, At("on_train_begin", restore), second, epochs=2, initial_epoch=1, data=ones(4))
    assert column("step") == [3, 4, 6, 8]


def test_a_log_can_be_gone_on_with_twice_though_nothing_was_written_in_between(torch_engine):
    """The state taken before a continued run's first row still says that there is a log."""
    first = StepLogger(log_interval=1)
    run(torch_engine, first, data=ones(2))
    second = StepLogger(log_interval=100)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    states = []
    keep = At("on_train_step_end", lambda _: states.append(second.state_dict()), step=1)
    run(torch_engine, second, keep, data=ones(2))
    third = StepLogger(log_interval=1)
    third.load_state_dict(states[0])
    run(torch_engine, third, data=ones(2))
    assert column("step") == [1, 2, 2, 1, 2]
    assert not Path("train_log.1.jsonl").exists()


def test_the_last_row_is_not_taken_for_that_of_the_run_before(torch_engine):
    """Both runs end at step 2: the second one's last step is logged although that number is there."""
    first = StepLogger(log_interval=100)
    run(torch_engine, first, data=Stream(ones(2)))
    second = StepLogger(log_interval=100)
    second.load_state_dict(first.state_dict())
    run(torch_engine, second, data=Stream(ones(2)))
    assert column("step") == [2, 2]


def test_only_the_next_run_goes_on_with_the_log(torch_engine):
    first = StepLogger(log_interval=1)
    run(torch_engine, first, data=ones(2))
    second = StepLogger(log_interval=1)
    second.load_state_dict(first.state_dict())
    run(torch_engine, second, data=ones(2))
    assert column("step") == [1, 2, 1, 2]
    run(torch_engine, second, data=ones(3))
    assert column("step") == [1, 2, 3]
    assert column("step", "train_log.1.jsonl") == [1, 2, 1, 2]


def test_the_state_of_a_logger_that_wrote_nothing_continues_nothing(torch_engine):
    run(torch_engine, StepLogger(log_interval=1), data=ones(2))
    second = StepLogger(log_interval=1)
    second.load_state_dict(StepLogger(log_interval=1).state_dict())
    run(torch_engine, second, data=ones(3))
    assert column("step", "train_log.1.jsonl") == [1, 2]
    assert column("step") == [1, 2, 3]


def test_a_line_that_a_killed_run_left_torn_spoils_no_other(torch_engine):
    first = StepLogger(log_interval=1)
    run(torch_engine, first, data=ones(2))
    with LOG.open("a") as log:
        log.write('{"step": 3, "epo')
    second = StepLogger(log_interval=1)
    second.load_state_dict(first.state_dict())
    run(torch_engine, second, data=ones(2))
    log = dt.logs.read_log(LOG)
    assert [record.step for record in log.records] == [1, 2, 1, 2]
    assert log.torn == ['{"step": 3, "epo']
    assert LOG.read_text().endswith("}\n")


def test_a_lost_log_is_begun_anew_by_who_wants_to_go_on_with_it(torch_engine):
    first = StepLogger(log_interval=1)
    run(torch_engine, first, data=ones(2))
    for path in Path().iterdir():
        path.unlink()
    second = StepLogger(log_interval=1)
    second.load_state_dict(first.state_dict())
    run(torch_engine, second, data=ones(2))
    assert column("step") == [1, 2]
    assert dt.logs.read_log(LOG).meta["backend"] == "torch"


# The constructor.


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"log_file": None}, ArgumentTypeError, ["log_file", "a path", "None"]),
        ({"log_file": 3}, ArgumentTypeError, ["log_file", "a path", "3"]),
        ({"log_file": ["a"]}, ArgumentTypeError, ["log_file", "a path", "['a']"]),
        ({"log_interval": 0}, ArgumentValueError, ["log_interval", "at least 1", "0"]),
        ({"log_interval": -5}, ArgumentValueError, ["log_interval", "at least 1", "-5"]),
        ({"log_interval": True}, ArgumentTypeError, ["log_interval", "an integer", "True"]),
        ({"log_interval": 2.0}, ArgumentTypeError, ["log_interval", "an integer", "2.0"]),
        ({"log_interval": "2"}, ArgumentTypeError, ["log_interval", "an integer", "'2'"]),
        ({"log_interval": None}, ArgumentTypeError, ["log_interval", "an integer", "None"]),
        ({"rank": "first"}, ArgumentValueError, ["rank", "'main' or 'all'", "'first'"]),
        ({"rank": 0}, ArgumentValueError, ["rank", "'main' or 'all'", "0"]),
        ({"asynchronous": 1}, ArgumentTypeError, ["asynchronous", "a bool", "1"]),
        ({"max_bytes": 0}, ArgumentValueError, ["max_bytes", "at least 1", "0"]),
        ({"max_bytes": 1e6}, ArgumentTypeError, ["max_bytes", "an integer", "1000000.0"]),
    ],
)
def test_arguments_are_checked_when_the_logger_is_made(arguments, kind, words):
    with pytest.raises(kind) as error:
        StepLogger(**arguments)
    message = str(error.value)
    assert message.startswith("StepLogger(")
    assert message.endswith(".")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_making_a_logger_touches_no_file():
    StepLogger("deep/log.jsonl")
    assert os.listdir() == []


def test_its_repr_shows_its_settings():
    expected = (
        "StepLogger(log_file='a.jsonl', log_interval=3, rank='main', asynchronous=True, "
        "max_bytes=None, sinks=())"
    )
    assert repr(StepLogger("a.jsonl", 3)) == expected


def test_the_documented_defaults():
    logger = StepLogger()
    assert (logger.log_file, logger.log_interval, logger.rank) == ("train_log.jsonl", 10, "main")
    assert (logger.asynchronous, logger.max_bytes) == (True, None)


# Ranks.


@pytest.mark.parametrize(
    ("who", "files"),
    [
        ("main", ["train_log.jsonl", "train_log.jsonl.meta.json"]),
        (
            "all",
            [
                "train_log.jsonl",
                "train_log.jsonl.meta.json",
                "train_log.rank1.jsonl",
                "train_log.rank1.jsonl.meta.json",
            ],
        ),
    ],
)
def test_one_rank_or_every_rank_writes(who, files):
    for rank in (0, 1):
        parameters = {
            "mode": "train",
            "cur_step_num": 0,
            "cur_epoch_num": 1,
            "epoch_num": 1,
            "batch_num": 2,
        }
        context = context_of(parameters, backend=Rank(rank))
        logger = StepLogger(log_interval=1, rank=who)
        logger.on_train_begin(context)
        for step in (1, 2):
            parameters.update(cur_step_num=step, net_outputs=float(rank))
            logger.on_train_step_end(context)
        logger.on_train_end(context)
        logger.on_teardown(context)
    assert sorted(os.listdir()) == files
    assert column("loss") == [0.0, 0.0]
    if who == "all":
        assert column("loss", "train_log.rank1.jsonl") == [1.0, 1.0]


# Two threads.


def test_two_threads_that_want_one_log_do_not_mix_their_rows(torch_engine):
    """Whoever comes second while the other is still writing is refused; no row is lost or torn."""
    together = threading.Barrier(2, timeout=60)
    outcomes = []

    def train():
        network = torch_engine.weight()
        model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
        meet = At("on_train_begin", lambda _: together.wait())
        try:
            model.train(1, ones(300), [meet, StepLogger(log_interval=1), At("on_train_end", done)])
        except LogInUseError:
            outcomes.append("refused")
            refused.set()

    refused = threading.Event()

    def done(run_context):
        refused.wait(60)
        outcomes.append("written")

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes == ["refused", "written"]
    assert column("step") == list(range(1, 301))


def test_runs_in_several_threads_lose_nothing():
    def train(name):
        dt.testing.FakeLoop([float(step) for step in range(300)]).run(StepLogger(f"{name}.jsonl", 1))

    names = ["a", "b", "c"]
    threads = [threading.Thread(target=train, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name in names:
        assert column("loss", f"{name}.jsonl") == [float(step) for step in range(300)]
