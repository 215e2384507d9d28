"""The engines that tests are parametrised over: the same few things, made natively on each.

``Weight`` networks have one weight ``w``, give ``w * x``, and are trained on the loss
``mean(w * x + label)``: the gradient is ``mean(x)`` and the loss is known by hand, so that
losses and weights can be asserted exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dualtrain.events import LIFECYCLE, Event


def batches(*pairs: tuple[float, float]) -> list[tuple[Any, Any]]:
    """Return batches of one sample each: ``(x, label)`` pairs, so gradient x and loss ``w * x + label``."""
    return [(np.array([x], np.float32), np.array([label], np.float32)) for x, label in pairs]


def ones(count: int) -> list[tuple[Any, Any]]:
    """Return batches with gradient 1 and label 0: with SGD each step takes lr from the weight."""
    return batches(*[(1.0, 0.0)] * count)


def columns(*pairs: tuple[float, float]) -> list[tuple[Any, Any]]:
    """Return batches of one sample for a ``plane`` network: its gradients are the pair, its label is 0."""
    return [(np.array([pair], np.float32), np.zeros(1, np.float32)) for pair in pairs]


def sequences(count: int, size: int = 6, tokens: int = 4) -> list[tuple[Any, Any]]:
    """Return batches of sequences of eight numbers, with a number to predict for each."""
    numbers = np.random.default_rng(1)
    return [
        (
            numbers.normal(size=(size, tokens, 8)).astype(np.float32),
            numbers.normal(size=size).astype(np.float32),
        )
        for _ in range(count)
    ]


class Stream:
    """Batches without a length, that can be gone through again."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self._given)


class At:
    """Do something at an event: ``At("on_train_step_end", action, step=3)``."""

    def __init__(
        self, event: str, action: Any, step: int | None = None, *, epoch: int | None = None
    ) -> None:
        def hook(run_context: Any, *error: Any) -> None:
            if step in (None, run_context.step) and epoch in (None, run_context.epoch):
                action(run_context)

        setattr(self, event, hook)


class Seen:
    """Keep what ``read(run_context)`` gives at an event, in ``values``."""

    def __init__(self, read: Any, event: str = "on_train_step_end", *, needs: Any = ()) -> None:
        self.values: list[Any] = []
        self.needs = frozenset(needs)
        setattr(self, event, lambda run_context: self.values.append(read(run_context)))


class Recorder:
    """A callback for every event; ``calls`` keeps what ``note(run_context)`` gives at each.

    Without ``note`` that is the event's name.
    """

    def __init__(self, note: Any = None) -> None:
        self.note = note or (lambda run_context: run_context.event.value)
        self.calls: list[Any] = []


class ProbabilitiesOf:
    """An ``attention_fn`` that finds nothing, is equal to its like, and has a repr that makes it again."""

    def __call__(self, network: Any, batch: Any) -> list[Any]:
        return []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProbabilitiesOf)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "__import__('engines').ProbabilitiesOf()"


def _recording(event: Event) -> Any:
    def hook(self: Recorder, run_context: Any, *error: Any) -> None:
        self.calls.append(self.note(run_context))

    return hook


for _event in (*LIFECYCLE, Event.EXCEPTION, Event.TEARDOWN):
    setattr(Recorder, _event.value, _recording(_event))


