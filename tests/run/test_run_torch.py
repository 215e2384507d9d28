"""What callbacks read and change in a PyTorch loop that the user writes: through its optimizer."""

from __future__ import annotations

import io
from typing import Any

import pytest
from closeness import close

import dualtrain as dt
from dualtrain.errors import ArgumentValueError, CapabilityError, RunStateError
from dualtrain.protocol import Capability

pytestmark = pytest.mark.torch


class Seen:
    """Read a value of the context at each step's end."""

    def __init__(self, read: Any, *needs: Capability) -> None:
        self.values: list[Any] = []
        self.needs = frozenset(needs)
        self._read = read

    def on_train_step_end(self, run_context: Any) -> None:
        self.values.append(self._read(run_context))


def norms(run_context: Any) -> tuple[Any, Any]:
    return run_context.grad_norm, run_context.grad_norm_clipped


def counts(run_context: Any) -> tuple[int, bool]:
    return run_context.global_step, run_context.is_update_step


def pair() -> Any:
    """Return a network of two weights whose gradients are the two inputs."""
    import torch

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(()))
            self.b = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: Any) -> Any:
            return self.a * x[0] + self.b * x[1]

    return Pair()


def tensor(*values: float) -> Any:
    import torch

    return torch.tensor(values)


def sgd(network: Any, lr: float = 1.0, **options: Any) -> Any:
    import torch

    return torch.optim.SGD(network.parameters(), lr=lr, **options)


def take_step(network: Any, optimizer: Any, *inputs: float) -> Any:
    optimizer.zero_grad()
    loss = network(tensor(*inputs))
    loss.backward()
    optimizer.step()
    return loss


# Updates.


def test_updates_are_counted_with_accumulation_of_the_users() -> None:
    network = pair()
    optimizer = sgd(network)
    seen = Seen(counts)
    with dt.Run(seen, network=network, optimizer=optimizer, epochs=1) as run:
        for _epoch in run.epochs():
            for i, batch in enumerate(run.batches([tensor(1.0, 1.0)] * 5)):
                network(batch).backward()
                if i % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()

    assert seen.values == [(0, False), (1, True), (1, False), (2, True), (2, False)]


def test_update_that_the_users_scaler_skips_is_none() -> None:
    import torch

    network = pair()
    optimizer = sgd(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = Seen(lambda c: (*counts(c), *norms(c)))
    with dt.Run(seen, network=network, optimizer=optimizer) as run:
        for x in ((3.0, 4.0), (float("inf"), 1.0), (0.0, 2.0)):
            with run.step():
                optimizer.zero_grad()
                scaler.scale(network(tensor(*x))).backward()
                scaler.step(optimizer)
                scaler.update()

    assert seen.values == [(1, True, 5.0, 5.0), (1, False, None, None), (2, True, 2.0, 2.0)]


def test_updates_of_several_optimizers_are_counted_together() -> None:
    import torch

    network = pair()
    optimizers = {
        name: torch.optim.SGD([getattr(network, name)], lr=rate) for name, rate in (("a", 1), ("b", 2))
    }
    seen = Seen(lambda c: (*counts(c), c.grad_norm, c.lr, c.optimizer is optimizers))
    with dt.Run(seen, network=network, optimizer=optimizers) as run:
        for names in ("a", "ab", ""):
            with run.step():
                network.zero_grad()
                network(tensor(3.0, 4.0)).backward()
                for name in names:
                    optimizers[name].step()

    values = [(1, True, 3.0), (3, True, 4.0), (3, False, None)]
    assert seen.values == [(*value, (1.0, 2.0), True) for value in values]


def test_hooks_are_removed_with_the_run() -> None:
    network = pair()
    optimizer = sgd(network)
    with dt.Run(network=network, optimizer=optimizer) as run:
        with run.step():
            take_step(network, optimizer, 1.0, 1.0)
        assert float(optimizer.learning_rate) == 1.0
    take_step(network, optimizer, 1.0, 1.0)

    assert run.context.global_step == 1
    assert not hasattr(optimizer, "learning_rate")


# Norms.


@pytest.mark.parametrize("needs", [(), (Capability.GRAD_NORM,)], ids=["read", "needed"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}], ids=["sgd", "nesterov"])
def test_norm_is_what_the_optimizer_received(needs: Any, options: Any) -> None:
    import torch

    network = pair()
    optimizer = sgd(network, **options)
    seen = Seen(norms, *needs)
    with dt.Run(seen, network=network, optimizer=optimizer) as run:
        with run.step():
            take_step(network, optimizer, 3.0, 4.0)
            optimizer.zero_grad()  # does not take the norm away
        with run.step():
            network(tensor(3.0, 4.0)).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 2.5)
            optimizer.step()
            optimizer.zero_grad()
        with run.step():
            network(tensor(3.0, 4.0)).backward()
            run.clip_gradients(2.5)
            optimizer.step()
            optimizer.zero_grad()
        with run.step():
            network(tensor(0.0, 2.0)).backward()
            run.clip_gradients(2.5)
            optimizer.step()

    assert seen.values == [
        (5.0, 5.0),
        (close(2.5), close(2.5)),
        (5.0, close(2.5)),
        (2.0, 2.0),
    ]


