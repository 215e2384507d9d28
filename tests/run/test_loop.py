"""The loop emits MindSpore's events in MindSpore's order and keeps the counters as MindSpore does.

Plain functions are the steps and lists are the data, so that nothing but the loop is at work.
"""

import itertools
import math

import pytest
from engines import Stream

from dualtrain.callback import Callback
from dualtrain.engine import RunEngine
from dualtrain.events import LIFECYCLE, Event
from dualtrain.loop import run_evaluation, run_training
from dualtrain.testing.fake_backend import FakeBackend

THREE = ["batch 1", "batch 2", "batch 3"]
TWO = ["valid 1", "valid 2"]


class Updates:
    """A step for training that counts its calls, as an engine's step object does."""

    learning_rate = None

    def __init__(self):
        self.global_step = 0
        self.batches = []

    def __call__(self, batch):
        self.global_step += 1
        self.batches.append(batch)
        return f"trained on {batch}"


def length_of(batches):
    return len(batches) if hasattr(batches, "__len__") else math.inf


def fit(
    callbacks,
    *,
    epoch=2,
    batches=THREE,
    valid=None,
    initial_epoch=0,
    step=None,
    eval_step=lambda batch: f"evaluated {batch}",
    update=None,
    agree=None,
    **options,
):
    """Run the loop over plain data as an engine does, and return the context."""
    step = Updates() if step is None else step
    engine = RunEngine(
        callbacks,
        params={"batch_num": length_of(batches)},
        backend=None if agree is None else TwoRanks(agree),
        step=step if isinstance(step, Updates) else None,
        epochs=epoch,
        initial_epoch=initial_epoch,
    )

    def evaluate():
        run_evaluation(
            engine,
            eval_step,
            valid,
            update=update,
            results=lambda: {"acc": 0.5},
            eval_loss=lambda: 1.25,
            batch_num=length_of(valid),
        )

    with engine:
        run_training(
            engine,
            step,
            batches,
            epoch=epoch,
            initial_epoch=initial_epoch,
            evaluate=None if valid is None else evaluate,
            **options,
        )
    return engine.context


class TwoRanks(FakeBackend):
    """One of two ranks, which agree by a function."""

    def __init__(self, agree):
        self.any_rank = agree

    def rank(self):
        return 0

    def world_size(self):
        return 2


def evaluate_alone(callbacks, batches=TWO, *, step=lambda batch: f"evaluated {batch}", **parts):
    """Evaluate outside of training, and return the context."""
    engine = RunEngine(callbacks)
    parts = {"results": lambda: {"acc": 0.5}, **parts}
    with engine:
        run_evaluation(engine, step, batches, batch_num=length_of(batches), **parts)
    return engine.context


class Trace(Callback):
    """Note every event, with whatever ``look`` reads from the context then."""

    def __init__(self, look=lambda run_context: None):
        self.look = look
        self.seen = []

    def names(self):
        return [event.value.removeprefix("on_") for event, _ in self.seen]

    def at(self, event):
        return [found for name, found in self.seen if name == event]

    def count(self, event):
        return len(self.at(event))


def _note(self, run_context):
    self.seen.append((run_context.event, self.look(run_context)))


for _event in LIFECYCLE:
    setattr(Trace, _event.value, _note)


class StopAt(Callback):
    """Request a stop at the given occurrence of an event."""

    def __init__(self, event, occurrence=1, **request):
        self.occurrence = occurrence
        self.request = request
        self.count = 0
        setattr(self, str(event), self.tell)

    def tell(self, run_context):
        self.count += 1
        if self.count == self.occurrence:
            run_context.request_stop(**self.request)


# The order of events.


def test_fit_emits_the_events_in_mindspores_order_with_its_counters():
    trace = Trace(lambda c: (c.epoch, c.step, c.batches_per_epoch, c.mode))
    fit([trace], epoch=2, batches=THREE, valid=TWO)

    def an_epoch(epoch, first_step):
        yield "on_train_epoch_begin", (epoch, first_step, 3, "train")
        for step in range(first_step + 1, first_step + 4):
            yield "on_train_step_begin", (epoch, step, 3, "train")
            yield "on_train_step_end", (epoch, step, 3, "train")
        yield "on_eval_begin", (epoch, 0, 2, "eval")
        yield "on_eval_epoch_begin", (epoch, 0, 2, "eval")
        for step in (1, 2):
            yield "on_eval_step_begin", (epoch, step, 2, "eval")
            yield "on_eval_step_end", (epoch, step, 2, "eval")
        yield "on_eval_epoch_end", (epoch, 2, 2, "eval")
        yield "on_eval_end", (epoch, 2, 2, "eval")
        yield "on_train_epoch_end", (epoch, first_step + 3, 3, "train")

    assert trace.seen == [
        ("on_train_begin", (None, 0, 3, "train")),
        *an_epoch(1, 0),
        *an_epoch(2, 3),
        ("on_train_end", (2, 6, 3, "train")),
    ]


