"""Two MindSpore processes that train together: one log, and a stop on one rank stops both.

All trainings run in one ``msrun``, since starting it takes most of the time. Rank r trains on the input
1 + 2r, so that the reduced gradient is 2: from 1 and with the rate 0.25 the weight loses 0.5 at each step.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from log_files import column
from paths import SUPPORT

pytestmark = pytest.mark.mindspore

SCRIPT = """
import json, os, sys
sys.path.insert(0, {support!r})
with open(f"{{os.getpid()}}.pid", "w"):
    pass  # whoever cleans up finds the process by it
import mindspore
from mindspore.communication import init
from engines import ENGINES, Seen, batches, ones
import dualtrain as dt
from dualtrain.backends import find_backend

mindspore.set_context(device_target="CPU")
engine = ENGINES["mindspore-graph"]()
backend = find_backend("mindspore")
before = (backend.rank(), backend.world_size(), backend.any_rank(True), backend.any_rank(False))
init()
mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
rank = backend.rank()
data = batches(*[(1.0 + 2.0 * rank, 0.0)] * 4)
told = {{
    "before": before,
    "votes": [backend.any_rank(flag) for flag in (False, rank == 0, rank == 1, True, False)],
}}


class Telling(dt.Callback):
    def on_train_end(self, run_context):
        params = run_context.original_args()
        told[self.name] = {{
            "rank": run_context.rank,
            "world_size": run_context.world_size,
            "is_main": run_context.is_main,
            "parallel_mode": str(params.parallel_mode),
            "device_number": params.device_number,
            "at": (run_context.epoch, run_context.step),
            "stopped": run_context.get_stop_requested(),
            "reason": run_context.stop_reason,
            "weight": engine.value(self.network),
        }}


class StopAt(dt.Callback):
    def __init__(self, event, step, reason=None):
        def hook(run_context):
            if run_context.rank == 1 and run_context.step == step:
                run_context.request_stop(reason)
        setattr(self, event, hook)


def train(name, stopping, valid=None):
    telling = Telling()
    telling.name, telling.network = name, engine.weight()
    model = dt.Model(telling.network, engine.loss_fn(), engine.sgd(telling.network, 0.25))
    loggers = [dt.callbacks.StepLogger(f"{{name}}.{{who}}.jsonl", 1, rank=who) for who in ("main", "all")]
    model.fit(3, data, valid, callbacks=[*loggers, telling, stopping])


def stop_on_rank_one(run_context):
    if rank == 1 and run_context.original_args().cur_step_num == 2:
        run_context.request_stop()


train("graph", StopAt("on_train_step_end", 3, "enough"))
train("evaluation", StopAt("on_eval_step_end", 1, "bad metric"), ones(2))
train("native", mindspore.train.LambdaCallback(on_train_step_end=stop_on_rank_one))
train("unstopped", dt.Callback())


def guarded():
    # Rank 1's second loss is NaN with a gradient of 3; the fourth's gradient is infinite on rank 0.
    nan, inf = float("nan"), float("inf")
    x, bad = 1.0 + 2.0 * rank, inf if rank == 0 else 3.0
    pairs = ((x, 0), (x, nan if rank else 0), (x, 0), (bad, 0), (x, 0))
    network, guard = engine.weight(), dt.callbacks.NanGuard("skip")
    seen = Seen(lambda c: (c.step_skipped, engine.value(network)))
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25))
    model.train(1, batches(*pairs), [guard, seen])
    return seen.values, guard.skipped


