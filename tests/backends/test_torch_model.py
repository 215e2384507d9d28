"""What is PyTorch's alone: batches of any shape, devices, train/eval flags, memory."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from engines import ENGINES, At, ones

import dualtrain as dt

pytestmark = pytest.mark.torch


@pytest.fixture
def engine() -> Any:
    return ENGINES["torch"]()


def test_it_is_a_dualtrain_model(engine: Any) -> None:
    network = engine.weight()
    assert isinstance(dt.Model(network), dt.Model)
    assert repr(dt.Model(network)) == "Model(Weight, backend='torch', optimizer=NoneType, device='cpu')"


@pytest.mark.parametrize("kind", ["tuple", "list", "mapping", "mapping with the label first", "tensors"])
def test_batches_of_any_kind(engine: Any, kind: str) -> None:
    x, label = np.ones(1, np.float32), np.zeros(1, np.float32)
    batch: Any = {
        "tuple": (x, label),
        "list": [x, label],
        "mapping": {"x": x, "label": label},
        "mapping with the label first": {"labels": label, "x": x},
        "tensors": (engine.as_tensor(x), engine.as_tensor(label)),
    }[kind]
    network = engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, [batch] * 2)
    assert engine.value(network) == pytest.approx(0.8)


def test_several_inputs(engine: Any) -> None:
    import torch

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, a: Any, b: Any) -> Any:
            return self.w * (a + b)

    network = Sum()
    one = np.ones(1, np.float32)
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, [(one, one, 0 * one)])
    assert engine.value(network) == pytest.approx(0.8)


def test_a_network_that_returns_its_own_loss_in_a_mapping(engine: Any) -> None:
    """As Hugging Face models do: called by keyword, with a mapping that holds the loss."""
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (self.w * x + labels).mean(), "logits": self.w * x}

    network = WithLoss()
    batch = {"x": np.ones(1, np.float32), "labels": np.zeros(1, np.float32)}
    model = dt.Model(network, optimizer=engine.sgd(network))
    model.fit(1, [batch], [batch])
    assert engine.value(network) == pytest.approx(0.9)
    assert model.eval([batch]) == {"eval_loss": pytest.approx(0.9)}


def test_a_data_loader_sized_and_unsized(engine: Any) -> None:
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(ones(3))

    x = engine.as_tensor(np.ones((6, 1), np.float32))
    for loader in (
        DataLoader(TensorDataset(x, 0 * x), batch_size=2),
        DataLoader(Stream(), batch_size=None),
    ):
        network = engine.weight()
        dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(2, loader)
        assert engine.value(network) == pytest.approx(0.4)


def test_none_from_train_step_skips_the_batch(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    network = engine.weight()
    seen = []

    def skip_second(net: Any, batch: Any) -> Any:
        seen.append(1)
        return None if len(seen) % 2 == 0 else engine.loss_fn()(net(batch[0]), batch[1])

    class Look(dt.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_step_end(self, run_context: Any) -> None:
            self.seen.append((run_context.step, run_context.global_step, run_context.loss))

    look = Look()
    dt.Model(network, optimizer=engine.sgd(network), train_step=skip_second).train(1, ones(4), look)
    assert engine.value(network) == pytest.approx(0.8)
    losses = [1.0, None, 0.9, None]
    assert look.seen == [
        (step, updates, loss if loss is None else pytest.approx(loss))
        for step, updates, loss in zip((1, 2, 3, 4), (1, 1, 2, 2), losses, strict=True)
    ]
    assert [r.message for r in caplog.records if "returned None" in r.message][1:] == []


def test_each_submodule_gets_its_own_flag_back_after_an_evaluation(engine: Any) -> None:
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5))
    network[1].eval()  # frozen by the user
    flags = []

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            flags.append([m.training for m in network.modules()])

        def on_eval_step_end(self, run_context: Any) -> None:
            flags.append([m.training for m in network.modules()])

    data = [(np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32))]
    model = dt.Model(network, torch.nn.MSELoss(), engine.sgd(network))
    model.fit(2, data, data, callbacks=Look())
    training = [True, True, False, True]
    assert flags == [training, [False] * 4] * 2
    assert [m.training for m in network.modules()] == training
    model.predict(data[0][0])
    assert [m.training for m in network.modules()] == training
    network.eval()
    model.train(1, data)  # the root is in eval mode: all of it is put into train mode
    assert all(m.training for m in network.modules())


def test_flags_come_back_after_an_error_in_an_evaluation(engine: Any) -> None:
    class Fail(dt.Callback):
        def on_eval_step_end(self, run_context: Any) -> None:
            raise RuntimeError("no")

    network = engine.weight()
    with pytest.raises(RuntimeError, match="no"):
        dt.Model(network, engine.loss_fn(), engine.sgd(network)).fit(1, ones(1), ones(1), callbacks=Fail())
    assert network.training


def test_outputs_are_detached_plain_tensors_that_also_answer_asnumpy(engine: Any) -> None:
    import torch

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            outputs = run_context.original_args().net_outputs
            self.kinds = (isinstance(outputs, torch.Tensor), outputs.requires_grad, type(outputs + 1))
            self.value = outputs.asnumpy()

    look, network = Look(), engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, ones(1), look)
    assert look.kinds == (True, False, torch.Tensor)
    assert look.value == np.float32(1.0)


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_train_end", "on_exception"])
def test_outputs_are_detached_where_no_callback_listens_to_steps(engine: Any, event: str) -> None:
    """They are left as they come until somebody can look at them: here, when the pass is over."""

    def batches() -> Any:
        yield from ones(2)
        if event == "on_exception":
            raise RuntimeError("no")

    seen = []

    class Look(dt.Callback):
        pass

    def look(self: Look, run_context: Any, *error: Any) -> None:
        outputs = run_context.original_args().net_outputs
        seen.append((outputs.requires_grad, float(outputs.asnumpy())))

    setattr(Look, event, look)
    network = engine.weight()
    with pytest.raises(RuntimeError, match="no") if event == "on_exception" else nullcontext():
        dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, batches(), Look())
    assert seen == [(False, pytest.approx(0.9))]


def test_what_nobody_watches_is_trained_alike(engine: Any) -> None:
    """A step around which nothing is asked for goes another way through the code."""
    import torch

    def trained(*callbacks: Any) -> Any:
        torch.manual_seed(1)
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(network.parameters(), 0.1)
        data = [(torch.randn(5, 3), torch.randn(5, 1)) for _ in range(4)]
        seen: list[Any] = []
        ends = At("on_train_epoch_end", lambda c: seen.append((c.global_step, c.loss, c.lr, c.grad_norm)))
        dt.Model(network, torch.nn.MSELoss(), optimizer).train(2, data, [*callbacks, ends])
        return seen, [p.detach().tolist() for p in network.parameters()]

    plain = trained()
    assert [row[0] for row in plain[0]] == [4, 8]
    assert trained(At("on_train_step_end", bool)) == plain
    assert trained(At("on_after_backward", bool)) == plain


def test_bfloat16_outputs_read_as_floats(engine: Any) -> None:
    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            self.values = run_context.loss, float(run_context.original_args().net_outputs.asnumpy())

    look, network = Look(), engine.weight().bfloat16()
    batch = tuple(engine.as_tensor(a).bfloat16() for a in ones(1)[0])
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(1, [batch], look)
    assert look.values == (1.0, 1.0)


def test_the_optimizer_has_mindspores_attribute_only_during_the_run(engine: Any) -> None:
    network = engine.weight()
    optimizer = engine.sgd(network)
    inside = []

    class Look(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            inside.append(float(optimizer.learning_rate))
            if run_context.step == 2:
                raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        dt.Model(network, engine.loss_fn(), optimizer).train(1, ones(3), Look())
    assert inside == [0.1, 0.1]
    assert not hasattr(optimizer, "learning_rate")


def test_no_graph_outlives_its_step(engine: Any) -> None:
    import torch

    counts = []

    class Count(dt.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            if run_context.step in (10, 90):
                gc.collect()
                alive = [
                    o
                    for o in gc.get_objects()
                    if issubclass(type(o), torch.Tensor) and o.grad_fn is not None
                ]
                counts.append(len(alive))

    network = engine.weight()
    history = dt.callbacks.MetricHistory()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(
        1, ones(1) * 90, [dt.callbacks.StepLogger(log_interval=7), history, Count()]
    )
    assert counts[1] - counts[0] <= 2


@pytest.mark.parametrize("device", ["nonsense", "cuda:7"])
def test_a_device_that_cannot_be_used_is_an_error_at_once(engine: Any, device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        dt.Model(engine.weight(), device=device)


def test_auto_is_the_accelerator_or_the_cpu(engine: Any) -> None:
    import torch

    model = dt.Model(engine.weight(), device="auto")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert f"device='{accelerator or 'cpu'}" in repr(model)


def test_inputs_are_moved_to_where_the_network_is(engine: Any) -> None:
    """The meta device stands in for an accelerator: shapes move, numbers do not matter."""
    import torch

    network = engine.weight().to("meta")
    output = dt.Model(network).predict(np.ones(3, np.float32))
    assert output.device == torch.device("meta")
    assert output.shape == (3,)


def test_sinking_data_is_refused(engine: Any) -> None:
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.train(1, ones(1), dataset_sink_mode=False)
    with pytest.raises(ValueError, match="PyTorch has no data sinking"):
        model.train(1, ones(1), dataset_sink_mode=True)


def test_train_without_an_optimizer_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="no optimizer"):
        dt.Model(engine.weight(), engine.loss_fn()).train(1, ones(1))


def test_users_metric_objects(engine: Any) -> None:
    import torchmetrics

    class Own:
        def clear(self) -> None:
            self.seen: list[Any] = []

        def update(self, outputs: Any, label: Any) -> None:
            self.seen.append(float(outputs.asnumpy().item()))

        def eval(self) -> float:
            return sum(self.seen)

    metrics = {"own": Own(), "error": torchmetrics.MeanAbsoluteError()}
    model = dt.Model(engine.weight(2.0), engine.loss_fn(), metrics=metrics)
    for _ in range(2):
        assert model.eval(ones(3)) == {"own": 6.0, "error": pytest.approx(2.0)}


def test_gradients_are_dropped_as_zero_grad_drops_them(engine: Any) -> None:
    """Also those of a group that comes in late, of a weight that has none, and what there was before."""
    import torch

    network = torch.nn.ModuleDict({name: engine.weight() for name in ("a", "late", "unused")})

    def train_step(network: Any, batch: Any) -> Any:
        return (network["a"](batch[0]) + network["late"](batch[0])).mean()

    optimizer = torch.optim.SGD([*network["a"].parameters(), *network["unused"].parameters()], 0.1)
    network["a"].w.grad = torch.tensor(7.0)
    network["unused"].w.grad = torch.tensor(7.0)
    network["late"].requires_grad_(False)

    def add_group(run_context: Any) -> None:
        if run_context.step == 2:
            network["late"].requires_grad_(True)
            optimizer.add_param_group({"params": list(network["late"].parameters()), "lr": 1.0})

    model = dt.Model(network, optimizer=optimizer, train_step=train_step)
    model.train(1, ones(4), At("on_train_step_end", add_group))
    assert engine.value(network["a"]) == pytest.approx(1 - 4 * 0.1)
    assert engine.value(network["late"]) == pytest.approx(1 - 2 * 1.0)
    assert engine.value(network["unused"]) == 1.0
    assert network["unused"].w.grad is None


@pytest.mark.parametrize("whose", ["its class's", "its own", "a patch", "an object's that wraps it"])
def test_an_optimizers_own_zero_grad_is_called(
    engine: Any, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    calls = []
    if whose == "a patch":
        untouched = torch.optim.Optimizer.zero_grad
        patch = lambda self, *args: (calls.append("zero"), untouched(self, *args))  # noqa: E731
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", patch)
    network = engine.weight()

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("zero")
            super().zero_grad(set_to_none)

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups
            self.step = optimizer.step

        def zero_grad(self) -> None:
            calls.append("zero")
            self.optimizer.zero_grad()

    optimizer: Any = (Counting if whose == "its class's" else torch.optim.SGD)(network.parameters(), 0.1)
    if whose == "its own":
        native = optimizer.zero_grad
        optimizer.zero_grad = lambda: (calls.append("zero"), native())
    elif whose == "an object's that wraps it":
        optimizer = Wrapper(optimizer)
    dt.Model(network, engine.loss_fn(), optimizer).train(1, ones(3))
    assert calls == ["zero"] * 3
    assert engine.value(network) == pytest.approx(0.7)


def test_a_profile_shows_zero_grad(engine: Any) -> None:
    """Whoever begins to profile in the middle of a run sees what a loop written by hand shows."""
    import torch

    network = engine.weight()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def begin_and_end(run_context: Any) -> None:
        if run_context.step == 2:
            profiler.start()
        elif run_context.step == 5:
            profiler.stop()

    model = dt.Model(network, engine.loss_fn(), torch.optim.SGD(network.parameters(), 0.1))
    model.train(1, ones(6), At("on_train_step_end", begin_and_end))
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["Optimizer.zero_grad#SGD.zero_grad"] == 3
    assert engine.value(network) == pytest.approx(0.4)
