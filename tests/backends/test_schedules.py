"""Schedules of the learning rate on PyTorch, and restored weights on both engines.

Every rate is compared with what torch's own scheduler gives by itself, and shown by how far the
weights move. MindSpore's schedules are in its optimizers: test_run_context.py has them.
"""

import math

import numpy as np
import pytest
from engines import ENGINES, At, Seen, ones

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.errors import ArgumentTypeError, ArgumentValueError

# The schedules: each makes a scheduler over an optimizer, for a run of 12 updates.


def lambda_lr(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


def cosine(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.CosineAnnealingLR(optimizer, 12)


def cosine_and_up_again(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=0.001)


def warm_restarts(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)


def one_cycle(optimizer):
    from torch.optim import lr_scheduler

    highest = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, highest, total_steps=13, pct_start=0.5, cycle_momentum=False)


def step_lr(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def exponential(optimizer):
    from torch.optim import lr_scheduler

    return lr_scheduler.ExponentialLR(optimizer, 0.8)


def sequence(optimizer):
    from torch.optim import lr_scheduler

    parts = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=6),
        lr_scheduler.CosineAnnealingLR(optimizer, 6),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [6])


def chain(optimizer):
    from torch.optim import lr_scheduler

    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 6), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULES = [
    lambda_lr,
    cosine,
    cosine_and_up_again,
    warm_restarts,
    one_cycle,
    step_lr,
    exponential,
    sequence,
    chain,
]
each = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)


def plain_sgd(network, rates):
    import torch

    if len(rates) == 1:
        return torch.optim.SGD(network.parameters(), rates[0])
    return torch.optim.SGD(
        [{"params": [w], "lr": r} for w, r in zip(network.parameters(), rates, strict=True)]
    )


def undisturbed(engine, schedule, rates, steps):
    """The rates of each step, a tuple each, that the scheduler gives by itself."""
    network = engine.two_weights() if len(rates) > 1 else engine.weight()
    optimizer = plain_sgd(network, rates)
    scheduler = schedule(optimizer)
    given = []
    for _ in range(steps):
        given.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()
        scheduler.step()
    return given


class Rates:
    """Note the rates at each step's begin and end, and how far each weight has moved."""

    def __init__(self, network):
        self._weights = lambda: tuple(float(w.detach()) for w in network.parameters())
        self.begins, self.ends, self.moves = [], [], []

    def on_train_step_begin(self, run_context):
        self.begins.append(as_tuple(run_context.lr))
        self._before = self._weights()

    def on_train_step_end(self, run_context):
        self.ends.append(as_tuple(run_context.lr))
        self.moves.append(tuple(b - a for b, a in zip(self._before, self._weights(), strict=True)))


def as_tuple(rate):
    assert all(type(value) is float for value in (rate if isinstance(rate, tuple) else (rate,)))
    return rate if isinstance(rate, tuple) else (rate,)


def train(engine, schedule, *callbacks, rates=(0.1,), epochs=1, batches=12, **options):
    """Train with gradient 1 on each weight under a schedule; options are those of ``lr_scheduler``."""
    network = engine.two_weights() if len(rates) > 1 else engine.weight()
    optimizer = plain_sgd(network, rates)
    scheduler = schedule(optimizer)
    argument = {"scheduler": scheduler, **options} if options else scheduler
    seen = Rates(network)
    model = dt.Model(network, engine.loss_fn(), optimizer, lr_scheduler=argument)
    model.train(epochs, ones(batches), [*callbacks, seen])
    return seen


def exactly(rows):
    """Compare rows of rates as the closed form of a schedule and its recursion do."""
    return [pytest.approx(row, rel=1e-12, abs=1e-15) for row in rows]


def roughly(rows):
    """Compare rows of rates with movements of float32 weights."""
    return [pytest.approx(row, rel=1e-4, abs=5e-7) for row in rows]


def scaling(factor, step, event="on_train_step_end", min_lr=0.0):
    return At(event, lambda context: context.scale_lr(factor, min_lr), step=step)


def scaled(rows, factor):
    return [tuple(rate * factor for rate in row) for row in rows]


# When a schedule moves, and what is shown of it.


