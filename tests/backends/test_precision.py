"""Mixed precision: what an overflow skips, and that nothing shows the scale of the loss."""

import math

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, batches, columns, ones
from models import make

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError
from dualtrain.protocol import Capability

INF = math.inf
OVERFLOW = batches((1, 0), (INF, 0), (1, 0), (1, 0))
"""Gradients 1, infinity, 1, 1."""


def scale_of(model):
    """The loss scale that a run begins with."""
    seen = Seen(lambda c: c.loss_scale, "on_train_begin")
    model.train(1, batches((0, 0)), seen)
    return seen.values[0]


# An overflow.


def test_an_overflow_skips_one_update_and_nothing_else(engine):
    """Rates .1 .2 .3 .4: the second batch changes no weight, no count and no rate."""
    network = engine.weight()
    optimizer, options = engine.scheduled_sgd(network, [0.1, 0.2, 0.3, 0.4])
    model = dt.Model(network, engine.loss_fn(), optimizer, amp="fp16", **options)
    rows = Seen(lambda c: (c.global_step, c.is_update_step, c.step_skipped, close(c.lr)))
    weights = Seen(lambda c: engine.value(network))
    rates = Seen(lambda c: c.lr, "on_train_step_begin")
    scales = [Seen(lambda c: c.loss_scale, event) for event in ("on_train_begin", "on_train_step_end")]
    model.train(1, OVERFLOW, [rows, weights, rates, *scales])
    assert weights.values == close([0.9, 0.9, 0.7, 0.4])
    assert rows.values == [
        (1, True, False, 0.1),
        (1, True, True, 0.2),
        (2, True, False, 0.2),
        (3, True, False, 0.3),
    ]
    assert rates.values == close([0.1, 0.2, 0.2, 0.3])
    [scale] = scales[0].values
    assert scale > 1
    assert scales[1].values == [scale, scale / 2, scale / 2, scale / 2]


def test_what_a_step_was_is_forgotten_when_the_next_begins(engine):
    """A step's end says that it updated, or skipped it; the next one's begin is about another batch."""
    _, model = make(engine, clip_norm=10.0, amp="fp16")
    begins, ends = (
        Seen(lambda c: (c.is_update_step, c.step_skipped, c.grad_norm), event)
        for event in ("on_train_step_begin", "on_train_step_end")
    )
    model.train(2, batches((1, 0), (INF, 0)), [begins, ends])
    assert begins.values == [(False, False, None)] * 4
    assert [values[:2] for values in ends.values] == [(True, False), (True, True)] * 2


def test_an_overflow_in_a_window_drops_its_update_and_the_next_one_is_as_ever(engine):
    """Windows of 2: (1, 3) moves by .2; (1, inf) by nothing; (2, 4) by .3; the short (inf) by nothing."""
    network, model = make(engine, accumulate_steps=2, amp="fp16")
    seen = Seen(lambda c: (c.global_step, c.step_skipped, close(engine.value(network))))
    data = batches(*[(x, 0) for x in (0.5, 1.5, 0.5, INF, 1, 2, INF)])
    model.train(1, data, seen)
    assert seen.values == [
        (0, False, 1.0),
        (1, False, 0.9),
        (1, False, 0.9),
        (1, True, 0.9),
        (1, False, 0.9),
        (2, False, 0.75),
        (2, True, 0.75),
    ]


def test_norms_are_unscaled_and_clipping_follows_them(engine):
    """Gradients of norm .5, infinity and 5 under a limit of 1."""
    network, model = make(engine, engine.plane(), clip_norm=1.0, accumulate_steps=1, amp="fp16")
    norms = Seen(lambda c: (c.grad_norm, c.grad_norm_clipped))
    pairs = Seen(lambda c: engine.pair(network))
    model.train(1, columns((0.3, 0.4), (INF, 0.4), (0.75, 1), (0.6, 0.8)), [norms, pairs])
    moved = pytest.approx((1 - 0.03, 1 - 0.04), abs=1e-4)
    clipped = pytest.approx((1 - 0.03 - 0.06, 1 - 0.04 - 0.08), abs=1e-4)
    assert pairs.values[:3] == [moved, moved, clipped]
    assert pairs.values[3] == pytest.approx((1 - 0.03 - 0.12, 1 - 0.04 - 0.16), abs=1e-4)
    first, overflow, third, last = norms.values
    assert first == pytest.approx((0.5, 0.5), rel=1e-3)
    assert not math.isfinite(overflow[0])
    assert third == pytest.approx((1.25, 1.0), rel=1e-3)
    assert last == pytest.approx((1.0, 1.0), rel=1e-3)


