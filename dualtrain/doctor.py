"""What is installed, which devices work, and what is wrong: ``dualtrain doctor``.

``gather`` collects facts, ``check`` judges them and ``report`` writes them down. ``check`` is a
pure function of the facts, which are plain data: any clash can be described without having it.

No framework is imported into this process. Versions come from what pip has recorded; devices are
tried by ``backends/*/devices.py`` in processes of their own, with a time limit.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from dualtrain._version import __version__

Facts = Mapping[str, Any]

PACKAGES = {
    "numpy": None,
    "torch": "torch",
    "torchmetrics": "torch",
    "mindspore": "mindspore",
    "optuna": "optuna",
    "matplotlib": "plot",
}
"""Package -> the extra of dualtrain that installs it; None: dualtrain itself does."""

FRAMEWORKS = ("torch", "mindspore")


class Finding(NamedTuple):
    """One thing that is wrong or worth knowing."""

    level: str
    """``"problem"`` or ``"note"``."""
    check: str
    """Which check found it."""
    text: str
    """What is so, and what follows."""
    command: str | None = None
    """What mends it, to be typed as it is."""


# Gathering. Everything that asks the machine is here.


def gather(*, timeout: float = 120.0, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Collect the facts about this interpreter, its packages and this machine.

    Starts up to five processes: one for each Python on PATH that is not this one, one for each
    framework and device target, and ``nvidia-smi``.

    Args:
        timeout: Seconds that a framework has to be imported and to try its devices.
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
            "location": str(Path(__file__).parent),
            **_metadata("dualtrain"),
        },
        "packages": packages,
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
    """Return what keeps this interpreter's packages apart from others': ``venv``, ``conda`` or None."""
    if sys.prefix != sys.base_prefix:
        return "venv"
    return "conda" if Path(sys.prefix, "conda-meta").is_dir() else None


def _metadata(name: str) -> dict[str, Any]:
    """Return what pip has recorded of a package, with None where nothing is."""
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
    """Return what is known of a package without importing it; None: it is not installed.

    Args:
        name: Of the package and of its module.
        apart: ``sys.path`` without what PYTHONPATH has put there.
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
    """Return package -> version of everything that pip has recorded."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        if name and version:  # a broken removal leaves folders without
            found.setdefault(_normal(name), version)
    return found


def _hardware(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the accelerators that the system knows, whatever the frameworks say."""
    nvidia = sorted(glob.glob("/dev/nvidia[0-9]*"))
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is not None:
        listed = _run([program, "-L"], 20.0, environ)["output"]
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
    """Return whose the commands ``python`` and ``dualtrain`` are that PATH leads to."""
    path = environ.get("PATH")
    python = shutil.which("python", path=path) or shutil.which("python3", path=path)
    program = shutil.which("dualtrain", path=path)
    owner = None
    if program is not None:
        owner = _interpreter(program)
    return {
        "python": None if python is None else _ask(python, environ),
        "dualtrain": None if owner is None else {"program": program, **(_ask(owner, environ) or {})},
    }


def _interpreter(program: str) -> str | None:
    """Return the Python of an installed command: its first line says, or it is in the same folder."""
    try:
        with open(program, "rb") as file:
            first = file.readline(1024).decode("utf-8", "replace")
            first += file.readline(1024).decode("utf-8", "replace")
    except OSError:
        return None
    # With a long path or a blank in it, pip writes a shell script whose second line has the path.
    named = re.match(r"#!\s*(/\S*python\S*)", first) or re.search(
        r"exec'? '?\"?(/[^'\"\n]*python[^'\"\s]*)", first
    )
    if named:
        return named[1]
    beside = shutil.which("python", path=str(Path(program).parent))
    return beside