@each
@pytest.mark.parametrize("rates", [(0.1,), (0.1, 0.02)], ids=["one group", "two groups"])
def test_a_schedule_moves_once_an_update(torch_engine, schedule, rates):
    expected = undisturbed(torch_engine, schedule, rates, 12)
    seen = train(torch_engine, schedule, rates=rates)
    assert seen.begins == exactly(expected)
    assert seen.ends == exactly(expected)  # the rate that was used: the next move is not shown yet
    assert seen.moves == roughly(expected)
    assert len(set(expected)) > 2


@each
def test_a_schedule_moves_once_an_epoch(torch_engine, schedule):
    expected = [row for row in undisturbed(torch_engine, schedule, (0.1,), 4) for _ in range(3)]
    seen = train(torch_engine, schedule, epochs=4, batches=3, interval="epoch")
    assert seen.begins == exactly(expected)
    assert seen.ends == exactly(expected)
    assert seen.moves == roughly(expected)


def test_the_interval_is_the_update_where_none_is_given(torch_engine):
    expected = undisturbed(torch_engine, lambda_lr, (0.1,), 4)
    assert train(torch_engine, lambda_lr, batches=4, interval="update").moves == roughly(expected)
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network)
    seen = Rates(network)
    options = {"lr_scheduler": {"scheduler": lambda_lr(optimizer)}}
    dt.Model(network, torch_engine.loss_fn(), optimizer, **options).train(1, ones(4), seen)
    assert seen.moves == roughly(expected)


def test_a_schedule_goes_on_in_the_next_run(torch_engine):
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network)
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=cosine(optimizer))
    seen = Rates(network)
    model.train(1, ones(5), seen)
    model.train(1, ones(7), seen)
    assert seen.begins == exactly(undisturbed(torch_engine, cosine, (0.1,), 12))


def test_the_rate_is_shown_at_the_runs_end_as_at_its_last_step(torch_engine):
    last = [Seen(lambda c: c.lr, event) for event in ("on_train_epoch_end", "on_train_end", "on_teardown")]
    seen = train(torch_engine, lambda_lr, *last, batches=3)
    assert [reader.values for reader in last] == [[seen.ends[-1][0]]] * 3


# A cut on top of a schedule.


@each
@pytest.mark.parametrize("rates", [(0.1,), (0.1, 0.02)], ids=["one group", "two groups"])
def test_a_cut_survives_the_schedule(torch_engine, schedule, rates):
    expected = undisturbed(torch_engine, schedule, rates, 12)
    expected = expected[:3] + scaled(expected[3:], 0.5)
    seen = train(torch_engine, schedule, scaling(0.5, step=3), rates=rates)
    assert seen.begins == exactly(expected)
    assert seen.ends[3:] == exactly(expected[3:])
    assert seen.moves == roughly(expected)


@each
def test_a_cut_at_a_steps_begin_is_that_steps_own(torch_engine, schedule):
    expected = undisturbed(torch_engine, schedule, (0.1,), 12)
    expected = expected[:3] + scaled(expected[3:], 0.5)
    seen = train(torch_engine, schedule, scaling(0.5, step=4, event="on_train_step_begin"))
    assert seen.ends == exactly(expected)
    assert seen.moves == roughly(expected)


@each
def test_several_cuts_add_up(torch_engine, schedule):
    """Before the first step, after it, twice after one, and one that raises the rate again."""
    expected = undisturbed(torch_engine, schedule, (0.1,), 12)
    factors = [0.5, *[0.25] * 4, *[0.025] * 3, *[0.075] * 4]
    seen = train(
        torch_engine,
        schedule,
        At("on_train_begin", lambda context: context.scale_lr(0.5)),
        scaling(0.5, step=1),
        scaling(0.2, step=5),
        scaling(0.5, step=5),
        scaling(3.0, step=8),
    )
    expected = [tuple(r * f for r in row) for row, f in zip(expected, factors, strict=True)]
    assert seen.begins == exactly(expected)
    assert seen.moves == roughly(expected)


@each
def test_a_cut_survives_a_schedule_that_goes_by_epochs(torch_engine, schedule):
    """Cut after the second epoch's first step of three."""
    rows = undisturbed(torch_engine, schedule, (0.1,), 4)
    expected = [row for row in rows for _ in range(3)]
    expected = expected[:4] + scaled(expected[4:], 0.5)
    seen = train(torch_engine, schedule, scaling(0.5, step=4), epochs=4, batches=3, interval="epoch")
    assert seen.begins == exactly(expected)
    assert seen.moves == roughly(expected)


