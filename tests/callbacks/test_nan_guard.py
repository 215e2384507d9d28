"""NanGuard: what is not finite is named, its update is not made, and nothing else changes."""

import json
import logging
import math

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, batches, columns, ones
from models import make

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.callbacks import NanGuard
from dualtrain.errors import ArgumentValueError, CapabilityError, NonFiniteError
from dualtrain.protocol import Capability
from dualtrain.testing import FakeLoop

INF, NAN = math.inf, math.nan
GUARD = "dualtrain.callbacks.nan_guard"


class Unexplained(dt.Callback):
    """Has updates guarded as NanGuard does, and looks at nothing."""

    wants = frozenset({Capability.SKIP_NONFINITE})


def fragile_batches(*faults):
    """Batches of four samples for a ``fragile`` network, each without a fault (None) or with one."""
    given = []
    for number, fault in enumerate(faults, 1):
        x = np.array([[number * sample, 1, 1] for sample in (1.0, -0.5, 0.25, 2.0)], np.float32)
        label = np.zeros((4, 1), np.float32)
        if fault == "label":
            label[0] = INF
        elif fault is not None:
            x[0, ["norm", "log", "root"].index(fault)] = NAN if fault == "norm" else 0.0
        given.append((x, label))
    return given


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == GUARD]


# Skipping.


def test_a_batch_with_a_bad_loss_or_gradient_changes_nothing(engine, caplog):
    """Momentum .9, rates .1 .2 .4: an infinite gradient, then a NaN loss whose gradient is 1.

    The steps that count have gradient 1: 1 - .1 = .9, then velocity 1.9 at rate .2, then 2.71 at .4.
    """
    network = engine.weight()
    optimizer, options = momentum(engine, network, [0.1, 0.2, 0.4, 0.8, 0.8, 0.8])
    _, model = make(engine, network, optimizer=optimizer, **options)
    rows = Seen(lambda c: (c.global_step, c.is_update_step, c.step_skipped, close(c.lr)))
    weights = Seen(lambda c: engine.value(network))
    guard = NanGuard("skip")
    model.train(1, batches((1, 0), (INF, 0), (1, 0), (1, NAN), (1, 0)), [guard, rows, weights])
    assert weights.values == close([0.9, 0.9, 0.52, 0.52, 0.52 - 0.4 * 2.71])
    assert rows.values == [
        (1, True, False, 0.1),
        (1, True, True, 0.2),
        (2, True, False, 0.2),
        (2, True, True, 0.4),
        (3, True, False, 0.4),
    ]
    assert guard.skipped == 2
    [warning] = warnings_in(caplog)  # the first alone
    assert warning.startswith("At step 2, epoch 1, batch 2, the loss is inf: ")
    assert warning.endswith("; its update is skipped, and further ones are only counted.")
    # A second run starts clean, and a run without a guard is an ordinary one again.
    caplog.clear()
    model.train(1, batches((0, 0), (0, NAN)), guard)
    assert guard.skipped == 1
    assert len(warnings_in(caplog)) == 1
    if engine.framework == "torch":
        model.train(1, batches((NAN, 0)))
        assert math.isnan(engine.value(network))


def momentum(engine, network, rates):
    """Return SGD with momentum .9 and a rate for each update, and what Model needs for that."""
    if engine.framework == "torch":
        optimizer, options = engine.scheduled_sgd(network, rates)
        optimizer.param_groups[0]["momentum"] = 0.9
        return optimizer, options
    return engine.sgd(network, list(rates), momentum=0.9), {}


