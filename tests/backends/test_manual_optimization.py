"""A train_step that drives backward and updates itself, on PyTorch.

A ``two_weights`` network is ``a * x + b * x``; each weight has an optimizer of its own here, whose
steps are known by hand.
"""

import math

import pytest
from closeness import close
from engines import ENGINES, At, Seen, batches, ones

import dualtrain as dt
from dualtrain.callbacks import MetricHistory, StepLogger
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.logs import read_log
from dualtrain.protocol import Capability


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.torch)])
def engine(request):
    return ENGINES[request.param]()


def manual(network, optimizer, train_step, **options):
    return dt.Model(
        network, optimizer=optimizer, train_step=train_step, automatic_optimization=False, **options
    )


def two(engine, train_step, rates=(0.1, 0.01), **options):
    """A network with an optimizer for each of its two weights, named after it."""
    import torch

    network = engine.two_weights()
    optimizers = {
        name: torch.optim.SGD([getattr(network, name)], rate)
        for name, rate in zip("ab", rates, strict=True)
    }
    return network, optimizers, manual(network, optimizers, train_step, **options)


def every_second_b(network, batch, run_context):
    """Update ``a`` with every batch and ``b`` with every second one: gradients x, and 2x."""
    x, _ = batch
    run_context.zero_grad("a")
    loss = (network.a * x).mean()
    run_context.backward(loss)
    run_context.optimizer_step("a")
    if run_context.step % 2 == 0:
        run_context.zero_grad("b")
        run_context.backward((2 * network.b * x).mean())
        run_context.optimizer_step("b")
    return loss


def one(network, batch, run_context):
    """Update the only optimizer with each batch."""
    x, label = batch
    run_context.zero_grad()
    loss = (network(x) + label).mean()
    run_context.backward(loss)
    run_context.optimizer_step()
    return loss


# Several optimizers, and one.


def test_two_optimizers_step_when_the_step_says_so(engine):
    network, _, model = two(engine, every_second_b)
    seen = Seen(lambda c: (c.global_step, c.is_update_step, close(engine.pair(network))))
    model.train(1, ones(4), seen)
    assert seen.values == [
        (1, True, (0.9, 1)),
        (3, True, (0.8, 0.98)),
        (4, True, (0.7, 0.98)),
        (6, True, (0.6, 0.96)),
    ]


def test_an_optimizer_may_be_given_itself(engine):
    def step(network, batch, run_context):
        for name in ("b", "a"):
            run_context.zero_grad(optimizers[name])
        loss = network(batch[0]).mean()
        run_context.backward(loss)
        run_context.optimizer_step(optimizers["b"])
        return loss

    network, optimizers, model = two(engine, step)
    model.train(1, ones(2))
    assert engine.pair(network) == close((1, 0.98))


def test_a_single_optimizer_needs_no_name(engine):
    network = engine.weight()
    seen = Seen(lambda c: (c.global_step, c.loss, c.lr))
    manual(network, engine.sgd(network, 0.1), one).train(2, ones(2), seen)
    assert engine.value(network) == close(0.6)
    assert seen.values == [(i, close(1.1 - i / 10), 0.1) for i in (1, 2, 3, 4)]


def test_gradients_gather_until_they_are_cleared(engine):
    def step(network, batch, run_context):
        loss = network(batch[0]).mean()
        run_context.backward(loss)
        if run_context.step % 2 == 0:
            run_context.optimizer_step()
            run_context.zero_grad()
        return loss

    network = engine.weight()
    seen = Seen(lambda c: (c.global_step, c.is_update_step, close(engine.value(network))))
    manual(network, engine.sgd(network, 0.1), step).train(1, ones(4), seen)
    assert seen.values == [(0, False, 1), (1, True, 0.8), (1, False, 0.8), (2, True, 0.6)]


