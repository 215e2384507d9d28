"""Small cases with known answers: a run's events, its ways to end, and what an evaluation leaves alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from engines import Recorder, Stream, batches, ones
from models import make

import dualtrain as dt
from dualtrain.callbacks import SmartTrainer, StepLogger

TRAIN_STEP = ["on_train_step_begin", "on_train_step_end"]
EVAL_STEP = ["on_eval_step_begin", "on_eval_step_end"]
EVAL_HEAD = ["on_eval_begin", "on_eval_epoch_begin"]
EVAL_TAIL = ["on_eval_epoch_end", "on_eval_end"]


def evaluation(steps):
    return [*EVAL_HEAD, *EVAL_STEP * steps, *EVAL_TAIL]


def epoch(steps, valid=0):
    """The events of an epoch with so many training steps and, if due, so many evaluation steps."""
    middle = evaluation(valid) if valid else []
    return ["on_train_epoch_begin", *TRAIN_STEP * steps, *middle, "on_train_epoch_end"]


def whole(*epochs):
    """The events of a run that ends in the ordinary way."""
    return [
        "on_train_begin",
        *(event for events in epochs for event in events),
        "on_train_end",
        "on_teardown",
    ]


class Stopper:
    """Ask for a stop at an event, the first time that ``when(run_context)`` holds."""

    def __init__(self, event, when=lambda run_context: True):
        def hook(run_context):
            if when(run_context):
                run_context.request_stop("enough")

        setattr(self, event, hook)


# The table of events.


def test_two_epochs_of_three_batches_with_an_evaluation_of_two_after_each(engine):
    seen = Recorder(
        lambda context: (
            context.event.value,
            context.original_args().get("cur_epoch_num"),
            context.original_args()["cur_step_num"],
            context.original_args()["batch_num"],
            context.original_args()["mode"],
        )
    )
    network, model = make(engine, rate=0.25)
    model.fit(2, ones(3), ones(2), callbacks=seen)
    assert seen.calls == [
        ("on_train_begin", None, 0, 3, "train"),
        ("on_train_epoch_begin", 1, 0, 3, "train"),
        ("on_train_step_begin", 1, 1, 3, "train"),
        ("on_train_step_end", 1, 1, 3, "train"),
        ("on_train_step_begin", 1, 2, 3, "train"),
        ("on_train_step_end", 1, 2, 3, "train"),
        ("on_train_step_begin", 1, 3, 3, "train"),
        ("on_train_step_end", 1, 3, 3, "train"),
        ("on_eval_begin", 1, 0, 2, "eval"),
        ("on_eval_epoch_begin", 1, 0, 2, "eval"),
        ("on_eval_step_begin", 1, 1, 2, "eval"),
        ("on_eval_step_end", 1, 1, 2, "eval"),
        ("on_eval_step_begin", 1, 2, 2, "eval"),
        ("on_eval_step_end", 1, 2, 2, "eval"),
        ("on_eval_epoch_end", 1, 2, 2, "eval"),
        ("on_eval_end", 1, 2, 2, "eval"),
        ("on_train_epoch_end", 1, 3, 3, "train"),
        ("on_train_epoch_begin", 2, 3, 3, "train"),
        ("on_train_step_begin", 2, 4, 3, "train"),
        ("on_train_step_end", 2, 4, 3, "train"),
        ("on_train_step_begin", 2, 5, 3, "train"),
        ("on_train_step_end", 2, 5, 3, "train"),
        ("on_train_step_begin", 2, 6, 3, "train"),
        ("on_train_step_end", 2, 6, 3, "train"),
        ("on_eval_begin", 2, 0, 2, "eval"),
        ("on_eval_epoch_begin", 2, 0, 2, "eval"),
        ("on_eval_step_begin", 2, 1, 2, "eval"),
        ("on_eval_step_end", 2, 1, 2, "eval"),
        ("on_eval_step_begin", 2, 2, 2, "eval"),
        ("on_eval_step_end", 2, 2, 2, "eval"),
        ("on_eval_epoch_end", 2, 2, 2, "eval"),
        ("on_eval_end", 2, 2, 2, "eval"),
        ("on_train_epoch_end", 2, 6, 3, "train"),
        ("on_train_end", 2, 6, 3, "train"),
        ("on_teardown", 2, 6, 3, "train"),
    ]
    assert engine.value(network) == 1.0 - 6 * 0.25


def test_an_evaluation_every_other_epoch(engine):
    seen = Recorder()
    results = Recorder(lambda context: (context.event.value, "eval_results" in context.original_args()))
    _, model = make(engine, rate=0.25)
    model.fit(4, ones(3), ones(2), valid_frequency=2, callbacks=[seen, results])
    assert seen.calls == whole(epoch(3), epoch(3, 2), epoch(3), epoch(3, 2))
    ends = [present for event, present in results.calls if event == "on_train_epoch_end"]
    assert ends == [False, True, False, True]
    assert [event for event, present in results.calls if present] == [
        "on_eval_end",
        "on_train_epoch_end",
    ] * 2


def test_an_evaluation_at_the_epochs_listed(engine):
    seen = Recorder()
    _, model = make(engine, rate=0.25)
    model.fit(4, ones(1), ones(1), [1, 4], seen)
    assert seen.calls == whole(epoch(1, 1), epoch(1), epoch(1), epoch(1, 1))


def test_training_has_no_evaluation(engine):
    seen = Recorder()
    _, model = make(engine, rate=0.25)
    model.train(2, ones(2), seen)
    assert seen.calls == whole(epoch(2), epoch(2))


def test_an_evaluation_alone(engine):
    seen = Recorder(lambda context: (context.event.value, context.step, context.epoch, context.mode))
    network, model = make(engine, rate=0.25)
    model.eval(ones(2), seen)
    assert [call[0] for call in seen.calls] == [*evaluation(2), "on_teardown"]
    assert [call[1] for call in seen.calls] == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert {call[2:] for call in seen.calls} == {(None, "eval")}
    assert engine.value(network) == 1.0


def test_callbacks_are_called_in_the_order_of_the_list(engine):
    order = []
    _, model = make(engine, rate=0.25)
    callbacks = [
        Recorder(lambda context, name=name: order.append((context.event.value, name))) for name in "abc"
    ]
    model.fit(1, ones(1), ones(1), callbacks=callbacks)
    events = whole(epoch(1, 1))
    assert events.pop() == "on_teardown"
    assert order == [(event, name) for event in events for name in "abc"] + [
        ("on_teardown", name) for name in "cba"
    ]


# Ways to end.


def test_a_stop_at_a_step_ends_the_epoch_with_its_evaluation(engine):
    seen, steps = Recorder(), Recorder(lambda context: (context.event.value, context.step))
    network, model = make(engine, rate=0.25)
    stopper = Stopper("on_train_step_end", lambda context: context.step == 2)
    model.fit(3, ones(3), ones(2), callbacks=[stopper, seen, steps])
    assert seen.calls == whole(epoch(2, 2))
    assert [step for event, step in steps.calls if event == "on_train_epoch_end"] == [2]
    assert engine.value(network) == 0.5


def test_a_stop_at_a_steps_begin_lets_that_step_be_done(engine):
    seen = Recorder()
    network, model = make(engine, rate=0.25)
    model.train(3, ones(3), [Stopper("on_train_step_begin", lambda context: context.step == 2), seen])
    assert seen.calls == whole(epoch(2))
    assert engine.value(network) == 0.5


def test_a_stop_at_train_begin_lets_one_step_be_done(engine):
    seen = Recorder()
    network, model = make(engine, rate=0.25)
    model.fit(3, ones(3), callbacks=[Stopper("on_train_begin"), seen])
    assert seen.calls == whole(epoch(1))
    assert engine.value(network) == 0.75


def test_a_stop_at_an_epochs_end_ends_the_run(engine):
    seen = Recorder()
    network, model = make(engine, rate=0.25)
    model.fit(3, ones(2), ones(1), callbacks=[Stopper("on_train_epoch_end"), seen])
    assert seen.calls == whole(epoch(2, 1))
    assert engine.value(network) == 0.5


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        ("on_eval_begin", 1),
        ("on_eval_step_end", 1),
        ("on_eval_end", 2),
    ],
)
def test_a_stop_in_an_evaluation_ends_training(engine, event, steps):
    """What one stops on is known at an evaluation's end, so that is where people ask for it."""
    seen = Recorder()
    network, model = make(engine, rate=0.25)
    model.fit(3, ones(3), ones(2), callbacks=[Stopper(event), seen])
    assert seen.calls == whole(epoch(3, steps))
    assert seen.calls.count("on_train_end") == 1
    assert engine.value(network) == 1.0 - 3 * 0.25


