"""examples/reinforce.py: a run without a loader learns, under the usual callbacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES

import dualtrain as dt


def run_example(out: Path, *options: str) -> str:
    command = [sys.executable, EXAMPLES / "reinforce.py", "--out", out, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.torch
def test_policy_learns_to_walk_to_the_right(tmp_path: Path) -> None:
    printed = run_example(tmp_path)

    episodes = int(re.findall(r"^(\d+) episodes, solved$", printed, re.MULTILINE)[0])
    log = dt.logs.read_log(tmp_path / "reinforce.jsonl")
    steps, moves = log.column("moves")
    assert steps == list(range(1, episodes + 1))
    assert log.column("global_step") == (steps, steps)
    assert sum(moves[-20:]) <= 1.1 * 5 * 20 < sum(moves[:20]) / 2
    assert min(moves) == 5
    (chances,) = re.findall(r"^probability of a move to the right: ([\d. ]+)$", printed, re.MULTILINE)
    assert all(float(chance) > 0.7 for chance in chances.split())


@pytest.mark.torch
def test_number_of_episodes_is_limited(tmp_path: Path) -> None:
    printed = run_example(tmp_path, "--episodes", "3")

    assert printed.startswith("3 episodes, max_steps=3 is reached\n")
    assert dt.logs.read_log(tmp_path / "reinforce.jsonl").column("moves")[0] == [1, 2, 3]
