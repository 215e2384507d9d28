"""Numbers that are read a step later than they are made, where a device copies them meanwhile.

Only a GPU does, so that most of these tests have a loop whose backend does as one; the numbers have to be
those that are read at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import At, ones
from log_files import rows_of

import dualtrain as dt
from dualtrain.testing import FakeLoop
from dualtrain.testing.fake_backend import FakeBackend

LOSSES = [np.array(1 / 3), np.array(0.7), np.array(float("nan")), np.array([0.1, 0.2]), np.array(5e-324)]


class Device:
    """Copies numbers, and notes in which step each copy was begun and in which it was read."""

    def __init__(self) -> None:
        self.present = True
        self.step = 0
        self.reads: list[tuple[int, int]] = []

    def copy(self, value: Any) -> Callable[[], Any]:
        begun = self.step

        def read() -> Any:
            self.reads.append((begun, self.step))
            return value

        return read

    def counting(self) -> At:
        """Return the callback that keeps ``step`` up to date."""

        def count(run_context: Any) -> None:
            self.step = run_context.step

        return At("on_train_step_begin", count)


class LateLoop(FakeLoop):
    """A FakeLoop whose gradients' norms are on a device."""

    device: Device

    def grad_norms_later(self) -> Callable[[], Any] | None:
        norm = self.grad_norm()
        return None if norm is None else self.device.copy((norm, norm))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(LateLoop, "device", device, raising=False)
    monkeypatch.setattr(
        FakeBackend,
        "to_float_later",
        lambda self, value: device.copy(self.to_float(value)) if device.present else None,
        raising=False,
    )
    return device


def rows(path: str) -> list[dict[str, Any]]:
    """Return the rows without what differs from run to run."""
    return [
        {k: v for k, v in row.items() if k not in ("timestamp", "elapsed_sec")} for row in rows_of(path)
    ]


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_loggers_rows_are_those_that_are_read_at_once(interval: int, device: Device) -> None:
    def run(path: str) -> None:
        callbacks = [
            device.counting(),
            At("on_train_step_end", lambda c: c.log("twice", 2 * c.step)),
            dt.callbacks.StepLogger(path, interval),
        ]
        FakeLoop(LOSSES, epochs=2).run(callbacks)

    run("late.jsonl")
    logged = sorted({*range(interval, 11, interval), 10})
    # Each is read when the next step ends, or the run.
    assert device.reads == [(step, min(step + 1, 10)) for step in logged]
    device.present = False
    run("at_once.jsonl")
    assert len(device.reads) == len(logged)
    assert rows("late.jsonl") == rows("at_once.jsonl")
    assert [row["step"] for row in rows("late.jsonl")] == logged


def test_a_logger_that_is_not_asynchronous_has_its_row_when_the_step_ends(device: Device) -> None:
    lengths = []
    FakeLoop(LOSSES).run(
        [
            dt.callbacks.StepLogger("log.jsonl", 1, asynchronous=False),
            At("on_train_step_end", lambda c: lengths.append(len(rows("log.jsonl")))),
        ]
    )
    assert device.reads == []
    assert lengths == [1, 2, 3, 4, 4]  # the last one waits for what an evaluation logs


def test_a_loss_that_has_been_read_is_not_copied(device: Device) -> None:
    read = At("on_train_step_end", lambda c: c.step % 2 or c.loss)
    FakeLoop(LOSSES).run([device.counting(), read, dt.callbacks.StepLogger("log.jsonl", 1)])
    assert device.reads == [(1, 2), (3, 4), (5, 5)]


def test_an_error_costs_no_row(device: Device) -> None:
    def fail(run_context: Any) -> None:
        if run_context.step == 4:
            raise OSError("the end")

    failing = At("on_train_step_end", fail)
    monitor = dt.callbacks.TransformerMonitor(log_file="monitor.jsonl")
    with pytest.raises(OSError, match="the end"), pytest.warns(UserWarning, match="no attention"):
        LateLoop(LOSSES).run([dt.callbacks.StepLogger("log.jsonl", 1), monitor, failing])
    assert [row["step"] for row in rows("log.jsonl")] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows("log.jsonl")] == [1 / 3, 0.7, None, pytest.approx(0.15)]
    assert [row["grad_norm"] for row in rows("monitor.jsonl")] == [1.0] * 4


@pytest.mark.parametrize("present", [True, False])
def test_a_stop_behind_the_logger_leaves_the_same_rows_wherever_the_loss_is(
    present: bool, device: Device
) -> None:
    device.present = present

    def stop(run_context: Any) -> None:
        if run_context.step == 2:
            run_context.log("reason", 7)
            run_context.request_stop()

    FakeLoop(LOSSES).run([dt.callbacks.StepLogger("log.jsonl", 1), At("on_train_step_end", stop)])
    assert [(row["step"], row["loss"], row.get("reason")) for row in rows("log.jsonl")] == [
        (1, 1 / 3, None),
        (2, 0.7, None),
        (2, 0.7, 7),
    ]


