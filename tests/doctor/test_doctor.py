"""``dualtrain doctor``: each clash exactly, on facts that are written down, and real runs."""

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.markers import default_environment

import dualtrain
from dualtrain import doctor
from dualtrain.doctor import Finding, process
from dualtrain.doctor import facts as gathering
from dualtrain.doctor.requirements import requirements, satisfies, short

ROOT = Path(dualtrain.__file__).parent.parent

# Judging.


def package(name, version, requires=(), python=None):
    location = f"/env/site-packages/{name}"
    return {
        "version": version,
        "python": python,
        "requires": list(requires),
        "location": location,
        "without_pythonpath": location,
    }


def probe(*told, target="", status=0, errors=""):
    return {"target": target, "timeout": 120.0, "status": status, "errors": errors, "told": list(told)}


def device(name, error=None, title=""):
    return {"device": name, "name": title}, {"device": name, "works": error is None, "error": error}


TORCH = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
MINDSPORE = {"version": "2.10.0"}
PYTHON = {
    "executable": "/env/bin/python",
    "prefix": "/env",
    "version": "3.11.7",
    "program": "/env/bin/python",
    "packages": {"dualtrain": "0.1.0", "torch": "2.13.0+cpu", "mindspore": "2.10.0"},
}
OTHER = {
    **PYTHON,
    "executable": "/other/bin/python",
    "prefix": "/other",
    "program": "/other/bin/python",
    "version": "3.12.1",
    "packages": {},
}


def python_markers(version):
    return {"python_full_version": version, "python_version": version.rpartition(".")[0]}


@pytest.fixture
def facts():
    """Facts in which nothing is wrong: both frameworks on a CPU."""
    packages = {
        "numpy": package("numpy", "1.26.4", python=">=3.9"),
        "torch": package(
            "torch", "2.13.0+cpu", ["filelock", 'optree>=0.13.0; extra == "optree"'], ">=3.10"
        ),
        "torchmetrics": package("torchmetrics", "1.9.0", ["numpy>1.20.0", "torch>=2.0.0"]),
        "mindspore": package("mindspore", "2.10.0", ["numpy>=1.25.0", "protobuf>=7.34.1"], ">=3.9,<3.13"),
        "optuna": None,
        "matplotlib": package("matplotlib", "3.11.2", ["numpy>=1.25"]),
    }
    return {
        "python": {
            "version": "3.11.7",
            "executable": "/env/bin/python",
            "prefix": "/env",
            "environment": "venv",
            "scripts": "/env/bin",
            "pip": True,
            "platform": "linux",
        },
        "dualtrain": {
            "version": "0.1.0",
            "location": "/env/site-packages/dualtrain",
            "recorded": "0.1.0",
            "python": ">=3.10",
            "requires": [
                "numpy>=1.25",
                'mindspore<2.11,>=2.7; (python_version < "3.13") and extra == "mindspore"',
                'numpy<2; extra == "mindspore"',
                'optuna<6,>=4; extra == "optuna"',
                'matplotlib>=3.8; extra == "plot"',
                'torch>=2.6; extra == "torch"',
                'torchmetrics>=1.4; extra == "torch"',
            ],
            "extras": ["mindspore", "optuna", "plot", "torch"],
            "classifiers": [
                "Programming Language :: Python :: 3.10",
                "Programming Language :: Python :: 3.11",
                "Programming Language :: Python :: 3.12",
            ],
        },
        "packages": {**packages, "dualtrain": package("dualtrain", "0.1.0")},
        "markers": {**default_environment(), **python_markers("3.11.7")},
        "installed": {
            **{name: known["version"] for name, known in packages.items() if known},
            "dualtrain": "0.1.0",
            "filelock": "4.3.1",
            "protobuf": "7.36.2",
        },
        "environ": {"PYTHONPATH": None, "CUDA_VISIBLE_DEVICES": None},
        "hardware": {"nvidia": [], "ascend": [], "cann": None},
        "commands": {
            "python": copy.deepcopy(PYTHON),
            "dualtrain": {**copy.deepcopy(PYTHON), "program": "/env/bin/dualtrain"},
        },
        "shadows": [],
        "probes": {
            "torch": [probe(TORCH, *device("cpu"))],
            "mindspore": [probe(MINDSPORE, *device("CPU"), target="CPU")],
        },
    }


