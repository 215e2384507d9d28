"""Throughput: exact times under a clock that only the test moves, and the samples and tokens of batches."""

import time

import numpy as np
import pytest
from clocks import Clock
from engines import At, Seen, ones

import dualtrain as dt
from dualtrain import bus
from dualtrain.backends import find_backend
from dualtrain.bus import EventBus
from dualtrain.callbacks import StepLogger, Throughput
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.logs import read_log
from dualtrain.protocol import Capability
from dualtrain.testing import FakeLoop


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bus, "perf_counter", clock)
    monkeypatch.setattr(Throughput, "_clock", staticmethod(clock))
    return clock


class Slow(dt.Callback):
    """Takes so many seconds at an event."""

    def __init__(self, clock, **seconds):
        for event, taken in seconds.items():
            setattr(self, event, lambda context, *error, taken=taken: clock.advance(taken))


class Sluggish(Slow):
    """The same under another name."""


class SlowBatches:
    """Batches that each take a while to come."""

    def __init__(self, clock, seconds, batches):
        self._clock, self._seconds, self._batches = clock, seconds, batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        for batch in self._batches:
            self._clock.advance(self._seconds)
            yield batch


class SlowRate:
    """A learning rate whose reading, which FakeLoop does inside its step, takes a while."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def read(self):
        self._clock.advance(self._seconds)
        return 0.1


def run(clock, callbacks, *, data=0.25, step=0.5, batches=(1.0,) * 8, **options):
    """Run callbacks; a batch takes ``data`` seconds to come and a step ``step`` seconds."""
    loop = FakeLoop(SlowBatches(clock, data, batches), **options)
    loop.learning_rate = SlowRate(clock, step)
    return loop.run(callbacks)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_time_of_an_interval_is_data_step_and_callbacks(clock, place):
    """A step is .25 of data, .5 of its own, and callbacks of .125 before it and .0625 + 1 after it."""
    throughput = Throughput(4)
    reports = Seen(lambda c: dict(throughput.summary))
    callbacks = [
        Slow(clock, on_train_step_begin=0.125, on_train_step_end=0.0625),
        Sluggish(clock, on_train_step_end=1.0),
    ]
    callbacks.insert(place, throughput)
    run(clock, [*callbacks, reports])
    first, second = reports.values[3], reports.values[7]
    # What stands behind it is not through when it reports; the first report lacks that, each has it from
    # the step before.
    behind = [1.0625, 1.0, 0.0][place]
    slow = [0.125 + 0.75 * 0.0625, 0.1875, 0.1875][place]
    sluggish = [0.75, 0.75, 1.0][place]
    total = 0.25 + 0.5 + 1.1875
    assert second == {
        "steps": 4,
        "samples_per_sec": 1 / total,
        "data_sec": 0.25,
        "step_sec": 0.5,
        "callbacks_sec": 1.1875,
        "callback_sec/Sluggish": 1.0,
        "slowest": "Sluggish",
    }
    assert first["callbacks_sec"] == slow + sluggish == 1.1875 - behind / 4
    assert first["callback_sec/Sluggish"] == sluggish
    assert (first["data_sec"], first["step_sec"]) == (0.25, 0.5)
    assert reports.values[2] == {}
    assert throughput.slowest == "Sluggish"


def test_evaluations_are_left_out(clock):
    """Four steps an epoch; an evaluation takes 100 seconds and its callbacks 50."""
    throughput = Throughput(4)
    seen = Seen(lambda c: dict(throughput.summary))
    evaluation = Slow(clock, on_eval_step_begin=100.0, on_eval_begin=0.5, on_eval_end=0.5)
    epoch = Sluggish(clock, on_train_epoch_end=2.0, on_train_epoch_begin=2.0)
    options = {"epochs": 2, "evaluations": [{"acc": 1.0}] * 2, "batches": [1.0] * 4}
    run(clock, [throughput, evaluation, epoch, seen], **options)
    assert (seen.values[7]["data_sec"], seen.values[7]["step_sec"]) == (0.25, 0.5)
    # Epoch begin; epoch end and begin, and what is behind it at the evaluation's end.
    assert seen.values[3]["callbacks_sec"] == 2.0 / 4
    assert seen.values[7]["callbacks_sec"] == (2.0 + 2.0 + 0.5) / 4


def test_the_last_steps_are_reported_at_the_end(clock):
    throughput = Throughput(3)
    logged = []
    run(clock, [throughput, At("on_train_end", lambda c: logged.append(c.logged_since(0)[1]))])
    assert throughput.summary["steps"] == 2
    assert logged[0]["step_sec"] == throughput.summary["step_sec"] == 0.5
    run(clock, throughput, batches=[1.0] * 2)
    assert throughput.summary["steps"] == 2
    run(clock, throughput, batches=[1.0] * 3)  # none are left
    assert throughput.summary["steps"] == 3


def test_its_rows_have_the_numbers(clock):
    run(clock, [Throughput(4), StepLogger("log.jsonl", 1)])
    log = read_log("log.jsonl")
    assert log.column("step_sec") == ([4, 8], [0.5, 0.5])
    assert log.column("samples_per_sec")[0] == [4, 8]


def test_an_interval_ends_with_the_loss_read(clock):
    """On an accelerator that waits for the steps launched; the waiting counts as the step's."""

    class Waiting:
        def __float__(self):
            clock.advance(8.0)
            return 1.0

    throughput = Throughput(4)
    seen = Seen(lambda c: dict(throughput.summary))
    run(clock, [throughput, seen], batches=[Waiting() for _ in range(4)])
    assert seen.values[3]["step_sec"] == 0.5 + 8.0 / 4