def test_clipping_scales_the_gradients() -> None:
    network = pair()
    optimizer = sgd(network)
    with dt.Run(network=network, optimizer=optimizer) as run, run.step():
        network(tensor(3.0, 4.0)).backward()
        run.clip_gradients(2.5)
        optimizer.step()

    assert (float(network.a.detach()), float(network.b.detach())) == (close(-1.5), close(-2.0))


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), True, "1"])
def test_clipping_takes_a_positive_norm(norm: Any) -> None:
    network = pair()
    with dt.Run(network=network, optimizer=sgd(network)) as run:
        with pytest.raises(
            ArgumentValueError, match=r"^clip_gradients\(\) takes a positive norm, but got "
        ):
            run.clip_gradients(norm)


def test_norm_of_gradients_that_were_overwritten_is_refused_unless_it_is_needed() -> None:
    network = pair()
    optimizer = sgd(network)

    def train(*callbacks: Any) -> None:
        with dt.Run(callbacks, network=network, optimizer=optimizer) as run, run.step():
            take_step(network, optimizer, 3.0, 4.0)
            optimizer.zero_grad(set_to_none=False)

    needing = Seen(norms, Capability.GRAD_NORM)
    train(needing, Seen(norms))
    assert needing.values == [(5.0, 5.0)]
    with pytest.raises(
        RunStateError, match=r"^grad_norm is not known: the gradients have changed since the"
    ):
        train(Seen(norms))


def test_parameter_monitor_measures_each_weight() -> None:
    network = pair()
    network.a.data.fill_(2.0)
    optimizer = sgd(network, lr=0.5)
    monitor = dt.callbacks.ParameterMonitor(interval=1)
    with dt.Run(monitor, network=network, optimizer=optimizer) as run:
        with run.step():
            take_step(network, optimizer, 4.0, 0.0)

    assert monitor.last is not None
    assert monitor.last["parameters"] == [
        {"group": "a", "weight_norm": 2.0, "grad_norm": 4.0, "update_ratio": 1.0},
        {"group": "b", "weight_norm": 0.0, "grad_norm": 0.0, "update_ratio": 0.0},
    ]
    assert monitor.last["dead_gradients"] == ["b"]


def test_run_without_optimizer_has_no_norms() -> None:
    with pytest.raises(
        CapabilityError, match=r"^TransformerMonitor needs grad_norm, which a hand-written loop"
    ):
        dt.Run(dt.callbacks.TransformerMonitor(), network=pair()).__enter__()


# The learning rate.


def schedule_of(kind: str, optimizer: Any) -> Any:
    import torch

    schedulers = torch.optim.lr_scheduler
    if kind == "lambda":
        return schedulers.LambdaLR(optimizer, lambda update: 0.5**update)
    return schedulers.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("kind", ["lambda", "exponential"])