def test_a_stop_from_before_does_not_cut_the_evaluation_short(engine):
    seen = Recorder()
    _, model = make(engine, rate=0.25)
    model.fit(3, ones(3), ones(4), callbacks=[seen, Stopper("on_train_step_end")])
    assert seen.calls == whole(epoch(1, 4))


def test_the_reason_of_a_stop_can_be_read_to_the_end(engine):
    seen = Recorder(
        lambda context: (context.event.value, context.get_stop_requested(), context.stop_reason)
    )
    _, model = make(engine, rate=0.25)
    model.train(2, ones(2), [Stopper("on_train_step_end", lambda context: context.step == 1), seen])
    assert seen.calls == [
        ("on_train_begin", False, None),
        ("on_train_epoch_begin", False, None),
        ("on_train_step_begin", False, None),
        ("on_train_step_end", True, "enough"),
        ("on_train_epoch_end", True, "enough"),
        ("on_train_end", True, "enough"),
        ("on_teardown", True, "enough"),
    ]


def test_an_error_that_a_stop_brings_comes_after_the_ordinary_end(engine):
    class Pruner:
        def on_eval_end(self, run_context):
            run_context.request_stop("pruned", raise_after=pruned)

    pruned, seen = LookupError("pruned"), Recorder()
    network, model = make(engine, rate=0.25)
    with pytest.raises(LookupError) as error:
        model.fit(3, ones(2), ones(1), callbacks=[Pruner(), seen])
    assert error.value is pruned
    assert seen.calls == whole(epoch(2, 1))
    assert engine.value(network) == 0.5