# Samples and tokens.


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (np.zeros((2, 8), np.int32), 2, 16),
        (np.zeros((2, 8), np.uint8), 2, 16),
        (np.zeros((2, 8), np.float32), 2, None),
        (np.zeros((2, 8), bool), 2, None),
        (np.zeros((2, 8, 3), np.int64), 2, None),
        (np.zeros(4, np.int64), 4, None),
        (np.zeros((), np.float32), 1, None),
    ],
)
def test_samples_and_tokens_are_those_of_the_first_array(clock, batch, samples, tokens):
    throughput = Throughput(4)
    run(clock, throughput, batches=[batch] * 4)
    per_second = 1 / 0.75
    assert throughput.summary["samples_per_sec"] == samples * per_second
    assert throughput.summary.get("tokens_per_sec") == (None if tokens is None else tokens * per_second)


def test_a_function_counts_tokens(clock):
    throughput = Throughput(4, tokens=len)
    run(clock, throughput, batches=[np.zeros((3, 5), np.int32)] * 4)
    assert throughput.summary["tokens_per_sec"] == 3 / 0.75


def test_what_gives_no_number_of_tokens_is_named(clock):
    with pytest.raises(ArgumentTypeError, match=r"^Throughput\(tokens=...\) has to give .* gave 'many'\."):
        run(clock, Throughput(tokens=lambda batch: "many"))


def test_batches_without_an_array_have_no_samples():
    params = {"cur_step_num": 0, "cur_epoch_num": 1, "train_dataset_element": None}
    context = dt.RunContext(params)
    throughput = Throughput(1)
    throughput.on_train_begin(context)
    params["cur_step_num"] = 1
    throughput.on_train_step_begin(context)
    throughput.on_train_step_end(context)
    assert throughput.summary.keys() >= {"data_sec", "step_sec", "callbacks_sec"}
    assert throughput.summary.keys().isdisjoint({"samples_per_sec", "tokens_per_sec"})


def test_the_shape_of_a_batch_is_known_without_its_values(engine):
    backend = find_backend(engine.framework)
    label = np.zeros(2, np.float32)
    cases = [
        ((engine.as_tensor(np.zeros((2, 3), np.float32)), label), ((2, 3), False)),
        ([engine.as_tensor(np.zeros((2, 3), np.int32)), label], ((2, 3), True)),
        ({"text": ["a", "b"], "ids": engine.as_tensor(np.zeros((2, 4), np.int64))}, ((2, 4), True)),
        (((engine.as_tensor(np.zeros(5, np.uint8)),), label), ((5,), True)),
        (engine.as_tensor(np.zeros((2, 2), bool)), ((2, 2), False)),
        ((np.zeros((2, 3), np.int16), label), ((2, 3), True)),
        ((np.float32(1.0), label), ((), False)),
    ]
    for batch, expected in cases:
        assert backend.batch_shape(batch) == expected
    for batch in (None, "text", [], {"names": ["a"]}, 3.0):
        assert backend.batch_shape(batch) is None


# The times of callbacks.


