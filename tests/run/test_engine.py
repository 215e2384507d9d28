"""The verbs of a run: state and dispatch apart, what is refused, and how a run is left."""

import signal

import pytest

from dualtrain.callback import Callback
from dualtrain.context import CallbackParams
from dualtrain.engine import RunEngine
from dualtrain.errors import CapabilityError, RunStateError
from dualtrain.events import Event
from dualtrain.protocol import STEP_CAPABILITIES, Capability
from dualtrain.testing import RecordingCallback
from dualtrain.testing.fake_backend import FakeBackend


class Ranks(FakeBackend):
    """One of two ranks; ``asked`` keeps what it has said, ``answers`` what it is told."""

    def __init__(self, *answers):
        self.asked, self.answers = [], list(answers)

    def rank(self):
        return 1

    def world_size(self):
        return 2

    def any_rank(self, flag):
        self.asked.append(flag)
        return self.answers.pop(0)


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


def counters(engine):
    params = engine.context.original_args()
    return tuple(params.get(key) for key in ("mode", "cur_epoch_num", "cur_step_num", "batch_num"))


def in_training(callbacks=None, **options):
    """Return an open run after its second step, of two batches."""
    engine = RunEngine(callbacks, params={"batch_num": 2}, **options)
    engine.open()
    engine.begin()
    engine.begin_epoch(1)
    for batch, outputs in (("a", 1.0), ("b", 2.0)):
        engine.begin_step(batch)
        engine.end_step(outputs)
    return engine


# State and dispatch.


def test_verbs_change_the_state_and_call_nobody():
    recording = RecordingCallback()
    engine = in_training(recording)
    assert counters(engine) == ("train", 1, 2, 2)
    assert (engine.context.batch, engine.context.outputs) == ("b", 2.0)
    engine.begin_evaluation(1)
    engine.begin_eval_step("c")
    engine.end_eval_step(3.0)
    assert counters(engine) == ("eval", 1, 1, 1)
    engine.end_evaluation({"acc": 0.5})
    engine.leave_evaluation()
    engine.end_epoch()
    engine.end()
    assert counters(engine) == ("train", 1, 2, 2)
    assert recording.trace == []
    assert engine.close() is None
    assert recording.names == ["on_teardown"]


def test_emitting_calls_the_listeners_and_changes_no_state():
    recording = RecordingCallback()
    engine = in_training(recording)
    for _ in range(2):
        engine.emit(Event.TRAIN_STEP_END)
    engine.emitter(Event.TRAIN_EPOCH_END)()
    assert recording.names == ["on_train_step_end"] * 2 + ["on_train_epoch_end"]
    assert counters(engine) == ("train", 1, 2, 2)
    engine.close()


def test_an_event_without_a_listener_has_no_emitter():
    assert RunEngine(Callback()).emitter(Event.TRAIN_STEP_END) is None


def test_a_part_of_the_list_is_emitted_to_alone():
    first, second, third = (RecordingCallback() for _ in range(3))
    engine = RunEngine([first, second, third])
    part = engine.part([third, first])
    engine.emit(Event.TRAIN_BEGIN, part)
    engine.emitter(Event.TRAIN_END, part)()
    assert [len(one.trace) for one in (first, second, third)] == [2, 0, 2]
    assert engine.emitter(Event.TRAIN_BEGIN, engine.part([])) is None


def test_the_bag_has_all_keys_of_training_from_its_begin():
    engine = RunEngine(epochs=5, initial_epoch=2)
    engine.begin()
    params = engine.context.original_args()
    assert (params.epoch_num, params.mode, params.cur_step_num) == (3, "train", 0)
    assert (params.parallel_mode, params.device_number) == ("stand_alone", 1)
    assert (params.network, params.loss_scale_mananger, params.batch_num) == (None, None, None)
    assert "cur_epoch_num" not in params


def test_what_the_driver_knows_is_not_overwritten():
    params = {"network": "net", "batch_num": 7, "device_number": 4, "epoch_num": 9}
    engine = RunEngine(params=params, epochs=5)
    engine.begin()
    bag = engine.context.original_args()
    assert {key: bag[key] for key in params} == params


