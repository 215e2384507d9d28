"""``dt.Run``: a loop that the user writes has the events, counters and endings of every other run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
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


# Who ends what.


def names_of(body: Any, *callbacks: Any, **options: Any) -> list[str]:
    """Return the events of a run whose body is a function of the run, without the words that all share."""
    recording = RecordingCallback()
    with dt.Run([recording, *callbacks], **options) as run:
        body(run)
    return recording.names


STEP = ["on_train_step_begin", "on_train_step_end"]
EVAL_STEP = ["on_eval_step_begin", "on_eval_step_end"]
EVALUATION = ["on_eval_begin", "on_eval_epoch_begin", *EVAL_STEP, "on_eval_epoch_end", "on_eval_end"]


def whole(*epochs: list[str]) -> list[str]:
    """Return the events of a run with these steps in its epochs."""
    inner = [["on_train_epoch_begin", *steps, "on_train_epoch_end"] for steps in epochs]
    return ["on_train_begin", *chain.from_iterable(inner), "on_train_end", "on_teardown"]


def test_break_out_of_batches_ends_the_step_with_the_epoch() -> None:
    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for batch in run.batches(BATCHES):
                run.outputs = batch
                break

    assert names_of(body, epochs=2) == whole(STEP, STEP)


def test_break_ends_the_step_before_the_evaluation() -> None:
    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for _batch in run.batches(BATCHES):
                break
            with run.evaluation() as evaluation:
                for _batch in evaluation.batches(BATCHES):
                    break

    assert names_of(body, epochs=1) == whole([*STEP, *EVALUATION])


def test_break_out_of_epochs_ends_step_and_epoch_at_the_end() -> None:
    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for _batch in run.batches(BATCHES):
                break
            break

    assert names_of(body) == whole(STEP)


def test_continue_ends_each_step() -> None:
    losses: list[Any] = []

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for batch in run.batches(BATCHES):
                if batch == 0.5:
                    continue
                run.outputs = batch

    noting = At("on_train_step_end", lambda c: losses.append(c.loss), 1)
    second = At("on_train_step_end", lambda c: losses.append(c.loss), 2)
    assert names_of(body, noting, second, epochs=1) == whole([*STEP, *STEP])
    assert losses == [None, 0.25]


def test_return_from_the_function_that_holds_the_run_ends_it_in_the_ordinary_way() -> None:
    recording = RecordingCallback()

    def train() -> str:
        with dt.Run(recording, epochs=3) as run:
            for _epoch in run.epochs():
                for _batch in run.batches(BATCHES):
                    with run.evaluation() as evaluation:
                        for _batch in evaluation.batches(BATCHES):
                            return "early"
        return "late"

    assert train() == "early"
    assert recording.names == whole([*STEP, *EVALUATION])


def test_error_that_the_loop_catches_ends_the_step_without_outputs() -> None:
    outputs: list[Any] = []

    class Noting:
        def on_train_step_end(self, run_context: Any) -> None:
            outputs.append((run_context.step, run_context.outputs))

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for batch in run.batches(BATCHES):
                with suppress(ValueError):
                    if batch == 0.5:
                        raise ValueError("bad batch")
                    run.outputs = batch
        with suppress(ValueError), run.step():
            run.outputs = 7.0
            raise ValueError("bad episode")
        with run.step():
            run.outputs = 0.125

    names = names_of(body, Noting(), epochs=1)

    assert names == whole([*STEP, *STEP], [*STEP, *STEP])
    assert outputs == [(1, None), (2, 0.25), (3, None), (4, 0.125)]


def test_error_that_is_caught_outside_of_the_batches_ends_the_step_with_the_epoch() -> None:
    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            with suppress(ValueError):
                for _batch in run.batches(BATCHES):
                    raise ValueError("bad batch")

    assert names_of(body, epochs=1) == whole(STEP)


def test_error_ends_no_step_and_no_epoch() -> None:
    recording = RecordingCallback()

    def train() -> None:
        with dt.Run(recording, epochs=1) as run:
            for _epoch in run.epochs():
                for _batch in run.batches(BATCHES):
                    raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        train()

    assert recording.names == [
        *["on_train_begin", "on_train_epoch_begin", "on_train_step_begin", "on_exception", "on_teardown"]
    ]


def test_evaluation_that_fails_and_is_caught_leaves_training_as_it_was() -> None:
    seen: list[Any] = []

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for _batch in run.batches([1.0, 2.0, 3.0]):
                with suppress(ValueError), run.evaluation() as evaluation:
                    for _batch in evaluation.batches(BATCHES):
                        raise ValueError("bad batch")
            seen.append((run.context.mode, run.context.step, run.context.batches_per_epoch))

    failing = [*STEP, *EVALUATION[:3]]
    # The stop was requested before the evaluation, and is honoured after it.
    assert names_of(body, At("on_train_step_end", stop, 2), epochs=1) == whole([*failing, *failing])
    assert seen == [("train", 2, 3)]


def test_evaluation_between_steps_restores_the_counters() -> None:
    seen: list[Any] = []

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for batch in run.batches(BATCHES):
                run.outputs = batch
                with run.evaluation() as evaluation:
                    for other in evaluation.batches([8.0]):
                        evaluation.outputs = other
                        seen.append((run.context.mode, run.context.step, run.context.batches_per_epoch))
                context = run.context
                seen.append((context.mode, context.step, context.batches_per_epoch, context.loss))

    assert names_of(body, epochs=1) == whole([*STEP, *EVALUATION] * 2)
    assert seen == [("eval", 1, 1), ("train", 1, 2, 0.5), ("eval", 1, 1), ("train", 2, 2, 0.25)]


def test_evaluation_after_the_last_epoch_has_its_number() -> None:
    epochs: list[Any] = []

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for _batch in run.batches(BATCHES):
                pass
        with run.evaluation() as evaluation:
            for _batch in evaluation.batches([1.0]):
                epochs.append(run.context.epoch)
        assert run.context.mode == "train"

    names = names_of(body, epochs=2)

    assert epochs == [2]
    assert names == [*whole(STEP * 2, STEP * 2)[:-2], *EVALUATION, "on_train_end", "on_teardown"]


def test_steps_without_epochs_open_one_epoch() -> None:
    seen: list[Any] = []

    def body(run: dt.Run) -> None:
        while not run.context.get_stop_requested():
            with run.step(batch="episode"):
                seen.append((run.context.epoch, run.context.step, run.context.batch))

    assert names_of(body, At("on_train_step_end", stop, 3)) == whole(STEP * 3)
    assert seen == [(1, step, "episode") for step in (1, 2, 3)]


def test_steps_in_epochs() -> None:
    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            for _ in range(2):
                with run.step():
                    pass

    assert names_of(body, epochs=2) == whole(STEP * 2, STEP * 2)


def test_second_call_of_epochs_goes_on() -> None:
    numbers: list[int] = []

    def body(run: dt.Run) -> None:
        for epoch in run.epochs():
            numbers.append(epoch)
            break
        for epoch in run.epochs():
            numbers.append(epoch)
            if epoch == 3:
                run.context.request_stop()
        numbers.extend(run.epochs())

    assert names_of(body, epochs=5) == whole([], [], [])
    assert numbers == [1, 2, 3]


def test_loops_that_run_at_once_end_each_others_steps() -> None:
    pairs: list[Any] = []

    def body(run: dt.Run) -> None:
        for _epoch in run.epochs():
            pairs.extend(zip(run.batches([1, 2]), run.batches([3, 4]), strict=True))

    assert names_of(body, epochs=1) == whole(STEP * 4)
    assert pairs == [(1, 3), (2, 4)]


class Loader:
    """A loader without a length that says when its pass is closed."""

    def __init__(self) -> None:
        self.given = 0
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        try:
            while True:
                self.given += 1
                yield self.given
        finally:
            self.closed = True


def test_loader_is_closed_after_break() -> None:
    loader, valid = Loader(), Loader()
    with dt.Run() as run:
        for _epoch in run.epochs():
            for batch in run.batches(loader):
                if batch == 2:
                    break
            assert loader.closed
            with run.evaluation() as evaluation:
                for batch in evaluation.batches(valid):
                    if batch == 3:
                        break
                assert valid.closed
            break

    assert (loader.given, valid.given) == (2, 3)


def test_iterator_of_the_callers_own_stays_open() -> None:
    loader = Loader()
    batches = iter(loader)
    with dt.Run(epochs=2, limit_batches=2) as run:
        given = [batch for _epoch in run.epochs() for batch in run.batches(batches)]

    assert given == [1, 2, 3, 4]
    assert not loader.closed


def test_generators_that_outlive_the_run_are_refused() -> None:
    recording = RecordingCallback()
    with dt.Run(recording, epochs=5) as run:
        epochs = run.epochs()
        next(epochs)
        batches = run.batches(BATCHES)
        next(batches)
        with run.evaluation() as evaluation:
            tests = evaluation.batches(BATCHES)
            next(tests)
    before = list(recording.names)

    for generator, verb in ((epochs, "run.epochs"), (batches, "run.step"), (tests, "evaluation.batches")):
        with pytest.raises(RunStateError, match=rf"^{verb}\(\) belongs inside `with .* is not open\.$"):
            next(generator)
    assert recording.names == before


# Values.


def test_values_of_an_evaluation() -> None:
    seen: list[Any] = []
    with dt.Run(epochs=1) as run:
        for _epoch in run.epochs():
            with run.evaluation() as evaluation:
                for batch in evaluation.batches([1.0, 2.0, 6.0]):
                    evaluation.outputs = batch
                    assert evaluation.outputs == batch
            seen.append(dict(run.context.metrics))
            with run.evaluation() as evaluation:
                for batch in evaluation.batches([1.0, 2.0]):
                    evaluation.outputs = {"loss": batch, "accuracy": 1.0}
                evaluation.metrics = {"acc": 0.75}
                assert evaluation.metrics == {"acc": 0.75}
            seen.append(dict(run.context.metrics))
            seen.append(run.context.original_args()["eval_results"])
            with run.evaluation() as evaluation:
                for _batch in evaluation.batches([1.0]):
                    pass
            seen.append(dict(run.context.metrics))
    assert seen == [{"eval_loss": 3.0}, {"acc": 0.75}, {"acc": 0.75}, {}]
    assert "metrics" not in run.context.original_args()


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [(0.5, 0.5), ((0.5, 1.0), 0.5), ({"loss": 0.5, "kl": 1.0}, 0.5), ({"kl": 1.0}, None), (None, None)],
)
def test_loss_is_that_of_the_outputs(outputs: Any, loss: float | None) -> None:
    seen: list[Any] = []

    class Noting:
        def on_train_step_end(self, run_context: Any) -> None:
            seen.append((run_context.loss, run_context.outputs))

    with dt.Run(Noting()) as run:
        with run.step():
            run.outputs = outputs
        with run.step():
            assert run.outputs is None  # not what the step before has set

    assert seen == [(loss, outputs), (None, None)]


def test_length_of_an_epoch_is_the_loaders() -> None:
    seen: list[Any] = []
    with dt.Run(epochs=1, limit_batches=2) as run:
        assert run.context.batches_per_epoch is None
        for _epoch in run.epochs():
            for _batch in run.batches(range(5)):
                seen.append((run.context.batches_per_epoch, run.context.step_in_epoch))
            with run.evaluation() as evaluation:
                for batch in evaluation.batches(range(5)):
                    seen.append((run.context.batches_per_epoch, batch))

    assert seen == [(2, 1), (2, 2), (2, 0), (2, 1)]


def test_max_steps_stops_the_run() -> None:
    recording = RecordingCallback()
    run = drive(recording, epochs=5, max_steps=3)

    assert recording.names == whole([*STEP * 2, *EVALUATION], [*STEP, *EVALUATION])
    assert run.context.stop_reason == "max_steps=3 is reached"


def test_error_to_raise_after_a_stop_leaves_the_run() -> None:
    recording = RecordingCallback()
    asking = At("on_train_step_end", lambda c: c.request_stop("pruned", raise_after=OSError("pruned")))

    with pytest.raises(OSError, match=r"^pruned$"):
        drive([recording, asking])

    assert recording.names[-2:] == ["on_train_end", "on_teardown"]


# Refusals.


def test_run_is_entered_once() -> None:
    recording = RecordingCallback()
    run = dt.Run(recording)
    with run:
        with pytest.raises(RunStateError, match=r"^a run can be entered once, but this one is open: make"):
            run.__enter__()
        with run.step():  # and it goes on
            pass
    with pytest.raises(RunStateError, match=r"^a run can be entered once, but this one has ended: make"):
        run.__enter__()

    assert recording.names == whole(STEP)


def test_callback_is_in_one_open_run() -> None:
    recording = RecordingCallback()
    with dt.Run(recording) as run:
        with pytest.raises(RunStateError, match=r"^RecordingCallback is in another open run: give"):
            dt.Run(recording).__enter__()
        with run.step():
            pass
    assert recording.names == whole(STEP)

    with dt.Run(recording):  # afterwards it is free
        pass


def test_verbs_outside_of_the_run_are_refused() -> None:
    run = dt.Run(epochs=1)
    for verb in (run.epochs, lambda: run.batches([]), run.evaluation, lambda: run.step().__enter__()):
        with pytest.raises(RunStateError, match=r"belongs inside `with run:`, but the run is not open.$"):
            verb()
    with run:
        with pytest.raises(
            RunStateError, match=r"^run.batches\(\) belongs inside `for epoch in run.epochs"
        ):
            run.batches(BATCHES)
        evaluation = run.evaluation()
        with pytest.raises(RunStateError, match=r"belongs inside `with run.evaluation\(\) as"):
            evaluation.batches(BATCHES)
        with evaluation:
            pass
        with pytest.raises(RunStateError, match=r"^an evaluation can be entered once: call"):
            evaluation.__enter__()
        with pytest.raises(ArgumentTypeError, match="takes a mapping name -> result, but got float"):
            run.evaluation().metrics = 0.5  # type: ignore[assignment]
        with pytest.raises(RunStateError, match=r"^clip_gradients\(\) needs the gradients of"):
            run.clip_gradients(1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ArgumentValueError, "Run(epochs=...) must be at least 1, but got 0."),
        ({"epochs": 1.5}, ArgumentTypeError, "Run(epochs=...) takes an integer, but got 1.5."),
        ({"max_steps": True}, ArgumentTypeError, "Run(max_steps=...) takes an integer, but got True."),
        (
            {"limit_batches": -1},
            ArgumentValueError,
            "Run(limit_batches=...) must be at least 1, but got -1.",
        ),
        (
            *({"batches_per_epoch": 0}, ArgumentValueError),
            "Run(batches_per_epoch=...) must be at least 1, but got 0.",
        ),
        (
            {"initial_epoch": "2"},
            ArgumentTypeError,
            "Run(initial_epoch=...) takes an integer, but got '2'.",
        ),
        (
            *({"epochs": 2, "initial_epoch": 2}, ArgumentValueError),
            "Run(initial_epoch=...) is at least 0 and less than epochs=2, but got 2.",
        ),
        (
            *({"optimizer": [0.1, 0.2]}, ArgumentTypeError),
            "Run(optimizer=...) takes one optimizer, or a mapping name -> optimizer for several, but got a "
            "list of 2: give each a name.",
        ),
        (
            *({"lr_scheduler": object()}, ArgumentValueError),
            "Run(lr_scheduler=...) takes the schedule of a PyTorch optimizer that is given as well,"
            " but got none: leave it out.",
        ),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        dt.Run(**options)

    assert str(caught.value) == message


def test_callback_that_needs_more_than_a_loop_has_is_refused_by_name() -> None:
    recording = RecordingCallback()
    run = dt.Run([recording, dt.callbacks.NanGuard("skip")])

    with pytest.raises(CapabilityError, match=r"^NanGuard needs skip_nonfinite, which a hand-written"):
        run.__enter__()
    assert recording.names == []
