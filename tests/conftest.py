"""What the tests share: the engines, and what happens to tests of a framework that is absent.

``DUALTRAIN_REQUIRE`` lists the frameworks that an environment promises (``torch,mindspore``;
``none`` or unset: it promises nothing). A test that is marked with an absent framework fails if
that framework was promised, and is skipped otherwise. Nothing here imports a framework before a
test that is marked with it runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on small networks, threads only wait for each other
os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level, also in subprocesses: errors alone

FRAMEWORKS = ("torch", "mindspore")
ENGINE_NEEDS = {"torch": "torch", "mindspore-pynative": "mindspore", "mindspore-graph": "mindspore"}
"""Engine -> its framework."""


def promised() -> set[str]:
    """Return the frameworks that this environment promises."""
    names = {name.strip() for name in os.environ.get("DUALTRAIN_REQUIRE", "").split(",")} - {"", "none"}
    if unknown := names.difference(FRAMEWORKS):
        raise pytest.UsageError(
            f"DUALTRAIN_REQUIRE takes {', '.join(FRAMEWORKS)} or none, not {', '.join(sorted(unknown))}."
        )
    return names


def pytest_configure(config: pytest.Config) -> None:
    promised()  # a misspelt promise would be none
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background job, and whatever tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for framework in FRAMEWORKS:
        config.addinivalue_line("markers", f"{framework}: the test needs {framework}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = {framework for framework in FRAMEWORKS if item.get_closest_marker(framework)}
    absent = sorted(framework for framework in needed if importlib.util.find_spec(framework) is None)
    for framework in absent:
        if framework in promised():
            pytest.fail(f"{framework} is not installed, but DUALTRAIN_REQUIRE promises it.", pytrace=False)
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a directory of its own: logs have relative names, and MindSpore drops files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Give every test the same random numbers, alone and in company: initial weights are random."""
    if request.node.get_closest_marker("torch") is not None:
        import torch

        torch.manual_seed(0)
    if request.node.get_closest_marker("mindspore") is not None:
        import mindspore

        mindspore.set_seed(0)


@pytest.fixture(autouse=True)
def _mindspore_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run MindSpore's operators one by one (faster on a CPU), and give its mode back afterwards."""
    if request.node.get_closest_marker("mindspore") is None:
        yield
        return
    import mindspore

    mindspore.runtime.launch_blocking()
    mode = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=mode)


def _engine_fixture(name: str, *engines: str) -> Any:
    """Make a fixture that gives each of some engines in turn.

    That is an object from tests/support/engines.py, which imports its framework when it is made.
    """
    params = [
        pytest.param(engine, marks=getattr(pytest.mark, ENGINE_NEEDS[engine]), id=engine)
        for engine in engines
    ]

    @pytest.fixture(params=params, name=name)
    def fixture(request: pytest.FixtureRequest) -> Any:
        from engines import ENGINES

        return ENGINES[request.param]()

    return fixture


engine = _engine_fixture("engine", *ENGINE_NEEDS)
torch_engine = _engine_fixture("torch_engine", "torch")
mindspore_engine = _engine_fixture("mindspore_engine", "mindspore-pynative", "mindspore-graph")
eager_engine = _engine_fixture("eager_engine", "torch", "mindspore-pynative")
"""Those that call Python inside a step."""
graph_engine = _engine_fixture("graph_engine", "mindspore-graph")
