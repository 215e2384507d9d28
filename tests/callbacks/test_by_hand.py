"""Callbacks whose events a loop calls by itself, inside ``with callback:``, as MindSpore documents it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from log_files import column, open_descriptors, rows_of

import dualtrain as dt
from dualtrain.callbacks import ParameterMonitor, StepLogger, TransformerMonitor
from dualtrain.testing import FakeLoop


def drive(callback: Any, context: dt.RunContext, steps: int = 3) -> None:
    """Call the events of a training, but for its end: MindSpore's documentation calls no teardown."""
    params = context.original_args()
    params.update(mode="train", cur_step_num=0, cur_epoch_num=1, epoch_num=1)
    callback.on_train_begin(context)
    for step in range(1, steps + 1):
        params["cur_step_num"] = step
        callback.on_train_step_begin(context)
        params["net_outputs"] = 1 / step
        callback.on_train_step_end(context)


@pytest.mark.parametrize("batches", [None, 3])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_step_logger_writes_every_row(asynchronous: bool, batches: int | None) -> None:
    with StepLogger("steps.jsonl", 1, asynchronous=asynchronous) as logger:
        drive(logger, dt.RunContext({"batch_num": batches}))

    assert column("step", "steps.jsonl") == [1, 2, 3]
    assert column("loss", "steps.jsonl") == [1.0, 0.5, 1 / 3]


def test_log_is_free_afterwards() -> None:
    logger = StepLogger("steps.jsonl", 1)
    for _ in range(2):
        with logger:
            drive(logger, dt.RunContext({}))

    assert column("step", "steps.jsonl") == column("step", "steps.1.jsonl") == [1, 2, 3]
    assert open_descriptors("steps.jsonl") == []


def test_teardown_before_the_exit_and_a_second_one_are_harmless() -> None:
    context = dt.RunContext({})
    with StepLogger("steps.jsonl", 1) as logger:
        drive(logger, context)
        logger.on_teardown(context)
        logger.on_teardown(context)
    logger.__exit__(None, None, None)

    assert column("step", "steps.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("make", [StepLogger, TransformerMonitor, ParameterMonitor])
def test_exit_without_a_run_is_harmless(make: Any) -> None:
    with make(log_file="log.jsonl"):
        pass

    assert not Path("log.jsonl").exists()


def test_row_is_written_although_the_loop_fails() -> None:
    def train() -> None:
        with StepLogger("steps.jsonl", 1) as logger:
            drive(logger, dt.RunContext({}))
            raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        train()

    assert column("step", "steps.jsonl") == [1, 2, 3]


class Leaving:
    """Forward all events of a run but its end and teardown, and leave the callback by ``with`` alone."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.needs = callback.needs
        self.on_train_begin = callback.on_train_begin
        self.on_train_step_begin = callback.on_train_step_begin
        self.on_train_step_end = callback.on_train_step_end
        self.__enter__ = callback.__enter__

    def __exit__(self, *error: Any) -> None:
        self._callback.__exit__(*error)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: TransformerMonitor(log_file=path),
        lambda path: ParameterMonitor(interval=1, log_file=path),
        lambda path: StepLogger(path, 1),
    ],
    ids=["TransformerMonitor", "ParameterMonitor", "StepLogger"],
)
@pytest.mark.filterwarnings("ignore:TransformerMonitor found no attention")
def test_monitors_write_every_row(make: Any) -> None:
    FakeLoop([3.0, 2.0, 1.0]).run(Leaving(make("log.jsonl")))

    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2, 3]
    assert open_descriptors("log.jsonl") == []
