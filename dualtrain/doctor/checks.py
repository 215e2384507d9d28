"""Checks of an installation, as pure functions of the collected facts."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from dualtrain.doctor.facts import FRAMEWORKS, PACKAGES, Facts, told_by, version_of
from dualtrain.doctor.repairs import (
    activation,
    as_it_is,
    as_required,
    new_environment,
    pip_install,
    reinstall,
    tested_pythons,
)
from dualtrain.doctor.requirements import own_requirements, requirements, satisfies, short


class Finding(NamedTuple):
    """One problem or note."""

    level: str
    """``"problem"`` or ``"note"``."""
    check: str
    """The name of the check."""
    text: str
    """The problem and its consequence."""
    command: str | None = None
    """A shell command that fixes it."""


def check(facts: Facts) -> list[Finding]:
    """Return the problems, then the notes.

    Args:
        facts: The result of ``gather``.
    """
    found = [finding for examine in _CHECKS for finding in examine(facts)]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _check_python(facts: Facts) -> Iterator[Finding]:
    version, wanted = facts["python"]["version"], facts["dualtrain"]["python"]
    if wanted and not satisfies(version, wanted):
        text = f"Python {version} is not supported: dualtrain needs {wanted}."
        yield Finding("problem", "python", text, new_environment(facts, "dualtrain"))
    elif (tested := tested_pythons(facts)) and ".".join(version.split(".")[:2]) not in tested:
        text = f"dualtrain is not tested with Python {version} (it is with {', '.join(tested)})."
        yield Finding("note", "python", text)


def _check_framework_python(facts: Facts) -> Iterator[Finding]:
    """Detect a framework installed for a Python version that it does not support."""
    version = facts["python"]["version"]
    for name in FRAMEWORKS:
        package = facts["packages"].get(name)
        if package and package["python"] and not satisfies(version, package["python"]):
            text = (
                f"{name} {version_of(facts, name)} needs Python {package['python']}, and this is {version}."
            )
            yield Finding("problem", "framework-python", text, new_environment(facts, f"dualtrain[{name}]"))


def _check_no_framework(facts: Facts) -> Iterator[Finding]:
    if any(facts["packages"].get(name) for name in FRAMEWORKS):
        return
    other = facts["commands"]["python"]
    there = [
        f"{name} {other['packages'][name]}" for name in FRAMEWORKS if other and name in other["packages"]
    ]
    if there and other["prefix"] != facts["python"]["prefix"]:
        text = (
            f"No framework is installed for {facts['python']['executable']}, but {other['executable']} "
            f"has {' and '.join(there)}: dualtrain is in a different environment."
        )
        yield Finding(
            "problem", "no-framework", text, f"{shlex.quote(other['executable'])} -m pip install dualtrain"
        )
    else:
        text = "No framework is installed: logs can be read, but nothing can be trained."
        yield Finding("note", "no-framework", text, pip_install(facts, "dualtrain[torch]"))


def _check_files(facts: Facts) -> Iterator[Finding]:
    """Detect a package with metadata but without files."""
    for name in PACKAGES:
        package = facts["packages"].get(name)
        if package and package["location"] is None:
            text = f"{name} {package['version']} is recorded as installed, but its files are not there."
            yield Finding("problem", "files", text, reinstall(facts, as_it_is(name, package["version"])))


def _check_requirements(facts: Facts) -> Iterator[Finding]:
    """Check the requirements of the installed packages, from their metadata."""
    present = {name for name in PACKAGES if facts["packages"].get(name)}
    ours = f"dualtrain {version_of(facts, 'dualtrain') or ''}".rstrip()
    asked = []
    for requirement, extra in own_requirements(facts):
        if extra is None:
            asked.append((ours, requirement))
        elif requirement.name in present and PACKAGES[requirement.name] == extra:  # the extra is in use
            asked.append((f"dualtrain[{extra}]", requirement))
    for name in filter(present.__contains__, PACKAGES):
        asker = f"{name} {version_of(facts, name)}"
        asked += [(asker, found) for found, _ in requirements(facts, facts["packages"][name]["requires"])]
    said = set()
    for asker, requirement in asked:
        name, wanted = canonicalize_name(requirement.name), short(requirement)
        version = facts["installed"].get(name)
        if name == "numpy" and "mindspore" in present and _numpy_clashes(version):
            continue  # _check_numpy has a more specific message
        if version is None and name not in present:  # a copied folder has no metadata
            text = f"{asker} needs {wanted}, which is not installed."
        elif version is not None and not satisfies(version, requirement.specifier):
            text = f"{name} {version} is installed, but {asker} needs {wanted}."
        else:
            continue
        if wanted not in said:
            said.add(wanted)
            yield Finding("problem", "requirements", text, pip_install(facts, wanted))


def _numpy_clashes(version: str | None) -> bool:
    return version is not None and satisfies(version, ">=2")


def _check_numpy(facts: Facts) -> Iterator[Finding]:
    version, mindspore = version_of(facts, "numpy"), version_of(facts, "mindspore")
    if mindspore is not None and _numpy_clashes(version):
        text = (
            f"numpy {version} is installed beside MindSpore {mindspore}, whose datasets fail on scalar "
            "columns with numpy 2."
        )
        yield Finding("problem", "numpy", text, pip_install(facts, "numpy<2"))


def _check_torchmetrics(facts: Facts) -> Iterator[Finding]:
    if facts["packages"].get("torch") and not facts["packages"].get("torchmetrics"):
        text = "torchmetrics is not installed: on PyTorch, metrics cannot be given by name."
        yield Finding("note", "torchmetrics", text, pip_install(facts, as_required(facts, "torchmetrics")))


def _check_commands(facts: Facts) -> Iterator[Finding]:
    """Check that ``python`` and ``dualtrain`` on PATH belong to the same environment."""
    ours, python, program = facts["python"], facts["commands"]["python"], facts["commands"]["dualtrain"]
    activate = activation(ours)
    if python and program and program.get("prefix") and program["prefix"] != python["prefix"]:
        text = (
            f"dualtrain on PATH ({program['program']}) is in a different environment from python on PATH "
            f"({python['executable']})."
        )
        install = f"{shlex.quote(python['executable'])} -m pip install dualtrain"
        yield Finding("problem", "commands", text, activate or install)
    elif python and python["prefix"] != ours["prefix"]:
        has = " and ".join(f"{name} {version}" for name, version in python["packages"].items())
        text = (
            f"python on PATH is not this interpreter: {python['executable']} "
            f"(Python {python['version']}, with {has or 'no dualtrain, torch or mindspore'})."
        )
        yield Finding("note", "commands", text, activate)


def _check_pythonpath(facts: Facts) -> Iterator[Finding]:
    value = facts["environ"]["PYTHONPATH"]
    entries = [entry for entry in (value or "").split(os.pathsep) if entry]
    if not entries:
        return
    short = ".".join(facts["python"]["version"].split(".")[:2])
    moved = []
    for name, package in facts["packages"].items():
        if (
            package
            and package["location"]
            and package["without_pythonpath"] not in (None, package["location"])
        ):
            moved.append(f"{name} from {package['location']} instead of {package['without_pythonpath']}")
    foreign = [
        e
        for e in entries
        if (v := re.search(r"python(3\.\d+)[\\/](?:site|dist)-packages", e)) and v[1] != short
    ]
    if moved:
        text = f"PYTHONPATH gives {', '.join(moved)}."
        yield Finding("problem", "pythonpath", text, "unset PYTHONPATH")
    elif foreign:
        text = f"PYTHONPATH has packages of a Python other than {short}: {', '.join(foreign)}."
        yield Finding("problem", "pythonpath", text, "unset PYTHONPATH")
    else:
        yield Finding("note", "pythonpath", f"PYTHONPATH is set: {value}.")


def _check_shadows(facts: Facts) -> Iterator[Finding]:
    for path in facts["shadows"]:
        moved = Path(path).parent if path.endswith("__init__.py") else Path(path)
        name = moved.stem
        text = f"{path} is imported instead of the package {name} by programs started in this directory."
        renamed = moved.with_name(f"my_{moved.name}")
        yield Finding(
            "problem", "shadows", text, f"mv {shlex.quote(str(moved))} {shlex.quote(str(renamed))}"
        )


def _check_probes(facts: Facts) -> Iterator[Finding]:
    """Check that each framework starts, and that each of its devices works."""
    for name, probes in facts["probes"].items():
        version = version_of(facts, name)
        again = reinstall(facts, as_it_is(name, version))
        for probe in probes:
            told = probe["told"]
            tried = [line["device"] for line in told if "name" in line]
            results = {line["device"]: line for line in told if "works" in line}
            hung = [device for device in tried if device not in results]
            place = f"{hung[-1]} of {name} {version}" if hung else f"{name} {version}"
            if probe["target"] == "Ascend":
                continue  # handled by _check_ascend
            if probe["status"] is None:
                text = f"{place} gave no answer within {probe['timeout']:g} seconds."
                yield Finding("problem", "probe", text, again)
            elif probe["status"] < 0:
                text = f"{place} crashed: {_signal(-probe['status'])}."
                yield Finding("problem", "probe", text, again)
            elif probe["status"] > 0:
                last = (probe["errors"].strip().splitlines() or [f"exit status {probe['status']}"])[-1]
                yield Finding("problem", "probe", f"{name} {version} cannot be used: {last}", again)
            for device, line in results.items():
                if not line["works"]:
                    text = f"{name} {version} sees {device} and cannot use it: {_first(line['error'])}"
                    yield Finding("problem", "probe", text, again)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first(error: str) -> str:
    """Return the first line of an error; MindSpore's errors have about twenty lines."""
    return error.strip().partition("\n")[0]