def test_train_emits_the_training_events_alone():
    trace = Trace()
    fit([trace], epoch=1, batches=["batch"])
    assert trace.names() == [
        "train_begin",
        "train_epoch_begin",
        "train_step_begin",
        "train_step_end",
        "train_epoch_end",
        "train_end",
    ]


def test_eval_alone_emits_the_six_eval_events_and_knows_no_epoch():
    trace = Trace(lambda c: (c.step, c.mode, c.epoch, "cur_epoch_num" in c.original_args()))
    evaluate_alone([trace])
    assert trace.seen == [
        ("on_eval_begin", (0, "eval", None, False)),
        ("on_eval_epoch_begin", (0, "eval", None, False)),
        ("on_eval_step_begin", (1, "eval", None, False)),
        ("on_eval_step_end", (1, "eval", None, False)),
        ("on_eval_step_begin", (2, "eval", None, False)),
        ("on_eval_step_end", (2, "eval", None, False)),
        ("on_eval_epoch_end", (2, "eval", None, False)),
        ("on_eval_end", (2, "eval", None, False)),
    ]


def test_callbacks_are_called_in_the_lists_order_at_every_event():
    order = []
    one, two = Trace(lambda c: order.append("one")), Trace(lambda c: order.append("two"))
    fit([two, one], valid=TWO)
    assert order == ["two", "one"] * len(one.seen)
    assert len(one.seen) == 34


def test_a_run_without_callbacks_trains_all_the_same():
    step = Updates()
    context = fit(None, epoch=2, step=step, valid=TWO)
    assert step.batches == THREE * 2
    assert (context.step, context.epoch, context.global_step) == (6, 2, 6)


# Counters and values.


def test_steps_in_the_epoch_restart_and_updates_do_not():
    trace = Trace(lambda c: (c.step, c.step_in_epoch, c.global_step))
    fit([trace], epoch=2, valid=TWO)
    assert trace.at("on_train_step_end") == [
        (1, 1, 1),
        (2, 2, 2),
        (3, 3, 3),
        (4, 1, 4),
        (5, 2, 5),
        (6, 3, 6),
    ]
    assert trace.at("on_train_begin") == [(0, 0, 0)]
    assert trace.at("on_train_epoch_begin") == [(0, 0, 0), (3, 0, 3)]
    assert trace.at("on_train_epoch_end") == [(3, 3, 3), (6, 3, 6)]
    assert trace.at("on_eval_step_end") == [(1, 1, 3), (2, 2, 3), (1, 1, 6), (2, 2, 6)]


def test_the_batch_and_what_the_step_returned_are_readable_at_step_end():
    trace = Trace(lambda c: (c.original_args().get("train_dataset_element"), c.outputs))
    fit([trace], epoch=1, batches=["x", "y"])
    assert trace.at("on_train_step_begin") == [("x", None), ("y", "trained on x")]
    assert trace.at("on_train_step_end") == [("x", "trained on x"), ("y", "trained on y")]


def test_evaluation_shows_its_own_batches_and_outputs_and_gives_trainings_back():
    trace = Trace(lambda c: (c.original_args().get("eval_dataset_element"), c.outputs))
    fit([trace], epoch=1, batches=["x"], valid=TWO)
    assert trace.at("on_eval_step_end") == [
        ("valid 1", "evaluated valid 1"),
        ("valid 2", "evaluated valid 2"),
    ]
    assert trace.at("on_train_epoch_end")[0][1] == "trained on x"


def test_the_step_gets_each_batch_once_in_order():
    step = Updates()
    fit([], epoch=3, batches=THREE, step=step)
    assert step.batches == THREE * 3


def test_a_batch_may_be_false_and_a_step_may_return_nothing():
    trace = Trace(lambda c: (c.original_args().get("train_dataset_element"), c.outputs))
    fit([trace], epoch=1, batches=[0, None, ()], step=lambda batch: None)
    assert trace.at("on_train_step_end") == [(0, None), (None, None), ((), None)]


