"""Measure the differences between PyTorch's and MindSpore's optimizers, and print Markdown tables.

Each pair trains the same small MLP from the same weights on the same batches, for 100 steps in float32
on the CPU, through dualtrain's Model; MindSpore runs in GRAPH mode. A row has the largest difference
of the two losses over the first 10 steps and over all steps, the largest difference of a weight at
the end, and the final losses.

    python benchmarks/optimizer_parity.py
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

# The network is small: a second thread for one operator costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level: only errors

import numpy as np

import dualtrain as dt

EPOCHS, BATCHES = 5, 20
FEATURES, HIDDEN, CLASSES = 16, 32, 10

DECAY = 0.01


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of ``torch.optim`` or ``mindspore.nn``.

    Attributes:
        name: Its class.
        options: Its arguments, without the rate.
        variant: A description of other changes.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"`{self.name}({options})`" + f", {self.variant}" * bool(self.variant)


# Variants.
NORMS_WITHOUT_DECAY = "not of LayerNorm"
ONE_GROUP = "in a group"
ZEROED = "`ms` zeroed"
CORRECTED = "corrected"

MOMENTUM = {"momentum": 0.9}
NESTEROV = {**MOMENTUM, "nesterov": True}

Pair = tuple[float, Optimizer, Optimizer]
SECTIONS: dict[str, list[Pair]] = {
    "The same": [
        (0.1, Optimizer("SGD"), Optimizer("SGD")),
        (0.1, Optimizer("SGD", MOMENTUM), Optimizer("SGD", MOMENTUM)),
        (0.1, Optimizer("SGD", MOMENTUM), Optimizer("Momentum", MOMENTUM)),
        (
            0.1,
            Optimizer("SGD", {**MOMENTUM, "dampening": 0.5}),
            Optimizer("SGD", {**MOMENTUM, "dampening": 0.5}),
        ),
        (0.1, Optimizer("SGD", NESTEROV), Optimizer("SGD", NESTEROV)),
        (
            0.1,
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}, NORMS_WITHOUT_DECAY),
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}),
        ),
        (
            0.1,
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}),
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}, ONE_GROUP),
        ),
        (0.003, Optimizer("Adam", {"eps": 1e-12}), Optimizer("Adam", {"eps": 1e-12})),
        (
            0.003,
            Optimizer("Adam", {"betas": (0.9, 0.9), "eps": 1e-12, "amsgrad": True}),
            Optimizer("Adam", {"beta2": 0.9, "eps": 1e-12, "use_amsgrad": True}),
        ),
        (0.003, Optimizer("Adamax"), Optimizer("AdaMax")),
        (1.0, Optimizer("Adadelta"), Optimizer("Adadelta")),
        (0.03, Optimizer("Adagrad", {"initial_accumulator_value": 0.1}), Optimizer("Adagrad")),
        (0.1, Optimizer("ASGD"), Optimizer("ASGD")),
        (0.003, Optimizer("Rprop"), Optimizer("Rprop")),
    ],
    "The same but for eps": [
        (0.003, Optimizer("Adam"), Optimizer("Adam")),
        (0.003, Optimizer("Adam"), Optimizer("LazyAdam")),
        (
            0.003,
            Optimizer("Adam", {"weight_decay": DECAY}, NORMS_WITHOUT_DECAY),
            Optimizer("Adam", {"weight_decay": DECAY}),
        ),
        (
            0.003,
            Optimizer("AdamW", {"weight_decay": DECAY}),
            Optimizer("AdamWeightDecay", {"eps": 1e-8, "weight_decay": DECAY}, CORRECTED),
        ),
        (
            0.003,
            Optimizer("RMSprop"),
            Optimizer("RMSProp", {"decay": 0.99, "epsilon": 1e-8}, ZEROED),
        ),
        (
            0.003,
            Optimizer("RMSprop", MOMENTUM),
            Optimizer("RMSProp", {"decay": 0.99, "epsilon": 1e-8, **MOMENTUM}, ZEROED),
        ),
    ],
    "Different": [
        (0.1, Optimizer("SGD", NESTEROV), Optimizer("Momentum", {**MOMENTUM, "use_nesterov": True})),
        (
            0.1,
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}),
            Optimizer("SGD", {**MOMENTUM, "weight_decay": DECAY}),
        ),
        (
            0.003,
            Optimizer("AdamW", {"weight_decay": DECAY}, NORMS_WITHOUT_DECAY),
            Optimizer("AdamWeightDecay", {"eps": 1e-8, "weight_decay": DECAY}),
        ),
        (0.003, Optimizer("NAdam"), Optimizer("Adam", {"use_nesterov": True})),
        (0.03, Optimizer("Adagrad"), Optimizer("Adagrad")),
        (0.03, Optimizer("Adagrad"), Optimizer("Adagrad", {"accum": 0.0})),
        (0.003, Optimizer("RMSprop"), Optimizer("RMSProp")),
        (0.003, Optimizer("RMSprop"), Optimizer("RMSProp", {"decay": 0.99, "epsilon": 1e-8})),
        (
            0.003,
            Optimizer("RMSprop", {"centered": True}),
            Optimizer("RMSProp", {"decay": 0.99, "epsilon": 1e-8, "centered": True}, ZEROED),
        ),
        (0.01, Optimizer("Adafactor"), Optimizer("AdaFactor", {"relative_step": False})),
    ],
}


HEADINGS = (
    "`torch.optim`",
    "`mindspore.nn`",
    "rate",
    "losses, 10 steps",
    "losses, 100 steps",
    "weights",
    "last losses",
)


class Losses:
    """Record the loss of each step."""

    def on_train_begin(self, run_context: dt.RunContext) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, run_context: dt.RunContext) -> None:
        self.losses.append(run_context.loss)


Result = tuple[list[float], list[np.ndarray]]


def initial_weights() -> list[np.ndarray]:
    """Return the weights of the MLP in order: each layer's matrix or scale, then its bias."""
    generator = np.random.default_rng(1)
    weights = []
    for shape in ((HIDDEN, FEATURES), (HIDDEN,), (HIDDEN, HIDDEN), (CLASSES, HIDDEN)):
        if len(shape) == 2:
            weights.append(generator.uniform(-1, 1, shape) * shape[1] ** -0.5)
        else:
            weights.append(1 + generator.normal(0, 0.02, shape))
        weights.append(generator.normal(0, 0.02, shape[0]))
    return [weight.astype(np.float32) for weight in weights]