def test_a_bad_batch_makes_its_whole_window_skipped(engine, caplog):
    """Windows of 2: (1, 3) moves by .2; (NaN loss, 1), (1, inf) and the short (NaN loss) by nothing."""
    network, model = make(engine, accumulate_steps=2)
    seen = Seen(lambda c: (c.global_step, c.step_skipped, close(engine.value(network))))
    guard = NanGuard("skip")
    data = batches((1, 0), (3, 0), (1, NAN), (1, 0), (1, 0), (INF, 0), (2, 0), (4, 0), (1, NAN))
    model.train(1, data, [guard, seen])
    assert seen.values == [
        (0, False, 1.0),
        (1, False, 0.8),
        (1, False, 0.8),
        (1, True, 0.8),
        (1, False, 0.8),
        (1, True, 0.8),
        (1, False, 0.8),
        (2, False, 0.5),
        (2, True, 0.5),
    ]
    assert guard.skipped == 3
    [warning] = warnings_in(caplog)
    assert warning.startswith("At step 3, epoch 1, batch 3, the loss is nan")
    # What a stop leaves of a window does not spoil the next run.
    model.train(1, data[2:], NanGuard("stop"))
    model.train(1, batches((1, 0), (1, 0)), seen)
    assert seen.values[-1] == (1, False, close(0.4))


def test_what_is_skipped_is_not_clipped_and_the_rest_is(engine):
    """Gradients of norm 5, infinity and 5 under a limit of 1."""
    network, model = make(engine, engine.plane(), clip_norm=1.0)
    pairs = Seen(lambda c: (close(engine.pair(network)), c.grad_norm))
    model.train(1, columns((3, 4), (INF, 4), (3, 4)), [NanGuard("skip"), pairs])
    assert pairs.values == [((0.94, 0.92), 5.0), ((0.94, 0.92), INF), ((0.88, 0.84), 5.0)]


def test_the_events_around_an_update_fire_for_one_that_is_skipped(eager_engine):
    events = ["on_after_backward", "on_gradients_ready", "on_before_optimizer_step"]
    seen = [Seen(lambda c: c.step, event) for event in events]
    after = Seen(lambda c: (c.step, c.step_skipped), "on_after_optimizer_step")
    network, model = make(eager_engine)
    model.train(1, batches((1, 0), (1, NAN), (1, 0)), [NanGuard("skip"), *seen, after])
    assert [one.values for one in seen] == [[1, 2, 3]] * 3
    assert after.values == [(1, False), (2, True), (3, False)]
    assert eager_engine.value(network) == close(0.8)


def test_gradients_that_a_callback_repairs_are_not_skipped(torch_engine):
    network = torch_engine.weight()

    def repair(run_context):
        network.w.grad.nan_to_num_(posinf=1.0)

    _, model = make(torch_engine, network)
    guard = NanGuard("skip")
    broken = At("on_gradients_ready", lambda c: network.w.grad.fill_(INF))
    model.train(1, ones(1), [broken, At("on_gradients_ready", repair), guard])
    assert (guard.skipped, torch_engine.value(network)) == (0, close(0.9))
    model.train(1, ones(1), [broken, guard])
    assert (guard.skipped, torch_engine.value(network)) == (1, close(0.9))


# Stopping and raising.


def test_stop_and_raise_leave_the_weights_before_the_bad_update(engine, caplog):
    network, model = make(engine)
    data = batches((1, 0), (1, NAN), (1, 0))
    steps = Seen(lambda c: (c.epoch, c.step))
    reasons = Seen(lambda c: c.stop_reason, "on_train_end")
    model.train(2, data, [NanGuard(), steps, reasons])
    assert steps.values == [(1, 1), (1, 2)]
    assert engine.value(network) == close(0.9)
    [reason] = reasons.values
    assert reason.startswith("At step 2, epoch 1, batch 2, the loss is nan: ")
    assert warnings_in(caplog) == [f"{reason}; the run is stopped."]

    ended = Seen(lambda c: 1, "on_train_end")
    teardown = Seen(lambda c: c.step, "on_teardown")
    good_then_bad = [*ones(3), *data[1:]]
    with pytest.raises(NonFiniteError) as caught:
        model.train(2, good_then_bad, [NanGuard("raise"), ended, teardown])
    assert str(caught.value).startswith("At step 4, epoch 1, batch 4, the loss is nan: ")
    assert isinstance(caught.value, FloatingPointError)
    assert (ended.values, teardown.values) == ([], [4])
    assert engine.value(network) == close(0.6)
    assert engine.hooks(network) == 0


