"""Real signals to a training process: it is torn down, its log is whole, and it ends as it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINES
from paths import SUPPORT

import dualtrain as dt

CHILD = """
import sys
sys.path.insert(0, {support!r})
from engines import ENGINES, ones
import dualtrain as dt

engine = ENGINES[{engine!r}]()
network = engine.weight()
model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 1e-6))

class Watch(dt.Callback):
    def on_train_step_end(self, run_context):
        if run_context.step == 250:
            print("ready", flush=True)
    def on_exception(self, run_context, error):
        print("on_exception", type(error).__name__, flush=True)
    def on_teardown(self, run_context):
        print("on_teardown", flush=True)
        print(run_context.step, file=open("last_step", "w"), flush=True)
    def on_train_end(self, run_context):
        print("on_train_end", flush=True)
    def __exit__(self, kind, *rest):
        print("exit", kind.__name__, flush=True)

try:
    model.train(1, ones(1) * 3_000_000, [dt.callbacks.StepLogger("log.jsonl", 1), Watch()])
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
"""


def interrupted(engine_name: str, signum: int, folder: Path) -> tuple[int, list[str]]:
    """Start a training, send it a signal once it runs, and return its exit status and what it printed."""
    script = folder / "child.py"
    script.write_text(CHILD.format(support=str(SUPPORT), engine=engine_name), encoding="utf-8")
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=folder, text=True, env={**os.environ}
    )
    assert child.stdout is not None
    with child:
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signum)
            lines = child.stdout.read().splitlines()
        except BaseException:  # pytest's timeout among them
            child.kill()
            raise
    return child.returncode, lines


def assert_log_is_whole(folder: Path) -> None:
    """Check that every row is there up to the step that the signal came in, or the one before it."""
    text = (folder / "log.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert len(steps) >= 249
    assert steps == list(range(1, len(steps) + 1))
    assert int((folder / "last_step").read_text()) - len(steps) in (0, 1)


ENGINE_NAMES = [pytest.param(name, marks=getattr(pytest.mark, name.split("-")[0])) for name in ENGINES]


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_ctrl_c_raises_keyboard_interrupt_after_teardown(name: str, tmp_path: Path) -> None:
    status, lines = interrupted(name, signal.SIGINT, tmp_path)
    assert lines == [
        "on_exception KeyboardInterrupt",
        "on_teardown",
        "exit KeyboardInterrupt",
        "KeyboardInterrupt",
    ]
    assert status == 0
    assert_log_is_whole(tmp_path)


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_sigterm_ends_the_run_in_the_ordinary_way_with_status_143(name: str, tmp_path: Path) -> None:
    status, lines = interrupted(name, signal.SIGTERM, tmp_path)
    assert lines == ["on_train_end", "on_teardown", "exit SystemExit"]
    assert status == 143
    assert_log_is_whole(tmp_path)


def test_handlers_are_those_from_before_after_a_run(engine: Any) -> None:
    from engines import ones

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    inside = []

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            inside.append(signal.getsignal(signal.SIGTERM))

    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.train(1, ones(1), Look())
    assert inside[0] is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_users_own_sigterm_handler_is_left_alone(engine: Any) -> None:
    from engines import ones

    def own(signum: int, frame: Any) -> None:
        """The user's."""

    inside = []

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            inside.append(signal.getsignal(signal.SIGTERM))

    previous = signal.signal(signal.SIGTERM, own)
    try:
        network = engine.weight()
        dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, ones(1), Look())
        assert inside == [own]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, previous)


# MindSpore answers SIGINT itself from each of its steps on. Here a step is the last call before the signal,
# so that the signal is always MindSpore's answer.
HELD = """
import sys
sys.path.insert(0, {support!r})
from engines import ENGINES, ones
import dualtrain as dt

engine = ENGINES[{engine!r}]()
network = engine.weight()
model = dt.Model(network, engine.loss_fn(), engine.sgd(network))

class Hold(dt.Callback):
    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        params.train_network(*params.train_dataset_element)
        print("ready", flush=True)
        for _ in range(10**9):
            if run_context.get_stop_requested():
                print("stop", run_context.stop_reason, flush=True)
                return
    def on_exception(self, run_context, error):
        print("on_exception", type(error).__name__, flush=True)

model.train(1, ones(1), Hold())
"""


@pytest.mark.mindspore
@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("mindspore")])
@pytest.mark.parametrize(
    ("signum", "effect"),
    [(signal.SIGINT, "on_exception KeyboardInterrupt"), (signal.SIGTERM, "stop SIGTERM")],
)
def test_signals_are_distinguished_while_mindspore_answers_sigint(
    name: str, signum: int, effect: str, tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    script.write_text(HELD.format(support=str(SUPPORT), engine=name), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signum)
        assert child.stdout.read() == f"{effect}\n"
