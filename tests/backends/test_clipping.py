"""The norm of an update's gradients, and clipping by it; shown by how far the weights move.

A ``plane`` network's gradients are the two numbers of a batch, so 3 and 4 have the norm 5.
"""

import math

import numpy as np
import pytest
from closeness import close
from engines import ENGINES, At, Seen, Stream, columns
from models import make

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.protocol import Capability

NORM = {Capability.GRAD_NORM}


def norms(**options):
    return Seen(lambda c: (c.grad_norm, c.grad_norm_clipped), needs=NORM, **options)


def test_the_norm_is_over_all_weights(engine):
    network, model = make(engine, engine.plane())
    seen = norms()
    model.train(1, columns((3, 4), (0, 0), (-5, 12)), seen)
    assert seen.values == [(close(5), close(5)), (0, 0), (close(13), close(13))]
    assert all(type(norm) is float for pair in seen.values for norm in pair)
    assert engine.pair(network) == close((1 - 0.3 + 0.5, 1 - 0.4 - 1.2))


def test_a_larger_norm_is_clipped_and_a_smaller_one_is_left(engine):
    """Norms 5, 1 and 10 under a limit of 2.5: the first moves by half of 3 and 4, the last by a quarter."""
    network, model = make(engine, engine.plane(), clip_norm=2.5, rate=1.0)
    seen = norms()
    pairs = Seen(lambda c: engine.pair(network))
    model.train(1, columns((3, 4), (0.6, 0.8), (-6, 8)), [seen, pairs])
    assert seen.values == [(close(5), close(2.5)), (close(1), close(1)), (close(10), close(2.5))]
    assert pairs.values == [
        close((1 - 1.5, 1 - 2)),
        close((1 - 1.5 - 0.6, 1 - 2 - 0.8)),
        close((1 - 1.5 - 0.6 + 1.5, 1 - 2 - 0.8 - 2)),
    ]


def test_a_norm_of_zero_is_no_division_by_it(engine):
    network, model = make(engine, engine.plane(), clip_norm=1.0)
    seen = norms()
    model.train(1, columns((0, 0)), seen)
    assert seen.values == [(0, 0)]
    assert engine.pair(network) == (1, 1)


def test_the_norm_of_a_window_is_that_of_its_mean(engine):
    """Two batches whose mean is (3, 4), each with another norm; then a short window of (6, 8) alone."""
    network, model = make(engine, engine.plane(), clip_norm=2.5, rate=1.0, accumulate_steps=2)
    given = columns((6, 0), (0, 8), (6, 8))
    for data in (given, Stream(given)):
        a, b = engine.pair(network)
        seen = norms()
        pairs = Seen(lambda c: engine.pair(network))
        model.train(1, data, [seen, pairs])
        assert seen.values == [(None, None), (close(5), close(2.5)), (close(10), close(2.5))]
        assert pairs.values == [(a, b), close((a - 1.5, b - 2)), close((a - 3, b - 4))]


def test_the_norm_of_a_window_without_clipping(engine):
    _, model = make(engine, engine.plane(), accumulate_steps=3)
    seen = norms()
    model.train(2, columns((9, 0), (0, 12), (0, 0), (-3, 4)), seen)
    window = [(None, None), (None, None), (close(5), close(5)), (close(5), close(5))]
    assert seen.values == window * 2


def test_the_norm_is_that_of_the_optimizers_weights(engine):
    """A weight that the optimizer does not have is no part of it."""
    network = engine.plane()
    if engine.framework == "torch":
        import torch

        optimizer = torch.optim.SGD([network.a], 0.1)
    else:
        import mindspore

        optimizer = mindspore.nn.SGD([network.a], 0.1)
    seen = norms()
    dt.Model(network, engine.loss_fn(), optimizer, clip_norm=6.0).train(1, columns((3, 400)), seen)
    assert seen.values == [(close(3), close(3))]
    assert engine.pair(network) == close((0.7, 1))


@pytest.mark.parametrize("clip_norm", [0, -1.0, math.nan, math.inf, "1", True, [1.0]], ids=repr)
def test_a_limit_that_makes_no_sense_is_refused(engine, clip_norm):
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match="clip_norm"):
        make(engine, engine.plane(), clip_norm=clip_norm)


# PyTorch: computed when read.


@pytest.fixture
def computed(monkeypatch):
    """Keep how many gradients each computation of a norm has had."""
    from dualtrain.backends.torch import gradients, update
    from dualtrain.backends.torch.norms import total_norm

    calls = []

    def counting(tensors):
        calls.append(len(tensors))
        return total_norm(tensors)

    for module in (gradients, update):
        monkeypatch.setattr(module, "total_norm", counting)
    return calls


