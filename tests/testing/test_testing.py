"""The public test tools, and with them the acceptance of a backend from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import At, batches, ones
from paths import SUPPORT

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.bus import EventBus
from dualtrain.callbacks import MetricHistory, StepLogger
from dualtrain.context import RunState
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentTypeError, CapabilityError
from dualtrain.events import Event
from dualtrain.protocol import Capability
from dualtrain.testing import FakeLoop, RecordingCallback, assert_trace, backend_contract

EVALUATION = [
    "on_eval_begin",
    "on_eval_epoch_begin",
    "on_eval_step_begin",
    "on_eval_step_end",
    "on_eval_epoch_end",
    "on_eval_end",
]


def recorded(*losses, **options):
    """Return what a RecordingCallback has seen of one run of a FakeLoop."""
    recording = RecordingCallback()
    FakeLoop(losses, **options).run(recording)
    return recording


# RecordingCallback.


def test_a_recording_has_events_epochs_steps_batches_and_mode():
    recording = recorded(3.0, 2.0, epochs=2, evaluations=[{"acc": 0.5}], valid_frequency=[2])
    assert [tuple(traced)[:5] for traced in recording.trace] == [
        ("on_train_begin", None, 0, 2, "train"),
        ("on_train_epoch_begin", 1, 0, 2, "train"),
        ("on_train_step_begin", 1, 1, 2, "train"),
        ("on_train_step_end", 1, 1, 2, "train"),
        ("on_train_step_begin", 1, 2, 2, "train"),
        ("on_train_step_end", 1, 2, 2, "train"),
        ("on_train_epoch_end", 1, 2, 2, "train"),
        ("on_train_epoch_begin", 2, 2, 2, "train"),
        ("on_train_step_begin", 2, 3, 2, "train"),
        ("on_train_step_end", 2, 3, 2, "train"),
        ("on_train_step_begin", 2, 4, 2, "train"),
        ("on_train_step_end", 2, 4, 2, "train"),
        ("on_eval_begin", 2, 0, 1, "eval"),
        ("on_eval_epoch_begin", 2, 0, 1, "eval"),
        ("on_eval_step_begin", 2, 1, 1, "eval"),
        ("on_eval_step_end", 2, 1, 1, "eval"),
        ("on_eval_epoch_end", 2, 1, 1, "eval"),
        ("on_eval_end", 2, 1, 1, "eval"),
        ("on_train_epoch_end", 2, 4, 2, "train"),
        ("on_train_end", 2, 4, 2, "train"),
        ("on_teardown", 2, 4, 2, "train"),
    ]
    assert recording.names == [traced.event for traced in recording.trace]


def test_a_recording_has_the_parameters_that_were_there():
    recording = recorded(1.0, epochs=2, evaluations=[{"acc": 0.5}, {"acc": 0.75}])
    with_results = [traced.event for traced in recording.trace if "eval_results" in traced.keys]
    assert with_results == ["on_eval_end", "on_train_epoch_end"] * 2
    assert with_results == [traced.event for traced in recording.trace if "metrics" in traced.keys]
    first_outputs = next(traced for traced in recording.trace if "net_outputs" in traced.keys)
    assert (first_outputs.event, first_outputs.step) == ("on_train_step_end", 1)
    assert all({"mode", "cur_step_num", "batch_num"} <= traced.keys for traced in recording.trace)


def test_a_recording_records_a_failing_run_too():
    def fail(run_context):
        raise ValueError("odd")

    recording = RecordingCallback()
    with pytest.raises(ValueError, match="odd"):
        FakeLoop([1.0]).run([recording, At("on_train_step_end", fail)])
    assert recording.names[-3:] == ["on_train_step_end", "on_exception", "on_teardown"]


def test_two_recordings_do_not_share_their_traces():
    first, second = RecordingCallback(), RecordingCallback()
    FakeLoop([1.0]).run(first)
    assert len(first.trace) == 7
    assert second.trace == []


# assert_trace.


@pytest.fixture
def recording():
    return recorded(1.0)


ONE_STEP = [
    "on_train_begin",
    "on_train_epoch_begin",
    "on_train_step_begin",
    "on_train_step_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_teardown",
]


@pytest.mark.parametrize(
    "expected",
    [
        ONE_STEP,
        [Event(name) for name in ONE_STEP],
        (name for name in ONE_STEP),
        [["on_train_begin", None, 0, 1, "train"], ("on_train_epoch_begin", 1), *ONE_STEP[2:]],
    ],
    ids=["names", "events", "a generator", "beginnings of what was seen"],
)
def test_a_trace_as_expected_passes(recording, expected):
    assert_trace(recording, expected)


def test_nothing_is_the_trace_of_no_run():
    assert_trace(RecordingCallback(), [])


def without(position):
    return [name for i, name in enumerate(ONE_STEP) if i != position]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            without(2),
            "event 2: expected ('on_train_step_end',), got ('on_train_step_begin',); "
            "before it: ['on_train_begin', 'on_train_epoch_begin']",
        ),
        (
            [*ONE_STEP[:3], ("on_train_step_end", 1, 2), *ONE_STEP[4:]],
            "event 3: expected ('on_train_step_end', 1, 2), got ('on_train_step_end', 1, 1); "
            "before it: ['on_train_begin', 'on_train_epoch_begin', 'on_train_step_begin']",
        ),
        (
            [Event.EVAL_BEGIN],
            "event 0: expected ('on_eval_begin',), got ('on_train_begin',); before it: []",
        ),
        (
            [*ONE_STEP, "on_train_begin"],
            "event 7: expected ('on_train_begin',), got the end; before it: ['on_train_step_begin', "
            "'on_train_step_end', 'on_train_epoch_end', 'on_train_end', 'on_teardown']",
        ),
    ],
    ids=["an event more", "another step", "another run", "an event less"],
)
def test_the_first_difference_is_named(recording, expected, message):
    with pytest.raises(AssertionError) as caught:
        assert_trace(recording, expected)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("expected", "count", "extra"), [(ONE_STEP[:-1], 6, "on_teardown"), ([], 0, "on_train_begin")]
)
def test_events_after_the_expected_end_are_named(recording, expected, count, extra):
    with pytest.raises(AssertionError) as caught:
        assert_trace(recording, expected)
    assert str(caught.value).startswith(f"expected the end after {count} events, got ('{extra}', ")


# FakeLoop.


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_epoch_has_the_given_losses(epochs):
    seen = []
    note = At("on_train_step_end", lambda context: seen.append((context.epoch, context.loss)))
    FakeLoop([0.5, 0.0, -2.0], epochs=epochs).run(note)
    assert seen == [(epoch, loss) for epoch in range(1, epochs + 1) for loss in (0.5, 0.0, -2.0)]


def test_the_context_counts_as_an_engines_does():
    seen = []

    def note(context):
        seen.append(
            (
                context.step,
                context.global_step,
                context.epoch,
                context.epochs,
                context.step_in_epoch,
                context.batches_per_epoch,
            )
        )

    FakeLoop([1.0, 1.0], epochs=2).run(At("on_train_step_end", note))
    assert seen == [(1, 1, 1, 2, 1, 2), (2, 2, 1, 2, 2, 2), (3, 3, 2, 2, 1, 2), (4, 4, 2, 2, 2, 2)]


def test_it_is_one_rank_of_an_engine_of_its_own():
    context = FakeLoop([1.0]).run()
    assert (str(context.backend), context.rank, context.world_size) == ("fake", 0, 1)
    assert context.is_main
    assert Capability.STEP_EVENTS in context.capabilities
    assert Capability.MANUAL_OPTIMIZATION not in context.capabilities


def test_the_rate_of_each_step_is_kept():
    def halve(context):
        context.lr = context.lr / 2

    loop = FakeLoop([1.0, 1.0, 1.0], epochs=2, lr=0.5)
    loop.run(At("on_train_step_end", halve, step=2))
    assert loop.learning_rates == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("min_lr", "rates"),
    [(0.0, [1.0, 0.25, 0.0625]), (0.125, [1.0, 0.25, 0.125]), (2.0, [1.0, 1.0, 1.0])],
    ids=["free", "down to a floor", "under the floor already"],
)
def test_the_rate_can_be_scaled(min_lr, rates):
    given = []
    scale = At("on_train_step_end", lambda context: given.append(context.scale_lr(0.25, min_lr)))
    loop = FakeLoop([1.0, 1.0, 1.0], lr=1.0)
    loop.run(scale)
    assert loop.learning_rates == rates
    assert given[:2] == rates[1:]


def test_a_run_without_callbacks_returns_its_context():
    loop = FakeLoop([1.0, 2.0], lr=0.25)
    context = loop.run()
    assert (context.step, context.loss, context.lr, context.metrics) == (2, 2.0, 0.25, {})
    assert (loop.global_step, loop.learning_rates) == (2, [0.25, 0.25])


@pytest.mark.parametrize(
    ("frequency", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), ([1, 4], [1, 4]), (5, [])]
)
def test_evaluations_come_in_turn_when_they_are_due(frequency, epochs):
    seen, afterwards = [], []
    evaluations = [{"acc": 0.1 * i, "eval_loss": float(i)} for i in range(len(epochs))]
    context = FakeLoop([1.0], epochs=4, evaluations=evaluations, valid_frequency=frequency).run(
        [
            At("on_eval_end", lambda context: seen.append((context.epoch, dict(context.metrics)))),
            At("on_train_epoch_end", lambda context: afterwards.append(context.loss)),
        ]
    )
    assert seen == list(zip(epochs, evaluations, strict=True))
    assert context.metrics == (evaluations[-1] if evaluations else {})
    assert afterwards == [1.0] * 4  # the training's loss, not the evaluation's


def test_a_result_that_a_callback_changes_is_given_as_it_was_to_the_next_run():
    loop = FakeLoop([1.0], evaluations=[{"acc": 0.5}])
    loop.run(At("on_eval_end", lambda context: context.original_args().eval_results.clear()))
    assert loop.run().metrics == {"acc": 0.5}


def test_too_few_evaluations_are_said_to_be_too_few():
    with pytest.raises(ValueError, match="evaluations"):
        FakeLoop([1.0], epochs=3, evaluations=[{"acc": 0.5}]).run()


def test_a_stop_ends_the_run_as_it_ends_any():
    recording = RecordingCallback()
    stop = At("on_train_step_end", lambda context: context.request_stop("enough"), step=2)
    loop = FakeLoop([1.0] * 5, epochs=3, evaluations=[{"acc": 0.5}] * 3)
    context = loop.run([recording, stop])
    step = ["on_train_step_begin", "on_train_step_end"]
    assert_trace(recording, [*ONE_STEP[:2], *step, *step, *EVALUATION, *ONE_STEP[4:]])
    assert (context.get_stop_requested(), context.stop_reason) == (True, "enough")
    assert loop.learning_rates == [0.1, 0.1]


def test_what_a_stop_raises_afterwards_arrives():
    error = LookupError("after all")
    stop = At("on_train_step_end", lambda context: context.request_stop(raise_after=error))
    with pytest.raises(LookupError) as caught:
        FakeLoop([1.0]).run(stop)
    assert caught.value is error


def test_a_second_run_starts_anew():
    loop = FakeLoop([1.0, 2.0], epochs=2, evaluations=[{"acc": 0.5}, {"acc": 0.75}])
    first, second = RecordingCallback(), RecordingCallback()
    loop.run(first)
    context = loop.run(second)
    assert second.trace == first.trace
    assert (loop.global_step, len(loop.learning_rates), context.metrics) == (4, 4, {"acc": 0.75})


def test_what_is_no_callback_is_refused_as_an_engine_refuses_it():
    with pytest.raises(ArgumentTypeError, match="is a class, not an instance"):
        FakeLoop([1.0]).run(StepLogger)
    needy = dt.Callback()
    needy.needs = frozenset({Capability.MANUAL_OPTIMIZATION})
    with pytest.raises(CapabilityError, match="Callback needs manual_optimization, which the fake loop"):
        FakeLoop([1.0]).run(needy)


def test_a_logger_driven_by_it_writes_these_rows():
    note = At("on_eval_end", lambda context: context.log("score", context.metrics["acc"]))
    FakeLoop([1.5, float("nan"), 0.0], epochs=2, lr=0.1, evaluations=[{"acc": 0.25}, {"acc": 0.5}]).run(
        [StepLogger("log.jsonl", 2), note]
    )
    rows = [json.loads(line) for line in Path("log.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{k: v for k, v in row.items() if k not in ("elapsed_sec", "timestamp")} for row in rows]
    assert timeless == [
        {"step": 2, "epoch": 1, "global_step": 2, "loss": None, "lr": 0.1, "nonfinite": {"loss": "nan"}},
        {"step": 3, "epoch": 1, "mode": "eval", "acc": 0.25},
        {"step": 4, "epoch": 2, "global_step": 4, "loss": 1.5, "lr": 0.1, "score": 0.25},
        {"step": 6, "epoch": 2, "global_step": 6, "loss": 0.0, "lr": 0.1, "score": 0.5},
        {"step": 6, "epoch": 2, "mode": "eval", "acc": 0.5},
    ]
    meta = json.loads(Path("log.jsonl.meta.json").read_text(encoding="utf-8"))
    assert (meta["backend"], meta["backend_version"], meta["model"]) == ("fake", "0", None)
    assert (meta["epochs"], meta["batches_per_epoch"]) == (2, 3)


def test_a_history_driven_by_it_has_these_columns():
    history = MetricHistory()
    FakeLoop([2.0, 1.0], epochs=3, lr=0.1, evaluations=[{"acc": 0.5}], valid_frequency=2).run(history)
    assert history.history == {
        "epoch": [1, 2, 3],
        "loss": [1.0, 1.0, 1.0],
        "lr": [0.1, 0.1, 0.1],
        "acc": [None, 0.5, None],
    }


@pytest.mark.parametrize("evaluated", [False, True], ids=["without", "with an evaluation"])
def test_its_trace_is_that_of_an_engine(engine, evaluated):
    valid = ones(1) if evaluated else None
    network, native = engine.weight(), RecordingCallback()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.fit(3, ones(2), valid, valid_frequency=2, callbacks=native)
    fake = recorded(
        1.0, 1.0, epochs=3, evaluations=[{"eval_loss": 1.0}] if evaluated else None, valid_frequency=2
    )
    assert_trace(fake, [traced[:5] for traced in native.trace])
    for of_fake, of_engine in zip(fake.trace, native.trace, strict=True):
        assert of_fake.keys <= of_engine.keys, of_fake


# backend_contract.


def test_the_engines_keep_the_contract(engine):
    def make():
        network = engine.weight()
        return network, engine.loss_fn(), engine.sgd(network)

    backend_contract(find_backend(engine.framework), make, batches((1, 0), (2, 1), (3, 0)))


def contract_on_torch(backend):
    """Hold a backend that was made of PyTorch's against the contract."""
    from engines import TorchEngine

    engine = TorchEngine()

    def make():
        network = engine.weight()
        return network, engine.loss_fn(), engine.sgd(network)

    backend_contract(backend, make, batches((1, 0), (2, 1), (3, 0)))