def test_the_losses_of_training_and_evaluation_are_kept_apart():
    """Evaluation restarts the step counter, so a loss remembered by its step alone would leak."""
    trace = Trace(lambda c: c.loss)
    fit([trace], epoch=1, batches=[1.0], valid=[5.0], step=lambda x: x, eval_step=lambda x: x)
    assert trace.at("on_train_step_end") == [1.0]
    assert trace.at("on_eval_step_end") == [5.0]
    assert trace.at("on_train_epoch_end") == [1.0]


# The initial epoch.


def test_initial_epoch_numbers_epochs_absolutely_and_steps_from_one():
    trace = Trace(lambda c: (c.epoch, c.step, c.epochs, c.original_args().epoch_num))
    fit([trace], epoch=4, initial_epoch=2, batches=["a", "b"])
    assert trace.at("on_train_step_end") == [(3, 1, 4, 2), (3, 2, 4, 2), (4, 3, 4, 2), (4, 4, 4, 2)]
    assert trace.at("on_train_epoch_end") == [(3, 2, 4, 2), (4, 4, 4, 2)]
    assert trace.count("on_train_begin") == trace.count("on_train_end") == 1


@pytest.mark.parametrize(("frequency", "evaluated"), [(2, [4]), (3, [3]), ([1, 4], [4])])
def test_valid_frequency_means_absolute_epochs_after_an_initial_epoch(frequency, evaluated):
    trace = Trace(lambda c: c.epoch)
    fit([trace], epoch=5, initial_epoch=2, valid=TWO, valid_frequency=frequency)
    assert trace.at("on_eval_end") == evaluated


# When an evaluation is due.


@pytest.mark.parametrize(
    ("frequency", "evaluated"),
    [
        (1, [1, 2, 3, 4, 5]),
        (2, [2, 4]),
        (5, [5]),
        (6, []),
        ([1, 4], [1, 4]),
        ([4, 1, 4], [1, 4]),
        ([9], []),
        ([], []),
    ],
    ids=str,
)
def test_valid_frequency_says_after_which_epochs_to_evaluate(frequency, evaluated):
    trace = Trace(lambda c: c.epoch)
    fit([trace], epoch=5, valid=TWO, valid_frequency=frequency)
    assert trace.at("on_eval_begin") == evaluated
    assert trace.at("on_train_epoch_end") == [1, 2, 3, 4, 5]


def test_evaluation_is_due_every_epoch_by_default():
    trace = Trace()
    fit([trace], epoch=3, valid=TWO)
    assert trace.count("on_eval_end") == 3


def test_results_are_readable_from_the_evaluations_end_to_the_epochs_end_and_gone_afterwards():
    trace = Trace(lambda c: ("metrics" in c.original_args(), "eval_results" in c.original_args()))
    fit([trace], epoch=4, valid=TWO, valid_frequency=2)
    assert trace.at("on_train_epoch_end") == [(False, False), (True, True)] * 2
    assert trace.at("on_eval_end") == [(True, True)] * 2
    for event in set(LIFECYCLE) - {Event.EVAL_END, Event.TRAIN_EPOCH_END}:
        assert set(trace.at(event)) == {(False, False)}


def test_the_contexts_metrics_last_until_the_next_evaluation():
    trace = Trace(lambda c: dict(c.metrics))
    results = {"acc": 0.5, "eval_loss": 1.25}
    context = fit([trace], epoch=2, valid=TWO)
    assert trace.at("on_train_step_end") == [{}] * 3 + [results] * 3
    assert trace.at("on_eval_epoch_end") == [{}, results]
    assert trace.at("on_eval_end") == [results] * 2
    assert trace.at("on_train_end") == [results]
    assert context.metrics == results


def test_the_contexts_metrics_are_kept_although_nobody_read_them_in_time():
    context = fit([], epoch=1, valid=TWO)
    assert "metrics" not in context.original_args()
    assert "eval_results" not in context.original_args()
    assert context.metrics == {"acc": 0.5, "eval_loss": 1.25}


def test_eval_alone_leaves_its_metrics():
    context = evaluate_alone([])
    assert context.original_args().metrics == {"acc": 0.5}
    assert context.metrics == {"acc": 0.5}


def test_each_evaluated_batch_enters_the_metrics_after_its_event():
    order = []
    trace = Trace(lambda c: order.append(c.event.value))
    evaluate_alone(
        [trace],
        step=lambda batch: order.append("step") or batch,
        update=lambda outputs: order.append(f"update {outputs}"),
        results=lambda: order.append("results") or {"acc": 0.5},
    )
    assert order == [
        "on_eval_begin",
        "on_eval_epoch_begin",
        "on_eval_step_begin",
        "step",
        "on_eval_step_end",
        "update valid 1",
        "on_eval_step_begin",
        "step",
        "on_eval_step_end",
        "update valid 2",
        "on_eval_epoch_end",
        "results",
        "on_eval_end",
    ]