@pytest.mark.parametrize("schedule", [lambda_lr, cosine], ids=["closed form", "recursion"])
def test_a_cut_survives_into_the_next_run(torch_engine, schedule):
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network)
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=schedule(optimizer))
    seen = Rates(network)
    model.train(1, ones(5), [scaling(0.5, step=3), seen])
    model.train(1, ones(7), seen)
    expected = undisturbed(torch_engine, schedule, (0.1,), 12)
    assert seen.begins == exactly(expected[:3] + scaled(expected[3:], 0.5))


def test_a_cut_of_a_schedule_that_begins_at_0_holds_for_the_rates_to_come(torch_engine):
    def warm_up(optimizer):
        from torch.optim import lr_scheduler

        return lr_scheduler.LambdaLR(optimizer, lambda update: update)

    for cut in (scaling(0.5, step=1, event="on_train_step_begin"), At("on_train_begin", halve)):
        seen = train(torch_engine, warm_up, cut, batches=3)
        assert seen.begins[1:] == exactly([(0.05,), (0.1,)])
        assert seen.moves == roughly([(0.0,), (0.05,), (0.1,)])


def halve(run_context):
    run_context.scale_lr(0.5)


RATES = [0.1, 0.2, 0.3, 0.4]


def test_what_a_cut_returns_and_shows_is_the_rate_in_use_times_the_factor(engine):
    """The same on both engines: at the second step's end .2 is in use, and .3 is to come."""
    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, RATES)
    model = dt.Model(network, engine.loss_fn(), optimizer, **options)
    cuts = []

    def cut(run_context):
        cuts.append((run_context.lr, run_context.scale_lr(0.5), run_context.lr))

    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model.train(1, ones(4), [At("on_train_step_end", cut, step=2), begins])
    assert cuts == [pytest.approx((0.2, 0.1, 0.1))]
    assert begins.values == pytest.approx([0.1, 0.2, 0.15, 0.2])
    assert engine.value(network) == pytest.approx(1 - 0.65, abs=1e-6)


def test_a_cut_inside_a_window_holds_for_that_windows_update(engine):
    """Windows of 2 with the rates .1 .2 .3; cut in the second window, and again at its end."""
    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, RATES)
    model = dt.Model(network, engine.loss_fn(), optimizer, accumulate_steps=2, **options)
    begins, ends = Seen(lambda c: c.lr, "on_train_step_begin"), Seen(lambda c: c.lr)
    cuts = [scaling(0.5, step=3), scaling(0.1, step=4)]
    model.train(1, ones(6), [*cuts, begins, ends])
    assert begins.values == pytest.approx([0.1, 0.1, 0.2, 0.1, 0.015, 0.015])
    assert ends.values == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.015, 0.015])
    assert engine.value(network) == pytest.approx(1 - 0.1 - 0.1 - 0.015, abs=1e-6)


def test_a_cut_of_mindspores_own_schedule_in_windows_that_are_clipped(mindspore_engine):
    """Windows of 2, gradients 1 clipped to .5, a cut in the second window; the cosine goes on."""
    import mindspore

    network = mindspore_engine.weight()
    optimizer = mindspore_engine.sgd(network, mindspore.nn.CosineDecayLR(0.1, 0.5, 4))
    model = dt.Model(network, mindspore_engine.loss_fn(), optimizer, accumulate_steps=2, clip_norm=0.5)
    seen = Seen(lambda c: mindspore_engine.value(network))
    model.train(1, ones(6), [scaling(0.5, step=3), seen])
    rates = [0.1 + 0.2 * (1 + math.cos(math.pi * update / 4)) for update in range(3)]
    weights = np.cumsum([0, rates[0], 0, rates[1] / 2, 0, rates[2] / 2])
    assert seen.values == pytest.approx(1 - 0.5 * weights, abs=1e-6)