def test_an_error_ends_the_run_without_train_end(engine):
    class Failing:
        def on_train_step_end(self, run_context):
            if run_context.step == 2:
                raise error

    error, seen = ZeroDivisionError("odd"), Recorder()
    network, model = make(engine, rate=0.25)
    with pytest.raises(ZeroDivisionError) as caught:
        model.fit(3, ones(3), ones(2), callbacks=[seen, Failing()])
    assert caught.value is error
    assert seen.calls == [
        "on_train_begin",
        "on_train_epoch_begin",
        *TRAIN_STEP * 2,
        "on_exception",
        "on_teardown",
    ]
    assert engine.value(network) == 0.5


def test_a_stop_of_one_run_is_forgotten_in_the_next(engine):
    network, model = make(engine, rate=0.25)
    model.train(1, ones(3), Stopper("on_train_step_end"))
    assert engine.value(network) == 0.75
    model.train(1, ones(3))
    assert engine.value(network) == 0.0


# Counting.


def test_after_an_initial_epoch_epochs_are_absolute_and_steps_begin_at_one(engine):
    seen = Recorder(
        lambda context: (
            context.event.value,
            context.epoch,
            context.step,
            context.original_args()["epoch_num"],
        )
    )
    network, model = make(engine, rate=0.25)
    model.train(4, ones(4), seen, initial_epoch=2)
    steps = [call[1:] for call in seen.calls if call[0] == "on_train_step_end"]
    assert steps == [(3, step, 2) for step in (1, 2, 3, 4)] + [(4, step, 2) for step in (5, 6, 7, 8)]
    assert engine.value(network) == 1.0 - 8 * 0.25