def test_the_norm_is_not_computed_where_nobody_reads_it(torch_engine, computed):
    _, model = make(torch_engine, torch_engine.plane())
    model.train(1, columns(*[(3, 4)] * 3), Seen(lambda c: (c.loss, c.lr, c.global_step)))
    assert computed == []


def test_the_norm_is_computed_once_where_it_is_read_often(torch_engine, computed):
    _, model = make(torch_engine, torch_engine.plane())
    seen = []

    def read(run_context):
        seen.extend([run_context.grad_norm, run_context.grad_norm, run_context.grad_norm_clipped])

    reads = [At("on_train_step_end", read, step=2), At("on_train_step_end", read, step=2)]
    model.train(1, columns((3, 4), (6, 8), (3, 4)), reads)
    assert seen == [10.0] * 6
    assert computed == [2]


def test_clipping_computes_the_norm_once_an_update(torch_engine, computed):
    _, model = make(torch_engine, torch_engine.plane(), clip_norm=1.0, accumulate_steps=2)
    model.train(1, columns(*[(3, 4)] * 5), norms())
    assert computed == [2, 2, 2]


def test_a_norm_that_is_read_late_is_still_that_of_the_last_update(torch_engine):
    _, model = make(torch_engine, torch_engine.plane())
    seen = [Seen(lambda c: c.grad_norm, event) for event in ("on_train_epoch_end", "on_train_end")]
    model.train(1, columns((1, 0), (3, 4)), seen)
    assert [reader.values for reader in seen] == [[5.0], [5.0]]


def test_gradients_in_bfloat16_have_a_norm_in_float32(torch_engine):
    """4113 gradients of 1: a sum in bfloat16 stands still at 256, and it has no 64.13, only 64 and 64.5."""
    import torch

    norm = math.sqrt(4113)
    network = torch.nn.Linear(4113, 1, bias=False).bfloat16()
    with torch.no_grad():
        network.weight.zero_()
    optimizer = torch.optim.SGD(network.parameters(), 1.0)
    model = dt.Model(network, lambda output, label: output.sum(), optimizer, clip_norm=norm / 4)
    batch = (torch.ones(1, 4113, dtype=torch.bfloat16), torch.zeros(1))
    seen = norms()
    model.train(1, [batch], seen)
    assert seen.values == [(close(norm), close(norm / 4))]
    assert network.weight.dtype is torch.bfloat16
    assert torch.equal(network.weight, torch.full((1, 4113), -0.25, dtype=torch.bfloat16))


def test_weights_of_two_precisions_have_one_norm(torch_engine):
    import torch

    network = torch_engine.plane()
    network.a.data = network.a.data.bfloat16()
    seen = norms()
    optimizer = torch_engine.sgd(network, 1.0)
    model = dt.Model(network, torch_engine.loss_fn(), optimizer, clip_norm=2.5)
    model.train(1, columns((3, 4)), seen)
    assert seen.values == [(close(5), close(2.5))]
    assert network.a.dtype is torch.bfloat16
    assert torch_engine.pair(network) == close((-0.5, -1))


@pytest.mark.parametrize("data", [list, Stream], ids=["sized", "unsized"])
def test_an_update_without_any_gradient_has_a_norm_of_zero(torch_engine, data):
    """The optimizer has ``b`` alone, and the loss is of ``a``; the second window is a short one."""
    import torch

    network = torch_engine.plane()
    model = dt.Model(
        network,
        optimizer=torch.optim.SGD([network.b], 0.1),
        train_step=lambda network, batch: network.a * batch[0].sum(),
        clip_norm=1.0,
        accumulate_steps=2,
    )
    seen = norms()
    model.train(1, data(columns((3, 4), (3, 4), (3, 4))), seen)
    assert seen.values == [(None, None), (0, 0), (0, 0)]
    assert torch_engine.pair(network) == (1, 1)


# MindSpore: part of the step, where somebody asks for it before the run.


def test_reading_a_norm_that_nobody_asked_for_says_what_to_do(mindspore_engine):
    network, model = make(mindspore_engine, mindspore_engine.plane())
    errors = []

    def read(run_context):
        for name in ("grad_norm", "grad_norm_clipped"):
            with pytest.raises(RunStateError) as error:
                getattr(run_context, name)
            errors.append(error.value)

    model.train(1, columns((3, 4)), At("on_train_step_end", read))
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "Capability.GRAD_NORM" in str(error)
        assert "needs" in str(error)
        assert "clip_norm" in str(error)
    assert mindspore_engine.pair(network) == close((0.7, 0.6))


def test_a_norm_can_be_read_where_another_callback_asked_for_it(mindspore_engine):
    _, model = make(mindspore_engine, mindspore_engine.plane())
    reader = Seen(lambda c: c.grad_norm)
    model.train(1, columns((3, 4)), [reader, norms()])
    assert reader.values == [close(5)]
    with pytest.raises(RunStateError, match=r"Capability\.GRAD_NORM"):
        model.train(1, columns((3, 4)), reader)  # what one run needs is forgotten in the next