def test_losses_do_not_show_the_scale(engine):
    _, model = make(engine, accumulate_steps=2, amp="fp16")
    seen = Seen(lambda c: c.loss)
    model.train(1, batches(*[(0.0, 2.0)] * 3), seen)
    assert seen.values == [2.0] * 3


def test_the_scale_goes_on_in_the_next_run(engine):
    _, model = make(engine, amp="fp16")
    scale = scale_of(model)
    model.train(1, batches((INF, 0), (INF, 0)))
    assert scale_of(model) == scale / 4


def test_a_run_after_one_that_failed_at_an_overflow_is_as_ever(engine):
    def fail(run_context):
        raise ZeroDivisionError

    network, model = make(engine, amp="fp16")
    with pytest.raises(ZeroDivisionError):
        model.train(1, batches((INF, 0), (1, 0)), At("on_train_step_end", fail))
    seen = Seen(lambda c: (c.step_skipped, c.global_step))
    model.train(1, ones(2), seen)
    assert seen.values == [(False, 1), (False, 2)]
    assert engine.value(network) == close(0.8)


INSIDE = [
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
]


@pytest.mark.parametrize("event", INSIDE)
def test_a_run_after_one_that_failed_inside_a_step_is_as_ever(eager_engine, event):
    def fail(run_context):
        raise ZeroDivisionError

    network, model = make(eager_engine, amp="fp16")
    with pytest.raises(ZeroDivisionError):
        model.train(1, ones(1), At(event, fail))
    before = eager_engine.value(network)
    model.train(1, ones(2))
    assert eager_engine.value(network) == close(before - 0.2)


def test_the_scale_after_an_overflow_is_known_together_with_the_skip(eager_engine):
    _, model = make(eager_engine, amp="fp16")
    scale = scale_of(model)
    seen = Seen(lambda c: (c.step_skipped, c.loss_scale, c.global_step), "on_after_optimizer_step")
    model.train(1, batches((1, 0), (INF, 0)), seen)
    assert seen.values == [(False, scale, 1), (True, scale / 2, 1)]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_optimizer_that_unscales_by_itself_is_seen_to_skip(torch_engine, kind, fused):
    """torch hands an overflow to its fused optimizers, whose step is called and does nothing."""
    import torch

    network = torch_engine.weight()
    optimizer = getattr(torch.optim, kind)(network.parameters(), 0.1, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, amp="fp16", lr_scheduler=schedule)
    seen = Seen(lambda c: (c.step_skipped, c.global_step, torch_engine.value(network)))
    model.train(1, batches((1, 0), (INF, 0), (1, 0)), seen)
    first, second, third = seen.values
    assert first[:2] == (False, 1)
    assert second == (True, 1, first[2])
    assert third[:2] == (False, 2)
    assert third[2] < first[2] < 1.0
    assert schedule.last_epoch == 2


def test_train_step_too_may_begin_with_an_overflow_or_a_window(engine):
    """The check of the first step's gradient does not take a weight that stands still amiss."""
    network = engine.weight()
    step = engine.step_function("ok")
    for data, factor in ((batches((INF, 0), (1, 0)), 1), (ones(2), 2)):
        before = engine.value(network)
        optimizer = engine.sgd(network, 0.1)
        model = dt.Model(network, optimizer=optimizer, train_step=step, amp="fp16", accumulate_steps=factor)
        model.train(1, data)
        assert engine.value(network) == close(before - 0.1)


def test_an_evaluation_in_between_changes_nothing(engine):
    network, model = make(engine, amp="fp16")
    results = Seen(lambda c: c.metrics["eval_loss"], "on_eval_end")
    model.fit(2, ones(1), ones(1), callbacks=results)
    assert results.values == pytest.approx([0.9, 0.8], rel=1e-3)
    assert engine.value(network) == close(0.8)


# Half precision is used.


