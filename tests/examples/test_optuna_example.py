"""examples/optuna_digits: a study on both engines, whose workers may be killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from matplotlib.image import imread
from optuna.trial import TrialState
from paths import EXAMPLES

from dualtrain.logs import read_log

EXAMPLE = EXAMPLES / "optuna_digits"

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def search(*arguments: str) -> str:
    command = [sys.executable, EXAMPLE / "run.py", "--epochs", "1", "--heartbeat", "1", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout


def fingerprint(study: optuna.Study) -> list[Any]:
    return [(trial.number, trial.state, trial.params, trial.values) for trial in study.trials]


@pytest.mark.torch
@pytest.mark.mindspore
def test_no_trial_is_lost_or_run_twice_where_a_worker_is_killed() -> None:
    """Two workers on SQLite, one of which is killed after the first evaluation of trial 0."""
    printed = search("--trials", "2", "--workers", "2", "--kill", "0")
    assert printed.count("was killed by signal 9") == 1
    study = optuna.load_study(study_name="digits", storage="sqlite:///out/study.db")
    killed, other, again = study.trials
    assert [trial.state for trial in study.trials] == [
        TrialState.FAIL,
        TrialState.COMPLETE,
        TrialState.COMPLETE,
    ]
    assert again.params == killed.params
    assert again.system_attrs["retry_history"] == [0]
    # Each backend had its turn, and a whole log.
    assert [trial.params["backend"] for trial in study.trials] == ["torch", "mindspore", "torch"]
    for trial in (other, again):
        assert trial.user_attrs["backend"] == trial.params["backend"]
        assert trial.intermediate_values == {1: trial.value}
        assert trial.user_attrs["log_files"] == [str(Path(f"out/trial{trial.number}.jsonl").absolute())]
        steps, _ = read_log(f"out/trial{trial.number}.jsonl").column("loss")
        assert steps == list(range(1, 17))
    # What a killed worker leaves of its log is a beginning: the rest had not been flushed.
    left = [record.step for record in read_log("out/trial0.jsonl").records]
    assert left == list(range(1, len(left) + 1))
    assert len(left) < 16

    # The study is complete: to go on with it runs nothing, and draws the same picture.
    before, picture = fingerprint(study), Path("out/study.png").read_bytes()
    assert "2 COMPLETE, 1 FAIL" in printed
    assert "2 COMPLETE, 1 FAIL" in search("--trials", "2")
    assert fingerprint(study) == before
    assert Path("out/study.png").read_bytes() == picture
    height, width, _ = imread("out/study.png").shape
    assert (width, height) > (1000, 400)


DYING_WORKER = """
import os, signal, sys
sys.path.insert(0, {example!r})
import optuna
from storage import open_storage, sign

def objective(trial):
    if {signed}:
        sign(trial)
    trial.suggest_float("lr", 0, 1)
    os.kill(os.getpid(), signal.SIGKILL)

optuna.load_study(study_name="digits", storage=open_storage("study.journal", 1)).optimize(objective, 1)
"""


@pytest.mark.parametrize("signed", [True, False])
def test_a_trial_in_a_journal_is_run_once_more_and_not_again(
    signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    import storage

    study = optuna.create_study(study_name="digits", storage=storage.open_storage("study.journal", 1))
    living = study.ask()
    storage.sign(living)
    script = DYING_WORKER.format(example=str(EXAMPLE), signed=signed)
    patience = 1 if signed else 0  # what has not been signed is waited for: here not at all
    for expected in (
        [TrialState.RUNNING, TrialState.FAIL, TrialState.WAITING],
        [TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL],
    ):
        assert subprocess.run([sys.executable, "-c", script]).returncode == -9
        for _ in range(2):  # the second time there is nothing to do
            storage.recover(study, "study.journal", patience)
            assert [trial.state for trial in study.trials] == expected
    assert study.trials[1].params == study.trials[2].params != {}
    assert [trial.number for trial in storage.ended(study.trials)] == [2]
