"""examples/gan.py: two optimizers in a hand-written loop, under the usual callbacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES

import dualtrain as dt

EXAMPLE = EXAMPLES / "gan.py"
EPOCHS = 4
STEPS = EPOCHS * 30  # 1500 digits in batches of 50


@pytest.mark.torch
def test_generator_is_updated_half_as_often(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, EXAMPLE, "--epochs", str(EPOCHS), "--out", out],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr

    updates = re.findall(r"^updates of the (\w+): (\d+)$", result.stdout, re.MULTILINE)
    assert updates == [("discriminator", str(STEPS)), ("generator", str(STEPS // 2))]

    log = dt.logs.read_log(out / "gan.jsonl")
    steps, updates_so_far = log.column("global_step")
    assert steps == list(range(10, STEPS + 1, 10))
    assert updates_so_far == [step + step // 2 for step in steps]
    assert log.column("d_loss") == log.column("loss")
    assert log.column("g_loss")[0] == steps
    assert log.column("lr")[1] == [(0.003, 0.003)] * len(steps)
    assert log.meta["backend"] == "torch"
    assert (out / "gan.png").read_bytes().startswith(b"\x89PNG")

    distances = dict(
        re.findall(r"^(\w+) +distance to the nearest digit ([\d.]+)", result.stdout, re.MULTILINE)
    )
    assert list(distances) == ["untrained", "trained", "real"]
    assert float(distances["real"]) < float(distances["trained"]) < 0.8 * float(distances["untrained"])
