"""What a train_step may do wrong beside its loss: steps of its own, and graphs that it hands out."""

import gc

import pytest
from engines import ENGINES, At, Seen, batches, ones

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, RunStateError


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.torch)])
def engine(request):
    return ENGINES[request.param]()


@pytest.mark.parametrize(
    "options",
    [{}, {"amp": "fp16"}, {"amp": "bf16"}, {"accumulate_steps": 2}, {"clip_norm": 1.0}],
    ids=repr,
)
@pytest.mark.parametrize("whole", [True, False], ids=["backward and step", "step alone"])
def test_a_step_of_the_optimizer_inside_train_step_is_one_clear_error(engine, options, whole):
    """Each batch would update twice; it updates not even once."""
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)

    def step(network, batch):
        loss = network(batch[0]).mean()
        if whole:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    model = dt.Model(network, optimizer=optimizer, train_step=step, **options)
    with pytest.raises(RunStateError, match=r"optimizer\.step\(\)") as error:
        model.train(1, ones(3))
    assert isinstance(error.value, RuntimeError)
    assert "automatic_optimization=False" in str(error.value)
    assert "\n" not in str(error.value)
    assert engine.value(network) == 1.0


def test_the_optimizer_is_as_it_was_after_that_error(engine):
    network = engine.weight()
    optimizer = engine.sgd(network, 0.1)

    def step(network, batch):
        optimizer.step()

    with pytest.raises(RunStateError):
        dt.Model(network, optimizer=optimizer, train_step=step).train(1, ones(1))
    network(engine.as_tensor(ones(1)[0][0])).mean().backward()
    optimizer.step()  # the user's own again
    assert engine.value(network) == pytest.approx(0.9)
    optimizer.zero_grad()
    dt.Model(network, engine.loss_fn(), optimizer).train(1, ones(1))
    assert engine.value(network) == pytest.approx(0.8)


def test_another_optimizer_may_step_inside_train_step(engine):
    """One that the Model does not have is the user's own business."""
    network, other = engine.weight(), engine.weight()
    own = engine.sgd(other, 0.5)

    def step(network, batch):
        own.zero_grad()
        other(batch[0]).mean().backward()
        own.step()
        return network(batch[0]).mean()

    dt.Model(network, optimizer=engine.sgd(network, 0.1), train_step=step).train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.8)
    assert engine.value(other) == pytest.approx(0)


def alive():
    """The number of tensors that hold on to a graph."""
    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(tensor.grad_fn is not None for tensor in tensors)


def extras(network, batch):
    x, label = batch
    output = network(x)
    loss = (output + label).mean()
    return {
        "loss": loss,
        "output": output,
        "pair": (output * 2, [output * 3]),
        "named": {"deep": output * 4},
        "count": 3,
        "name": "x",
    }


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_steps": 3}, {"amp": "fp16", "clip_norm": 1.0}], ids=repr
)
def test_what_train_step_returns_besides_its_loss_is_cut_from_its_graph(engine, options):
    import torch

    network = engine.weight()
    kept, counts = [], []

    def keep(run_context):
        kept.append(run_context.outputs)  # as a callback may, for all of the run
        if run_context.step in (10, 100):
            counts.append(alive())

    model = dt.Model(network, optimizer=engine.sgd(network, 0.001), train_step=extras, **options)
    model.train(1, ones(100), At("on_train_step_end", keep))
    assert len(kept) == 100
    first, last = counts
    assert last - first <= 2
    outputs = kept[0]
    tensors = [
        outputs["loss"],
        outputs["output"],
        outputs["pair"][0],
        outputs["pair"][1][0],
        outputs["named"]["deep"],
    ]
    assert [float(tensor) for tensor in tensors] == [1, 1, 2, 3, 4]
    assert all(isinstance(tensor, torch.Tensor) and not tensor.requires_grad for tensor in tensors)
    assert (outputs["count"], outputs["name"]) == (3, "x")


def test_a_kept_loss_does_not_keep_the_graphs_of_a_run(engine):
    """A scalar, and manual optimisation."""

    def manual(network, batch, run_context):
        run_context.zero_grad()
        loss = network(batch[0]).mean()
        run_context.backward(loss)
        run_context.optimizer_step()
        return loss

    for options in (
        {"train_step": engine.step_function("ok")},
        {"train_step": manual, "automatic_optimization": False},
    ):
        network = engine.weight()
        kept, counts = [], []

        def keep(run_context, kept=kept, counts=counts):
            kept.append(run_context.outputs)
            if run_context.step in (10, 100):
                counts.append(alive())

        model = dt.Model(network, optimizer=engine.sgd(network, 0.001), **options)
        model.train(1, ones(100), At("on_train_step_end", keep))
        assert counts[1] - counts[0] <= 2, options


def test_several_optimizers_are_refused_under_automatic_optimisation(engine):
    network = engine.two_weights()
    import torch

    optimizers = {name: torch.optim.SGD([getattr(network, name)], 0.1) for name in "ab"}
    for given in (optimizers, {"a": optimizers["a"]}):
        with pytest.raises(ArgumentTypeError, match="automatic_optimization=False") as error:
            dt.Model(network, engine.loss_fn(), given)
        assert "\n" not in str(error.value)
    with pytest.raises(ArgumentTypeError, match="optimizer"):
        dt.Model(network, engine.loss_fn(), list(optimizers.values()))


def test_a_skipped_batch_inside_a_window_is_no_part_of_its_mean(engine):
    """None for the second batch of a window of 3, and for the last of the short one: means of 2 and 1."""
    network = engine.weight()

    def step(network, batch):
        x, label = batch
        return None if float(x) == 100 else (network(x) + label).mean()

    model = dt.Model(network, optimizer=engine.sgd(network, 0.1), train_step=step, accumulate_steps=3)
    seen = Seen(lambda c: (c.global_step, round(engine.value(network), 5)))
    xs = (1, 100, 3, 5, 4, 100)
    model.train(1, batches(*[(x, 0) for x in xs]), seen)
    assert seen.values == [(0, 1), (0, 1), (0, 1), (1, 0.7), (1, 0.7), (2, 0.3)]