# Refusals.


def test_a_run_is_entered_once_and_stays_open():
    recording = RecordingCallback()
    engine = RunEngine(recording)
    engine.open()
    with pytest.raises(RunStateError, match="but this one is open: make a new one"):
        engine.open()
    assert recording.trace == []
    assert engine.close() is None
    assert recording.names == ["on_teardown"]


def test_a_run_that_has_ended_is_not_entered_again():
    with (engine := RunEngine()):
        pass
    with pytest.raises(RunStateError, match="but this one has ended: make a new one"):
        engine.open()


def test_a_callback_is_in_one_open_run_at_a_time():
    recording = RecordingCallback()
    with RunEngine([Callback(), recording]):
        with pytest.raises(RunStateError, match="RecordingCallback is in another open run"):
            RunEngine(recording).__enter__()
        assert recording.trace == []
    with RunEngine(recording):
        pass
    assert recording.names == ["on_teardown"] * 2


def test_a_callback_is_free_again_after_a_run_that_failed_at_its_begin():
    class Fails(RecordingCallback):
        def __enter__(self):
            raise OSError("no disk")

    recording = RecordingCallback()
    with pytest.raises(OSError, match="no disk"):
        RunEngine([recording, Fails()]).__enter__()
    with RunEngine(recording):
        pass


def test_a_need_is_refused_in_the_engines_words_before_anything_is_entered():
    class Needs(RecordingCallback):
        needs = frozenset({Capability.GRAD_NORM})

        def __enter__(self):
            raise AssertionError("it is refused before")

    with pytest.raises(CapabilityError, match="Needs needs grad_norm, which a loop of mine does not have"):
        RunEngine(Needs(), mode="a loop of mine").open()


def test_a_run_has_the_capabilities_of_backend_and_step_that_it_can_keep():
    backend = FakeBackend()
    alone = RunEngine(backend=backend).context.capabilities
    assert alone == backend.capabilities() - STEP_CAPABILITIES | {Capability.CALLBACK_TIMES}

    class Step:
        capabilities = frozenset({Capability.GRAD_NORM})

    assert RunEngine(backend=backend, step=Step()).context.capabilities == alone | {Capability.GRAD_NORM}
    own = frozenset({Capability.EAGER})
    assert RunEngine(backend=backend, capabilities=own).context.capabilities == own


# An engine that counts by itself.


def test_an_adopted_bag_is_read_and_not_counted_in():
    bag = CallbackParams(mode="train", cur_step_num=4, cur_epoch_num=2, net_outputs=0.5)
    engine = RunEngine(params={"network": "net"})
    engine.adopt(bag)
    assert engine.context.original_args() is bag
    before = dict(bag)
    engine.begin_epoch(9)
    bag["cur_step_num"] = before["cur_step_num"] = 6
    engine.begin_step("batch")
    engine.end_step(7.0)
    engine.begin_evaluation(3)
    engine.begin_eval_step("batch")
    engine.end_eval_step(7.0)
    engine.leave_evaluation()
    assert bag == before
    assert (engine.context.step, engine.context.step_in_epoch, engine.context.loss) == (6, 2, 0.5)


def test_results_in_an_adopted_bag_become_the_contexts_metrics():
    engine = RunEngine()
    engine.adopt(bag := CallbackParams(mode="eval", cur_step_num=1, metrics={"acc": 0.5}))
    engine.end_evaluation()
    engine.end_epoch()
    assert bag["metrics"] == {"acc": 0.5}
    del bag["metrics"]
    assert engine.context.metrics == {"acc": 0.5}


# Leaving an evaluation.

LEAVING = {
    "leave_evaluation": (lambda engine: engine.leave_evaluation(), ("train", 1, 2, 2)),
    "end_epoch": (lambda engine: engine.end_epoch(), ("train", 1, 2, 2)),
    "end": (lambda engine: engine.end(), ("train", 1, 2, 2)),
    "begin_epoch": (lambda engine: engine.begin_epoch(2), ("train", 2, 2, 2)),
    "begin_step": (lambda engine: engine.begin_step("c"), ("train", 1, 3, 2)),
    "begin_evaluation": (lambda engine: engine.begin_evaluation(4), ("eval", 1, 0, 4)),
}