def test_a_monitors_rows_are_those_that_are_read_at_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    def run(loop: type[FakeLoop], path: str) -> None:
        monitor = dt.callbacks.TransformerMonitor(log_file=path, grad_interval=2, explosion_threshold=2.0)
        with pytest.warns(UserWarning, match="no attention"):
            loop(LOSSES, epochs=2, gradients={"weight": [3.0]}).run([device.counting(), monitor])

    run(LateLoop, "late.jsonl")
    assert device.reads == [(1, 2), (3, 4), (5, 5), (7, 8), (9, 10)]  # 5 is the end of an epoch
    assert "step 1: the gradient norm, 3, is exploding" in caplog.text
    run(FakeLoop, "at_once.jsonl")
    assert rows("late.jsonl") == rows("at_once.jsonl")
    assert [row["grad_norm"] for row in rows("late.jsonl")] == [3.0] * 5


def test_norms_are_watched_on_a_rank_that_does_not_write(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "rank", lambda self: 1, raising=False)
    monitor = dt.callbacks.TransformerMonitor(
        log_file="log.jsonl", grad_interval=3, explosion_threshold=2.0
    )
    with pytest.warns(UserWarning, match="no attention"):
        LateLoop(LOSSES, gradients={"weight": [3.0]}).run([device.counting(), monitor])
    assert device.reads == [(1, 2), (4, 5)]
    assert caplog.text.count("step 1: the gradient norm, 3, is exploding") == 1
    assert not Path("log.jsonl").exists()


def test_norms_that_a_logger_is_given_are_read_at_once(device: Device) -> None:
    monitor = dt.callbacks.TransformerMonitor()
    with pytest.warns(UserWarning, match="no attention"):
        LateLoop([1.0, 2.0]).run([monitor, dt.callbacks.StepLogger("log.jsonl", 1)])
    assert device.reads == []
    assert [row["grad_norm"] for row in rows("log.jsonl")] == [1.0, 1.0]


def test_what_is_on_the_host_is_not_copied(engine: Any) -> None:
    found: list[Any] = []

    class Look(dt.Callback):
        needs = frozenset({dt.protocol.Capability.GRAD_NORM})

        def on_train_step_end(self, run_context: Any) -> None:
            found.append((run_context.loss_later(), run_context.grad_norms_later(), run_context.grad_norm))

    network = engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, ones(2), Look())
    assert found == [(None, None, pytest.approx(1.0))] * 2


@pytest.mark.torch
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pytorchs_rows_are_those_of_a_logger_that_waits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a copy that is read later stands in for the GPU's; all around it is as it is there."""
    import torch

    from dualtrain.backends.torch import backend, gradients

    reads: list[float] = []
    if device == "cpu":

        def to_float_later(value: Any) -> Callable[[], float]:
            copy = value.clone()
            return lambda: reads.append(float(copy)) or reads[-1]

        monkeypatch.setattr(backend, "to_float_later", to_float_later)
        monkeypatch.setattr(gradients, "to_float_later", to_float_later)
    elif not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch.manual_seed(0)
    network = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)

    def log_norms(run_context: Any) -> None:
        run_context.log("grad_norm", run_context.grad_norm)
        run_context.log("grad_norm_clipped", run_context.grad_norm_clipped)

    callbacks = [
        dt.callbacks.StepLogger("late.jsonl", 1),
        dt.callbacks.TransformerMonitor(log_file="monitor.jsonl"),
        At("on_train_step_end", log_norms),
        dt.callbacks.StepLogger("at_once.jsonl", 1, asynchronous=False),
    ]
    batches = [(torch.randn(8, 64, device=device), torch.randn(8, 64, device=device)) for _ in range(20)]
    with pytest.warns(UserWarning, match="no attention"):
        dt.Model(network, torch.nn.MSELoss(), optimizer, clip_norm=0.1).train(2, batches, callbacks)
    at_once = rows("at_once.jsonl")
    assert [row["loss"] for row in rows("late.jsonl")] == [row["loss"] for row in at_once]
    for name in ("grad_norm", "grad_norm_clipped"):
        assert [row[name] for row in rows("monitor.jsonl")] == [row[name] for row in at_once]
    assert all(row["grad_norm"] > 0.1 >= row["grad_norm_clipped"] > 0.09 for row in at_once)
    assert len(at_once) == 40
    assert device == "cuda" or len(reads) == 80
