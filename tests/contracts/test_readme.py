"""Every Python block of the README runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from dualtrain.records import Record

README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PROGRAMS = [block for block in BLOCKS if "StopWhenGood()," in block]
CALLBACKS = [block for block in BLOCKS if block.startswith("class ")]


def _parameter(block: str) -> object:
    imported = re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)
    marks = [getattr(pytest.mark, name) for name in ("torch", "mindspore") if name in imported]
    return pytest.param(block, marks=marks, id="-".join(imported))


def _run(program: str, directory: Path) -> None:
    file = directory / "program.py"  # MindSpore reads a Cell's source from its file
    file.write_text(program, encoding="utf-8")
    result = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("program", [_parameter(block) for block in PROGRAMS])
def test_program_runs_as_printed(program: str, tmp_path: Path) -> None:
    _run(program, tmp_path)

    assert (tmp_path / "train_log.jsonl").stat().st_size > 0


@pytest.mark.parametrize("program", [_parameter(block) for block in PROGRAMS])
def test_callbacks_run_as_printed(program: str, tmp_path: Path) -> None:
    names = re.findall(r"^class (\w+):", "\n".join(CALLBACKS), re.MULTILINE)
    changed = program.replace("[StopWhenGood()", f"[{', '.join(f'{name}()' for name in names)}")
    changed = changed.replace(".fit(20, ", ".fit(3, ")
    assert names
    assert all(text in changed for text in (f"{names[-1]}()", ".fit(3, "))

    _run("\n".join([*CALLBACKS, changed]), tmp_path)


@pytest.mark.parametrize(
    "block", [_parameter(block) for block in BLOCKS if block not in (*PROGRAMS, *CALLBACKS)]
)
def test_block_runs_as_printed(block: str, tmp_path: Path) -> None:
    if "import pandas" in block:
        pytest.importorskip("pandas")
    # Some read a log that an earlier block has written.
    rows = [Record(step, 1, "train", 0.0, {"loss": 1 / step}) for step in (10, 20)]
    (tmp_path / "train_log.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    (tmp_path / "train_log.jsonl.meta.json").write_text('{"backend": "torch"}\n')

    _run(block, tmp_path)


def test_the_two_programs_differ_in_four_lines() -> None:
    one, other = (block.splitlines() for block in PROGRAMS)

    assert len(one) == len(other)
    assert sum(a != b for a, b in zip(one, other, strict=True)) == 4