@pytest.mark.parametrize("given", [True, False])
def test_rate_at_step_end_is_the_one_that_the_step_used(kind: str, given: bool) -> None:
    network = pair()
    optimizer = sgd(network)
    schedule = schedule_of(kind, optimizer)
    seen = Seen(lambda c: c.lr)
    own = {"lr_scheduler": schedule} if given else {}
    with dt.Run(seen, network=network, optimizer=optimizer, **own) as run:
        for _ in range(3):
            with run.step():
                assert run.context.lr == optimizer.param_groups[0]["lr"]
                take_step(network, optimizer, 1.0, 0.0)
                schedule.step()

    assert seen.values == [1.0, 0.5, 0.25]
    assert float(network.a.detach()) == -1.75


@pytest.mark.parametrize("kind", ["lambda", "exponential"])
def test_scaling_works_on_top_of_the_users_schedule(kind: str) -> None:
    import torch

    network = pair()
    optimizer = sgd(network)
    schedule = schedule_of(kind, optimizer)
    attributes = sorted(vars(schedule))
    used: list[float] = []
    before: list[float] = []

    class Scaling:
        def on_train_step_end(self, run_context: Any) -> None:
            used.append(run_context.lr)
            if run_context.step == 2:
                assert run_context.scale_lr(0.1) == close(0.05)

    with dt.Run(Scaling(), network=network, optimizer=optimizer, lr_scheduler=schedule) as run:
        for _ in range(4):
            with run.step():
                before.append(float(network.a.detach()))
                take_step(network, optimizer, 1.0, 0.0)
                schedule.step()
                state = schedule.state_dict()
                torch.save(state, io.BytesIO())
                assert not any(callable(value) for value in state.values())
        with pytest.raises(ArgumentValueError, match="the learning rate follows the schedule"):
            run.context.lr = 0.1

    assert used == [1.0, 0.5, close(0.025), close(0.0125)]
    moves = [a - b for a, b in zip(before, [*before[1:], float(network.a.detach())], strict=True)]
    assert moves == close(used, abs=1e-6)  # differences of weights near 1
    assert sorted(vars(schedule)) == attributes
    optimizer.step()
    schedule.step()  # the schedule alone, again
    factor = 0.5**5 if kind == "lambda" else 0.1 * 0.5**5
    assert optimizer.param_groups[0]["lr"] == close(factor)


def test_schedule_of_another_optimizer_is_refused() -> None:
    network = pair()
    optimizer, other = sgd(network), sgd(network)

    with pytest.raises(ArgumentValueError) as caught:
        dt.Run(network=network, optimizer=optimizer, lr_scheduler=schedule_of("lambda", other))

    assert str(caught.value) == (
        "Run(lr_scheduler=...) takes a scheduler of an optimizer that is given as optimizer=..., but got "
        "LambdaLR of another one."
    )


# Outputs.


def test_outputs_are_detached_and_keep_no_graph() -> None:
    import torch

    seen: list[Any] = []

    class Noting:
        def on_train_step_end(self, run_context: Any) -> None:
            seen.append((run_context.outputs, run_context.loss))

    weight = torch.nn.Parameter(torch.ones(()))
    with dt.Run(Noting(), backend="torch") as run:
        for wrap in (lambda t: t, lambda t: (t, 2 * t), lambda t: {"loss": t, "kl": 2 * t}):
            with run.step():
                run.outputs = wrap(weight * 3.0)

    (single, loss), (several, first), (mapping, named) = seen
    assert float(single) == single.asnumpy() == loss == first == named == 3.0
    assert [float(value) for value in several] == [3.0, 6.0]
    assert {name: float(value) for name, value in mapping.items()} == {"loss": 3.0, "kl": 6.0}
    assert all(value.grad_fn is None for value in (single, *several, *mapping.values()))


def test_outputs_of_an_evaluation_are_detached() -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(()))
    with dt.Run(backend="torch") as run, run.evaluation() as evaluation:
        for batch in evaluation.batches([1.0, 3.0]):
            evaluation.outputs = weight * batch
            assert not evaluation.outputs.requires_grad

    assert run.context.metrics == {"eval_loss": 2.0}


def test_run_does_not_change_the_networks_mode() -> None:
    network = pair()
    network.eval()
    with dt.Run(network=network, optimizer=sgd(network)) as run, run.step():
        assert not network.training
    assert not network.training
