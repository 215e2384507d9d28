"""The examples run as their users run them: in a process of their own, from another directory."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import EXAMPLES

from dualtrain.logs import Log, read_log

DIGITS_VIT = EXAMPLES / "digits_vit" / "run.py"
EPOCHS, TRAIN_BATCHES, TEST_BATCHES = 12, 22, 3
COLOURS = {"torch": (0xF2, 0xA2, 0x85), "mindspore": (0x12, 0x3F, 0x6D)}


@dataclass
class Result:
    """What a run of the example has left behind: its directory, and what it has printed."""

    directory: Path
    printed: str

    def log(self, engine: str) -> Log:
        return read_log(self.directory / "out" / f"{engine}.jsonl")

    def row(self, name: str) -> list[str]:
        """The cells of a row of the table."""
        return re.search(rf"^ *{name} +(.*)$", self.printed, re.MULTILINE)[1].split()


def run_digits_vit(directory: Path, *arguments: str) -> Result:
    result = subprocess.run(
        [sys.executable, DIGITS_VIT, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return Result(directory, result.stdout)


def assert_picture(path: Path, *engines: str) -> None:
    """Check that a picture can be read and has a curve in the colour of each engine."""
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert width >= 1000
    assert height >= 400
    for engine, colour in COLOURS.items():
        painted = (pixels == colour).all(axis=2).sum()
        assert painted > 300 if engine in engines else painted == 0


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The whole example, once for all tests: both engines, as many epochs as it has by default."""
    return run_digits_vit(tmp_path_factory.mktemp("digits_vit"))


@pytest.mark.torch
@pytest.mark.mindspore
class TestDigitsVit:
    def test_learns_the_digits_on_both_engines(self, full_run: Result) -> None:
        for engine in ("torch", "mindspore"):
            assert full_run.log(engine).column("acc")[1][-1] >= 0.95

    def test_prints_both_engines_side_by_side(self, full_run: Result) -> None:
        assert re.search(r"^ +torch +mindspore$", full_run.printed, re.MULTILINE)
        logs = [full_run.log("torch"), full_run.log("mindspore")]
        assert full_run.row("test accuracy") == [f"{log.column('acc')[1][-1]:.2%}" for log in logs]
        assert full_run.row("final loss") == [f"{log.column('loss')[1][-1]:.6f}" for log in logs]
        assert all(float(cell) > 0 for cell in full_run.row("steps/s"))

    def test_counts_the_same_events_on_both_engines(self, full_run: Result) -> None:
        expected = {
            "on_train_begin": 1,
            "on_train_epoch_begin": EPOCHS,
            "on_train_step_begin": EPOCHS * TRAIN_BATCHES,
            "on_train_step_end": EPOCHS * TRAIN_BATCHES,
            "on_eval_begin": EPOCHS,
            "on_eval_epoch_begin": EPOCHS,
            "on_eval_step_begin": EPOCHS * TEST_BATCHES,
            "on_eval_step_end": EPOCHS * TEST_BATCHES,
            "on_eval_epoch_end": EPOCHS,
            "on_eval_end": EPOCHS,
            "on_train_epoch_end": EPOCHS,
            "on_train_end": 1,
        }
        for event, count in expected.items():
            assert full_run.row(event) == [str(count)] * 2
        assert full_run.row("events seen") == [str(sum(expected.values()))] * 2

    @pytest.mark.parametrize("engine", ["torch", "mindspore"])
    def test_logs_every_step_and_every_accuracy(self, full_run: Result, engine: str) -> None:
        log = full_run.log(engine)
        assert log.torn == []
        assert log.meta["backend"] == engine
        steps = list(range(1, EPOCHS * TRAIN_BATCHES + 1))
        assert [record.step for record in log.records if record.mode == "train"] == steps
        evaluations = [record.step for record in log.records if record.mode == "eval"]
        assert evaluations == steps[TRAIN_BATCHES - 1 :: TRAIN_BATCHES]
        assert len(log.column("loss")[1]) == EPOCHS * TRAIN_BATCHES
        assert len(log.column("acc")[1]) == EPOCHS

    def test_both_engines_compute_the_same_losses(self, full_run: Result) -> None:
        torch, mindspore = (full_run.log(engine).column("loss")[1] for engine in ("torch", "mindspore"))
        assert torch[:10] == pytest.approx(mindspore[:10], rel=0, abs=1e-4)

    def test_draws_a_picture(self, full_run: Result) -> None:
        assert_picture(full_run.directory / "out" / "digits_vit.png", "torch", "mindspore")


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("mindspore", marks=pytest.mark.mindspore),
    ],
)
def test_digits_vit_runs_on_one_engine_alone(engine: str, tmp_path: Path) -> None:
    result = run_digits_vit(tmp_path, "--engine", engine, "--epochs", "1")

    assert re.search(rf"^ +{engine}$", result.printed, re.MULTILINE)
    assert len(result.row("test accuracy")) == 1
    assert len(result.log(engine).column("loss")[1]) == TRAIN_BATCHES
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "digits_vit.png",
        f"{engine}.jsonl",
        f"{engine}.jsonl.meta.json",
    ]
    assert_picture(tmp_path / "out" / "digits_vit.png", engine)