def install(facts, name, version, **more):
    """Put another version of a package into the facts."""
    facts["installed"][name] = version
    if name in doctor.PACKAGES:
        known = facts["packages"][name] or package(name, version)
        facts["packages"][name] = {**known, "version": version, **more}


def use_python(facts, version):
    facts["python"]["version"] = version
    facts["markers"] |= python_markers(version)


def remove(facts, *names):
    for name in names:
        facts["packages"][name] = None
        facts["installed"].pop(name, None)
        facts["probes"].pop(name, None)


def problems(facts):
    return [finding for finding in doctor.check(facts) if finding.level == "problem"]


def notes(facts):
    return [finding for finding in doctor.check(facts) if finding.level == "note"]


def problem(check, text, command):
    return Finding("problem", check, text, command)


SLOW_PYNATIVE = Finding(
    "note",
    "launch-blocking",
    "In PYNATIVE mode MindSpore trains 5 to 10 times faster on a CPU after "
    "mindspore.runtime.launch_blocking(); GRAPH mode is faster still.",
)


def test_where_nothing_is_wrong_there_is_a_note_on_speed(facts):
    assert doctor.check(facts) == [SLOW_PYNATIVE]


def test_facts_are_judged_and_not_changed(facts):
    before = copy.deepcopy(facts)
    doctor.report(facts, doctor.check(facts))
    assert facts == before


@pytest.mark.parametrize("version", ["2.0.0", "2.4.6"])
def test_numpy_2_beside_mindspore(facts, version):
    install(facts, "numpy", version)
    facts["packages"]["mindspore"]["requires"] = ["numpy<2"]  # as in 2.9: said once, not twice
    assert problems(facts) == [
        problem(
            "numpy",
            f"numpy {version} is installed beside MindSpore 2.10.0, whose datasets fail on scalar "
            "columns with numpy 2.",
            "/env/bin/python -m pip install 'numpy<2'",
        )
    ]


def test_numpy_2_beside_torch_alone_is_right(facts):
    install(facts, "numpy", "2.4.6")
    remove(facts, "mindspore")
    assert doctor.check(facts) == []


@pytest.mark.parametrize(
    ("name", "version", "text", "wanted"),
    [
        ("protobuf", "6.33.0", "mindspore 2.10.0 needs protobuf>=7.34.1", "protobuf>=7.34.1"),
        ("protobuf", "7.34.1rc1", "mindspore 2.10.0 needs protobuf>=7.34.1", "protobuf>=7.34.1"),
        ("torch", "2.5.1", "dualtrain[torch] needs torch>=2.6", "torch>=2.6"),
        ("torchmetrics", "1.3.2", "dualtrain[torch] needs torchmetrics>=1.4", "torchmetrics>=1.4"),
        ("mindspore", "2.6.0", "dualtrain[mindspore] needs mindspore<2.11,>=2.7", "mindspore<2.11,>=2.7"),
        ("mindspore", "2.11.0", "dualtrain[mindspore] needs mindspore<2.11,>=2.7", "mindspore<2.11,>=2.7"),
        ("matplotlib", "3.7.5", "dualtrain[plot] needs matplotlib>=3.8", "matplotlib>=3.8"),
        ("optuna", "3.6.2", "dualtrain[optuna] needs optuna<6,>=4", "optuna<6,>=4"),
        ("numpy", "1.24.4", "dualtrain 0.1.0 needs numpy>=1.25", "numpy>=1.25"),
    ],
)
def test_a_version_outside_what_is_asked_for(facts, name, version, text, wanted):
    install(facts, name, version)
    if name == "numpy":
        remove(facts, "mindspore", "matplotlib")  # they ask for the same
    found = problem(
        "requirements",
        f"{name} {version} is installed, but {text}.",
        f"/env/bin/python -m pip install '{wanted}'",
    )
    assert problems(facts) == [found]


def test_what_a_framework_needs_and_is_not_there(facts):
    del facts["installed"]["filelock"]
    assert problems(facts) == [
        problem(
            "requirements",
            "torch 2.13.0+cpu needs filelock, which is not installed.",
            "/env/bin/python -m pip install filelock",
        )
    ]