class StuckRate:
    """A learning rate on which one verb does nothing."""

    def __init__(self, rate, stuck):
        self._rate, self._stuck = rate, stuck

    def read(self):
        return self._rate.read()

    def write(self, rate):
        if self._stuck != "write":
            self._rate.write(rate)

    def scale(self, factor, min_lr=0.0):
        return self.read() if self._stuck == "scale" else self._rate.scale(factor, min_lr)


class TextRate(StuckRate):
    def read(self):
        return str(self._rate.read())


def broken_torch_backend(**members):
    """Return a backend that is PyTorch's but for the members given."""
    from dualtrain.backends.torch.backend import TorchBackend

    return type("BrokenBackend", (TorchBackend,), members)()


def rate_of(make):
    """Return a ``learning_rate`` verb that wraps the real one."""

    def learning_rate(self, optimizer):
        from dualtrain.backends.torch.optimizer import TorchLearningRate

        return make(TorchLearningRate(optimizer))

    return learning_rate


BREAKAGES = {
    "no name": ({"__str__": lambda self: "broken"}, "its name"),
    "owns nothing": ({"owns": lambda self, obj: False}, "own its networks"),
    "owns no optimizer": ({"owns": lambda self, obj: hasattr(obj, "forward")}, "own its optimizers"),
    "owns everything": ({"owns": lambda self, obj: True}, "not own just anything"),
    "rate is text": ({"learning_rate": rate_of(lambda rate: TextRate(rate, None))}, "reads as a float"),
    "rate is not written": (
        {"learning_rate": rate_of(lambda rate: StuckRate(rate, "write"))},
        "as it was written",
    ),
    "rate is not scaled": ({"learning_rate": rate_of(lambda rate: StuckRate(rate, "scale"))}, "scale"),
    "another Model": ({"model_class": lambda self: dict}, "model_class"),
    "capabilities are a list": ({"capabilities": lambda self: ["step_events"]}, "capabilities"),
    "the mode has no words": ({"describe_mode": lambda self: None}, "describe_mode"),
    "no version": ({"version": lambda self: None}, "version"),
    "to_float gives a tensor": ({"to_float": lambda self, value: value}, "to_float"),
    "to_float gives another number": ({"to_float": lambda self, value: 0.5}, "to_float"),
    "to_numpy gives a tensor": ({"to_numpy": lambda self, value: value}, "to_numpy"),
    "batches have no shape": ({"batch_shape": lambda self, batch: None}, "batch_shape"),
    "weights are none": ({"weights": lambda self, network: {}}, "weights"),
    "weights are not assigned": ({"assign_weights": lambda self, network, weights: None}, "assign_weights"),
    "parameters are not copied": (
        {"copy_parameters": lambda self, parameters: {n: p.detach() for n, p in parameters.items()}},
        "parameter_changes",
    ),
    "changes are nothing": (
        {"parameter_changes": lambda self, before, now: dict.fromkeys(before, (0.0, 0.0))},
        "parameter_changes",
    ),
    "a rank beyond the world": ({"rank": lambda self: 1}, "rank"),
    "a world of nobody": ({"world_size": lambda self: 0}, "world_size"),
    "any_rank hears nobody": ({"any_rank": lambda self, flag: False}, "any_rank"),
    "any_rank hears voices": ({"any_rank": lambda self, flag: True}, "any_rank"),
}