def test_the_floor_holds_for_the_rate_in_use(torch_engine):
    """.2 * .1 is raised to .05, a quarter; a floor above the rate leaves it."""
    cuts = []

    def cut(run_context):
        cuts.extend([run_context.scale_lr(0.1, min_lr=0.05), run_context.scale_lr(0.5, min_lr=0.3)])

    network = torch_engine.weight()
    optimizer, options = torch_engine.scheduled_sgd(network, RATES)
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, **options)
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model.train(1, ones(4), [At("on_train_step_end", cut, step=2), begins])
    assert cuts == pytest.approx([0.05, 0.05])
    assert begins.values == pytest.approx([0.1, 0.2, 0.075, 0.1])


def test_the_floor_holds_for_each_group(torch_engine):
    """At a constant rate: .1 is halved, .02 only to .015; the schedule then halves both."""

    def halving(optimizer):
        from torch.optim import lr_scheduler

        return lr_scheduler.StepLR(optimizer, 3, 0.5)

    seen = train(torch_engine, halving, scaling(0.5, step=1, min_lr=0.015), rates=(0.1, 0.02), batches=5)
    cut = (0.05, 0.015)
    assert seen.begins == exactly([(0.1, 0.02), cut, cut, *scaled([cut, cut], 0.5)])
    assert seen.moves == roughly(seen.begins)


def test_a_rate_under_a_schedule_cannot_be_set_and_the_error_says_what_to_do(torch_engine):
    messages = []

    def refused(run_context):
        with pytest.raises(ArgumentValueError) as error:
            run_context.lr = 0.5
        messages.append(str(error.value))

    seen = train(torch_engine, lambda_lr, At("on_train_step_end", refused, step=1), batches=3)
    [message] = messages
    assert "LambdaLR" in message
    assert "scale_lr" in message
    assert "\n" not in message
    assert seen.moves == roughly(undisturbed(torch_engine, lambda_lr, (0.1,), 3))


@each
def test_a_rate_in_a_tensor_follows_a_schedule_and_is_cut(torch_engine, schedule):
    import torch

    network = torch_engine.weight()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(network.parameters(), rate)
    expected = undisturbed(torch_engine, schedule, (0.1,), 12)
    seen = Rates(network)
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=schedule(optimizer))
    model.train(1, ones(12), [scaling(0.5, step=3), seen])
    expected = expected[:3] + scaled(expected[3:], 0.5)
    assert seen.begins == [pytest.approx(row, rel=1e-5, abs=1e-8) for row in expected]
    assert seen.moves == roughly(expected)
    assert optimizer.param_groups[0]["lr"] is rate


# ReduceLROnPlateau.


def plateau(optimizer, **options):
    from torch.optim import lr_scheduler

    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)


def plateau_model(engine, monitor, metrics=None, **options):
    """A network whose loss is a constant, its label: gradient 0, so nothing improves."""
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    argument = {"scheduler": plateau(optimizer, **options), "monitor": monitor}
    return dt.Model(network, engine.loss_fn(), optimizer, metrics, lr_scheduler=argument)


def constant(*labels):
    return [(np.zeros(1, np.float32), np.array([label], np.float32)) for label in labels]


@pytest.mark.parametrize("monitor", ["eval_loss", "val_loss"])
def test_a_plateau_of_the_evaluations_loss_cuts_the_rate(torch_engine, monitor):
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model = plateau_model(torch_engine, monitor)
    model.fit(4, constant(1), constant(2), callbacks=begins)
    assert begins.values == [0.1, 0.1, 0.05, 0.025]


@pytest.mark.parametrize("monitor", ["acc", "accuracy", "val_acc", "eval_acc"])
def test_a_plateau_of_a_metric_cuts_the_rate(torch_engine, monitor):
    import torch

    network = torch.nn.Linear(1, 2)
    optimizer = torch_engine.sgd(network, 0.1)
    argument = {"scheduler": plateau(optimizer, mode="max"), "monitor": monitor}
    model = dt.Model(network, torch_engine.cross_entropy(), optimizer, {"acc"}, lr_scheduler=argument)
    data = [(np.zeros((2, 1), np.float32), np.array([0, 1]))]  # whatever is predicted: a half
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model.fit(4, data, data, callbacks=begins)
    assert begins.values == [0.1, 0.1, 0.05, 0.025]