def _check_nvidia(facts: Facts) -> Iterator[Finding]:
    """Detect a GPU that PyTorch cannot use because of its build, the driver or a variable."""
    cards = facts["hardware"]["nvidia"]
    told = told_by(facts, "torch")
    builds = [line for line in told if "cuda" in line]
    if not cards or not builds or any(str(line.get("device")).startswith("cuda") for line in told):
        return
    version, cuda, card = builds[0]["version"], builds[0]["cuda"], cards[0]
    hidden = facts["environ"]["CUDA_VISIBLE_DEVICES"]
    if cuda is None and builds[0].get("hip") is None:
        text = f"There is {card}, but torch {version} is a build for the CPU."
        # On Linux the package index has CUDA builds; the version without +cpu selects one.
        yield Finding("problem", "nvidia", text, reinstall(facts, as_it_is("torch", version)))
    elif hidden is not None and hidden.strip() in ("", "-1"):
        text = f"There is {card}, but CUDA_VISIBLE_DEVICES={hidden!r} hides it from torch."
        yield Finding("note", "nvidia", text, "unset CUDA_VISIBLE_DEVICES")
    elif cuda is not None:
        why = [_first(line["error"]) for line in told if line.get("unavailable") == "cuda"]
        text = (
            f"There is {card}, but torch {version}, built for CUDA {cuda}, cannot use it"
            f"{': ' + why[0] if why else '.'} The driver may be too old for CUDA {cuda}: "
            "update it, or install an older torch."
        )
        yield Finding(
            "problem", "nvidia", text, pip_install(facts, f"torch<{'.'.join(version.split('.')[:2])}")
        )


