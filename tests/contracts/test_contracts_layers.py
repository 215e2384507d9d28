"""The rooms of the package are kept apart by contracts, and each contract is broken once here.

The contracts are those of pyproject.toml, run in a copy of the package.
"""

import ast
import graphlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import grimp
import pytest
from paths import ROOT, SUPPORT

import dualtrain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(dualtrain.__file__).parent
PYPROJECT = ROOT / "pyproject.toml"
CONTRACTS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

ROOMS = "The rooms: a row imports rows below it, siblings never each other"
FRAMEWORKS = "Frameworks stay in their backends"
LOGS = "Reading a log needs records and errors alone"
ENGINES = "The two engines do not know each other"
SHARED = "What both backends use imports neither"
ACYCLIC = "No cycles, deferred imports included"

LATER = "def later():\n    "
"""Defers an import."""

VIOLATIONS = [
    # A room, a violation in it, and the contracts that it breaks.
    ("loop.py", LATER + "import dualtrain.testing", {ROOMS, ACYCLIC}),
    ("triggers.py", "import dualtrain.records", {ROOMS}),
    ("window.py", LATER + "import dualtrain.counted_step", {ROOMS}),
    ("errors.py", "import torch", {FRAMEWORKS}),
    ("run.py", LATER + "from torch.nn import Module", {FRAMEWORKS}),
    ("callbacks/__init__.py", "from mindspore import Tensor", {FRAMEWORKS}),
    ("callbacks/nan_guard.py", LATER + "import torch", {FRAMEWORKS}),
    ("sinks/arrays.py", LATER + "import mindspore", {FRAMEWORKS}),
    ("logs/reader.py", "import torch", {FRAMEWORKS}),
    ("doctor/facts.py", LATER + "import mindspore", {FRAMEWORKS}),
    ("testing/fake_loop.py", "import torch", {FRAMEWORKS}),
    ("cli.py", LATER + "import torch", {FRAMEWORKS}),
    ("backends/__init__.py", LATER + "import torch", {FRAMEWORKS}),
    ("backends/_arguments.py", LATER + "import mindspore", {FRAMEWORKS}),
    ("backends/_attention.py", "import torch", {FRAMEWORKS}),
    ("backends/_contract.py", "import torch", {FRAMEWORKS}),
    ("backends/torch/step.py", "from mindspore import nn", {FRAMEWORKS}),
    ("backends/torch/metrics.py", "import torchmetrics", {FRAMEWORKS}),
    ("backends/mindspore/step.py", LATER + "import torch", {FRAMEWORKS}),
    ("logs/reader.py", "import dualtrain.arguments", {LOGS}),
    ("logs/__init__.py", "from dualtrain.context import RunContext", {LOGS}),
    (
        "backends/torch/step.py",
        LATER + "import dualtrain.backends.mindspore.tensors",
        {ENGINES, SHARED},
    ),
    (
        "backends/mindspore/step.py",
        "import dualtrain.backends.torch.norms",
        {ENGINES, SHARED},
    ),
    ("backends/_contract.py", LATER + "import dualtrain.backends._attention", {SHARED}),
    ("backends/torch/norms.py", LATER + "import dualtrain.backends.torch.step", {ACYCLIC}),
    ("backends/mindspore/tensors.py", LATER + "import dualtrain.backends.mindspore.nonfinite", {ACYCLIC}),
    ("callbacks/_log_writing.py", LATER + "from dualtrain.callbacks import step_logger", {ACYCLIC}),
]
CYCLES = [
    # Cycles that no contract sees: of a package and a module of it, and by a module's name in a string.
    ("sinks/arrays.py", LATER + "from dualtrain.sinks import MemorySink"),
    ("backends/torch/norms.py", 'BACKEND = "dualtrain.backends.torch.backend:BACKEND"'),
    ("backends/mindspore/tensors.py", LATER + 'return resolve("dualtrain.backends.mindspore.nonfinite")'),
]


def ids(violations):
    return [f"{file}: {violation.split()[-1]}" for file, violation, *_ in violations]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A copy of the package and of the contracts."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "dualtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PYPROJECT, root)
    return root


