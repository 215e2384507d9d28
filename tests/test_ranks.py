"""Two processes that train together: one log, and a stop on one rank stops both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from engines import ENGINES, ones
import dualtrain as dt

dist.init_process_group("gloo")
engine = ENGINES["torch"]()
network = torch.nn.parallel.DistributedDataParallel(engine.weight())

class StopOnRankOne(dt.Callback):
    def on_train_step_end(self, run_context):
        if run_context.rank == 1 and run_context.step == 3:
            run_context.request_stop()
    def on_train_end(self, run_context):
        told = (run_context.rank, run_context.world_size, run_context.is_main, run_context.step)
        with open(f"rank{{run_context.rank}}.txt", "w") as file:
            file.write(repr(told))

logger = dt.callbacks.StepLogger("log.jsonl", 1, rank={rank!r})
model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
model.train(2, ones(5), [logger, StopOnRankOne()])
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rank", "logs"), [("main", ["log.jsonl"]), ("all", ["log.jsonl", "log.rank1.jsonl"])]
)
def test_two_gloo_processes(rank: str, logs: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), rank=rank), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "rank0.txt").read_text() == "(0, 2, True, 3)"
    assert (tmp_path / "rank1.txt").read_text() == "(1, 2, False, 3)"
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == logs
    for log in logs:
        rows = [json.loads(line) for line in (tmp_path / log).read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
    assert json.loads((tmp_path / "log.jsonl.meta.json").read_text())["world_size"] == 2
