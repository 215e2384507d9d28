"""``dt.Run``: a loop that the user writes has the events, counters and endings of every other run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import dualtrain as dt
from dualtrain.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CapabilityError,
    RunStateError,
)
from dualtrain.testing import FakeLoop, RecordingCallback

BATCHES = [0.5, 0.25]
"""Each batch is its own loss."""


class At:
    """Call an action at the n-th occurrence of an event."""

    def __init__(self, event: str, action: Any, count: int = 1) -> None:
        seen = 0

        def hook(run_context: Any, *error: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                action(run_context)

        setattr(self, event, hook)


def stop(run_context: Any) -> None:
    run_context.request_stop("enough")


def fail(run_context: Any) -> None:
    raise OSError("no data")


def drive(callbacks: Any, *, epochs: int = 2, **options: Any) -> dt.Run:
    """Run a loop that evaluates each epoch on one batch."""
    with dt.Run(callbacks, epochs=epochs, batches_per_epoch=len(BATCHES), **options) as run:
        for _epoch in run.epochs():
            for batch in run.batches(BATCHES):
                run.outputs = batch
            with run.evaluation(batches=1) as evaluation:
                for batch in evaluation.batches([0.0]):
                    evaluation.outputs = batch
    return run


def fake(callbacks: Any, *, epochs: int = 2, **options: Any) -> None:
    FakeLoop(BATCHES, epochs=epochs, evaluations=[{"eval_loss": 0.0}] * epochs, **options).run(callbacks)


SCENARIOS = {
    "fit": (None, {}),
    "stop at a step": (("on_train_step_end", stop), {}),
    "stop at a step of the second epoch": (("on_train_step_begin", stop, 3), {}),
    "stop in an evaluation": (("on_eval_step_end", stop), {}),
    "stop at the evaluation's end": (("on_eval_end", stop), {}),
    "stop at train begin": (("on_train_begin", stop), {}),
    "error at a step": (("on_train_step_end", fail, 2), {}),
    "error in an evaluation": (("on_eval_step_begin", fail), {}),
    "error at train begin": (("on_train_begin", fail), {}),
    "initial epoch": (None, {"epochs": 4, "initial_epoch": 2}),
}


def trace_of(driver: Any, trigger: Any, options: dict[str, Any]) -> list[Any]:
    recording = RecordingCallback()
    callbacks = [recording] if trigger is None else [recording, At(*trigger)]
    if trigger is not None and trigger[1] is fail:
        with pytest.raises(OSError, match="no data") as caught:
            driver(callbacks, **options)
        (note,) = caught.value.__notes__
        assert note.startswith(f"raised in At.{trigger[0]} at step ")
    else:
        driver(callbacks, **options)
    return recording.trace


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_trace_is_that_of_the_fake_loop(scenario: str) -> None:
    trace = trace_of(drive, *SCENARIOS[scenario])

    assert len(trace) > 2
    assert shared(trace) == shared(trace_of(fake, *SCENARIOS[scenario]))


def shared(trace: list[Any]) -> list[Any]:
    """Leave out the keys that a loop without loaders does not know."""
    data = {"valid_dataset", "eval_network", "train_dataset_element"}
    return [traced._replace(keys=traced.keys - data) for traced in trace]


@pytest.mark.torch
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_trace_is_that_of_the_model(scenario: str) -> None:
    import torch

    inputs = torch.ones(1, 1)
    data = [(inputs, inputs)] * 2

    def parts() -> tuple[Any, ...]:
        network = torch.nn.Linear(1, 1)
        return network, torch.nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1)

    def by_hand(callbacks: Any, *, epochs: int = 2, **options: Any) -> None:
        network, loss_fn, optimizer = parts()
        own = {"network": network, "optimizer": optimizer, "loss_fn": loss_fn}
        with dt.Run(callbacks, epochs=epochs, batches_per_epoch=2, **own, **options) as run:
            for _epoch in run.epochs():
                for x, y in run.batches(data):
                    optimizer.zero_grad()
                    run.outputs = loss = loss_fn(network(x), y)
                    loss.backward()
                    optimizer.step()
                with run.evaluation(batches=1) as evaluation:
                    for x, y in evaluation.batches(data[:1]):
                        evaluation.outputs = loss_fn(network(x), y)

    def by_model(callbacks: Any, *, epochs: int = 2, **options: Any) -> None:
        dt.Model(*parts()).fit(epochs, data, data[:1], callbacks=callbacks, **options)

    assert trace_of(by_hand, *SCENARIOS[scenario]) == trace_of(by_model, *SCENARIOS[scenario])