def _check_ascend(facts: Facts) -> Iterator[Finding]:
    """Detect an Ascend device that MindSpore cannot use."""
    devices = facts["hardware"]["ascend"]
    for probe in facts["probes"].get("mindspore", ()):
        if not devices or probe["target"] != "Ascend":
            continue
        if any(line.get("works") for line in probe["told"]):
            continue
        errors = [line["error"] for line in probe["told"] if line.get("error")]
        if errors:
            # The line about the library is more specific than the first line, which is always the same.
            lines = [
                line for line in errors[0].splitlines() if "dynamic library" in line and "failed" in line
            ]
            why = lines[0].strip() if lines else _first(errors[0])
        elif probe["status"] is None:
            why = f"it gave no answer within {probe['timeout']:g} seconds."
        else:
            ended = probe["status"]
            why = f"its process ended with {_signal(-ended) if ended < 0 else f'exit status {ended}'}."
        text = f"There is {devices[0]}, but MindSpore {version_of(facts, 'mindspore')} cannot use it: {why}"
        if facts["hardware"]["cann"] is None:
            text += " CANN's variables are not set."
            yield Finding("problem", "ascend", text, "source /usr/local/Ascend/ascend-toolkit/set_env.sh")
        else:
            text += f" Its version has to match the CANN in {facts['hardware']['cann']}."
            yield Finding("problem", "ascend", text, reinstall(facts, as_required(facts, "mindspore")))


def _check_launch_blocking(facts: Facts) -> Iterator[Finding]:
    works = {line["device"] for line in told_by(facts, "mindspore") if line.get("works")}
    if works == {"CPU"}:
        text = (
            "In PYNATIVE mode MindSpore trains 5 to 10 times faster on a CPU after "
            "mindspore.runtime.launch_blocking(); GRAPH mode is faster still."
        )
        yield Finding("note", "launch-blocking", text)


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _check_python,
    _check_framework_python,
    _check_no_framework,
    _check_files,
    _check_numpy,
    _check_requirements,
    _check_probes,
    _check_nvidia,
    _check_ascend,
    _check_commands,
    _check_pythonpath,
    _check_shadows,
    _check_torchmetrics,
    _check_launch_blocking,
)