@pytest.mark.parametrize("verb", ["zero_grad", "optimizer_step"])
@pytest.mark.parametrize("which", [None, "c", "optimizer", 0], ids=repr)
def test_an_optimizer_that_the_model_does_not_have_is_an_error_that_lists_them(engine, verb, which):
    def step(network, batch, run_context):
        getattr(run_context, verb)(which)

    network, _, model = two(engine, step)
    with pytest.raises(ArgumentValueError, match="'a', 'b'") as error:
        model.train(1, ones(1))
    assert repr(which) in str(error.value)
    assert engine.pair(network) == (1, 1)


def test_another_models_optimizer_is_an_error(engine):
    other = engine.sgd(engine.weight())

    def step(network, batch, run_context):
        run_context.optimizer_step(other)

    _, _, model = two(engine, step)
    with pytest.raises(ArgumentValueError, match="'a', 'b'"):
        model.train(1, ones(1))


def test_backward_wants_a_loss_with_a_gradient(engine):
    import torch

    bad = {
        "item": (lambda loss: loss.item(), ArgumentTypeError, "item"),
        "detached": (lambda loss: loss.detach(), ArgumentValueError, "detached"),
        "vector": (lambda loss: torch.stack([loss, loss]), ArgumentValueError, "shape"),
        "none": (lambda loss: None, ArgumentTypeError, "NoneType"),
    }
    for kind, (change, error, word) in bad.items():

        def step(network, batch, run_context, change=change):
            run_context.backward(change(network(batch[0]).mean()))

        network = engine.weight()
        with pytest.raises(error, match=word) as caught:
            manual(network, engine.sgd(network), step).train(1, ones(1))
        assert "backward" in str(caught.value), kind


# Rates and schedules.


def test_the_rates_of_all_optimizers_are_read_and_scaled_together(engine):
    network, _, model = two(engine, every_second_b)
    seen = Seen(lambda c: c.lr)
    model.train(1, ones(4), [At("on_train_step_end", lambda c: c.scale_lr(0.5), step=2), seen])
    assert (
        seen.values == [close(pair) for pair in [(0.1, 0.01), (0.05, 0.005)]] + [close((0.05, 0.005))] * 2
    )
    assert engine.pair(network) == close((1 - 0.3, 1 - 0.03))


def test_a_schedule_moves_with_the_updates_of_its_own_optimizer(engine):
    """``b`` has the rates .01, .02, ... and is updated with every second batch: .02 + .04."""
    import torch

    network = engine.two_weights()
    optimizers = {"a": torch.optim.SGD([network.a], 0.1), "b": torch.optim.SGD([network.b], 0.01)}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers["b"], lambda update: 1 + update)
    model = manual(network, optimizers, every_second_b, lr_scheduler=schedule)
    seen = Seen(lambda c: c.lr)
    model.train(1, ones(4), seen)
    assert engine.pair(network) == close((0.6, 1 - 0.02 - 0.04))
    assert seen.values == [close((0.1, rate)) for rate in (0.01, 0.01, 0.02, 0.02)]


def test_a_schedule_moves_with_each_of_several_updates_in_a_batch(engine):
    def twice(network, batch, run_context):
        one(network, batch, run_context)
        return one(network, batch, run_context)

    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, [0.1, 0.2, 0.3, 0.4])
    seen = Seen(lambda c: c.global_step)
    rates = [
        Seen(lambda c: c.lr, event) for event in ("on_before_optimizer_step", "on_after_optimizer_step")
    ]
    manual(network, optimizer, twice, **options).train(1, ones(2), [seen, *rates])
    assert engine.value(network) == close(0, abs=1e-6)
    assert seen.values == [2, 4]
    assert [reader.values for reader in rates] == [close([0.1, 0.2, 0.3, 0.4])] * 2


def test_a_schedule_does_not_move_with_a_batch_that_updates_nothing(engine):
    def step(network, batch, run_context):
        return one(network, batch, run_context) if run_context.step != 2 else None

    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, [0.1, 0.2, 0.3])
    manual(network, optimizer, step, **options).train(1, ones(3))
    assert engine.value(network) == close(0.7)