def test_without_pip_the_commands_are_uvs(facts):
    facts["python"]["pip"] = False
    install(facts, "protobuf", "6.33.0")
    assert problems(facts)[0].command == "uv pip install --python /env/bin/python 'protobuf>=7.34.1'"


def test_a_path_with_a_blank_is_quoted(facts):
    facts["python"]["executable"] = "/my env/bin/python"
    install(facts, "protobuf", "6.33.0")
    assert problems(facts)[0].command == "'/my env/bin/python' -m pip install 'protobuf>=7.34.1'"


def test_a_python_that_is_too_old(facts):
    use_python(facts, "3.9.18")
    remove(facts, "torch", "torchmetrics", "mindspore")
    assert problems(facts) == [
        problem(
            "python",
            "Python 3.9.18 is not supported: dualtrain needs >=3.10.",
            "python3.12 -m venv .venv && .venv/bin/python -m pip install dualtrain",
        )
    ]


def test_a_python_that_mindspore_does_not_support(facts):
    use_python(facts, "3.13.0")
    assert problems(facts) == [
        problem(
            "framework-python",
            "mindspore 2.10.0 needs Python >=3.9,<3.13, and this is 3.13.0.",
            "python3.12 -m venv .venv && .venv/bin/python -m pip install 'dualtrain[mindspore]'",
        )
    ]
    assert notes(facts)[0] == Finding(
        "note", "python", "dualtrain is not tested with Python 3.13.0 (it is with 3.10, 3.11, 3.12)."
    )


def test_no_framework_is_a_note(facts):
    remove(facts, "torch", "torchmetrics", "mindspore")
    facts["commands"]["python"]["packages"] = {"dualtrain": "0.1.0"}
    assert doctor.check(facts) == [
        Finding(
            "note",
            "no-framework",
            "No framework is installed: logs can be read, but nothing can be trained.",
            "/env/bin/python -m pip install 'dualtrain[torch]'",
        )
    ]


def test_frameworks_that_are_in_another_environment(facts):
    remove(facts, "torch", "torchmetrics", "mindspore")
    facts["commands"] = {"python": {**OTHER, "packages": {"torch": "2.13.0"}}, "dualtrain": None}
    assert problems(facts) == [
        problem(
            "no-framework",
            "No framework is installed for /env/bin/python, but /other/bin/python has torch 2.13.0: "
            "dualtrain is in a different environment.",
            "/other/bin/python -m pip install dualtrain",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "source /env/bin/activate"),
        ({"scripts": "/env/Scripts", "platform": "win32"}, "/env/Scripts/activate"),
        ({"environment": "conda"}, "conda activate /env"),
        ({"environment": None}, "/other/bin/python -m pip install dualtrain"),
    ],
)
def test_python_and_dualtrain_on_path_are_of_two_environments(facts, changes, command):
    facts["python"] |= changes
    facts["commands"]["python"] = OTHER
    assert problems(facts) == [
        problem(
            "commands",
            "dualtrain on PATH (/env/bin/dualtrain) is in a different environment from python on PATH "
            "(/other/bin/python).",
            command,
        )
    ]


def test_another_python_on_path_alone_is_a_note(facts):
    facts["commands"] = {"python": OTHER, "dualtrain": None}
    text = (
        "python on PATH is not this interpreter: /other/bin/python "
        "(Python 3.12.1, with no dualtrain, torch or mindspore)."
    )
    assert doctor.check(facts) == [
        Finding("note", "commands", text, "source /env/bin/activate"),
        SLOW_PYNATIVE,
    ]


def test_no_python_on_path_is_nothing_to_say(facts):
    facts["commands"] = {"python": None, "dualtrain": None}
    assert doctor.check(facts) == [SLOW_PYNATIVE]


def test_a_package_that_pythonpath_puts_before_the_environments(facts):
    facts["environ"]["PYTHONPATH"] = "/old"
    facts["packages"]["torch"]["location"] = "/old/torch"
    assert problems(facts) == [
        problem(
            "pythonpath",
            "PYTHONPATH gives torch from /old/torch instead of /env/site-packages/torch.",
            "unset PYTHONPATH",
        )
    ]