def _ask(executable: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Ask another Python what it is and has; without PYTHONPATH, which would be ours."""
    clean = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    told = _lines(_run([executable, "-c", _ASK], 20.0, clean)["output"])
    return {"program": executable, **told[-1]} if told else None


def _shadows(directory: Path) -> list[str]:
    """Return what a script that is started in a directory would import in a package's place."""
    names = (name for package in PACKAGES for name in (f"{package}.py", f"{package}/__init__.py"))
    return [str(directory / name) for name in names if (directory / name).is_file()]


def _probe(name: str, target: str, timeout: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Let a framework try its devices in another process."""
    program = Path(__file__).parent / "backends" / name / "devices.py"
    start = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", start, str(program), *([target] if target else [])]
    ended = _run(command, timeout, {"GLOG_v": "3", **environ})
    return {"target": target, "timeout": timeout, **ended, "told": _lines(ended["output"])}


def _run(command: Sequence[str], timeout: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a command where it can leave nothing behind.

    Returns:
        ``status``: the exit status, negative for a signal, None if it had to be stopped;
        ``output``, and ``errors``: the end of what it wrote to stderr.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        with (
            open(Path(directory, "errors"), "w+b") as errors,
            open(Path(directory, "output"), "w+b") as output,
        ):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # files, since a child of a hanging process could keep pipes open
                    stderr=errors,
                    cwd=directory,
                    env=dict(environ),
                    start_new_session=True,
                )
            except OSError as error:
                return {"status": 127, "output": "", "errors": str(error)}
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            output.seek(0)
            errors.seek(0)
            return {
                "status": status,
                "output": output.read().decode("utf-8", "replace"),
                "errors": errors.read().decode("utf-8", "replace")[-2000:],
            }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started; one that has ended already is left alone."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, OSError):  # no process groups on Windows
            process.kill()
        process.wait()


def _lines(output: str) -> list[dict[str, Any]]:
    """Return the findings in a program's output, among what frameworks print there."""
    found = []
    for line in output.splitlines():
        if line.startswith("dualtrain: "):
            try:
                found.append(json.loads(line.removeprefix("dualtrain: ")))
            except ValueError:  # cut short by the end of the process
                continue
    return found


# Requirements, as far as they are met here: versions are numbers and dots, markers are simple.


class _Requirement(NamedTuple):
    name: str
    specifier: str
    extra: str | None

    def __str__(self) -> str:
        return self.name + self.specifier


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(lines: Sequence[str], python: str) -> Iterator[_Requirement]:
    """Read ``Requires-Dist``. One whose marker is not understood is left out: it may not apply."""
    for line in lines:
        read = re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^]]*\])?\s*\(?([^;()@]*)\)?\s*(?:;(.*))?$", line)
        if read is None:
            continue
        name, specifier, marker = read[1], re.sub(r"\s", "", read[2]), read[3] or ""
        extra = None
        for clause in re.split(r"\band\b", marker.replace("(", " ").replace(")", " ")):
            parts = re.fullmatch(r"\s*(\w+)\s*([<>=!~]=?=?)\s*[\"']([^\"']*)[\"']\s*", clause)
            if not clause.strip():
                continue
            if parts is None:
                break
            subject, operator, value = parts.groups()
            if (subject, operator) == ("extra", "=="):
                extra = value
            elif not (subject.startswith("python") and satisfies(python, operator + value)):
                break
        else:
            yield _Requirement(_normal(name), specifier, extra)


def satisfies(version: str, specifier: str) -> bool:
    """Say whether a version is in a range such as ``>=2.7,<2.11``.

    A pre-release counts as older than its release, what follows a ``+`` does not count, and a
    clause that is not understood is taken as met.
    """
    return all(_meets(version, clause) for clause in specifier.split(",") if clause.strip())


def _meets(version: str, clause: str) -> bool:
    read = re.fullmatch(r"\s*(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?\S*\s*", clause)
    found = re.match(
        r"\s*v?(\d+(?:\.\d+)*)((?:[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)\d*)?)", version
    )
    if read is None or found is None:
        return True
    operator, wanted, any_ending = read[1], _numbers(read[2]), read[3]
    ours, pre = _numbers(found[1]), bool(found[2])
    width = max(len(wanted), len(ours))
    a, b = _padded(ours, width), _padded(wanted, width)
    if operator in ("==", "!="):
        same = a[: len(wanted)] == wanted if any_ending else a == b and not pre
        return same == (operator == "==")
    if operator == "~=" and a[: len(wanted) - 1] != wanted[:-1]:
        return False
    if operator in (">=", "~="):
        return a > b or (a == b and not pre)
    if operator == ">":
        return a > b
    return a < b or (operator == "<=" and a == b)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))


