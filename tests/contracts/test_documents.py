"""What the documents point to exists, and what is public is documented.

The README's programs are run by test_readme.py.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import dualtrain

FOLDERS = ("docs", "examples", "benchmarks")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)
PACKAGES = ("callbacks", "sinks", "logs", "testing")

documents = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(d.relative_to(ROOT)) for d in DOCUMENTS]
)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    """Return the links that lead to no file, or to no heading of one."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@documents
def test_a_link_leads_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    (tmp_path / "b.md").write_text("# What to do, here\n")
    links = [
        "b.md",
        "b.md#what-to-do-here",
        "https://example.org/none",
        "#top",
        "c.md",
        "b.md#none",
        "#none",
    ]
    document.write_text("# Top\n" + "\n".join(f"[x]({link})" for link in links))
    assert dead_links(document) == ["c.md", "b.md#none", "#none"]


@documents
def test_a_file_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])(?:dualtrain|tests|docs|examples|benchmarks)/[\w/.]*\.\w+", text)
    missing = [path for path in named if not (ROOT / path).exists() and "/my_" not in path]
    assert missing == []


def code(document: Path) -> str:
    """Return a document's shell blocks and what it quotes within a line, one a line."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


@documents
def test_a_command_that_is_named_exists(document: Path) -> None:
    text = code(document)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets
    source = inspect.getsource(importlib.import_module("dualtrain.cli"))
    commands = set(re.findall(r"add_parser\(\s*\"(\w+)\"", source))
    assert set(re.findall(r"^dualtrain ([a-z]+)", text, re.MULTILINE)) <= commands
    factors = set(re.findall(r"\w+", (ROOT / "tox.ini").read_text(encoding="utf-8")))
    for name in re.findall(r"^tox run -e ([\w.,-]+)", text, re.MULTILINE):
        assert {factor for factor in re.split("[-,]", name) if not factor.startswith("py3")} <= factors, (
            name
        )


@documents
def test_an_extra_that_is_named_exists(document: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", section, re.MULTILINE))
    named = re.findall(r"(?:dualtrain|[\"' ]\.)\[([\w,]+)\]", document.read_text(encoding="utf-8"))
    assert {extra for names in named for extra in names.split(",")} <= extras


@documents
def test_a_name_that_is_named_is_public(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for package, name in re.findall(rf"\bdt\.({'|'.join(PACKAGES)})\.(\w+)", text):
        assert hasattr(getattr(dualtrain, package), name), f"dt.{package}.{name}"
    for name in re.findall(r"\bdt\.([A-Za-z]\w*)", text):
        assert name in dualtrain.__all__, f"dt.{name}"


def test_the_rooms_in_contributing_are_those_of_the_package() -> None:
    """The list names every module and folder once, and the rows are those of the contract."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = Path(dualtrain.__file__).parent
    rooms = {path.name for path in package.glob("*.py")} - {"__main__.py"}
    rooms |= {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    named = re.findall(
        r"^  ([\w.]+/?)(?:  |$)", text.partition("dualtrain/\n")[2].partition("```")[0], re.MULTILINE
    )
    assert sorted(named) == sorted(rooms)
    layers = (
        (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition("layers = [\n")[2]
        .partition("\n]")[0]
    )
    rows = text.partition("### Who may import whom")[2].partition("```text\n")[2].partition("\n```")[0]
    assert rows.splitlines() == re.findall(r'"(.+)"', layers)


def public() -> dict[str, Any]:
    """Return every public name and what it stands for."""
    found = {name: getattr(dualtrain, name) for name in dualtrain.__all__ if name != "__version__"}
    for package in PACKAGES:
        module = getattr(dualtrain, package)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        found |= {f"{package}.{name}": getattr(module, name) for name in names}
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_documented(name: str) -> None:
    """Each name by a docstring of its own; methods also by what they override, events by Callback."""
    value = PUBLIC[name]
    assert value.__doc__
    if not inspect.isclass(value):
        return
    assert "__doc__" in vars(value)
    assert value.__doc__ is not value.__mro__[1].__doc__
    methods = [m for m, v in vars(value).items() if inspect.isroutine(v) and not m.startswith("_")]
    others = [m for m in methods if value is dualtrain.Callback or not hasattr(dualtrain.Callback, m)]
    assert [m for m in others if not inspect.getdoc(getattr(value, m))] == []


def test_every_callback_that_is_built_in_is_told_of() -> None:
    """In the README or a page of docs/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    untold = [name for name in dualtrain.callbacks.__all__ if not re.search(rf"\b{name}\b", text)]
    assert untold == []