def test_a_pythonpath_of_another_python(facts):
    facts["environ"]["PYTHONPATH"] = os.pathsep.join(["/src", "/usr/lib/python3.9/site-packages"])
    assert problems(facts) == [
        problem(
            "pythonpath",
            "PYTHONPATH has packages of a Python other than 3.11: /usr/lib/python3.9/site-packages.",
            "unset PYTHONPATH",
        )
    ]


def test_a_pythonpath_that_changes_nothing_is_a_note(facts):
    facts["environ"]["PYTHONPATH"] = "/usr/lib/python3.11/site-packages"
    assert doctor.check(facts) == [
        Finding("note", "pythonpath", "PYTHONPATH is set: /usr/lib/python3.11/site-packages."),
        SLOW_PYNATIVE,
    ]


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/here/torch.py", "mv /here/torch.py /here/my_torch.py"),
        ("/here/torch/__init__.py", "mv /here/torch /here/my_torch"),
    ],
)
def test_a_file_that_is_taken_for_a_package(facts, path, command):
    facts["shadows"] = [path]
    text = f"{path} is imported instead of the package torch by programs started in this directory."
    assert problems(facts) == [problem("shadows", text, command)]


def test_a_package_whose_files_are_gone(facts):
    facts["packages"]["torchmetrics"]["location"] = None
    assert problems(facts) == [
        problem(
            "files",
            "torchmetrics 1.9.0 is recorded as installed, but its files are not there.",
            "/env/bin/python -m pip install --force-reinstall torchmetrics==1.9.0",
        )
    ]


MINDSPORE_AGAIN = "/env/bin/python -m pip install --force-reinstall mindspore==2.10.0 'numpy<2'"


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (
            probe(MINDSPORE, device("CPU")[0], status=None),
            "CPU of mindspore 2.10.0 gave no answer within 120 seconds.",
        ),
        (probe(status=None), "mindspore 2.10.0 gave no answer within 120 seconds."),
        (probe(MINDSPORE, device("CPU")[0], status=-11), "CPU of mindspore 2.10.0 crashed: SIGSEGV."),
        (probe(status=-200), "mindspore 2.10.0 crashed: signal 200."),
        (
            probe(status=1, errors="Traceback ...\nImportError: libgomp.so.1: cannot open shared object\n"),
            "mindspore 2.10.0 cannot be used: ImportError: libgomp.so.1: cannot open shared object",
        ),
        (probe(status=3), "mindspore 2.10.0 cannot be used: exit status 3"),
        (
            probe(MINDSPORE, *device("CPU", "RuntimeError: no kernel\n\n- C++ call stack")),
            "mindspore 2.10.0 sees CPU and cannot use it: RuntimeError: no kernel",
        ),
    ],
)
def test_a_framework_that_does_not_work(facts, ended, text):
    facts["probes"]["mindspore"] = [{**ended, "target": "CPU"}]
    assert doctor.check(facts) == [problem("probe", text, MINDSPORE_AGAIN)]


def test_a_framework_without_a_record_tells_its_version_itself(facts):
    facts["packages"]["torch"] |= {"version": None, "requires": []}
    facts["probes"]["torch"] = [probe(TORCH, *device("cpu", "RuntimeError: no"))]
    assert problems(facts) == [
        problem(
            "probe",
            "torch 2.13.0+cpu sees cpu and cannot use it: RuntimeError: no",
            "/env/bin/python -m pip install --force-reinstall torch==2.13.0",
        )
    ]


def cuda_torch(*more, cuda="12.6"):
    return [probe({"version": "2.13.0", "cuda": cuda, "hip": None}, *device("cpu"), *more)]


def test_a_graphics_card_and_a_build_for_the_cpu(facts):
    facts["hardware"]["nvidia"] = ["NVIDIA H200"]
    assert problems(facts) == [
        problem(
            "nvidia",
            "There is NVIDIA H200, but torch 2.13.0+cpu is a build for the CPU.",
            "/env/bin/python -m pip install --force-reinstall torch==2.13.0",
        )
    ]


