"""One recording callback, four engines: MindSpore's own Model and ours must show it the same run.

The reference is MindSpore's own ``Model``, run here and now. Where we deviate from it, on purpose
and on both engines alike, ``DEVIATIONS`` says so, with the reason; nothing else may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import ENGINES, ones

import dualtrain as dt
from dualtrain.events import LIFECYCLE
from dualtrain.testing import RecordingCallback

pytestmark = [pytest.mark.torch, pytest.mark.mindspore]

DATA = ones(3)
LIFECYCLE_NAMES = [event.value for event in LIFECYCLE]
VALID = ones(2)


@dataclass(frozen=True)
class Scenario:
    """A call, and what a second callback does at one of its events."""

    verb: str = "fit"
    arguments: tuple[Any, ...] = (2, DATA, VALID)
    options: dict[str, Any] = field(default_factory=dict)
    at: tuple[str, int | None, int | None] | None = None
    """Event, epoch and step at which ``action`` is taken; None matches any."""
    action: str = ""


SCENARIOS = {
    "fit": Scenario(),
    "fit without validation": Scenario(arguments=(2, DATA)),
    "train": Scenario("train", (2, DATA)),
    "eval": Scenario("eval", (VALID,)),
    "valid_frequency": Scenario(arguments=(4, DATA, VALID, 2)),
    "valid_frequency as a list": Scenario(arguments=(4, DATA, VALID, [1, 4])),
    "initial_epoch": Scenario("train", (4, DATA), {"initial_epoch": 2}),
    "initial_epoch in fit": Scenario(arguments=(4, DATA, VALID), options={"initial_epoch": 1}),
    "stop at train begin": Scenario(at=("on_train_begin", None, None), action="stop"),
    "stop at an epoch's begin": Scenario(at=("on_train_epoch_begin", 2, None), action="stop"),
    "stop at a step's begin": Scenario(at=("on_train_step_begin", 1, 2), action="stop"),
    "stop at a step's end": Scenario(at=("on_train_step_end", 1, 2), action="stop"),
    "stop at an epoch's last step": Scenario(at=("on_train_step_end", 1, 3), action="stop"),
    "stop at an epoch's end": Scenario(at=("on_train_epoch_end", 1, None), action="stop"),
    "stop in train without validation": Scenario(
        "train", (3, DATA), at=("on_train_step_end", 2, 4), action="stop"
    ),
    "stop in eval": Scenario("eval", (VALID,), at=("on_eval_step_end", None, 1), action="stop"),
    "stop at an evaluation's begin": Scenario(at=("on_eval_begin", 1, None), action="stop"),
    "stop at an evaluation's step": Scenario(at=("on_eval_step_end", 1, 1), action="stop"),
    "stop at an evaluation's epoch end": Scenario(at=("on_eval_epoch_end", 1, None), action="stop"),
    "stop at an evaluation's end": Scenario(at=("on_eval_end", 1, None), action="stop"),
    "error at a step": Scenario(at=("on_train_step_end", 2, 4), action="raise"),
    "error in an evaluation": Scenario(at=("on_eval_step_begin", 1, 2), action="raise"),
    "error at train begin": Scenario(at=("on_train_begin", None, None), action="raise"),
    "error at train end": Scenario(at=("on_train_end", None, None), action="raise"),
}

EVAL_STOPS_TRAINING = (
    "MindSpore makes a new RunContext for every evaluation and loses a stop that is requested in it; "
    "values to stop on exist only there, so we pass it on to training"
)
DEVIATIONS: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    # scenario -> the reason, and how our trace follows from MindSpore's
    name: (EVAL_STOPS_TRAINING, lambda trace: first_epoch_only(trace))
    for name in SCENARIOS
    if "stop at an evaluation's" in name
}


def first_epoch_only(trace: list[Any]) -> list[Any]:
    """Cut a trace of two epochs after the first one, with the train end that follows it then."""
    end = next(i for i, e in enumerate(trace) if e.event == "on_train_epoch_end")
    last = trace[end]
    return [*trace[: end + 1], last._replace(event="on_train_end", keys=trace[-1].keys)]


class Deed(Exception):
    """What the second callback raises."""


def make_actor(base: type, scenario: Scenario) -> Any:
    """Return a callback of the given base class that acts as the scenario says."""

    def hook_of(event: str) -> Callable[..., None]:
        def hook(self: Any, run_context: Any) -> None:
            params = run_context.original_args()
            wanted = (event, params.get("cur_epoch_num"), params.get("cur_step_num"))
            if scenario.at is not None and all(
                w in (None, g) for w, g in zip(scenario.at, wanted, strict=True)
            ):
                if scenario.action == "raise":
                    raise Deed
                run_context.request_stop()

        return hook

    return type("Actor", (base,), {event.value: hook_of(event.value) for event in LIFECYCLE})()


def run(model: Any, scenario: Scenario, callbacks: list[Any]) -> None:
    arguments = scenario.arguments
    call = functools.partial(
        getattr(model, scenario.verb), *arguments, callbacks=callbacks, **scenario.options
    )
    if scenario.action == "raise":
        with pytest.raises(Deed):
            call()
    else:
        call()


@functools.cache
def native_trace(mode: str, name: str) -> list[Any]:
    """Run MindSpore's own Model, with MindSpore's own data, and return what a callback of its own sees."""
    import mindspore

    engine = ENGINES[mode]()
    recording = RecordingCallback()

    def forward(event: str) -> Callable[..., None]:
        return lambda self, run_context: getattr(recording, event)(run_context)

    events = {event.value: forward(event.value) for event in LIFECYCLE}
    recorder = type("Recorder", (mindspore.train.Callback,), events)()
    scenario = SCENARIOS[name]
    data = [
        native_dataset(a) if isinstance(a, list) and a in (DATA, VALID) else a for a in scenario.arguments
    ]
    scenario = Scenario(scenario.verb, tuple(data), scenario.options, scenario.at, scenario.action)
    network = engine.weight()
    model = mindspore.train.Model(network, engine.loss_fn(), engine.sgd(network), {"mae"})
    run(model, scenario, [recorder, make_actor(mindspore.train.Callback, scenario)])
    return recording.trace


def native_dataset(batches: list[Any]) -> Any:
    import numpy as np
    from mindspore.dataset import NumpySlicesDataset

    x, label = (np.concatenate(column) for column in zip(*batches, strict=True))
    return NumpySlicesDataset((x, label), shuffle=False).batch(1)


def our_trace(engine: Any, name: str) -> list[Any]:
    recording = RecordingCallback()
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network), {"mae"})
    run(model, SCENARIOS[name], [recording, make_actor(object, SCENARIOS[name])])
    assert recording.trace[-1].event == "on_teardown"  # ours alone, and always the last
    return [e for e in recording.trace if e.event in LIFECYCLE_NAMES]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_trace_is_that_of_mindspores_own_model(engine: Any, name: str) -> None:
    expected = native_trace(engine.name if engine.framework == "mindspore" else "mindspore-graph", name)
    if engine.framework == "torch":
        ENGINES["torch"]()
    if name in DEVIATIONS:
        expected = DEVIATIONS[name][1](expected)
    trace = our_trace(engine, name)
    assert [e[:5] for e in trace] == [e[:5] for e in expected]
    for ours, native in zip(trace, expected, strict=True):
        assert sorted(ours.keys) == sorted(native.keys), ours.event


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_deviation_is_one(name: str) -> None:
    native = native_trace("mindspore-graph", name)
    assert DEVIATIONS[name][1](native) != native


def test_training_twice_starts_the_counters_anew(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    for _ in range(2):
        recording = RecordingCallback()
        model.train(1, DATA, callbacks=recording)
        assert [e.step for e in recording.trace if e.event == "on_train_step_end"] == [1, 2, 3]