told["guard graph"] = guarded()
engine = ENGINES["mindspore-pynative"]()
told["guard pynative"] = guarded()
train("pynative", StopAt("on_train_step_end", 3))
train("step_begin", StopAt("on_train_step_begin", 2, "enough"))
with open(f"rank{{rank}}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run the script on two ranks; return the folder that it ran in."""
    folder = tmp_path_factory.mktemp("msrun")
    script = folder / "train.py"
    script.write_text(SCRIPT.format(support=str(SUPPORT)), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
        *("--worker_num=2", "--local_worker_num=2", f"--master_port={port}"),
        *("--log_dir=logs", "--join=True", "train.py"),
    ]
    # msrun starts whatever `python` is first on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "output.txt").open("w") as output:
        launcher = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = launcher.wait(timeout=240)
        finally:
            kill_what_is_left(launcher.pid, folder)
            launcher.wait()
    assert status == 0, (folder / "output.txt").read_text(errors="replace")
    return folder


def kill_what_is_left(launcher, folder):
    """Kill the launcher's process group, and the ranks, each of which msrun starts in one of its own."""
    ranks = [int(path.stem) for path in folder.glob("*.pid") if is_a_rank(int(path.stem), folder)]
    for pid in (launcher, *ranks):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, as it should have


def is_a_rank(pid, folder):
    """Tell whether a process is one of ours: its number may be another's by now."""
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(folder)
    except OSError:
        return False


@pytest.fixture
def told(trained):
    """What each of the two ranks has told."""
    return [json.loads((trained / f"rank{rank}.json").read_text()) for rank in (0, 1)]


RUNS = {
    # Name of the run -> epoch and step at its end.
    "graph": [1, 3],
    "evaluation": [1, 4],
    "native": [1, 2],
    "unstopped": [3, 12],
    "pynative": [1, 3],
    "step_begin": [1, 2],
}


def test_before_the_ranks_are_joined_there_is_one(told):
    assert [of_rank["before"] for of_rank in told] == [[0, 1, True, False]] * 2


def test_a_flag_is_true_if_it_is_on_any_rank(told):
    assert [of_rank["votes"] for of_rank in told] == [[False, True, True, True, False]] * 2


@pytest.mark.parametrize("name", RUNS)
def test_each_rank_knows_its_place(told, name):
    for rank in (0, 1):
        place = {
            "rank": rank,
            "world_size": 2,
            "is_main": rank == 0,
            "parallel_mode": "data_parallel",
            "device_number": 2,
        }
        assert {key: told[rank][name][key] for key in place} == place


@pytest.mark.parametrize("name", RUNS)
def test_a_stop_on_one_rank_stops_both_at_the_same_step(told, name):
    for of_rank in told:
        assert of_rank[name]["at"] == RUNS[name]
        assert of_rank[name]["stopped"] is (name != "unstopped")


@pytest.mark.parametrize("name", RUNS)
def test_the_ranks_train_the_same_weight(told, name):
    weight = 1.0 - 0.5 * RUNS[name][1]
    assert [of_rank[name]["weight"] for of_rank in told] == [weight, weight]


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_the_ranks_skip_the_same_updates(told, mode):
    rows = [[False, 0.5], [True, 0.5], [False, 0.0], [True, 0.0], [False, -0.5]]
    assert [of_rank[f"guard {mode}"] for of_rank in told] == [[rows, 2]] * 2


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("graph", ["another rank requested it", "enough"]),
        ("evaluation", ["another rank requested it", "bad metric"]),
        ("native", ["another rank requested it", "a MindSpore callback requested it"]),
        ("unstopped", [None, None]),
        ("pynative", ["another rank requested it", None]),
        ("step_begin", ["another rank requested it", "enough"]),
    ],
)
def test_each_rank_knows_the_reason_as_far_as_it_can(told, name, reasons):
    assert [of_rank[name]["reason"] for of_rank in told] == reasons


@pytest.mark.parametrize("name", RUNS)
def test_one_log_is_written_or_one_for_each_rank(trained, name):
    logs = {path.name for path in trained.glob(f"{name}.*.jsonl")}
    assert logs == {f"{name}.main.jsonl", f"{name}.all.jsonl", f"{name}.all.rank1.jsonl"}
    steps = list(range(1, RUNS[name][1] + 1))
    losses = [1.0 - 0.5 * (step - 1) for step in steps]  # of rank 0, whose input is 1
    for log in (f"{name}.main.jsonl", f"{name}.all.jsonl"):
        assert column("step", trained / log) == steps
        assert column("loss", trained / log) == losses
    assert column("step", trained / f"{name}.all.rank1.jsonl") == steps
    assert column("loss", trained / f"{name}.all.rank1.jsonl") == [3 * loss for loss in losses]
    for log, rank in ((f"{name}.main.jsonl", 0), (f"{name}.all.rank1.jsonl", 1)):
        meta = json.loads((trained / f"{log}.meta.json").read_text())
        assert (meta["rank"], meta["world_size"]) == (rank, 2)