def batches(label_dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of 32 random samples with the classes of a linear map."""
    generator = np.random.default_rng(2)
    teacher = generator.normal(size=(FEATURES, CLASSES))
    inputs = generator.normal(size=(BATCHES, 32, FEATURES)).astype(np.float32)
    return [(x, (x @ teacher).argmax(1).astype(label_dtype)) for x in inputs]


def train_torch(optimizer: Optimizer, rate: float) -> Result:
    """Train with PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    network = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.LayerNorm((HIDDEN,), eps=1e-5),
        nn.GELU(approximate="none"),
        nn.Linear(HIDDEN, HIDDEN),
        nn.GELU(approximate="none"),
        nn.Linear(HIDDEN, CLASSES),
    )
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), initial_weights(), strict=True):
            parameter.copy_(torch.from_numpy(weight))
    weights: Any = list(network.parameters())
    if optimizer.variant == NORMS_WITHOUT_DECAY:
        norm = list(network[1].parameters())
        others = [*network[0].parameters(), *network[3:].parameters()]
        weights = [{"params": others}, {"params": norm, "weight_decay": 0.0}]
    native = getattr(torch.optim, optimizer.name)(weights, lr=rate, **optimizer.options)
    trace = Losses()
    dt.Model(network, nn.CrossEntropyLoss(), native).train(EPOCHS, batches(np.int64), trace)
    return trace.losses, [parameter.detach().numpy() for parameter in network.parameters()]