def test_data_without_a_length_can_be_trained_on_and_evaluated(engine):
    seen = Recorder()
    lengths = Recorder(lambda context: context.batches_per_epoch)
    network, model = make(engine, rate=0.25)
    model.fit(2, Stream(ones(7)), Stream(ones(2)), callbacks=[seen, lengths, StepLogger(log_interval=3)])
    assert seen.calls == whole(epoch(7, 2), epoch(7, 2))
    assert set(lengths.calls) == {None}
    assert engine.value(network) == 1.0 - 14 * 0.25
    assert [
        record.step for record in dt.logs.read_log("train_log.jsonl").records if record.mode == "train"
    ] == [3, 6, 9, 12, 14]


def test_a_stream_is_begun_anew_after_an_epoch_that_was_left_early(engine):
    """A stop leaves a stream in the middle; the next run begins at its beginning."""

    class Numbered:
        def __iter__(self):
            yield from batches(*[(0, number) for number in range(5)])

    data, losses = Numbered(), Recorder(lambda context: (context.event.value, context.loss))
    _, model = make(engine, rate=0.25)
    model.train(1, data, Stopper("on_train_step_end", lambda context: context.step == 2))
    model.train(1, data, losses)
    assert [loss for event, loss in losses.calls if event == "on_train_step_end"] == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]


# What a row holds.


