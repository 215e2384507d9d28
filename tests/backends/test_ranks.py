"""Two processes that train together: one log, and a stop on one rank stops both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paths import SUPPORT
from processes import run_two_ranks

SCRIPT = """
import json, sys
sys.path.insert(0, {support!r})
import torch
import torch.distributed as dist
from engines import ENGINES, Seen, batches, ones
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

# Rank 1's second loss is NaN with a gradient of 1; the fourth's gradient is infinite on rank 0.
nan, inf, on = float("nan"), float("inf"), dist.get_rank()
data = batches((1, 0), (1, nan if on == 1 else 0), (1, 0), (inf if on == 0 else 1, 0), (1, 0))
network = torch.nn.parallel.DistributedDataParallel(engine.weight())
model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25))
guard = dt.callbacks.NanGuard("skip")
weights = Seen(lambda c: (c.step_skipped, engine.value(network.module)))
model.train(1, data, [guard, weights])
told = [weights.values, guard.skipped]
try:
    model.train(1, data, dt.callbacks.NanGuard("raise"))
except dt.errors.NonFiniteError as error:
    told.append(str(error))
with open(f"guard{{on}}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rank", "logs"), [("main", ["log.jsonl"]), ("all", ["log.jsonl", "log.rank1.jsonl"])]
)
def test_two_gloo_processes(rank: str, logs: list[str], tmp_path: Path) -> None:
    folder = run_two_ranks(SCRIPT.format(support=str(SUPPORT), rank=rank), tmp_path)
    assert (folder / "rank0.txt").read_text() == "(0, 2, True, 3)"
    assert (folder / "rank1.txt").read_text() == "(1, 2, False, 3)"
    skips = [json.loads((folder / f"guard{number}.json").read_text()) for number in (0, 1)]
    rows = [[False, 0.75], [True, 0.75], [False, 0.5], [True, 0.5], [False, 0.25]]
    assert [told[:2] for told in skips] == [[rows, 2]] * 2
    assert skips[0][2] == (
        "At step 2, epoch 1, batch 2, the loss of another rank is not finite: the forward pass and the "
        "gradients of this batch alone are finite."
    )
    assert skips[1][2].startswith("At step 2, epoch 1, batch 2, the loss is nan: ")
    assert sorted(p.name for p in folder.glob("*.jsonl")) == logs
    for log in logs:
        rows = [json.loads(line) for line in (folder / log).read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
    assert json.loads((folder / "log.jsonl.meta.json").read_text())["world_size"] == 2


ABORTING = """
import atexit, os, pathlib, sys

def abort():
    print("terminate called without an active exception", file=sys.stderr, flush=True)
    os.abort()

if os.environ["RANK"] == "1" and pathlib.Path.cwd().name == "first":
    {action}
"""


@pytest.mark.torch
def test_a_run_that_pytorch_aborts_at_its_exit_is_repeated_once(tmp_path: Path) -> None:
    folder = run_two_ranks(ABORTING.format(action="atexit.register(abort)"), tmp_path)
    assert folder == tmp_path / "second"
    assert {path.name for path in folder.glob("finished*")} == {"finished0", "finished1"}


@pytest.mark.torch
def test_an_abort_before_the_end_of_a_script_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Signal 6"):
        run_two_ranks(ABORTING.format(action="abort()"), tmp_path)
    assert not (tmp_path / "second").exists()