class TorchEngine:
    """PyTorch on the CPU."""

    name = "torch"
    framework = "torch"
    other_framework = "mindspore"

    def weight(self, w: float = 1.0) -> Any:
        """Return a network with one weight."""
        from networks_torch import Weight

        return Weight(w)

    def loss_fn(self) -> Any:
        """Return the loss ``mean(output + label)``."""
        from networks_torch import mean_loss

        return mean_loss

    def dense(self, inputs: int, outputs: int) -> Any:
        """Return a linear layer."""
        import torch

        return torch.nn.Linear(inputs, outputs)

    def cross_entropy(self) -> Any:
        """Return the cross entropy of logits with integer labels, averaged over the batch."""
        import torch

        return torch.nn.CrossEntropyLoss()

    def sgd(self, network: Any, lr: Any = 0.1, **options: Any) -> Any:
        """Return plain SGD over the network's parameters."""
        import torch

        return torch.optim.SGD(network.parameters(), lr, **options)

    def value(self, network: Any) -> float:
        """Return the weight of a ``Weight`` network."""
        return float(network.w.detach())

    def step_function(self, kind: str) -> Any:
        """Return a ``train_step`` for a ``Weight`` network; see ``networks_*.py`` for the kinds."""
        import networks_torch

        return getattr(networks_torch, f"step_{kind}")

    def as_tensor(self, array: Any) -> Any:
        """Return a native tensor."""
        import torch

        return torch.as_tensor(np.asarray(array))

    def two_weights(self) -> Any:
        """Return a network with two weights ``a`` and ``b``, both 1: ``a * x + b * x``."""
        from networks_torch import TwoWeights

        return TwoWeights()

    def sgd_groups(self, network: Any, rate_of_a: Any, rate_of_b: Any) -> Any:
        """Return plain SGD over a ``two_weights`` network, with one group and one rate a weight."""
        import torch

        groups = [{"params": [network.a], "lr": rate_of_a}, {"params": [network.b], "lr": rate_of_b}]
        return torch.optim.SGD(groups, 0.5)

    def pair(self, network: Any) -> tuple[float, float]:
        """Return the weights of a ``two_weights`` network."""
        return float(network.a.detach()), float(network.b.detach())

    def identity(self) -> Any:
        """Return a network that gives its input."""
        import torch

        return torch.nn.Identity()

    def squared_error(self) -> Any:
        """Return the mean squared error."""
        import torch

        return torch.nn.MSELoss()

    def class_labels(self, labels: Any) -> Any:
        """Return integer labels as the framework's cross entropy takes them."""
        return np.asarray(labels, np.int64)

    def plane(self) -> Any:
        """Return a network with two weights ``a`` and ``b``, both 1, each with a column of its own."""
        from networks_torch import Plane

        return Plane()

    def dropped(self) -> Any:
        """Return a network with one weight, 1, times a dropout of a half."""
        from networks_torch import Dropped

        return Dropped()

    def normed(self) -> Any:
        """Return a network with a batch norm named ``norm``."""
        from networks_torch import Normed

        return Normed()

    def statistics(self, network: Any) -> tuple[float, float]:
        """Return the running mean and variance of a ``normed`` network."""
        return network.norm.running_mean.item(), network.norm.running_var.item()

    def scheduled_sgd(self, network: Any, rates: Any) -> tuple[Any, dict[str, Any]]:
        """Return plain SGD with a rate for each update, and what Model needs for that."""
        import torch

        optimizer = torch.optim.SGD(network.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: rates[min(update, len(rates) - 1)]
        )
        return optimizer, {"lr_scheduler": schedule}

    def perceptron(self) -> Any:
        """Return a network with layers ``hidden``, ``norm`` (batch norm), dropout and ``out``: 4 to 1."""
        from networks_torch import Perceptron

        return Perceptron()

    def idle(self) -> Any:
        """Return ``used * x + 0 * times_zero + frozen``, which has a weight ``unused`` too."""
        from networks_torch import Idle

        return Idle()

    def tied(self) -> Any:
        """Return two layers of one input and output that share a weight of 2."""
        from networks_torch import Tied

        return Tied()

    def adam(self, network: Any, lr: float) -> Any:
        """Return Adam over the network's parameters."""
        import torch

        return torch.optim.Adam(network.parameters(), lr)

    def attending(self) -> Any:
        """Return a network from (n, tokens, 8) to (n,), with ``attention`` and a batch norm."""
        from networks_torch import Attending

        return Attending()

    def smooth_cross_entropy(self, smoothing: float = 0.0) -> Any:
        """Return a cross entropy that has ``label_smoothing``."""
        import torch

        return torch.nn.CrossEntropyLoss(label_smoothing=smoothing)

    def fragile(self) -> Any:
        """Return a nested network in which a batch can make any of several places not finite."""
        from networks_torch import Fragile

        return Fragile()

    def hooks(self, network: Any) -> int:
        """Return the number of forward hooks on a network and its parts."""
        return sum(len(module._forward_hooks) for module in network.modules())