def test_a_plateau_of_the_training_loss_cuts_the_rate(torch_engine):
    """The epochs' last losses are 2, 1, 1, 1: the second is better, the third is not."""
    losses = iter([9, 2, 9, 1, 9, 1, 9, 1])
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network, 0.1)
    model = dt.Model(
        network,
        optimizer=optimizer,
        train_step=lambda network, batch: 0 * network.w + next(losses),
        lr_scheduler={"scheduler": plateau(optimizer), "monitor": "loss"},
    )
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model.train(4, ones(2), begins)
    assert begins.values == [0.1] * 6 + [0.05] * 2


def test_a_plateau_scheduler_waits_in_epochs_without_an_evaluation(torch_engine):
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model = plateau_model(torch_engine, "eval_loss")
    model.fit(7, constant(1), constant(2), valid_frequency=2, callbacks=begins)
    assert begins.values == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025]


def test_a_plateau_that_goes_by_updates_looks_at_each_updates_loss(torch_engine):
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network, 0.1)
    argument = {"scheduler": plateau(optimizer), "monitor": "loss", "interval": "update"}
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=argument)
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model.train(1, constant(2, 1, 1, 1), begins)
    assert begins.values == [0.1, 0.1, 0.1, 0.05]


def test_a_plateaus_metric_that_is_not_there_is_an_error_that_lists_what_is(torch_engine):
    model = plateau_model(torch_engine, "val_acc", {"loss", "mae"})
    with pytest.raises(ArgumentValueError, match="val_acc") as error:
        model.fit(2, constant(1), constant(2))
    for name in ("loss", "mae", "eval_loss"):
        assert name in str(error.value)


def test_a_plateau_scheduler_without_a_monitor_is_refused(torch_engine):
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network)
    for argument in (plateau(optimizer), {"scheduler": plateau(optimizer), "interval": "epoch"}):
        with pytest.raises(ArgumentValueError, match="ReduceLROnPlateau") as error:
            dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=argument)
        assert "monitor" in str(error.value)


def test_a_plateau_of_an_evaluation_that_goes_by_updates_would_never_move_and_is_refused(torch_engine):
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network)
    argument = {"scheduler": plateau(optimizer), "monitor": "eval_loss", "interval": "update"}
    with pytest.raises(ArgumentValueError, match="interval"):
        dt.Model(network, torch_engine.loss_fn(), optimizer, lr_scheduler=argument)


def test_a_cut_survives_a_plateau_scheduler(torch_engine):
    """It halves what it gave last, and the callback's fifth stays on top."""
    begins = Seen(lambda c: c.lr, "on_train_step_begin")
    model = plateau_model(torch_engine, "eval_loss")
    model.fit(4, constant(1), constant(2), callbacks=[scaling(0.2, step=1), begins])
    assert begins.values == pytest.approx([0.1, 0.02, 0.01, 0.005], rel=1e-12)


# What is refused.


def refusing(engine, argument, kind=ArgumentValueError, match="lr_scheduler"):
    network = engine.weight()
    optimizer = engine.sgd(network)
    with pytest.raises(kind, match=match) as error:
        dt.Model(network, engine.loss_fn(), optimizer, lr_scheduler=argument(optimizer))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_scheduler_of_another_optimizer_is_refused(torch_engine):
    other = torch_engine.sgd(torch_engine.weight())
    assert "another optimizer" in refusing(torch_engine, lambda optimizer: lambda_lr(other))


@pytest.mark.parametrize("interval", ["step", "batch", "epochs", None, 1])
def test_an_unknown_interval_is_refused(torch_engine, interval):
    message = refusing(
        torch_engine, lambda optimizer: {"scheduler": lambda_lr(optimizer), "interval": interval}
    )
    assert "'update' or 'epoch'" in message


def test_an_unknown_option_is_refused(torch_engine):
    refusing(torch_engine, lambda optimizer: {"scheduler": lambda_lr(optimizer), "frequency": 2})


@pytest.mark.parametrize(
    "argument", [{}, {"interval": "epoch"}, {"scheduler": None}, 0.1, "cosine", [0.1], math.cos], ids=repr
)
def test_what_is_no_scheduler_is_refused(torch_engine, argument):
    refusing(torch_engine, lambda optimizer: argument, ArgumentTypeError)