# Data without a length.


def test_a_stream_trains_and_evaluates():
    trace = Trace(lambda c: (c.step, c.step_in_epoch, c.batches_per_epoch))
    fit([trace], epoch=2, batches=Stream(range(7)), valid=Stream(TWO))
    steps = [(step, (step - 1) % 7 + 1, None) for step in range(1, 15)]
    assert trace.at("on_train_step_end") == steps
    assert trace.at("on_train_epoch_end") == [(7, 7, None), (14, 7, None)]
    assert trace.at("on_eval_step_end") == [(1, 1, None), (2, 2, None)] * 2


def test_the_batch_number_of_a_stream_compares_as_endless():
    """Tutorials compare the step with epoch_num * batch_num, which must not raise."""
    trace = Trace(lambda c: c.step == c.original_args().epoch_num * c.original_args().batch_num)
    fit([trace], epoch=1, batches=Stream(range(2)))
    assert trace.at("on_train_step_end") == [False, False]


def test_an_endless_stream_ends_by_a_stop():
    trace = Trace(lambda c: c.step)
    fit([StopAt("on_train_step_end", 5), trace], batches=itertools.count())
    assert trace.at("on_train_step_end") == [1, 2, 3, 4, 5]
    assert trace.count("on_train_end") == 1


# Stopping in training.


@pytest.mark.parametrize(
    ("event", "occurrence", "steps", "epochs", "evaluations"),
    [
        # A request is seen at the end of a step, so whatever comes before the first one costs a step.
        ("on_train_begin", 1, 1, [1], 1),
        ("on_train_epoch_begin", 1, 1, [1], 1),
        ("on_train_step_begin", 1, 1, [1], 1),
        ("on_train_step_end", 1, 1, [1], 1),
        ("on_train_step_begin", 2, 2, [1], 1),
        ("on_train_step_end", 2, 2, [1], 1),
        ("on_train_step_end", 3, 3, [1], 1),
        ("on_train_epoch_end", 1, 3, [1], 1),
        ("on_train_epoch_begin", 2, 4, [1, 2], 2),
        ("on_train_step_end", 5, 5, [1, 2], 2),
        ("on_train_epoch_end", 2, 6, [1, 2], 2),
        ("on_train_epoch_end", 3, 9, [1, 2, 3], 3),
        ("on_train_end", 1, 9, [1, 2, 3], 3),
    ],
)
def test_a_stop_in_training_ends_after_the_step_with_evaluation_and_end(
    event, occurrence, steps, epochs, evaluations
):
    trace, step = Trace(lambda c: c.epoch), Updates()
    context = fit([StopAt(event, occurrence), trace], epoch=3, valid=TWO, step=step)
    assert context.get_stop_requested()
    assert len(step.batches) == steps
    assert trace.count("on_train_step_begin") == trace.count("on_train_step_end") == steps
    assert trace.at("on_train_epoch_begin") == epochs
    assert trace.at("on_train_epoch_end") == epochs
    assert trace.count("on_train_end") == 1
    # An evaluation that was due anyway is not cut short.
    assert trace.count("on_eval_step_end") == 2 * evaluations
    assert trace.count("on_eval_end") == evaluations


def test_after_a_stop_at_a_step_come_evaluation_epoch_end_and_train_end():
    trace = Trace()
    fit([StopAt("on_train_step_end", 2), trace], epoch=3, valid=["valid"])
    assert trace.names()[5:] == [
        "train_step_end",
        "eval_begin",
        "eval_epoch_begin",
        "eval_step_begin",
        "eval_step_end",
        "eval_epoch_end",
        "eval_end",
        "train_epoch_end",
        "train_end",
    ]


def test_after_a_stop_an_evaluation_that_is_not_due_does_not_run():
    trace = Trace()
    fit([StopAt("on_train_step_end", 2), trace], epoch=3, valid=TWO, valid_frequency=2)
    assert trace.names()[5:] == ["train_step_end", "train_epoch_end", "train_end"]


