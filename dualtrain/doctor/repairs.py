"""The commands that fix an installation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from dualtrain.doctor.facts import Facts
from dualtrain.doctor.requirements import own_requirements, short


def pip_install(facts: Facts, *arguments: str) -> str:
    """Return the command that installs packages for this interpreter."""
    executable = shlex.quote(facts["python"]["executable"])
    pip = (
        f"{executable} -m pip install"
        if facts["python"]["pip"]
        else f"uv pip install --python {executable}"
    )
    return " ".join([pip, *map(shlex.quote, arguments)])


def reinstall(facts: Facts, what: str) -> str:
    """Return the command that reinstalls a package.

    Its dependencies are reinstalled too, since one of them may be broken. MindSpore's metadata
    allows numpy 2, so dualtrain's own requirement of numpy is added.
    """
    name = Requirement(what).name
    beside = [
        short(asked) for asked, extra in own_requirements(facts) if (extra, asked.name) == (name, "numpy")
    ]
    return pip_install(
        facts, "--force-reinstall" if facts["python"]["pip"] else "--reinstall", what, *beside
    )


def as_it_is(name: str, version: str | None) -> str:
    """Return the requirement of the installed version, without its build tag."""
    return name if version in (None, "unknown") else f"{name}=={str(version).partition('+')[0]}"


def as_required(facts: Facts, name: str) -> str:
    """Return dualtrain's requirement of a package, such as ``torch>=2.6``."""
    return next((short(asked) for asked, _ in own_requirements(facts) if asked.name == name), name)


def new_environment(facts: Facts, what: str) -> str:
    """Return the command that creates an environment with a supported Python."""
    newest = max(tested_pythons(facts), key=Version, default="3.12")
    return f"python{newest} -m venv .venv && .venv/bin/python -m pip install {shlex.quote(what)}"


def tested_pythons(facts: Facts) -> list[str]:
    """Return the tested Python versions, from dualtrain's metadata."""
    marks = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c)
        for c in facts["dualtrain"]["classifiers"]
    )
    return [mark[1] for mark in marks if mark]


def activation(python: Mapping[str, Any]) -> str | None:
    """Return the command that puts an environment's commands first on PATH."""
    if python["environment"] == "conda":
        return f"conda activate {shlex.quote(python['prefix'])}"
    if python["environment"] is None:
        return None
    script = str(Path(python["scripts"], "activate"))
    return script if python["platform"] == "win32" else f"source {shlex.quote(script)}"