# Judging. Nothing below asks the machine.


def check(facts: Facts) -> list[Finding]:
    """Return what is wrong, then what is worth knowing.

    Args:
        facts: What ``gather`` returns.
    """
    found = [finding for examine in _CHECKS for finding in examine(facts)]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _pip(facts: Facts, *arguments: str) -> str:
    """Return the command that installs into the interpreter at hand."""
    executable = shlex.quote(facts["python"]["executable"])
    pip = (
        f"{executable} -m pip install"
        if facts["python"]["pip"]
        else f"uv pip install --python {executable}"
    )
    return " ".join([pip, *map(shlex.quote, arguments)])


def _again(facts: Facts, what: str) -> str:
    """Return the command that installs a package over itself.

    Its dependencies are installed again too, since one of them may be what is broken. MindSpore's
    metadata would let numpy 2 in, so what dualtrain asks of numpy goes with it.
    """
    name = re.split(r"[<>=!~]", what)[0]
    wanted = _requirements(facts["dualtrain"]["requires"], facts["python"]["version"])
    beside = [
        str(requirement)
        for requirement in wanted
        if (requirement.extra, requirement.name) == (name, "numpy")
    ]
    return _pip(facts, "--force-reinstall" if facts["python"]["pip"] else "--reinstall", what, *beside)


def _as_it_is(name: str, version: str | None) -> str:
    """Return the requirement of the version that is installed, of whichever build."""
    return name if version in (None, "unknown") else f"{name}=={str(version).partition('+')[0]}"


def _version(facts: Facts, name: str) -> str | None:
    """Return a package's version: as recorded, or else as it says itself; None: it is not there."""
    package = facts["packages"].get(name)
    if package is None:
        return None
    told = [
        line["version"]
        for probe in facts["probes"].get(name, ())
        for line in probe["told"]
        if "version" in line
    ]
    return str(package["version"] or (told[0] if told else "unknown"))


def _wanted(facts: Facts, name: str) -> str:
    """Return the requirement that dualtrain has of a package, such as ``torch>=2.6``."""
    for requirement in _requirements(facts["dualtrain"]["requires"], facts["python"]["version"]):
        if requirement.name == name:
            return str(requirement)
    return name


def _new_environment(facts: Facts, what: str) -> str:
    """Return the command that makes an environment with a Python that everything supports."""
    newest = max(_tested(facts), key=_numbers, default="3.12")
    return f"python{newest} -m venv .venv && .venv/bin/python -m pip install {shlex.quote(what)}"


def _tested(facts: Facts) -> list[str]:
    """Return the Pythons that dualtrain is tested with, as its metadata lists them."""
    marks = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c)
        for c in facts["dualtrain"]["classifiers"]
    )
    return [mark[1] for mark in marks if mark]


def _check_python(facts: Facts) -> Iterator[Finding]:
    version, wanted = facts["python"]["version"], facts["dualtrain"]["python"]
    if wanted and not satisfies(version, wanted):
        text = f"Python {version} is not supported: dualtrain needs {wanted}."
        yield Finding("problem", "python", text, _new_environment(facts, "dualtrain"))
    elif (tested := _tested(facts)) and ".".join(version.split(".")[:2]) not in tested:
        text = f"dualtrain is not tested with Python {version} (it is with {', '.join(tested)})."
        yield Finding("note", "python", text)