def test_the_epoch_end_after_a_stop_shows_the_step_it_stopped_at():
    trace = Trace(lambda c: (c.step, c.mode, c.batches_per_epoch))
    fit([StopAt("on_train_step_end", 2), trace], valid=TWO)
    assert trace.at("on_train_epoch_end") == [(2, "train", 3)]
    assert trace.at("on_train_end") == [(2, "train", 3)]


def test_a_stop_reaches_every_callback_of_the_event_and_is_visible_to_those_after():
    before, after = Trace(lambda c: c.get_stop_requested()), Trace(lambda c: c.stop_reason)
    fit([before, StopAt("on_train_step_end", 2, reason="enough"), after], epoch=1)
    assert before.at("on_train_step_end") == [False, False]
    assert after.at("on_train_step_end") == [None, "enough"]
    assert before.at("on_train_epoch_end") == [True]


# Stopping in an evaluation.


@pytest.mark.parametrize(
    ("event", "evaluated"),
    [
        ("on_eval_begin", 1),
        ("on_eval_epoch_begin", 1),
        ("on_eval_step_begin", 1),
        ("on_eval_step_end", 1),
        ("on_eval_epoch_end", 4),
        ("on_eval_end", 4),
    ],
)
def test_a_stop_in_an_evaluation_cuts_it_short_and_ends_training_after_the_epoch(event, evaluated):
    updated = []
    trace = Trace()
    context = fit([StopAt(event), trace], epoch=3, valid=[1, 2, 3, 4], update=updated.append)
    assert context.get_stop_requested()
    assert trace.count("on_train_step_end") == 3
    assert trace.count("on_eval_step_begin") == trace.count("on_eval_step_end") == evaluated
    assert updated == [f"evaluated {n}" for n in range(1, evaluated + 1)]
    assert trace.names()[-4:] == ["eval_epoch_end", "eval_end", "train_epoch_end", "train_end"]
    assert trace.count("on_eval_end") == trace.count("on_train_epoch_end") == 1
    assert context.metrics == {"acc": 0.5, "eval_loss": 1.25}


def test_a_stop_in_the_middle_of_an_evaluation_ends_it_with_that_batch():
    trace = Trace(lambda c: c.step)
    fit([StopAt("on_eval_step_end", 3), trace], epoch=3, valid=[1, 2, 3, 4])
    assert trace.at("on_eval_step_end") == [1, 2, 3]
    assert trace.count("on_train_epoch_end") == 1


def test_a_stop_in_a_later_evaluation_ends_training_there():
    trace = Trace(lambda c: c.epoch)
    fit([StopAt("on_eval_end", 2), trace], epoch=5, valid=TWO, valid_frequency=2)
    assert trace.at("on_train_epoch_end") == [1, 2, 3, 4]
    assert trace.count("on_train_end") == 1


def test_a_second_request_during_the_due_evaluation_does_not_cut_it_short():
    trace = Trace()
    fit([StopAt("on_train_step_end", 2), StopAt("on_eval_begin"), trace], valid=[1, 2, 3])
    assert trace.count("on_eval_step_end") == 3


@pytest.mark.parametrize(
    ("event", "evaluated"), [("on_eval_begin", 1), ("on_eval_step_end", 1), ("on_eval_epoch_end", 3)]
)
def test_a_stop_cuts_a_lone_evaluation_short(event, evaluated):
    trace = Trace()
    context = evaluate_alone([StopAt(event), trace], batches=[1, 2, 3])
    assert trace.count("on_eval_step_end") == evaluated
    assert trace.names()[-2:] == ["eval_epoch_end", "eval_end"]
    assert context.metrics == {"acc": 0.5}


# The errors that a stop may carry.


@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_end", "on_train_epoch_end"])
def test_raise_after_arrives_once_the_run_has_ended_normally(event):
    trace, pruned = Trace(), ValueError("pruned")
    with pytest.raises(ValueError, match="pruned") as caught:
        fit([StopAt(event, raise_after=pruned), trace], epoch=3, valid=TWO)
    assert caught.value is pruned
    assert trace.names()[-2:] == ["train_epoch_end", "train_end"]


# Ranks that agree on a stop.


def test_the_ranks_are_asked_at_every_step_and_every_epochs_end():
    """Every rank has to ask equally often, whether it wants to stop or not."""
    asked = []
    fit([], epoch=2, valid=TWO, agree=lambda flag: asked.append(flag) or flag)
    assert asked == [False] * 8


def test_another_ranks_stop_ends_this_one_at_the_same_step():
    trace, answers = Trace(lambda c: c.step), iter([False, True, True])
    fit([trace], epoch=2, valid=TWO, agree=lambda flag: next(answers))
    assert trace.at("on_train_step_end") == [1, 2]
    assert trace.count("on_eval_step_end") == 2
    assert trace.count("on_train_end") == 1