def test_a_graphics_card_that_the_driver_does_not_give(facts):
    facts["hardware"]["nvidia"] = ["/dev/nvidia0"]
    error = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
    facts["probes"]["torch"] = cuda_torch({"unavailable": "cuda", "error": error})
    assert problems(facts) == [
        problem(
            "nvidia",
            f"There is /dev/nvidia0, but torch 2.13.0, built for CUDA 12.6, cannot use it: {error} "
            "The driver may be too old for CUDA 12.6: update it, or install an older torch.",
            "/env/bin/python -m pip install 'torch<2.13'",
        )
    ]


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_graphics_card_that_is_hidden_is_a_note(facts, value):
    facts["hardware"]["nvidia"] = ["/dev/nvidia0"]
    facts["environ"]["CUDA_VISIBLE_DEVICES"] = value
    facts["probes"]["torch"] = cuda_torch()
    text = f"There is /dev/nvidia0, but CUDA_VISIBLE_DEVICES={value!r} hides it from torch."
    assert doctor.check(facts) == [
        Finding("note", "nvidia", text, "unset CUDA_VISIBLE_DEVICES"),
        SLOW_PYNATIVE,
    ]


def test_a_graphics_card_that_works(facts):
    facts["hardware"]["nvidia"] = ["NVIDIA H200"]
    facts["probes"]["torch"] = cuda_torch(*device("cuda:0", title="NVIDIA H200"))
    assert doctor.check(facts) == [SLOW_PYNATIVE]


def test_a_graphics_card_that_is_seen_and_fails_is_told_once(facts):
    facts["hardware"]["nvidia"] = ["NVIDIA H200"]
    facts["probes"]["torch"] = cuda_torch(*device("cuda:0", "RuntimeError: no kernel image is available"))
    assert [finding.check for finding in problems(facts)] == ["probe"]


def test_a_graphics_card_without_torch_is_nothing_to_say(facts):
    facts["hardware"]["nvidia"] = ["NVIDIA H200"]
    remove(facts, "torch", "torchmetrics")
    assert doctor.check(facts) == [SLOW_PYNATIVE]