def test_batches_are_counted_in_their_epoch(torch_engine):
    _, model = make(torch_engine)
    poisoned = At(
        "on_train_step_begin", lambda c: c.original_args()["train_dataset_element"][1].fill_(NAN), 5
    )
    with pytest.raises(NonFiniteError, match=r"^At step 5, epoch 2, batch 2, the loss is nan"):
        model.train(
            2,
            [(torch_engine.as_tensor(x), torch_engine.as_tensor(y)) for x, y in ones(3)],
            [poisoned, NanGuard("raise")],
        )


# Where it began.


def test_the_first_module_whose_output_is_not_finite_is_named(engine):
    """One run for each fault, with one network: nothing of a fault stays behind."""
    network, model = make(engine, engine.fragile())
    told = {}
    for fault in ("log", "root", "label"):
        with pytest.raises(NonFiniteError) as caught:
            model.train(1, fragile_batches(None, fault), NanGuard("raise"))
        told[fault] = str(caught.value).removeprefix("At step 2, epoch 1, batch 2, ")
    assert (
        told["log"] == "the loss is -inf: the first module whose output is not finite is block.log (Log)."
    )
    assert told["root"] == (
        "the norm of the gradients is nan: the forward pass is finite: the gradients of w are not."
    )
    if engine.framework == "torch":  # where this engine's loss function is no module
        assert told["label"] == "the loss is inf: the output of every module is finite, the loss is not."
    else:
        assert told["label"] == (
            "the loss is inf: the first module whose output is not finite is loss_fn (MeanLoss), "
            "whose input is not finite either."
        )
    assert engine.hooks(network) == 0
    with pytest.raises(NonFiniteError) as caught:
        model.train(1, fragile_batches("norm"), NanGuard("raise"))
    assert "is not finite is norm (BatchNorm1d), whose input is not finite either." in str(caught.value)


def test_weights_that_are_not_finite_themselves_are_named_too(torch_engine):
    _, model = make(torch_engine, torch_engine.weight(NAN))
    with pytest.raises(NonFiniteError) as caught:
        model.train(1, ones(1), NanGuard("raise"))
    assert str(caught.value).endswith(
        "the loss is nan: parameter w is not finite already; the first module whose output is not finite "
        "is the network itself (Weight)."
    )


def test_a_loss_module_and_outputs_in_mappings_are_looked_at(torch_engine):
    import torch

    class Named(torch.nn.Module):
        def forward(self, x):
            return {"logits": [torch.log(x)], "size": 3}

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))
            self.inner = Named()

        def forward(self, x):
            return self.w * self.inner(x)["logits"][0]

    network = Outer()
    loss_fn = torch.nn.MSELoss()
    model = dt.Model(network, loss_fn, torch_engine.sgd(network))
    with pytest.raises(NonFiniteError, match=r"finite is inner \(Named\)\."):
        model.train(1, batches((0, 0)), NanGuard("raise"))
    with pytest.raises(
        NonFiniteError, match=r"finite is loss_fn \(MSELoss\), whose input is not finite either"
    ):
        model.train(1, batches((1, NAN)), NanGuard("raise"))
    assert not loss_fn._forward_hooks


def test_a_forward_pass_that_cannot_be_repeated_costs_nothing(eager_engine):
    """The module fails when it is called again for the same batch."""
    network = eager_engine.fragile()
    calls = []
    first = network.block.first
    name = "forward" if eager_engine.framework == "torch" else "construct"
    native = getattr(first, name)

    def once(x):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("once only")
        return native(x)

    setattr(first, name, once)
    _, model = make(eager_engine, network)
    guard = NanGuard("skip")
    weights = Seen(lambda c: find_backend(network).to_numpy(network.w).item())
    reasons = []
    explained = At("on_train_step_end", lambda c: reasons.append(c.explain_nonfinite()), 1)
    model.train(1, fragile_batches("log", None), [explained, guard, weights])
    assert reasons == [
        "the forward pass cannot be repeated to locate the cause (ZeroDivisionError: once only)"
    ]
    assert guard.skipped == 1
    assert eager_engine.hooks(network) == 0
    assert weights.values[0] == 1.0
    assert weights.values[1] != 1.0