def test_an_engine_measures_all_callbacks_if_one_asks(engine):
    """On MindSpore with one of its own callbacks in between, so that there are several bridges."""
    network = engine.weight()
    between = [dt.Callback()]
    if engine.framework == "mindspore":
        from mindspore.train import LambdaCallback

        between = [LambdaCallback(on_train_step_end=lambda context: None)]
    seen = Seen(lambda c: dict(c.callback_times), "on_train_end")
    throughput = Throughput(2)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    logger = StepLogger("log.jsonl", 1)
    model.fit(2, ones(2), ones(1), callbacks=[logger, *between, throughput, *between, seen])
    [times] = seen.values
    assert times.keys() == {"StepLogger", "Throughput"}  # a hook counts when it has returned
    assert all(seconds > 0 for seconds in times.values())
    summary = throughput.summary
    assert summary["steps"] == 2
    assert summary["samples_per_sec"] > 0
    assert 0 < summary["step_sec"] < 60
    assert 0 <= summary["data_sec"] < 60
    assert throughput.slowest in ("StepLogger", "Throughput")
    model.train(1, ones(1), nobody := Seen(lambda c: dict(c.callback_times)))
    assert nobody.values == [{}]


def test_a_hook_that_fails_is_measured_and_its_error_is_as_ever(clock):
    def fail(run_context):
        clock.advance(3.0)
        raise ZeroDivisionError

    class Asking(dt.Callback):
        needs = frozenset({Capability.CALLBACK_TIMES})

    times = Seen(lambda c: dict(c.callback_times), "on_teardown")
    with pytest.raises(ZeroDivisionError) as caught:
        FakeLoop([1.0]).run([Asking(), At("on_train_step_end", fail), times])
    assert times.values == [{"At": 3.0}]
    assert "At.on_train_step_end at step 1, epoch 1" in str(caught.value.__notes__)


def test_where_nobody_asks_emitting_is_what_it_was():
    """The same class with the hooks themselves in it, so the same Python calls."""
    callbacks = [Slow(None, on_train_step_end=1.0), StepLogger()]
    plain = EventBus(callbacks)
    assert plain.callback_times is None
    emitter = plain.emitter(dt.Event.TRAIN_STEP_END).__self__
    assert type(emitter) is bus.Emitter
    assert emitter.calls[0][1] is callbacks[0].on_train_step_end
    asked = EventBus([*callbacks, Throughput()])
    assert asked.callback_times == {}
    assert type(asked.emitter(dt.Event.TRAIN_STEP_END).__self__) is not bus.Emitter


def test_a_part_of_a_list_is_measured_as_the_list_is(clock):
    class Asking(dt.Callback):
        needs = frozenset({Capability.CALLBACK_TIMES})

    first, second = Slow(clock, on_train_step_end=1.0), Sluggish(clock, on_train_step_end=3.0)
    engine = RunEngine([Asking(), first, second])
    engine.emit(dt.Event.TRAIN_STEP_END, engine.part([second]))
    assert engine.context.callback_times == {"Sluggish": 3.0}


def test_an_error_is_told_where_callbacks_are_timed():
    """The one event with something to tell beside the context."""
    told = []

    class Tells(dt.Callback):
        def on_exception(self, run_context, error):
            told.append(error)

    class Asking(dt.Callback):
        needs = frozenset({Capability.CALLBACK_TIMES})

    error = RuntimeError("boom")
    engine = RunEngine([Tells(), Asking()])
    with pytest.raises(RuntimeError), engine:
        raise error
    assert told == [error]
    assert list(engine.context.callback_times) == ["Tells"]


# Its arguments.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"interval": 0}, ArgumentValueError),
        ({"interval": 1.5}, ArgumentTypeError),
        ({"interval": True}, ArgumentTypeError),
        ({"tokens": 3}, ArgumentTypeError),
    ],
)
def test_what_cannot_be_used_is_refused(arguments, error):
    with pytest.raises(error, match="Throughput"):
        Throughput(**arguments)


def test_its_clock_is_monotonic():
    assert Throughput._clock is time.perf_counter


def test_steps_that_come_in_chunks_count_as_what_they_are(clock):
    """Where data is sunk to the device, a step event is for several batches."""
    context = dt.RunContext(params := {"cur_step_num": 0, "cur_epoch_num": 1})
    throughput = Throughput(4)
    throughput.on_train_begin(context)
    params["cur_step_num"] = 5
    throughput.on_train_step_begin(context)
    clock.advance(10.0)
    throughput.on_train_step_end(context)
    assert (throughput.summary["steps"], throughput.summary["step_sec"]) == (5, 2.0)