def test_a_schedule_does_not_move_with_an_update_that_was_skipped(engine):
    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, [0.1, 0.2, 0.3])
    model = manual(network, optimizer, one, amp="fp16", **options)
    seen = Seen(lambda c: (c.global_step, c.step_skipped))
    model.train(1, batches((1, 0), (math.inf, 0), (1, 0)), seen)
    assert engine.value(network) == close(0.7)
    assert seen.values == [(1, False), (1, True), (2, False)]


# Clipping and mixed precision.


def test_each_optimizers_gradients_are_clipped_by_their_own_norm(engine):
    """Gradients 1 and 2 under a limit of .5."""
    network, _, model = two(engine, every_second_b, rates=(1.0, 1.0), clip_norm=0.5)
    norms = Seen(lambda c: (c.grad_norm, c.grad_norm_clipped), "on_after_optimizer_step")
    model.train(1, ones(2), norms)
    assert engine.pair(network) == close((0, 0.5), abs=1e-5)  # clipping divides by the norm plus 1e-6
    assert norms.values == [close((1, 0.5)), close((1, 0.5)), close((2, 0.5))]


def test_a_batch_without_an_update_has_no_norm(engine):
    def step(network, batch, run_context):
        return one(network, batch, run_context) if run_context.step % 2 else None

    network = engine.weight()
    seen = Seen(lambda c: (c.is_update_step, c.grad_norm, c.grad_norm_clipped))
    manual(network, engine.sgd(network, 0.1), step).train(1, batches((3, 0), (5, 0), (4, 0)), seen)
    assert seen.values == [(True, 3.0, 3.0), (False, None, None), (True, 4.0, 4.0)]


def test_an_overflow_skips_the_update_it_is_in_and_no_other(engine):
    """The second batch's infinity is in ``a`` alone."""

    def step(network, batch, run_context):
        x, y = batch
        losses = {"a": (network.a * x).mean(), "b": (network.b * y).mean()}
        for name, loss in losses.items():
            run_context.zero_grad(name)
            run_context.backward(loss)
            run_context.optimizer_step(name)
        return losses["a"]

    network, _, model = two(engine, step, rates=(0.1, 0.1), amp="fp16")
    inside = Seen(lambda c: (c.step_skipped, c.global_step), "on_after_optimizer_step")
    norms = Seen(lambda c: c.grad_norm, "on_gradients_ready")
    scales = [Seen(lambda c: c.loss_scale, event) for event in ("on_train_begin", "on_train_step_end")]
    pairs = Seen(lambda c: close(engine.pair(network)))
    data = batches((1, 2), (math.inf, 2), (1, 2))
    model.train(1, data, [inside, norms, *scales, pairs])
    assert pairs.values == [(0.9, 0.8), (0.9, 0.6), (0.8, 0.4)]
    assert inside.values == [(False, 1), (False, 2), (True, 2), (False, 3), (False, 4), (False, 5)]
    assert norms.values == [1, 2, math.inf, 2, 1, 2]  # unscaled
    [scale] = scales[0].values
    assert scales[1].values == [scale, scale / 2, scale / 2]


def test_losses_do_not_show_the_scale(engine):
    network = engine.weight()
    seen = Seen(lambda c: c.loss)
    manual(network, engine.sgd(network, 0.1), one, amp="fp16").train(1, ones(2), seen)
    assert seen.values == close([1, 0.9])


# Events and callbacks.


def test_the_events_fire_with_the_stages(engine):
    calls = []

    class Stages:
        def on_after_backward(self, run_context):
            calls.append("backward")

        def on_gradients_ready(self, run_context):
            calls.append("ready")

        def on_before_optimizer_step(self, run_context):
            calls.append("before")

        def on_after_optimizer_step(self, run_context):
            calls.append(("after", run_context.global_step))

        def on_train_step_end(self, run_context):
            calls.append("end")

    _, _, model = two(engine, every_second_b)
    model.train(1, ones(2), Stages())
    assert calls == [
        *["backward", "ready", "before", ("after", 1), "end"],
        *["backward", "ready", "before", ("after", 2)],
        *["backward", "ready", "before", ("after", 3), "end"],
    ]