class MindSporeEngine:
    """MindSpore on the CPU, in one of its two modes."""

    framework = "mindspore"
    other_framework = "torch"

    def __init__(self, mode: str) -> None:
        import mindspore

        self.name = f"mindspore-{mode}"
        mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
        mindspore.runtime.launch_blocking()  # asynchronous PYNATIVE is many times slower on a CPU

    def weight(self, w: float = 1.0) -> Any:
        from networks_mindspore import Weight

        return Weight(w)

    def loss_fn(self) -> Any:
        from networks_mindspore import MeanLoss

        return MeanLoss()

    def dense(self, inputs: int, outputs: int) -> Any:
        import mindspore

        return mindspore.nn.Dense(inputs, outputs)

    def cross_entropy(self) -> Any:
        import mindspore

        return mindspore.nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def sgd(self, network: Any, lr: Any = 0.1, **options: Any) -> Any:
        import mindspore

        return mindspore.nn.SGD(network.trainable_params(), lr, **options)

    def value(self, network: Any) -> float:
        return float(network.w.asnumpy())

    def step_function(self, kind: str) -> Any:
        import networks_mindspore

        return getattr(networks_mindspore, f"step_{kind}")

    def as_tensor(self, array: Any) -> Any:
        import mindspore

        return mindspore.Tensor(np.asarray(array))

    def two_weights(self) -> Any:
        from networks_mindspore import TwoWeights

        return TwoWeights()

    def sgd_groups(self, network: Any, rate_of_a: Any, rate_of_b: Any) -> Any:
        import mindspore

        groups = [{"params": [network.a], "lr": rate_of_a}, {"params": [network.b], "lr": rate_of_b}]
        return mindspore.nn.SGD(groups, 0.5)

    def pair(self, network: Any) -> tuple[float, float]:
        return float(network.a.asnumpy()), float(network.b.asnumpy())

    def identity(self) -> Any:
        import mindspore

        return mindspore.nn.Identity()

    def squared_error(self) -> Any:
        import mindspore

        return mindspore.nn.MSELoss()

    def class_labels(self, labels: Any) -> Any:
        return np.asarray(labels, np.int32)

    def plane(self) -> Any:
        from networks_mindspore import Plane

        return Plane()

    def dropped(self) -> Any:
        from networks_mindspore import Dropped

        return Dropped()

    def normed(self) -> Any:
        from networks_mindspore import Normed

        return Normed()

    def statistics(self, network: Any) -> tuple[float, float]:
        norm = network.norm
        return norm.moving_mean.asnumpy().item(), norm.moving_variance.asnumpy().item()

    def scheduled_sgd(self, network: Any, rates: Any) -> tuple[Any, dict[str, Any]]:
        return self.sgd(network, list(rates)), {}

    def perceptron(self) -> Any:
        from networks_mindspore import Perceptron

        return Perceptron()

    def idle(self) -> Any:
        from networks_mindspore import Idle

        return Idle()

    def tied(self) -> Any:
        from networks_mindspore import Tied

        return Tied()

    def adam(self, network: Any, lr: float) -> Any:
        import mindspore

        return mindspore.nn.Adam(network.trainable_params(), lr)

    def attending(self) -> Any:
        from networks_mindspore import Attending

        return Attending()

    def smooth_cross_entropy(self, smoothing: float = 0.0) -> Any:
        import mindspore

        return mindspore.nn.CrossEntropyLoss(label_smoothing=smoothing)

    def fragile(self) -> Any:
        from networks_mindspore import Fragile

        return Fragile()

    def hooks(self, network: Any) -> int:
        return sum(len(cell._forward_hook) for _, cell in network.cells_and_names())


ENGINES = {
    "torch": TorchEngine,
    "mindspore-pynative": lambda: MindSporeEngine("pynative"),
    "mindspore-graph": lambda: MindSporeEngine("graph"),
}
