"""Collect the facts about an installation and a machine."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.utils import canonicalize_name

from dualtrain._version import __version__
from dualtrain.doctor.process import run, told_in

Facts = Mapping[str, Any]

PACKAGES = {
    "numpy": None,
    "torch": "torch",
    "torchmetrics": "torch",
    "mindspore": "mindspore",
    "optuna": "optuna",
    "matplotlib": "plot",
}
"""Package -> the extra of dualtrain that installs it; None: a dependency of dualtrain itself."""

FRAMEWORKS = ("torch", "mindspore")


def gather(*, timeout: float = 120.0, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Collect the facts about this interpreter, its packages and this machine.

    Starts up to five processes: one for each Python on PATH that is not this one, one for each
    framework and device target, and ``nvidia-smi``.

    Args:
        timeout: Limit in seconds for a framework's import and the test of its devices.
        environ: The environment variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    apart = _without_pythonpath(environ)
    hardware = _hardware(environ)
    packages = {name: _package(name, apart) for name in (*PACKAGES, "dualtrain")}
    targets = {"torch": [""], "mindspore": ["CPU"]}
    if hardware["ascend"]:
        targets["mindspore"].append("Ascend")
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "prefix": os.path.realpath(sys.prefix),
            "environment": _kind(),
            "scripts": sysconfig.get_path("scripts"),
            "pip": importlib.util.find_spec("pip") is not None,
            "platform": sys.platform,
        },
        "dualtrain": {
            "version": __version__,
            "location": str(Path(__file__).parent.parent),
            **_metadata("dualtrain"),
        },
        "packages": packages,
        "markers": dict(default_environment()),
        "installed": _installed(),
        "environ": {name: environ.get(name) for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")},
        "hardware": hardware,
        "commands": _commands(environ),
        "shadows": _shadows(Path.cwd()),
        "probes": {
            name: [_probe(name, target, timeout, environ) for target in targets[name]]
            for name in FRAMEWORKS
            if packages[name] is not None
        },
    }


def _kind() -> str | None:
    """Return the kind of this interpreter's environment: ``venv``, ``conda`` or None."""
    if sys.prefix != sys.base_prefix:
        return "venv"
    return "conda" if Path(sys.prefix, "conda-meta").is_dir() else None


def _metadata(name: str) -> dict[str, Any]:
    """Return a package's metadata, with None for missing values."""
    try:
        found = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return {"recorded": None, "python": None, "requires": [], "extras": [], "classifiers": []}
    return {
        "recorded": found["Version"],
        "python": found["Requires-Python"],
        "requires": found.get_all("Requires-Dist") or [],
        "extras": found.get_all("Provides-Extra") or [],
        "classifiers": found.get_all("Classifier") or [],
    }


def _package(name: str, apart: Sequence[str]) -> dict[str, Any] | None:
    """Return the facts of a package without importing it; None: it is not installed.

    Args:
        name: The name of the package and of its module.
        apart: ``sys.path`` without the entries of PYTHONPATH.
    """
    recorded = _metadata(name)
    location, other = (_location(PathFinder.find_spec(name, path)) for path in (_search_path(), apart))
    if recorded["recorded"] is None and location is None:
        return None
    return {
        "version": recorded["recorded"],
        "python": recorded["python"],
        "requires": recorded["requires"],
        "location": location,
        "without_pythonpath": other,
    }


def _location(spec: Any) -> str | None:
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return str(places[0] if places else spec.origin)


def _search_path() -> list[str]:
    """Return ``sys.path`` without the working directory, which ``python -m`` has put in front."""
    return sys.path[1:] if sys.path[:1] in ([""], [os.getcwd()]) else sys.path[:]


def _without_pythonpath(environ: Mapping[str, str]) -> list[str]:
    """Return ``sys.path`` without the working directory and what PYTHONPATH has put there."""
    added = {os.path.realpath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    return [path for path in _search_path() if os.path.realpath(path) not in added]


def _installed() -> dict[str, str]:
    """Return package -> version of all installed packages."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        if name and version:  # an incomplete removal leaves folders without them
            found.setdefault(canonicalize_name(name), version)
    return found


def _hardware(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the accelerators of the system, independently of the frameworks."""
    nvidia = sorted(glob.glob("/dev/nvidia[0-9]*"))
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is not None:
        listed = run([program, "-L"], 20.0, environ)["output"]
        nvidia = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed, re.MULTILINE) or nvidia
    toolkit = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    return {"nvidia": nvidia, "ascend": sorted(glob.glob("/dev/davinci[0-9]*")), "cann": toolkit}


_ASK = """
import json, os, sys
found = {}
try:
    from importlib import metadata
    for name in ("dualtrain", "torch", "mindspore"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
except ImportError:
    pass
print("dualtrain: " + json.dumps({"executable": sys.executable, "prefix": os.path.realpath(sys.prefix),
    "version": "%d.%d.%d" % sys.version_info[:3], "packages": found}))
"""


def _commands(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the interpreters of the commands ``python`` and ``dualtrain`` on PATH."""
    path = environ.get("PATH")
    python = shutil.which("python", path=path) or shutil.which("python3", path=path)
    program = shutil.which("dualtrain", path=path)
    owner = None if program is None else _interpreter(program)
    return {
        "python": None if python is None else _ask(python, environ),
        "dualtrain": None if owner is None else {"program": program, **(_ask(owner, environ) or {})},
    }


def _interpreter(program: str) -> str | None:
    """Return the Python of an installed command, from its first lines or its folder."""
    try:
        with open(program, "rb") as file:
            first = file.readline(1024).decode("utf-8", "replace")
            first += file.readline(1024).decode("utf-8", "replace")
    except OSError:
        return None
    # For a long path or one with spaces, pip writes a shell script with the path in its second line.
    named = re.match(r"#!\s*(/\S*python\S*)", first) or re.search(
        r"exec'? '?\"?(/[^'\"\n]*python[^'\"\s]*)", first
    )
    if named:
        return named[1]
    return shutil.which("python", path=str(Path(program).parent))


def _ask(executable: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Query another Python for its version and packages, without this process's PYTHONPATH."""
    clean = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    told = told_in(run([executable, "-c", _ASK], 20.0, clean)["output"])
    return {"program": executable, **told[-1]} if told else None


def _shadows(directory: Path) -> list[str]:
    """Return the files of a directory that a script there would import instead of a package."""
    names = (name for package in PACKAGES for name in (f"{package}.py", f"{package}/__init__.py"))
    return [str(directory / name) for name in names if (directory / name).is_file()]


def _probe(name: str, target: str, timeout: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Test a framework's devices in another process."""
    program = Path(__file__).parent.parent / "backends" / name / "devices.py"
    start = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", start, str(program), *([target] if target else [])]
    ended = run(command, timeout, {"GLOG_v": "3", **environ})
    return {"target": target, "timeout": timeout, **ended, "told": told_in(ended["output"])}


# Reading the facts.


def told_by(facts: Facts, name: str) -> list[dict[str, Any]]:
    """Return the results of a framework's device tests."""
    return [line for probe in facts["probes"].get(name, ()) for line in probe["told"]]


def version_of(facts: Facts, name: str) -> str | None:
    """Return a package's version from its metadata or its device test; None: not installed."""
    package = facts["packages"].get(name)
    if package is None:
        return None
    told = [line["version"] for line in told_by(facts, name) if "version" in line]
    return str(package["version"] or (told[0] if told else "unknown"))
