"""The rules of CONTRIBUTING.md on sizes and names of files and classes, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import private_names

import dualtrain

PACKAGE = Path(dualtrain.__file__).parent
BACKENDS = ("torch", "mindspore")

MOST_LINES = 350
LONG_FILES = {"context.py": "RunContext is all that a callback sees, documented in one place."}

MOST_METHODS = 12
LARGE_CLASSES = {
    "Callback": "One method per event, and the state.",
    "RunContext": "All that a callback sees of a run.",
    "RunEngine": "One verb per change of a run; engines and adapters call nothing else.",
    "TorchBackend": "Satisfies Backend and its optional parts, five protocols of protocol.py.",
    "MindSporeBackend": "The same.",
    "FakeBackend": "Satisfies Backend and three of its optional parts.",
}

SEVERAL_CLASSES = {
    "backends/mindspore/cells.py": "GRAPH mode compiles the Cells of a step from the source of one file.",
    "backends/mindspore/optimizer.py": "A schedule that is scaled is made by the rate that scales it.",
    "backends/torch/choice.py": "The options of a choice and its result.",
    "backends/torch/forward.py": "The stages of a forward pass, which share its checks.",
    "backends/torch/metrics.py": "The three kinds of metrics behind one interface.",
    "backends/torch/observed.py": "The step of a hand-written loop and its gradients.",
    "backends/torch/optimizer.py": "The learning rate, and the schedule that sets it.",
    "backends/torch/step.py": "The two steps, which differ in their window alone, and their common parts.",
    "bus.py": "The bus and its dispatch plan.",
    "context.py": "The context, and the parameters and the state that it shows.",
    "errors.py": "The errors, one line each.",
    "protocol.py": "The protocols that a backend satisfies, side by side.",
    "testing/fake_backend.py": "The backend, and the learning rate that it reads.",
    "testing/recording.py": "The callback, and the entry of its trace.",
    "window.py": "The window, and the look-ahead that tells it the last batch.",
}

FILES_OF_ONE_BACKEND = {
    "torch": {
        "choice.py": "MindSpore's step is one Cell, which Model is given or not.",
        "forward.py": "On MindSpore the forward pass is in cells.py.",
        "late.py": "MindSpore overwrites values in place, so a later read is of another step.",
        "manual.py": "automatic_optimization=False is for PyTorch.",
        "norms.py": "On MindSpore the norms are in cells.py, compiled with the step.",
        "outputs.py": "MindSpore's outputs are detached as they are.",
        "parameter_norms.py": "On MindSpore the norms of parameters are kept by the step's Cell.",
        "precision.py": "MindSpore converts the network itself, by amp_level.",
        "update.py": "On MindSpore the update is in cells.py.",
    },
    "mindspore": {
        "arguments.py": "The arguments that MindSpore's own Model checks later, or not.",
        "bridge.py": "MindSpore's Model has a loop of its own, which calls this.",
        "cells.py": "GRAPH mode compiles Cells, not Python.",
        "check.py": "In GRAPH mode no error tells that train_step returns no loss.",
        "leading_bridge.py": "MindSpore's loop tells its run through the first bridge.",
        "modes.py": "PyTorch has no modes.",
        "reported.py": "MindSpore keeps no gradients, so a hand-written loop reports them.",
        "signals.py": "MindSpore installs signal handlers of its own.",
        "step_cell.py": "The Cell that is given to MindSpore's Model.",
        "tensors.py": "PyTorch's tensors read themselves.",
        "threads.py": "MindSpore trains one network at a time in a process.",
    },
}


def sources() -> dict[str, str]:
    """Return the package's files and their text."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def classes_in(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def public_methods(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's public methods and properties."""
    functions = (item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {function.name for function in functions if not function.name.startswith("_")}


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def long_files(files: dict[str, str]) -> set[str]:
    return {name for name, source in files.items() if len(source.splitlines()) > MOST_LINES}


def large_classes(files: dict[str, str]) -> set[str]:
    return {
        node.name
        for source in files.values()
        for node in classes_in(source)
        if len(public_methods(node)) > MOST_METHODS and not is_protocol(node)
    }


def files_with_several_classes(files: dict[str, str]) -> set[str]:
    public = {
        name: [node for node in classes_in(source) if not node.name.startswith("_")]
        for name, source in files.items()
    }
    return {name for name, classes in public.items() if len(classes) > 1}


def test_no_file_is_long() -> None:
    assert long_files(sources()) == set(LONG_FILES)


def test_no_class_is_large() -> None:
    assert large_classes(sources()) == set(LARGE_CLASSES)


def test_a_file_has_one_public_class() -> None:
    assert files_with_several_classes(sources()) == set(SEVERAL_CLASSES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_folders_of_the_backends_have_the_same_files(backend: str) -> None:
    [other] = set(BACKENDS) - {backend}
    own, others = (
        {path.name for path in (PACKAGE / "backends" / name).glob("*.py")} for name in (backend, other)
    )
    assert own - others == set(FILES_OF_ONE_BACKEND[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_private_names_of_a_framework_are_in_one_file(backend: str) -> None:
    """Those in strings and imports; ruff finds attributes."""
    files = sorted((PACKAGE / "backends" / backend).glob("*.py"))
    names = {file.name: private_names(file) - {"_fields"} for file in files}  # of a named tuple: public
    assert [file for file, private in names.items() if private] == ["borrowed.py"]


def test_a_private_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch._dynamo\nfrom mindspore.common import _no_grad\nfrom ours import _own\n"
        'getattr(x, "_version", "a _text", "__doc__")\n'
    )
    assert private_names(tmp_path / "a.py") == {"torch._dynamo", "mindspore.common._no_grad", "_version"}


def test_the_rules_see_what_they_forbid() -> None:
    methods = "".join(f"    def verb{i}(self): ...\n" for i in range(MOST_METHODS + 1))
    files = {
        "long.py": "\n" * (MOST_LINES + 1),
        "short.py": "\n" * MOST_LINES,
        "large.py": f"class Large:\n{methods}",
        "protocol.py": f"class Verbs(Protocol):\n{methods}",
        "small.py": f"class Small:\n{methods.partition('    def verb12')[0]}    def _private(self): ...\n",
        "several.py": "class One: ...\nclass Two: ...\n",
        "private.py": "class One: ...\nclass _Two: ...\n",
    }
    assert long_files(files) == {"long.py"}
    assert large_classes(files) == {"Large"}
    assert files_with_several_classes(files) == {"several.py"}