PLUGIN = "Load dynamic library: libmindspore_ascend.so.2 failed. libge_runner.so: cannot open it"
NO_PLUGIN = (
    f"RuntimeError: Unsupported device target Ascend.\n\n- Device load error message:\n{PLUGIN}\n- more"
)


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (probe(MINDSPORE, *device("Ascend", NO_PLUGIN)), PLUGIN),
        (probe(MINDSPORE, *device("Ascend", "RuntimeError: busy\nmore")), "RuntimeError: busy"),
        (probe(MINDSPORE, device("Ascend")[0], status=None), "it gave no answer within 120 seconds."),
        (probe(MINDSPORE, device("Ascend")[0], status=-6), "its process ended with SIGABRT."),
        (probe(status=1, errors="ImportError"), "its process ended with exit status 1."),
    ],
)
def test_an_ascend_device_that_mindspore_cannot_use(facts, ended, why):
    facts["hardware"]["ascend"] = ["/dev/davinci0", "/dev/davinci1"]
    facts["probes"]["mindspore"].append({**ended, "target": "Ascend"})
    text = f"There is /dev/davinci0, but MindSpore 2.10.0 cannot use it: {why}"
    assert problems(facts) == [
        problem(
            "ascend",
            f"{text} CANN's variables are not set.",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    ]
    facts["hardware"]["cann"] = "/cann/8.1"
    assert problems(facts) == [
        problem(
            "ascend",
            f"{text} Its version has to match the CANN in /cann/8.1.",
            "/env/bin/python -m pip install --force-reinstall 'mindspore<2.11,>=2.7' 'numpy<2'",
        )
    ]


def test_an_ascend_device_that_works(facts):
    facts["hardware"]["ascend"] = ["/dev/davinci0"]
    facts["probes"]["mindspore"].append(probe(MINDSPORE, *device("Ascend"), target="Ascend"))
    assert doctor.check(facts) == []


def test_torch_without_torchmetrics_is_a_note(facts):
    remove(facts, "torchmetrics")
    assert doctor.check(facts)[0] == Finding(
        "note",
        "torchmetrics",
        "torchmetrics is not installed: on PyTorch, metrics cannot be given by name.",
        "/env/bin/python -m pip install 'torchmetrics>=1.4'",
    )


def test_problems_come_before_notes(facts):
    use_python(facts, "3.13.0")
    install(facts, "numpy", "2.4.6")
    assert [(f.level, f.check) for f in doctor.check(facts)] == [
        ("problem", "framework-python"),
        ("problem", "numpy"),
        ("note", "python"),
        ("note", "launch-blocking"),
    ]


def test_a_checkout_that_is_not_installed_is_judged_by_what_is_known(facts):
    facts["dualtrain"] |= {
        "recorded": None,
        "python": None,
        "requires": [],
        "extras": [],
        "classifiers": [],
    }
    install(facts, "numpy", "2.4.6")
    assert [finding.check for finding in problems(facts)] == ["numpy"]


# Versions.


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.9", ">=2.10", False),
        ("2.6.0rc1", ">=2.6", False),
        ("2.6.1rc1", ">=2.6", True),  # a pre-release counts, where pip would need --pre to take it
        ("2.11.0rc1", "<2.11", False),
        ("unknown", ">=2.6", True),
        ("1.0", "", True),
    ],
)
def test_a_version_is_in_a_range(version, specifier, expected):
    assert satisfies(version, specifier) is expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("numpy", [("numpy", None)]),
        ("Typing_Extensions (>=4.10, <5)", [("typing-extensions<5,>=4.10", None)]),
        ("ray[tune]>=2; extra == 'ray'", [("ray>=2", "ray")]),
        ("ray[tune]>=2; extra == 'other'", []),
        ('tomli>=2; python_version < "3.11"', []),
        ('tomli>=2; python_version < "3.12"', [("tomli>=2", None)]),
        ('a>=2; (python_version < "3.12") and extra == "ray"', [("a>=2", "ray")]),
        ('a>=2; python_version < "3.11" and extra == "ray"', []),
        ('triton==3.4; platform_system == "Linux"', [("triton==3.4", None)]),
        ('triton==3.4; platform_system == "Darwin"', []),
        ("pytz (>2011k)", []),  # metadata of 2018
    ],
)
def test_a_requirement_is_read_where_it_applies(facts, line, expected):
    facts["markers"]["platform_system"] = "Linux"
    assert [(short(asked), extra) for asked, extra in requirements(facts, [line], ["ray"])] == expected


# Telling.


def test_the_report_is_a_table_and_a_verdict(facts):
    assert doctor.report(facts, []) == [
        "Python        3.11.7      /env/bin/python (venv)",
        "dualtrain     0.1.0       /env/site-packages/dualtrain",
        "numpy         1.26.4",
        "torch         2.13.0+cpu  cpu works",
        "torchmetrics  1.9.0",
        "mindspore     2.10.0      CPU works",
        "optuna        -           not installed (pip install 'dualtrain[optuna]')",
        "matplotlib    3.11.2",
        "extras                    mindspore, plot, torch",
        "accelerators              none",
        "",
        "Nothing is wrong.",
    ]


def test_the_report_tells_findings_with_their_commands(facts):
    found = [
        problem("a", "This is so.", "mend it"),
        problem("b", "That too.", None),
        Finding("note", "c", "Also."),
    ]
    assert doctor.report(facts, found)[-9:] == [
        "",
        "problem: This is so.",
        "    mend it",
        "",
        "problem: That too.",
        "",
        "note: Also.",
        "",
        "2 problems.",
    ]
    assert doctor.report(facts, found[1:])[-1] == "1 problem."


def test_the_report_names_devices_and_what_an_extra_would_bring(facts):
    remove(facts, "mindspore", "numpy")
    facts["hardware"]["nvidia"] = ["NVIDIA H200", "NVIDIA H200"]
    facts["dualtrain"]["extras"].remove("optuna")
    cards = [*device("cuda:0", title="NVIDIA H200"), *device("cuda:1", "RuntimeError: no", "NVIDIA H200")]
    facts["probes"]["torch"] = cuda_torch(*cards)
    rows = {line.split()[0]: line for line in doctor.report(facts, []) if line}
    assert rows["torch"].endswith(
        "cpu works, cuda:0 (NVIDIA H200) works, cuda:1 (NVIDIA H200) does not work"
    )
    assert rows["mindspore"].endswith("-           not installed (pip install 'dualtrain[mindspore]')")
    assert rows["numpy"].endswith("not installed (pip install 'numpy')")
    assert rows["optuna"].endswith("not installed (pip install 'optuna')")
    assert rows["accelerators"].endswith("  NVIDIA H200, NVIDIA H200")
    assert rows["extras"].endswith("  plot, torch")