def test_the_loss_in_the_events_is_the_one_that_went_backward(engine):
    """``a`` is 1 and .9, and ``b``'s loss is 2; at the step's end it is what came back."""
    events = ("on_after_backward", "on_gradients_ready", "on_after_optimizer_step", "on_train_step_end")
    seen = [Seen(lambda c: c.loss, event) for event in events]
    _, _, model = two(engine, every_second_b)
    model.train(1, ones(2), seen)
    assert [reader.values for reader in seen] == [[1, close(0.9), 2]] * 3 + [[1, close(0.9)]]


def test_gradients_that_a_callback_changes_are_used(engine):
    network = engine.weight()

    def double(run_context):
        network.w.grad.mul_(2)

    model = manual(network, engine.sgd(network, 0.1), one, clip_norm=1.5)
    model.train(1, ones(1), At("on_gradients_ready", double))
    assert engine.value(network) == close(0.85)


def test_what_the_step_returns_is_what_callbacks_see(engine):
    """A mapping with further losses, detached; nothing at all is no loss."""

    def step(network, batch, run_context):
        loss = one(network, batch, run_context)
        return {"loss": loss, "twice": 2 * loss} if run_context.step == 1 else None

    network = engine.weight()
    seen = Seen(lambda c: (c.loss, c.outputs))
    manual(network, engine.sgd(network, 0.1), step).train(1, ones(2), seen)
    (loss, outputs), second = seen.values
    assert loss == 1.0
    assert float(outputs["twice"]) == 2.0
    assert not any(value.requires_grad for value in outputs.values())
    assert second == (None, None)


def test_the_same_callbacks_log_such_a_run(engine):
    _, _, model = two(engine, every_second_b)
    history = MetricHistory()
    model.train(2, ones(3), [StepLogger("log.jsonl", 1), history])
    rows = read_log("log.jsonl").records
    assert [(row.step, row.epoch, row.values["global_step"]) for row in rows] == [
        (1, 1, 1),
        (2, 1, 3),
        (3, 1, 4),
        (4, 2, 6),
        (5, 2, 7),
        (6, 2, 9),
    ]
    assert [row.values["loss"] for row in rows] == close([1, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert rows[0].values["lr"] == (0.1, 0.01)


def test_the_capabilities_of_such_a_run(engine):
    network = engine.weight()
    seen = Seen(lambda c: c.capabilities)
    manual(network, engine.sgd(network), one).train(1, ones(1), seen)
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, ones(1), seen)
    ours, theirs = seen.values
    assert ours - theirs == {Capability.MANUAL_OPTIMIZATION}
    assert theirs - ours == {Capability.ACCUMULATION, Capability.SKIP_NONFINITE}


def test_a_stop_and_a_second_run(engine):
    network = engine.weight()
    model = manual(network, engine.sgd(network, 0.1), one)
    seen = Seen(lambda c: c.global_step, "on_train_end")
    model.train(2, ones(3), [At("on_train_step_end", lambda c: c.request_stop(), step=2), seen])
    model.train(1, ones(1), seen)
    assert seen.values == [2, 1]
    assert engine.value(network) == close(0.7)


# Evaluation.


def test_an_evaluation_uses_the_loss_function(engine):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)
    model = dt.Model(
        network,
        engine.loss_fn(),
        optimizer,
        {"loss"},
        train_step=one,
        automatic_optimization=False,
    )
    results = Seen(lambda c: dict(c.metrics), "on_eval_end")
    model.fit(2, ones(1), batches((1, 0), (1, 2)), callbacks=results)
    assert results.values == [
        {"loss": close(0.9 + 1), "eval_loss": close(0.9 + 1)},
        {"loss": close(0.8 + 1), "eval_loss": close(0.8 + 1)},
    ]
    assert model.eval(ones(1)) == {"loss": close(0.8)}


def test_an_evaluation_without_a_loss_function_says_what_to_do(engine):
    network = engine.weight()
    model = manual(network, engine.sgd(network, 0.1), one)
    with pytest.raises(ArgumentValueError, match="loss_fn"):
        model.eval(ones(1))