def test_the_networks_arithmetic_is_in_half_precision(engine):
    """1 + 2**-11 is no number of fp16: a layer gives 1 for it."""
    network = engine.dense(1, 1)
    weights = find_backend(network).weights(network)
    find_backend(network).assign_weights(
        network, {name: np.ones(tuple(w.shape), np.float32) * (w.ndim == 2) for name, w in weights.items()}
    )
    x = np.array([[1 + 2**-11]], np.float32)
    label = np.zeros((1, 1), np.float32)
    losses = []
    for amp in (None, "fp16"):
        optimizer = engine.sgd(network, 0.0 if engine.framework == "torch" else 1e-30)
        model = dt.Model(network, engine.loss_fn(), optimizer, amp=amp)
        seen = Seen(lambda c: c.loss)
        model.train(1, [(x, label)], seen)
        losses.extend(seen.values)
    assert losses == [1 + 2**-11, 1.0]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_bfloat16_has_no_scale_and_skips_nothing(torch_engine, clip_norm):
    network = torch_engine.weight()
    optimizer, options = torch_engine.scheduled_sgd(network, [0.1, 0.2])
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, amp="bf16", clip_norm=clip_norm, **options)
    seen = Seen(lambda c: (c.step_skipped, c.loss_scale, c.global_step, c.is_update_step))
    model.train(1, ones(2), seen)
    assert seen.values == [(False, None, 1, True), (False, None, 2, True)]
    assert torch_engine.value(network) == close(1 - 0.3 * (clip_norm or 1))


def test_bfloat16_is_used(torch_engine):
    """1 + 2**-8 is no number of bfloat16; the weight stays in float32."""
    import torch

    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(network.weight)
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network, 0.0), amp="bf16")
    seen = Seen(lambda c: c.loss)
    model.train(1, [(np.array([[1 + 2**-8]], np.float32), np.zeros((1, 1), np.float32))], seen)
    assert seen.values == [1.0]
    assert network.weight.dtype is torch.float32


def test_an_infinity_without_mixed_precision_is_not_skipped(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1), clip_norm=None)
    seen = Seen(lambda c: (c.step_skipped, c.loss_scale, c.global_step))
    model.train(1, batches((INF, 0)), seen)
    assert seen.values == [(False, None, 1)]
    assert not math.isfinite(engine.value(network))


# What is refused.


@pytest.mark.parametrize("amp", ["fp8", "O2", "float16", "", 16, True])
def test_another_precision_is_refused(engine, amp):
    network = engine.weight()
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match="amp is None, 'fp16' or 'bf16'"):
        dt.Model(network, engine.loss_fn(), engine.sgd(network), amp=amp)


def test_bfloat16_is_refused_on_mindspore(mindspore_engine):
    network = mindspore_engine.weight()
    with pytest.raises(ArgumentValueError, match="amp='bf16'") as error:
        dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network), amp="bf16")
    assert "amp='fp16'" in str(error.value)
    assert "\n" not in str(error.value)


def test_amp_and_mindspores_own_options_are_refused_together(mindspore_engine):
    import mindspore

    network = mindspore_engine.weight()
    parts = network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network)
    manager = mindspore.amp.FixedLossScaleManager(1024.0, False)
    for options in ({"amp_level": "O2"}, {"amp_level": "auto"}, {"loss_scale_manager": manager}):
        with pytest.raises(ArgumentValueError, match="amp_level or loss_scale_manager"):
            dt.Model(*parts, amp="fp16", **options)


def test_a_fixed_loss_scale_of_mindspores_own_still_trains(mindspore_engine):
    import mindspore

    network = mindspore_engine.weight()
    optimizer = mindspore_engine.sgd(network, 0.1, loss_scale=1024.0)
    manager = mindspore.amp.FixedLossScaleManager(1024.0, False)
    model = dt.Model(network, mindspore_engine.loss_fn(), optimizer, loss_scale_manager=manager)
    seen = Seen(lambda c: (c.global_step, c.step_skipped, c.is_update_step, c.lr))
    model.train(1, ones(2), seen)
    assert mindspore_engine.value(network) == close(0.8)
    assert seen.values == [(1, False, True, 0.1), (2, False, True, 0.1)]


def test_the_contract_is_refused_together_with_mindspores_loss_scale(mindspore_engine):
    import mindspore

    network = mindspore_engine.weight()
    optimizer = mindspore_engine.sgd(network, 0.1, loss_scale=1024.0)
    manager = mindspore.amp.FixedLossScaleManager(1024.0, False)
    parts = network, mindspore_engine.loss_fn(), optimizer
    for options in ({"accumulate_steps": 2}, {"clip_norm": 1.0}):
        with pytest.raises(ArgumentValueError, match=r"accumulate_steps, clip_norm .* loss_scale_manager"):
            dt.Model(*parts, loss_scale_manager=manager, **options)
    model = dt.Model(*parts, loss_scale_manager=manager)
    for need in (Capability.GRAD_NORM, Capability.ACCUMULATION):
        with pytest.raises(CapabilityError, match=f"Seen needs {need}"):
            model.train(1, ones(1), Seen(lambda c: None, needs={need}))
    assert mindspore_engine.value(network) == 1.0