def test_a_rate_that_is_a_tensor_is_logged_as_the_number_that_it_was_at_the_step(engine):
    """It is changed after the fourth row was made, and before any row is in the file."""
    network = engine.weight()
    optimizer = engine.sgd(network, engine.as_tensor(np.float32(0.1)))
    model = dt.Model(network, engine.loss_fn(), optimizer)
    model.train(1, batches(*[(0.0, 1.0)] * 6), [StepLogger("log.jsonl", 1), SmartTrainer(3)])
    rows = [json.loads(line) for line in Path("log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.1] * 4 + [0.05] * 2, rel=1e-6)
    assert all(type(row["lr"]) is float for row in rows)


# What an evaluation gives.


def test_the_evaluation_loss_is_the_mean_over_batches(engine):
    """Two samples of loss 10 in one batch and one of 9 in the next: 9.5, and not 29 / 3."""
    valid = [
        (np.zeros(2, np.float32), np.full(2, 10, np.float32)),
        (np.zeros(1, np.float32), np.full(1, 9, np.float32)),
    ]
    _, model = make(engine, rate=0.25)
    assert model.eval(valid) == {"eval_loss": 9.5}
    _, model = make(engine, rate=0.25, metrics={"loss"})
    seen = Recorder(lambda context: (context.event.value, dict(context.metrics)))
    model.fit(1, ones(1), valid, callbacks=seen)
    assert ("on_eval_end", {"loss": 9.5, "eval_loss": 9.5}) in seen.calls


# What an evaluation leaves alone.


def test_the_network_is_in_training_mode_at_every_training_step_and_at_no_evaluation_step(engine):
    seen = Recorder(lambda context: (context.event.value, context.original_args().network.training))
    _, model = make(engine, rate=0.25)
    model.fit(3, ones(2), ones(2), callbacks=seen)
    model.eval(ones(2), callbacks=seen)
    model.train(1, ones(2), callbacks=seen)
    training = [mode for event, mode in seen.calls if event == "on_train_step_end"]
    evaluating = [mode for event, mode in seen.calls if event == "on_eval_step_end"]
    assert training == [True] * 8
    assert evaluating == [False] * 8


PAIR = [(np.array([[10], [12]], np.float32), np.zeros((2, 1), np.float32))]
FAR = [(np.array([[1000], [3000]], np.float32), np.zeros((2, 1), np.float32))]


def normed(engine):
    from networks_torch import Normed

    network = Normed()
    return network, dt.Model(network, engine.loss_fn(), engine.sgd(network))


def test_running_statistics_move_in_training_alone(torch_engine):
    network, model = normed(torch_engine)
    means = Recorder(lambda context: (context.event.value, network.norm.running_mean.item()))
    model.fit(3, PAIR, FAR, callbacks=means)
    ends = [mean for event, mean in means.calls if event == "on_train_epoch_end"]
    assert ends == pytest.approx([1.1, 2.09, 2.981])
    model.eval(FAR)
    assert network.norm.running_mean.item() == ends[-1]
    model.predict(FAR[0][0])
    assert network.norm.running_mean.item() == ends[-1]
    model.train(1, PAIR)
    assert network.norm.running_mean.item() == pytest.approx(3.7829)


def normed_cell(engine):
    from networks_mindspore import Normed

    network = Normed()
    return network, dt.Model(network, engine.loss_fn(), engine.sgd(network))


def test_running_statistics_move_in_training_alone_on_mindspore_too(mindspore_engine):
    network, model = normed_cell(mindspore_engine)
    means = Recorder(lambda context: (context.event.value, network.norm.moving_mean.asnumpy().item()))
    model.fit(3, PAIR, FAR, callbacks=means)
    ends = [mean for event, mean in means.calls if event == "on_train_epoch_end"]
    assert ends == pytest.approx([1.1, 2.09, 2.981])
    model.eval(FAR)
    assert network.norm.moving_mean.asnumpy().item() == ends[-1]


def test_after_a_step_that_failed_the_next_run_calls_the_network_once_a_step(mindspore_engine):
    """In PYNATIVE mode an error in a forward pass leaves MindSpore recording; what comes next ran twice."""
    network = mindspore_engine.weight()
    step = mindspore_engine.step_function("vector")
    failing = dt.Model(network, optimizer=mindspore_engine.sgd(network), train_step=step)
    with pytest.raises(ValueError, match="train_step"):
        failing.train(1, ones(1))
    network, model = normed_cell(mindspore_engine)
    model.train(2, PAIR)
    assert network.norm.moving_mean.asnumpy().item() == pytest.approx(2.09)


def test_a_submodule_that_the_user_froze_stays_frozen(torch_engine):
    network, model = normed(torch_engine)
    network.other.eval()
    flags = Recorder(
        lambda context: (
            context.event.value,
            network.training,
            network.norm.training,
            network.other.training,
        )
    )
    model.fit(2, PAIR, FAR, callbacks=flags)
    model.eval(FAR, callbacks=flags)
    model.predict(FAR[0][0])
    model.train(1, PAIR, callbacks=flags)
    steps = [modes for event, *modes in flags.calls if event == "on_train_step_end"]
    assert steps == [[True, True, False]] * 3
    steps = [modes for event, *modes in flags.calls if event == "on_eval_step_end"]
    assert steps == [[False, False, False]] * 3
    assert network.other.running_mean.item() == 0.0
    assert network.norm.running_mean.item() == pytest.approx(2.981)


def test_a_network_in_evaluation_mode_is_put_into_training_mode_as_a_whole(torch_engine):
    network, model = normed(torch_engine)
    network.eval()
    model.train(1, PAIR)
    assert (network.training, network.norm.training, network.other.training) == (True, True, True)
    assert network.norm.running_mean.item() == pytest.approx(1.1)


def test_a_network_in_evaluation_mode_is_left_in_it_by_an_evaluation(torch_engine):
    network, model = normed(torch_engine)
    network.eval()
    model.eval(FAR)
    model.predict(FAR[0][0])
    assert (network.training, network.norm.training, network.other.training) == (False, False, False)


def test_an_error_in_an_evaluation_gives_the_modes_back(torch_engine):
    class Failing:
        def on_eval_step_end(self, run_context):
            raise ZeroDivisionError

    network, model = normed(torch_engine)
    network.other.eval()
    with pytest.raises(ZeroDivisionError):
        model.fit(1, PAIR, FAR, callbacks=Failing())
    assert (network.training, network.norm.training, network.other.training) == (True, True, False)


def test_data_that_shuffles_anew_in_iter_is_seen_alike_on_every_engine(engine):
    """Looking at the data before the first step must not use up a pass over it."""

    class Shuffled:
        def __init__(self):
            self.passes = 0

        def __len__(self):
            return 2

        def __iter__(self):
            self.passes += 1
            return iter(batches((self.passes, 0.0), (0.0, 0.0)))

    data, valid = Shuffled(), Shuffled()
    network = engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).fit(2, data, valid)
    assert engine.value(network) == pytest.approx(1.0 - 0.1 * (1 + 2))
    assert (data.passes, valid.passes) == (2, 2)