@pytest.mark.torch
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_backend_that_breaks_the_contract_is_told_how(breakage):
    members, words = BREAKAGES[breakage]
    with pytest.raises(AssertionError) as caught:
        contract_on_torch(broken_torch_backend(**members))
    message = str(caught.value).splitlines()[0]
    assert words in message
    assert len(message.split()) > 3


@pytest.mark.torch
def test_the_subclass_that_breaks_nothing_keeps_the_contract():
    contract_on_torch(broken_torch_backend())


def torch_backend_without(*verbs):
    """Return a backend that has PyTorch's verbs but for those named."""
    from dualtrain.backends.torch.backend import TorchBackend

    members = {name: value for name, value in vars(TorchBackend).items() if name not in verbs}
    return type("PartialBackend", (), members)()


@pytest.mark.torch
def test_a_backend_without_a_verb_is_told_so():
    with pytest.raises(AssertionError, match="it lacks a verb"):
        contract_on_torch(torch_backend_without("to_numpy"))


PARTS = {
    "Weights": ("weights", "assign_weights"),
    "ParameterCopies": ("copy_parameters", "parameter_changes"),
    "Ranks": ("rank", "world_size", "any_rank"),
}


@pytest.mark.torch
@pytest.mark.parametrize("part", PARTS)
def test_a_backend_may_lack_an_optional_part(part):
    contract_on_torch(torch_backend_without(*PARTS[part]))


