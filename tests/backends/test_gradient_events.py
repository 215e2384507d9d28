"""The events inside a step: in which order, how often, and what is known in each."""

import math

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, batches, columns, ones
from models import make

import dualtrain as dt
from dualtrain.errors import CapabilityError
from dualtrain.protocol import Capability

INSIDE = [
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
]


class Inside:
    """Keep what ``read(run_context)`` gives at each event of a step, with the event's name."""

    def __init__(self, read=lambda context: (), needs=()):
        self.read, self.needs, self.calls = read, frozenset(needs), []
        for event in ("on_train_step_begin", *INSIDE, "on_train_step_end"):
            setattr(self, event, self._keep)

    def _keep(self, run_context):
        name = run_context.event.value.removeprefix("on_").removesuffix("_optimizer_step")
        self.calls.append((name.replace("train_step_", ""), *self.read(run_context)))

    def at(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


UPDATE = ["begin", "after_backward", "gradients_ready", "before", "after", "end"]
GATHER = ["begin", "after_backward", "end"]


# Order and count.


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_each_update_has_each_event_once_in_order(eager_engine, clip_norm):
    network, model = make(eager_engine, clip_norm=clip_norm)
    inside = Inside()
    model.train(2, ones(2), inside)
    assert [name for (name,) in inside.calls] == UPDATE * 4
    assert eager_engine.value(network) == close(1 - 0.4 * (clip_norm or 1))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_window_has_a_backward_a_batch_and_one_update(eager_engine, clip_norm):
    network, model = make(eager_engine, accumulate_steps=3, clip_norm=clip_norm)
    inside = Inside()
    model.train(1, ones(5), inside)
    assert [name for (name,) in inside.calls] == [*GATHER * 2, *UPDATE, *GATHER, *UPDATE]
    assert eager_engine.value(network) == close(1 - 0.2 * (clip_norm or 1))


def test_each_callback_gets_only_what_it_listens_to_in_the_lists_order(eager_engine):
    calls = []

    def note(event, name):
        return At(event, lambda context: calls.append((context.step, name)))

    _, model = make(eager_engine)
    late, early = note("on_after_optimizer_step", "late"), note("on_after_backward", "early")
    model.train(1, ones(2), [late, note("on_after_backward", "first"), early])
    assert calls == [(s, name) for s in (1, 2) for name in ("first", "early", "late")]


def test_evaluations_have_none_of_them(eager_engine):
    _, model = make(eager_engine)
    inside = Inside()
    model.fit(1, ones(1), ones(2), callbacks=inside)
    model.eval(ones(1), inside)
    assert [name for (name,) in inside.calls] == UPDATE


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_listener_changes_no_number(eager_engine):
    """Statistics are those of a run that nobody listens to: each batch went forward once."""
    pairs = [np.array(pair, np.float32).reshape(-1, 1) for pair in ((10, 12), (20, 22), (10, 12))]
    network, model = make(eager_engine, eager_engine.normed(), accumulate_steps=2)
    model.train(1, [(x, np.zeros_like(x)) for x in pairs], Inside())
    mean = 0.9 * 3.09 + 1.1  # after 1.1 and 3.09
    assert eager_engine.statistics(network) == close((mean, 0.9 * 1.19 + 0.2))


def test_a_listener_sees_the_pass_whose_gradient_is_used(eager_engine):
    """At w = 1 a dropout's loss is its gradient: another draw for either would part them."""
    network, model = make(eager_engine, eager_engine.dropped())
    losses = Inside(lambda c: (c.loss,), needs={Capability.GRAD_NORM})
    norms = Seen(lambda c: c.grad_norm)
    batch = (np.arange(1, 65, dtype=np.float32), np.zeros(64, np.float32))
    model.train(1, [batch], [losses, norms])
    [(loss,)] = losses.at("after_backward")
    assert norms.values == [pytest.approx(loss, rel=1e-5)]
    assert eager_engine.value(network) == pytest.approx(1 - 0.1 * loss, rel=1e-5)


# What is known in each.


def test_the_loss_is_this_batchs_in_all_of_them(eager_engine):
    """Losses 1, 2 and 3, at gradient 0, in windows of 2."""
    _, model = make(eager_engine, accumulate_steps=2)
    inside = Inside(lambda c: (c.step, c.loss))
    model.train(1, batches((0, 1), (0, 2), (0, 3)), inside)
    for name, steps in {
        "after_backward": (1, 2, 3),
        "gradients_ready": (2, 3),
        "before": (2, 3),
        "after": (2, 3),
        "end": (1, 2, 3),
    }.items():
        assert inside.at(name) == [(step, step) for step in steps], name


def test_updates_are_counted_from_the_optimizers_step_on(eager_engine):
    _, model = make(eager_engine, accumulate_steps=2)
    inside = Inside(lambda c: (c.global_step,))
    model.train(1, ones(3), inside)
    assert inside.at("begin") == [(0,), (0,), (1,)]
    assert inside.at("after_backward") == [(0,), (0,), (1,)]
    assert inside.at("gradients_ready") == [(0,), (1,)]
    assert inside.at("before") == [(0,), (1,)]
    assert inside.at("after") == [(1,), (2,)]
    assert inside.at("end") == [(0,), (1,), (2,)]


def test_weights_have_moved_after_the_optimizers_step_and_not_before(eager_engine):
    network, model = make(eager_engine)
    inside = Inside(lambda c: (round(eager_engine.value(network), 5),))
    model.train(1, ones(2), inside)
    for name in ("after_backward", "gradients_ready", "before"):
        assert inside.at(name) == [(1.0,), (0.9,)]
    assert inside.at("after") == [(0.9,), (0.8,)]


@pytest.mark.parametrize("clip_norm", [None, 2.5])
def test_the_norm_is_known_when_gradients_are_whole(eager_engine, clip_norm):
    """Norms 5 and 10, whichever event asks first; none where the window still goes on."""
    _, model = make(eager_engine, eager_engine.plane(), clip_norm=clip_norm)
    inside = Inside(lambda c: (c.grad_norm, c.grad_norm_clipped), needs={Capability.GRAD_NORM})
    model.train(1, columns((3, 4), (6, 8)), inside)
    whole = [(close(5), close(clip_norm or 5)), (close(10), close(clip_norm or 10))]
    for name in ("gradients_ready", "before", "after", "end"):
        assert inside.at(name) == whole, name
    assert inside.at("after_backward") == [(None, None)] * 2


def test_the_norm_of_a_window_is_known_with_its_last_batch(eager_engine):
    _, model = make(eager_engine, eager_engine.plane(), accumulate_steps=2)
    inside = Inside(lambda c: (c.grad_norm,), needs={Capability.GRAD_NORM})
    model.train(1, columns((6, 0), (0, 8), (6, 8)), inside)
    assert inside.at("after_backward") == [(None,)] * 3
    assert inside.at("gradients_ready") == [(close(5),), (close(10),)]
    assert inside.at("end") == [(None,), (close(5),), (close(10),)]


def test_a_skip_is_known_after_the_optimizers_step_and_forgotten_in_the_next(eager_engine):
    network, model = make(eager_engine, amp="fp16")
    inside = Inside(lambda c: (c.step_skipped,))
    model.train(1, batches((1, 0), (math.inf, 0), (1, 0)), inside)
    assert inside.at("after") == [(False,), (True,), (False,)]
    assert inside.at("end") == [(False,), (True,), (False,)]
    for name in ("after_backward", "gradients_ready", "before"):
        assert inside.at(name) == [(False,)] * 3, name
    assert eager_engine.value(network) == close(0.8)


def test_the_rate_in_each_is_the_one_that_the_step_uses(eager_engine):
    network = eager_engine.weight()
    optimizer, options = eager_engine.scheduled_sgd(network, [0.1, 0.2, 0.3])
    model = dt.Model(network, eager_engine.loss_fn(), optimizer, **options)
    inside = Inside(lambda c: (c.lr,))
    model.train(1, ones(2), inside)
    for name in UPDATE:
        assert inside.at(name) == [(0.1,), (0.2,)], name


def test_a_rate_that_is_set_before_the_optimizers_step_is_used_by_it(eager_engine):
    def halve(run_context):
        run_context.scale_lr(0.5)

    network, model = make(eager_engine)
    model.train(1, ones(2), At("on_before_optimizer_step", halve, step=2))
    assert eager_engine.value(network) == close(1 - 0.1 - 0.05)


def test_a_stop_inside_a_step_ends_the_run_after_it(eager_engine):
    network, model = make(eager_engine)
    inside = Inside()
    stop = At("on_gradients_ready", lambda c: c.request_stop("enough"), step=2)
    model.train(3, ones(3), [stop, inside])
    assert len(inside.at("end")) == 2
    assert eager_engine.value(network) == close(0.8)


def test_an_error_inside_a_step_says_where_it_was_raised(eager_engine):
    def fail(run_context):
        raise ZeroDivisionError("no")

    network, model = make(eager_engine)
    with pytest.raises(ZeroDivisionError, match="no") as error:
        model.train(1, ones(3), At("on_before_optimizer_step", fail, step=2))
    [note] = [note for note in error.value.__notes__ if "on_before_optimizer_step" in note]
    assert "At.on_before_optimizer_step at step 2" in note
    assert eager_engine.value(network) == close(0.9)


# PyTorch: the gradients themselves.


def gradients(context):
    network = context.original_args().network
    return tuple(float(weight.grad) for weight in network.parameters())


def test_the_gradients_in_each_event(torch_engine):
    """Raw, so scaled and part of a mean; then whole and unscaled; then clipped."""
    _, model = make(torch_engine, torch_engine.plane(), accumulate_steps=2, clip_norm=2.5, amp="fp16")
    inside = Inside(lambda c: gradients(c) if "step" not in c.event.value else ())
    clipped = Seen(gradients, "on_before_optimizer_step")
    scale = Seen(lambda c: c.loss_scale, "on_train_begin")
    model.train(1, columns((6, 0), (0, 8)), [inside, clipped, scale])
    [factor] = scale.values
    assert inside.at("after_backward") == [close((3 * factor, 0)), close((3 * factor, 4 * factor))]
    assert inside.at("gradients_ready") == [close((3, 4))]
    assert clipped.values == [close((1.5, 2))]


@pytest.mark.parametrize("read_before", [False, True])
def test_gradients_that_a_callback_changes_are_clipped_by_their_new_norm(torch_engine, read_before):
    """(3, 4) doubled: the norm is 10, and a limit of 2.5 leaves a quarter of (6, 8)."""
    network, model = make(torch_engine, torch_engine.plane(), rate=1.0, clip_norm=2.5)
    seen = []

    def double(run_context):
        if read_before:
            seen.append(run_context.grad_norm)
        for weight in network.parameters():
            weight.grad.mul_(2)

    end = Seen(lambda c: (c.grad_norm, c.grad_norm_clipped))
    model.train(1, columns((3, 4)), [At("on_gradients_ready", double), end])
    assert torch_engine.pair(network) == close((1 - 1.5, 1 - 2))
    assert end.values == [(close(10), close(2.5))]
    assert seen == ([5.0] if read_before else [])


def test_gradients_that_a_callback_changes_have_their_new_norm_without_clipping_too(torch_engine):
    network, model = make(torch_engine, torch_engine.plane())

    def drop_b(run_context):
        seen.append(run_context.grad_norm)
        network.b.grad.zero_()

    seen = []
    end = Seen(lambda c: c.grad_norm)
    model.train(1, columns((3, 4)), [At("on_gradients_ready", drop_b), end])
    assert (seen, end.values) == ([5.0], [3.0])
    assert torch_engine.pair(network) == close((0.7, 1))


# MindSpore's GRAPH mode calls no Python inside a step.


@pytest.mark.parametrize("event", INSIDE)
def test_graph_mode_refuses_a_callback_with_one_of_them_before_the_first_step(graph_engine, event):
    class Watcher:
        pass

    watcher, started = Watcher(), Seen(lambda c: c.step, "on_train_begin")
    setattr(watcher, event, lambda run_context: None)
    network, model = make(graph_engine)
    with pytest.raises(CapabilityError) as error:
        model.train(1, ones(1), [started, watcher])
    for word in ("Watcher", event, "MindSpore GRAPH mode"):
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, RuntimeError)
    assert started.values == []
    assert graph_engine.value(network) == 1.0


def test_graph_mode_refuses_a_callback_that_needs_them(graph_engine):
    class Watcher(dt.Callback):
        needs = frozenset({Capability.GRADIENT_EVENTS})

    network, model = make(graph_engine)
    with pytest.raises(CapabilityError) as error:
        model.train(1, ones(1), Watcher())
    for word in ("Watcher", "gradient_events", "MindSpore GRAPH mode", "remove the callback"):
        assert word in str(error.value)
    assert graph_engine.value(network) == 1.0


def test_graph_mode_takes_a_callback_that_merely_inherits_them(graph_engine):
    network, model = make(graph_engine)
    model.train(1, ones(1), dt.Callback())
    assert graph_engine.value(network) == close(0.9)


def test_who_has_the_events_says_so(engine):
    seen = Seen(lambda c: Capability.GRADIENT_EVENTS in c.capabilities)
    _, model = make(engine)
    model.train(1, ones(1), seen)
    assert seen.values == [engine.name != "mindspore-graph"]
