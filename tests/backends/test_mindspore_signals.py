"""Signals while MindSpore runs, whose C code swallows errors and answers SIGINT by a SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from engines import At, ones

import dualtrain as dt

pytestmark = pytest.mark.mindspore

SWALLOW = "try:\n    os.kill(os.getpid(), signum)\nexcept BaseException:\n    pass"


@pytest.fixture
def requested() -> list[str]:
    return []


@pytest.fixture
def watch(requested: list[str]) -> Iterator[Any]:
    """An InterruptWatch that is entered; the handlers from before come back."""
    from dualtrain.backends.mindspore.signals import InterruptWatch

    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with InterruptWatch(requested.append) as watch:
        yield watch
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def kill_inside(module: str, signum: int) -> None:
    """Send this process a signal from a module that swallows what its handler raises."""
    exec(SWALLOW, {"__name__": module, "os": os, "signum": signum})


def test_a_ctrl_c_that_mindspore_swallows_is_raised_at_the_next_step(
    watch: Any, requested: list[str]
) -> None:
    """Its C code takes any error of an attribute for a missing attribute."""
    kill_inside("mindspore.common.tensor", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        watch.retake()
    watch.retake()  # once
    kill_inside("a_callback", signal.SIGINT)
    watch.retake()  # other code swallows it on purpose
    assert requested == []
    assert not watch.terminated


def test_the_first_sigterm_requests_a_stop_and_the_second_is_raised(
    watch: Any, requested: list[str]
) -> None:
    kill_inside("mindspore.common.tensor", signal.SIGTERM)
    watch.retake()
    assert requested == ["SIGTERM"]
    assert watch.terminated
    kill_inside("mindspore.common.tensor", signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        watch.retake()
    assert ended.value.code == 143
    assert requested == ["SIGTERM"]
    watch.retake()


def test_a_run_inside_of_a_run_leaves_the_watch_to_the_outer_one(mindspore_engine: Any) -> None:
    """A SIGTERM in the inner evaluation stops the outer training, which ends with status 143."""
    network = mindspore_engine.weight()
    model = dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network, 0.1))
    handlers: list[Any] = []

    def evaluate(run_context: Any) -> None:
        kill = At("on_eval_step_end", lambda inner: os.kill(os.getpid(), signal.SIGTERM), step=1)
        handlers.append(signal.getsignal(signal.SIGTERM))
        model.eval(ones(1), kill)
        handlers.append(signal.getsignal(signal.SIGTERM))
        assert run_context.stop_reason == "SIGTERM"

    with pytest.raises(SystemExit) as ended:
        model.train(1, ones(5), At("on_train_step_end", evaluate, step=2))
    assert ended.value.code == 143
    assert handlers[0] == handlers[1]
    assert mindspore_engine.value(network) == pytest.approx(0.8)


def interrupt_after(cell: Any, batch: Any, is_done: Any) -> None:
    """Send this process a SIGINT that MindSpore answers, since one of its Cells has run last."""
    cell(*batch)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**7):
        if is_done():
            break


def test_a_ctrl_c_in_a_run_inside_of_a_run_is_one(mindspore_engine: Any) -> None:
    network = mindspore_engine.weight()
    model = dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network, 0.1))

    def interrupt(run_context: Any) -> None:
        params = run_context.original_args()
        interrupt_after(params.eval_network, params.eval_dataset_element, lambda: stopped)

    stopped: list[str] = []
    evaluate = At("on_train_step_end", lambda c: model.eval(ones(1), At("on_eval_step_end", interrupt)))
    evaluate.on_train_end = lambda c: stopped.append(c.stop_reason)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        model.train(1, ones(2), evaluate)
    assert stopped == []


@pytest.mark.parametrize("answered_by", ["python", "mindspore"])
def test_a_users_own_sigint_handler_is_called(mindspore_engine: Any, answered_by: str) -> None:
    calls: list[int] = []

    def interrupt(run_context: Any) -> None:
        params = run_context.original_args()
        if answered_by == "python":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            interrupt_after(params.train_network, params.train_dataset_element, lambda: calls)

    before = signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    try:
        network = mindspore_engine.weight()
        model = dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network, 0.1))
        model.train(1, ones(3), At("on_train_step_end", interrupt, step=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]
    assert mindspore_engine.value(network) == pytest.approx(0.7 if answered_by == "python" else 0.6)