@pytest.mark.torch
def test_a_backend_may_lack_every_optional_part():
    verbs = [verb for verbs in PARTS.values() for verb in verbs]
    contract_on_torch(torch_backend_without(*verbs, "batch_shape", "to_float_later", "seed", "observe"))


@pytest.mark.torch
@pytest.mark.parametrize(("part", "verb"), [(part, verbs[-1]) for part, verbs in PARTS.items()])
def test_a_backend_with_half_a_part_is_told_so(part, verb):
    with pytest.raises(AssertionError, match=rf"all verbs of {part} or none, but {verb} is missing"):
        contract_on_torch(torch_backend_without(verb))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("capabilities", "words"),
    [
        ({Capability.PROBING}, "has the part probing if it has the capability"),
        ({Capability.GRAD_NORM, Capability.PARAMETER_GRAD_NORMS}, "has gradients, and with them"),
    ],
)
def test_a_part_without_its_capability_is_told(capabilities, words):
    from dualtrain.backends.torch.backend import BACKEND

    fewer = BACKEND.capabilities() - capabilities
    with pytest.raises(AssertionError, match=words):
        contract_on_torch(broken_torch_backend(capabilities=lambda self: fewer))


def test_one_batch_is_too_few_for_the_contract(torch_engine):
    def make():
        raise AssertionError("it is refused before anything is made")

    with pytest.raises(AssertionError, match="at least two batches"):
        backend_contract(find_backend("torch"), make, batches((1, 0)))