# Nothing else changes.


def trained(engine, data, callbacks, **options):
    """Train a new fragile network from the same seed; return its weights and buffers as bytes."""
    seed(engine)
    network, model = make(engine, engine.fragile(), **options)
    model.train(1, data, callbacks)
    backend = find_backend(network)
    values = {name: backend.to_numpy(value) for name, value in backend.weights(network).items()}
    assert all(np.isfinite(value).all() for value in values.values())
    return {name: value.tobytes() for name, value in values.items()}


def seed(engine):
    if engine.framework == "torch":
        import torch

        torch.manual_seed(3)
    else:
        import mindspore

        mindspore.set_seed(3)


def test_a_run_without_a_fault_is_bit_equal_to_one_without_a_guard(engine):
    """With dropout: its random numbers are untouched.

    MindSpore's own dropout gives other numbers from run to run after five steps on a CPU.
    """
    data = fragile_batches(*[None] * (20 if engine.framework == "torch" else 4))
    assert trained(engine, data, NanGuard("skip")) == trained(engine, data, None)


def test_repeating_the_forward_pass_leaves_no_trace(engine):
    """Dropout draws what it would have drawn, and batch norm has seen each batch once."""
    data = fragile_batches(None, "log", None, None)
    guard = NanGuard("skip")
    assert trained(engine, data, guard) == trained(engine, data, Unexplained())
    assert guard.skipped == 1


def test_flags_other_random_states_and_new_buffers_are_put_back(torch_engine):
    import random

    import torch

    class Moody(torch.nn.Module):
        """Changes everything that a forward pass may change."""

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))
            self.frozen = torch.nn.Dropout(0.5).eval()
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.count = self.count + 1
            self.frozen.train(not self.frozen.training)
            noise = random.random() + np.random.rand() + torch.rand(()).item()
            return torch.log(x * self.w) * noise

    network, model = make(torch_engine, Moody())

    def state(run_context):
        return (
            network.count.item(),
            network.frozen.training,
            random.random(),
            np.random.rand(),
            torch.rand(()).item(),
        )

    outcomes = []
    for guard in (NanGuard("skip"), Unexplained()):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        network.count.zero_()
        network.frozen.eval()
        seen = Seen(state)
        model.train(1, batches((0, 0), (1, 0)), [guard, seen])
        outcomes.append(seen.values)
    assert outcomes[0] == outcomes[1]
    assert [values[:2] for values in outcomes[0]] == [(1.0, True), (2.0, False)]


# Mixed precision.


def test_an_overflow_of_mixed_precision_is_not_reported_but_a_bad_loss_is(engine, caplog):
    """The second gradient is finite and overflows when it is scaled; the third batch's loss is NaN."""
    network, model = make(engine, amp="fp16")
    large = 1e35 if engine.framework == "torch" else 3e4
    rows = Seen(lambda c: (c.step_skipped, c.loss_scale, close(engine.value(network))))
    guard = NanGuard("skip")
    model.train(1, batches((1, 0), (large, 0), (1, NAN), (1, 0)), [guard, rows])
    scale = rows.values[0][1]
    # the overflow halves the scale; a bad loss whose gradient is finite leaves it
    assert [row[:2] for row in rows.values] == [
        (False, scale),
        (True, scale / 2),
        (True, scale / 2),
        (False, scale / 2),
    ]
    assert [row[2] for row in rows.values] == pytest.approx([0.9, 0.9, 0.9, 0.8], abs=1e-3)
    assert guard.skipped == 1
    [warning] = warnings_in(caplog)
    assert warning.startswith("At step 3, epoch 1, batch 3, the loss is nan")


def test_a_bad_window_is_counted_under_mixed_precision_too(torch_engine):
    network, model = make(torch_engine, amp="fp16", accumulate_steps=2)
    guard = NanGuard("skip")
    model.train(1, batches((1, NAN), (1, 0), (1, 0), (1, 0)), guard)
    assert (guard.skipped, torch_engine.value(network)) == (1, close(0.9))