# An optimizer that evaluates the network itself.


def test_lbfgs_is_refused_under_automatic_optimisation(engine):
    import torch

    network = engine.weight()
    with pytest.raises(ArgumentValueError, match="LBFGS") as error:
        dt.Model(network, engine.loss_fn(), torch.optim.LBFGS(network.parameters()))
    assert "closure" in str(error.value)
    assert "automatic_optimization=False" in str(error.value)


def lbfgs(engine):
    """Fit w * x to a label with a closure, in one step of the optimizer a batch."""
    import torch

    network = engine.weight()
    optimizer = torch.optim.LBFGS(network.parameters())

    def step(network, batch, run_context):
        x, label = batch

        def closure():
            run_context.zero_grad()
            loss = ((network(x) - label) ** 2).mean()
            run_context.backward(loss)
            return loss

        return optimizer.step(closure)

    return network, manual(network, optimizer, step)


def test_lbfgs_steps_with_a_closure_under_manual_optimisation(engine):
    network, model = lbfgs(engine)
    losses = Seen(lambda c: c.loss)
    model.train(1, batches((2, 6), (2, -6)), losses)
    assert engine.value(network) == pytest.approx(-3, abs=1e-4)
    assert losses.values == [close(16), pytest.approx(144, abs=1e-2)]  # as the step found it


def test_a_step_of_the_optimizers_own_counts_as_an_update(engine):
    _, model = lbfgs(engine)
    seen = Seen(lambda c: (c.global_step, c.is_update_step))
    model.train(1, batches((2, 6), (2, -6)), seen)
    assert seen.values == [(1, True), (2, True)]


# What is refused.


@pytest.mark.parametrize(
    "verb",
    [
        lambda c: c.zero_grad(),
        lambda c: c.backward(None),
        lambda c: c.optimizer_step(),
    ],
    ids=["zero_grad", "backward", "optimizer_step"],
)
def test_the_stages_are_refused_under_automatic_optimisation(engine, verb):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    with pytest.raises(RunStateError, match="automatic_optimization=False"):
        model.train(1, ones(1), At("on_train_step_begin", verb))
    assert engine.value(network) == 1.0


def test_accumulation_is_refused(engine):
    network = engine.weight()
    with pytest.raises(RuntimeError, match="accumulate_steps=4") as error:
        manual(network, engine.sgd(network), one, accumulate_steps=4)
    assert "automatic_optimization=False" in str(error.value)
    model = manual(network, engine.sgd(network), one)

    def accumulate(run_context):
        run_context.accumulate_steps = 2

    with pytest.raises(RuntimeError, match="cannot accumulate"):
        model.train(1, ones(1), At("on_train_epoch_begin", accumulate))


def test_a_train_step_is_needed(engine):
    network = engine.weight()
    with pytest.raises(ArgumentValueError, match="train_step"):
        dt.Model(network, engine.loss_fn(), engine.sgd(network), automatic_optimization=False)


def test_one_of_several_optimizers_that_is_none_is_refused(engine):
    network = engine.weight()
    with pytest.raises(ArgumentTypeError, match="optimizer"):
        manual(network, {"a": engine.sgd(network), "b": "adam"}, one)
    with pytest.raises(ArgumentValueError, match="none of the parameters"):
        manual(network, {"a": engine.sgd(network), "b": engine.sgd(engine.weight())}, one)
    with pytest.raises(ArgumentValueError, match="no optimizer"):
        manual(network, {}, one).train(1, ones(1))


@pytest.mark.mindspore
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_mindspore_refuses_it_in_one_sentence(mode):
    engine = ENGINES[f"mindspore-{mode}"]()
    network = engine.weight()
    with pytest.raises(ArgumentValueError, match="automatic_optimization=False") as error:
        manual(network, engine.sgd(network), engine.step_function("ok"))
    assert "\n" not in str(error.value)
    assert "TrainOneStepCell" in str(error.value)