@pytest.mark.parametrize("verb", LEAVING)
def test_the_next_verb_of_training_leaves_an_evaluation_that_was_not_left(verb):
    leave, expected = LEAVING[verb]
    engine = in_training()
    engine.begin_evaluation(9)
    engine.begin_eval_step("v")
    engine.end_eval_step(5.0)
    assert counters(engine) == ("eval", 1, 1, 9)
    leave(engine)
    assert counters(engine) == expected
    engine.leave_evaluation()
    assert counters(engine)[3] == 2
    assert engine.context.outputs == 2.0
    engine.close()


# Stops.


def test_max_steps_requests_a_stop_after_so_many_batches():
    engine = RunEngine(max_steps=2)
    engine.begin()
    engine.begin_epoch(1)
    stops = []
    for _ in range(2):
        engine.begin_step()
        engine.end_step()
        stops.append(engine.should_stop())
    assert stops == [False, True]
    assert engine.context.stop_reason == "max_steps=2 is reached"


def test_an_evaluation_is_cut_short_by_a_stop_in_it_and_not_by_one_before_it():
    engine = in_training()
    engine.begin_evaluation()
    assert not engine.should_stop()
    engine.context.request_stop()
    assert engine.should_stop()
    engine.begin_evaluation()
    assert not engine.should_stop()
    engine.leave_evaluation()
    assert engine.should_stop()
    engine.close()


def test_ranks_agree_on_a_stop_in_training():
    backend = Ranks(False, True, True)
    engine = in_training(backend=backend)
    assert not engine.should_stop()
    assert not engine.context.get_stop_requested()
    assert engine.should_stop()
    assert engine.context.stop_reason == "another rank requested it"
    assert engine.should_stop()
    assert backend.asked == [False, False, True]
    engine.close()


def test_a_ranks_own_reason_is_kept_and_an_evaluation_asks_nobody():
    backend = Ranks(True)
    engine = in_training(backend=backend)
    engine.begin_evaluation()
    engine.context.request_stop("enough")
    assert engine.should_stop()
    assert backend.asked == []
    engine.leave_evaluation()
    assert engine.should_stop()
    assert (backend.asked, engine.context.stop_reason) == ([True], "enough")
    engine.close()


def test_one_rank_asks_nobody():
    class Alone(Ranks):
        def world_size(self):
            return 1

    engine = in_training(backend=Alone())
    assert not engine.should_stop()
    engine.close()


# Deferred actions.


@pytest.mark.parametrize(
    "verb",
    [
        lambda engine: engine.end_step(),
        lambda engine: engine.end_epoch(),
        lambda engine: engine.end(),
        lambda engine: engine.begin_evaluation(),
        lambda engine: engine.close(),
    ],
    ids=["end_step", "end_epoch", "end", "begin_evaluation", "close"],
)
def test_deferred_actions_are_called_once_in_order(verb):
    engine, called = in_training(), []
    engine.context.defer(lambda: called.append(1))
    engine.context.defer(lambda: called.append(2))
    engine.begin_step()
    assert called == []
    verb(engine)
    assert called == [1, 2]
    engine.close()
    assert called == [1, 2]


def test_a_deferred_action_comes_before_the_listeners_of_the_next_step():
    order = []

    class Listens(Callback):
        def on_train_step_end(self, run_context):
            order.append("listener")

    engine = in_training(Listens())
    engine.context.defer(lambda: order.append("action"))
    engine.begin_step()
    engine.end_step()
    engine.emit(Event.TRAIN_STEP_END)
    assert order == ["action", "listener"]
    engine.close()