# Broken engines: each changes one thing in the classes that a run is made of.


def without_part(part):
    """Return a ``RunState.use`` after which a step lacks a part."""

    def use(real, self, step):
        real(self, step)
        setattr(self, part, None)

    return RunState, "use", use


def leave_outputs(real, self):
    outputs = self.context.outputs
    real(self)
    self.context.original_args()["net_outputs"] = outputs


def end_without_raising(real, self, kind, error, traceback):
    self.close(error)
    return True


def raise_another(real, self, kind, error, traceback):
    real(self, kind, error, traceback)
    if error is not None:
        raise RuntimeError("the run has failed") from error


def tell_nobody(real, self, event, error, *rest):
    return error if event is Event.EXCEPTION else real(self, event, error, *rest)


def begin_at_one(real, self, number):
    real(self, number - 2 if number > 2 else number)


class Property:
    """A property of RunContext that reads as something else."""

    def __init__(self, name, read):
        self.name, self.read = name, read


ENGINE_BREAKAGES = {
    "a stop is ignored": (
        (RunEngine, "should_stop", lambda real, self: False),
        "in a run that is stopped in on_train_begin, event",
    ),
    "a stop in training cuts the evaluation short": (
        (RunEngine, "should_stop", lambda real, self: self.context.get_stop_requested()),
        "in a run that is stopped in on_train_begin, event",
    ),
    "a stop in an evaluation is ignored there": (
        (RunEngine, "should_stop", lambda real, self: self.context.mode == "train" and real(self)),
        "in a run that is stopped in on_eval_begin, event",
    ),
    "an error is swallowed": (
        (RunEngine, "__exit__", end_without_raising),
        "raises the error of a callback in on_train_step_end itself, but raised None",
    ),
    "another error is raised": ((RunEngine, "__exit__", raise_another), "itself, but raised RuntimeError"),
    "on_exception is left out": (
        (EventBus, "emit_to_each", tell_nobody),
        "in a run that fails in on_train_step_end, event",
    ),
    "on_exception is given another error": (
        (
            EventBus,
            "emit_to_each",
            lambda real, self, event, error, context, *extra: real(
                self, event, error, context, *[OSError() for _ in extra]
            ),
        ),
        "on_exception is called once, with the error",
    ),
    "epochs begin at one": ((RunEngine, "begin_epoch", begin_at_one), "in a run with initial_epoch=2"),
    "the last epoch is not known": (
        Property("epochs", lambda self: self.original_args().get("epoch_num")),
        "knows of epochs 4 and evaluations 2, but not (2, 2)",
    ),
    "evaluations are not known": (
        Property("evaluations", lambda self: None),
        "knows of epochs 4 and evaluations 2, but not (4, None)",
    ),
    "counters stay the evaluation's": (
        (RunEngine, "leave_evaluation", lambda real, self: None),
        "in a run of two epochs, event",
    ),
    "outputs stay the evaluation's": (
        (RunEngine, "leave_evaluation", leave_outputs),
        "the outputs are those of the last training step",
    ),
    "results are lost": (Property("metrics", lambda self: {}), "metrics has eval_loss"),
    "no gradients": (without_part("gradients"), "has the names of trained_parameters"),
    "no norms of parameters": (without_part("parameter_norms"), "has the part parameter_norms"),
    "no accumulation": (without_part("accumulation"), "capability accumulation has the part accumulation"),
    "no probing": (without_part("probing"), "has the part probing if it has the capability"),
    "updates are not counted": (Property("global_step", lambda self: 0), "counts its updates"),
    "no update is told": (Property("is_update_step", lambda self: False), "counts its updates"),
    "no learning rate": (Property("lr", lambda self: None), "has a learning_rate"),
    "norms are not numbers": (Property("grad_norm", lambda self: None), "grad_norm is a float"),
    "parameters have no norms": (
        Property("parameter_grad_norms", lambda self: {}),
        "parameter_grad_norms has the names",
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("breakage", ENGINE_BREAKAGES)
def test_an_engine_that_breaks_the_contract_is_told_how(breakage, monkeypatch):
    broken, words = ENGINE_BREAKAGES[breakage]
    if isinstance(broken, Property):
        monkeypatch.setattr(dt.RunContext, broken.name, property(broken.read))
    else:
        owner, name, changed = broken
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, **rest: changed(real, self, *args, **rest))
    with pytest.raises(AssertionError) as caught:
        contract_on_torch(find_backend("torch"))
    assert words in str(caught.value).splitlines()[0]


# A third backend.

WITH_THE_THIRD_BACKEND = """
import json, sys
import numpy as np
import dualtrain as dt
from dualtrain.backends import backend_names, find_backend
from dualtrain.testing import backend_contract

from third_backend import BACKEND, ArrayModel, Descent, Linear, SquaredError

x, y = np.eye(2), np.array([1.0, -1.0])

def make():
    network = Linear([0.0, 0.0])
    return network, SquaredError(), Descent(network, 0.25)

assert backend_names() == ["torch", "mindspore", "arrays"], backend_names()
network, loss_fn, optimizer = make()
assert find_backend("arrays") is find_backend(network) is find_backend(optimizer) is BACKEND
assert find_backend(x, missing_ok=True) is None
assert dt.RunContext({"optimizer": optimizer}).lr == 0.25

backend_contract(BACKEND, make, [(x, y)] * 3)

for insisted in ({}, {"backend": "arrays"}):
    model = dt.Model(*make(), **insisted)
    assert type(model) is ArrayModel and isinstance(model, dt.Model)

network, loss_fn, optimizer = make()
model = dt.Model(network, loss_fn, optimizer)
history = dt.callbacks.MetricHistory()

class Halve(dt.Callback):
    def on_train_step_end(self, run_context):
        if run_context.step == 2:
            run_context.scale_lr(0.5)
        if run_context.step == 5:
            run_context.request_stop()

model.fit(4, [(x, y)] * 2, [(x, y)], callbacks=[dt.callbacks.StepLogger("log.jsonl", 1), Halve(), history])
frameworks = {name.partition(".")[0] for name in sys.modules} & {"torch", "mindspore"}
assert not frameworks, frameworks
log = dt.logs.read_log("log.jsonl")
print(json.dumps({
    "steps": log.column("loss")[0],
    "loss": log.column("loss")[1],
    "lr": log.column("lr")[1],
    "global_step": log.column("global_step")[1],
    "history": history.history,
    "weights": network.weights.tolist(),
    "prediction": model.predict(np.array([[2.0, 1.0]])).tolist(),
    "meta": [log.meta[key] for key in ("backend", "backend_version", "model")],
}))
"""


@pytest.fixture
def third_backend(tmp_path):
    """Install the third backend as a distribution of its own into a folder."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(SUPPORT / "third_backend.py", site)
    information = site / "dualtrain_arrays-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: dualtrain-arrays\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dualtrain.backends]\narrays = third_backend:BACKEND\n")
    return site


def environment(third_backend):
    """Return the environment of a process in which the third backend is installed."""
    path = os.pathsep.join([str(third_backend), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def test_a_third_backend_is_a_folder_and_an_entry_point(third_backend):
    done = subprocess.run(
        [sys.executable, "-c", WITH_THE_THIRD_BACKEND],
        env=environment(third_backend),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Each step multiplies the distance to (1, -1) by 1 - lr; the loss is its square, before the step.
    assert json.loads(done.stdout) == {
        "steps": [1, 2, 3, 4, 5],
        "loss": [0.75**0, 0.75**2, 0.75**4, 0.75**4 * 0.875**2, 0.75**4 * 0.875**4],
        "lr": [0.25, 0.25, 0.125, 0.125, 0.125],
        "global_step": [1, 2, 3, 4, 5],
        "history": {
            "epoch": [1, 2, 3],
            "loss": [0.75**2, 0.75**4 * 0.875**2, 0.75**4 * 0.875**4],
            "lr": [0.125, 0.125, 0.125],
            "eval_loss": [0.75**4, 0.75**4 * 0.875**4, 0.75**4 * 0.875**6],
        },
        "weights": [1 - 0.75**2 * 0.875**3, 0.75**2 * 0.875**3 - 1],
        "prediction": [1 - 0.75**2 * 0.875**3],
        "meta": ["arrays", "1.0", "Linear"],
    }


TERMINATED = """
import signal
import sys

import numpy as np

import dualtrain as dt
from third_backend import Descent, Linear, SquaredError

signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Tells(dt.Callback):
    def on_train_step_end(self, run_context):
        print("step", run_context.step, flush=True)
        if run_context.step == 2:
            sys.stdin.readline()

    def on_eval_end(self, run_context):
        print("eval_end", run_context.metrics["eval_loss"], flush=True)

    def on_train_end(self, run_context):
        print("train_end", run_context.stop_reason, flush=True)

    def on_exception(self, run_context, error):
        print("exception", repr(error), flush=True)

    def on_teardown(self, run_context):
        print("teardown", flush=True)


network = Linear([0.0])
batch = np.ones((1, 1)), np.ones(1)
model = dt.Model(network, SquaredError(), Descent(network, 0.25))
model.fit(3, [batch] * 4, [batch], callbacks=[Tells(), dt.callbacks.StepLogger("log.jsonl", 1)])
print("never here", flush=True)
"""


def test_a_sigterm_stops_a_third_backend_after_the_step_with_status_143(third_backend):
    """Two steps halve the distance to 1 twice; the evaluation that is due is made."""
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED],
        env=environment(third_backend),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert [child.stdout.readline() for _ in range(2)] == ["step 1\n", "step 2\n"]
            child.send_signal(signal.SIGTERM)
            said, _ = child.communicate("\n")
        finally:
            child.kill()
    assert said.splitlines() == [f"eval_end {0.25**2}", "train_end SIGTERM", "teardown"]
    assert child.returncode == 143
    rows = [json.loads(line) for line in Path("log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["loss"] for row in rows if row.get("mode") != "eval"] == [1.0, 0.25]