def test_this_ranks_wish_is_what_the_others_are_told():
    asked = []
    fit([StopAt("on_train_step_end", 2)], agree=lambda flag: asked.append(flag) or flag)
    assert asked == [False, True, True]


# Errors.


class Fails(Callback):
    def __init__(self, event, occurrence, error):
        self.occurrence = occurrence
        self.error = error
        self.calls = 0
        setattr(self, str(event), self.tell)

    def tell(self, run_context):
        self.calls += 1
        if self.calls == self.occurrence:
            raise self.error


class WayOut(Trace):
    """Note the way out as well, in a list that several share."""

    def __init__(self, name, journal):
        super().__init__()
        self.name = name
        self.journal = journal

    def on_exception(self, run_context, error):
        self.journal.append((f"{self.name} exception", error))

    def on_teardown(self, run_context):
        self.journal.append((f"{self.name} teardown", None))

    def __exit__(self, kind, error, traceback):
        self.journal.append((f"{self.name} exit", error))


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("event", LIFECYCLE, ids=str)
def test_an_error_in_any_event_goes_the_one_way_out(event, kind):
    journal, error = [], kind("boom")
    a, c = WayOut("a", journal), WayOut("c", journal)
    with pytest.raises(kind) as caught:
        fit([a, Fails(event, 1, error), c], valid=TWO)
    assert caught.value is error
    assert journal == [
        ("a exception", error),
        ("c exception", error),
        ("c teardown", None),
        ("a teardown", None),
        ("c exit", error),
        ("a exit", error),
    ]
    assert a.seen[-1][0] == event
    assert a.count(event) == c.count(event) + 1
    assert a.count("on_train_end") == (event == "on_train_end")
    assert [note for note in error.__notes__ if f"Fails.{event} at step" in note]


def test_the_note_counts_steps_and_epochs_as_the_run_does():
    with pytest.raises(RuntimeError) as caught:
        fit([Fails("on_train_step_end", 5, RuntimeError("boom"))], epoch=3)
    note = "\n".join(caught.value.__notes__)
    for part in ("Fails", "on_train_step_end", "step 5", "epoch 2"):
        assert part in note


def test_an_error_in_the_step_goes_the_same_way_out():
    def step(batch):
        if batch == "batch 2":
            raise ZeroDivisionError("in the step")

    journal = []
    trace = WayOut("a", journal)
    with pytest.raises(ZeroDivisionError, match="in the step") as caught:
        fit([trace], step=step)
    assert trace.names()[-2:] == ["train_step_end", "train_step_begin"]
    assert journal == [("a exception", caught.value), ("a teardown", None), ("a exit", caught.value)]


def test_an_error_in_the_data_goes_the_same_way_out():
    def batches():
        yield "batch 1"
        raise OSError("disk is gone")

    journal = []
    trace = WayOut("a", journal)
    with pytest.raises(OSError, match="disk is gone") as caught:
        fit([trace], batches=batches())
    assert trace.names()[-1] == "train_step_end"
    assert journal == [("a exception", caught.value), ("a teardown", None), ("a exit", caught.value)]


def test_an_error_in_the_evaluations_step_goes_the_same_way_out():
    journal = []
    trace = WayOut("a", journal)
    with pytest.raises(ZeroDivisionError) as caught:
        fit([trace], valid=TWO, eval_step=lambda batch: 1 / 0)
    assert trace.names()[-1] == "eval_step_begin"
    assert journal == [("a exception", caught.value), ("a teardown", None), ("a exit", caught.value)]


# Several runs.


def test_one_callback_serves_a_second_run():
    trace = Trace(lambda c: (c.epoch, c.step))
    fit([trace], epoch=2, valid=TWO)
    first, trace.seen = trace.seen, []
    fit([trace], epoch=2, valid=TWO)
    assert trace.seen == first


def test_a_training_step_may_evaluate_on_its_own():
    """A callback may call eval in the middle of a run: the run's own counters are not touched."""
    inner = Trace()

    class Evaluates(Callback):
        def on_train_step_end(self, run_context):
            evaluate_alone([inner])

    outer = Trace(lambda c: (c.step, c.mode))
    fit([Evaluates(), outer], epoch=1)
    assert outer.at("on_train_step_end") == [(1, "train"), (2, "train"), (3, "train")]
    assert inner.count("on_eval_end") == 3