def train_mindspore(optimizer: Optimizer, rate: float) -> Result:
    """Train with MindSpore."""
    import mindspore
    from mindspore import Tensor, nn, ops

    class CorrectedRate(nn.learning_rate_schedule.LearningRateSchedule):
        """A rate multiplied by Adam's bias correction."""

        def __init__(self, rate: float, beta1: float = 0.9, beta2: float = 0.999) -> None:
            super().__init__()
            self.rate, self.log1, self.log2 = rate, math.log(beta1), math.log(beta2)

        def construct(self, step: Tensor) -> Tensor:
            t = step.astype(mindspore.float32) + 1
            return self.rate * ops.sqrt(-ops.expm1(t * self.log2)) / -ops.expm1(t * self.log1)

    class CorrectedDecay(nn.Cell):
        """A weight decay divided by Adam's bias correction."""

        def __init__(self, decay: float) -> None:
            super().__init__()
            self.decay, self.correction = decay, CorrectedRate(1.0)

        def construct(self, step: Tensor) -> Tensor:
            return self.decay / self.correction(step)

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    network = nn.SequentialCell(
        nn.Dense(FEATURES, HIDDEN),
        nn.LayerNorm((HIDDEN,), epsilon=1e-5),
        nn.GELU(approximate=False),
        nn.Dense(HIDDEN, HIDDEN),
        nn.GELU(approximate=False),
        nn.Dense(HIDDEN, CLASSES),
    )
    parameters = network.trainable_params()
    for parameter, weight in zip(parameters, initial_weights(), strict=True):
        parameter.set_data(Tensor(weight))
    weights: Any = parameters
    options = dict(optimizer.options)
    learning_rate: Any = rate
    if optimizer.variant == ONE_GROUP:
        weights = [{"params": parameters, "weight_decay": options.pop("weight_decay")}]
    elif optimizer.variant == CORRECTED:
        weights = [{"params": parameters, "weight_decay": CorrectedDecay(options.pop("weight_decay"))}]
        learning_rate = CorrectedRate(rate)
    native = getattr(nn, optimizer.name)(weights, learning_rate=learning_rate, **options)
    if optimizer.variant == ZEROED:
        for mean_square in native.ms:
            mean_square.set_data(ops.zeros_like(mean_square))
    trace = Losses()
    dt.Model(network, nn.CrossEntropyLoss(), native).train(EPOCHS, batches(np.int32), trace)
    return trace.losses, [parameter.asnumpy() for parameter in parameters]


def short(value: float) -> str:
    """Format a number with one digit and the power of ten."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")


def row(rate: float, torch_optimizer: Optimizer, mindspore_optimizer: Optimizer) -> str:
    """Measure a pair and return its row."""
    losses, weights = train_torch(torch_optimizer, rate)
    their_losses, their_weights = train_mindspore(mindspore_optimizer, rate)
    of_losses = np.abs(np.subtract(losses, their_losses))
    of_weights = max(np.abs(a - b).max() for a, b in zip(weights, their_weights, strict=True))
    cells = [
        str(torch_optimizer),
        str(mindspore_optimizer),
        f"{rate:g}",
        short(of_losses[:10].max()),
        short(of_losses.max()),
        short(of_weights),
        f"{losses[-1]:.2f}, {their_losses[-1]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print each row when it is measured."""

    def say(line: str = "") -> None:
        print(line, flush=True)

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mindspore", "numpy"))
    say(f"{versions}, Python {sys.version.split()[0]}")
    for title, pairs in SECTIONS.items():
        say(f"\n### {title}\n")
        say(f"| {' | '.join(HEADINGS)} |")
        say("|---" * len(HEADINGS) + "|")
        for pair in pairs:
            say(row(*pair))


if __name__ == "__main__":
    main()