@pytest.fixture
def plant(root):
    """Give a function that appends a violation to a file of the copy; all are removed afterwards."""
    before = {}

    def plant(file, violation):
        path = root / "dualtrain" / file
        text = before.setdefault(path, path.read_text(encoding="utf-8"))
        path.write_text(f"{text}\n\n{violation}\n", encoding="utf-8")

    yield plant
    for path, text in before.items():
        path.write_text(text, encoding="utf-8")


def run(root, *command):
    return subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{SUPPORT}", "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def lint_imports(root):
    """Check the contracts of a copy; return the exit status, contract -> kept, and the whole output."""
    command = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert command is not None, "import-linter has to be installed where its contracts are tested"
    done = run(root, command, "--no-cache")
    output = done.stdout + done.stderr
    verdicts = re.findall(r"^(.+?) (KEPT|BROKEN)", output, flags=re.MULTILINE)
    return done.returncode, {name: verdict == "KEPT" for name, verdict in verdicts}, output


def test_every_contract_is_kept(root):
    status, kept, output = lint_imports(root)
    assert status == 0, output
    assert kept == {contract["name"]: True for contract in CONTRACTS}


@pytest.mark.parametrize(("file", "violation", "broken"), VIOLATIONS, ids=ids(VIOLATIONS))
def test_a_violation_breaks_its_contracts_and_no_others(root, plant, file, violation, broken):
    plant(file, violation)
    status, kept, output = lint_imports(root)
    assert status == 1, output
    assert {name for name in kept if not kept[name]} == broken, output


def test_every_contract_has_a_violation_here():
    broken = {contract for *_, contracts in VIOLATIONS for contract in contracts}
    assert broken == {contract["name"] for contract in CONTRACTS}


def test_no_room_may_import_the_row_above_it(root, plant):
    [rows] = [contract["layers"] for contract in CONTRACTS if contract["name"] == ROOMS]
    rooms = [[room.strip() for room in row.split("|")] for row in rows]
    refused = []
    for above, row in itertools.pairwise(rooms):
        for room in row:
            folder = (PACKAGE / room).is_dir()
            plant(f"{room}/__init__.py" if folder else f"{room}.py", f"{LATER}import dualtrain.{above[0]}")
            refused.append(f"dualtrain.{room} is not allowed to import dualtrain.{above[0]}")
    _, _, output = lint_imports(root)
    assert [sentence for sentence in refused if sentence not in output] == []


def test_a_room_without_a_row_is_refused(root):
    new = root / "dualtrain" / "new.py"
    new.touch()
    try:
        status, _, output = lint_imports(root)
    finally:
        new.unlink()
    assert status == 1
    assert "dualtrain.new" in output


# Cycles, those by a module's name in a string included.


def imports_of_the_package():
    """Return module -> the modules that it imports or names, at its top or deferred."""
    graph = grimp.build_graph("dualtrain", cache_dir=None)
    found = {name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules}
    for name, imported in found.items():
        path = PACKAGE.parent.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported |= graph.modules & {node.value.partition(":")[0]} - {name, "dualtrain"}
    return found


def cycle_in(imports):
    """Return the modules of one cycle; None if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def cycle_without_the_reference_by_name():
    """Return a cycle besides the reference that ``context.registered_backends`` resolves."""
    imports = imports_of_the_package()
    imports["dualtrain.context"].remove("dualtrain.backends")
    return cycle_in(imports)


def test_the_one_cycle_is_by_the_reference_by_name():
    assert cycle_without_the_reference_by_name() is None
    cycle = cycle_in(imports_of_the_package())
    assert {"dualtrain.context", "dualtrain.backends"} <= set(cycle)


@pytest.mark.parametrize(("file", "violation"), CYCLES, ids=ids(CYCLES))
def test_a_cycle_is_found(root, plant, file, violation):
    plant(file, violation)
    program = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_contracts_layers import cycle_without_the_reference_by_name as cycle\n"
        "print(*cycle() or ())"
    )
    done = run(root, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert "dualtrain." + file.removesuffix(".py").replace("/", ".") in done.stdout.split()