def test_an_action_that_fails_at_the_end_is_the_error_that_is_returned():
    recording, called = RecordingCallback(), []
    engine = in_training(recording)
    engine.context.defer(lambda: 1 / 0)
    engine.context.defer(lambda: called.append(1))
    error = engine.close()
    assert isinstance(error, ZeroDivisionError)
    assert "raised in a deferred action" in notes_of(error)
    assert called == [1]
    assert recording.names == ["on_exception", "on_teardown"]


# Closing.


class Fails(Callback):
    """Fail in on_exception, on_teardown and __exit__."""

    def on_exception(self, run_context, error):
        raise OSError("in on_exception")

    def on_teardown(self, run_context):
        raise OSError("in on_teardown")

    def __exit__(self, *details):
        raise KeyboardInterrupt("in __exit__")


def test_close_raises_nothing_and_returns_the_error_with_notes():
    engine, error = in_training([Fails(), Fails()]), ValueError("the first")
    assert engine.close(error) is error
    assert [notes_of(error).count(f"in {place}") for place in ("on_exception", "on_teardown")] == [2, 2]
    assert notes_of(error).count("KeyboardInterrupt: in __exit__") == 2


def test_close_returns_the_first_failure_where_there_was_no_error():
    error = in_training([Fails()]).close()
    assert (type(error), str(error)) == (OSError, "in on_teardown")
    assert "raised in Fails.on_teardown at step 2, epoch 1" in notes_of(error)
    assert "KeyboardInterrupt: in __exit__" in notes_of(error)


def test_a_run_that_is_not_open_is_not_closed():
    recording, error = RecordingCallback(), ValueError()
    engine = RunEngine(recording)
    assert engine.close() is None
    assert engine.close(error) is error
    engine.open()
    assert engine.close() is None
    assert engine.close(error) is error
    assert recording.names == ["on_teardown"]


def test_close_returns_what_was_to_be_raised_after_a_stop():
    engine, error = in_training(), ValueError("pruned")
    engine.context.request_stop(raise_after=error)
    assert engine.close() is error


def test_the_step_and_the_signals_are_entered_before_callbacks_and_left_after_them():
    order = []

    class Stage:
        """A step, or a watch over signals."""

        def __init__(self, name):
            self.name, self.terminated = name, False

        def __enter__(self):
            order.append(f"{self.name} enter")

        def __exit__(self, kind, error, traceback):
            order.append(f"{self.name} exit {error}")

    class Enters(Callback):
        def __enter__(self):
            order.append("callback enter")

        def __exit__(self, kind, error, traceback):
            order.append(f"callback exit {error}")

    class Watched(FakeBackend):
        def signal_watch(self, request_stop):
            return Stage("signals")

    error = ValueError("boom")
    engine = RunEngine(Enters(), backend=Watched(), step=Stage("step"))
    engine.open()
    assert engine.close(error) is error
    assert order == [
        "signals enter",
        "step enter",
        "callback enter",
        "callback exit boom",
        "step exit boom",
        "signals exit boom",
    ]


def test_signals_are_retaken_around_each_step_where_a_framework_replaces_handlers():
    taken = []

    class Watch:
        def __init__(self, request_stop):
            self.retake = lambda: taken.append(1)

    class Watched(FakeBackend):
        def signal_watch(self, request_stop):
            return Watch(request_stop)

    engine = in_training(backend=Watched())
    assert len(taken) == 4
    engine.begin_evaluation()
    engine.begin_eval_step()
    engine.end_eval_step()
    assert len(taken) == 6
    engine.close()


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_handler")
def test_a_sigterm_requests_a_stop_and_the_run_ends_by_system_exit():
    engine = in_training()
    signal.raise_signal(signal.SIGTERM)
    assert (engine.should_stop(), engine.context.stop_reason) == (True, "SIGTERM")
    error = engine.close()
    assert (type(error), error.code) == (SystemExit, 143)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_an_error_goes_before_the_exit_of_a_sigterm():
    engine, error = in_training(), ValueError()
    signal.raise_signal(signal.SIGTERM)
    assert engine.close(error) is error


@pytest.mark.usefixtures("default_handler")
def test_signals_are_left_alone_where_that_is_asked_for():
    with RunEngine(handle_signals=False):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
