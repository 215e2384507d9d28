"""Type checkers and ``help`` see the public signatures, and the README's callbacks pass mypy."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT

import dualtrain as dt

CALLS = """
from typing import Any

import dualtrain as dt
from dualtrain.callbacks import StepLogger


def correct(net: Any, optimizer: Any, data: Any) -> None:
    model = dt.Model(net, None, optimizer, {"acc"}, clip_norm=1.0, accumulate_steps=2, amp="bf16")
    model.fit(2, data, data, callbacks=[StepLogger(), dt.callbacks.EarlyStopping()], max_steps=3)
    model.train(2, data, StepLogger("log.jsonl", 1), limit_batches=2)
    results: dict[str, Any] = model.eval(data)
    with dt.Run([StepLogger()], network=net, optimizer=optimizer, epochs=3) as run:
        for _ in run.epochs():
            for batch in run.batches(data):
                run.outputs = net(batch)
    print(results, model.predict(data))


def wrong(net: Any, data: Any, model: dt.Model, run: dt.Run, run_context: dt.RunContext) -> None:
    dt.Model(net, clip_nrom=1)  # call-arg
    dt.Model(net, accumulate_steps="2")  # arg-type
    dt.Model()  # call-arg
    dt.Modle(net)  # attr-defined
    model.fitt()  # attr-defined
    model.fit(2, data, callback=[])  # call-arg
    model.train(data)  # call-arg
    StepLogger(log_intervall=1)  # call-arg
    dt.callbacks.StepLoger()  # attr-defined
    run.outptus = 1  # attr-defined
    run_context.request_stopp()  # attr-defined
    run_context.loss = 1.0  # misc
"""
ANNOTATIONS = {"run_context": "dt.RunContext", "loss": "float"}
"""Of the parameters of the README's callbacks."""


def readme_callbacks() -> list[str]:
    """Return the classes of the README that have events, with annotations."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    classes = re.findall(r"^class .*?(?=^\S)", "#\n".join([*blocks, ""]), re.DOTALL | re.MULTILINE)
    callbacks = dict.fromkeys(source for source in classes if "(self, run_context" in source)
    return [annotated(source) for source in callbacks]


def annotated(source: str) -> str:
    for name, annotation in ANNOTATIONS.items():
        source = re.sub(rf"(def \w+\(.*?)\b{name}\b", rf"\1{name}: {annotation}", source)
    return re.sub(r"(def \w+\(.*\)):$", r"\1 -> None:", source, flags=re.MULTILINE)


def errors_of_mypy(folder: Path, source: str) -> list[tuple[int, str]]:
    """Return the line and the kind of each error that ``mypy --strict`` finds in a program."""
    file = folder / "program.py"
    file.write_text(source, encoding="utf-8")
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--python-version=3.11"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--config-file=", "--no-pretty", file.name],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert re.search(r"^(Found|Success)", done.stdout, re.MULTILINE), done.stdout + done.stderr
    found = re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    return [(int(line), kind) for line, kind in found]


def test_mypy_finds_what_is_wrong_and_passes_the_callbacks_of_the_readme(tmp_path: Path) -> None:
    callbacks = readme_callbacks()
    names = [re.match(r"class (\w+)", source)[1] for source in callbacks]
    assert {"StopWhenGood", "Spikes", "StopBelow", "HalveOnPlateau"} == set(names)
    assert len(names) == len(set(names))
    source = "\n".join([CALLS, *callbacks])
    expected = [
        (number, line.partition("  # ")[2])
        for number, line in enumerate(source.splitlines(), 1)
        if re.search(r"  # [a-z]+(-[a-z]+)?$", line) and number <= CALLS.count("\n")
    ]
    assert len(expected) == 12
    assert errors_of_mypy(tmp_path, source) == expected


def test_help_shows_the_arguments_of_both_engines() -> None:
    parameters = inspect.signature(dt.Model).parameters
    arguments = {"network", "loss_fn", "metrics", "clip_norm", "lr_scheduler", "boost_level", "device"}
    assert arguments <= set(parameters)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert not [name for name, parameter in parameters.items() if parameter.kind in variadic]
    first = pydoc.plain(pydoc.render_doc(dt.Model)).splitlines()[3]
    assert all(f"{name}: " in first for name in parameters)
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(dt.Model) or "", re.MULTILINE)
    assert [name for name in documented if name in parameters] == list(parameters)