def test_a_scheduler_that_is_a_class_is_refused(torch_engine):
    import torch

    scheduler = torch.optim.lr_scheduler.StepLR
    refusing(torch_engine, lambda optimizer: scheduler, ArgumentTypeError)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.mindspore) for n in ("mindspore-pynative", "mindspore-graph")],
)
def test_a_scheduler_is_refused_on_mindspore(name):
    engine = ENGINES[name]()
    assert "learning_rate" in refusing(engine, lambda optimizer: object())


# Weights that are restored after the first step.


def test_training_goes_on_from_restored_weights(engine):
    """Kept after the first step and put back after the third: the fourth starts from there."""
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    kept = []

    def keep(run_context):
        kept.append(run_context.backend.weights(network))

    def restore(run_context):
        run_context.backend.assign_weights(network, kept[0])

    seen = Seen(lambda c: engine.value(network))
    callbacks = [
        At("on_train_step_end", keep, step=1),
        At("on_train_step_end", restore, step=3),
        seen,
    ]
    model.train(1, ones(5), callbacks)
    assert seen.values == pytest.approx([0.9, 0.8, 0.9, 0.8, 0.7], abs=1e-6)
    model.train(1, ones(1))
    assert engine.value(network) == pytest.approx(0.6, abs=1e-6)


def test_what_is_kept_does_not_move_with_the_network(engine):
    network = engine.weight()
    backend = find_backend(network)
    kept = backend.weights(network)
    dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1)).train(1, ones(2))
    assert [backend.to_float(weight) for weight in kept.values()] == [1.0]
    backend.assign_weights(network, kept)
    dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1)).train(1, ones(2))
    assert [backend.to_float(weight) for weight in kept.values()] == [1.0]


def test_weights_can_be_restored_from_arrays_inside_a_run_that_accumulates_and_clips(engine):
    """Windows of 2, gradients 1, a limit of .5: each update takes .05."""
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1), accumulate_steps=2, clip_norm=0.5)

    def restore(run_context):
        run_context.backend.assign_weights(network, {"w": np.array(3, np.float32)})

    seen = Seen(lambda c: engine.value(network))
    model.train(1, ones(6), [At("on_train_step_end", restore, step=3), seen])
    assert seen.values == pytest.approx([1, 0.95, 3, 2.95, 2.95, 2.9], abs=1e-6)


def test_running_statistics_are_restored_too(engine):
    network = engine.normed()
    backend = find_backend(network)
    kept = backend.weights(network)
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    data = [(np.array([[10], [12]], np.float32), np.zeros((2, 1), np.float32))]
    model.train(1, data)
    assert engine.statistics(network) == pytest.approx((1.1, 1.1), rel=1e-5)
    backend.assign_weights(network, kept)
    assert engine.statistics(network) == (0, 1)
    model.train(2, data)
    assert engine.statistics(network) == pytest.approx((2.09, 1.19), rel=1e-5)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine):
    network = engine.dense(2, 1)
    backend = find_backend(network)
    good = {name: backend.to_numpy(weight) for name, weight in backend.weights(network).items()}
    zeros = {name: np.zeros_like(weight) for name, weight in good.items()}
    bad = {
        "one is missing": {"weight": zeros["weight"]},
        "one too many": {**zeros, "more": np.zeros(1, np.float32)},
        "another name": {"weight": zeros["weight"], "Bias": zeros["bias"]},
        "another shape": {"weight": zeros["weight"], "bias": np.zeros(3, np.float32)},
        "a transposed one": {"weight": zeros["weight"].T, "bias": zeros["bias"]},
        "none": {},
    }
    for kind, weights in bad.items():
        with pytest.raises(ArgumentValueError, match="do not fit"):
            backend.assign_weights(network, weights)
        for name, weight in backend.weights(network).items():
            np.testing.assert_array_equal(backend.to_numpy(weight), good[name], err_msg=kind)
    with pytest.raises(ArgumentValueError, match=r"bias has shape \(1,\), but got \(3,\)"):
        backend.assign_weights(network, bad["another shape"])
    with pytest.raises(ArgumentValueError, match="more"):
        backend.assign_weights(network, bad["one too many"])