def test_a_norm_can_be_read_where_gradients_are_clipped(mindspore_engine):
    _, model = make(mindspore_engine, mindspore_engine.plane(), clip_norm=2.5)
    reader = Seen(lambda c: (c.grad_norm, c.grad_norm_clipped))
    model.train(1, columns((3, 4)), reader)
    assert reader.values == [(close(5), close(2.5))]


def test_a_norm_adds_nothing_to_the_outputs(engine):
    _, model = make(engine, engine.plane(), clip_norm=2.5)
    seen = Seen(lambda c: (c.loss, np.shape(c.outputs.asnumpy())), needs=NORM)
    model.train(1, columns((3, 4)), seen)
    assert seen.values == [(7.0, ())]


@pytest.mark.torch
def test_the_norm_that_is_read_after_a_step_is_that_of_its_gradients_though_the_optimizer_overwrites_them():
    """Nesterov momentum is added to the gradients in place: 3 and 4 would read as 5.7 and 7.6."""
    import torch

    engine = ENGINES["torch"]()
    network = engine.plane()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True)
    norms = Seen(lambda c: c.grad_norm)
    dt.Model(network, engine.loss_fn(), optimizer).train(1, columns((3, 4), (3, 4)), norms)
    assert norms.values == pytest.approx([5.0, 5.0])


def forgetful(torch):
    """An optimizer of somebody else's, which leaves no gradients behind."""

    class Forgetful(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.zero_grad()

    return Forgetful


@pytest.mark.parametrize(
    "who",
    [
        "another optimizer",
        "register_step_pre_hook",
        "register_step_post_hook",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "train_step",
    ],
)
def test_the_norm_is_taken_in_time_where_gradients_may_be_gone_after_the_update(torch_engine, who):
    import torch

    network = torch_engine.plane()
    kind = forgetful(torch) if who == "another optimizer" else torch.optim.SGD
    optimizer = kind(network.parameters(), 0.1)
    if who.startswith("register_"):
        getattr(optimizer, who)(lambda *_: optimizer.zero_grad())
    callbacks = [norms()]
    if who.startswith("on_"):
        callbacks.append(At(who, lambda c: optimizer.zero_grad()))
    if who == "train_step":

        def train_step(network, batch, run_context):
            run_context.backward(network(batch[0]).sum())
            run_context.optimizer_step()
            run_context.zero_grad()

        options = {"train_step": train_step, "automatic_optimization": False}
        model = dt.Model(network, optimizer=optimizer, **options)
    else:
        model = dt.Model(network, torch_engine.loss_fn(), optimizer)
    model.train(1, columns((3, 4), (6, 8)), callbacks)
    assert callbacks[0].values == [(close(5), close(5)), (close(10), close(10))]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adadelta"])
@pytest.mark.parametrize("foreach", [False, True])
def test_pytorchs_own_optimizers_leave_gradients_alone(torch_engine, name, foreach):
    """So their norm can be taken when it is read, after the update."""
    import torch

    options = {"weight_decay": 0.1, "foreach": foreach, "maximize": True}
    options |= {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = getattr(torch.optim, name)(weights, lr=0.1, **options)
    for step in range(1, 4):
        for weight in weights:
            weight.grad = torch.full((2, 2), float(step))
        optimizer.step()
        assert all(torch.equal(weight.grad, torch.full((2, 2), float(step))) for weight in weights)
    assert not torch.equal(weights[0], torch.ones(2, 2))


def test_a_norm_that_nobody_reads_is_not_taken(torch_engine, computed):
    """Although a callback needs norms: it reads every third."""
    _, model = make(torch_engine, torch_engine.plane())
    seen = []
    third = At("on_train_step_end", lambda c: c.step % 3 or seen.append(c.grad_norm))
    third.needs = NORM
    model.train(1, columns(*[(3, 4)] * 6), third)
    assert seen == [5.0, 5.0]
    assert computed == [2, 2]


@pytest.mark.torch
def test_the_norm_of_large_sparse_and_mixed_gradients():
    """On a CPU, PyTorch's own norm of as many equal numbers is off by 1.5e-3."""
    import torch

    from dualtrain.backends.torch.norms import total_norm

    assert float(total_norm([torch.full((2**25,), 1e-3)])) == pytest.approx(2**12.5 * 1e-3, rel=1e-4)
    sparse = torch.sparse_coo_tensor([[1, 1, 2]], [1.0, 2.0, 4.0], (5,))  # 3 and 4 once it is summed
    assert float(total_norm([sparse])) == 5.0
    halves = [torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((2,), 4.0)]
    assert float(total_norm(halves)) == pytest.approx(50**0.5)
