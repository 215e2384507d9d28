"""The rooms of the package are kept apart by contracts, and each contract is seen to bite.

A contract that cannot fail is worth nothing: so each is broken once, in a copy of the package.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from paths import ROOT

import dualtrain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(dualtrain.__file__).parent
PYPROJECT = ROOT / "pyproject.toml"
CONTRACTS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

ROOMS = "The rooms: a row imports rows below it, siblings never each other"
FRAMEWORKS = "Frameworks stay in the backends"
LOGS = "Reading a log needs records and errors alone"
ENGINES = "The two engines do not know each other"

VIOLATIONS = [
    # A row imports the row above it, from the bottom and from the middle.
    (ROOMS, "errors.py", "from dualtrain import _lazy"),
    (ROOMS, "context.py", "from dualtrain.callback import Callback"),
    (ROOMS, "loop.py", "def later():\n    import dualtrain.backends"),
    # Siblings import each other.
    (ROOMS, "records.py", "import dualtrain.triggers"),
    (ROOMS, "callbacks/__init__.py", "import dualtrain.backends"),
    (FRAMEWORKS, "loop.py", "import torch"),
    (FRAMEWORKS, "callbacks/__init__.py", "from mindspore import Tensor"),
    (FRAMEWORKS, "context.py", "def later():\n    from torch.nn import Module"),
    (LOGS, "logs/reader.py", "import dualtrain.sinks"),
    (LOGS, "logs/__init__.py", "from dualtrain.context import RunContext"),
    (ENGINES, "backends/torch/step.py", "import dualtrain.backends.mindspore"),
    (ENGINES, "backends/mindspore/step.py", "import dualtrain.backends.torch.step"),
]


@pytest.fixture
def copy(tmp_path):
    """A copy of the package and of the contracts, away from the ones at work."""
    shutil.copytree(PACKAGE, tmp_path / "dualtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PYPROJECT, tmp_path)
    return tmp_path


def lint_imports(root):
    """Check the contracts of a copy; return the exit status, contract -> kept, and the whole output."""
    command = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert command is not None, "import-linter has to be installed where its contracts are tested"
    done = subprocess.run(
        [command, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    verdicts = re.findall(r"^(.+?) (KEPT|BROKEN)", output, flags=re.MULTILINE)
    return done.returncode, {name: verdict == "KEPT" for name, verdict in verdicts}, output


def test_every_contract_is_kept(copy):
    status, kept, output = lint_imports(copy)
    assert status == 0, output
    assert kept == {contract["name"]: True for contract in CONTRACTS}


@pytest.mark.parametrize(
    ("contract", "file", "violation"), VIOLATIONS, ids=[f"{f}: {v.split()[-1]}" for _, f, v in VIOLATIONS]
)
def test_a_violation_breaks_its_contract_and_no_other(copy, contract, file, violation):
    with (copy / "dualtrain" / file).open("a", encoding="utf-8") as source:
        source.write(f"\n\n{violation}\n")
    status, kept, output = lint_imports(copy)
    assert status == 1, output
    assert [name for name in kept if not kept[name]] == [contract], output


def test_every_contract_has_a_violation_here():
    assert {contract for contract, _, _ in VIOLATIONS} == {contract["name"] for contract in CONTRACTS}


def rooms_on_disk():
    """Return the package's own modules and folders, apart from its two front doors."""
    names = {path.stem for path in PACKAGE.glob("*.py")}
    names |= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    return {f"dualtrain.{name}" for name in names - {"__init__", "__main__"}}


def contract_called(name):
    return next(contract for contract in CONTRACTS if contract["name"] == name)


def test_every_room_is_in_a_layer():
    layers = contract_called(ROOMS)["layers"]
    assert {room.strip() for layer in layers for room in layer.split("|")} == rooms_on_disk()


def test_every_room_but_those_for_frameworks_may_not_import_one():
    sources = set(contract_called(FRAMEWORKS)["source_modules"])
    assert sources == rooms_on_disk() - {"dualtrain.backends", "dualtrain.integrations"}
    assert set(contract_called(FRAMEWORKS)["forbidden_modules"]) == {"torch", "mindspore"}