def _check_framework_python(facts: Facts) -> Iterator[Finding]:
    """A framework that was copied or forced into a Python that it does not support."""
    version = facts["python"]["version"]
    for name in FRAMEWORKS:
        package = facts["packages"].get(name)
        if package and package["python"] and not satisfies(version, package["python"]):
            text = (
                f"{name} {_version(facts, name)} needs Python {package['python']}, and this is {version}."
            )
            yield Finding(
                "problem", "framework-python", text, _new_environment(facts, f"dualtrain[{name}]")
            )


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
            f"has {' and '.join(there)}: dualtrain is in another environment than they are."
        )
        yield Finding(
            "problem", "no-framework", text, f"{shlex.quote(other['executable'])} -m pip install dualtrain"
        )
    else:
        text = "No framework is installed: logs can be read, but nothing can be trained."
        yield Finding("note", "no-framework", text, _pip(facts, "dualtrain[torch]"))


def _check_files(facts: Facts) -> Iterator[Finding]:
    """A package that pip has recorded and whose files are gone, or the other way round."""
    for name in PACKAGES:
        package = facts["packages"].get(name)
        if package and package["location"] is None:
            text = f"{name} {package['version']} is recorded as installed, but its files are not there."
            yield Finding("problem", "files", text, _again(facts, _as_it_is(name, package["version"])))


def _check_requirements(facts: Facts) -> Iterator[Finding]:
    """What the packages at hand ask of each other, from their metadata."""
    python = facts["python"]["version"]
    installed: Mapping[str, str] = facts["installed"]
    present = {name for name in PACKAGES if facts["packages"].get(name)}
    asked: dict[str, list[str]] = {"dualtrain": facts["dualtrain"]["requires"]}
    asked |= {name: facts["packages"][name]["requires"] for name in PACKAGES if name in present}
    said = set()
    for asker, lines in asked.items():
        for requirement in _requirements(lines, python):
            name, extra = requirement.name, requirement.extra
            version = installed.get(name)
            if extra is not None and not (asker == "dualtrain" and _is_used(extra, name, present)):
                continue
            if name == "numpy" and "mindspore" in present and _numpy_clashes(version):
                continue  # _check_numpy says more
            who = asker + (f"[{extra}]" if extra else f" {_version(facts, asker) or ''}".rstrip())
            command = _pip(facts, f"{requirement}")
            if (name, requirement.specifier) in said:
                continue
            if version is None:
                if extra is None and name not in present:  # a copied folder has no record
                    said.add((name, requirement.specifier))
                    yield Finding(
                        "problem",
                        "requirements",
                        f"{who} needs {requirement}, which is not installed.",
                        command,
                    )
            elif not satisfies(version, requirement.specifier):
                said.add((name, requirement.specifier))
                text = f"{name} {version} is installed, but {who} needs {requirement}."
                yield Finding("problem", "requirements", text, command)


def _is_used(extra: str, name: str, present: set[str]) -> bool:
    """Say whether what an extra asks of a package counts: where the extra's own package is there."""
    return name in present and PACKAGES.get(name) == extra


def _numpy_clashes(version: str | None) -> bool:
    return version is not None and satisfies(version, ">=2")


def _check_numpy(facts: Facts) -> Iterator[Finding]:
    version, mindspore = _version(facts, "numpy"), _version(facts, "mindspore")
    if mindspore is not None and _numpy_clashes(version):
        text = (
            f"numpy {version} is installed beside MindSpore {mindspore}, whose datasets fail on scalar "
            "columns with numpy 2."
        )
        yield Finding("problem", "numpy", text, _pip(facts, "numpy<2"))


def _check_torchmetrics(facts: Facts) -> Iterator[Finding]:
    if facts["packages"].get("torch") and not facts["packages"].get("torchmetrics"):
        text = "torchmetrics is not installed: on PyTorch, metrics cannot be asked for by name."
        yield Finding("note", "torchmetrics", text, _pip(facts, _wanted(facts, "torchmetrics")))


def _activation(python: Mapping[str, Any]) -> str | None:
    """Return the command that puts an environment's commands first on PATH."""
    if python["environment"] == "conda":
        return f"conda activate {shlex.quote(python['prefix'])}"
    if python["environment"] is None:
        return None
    script = str(Path(python["scripts"], "activate"))
    return script if python["platform"] == "win32" else f"source {shlex.quote(script)}"