def test_clipping_leaves_the_gradients_that_are_named_as_they_are(torch_engine):
    network, model = make(torch_engine, torch_engine.plane(), clip_norm=1.0)
    spoil = At("on_gradients_ready", lambda c: network.b.grad.fill_(NAN))
    with pytest.raises(NonFiniteError, match="the forward pass is finite: the gradients of b are not"):
        model.train(1, columns((3, 4)), [spoil, NanGuard("raise")])


# Where updates cannot be skipped.


def manual_step(network, batch, run_context):
    x, label = batch
    loss = (network(x) + label).mean()
    run_context.zero_grad()
    run_context.backward(loss)
    run_context.optimizer_step()
    return loss


def test_skip_is_refused_under_manual_optimisation_and_the_others_watch_the_loss(torch_engine, caplog):
    network = torch_engine.weight()
    options = {"train_step": manual_step, "automatic_optimization": False}
    model = dt.Model(network, None, torch_engine.sgd(network), **options)
    with pytest.raises(CapabilityError, match="NanGuard needs skip_nonfinite, which PyTorch does not have"):
        model.train(1, ones(1), NanGuard("skip"))
    model.train(1, batches((1, 0), (NAN, 0), (1, 0)), [NanGuard("stop"), steps := Seen(lambda c: c.step)])
    assert steps.values == [1, 2]
    [warning] = warnings_in(caplog)
    assert warning == (
        "At step 2, epoch 1, batch 2, the loss is nan: parameter w is not finite already; the forward pass "
        "cannot be repeated to locate the cause (train_step makes its updates itself); the run is "
        "stopped."
    )


def test_skip_is_refused_where_mindspore_scales_the_loss_itself(graph_engine):
    import mindspore

    network = graph_engine.weight()
    manager = mindspore.amp.FixedLossScaleManager(1024, False)
    optimizer = graph_engine.sgd(network, 0.1, loss_scale=1024)
    _, model = make(graph_engine, network, optimizer=optimizer, loss_scale_manager=manager)
    with pytest.raises(CapabilityError, match="NanGuard needs skip_nonfinite, which MindSpore GRAPH mode"):
        model.train(1, ones(1), NanGuard("skip"))
    with pytest.raises(NonFiniteError, match=r"^At step 2, .* the loss is nan: parameter w is not finite"):
        model.train(1, batches((1, 0), (NAN, 0), (1, 0)), NanGuard("raise"))


def test_an_engine_that_lacks_it_still_has_its_loss_watched(caplog):
    context = dt.RunContext({"net_outputs": NAN, "cur_step_num": 3})
    guard = NanGuard()
    guard.on_train_begin(context)
    guard.on_train_step_end(context)
    assert context.stop_reason == "At step 3, epoch None, batch 3, the loss is nan"


# Without a framework.


def test_in_the_fake_loop_it_counts_steps_with_a_bad_loss():
    guard = NanGuard("skip")
    seen = Seen(lambda c: (c.step, c.step_skipped, c.global_step))
    FakeLoop([1.0, NAN, 2.0, INF]).run([guard, seen])
    assert seen.values == [(1, False, 1), (2, True, 1), (3, False, 2), (4, True, 2)]
    assert guard.skipped == 2


def test_its_count_goes_on_in_a_run_that_is_resumed():
    guard, other = NanGuard("skip"), NanGuard("skip")
    FakeLoop([NAN, NAN]).run(guard)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    FakeLoop([1.0, NAN]).run(other)
    assert other.skipped == 3
    FakeLoop([1.0, NAN]).run(other)
    assert other.skipped == 1


def test_an_action_that_is_none_is_refused():
    with pytest.raises(
        ArgumentValueError, match=r"^NanGuard\(action=...\) is 'stop', 'skip', 'raise', but got 'x'"
    ):
        NanGuard("x")


def test_its_message_goes_to_the_log_and_nowhere_else(capsys, caplog):
    caplog.set_level(logging.WARNING)
    FakeLoop([NAN]).run(NanGuard())
    assert warnings_in(caplog) == ["At step 1, epoch 1, batch 1, the loss is nan; the run is stopped."]
    assert capsys.readouterr() == ("", "")