# Real runs, as from a shell in which this environment is the active one.

RUN = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
    "from dualtrain.cli import main; status = main(sys.argv[1:]); "
    "assert not {'torch', 'mindspore', 'numpy'} & set(sys.modules); sys.exit(status)"
)


def dualtrain_doctor(*arguments, **environ):
    """Run the command; return its exit status and output."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), "/usr/bin", "/bin"])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), "doctor", *arguments],
        env={**clean, "PATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """What ``dualtrain doctor --json`` says of the environment that runs the tests."""
    directory = tmp_path_factory.mktemp("here")
    before = Path.cwd()
    os.chdir(directory)
    try:
        status, output = dualtrain_doctor("--json")
    finally:
        os.chdir(before)
    assert list(directory.iterdir()) == []  # MindSpore drops files where it runs
    return status, json.loads(output)


def test_nothing_is_wrong_where_the_tests_run(examined):
    status, told = examined
    assert [finding for finding in told["findings"] if finding["level"] == "problem"] == []
    assert status == 0


def test_it_knows_the_interpreter_and_the_package(examined):
    python, ours = examined[1]["facts"]["python"], examined[1]["facts"]["dualtrain"]
    assert python["version"] == ".".join(map(str, sys.version_info[:3]))
    assert Path(python["executable"]).samefile(sys.executable)
    assert (python["environment"] == "venv") is (sys.prefix != sys.base_prefix)
    assert (ours["version"], ours["location"]) == (dualtrain.__version__, str(ROOT / "dualtrain"))
    assert {"torch", "mindspore", "plot"} <= set(ours["extras"])
    assert examined[1]["facts"]["commands"]["python"]["prefix"] == python["prefix"]
    assert examined[1]["facts"]["commands"]["dualtrain"]["prefix"] == python["prefix"]


@pytest.mark.parametrize("name", doctor.PACKAGES)
def test_a_package_is_known_where_it_can_be_imported(examined, name):
    known = examined[1]["facts"]["packages"][name]
    assert (known is None) is (importlib.util.find_spec(name) is None)


@pytest.mark.parametrize("relative", [True, False])
def test_a_file_in_the_working_directory_is_no_package(monkeypatch, relative):
    """``python -c`` and ``python -m`` put that directory in front; a script of another one does not."""
    Path("no_such_package.py").write_text("")
    monkeypatch.setattr(sys, "path", ["" if relative else os.getcwd(), *sys.path])
    assert gathering._package("no_such_package", gathering._without_pythonpath({})) is None


def test_what_a_framework_writes_is_not_left_here():
    ended = process.run([sys.executable, "-c", "open('dropped', 'w').close()"], 120.0, os.environ)
    assert (ended["status"], os.listdir()) == (0, [])


@pytest.mark.torch
def test_torch_works_here(examined):
    import torch

    facts = examined[1]["facts"]
    (ended,) = facts["probes"]["torch"]
    assert facts["packages"]["torch"]["version"] == torch.__version__ == ended["told"][0]["version"]
    assert ended["status"] == 0
    assert {"device": "cpu", "works": True, "error": None} in ended["told"]
    assert sum("works" in line for line in ended["told"]) == 1 + torch.cuda.device_count()


@pytest.mark.mindspore
def test_mindspore_works_here(examined):
    import mindspore

    facts = examined[1]["facts"]
    ended = facts["probes"]["mindspore"][0]
    assert facts["packages"]["mindspore"]["version"] == mindspore.__version__
    assert ended["status"] == 0
    assert ended["told"] == [
        {"version": mindspore.__version__},
        {"device": "CPU", "name": ""},
        {"device": "CPU", "works": True, "error": None},
    ]


@pytest.mark.mindspore
def test_mindspore_says_why_a_device_is_not_to_be_had(tmp_path):
    if list(Path("/dev").glob("davinci*")):
        pytest.skip("there is an Ascend device")
    ended = gathering._probe("mindspore", "Ascend", 120.0, os.environ)
    assert (ended["status"], ended["target"]) == (0, "Ascend")
    assert ended["told"][-1]["works"] is False
    assert "Ascend" in ended["told"][-1]["error"]


def broken(directory, name, source):
    """Put a package into a directory that ends in some way when it is imported."""
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(source)
    return {"PYTHONPATH": str(directory), "PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os; os._exit(3)", 3),
        ("raise ImportError('libnone.so: cannot open shared object file')", 1),
        ("import signal; signal.pause()", None),
    ],
)
@pytest.mark.parametrize("name", doctor.FRAMEWORKS)
def test_a_framework_that_ends_its_process_ends_no_other(tmp_path, name, source, status):
    environ = broken(tmp_path, name, source)
    ended = gathering._probe(name, "CPU", 2.0 if status is None else 120.0, environ)
    assert (ended["status"], ended["told"]) == (status, [])
    if status == 1:
        assert ended["errors"].strip().endswith("ImportError: libnone.so: cannot open shared object file")


def test_what_a_framework_prints_is_no_finding(tmp_path):
    source = "print('[WARNING] dualtrain: {}'); print('dualtrain: cut sho'); raise SystemExit(0)"
    ended = gathering._probe("torch", "", 120.0, broken(tmp_path, "torch", source))
    assert (ended["status"], ended["told"]) == (0, [])
    assert "WARNING" in ended["output"]


def test_a_process_that_is_ended_takes_its_children_along():
    child = "import signal; signal.pause()"
    source = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"print(1, flush=True); {child}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout.readline() == b"1\n"
        process.end(parent)
        assert parent.stdout.read() == b""  # it would not end while a child held the pipe
        assert parent.returncode == -signal.SIGKILL


def test_a_problem_is_exit_status_1_and_is_printed(tmp_path):
    Path("torch.py").write_text("")
    status, output = dualtrain_doctor("--timeout", "0.001")  # no framework answers so fast
    assert status == 1
    here = os.path.realpath(tmp_path)
    lines = output.splitlines()
    what = "is imported instead of the package torch by programs started in this directory."
    assert f"problem: {here}/torch.py {what}" in lines
    assert f"    mv {here}/torch.py {here}/my_torch.py" in lines
    assert lines[0].split()[:2] == ["Python", ".".join(map(str, sys.version_info[:3]))]
    assert lines[-1].endswith((" problem.", " problems."))


def test_a_pythonpath_is_told_from_the_environments_own(tmp_path):
    """The package that PYTHONPATH gives is the one that is imported, and the other one is named."""
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("")
    status, output = dualtrain_doctor("--json", "--timeout", "0.001", PYTHONPATH=str(tmp_path))
    told = json.loads(output)
    (found,) = [finding for finding in told["findings"] if finding["check"] == "pythonpath"]
    own = importlib.util.find_spec("matplotlib").submodule_search_locations[0]
    assert status == 1
    assert found["text"] == f"PYTHONPATH gives matplotlib from {tmp_path / 'matplotlib'} instead of {own}."


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (b"#!/env/bin/python\n# -*- coding: utf-8 -*-\n", "/env/bin/python"),
        (b"#!/env/bin/python3.11 -sE\n", "/env/bin/python3.11"),
        (b"#!/bin/sh\n'''exec' '/my env/bin/python' \"$0\" \"$@\"\n", "/my env/bin/python"),
        (b'#!/bin/sh\n\'\'\'exec\' "/my env/bin/python" "$0" "$@"\n', "/my env/bin/python"),
        (b"MZ\x90\x00", None),
    ],
)
def test_the_python_of_a_command_is_found(tmp_path, script, expected):
    program = tmp_path / "dualtrain"
    program.write_bytes(script)
    assert gathering._interpreter(str(program)) == expected


def test_the_python_of_a_command_that_is_no_script_is_beside_it(tmp_path):
    (tmp_path / "dualtrain").write_bytes(b"MZ\x90\x00")
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    assert gathering._interpreter(str(tmp_path / "dualtrain")) == str(tmp_path / "python")