def _check_commands(facts: Facts) -> Iterator[Finding]:
    """``python`` and ``dualtrain``, as a shell finds them, are to be of one environment."""
    ours, python, program = facts["python"], facts["commands"]["python"], facts["commands"]["dualtrain"]
    activate = _activation(ours)
    if python and program and program.get("prefix") and program["prefix"] != python["prefix"]:
        text = (
            f"dualtrain on PATH ({program['program']}) is of another environment than python on PATH "
            f"({python['executable']})."
        )
        install = f"{shlex.quote(python['executable'])} -m pip install dualtrain"
        yield Finding("problem", "commands", text, activate or install)
    elif python and python["prefix"] != ours["prefix"]:
        has = " and ".join(f"{name} {version}" for name, version in python["packages"].items())
        text = (
            f"python on PATH is another one than this: {python['executable']} "
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
        text = f"PYTHONPATH leads to the packages of another Python than {short}: {', '.join(foreign)}."
        yield Finding("problem", "pythonpath", text, "unset PYTHONPATH")
    else:
        yield Finding("note", "pythonpath", f"PYTHONPATH is set: {value}.")


def _check_shadows(facts: Facts) -> Iterator[Finding]:
    for path in facts["shadows"]:
        moved = Path(path).parent if path.endswith("__init__.py") else Path(path)
        name = moved.stem
        text = f"{path} is imported in the place of the package {name} by programs that are started here."
        renamed = moved.with_name(f"my_{moved.name}")
        yield Finding(
            "problem", "shadows", text, f"mv {shlex.quote(str(moved))} {shlex.quote(str(renamed))}"
        )


def _check_probes(facts: Facts) -> Iterator[Finding]:
    """What the frameworks themselves say: they start, and each device that they see computes."""
    for name, probes in facts["probes"].items():
        version = _version(facts, name)
        again = _again(facts, _as_it_is(name, version))
        for probe in probes:
            told = probe["told"]
            tried = [line["device"] for line in told if "name" in line]
            results = {line["device"]: line for line in told if "works" in line}
            hung = [device for device in tried if device not in results]
            place = f"{hung[-1]} of {name} {version}" if hung else f"{name} {version}"
            if probe["target"] == "Ascend":
                continue  # _check_ascend knows what to do
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
    """Return the first line of an error: MindSpore's have twenty."""
    return error.strip().partition("\n")[0]


def _check_nvidia(facts: Facts) -> Iterator[Finding]:
    """A graphics card that PyTorch's build, its driver or a variable leaves unused."""
    cards = facts["hardware"]["nvidia"]
    told = [line for probe in facts["probes"].get("torch", ()) for line in probe["told"]]
    builds = [line for line in told if "cuda" in line]
    if not cards or not builds or any(str(line.get("device")).startswith("cuda") for line in told):
        return
    version, cuda, card = builds[0]["version"], builds[0]["cuda"], cards[0]
    hidden = facts["environ"]["CUDA_VISIBLE_DEVICES"]
    if cuda is None and builds[0].get("hip") is None:
        text = f"There is {card}, but torch {version} is a build for the CPU."
        # On Linux the package index has CUDA builds; the number without its +cpu asks for one.
        yield Finding("problem", "nvidia", text, _again(facts, _as_it_is("torch", version)))
    elif hidden is not None and hidden.strip() in ("", "-1"):
        text = f"There is {card}, but CUDA_VISIBLE_DEVICES={hidden!r} hides it from torch."
        yield Finding("note", "nvidia", text, "unset CUDA_VISIBLE_DEVICES")
    elif cuda is not None:
        why = [_first(line["error"]) for line in told if line.get("unavailable") == "cuda"]
        text = (
            f"There is {card}, but torch {version}, built for CUDA {cuda}, cannot use it"
            f"{': ' + why[0] if why else '.'} The driver may be older than CUDA {cuda} asks for: "
            "update it, or take an older torch."
        )
        yield Finding("problem", "nvidia", text, _pip(facts, f"torch<{'.'.join(version.split('.')[:2])}"))


def _check_ascend(facts: Facts) -> Iterator[Finding]:
    """An Ascend device that MindSpore cannot load its plugin for."""
    devices = facts["hardware"]["ascend"]
    for probe in facts["probes"].get("mindspore", ()):
        if not devices or probe["target"] != "Ascend":
            continue
        if any(line.get("works") for line in probe["told"]):
            continue
        errors = [line["error"] for line in probe["told"] if line.get("error")]
        if errors:
            # The line about the library says more than the first, which is the same for every cause.
            lines = [
                line for line in errors[0].splitlines() if "dynamic library" in line and "failed" in line
            ]
            why = lines[0].strip() if lines else _first(errors[0])
        elif probe["status"] is None:
            why = f"it gave no answer within {probe['timeout']:g} seconds."
        else:
            ended = probe["status"]
            why = f"its process ended with {_signal(-ended) if ended < 0 else f'exit status {ended}'}."
        text = f"There is {devices[0]}, but MindSpore {_version(facts, 'mindspore')} cannot use it: {why}"
        if facts["hardware"]["cann"] is None:
            text += " CANN's variables are not set."
            yield Finding("problem", "ascend", text, "source /usr/local/Ascend/ascend-toolkit/set_env.sh")
        else:
            text += f" Its version has to fit the CANN in {facts['hardware']['cann']}."
            yield Finding("problem", "ascend", text, _again(facts, _wanted(facts, "mindspore")))


def _check_launch_blocking(facts: Facts) -> Iterator[Finding]:
    works = {
        line["device"]
        for p in facts["probes"].get("mindspore", ())
        for line in p["told"]
        if line.get("works")
    }
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


# Telling.


def report(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """Return the lines that ``dualtrain doctor`` prints."""
    python = facts["python"]
    rows = [
        (
            "Python",
            python["version"],
            f"{python['executable']} ({python['environment'] or 'no environment'})",
        ),
        ("dualtrain", facts["dualtrain"]["version"], facts["dualtrain"]["location"]),
    ]
    for name in PACKAGES:
        version = _version(facts, name)
        rows.append((name, version or "-", _devices(facts, name) if version else _how(facts, name)))
    complete = _extras(facts)
    if complete:
        rows.append(("extras", "", ", ".join(complete)))
    hardware = [*facts["hardware"]["nvidia"], *facts["hardware"]["ascend"]]
    rows.append(("accelerators", "", ", ".join(hardware) or "none"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]
    for finding in findings:
        lines += ["", f"{finding.level}: {finding.text}"]
        if finding.command:
            lines.append(f"    {finding.command}")
    problems = sum(finding.level == "problem" for finding in findings)
    verdict = "Nothing is wrong." if not problems else f"{problems} problem{'s' if problems > 1 else ''}."
    return [*lines, "", verdict]


def _devices(facts: Facts, name: str) -> str:
    """Say which devices a framework can use."""
    told = [line for probe in facts["probes"].get(name, ()) for line in probe["told"]]
    names = {line["device"]: line["name"] for line in told if "name" in line}
    works = {line["device"]: line["works"] for line in told if "works" in line}
    shown = []
    for device, title in names.items():
        shown.append(
            f"{device}{f' ({title})' if title else ''} {'works' if works.get(device) else 'does not work'}"
        )
    return ", ".join(shown)


def _how(facts: Facts, name: str) -> str:
    extra = PACKAGES[name]
    offered = facts["dualtrain"]["extras"]
    what = name if extra is None or (offered and extra not in offered) else f"dualtrain[{extra}]"
    return f"not installed (pip install '{what}')"


def _extras(facts: Facts) -> list[str]:
    """Return the extras of dualtrain whose packages are all there."""
    needs: dict[str, list[str]] = {}
    for requirement in _requirements(facts["dualtrain"]["requires"], facts["python"]["version"]):
        if requirement.extra is not None:
            needs.setdefault(requirement.extra, []).append(requirement.name)
    return [extra for extra, names in needs.items() if all(name in facts["installed"] for name in names)]


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return facts and findings as JSON."""
    return json.dumps({"facts": facts, "findings": [f._asdict() for f in findings]}, indent=2)
