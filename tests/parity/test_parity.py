"""Both engines give the same numbers: same weights, same data, 100 steps in float32.

The networks are in ``parity_networks_torch.py`` and ``parity_networks_mindspore.py``. LayerNorm's eps
(1e-5) and the form of GELU (exact) are written out there, since the frameworks' defaults differ.

What is run is not every combination, but enough of them that each of these comes up:

- on the MLP, each optimizer with clipping and without it, and with windows of 1 and of 3 batches;
- clipping and windows of 3 each without the other, together, and neither;
- a rate that is constant, one that warms up and falls along a cosine (from a list on MindSpore; on
  PyTorch from the same list by LambdaLR, or by PyTorch's own LinearLR and CosineAnnealingLR), and one
  that falls along a cosine while the callback LearningRateWarmup raises it; with windows of 1 and of 3;
- Adam once with the usual eps and once with a negligible one: the frameworks add eps at different
  places, which is all that their Adams differ by;
- on the transformer, which takes long to compile, momentum with everything, and Adam;
- in MindSpore's PYNATIVE mode, which is slow, 10 steps with everything, for either kind of optimizer;
- AdamW as docs/optimizers.md makes it on MindSpore, which has none of its own.

An epoch of 20 batches ends in a window of 2 where windows are of 3.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_data import batches, initial_weights
from paths import ROOT

import dualtrain as dt
from dualtrain.protocol import Capability

pytestmark = [pytest.mark.torch, pytest.mark.mindspore]

DOCUMENT = ROOT / "docs" / "optimizers.md"
WARMUP = 10  # updates
START_FACTOR = 0.1


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    network: str
    optimizer: str
    lr: float
    clip_norm: float | None = None
    accumulate_steps: int = 1
    schedule: str | None = None

    def __str__(self) -> str:
        parts = [self.network, self.optimizer]
        if self.clip_norm is not None:
            parts.append("clip")
        if self.accumulate_steps > 1:
            parts.append(f"window{self.accumulate_steps}")
        if self.schedule is not None:
            parts.append(self.schedule)
        return "-".join(parts)


@dataclass(frozen=True)
class Differences:
    """The largest differences: of losses and weights absolute, of gradient norms relative."""

    first_losses: float  # of the first 10 steps
    losses: float
    norms: float
    weights: float  # at the end


# What is allowed: about three times what was measured.

ROUNDING = Differences(4e-6, 4e-6, 4e-6, 1.5e-6)
"""Measured: 1.2e-6, 1.2e-6, 1.1e-6, 4.8e-7 (the next number after a loss of 2 is 2.4e-7 away)."""

ADAM = Differences(1.3e-5, 3e-5, 4e-5, 1.3e-3)
"""With the usual eps, on the MLP. Measured: 4.3e-6, 1.2e-5, 1.2e-5, 4.2e-4."""

ADAM_ON_TRANSFORMER = Differences(2.4e-5, 3e-5, 1.3e-4, 1.5e-3)
"""With the usual eps. Measured: 7.9e-6, 9.5e-6, 4.4e-5, 5.1e-4."""

CASES = [
    (Case("mlp", "sgd", 0.1), ROUNDING),
    (Case("mlp", "sgd", 0.5, 0.5, 3), ROUNDING),
    (Case("mlp", "momentum", 0.1, None, 1, "torch_own"), ROUNDING),
    (Case("mlp", "momentum", 0.1, 0.5, 3, "callback"), ROUNDING),
    (Case("mlp", "nesterov", 0.03, 0.5), ROUNDING),
    (Case("mlp", "nesterov", 0.1, None, 3, "list"), ROUNDING),
    (Case("mlp", "adam", 0.001), ADAM),
    (Case("mlp", "adam", 0.005, 0.5, 3, "list"), ADAM),
    (Case("mlp", "adam_tiny_eps", 0.003, 0.5), ROUNDING),
    (Case("mlp", "adam_l2", 0.003, None, 1, "torch_own"), ADAM),
    (Case("mlp", "adam_l2", 0.002, 0.4, 3), ADAM),
    (Case("transformer", "momentum", 0.1, 1.5, 3, "torch_own"), ROUNDING),
    (Case("transformer", "adam", 0.001), ADAM_ON_TRANSFORMER),
]

PYNATIVE_CASES = [
    Case("mlp", "nesterov", 0.03, 0.37, 3, "list"),
    Case("mlp", "adam_tiny_eps", 0.003, 0.37, 3),
]


class Trace:
    """Keep the loss of each step, and the gradient norm and the rate of each update."""

    needs = frozenset({Capability.GRAD_NORM})

    def on_train_begin(self, run_context: dt.RunContext) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_train_step_end(self, run_context: dt.RunContext) -> None:
        self.losses.append(run_context.loss)
        self.global_step = run_context.global_step
        if run_context.is_update_step:
            self.norms.append(run_context.grad_norm)
            self.rates.append(np.max(run_context.lr))  # of two groups with one rate
        else:
            assert run_context.grad_norm is None


def rates(case: Case, updates: int) -> tuple[float | list[float], list[float]]:
    """Return the rate that the engines are given, and the rate that each update is to have."""

    def cosine(done: float) -> float:
        return case.lr * (1 + math.cos(math.pi * done)) / 2

    warmup = [min(1.0, START_FACTOR + (1 - START_FACTOR) * i / WARMUP) for i in range(updates)]
    if case.schedule is None:
        return case.lr, [case.lr] * updates
    if case.schedule == "callback":
        given = [cosine(i / updates) for i in range(updates)]
        return given, [rate * factor for rate, factor in zip(given, warmup, strict=True)]
    falling = [cosine(max(0, i - WARMUP) / (updates - WARMUP)) for i in range(updates)]
    given = [rate * factor for rate, factor in zip(falling, warmup, strict=True)]
    return given, given


def train(engine: str, case: Case, epochs: int, length: int) -> tuple[Trace, dict[str, np.ndarray]]:
    """Train on one engine; return what was seen, and the weights at the end."""
    side = importlib.import_module(f"parity_networks_{engine}")
    network = getattr(side, case.network)()
    side.load(network, initial_weights(side.shapes(network)))
    updates = epochs * math.ceil(length / case.accumulate_steps)
    given, expected = rates(case, updates)
    model = side.model(
        network,
        case.optimizer,
        given,
        torch_own=case.schedule == "torch_own",
        clip_norm=case.clip_norm,
        accumulate_steps=case.accumulate_steps,
    )
    trace = Trace()
    warmup = [dt.callbacks.LearningRateWarmup(WARMUP, START_FACTOR)] if case.schedule == "callback" else []
    model.train(epochs, batches(case.network, length, side.LABEL_DTYPE), [*warmup, trace])

    assert len(trace.losses) == epochs * length
    assert len(trace.norms) == trace.global_step == updates
    if case.optimizer != "adamw":  # on MindSpore its rate has the bias correction in it
        assert trace.rates == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if case.clip_norm is not None:  # else the case would show nothing
        assert min(trace.norms) < case.clip_norm < max(trace.norms)
    return trace, side.read(network)


def largest(first: Any, second: Any) -> float:
    """Return the largest difference."""
    return float(np.abs(np.subtract(first, second)).max())


def differences(case: Case, epochs: int = 5, length: int = 20) -> Differences:
    """Train on both engines and return what they differ by."""
    ours, weights = train("torch", case, epochs, length)
    theirs, their_weights = train("mindspore", case, epochs, length)
    assert weights.keys() == their_weights.keys()
    return Differences(
        first_losses=largest(ours.losses[:10], theirs.losses[:10]),
        losses=largest(ours.losses, theirs.losses),
        norms=largest(np.divide(theirs.norms, ours.norms), 1),
        # The gradient of a key's bias is zero, since it moves all logits of a softmax alike; what
        # moves it is rounding, which Adam makes large.
        weights=max(
            largest(weights[name], their_weights[name]) for name in weights if not name.endswith("key.bias")
        ),
    )


def check(seen: Differences, allowed: Differences) -> None:
    """Check that no difference is larger than allowed."""
    assert all(getattr(seen, name) <= limit for name, limit in vars(allowed).items()), (seen, allowed)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: so small an operator is slower on more, and its sums differ."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("case", "allowed"), [pytest.param(*pair, id=str(pair[0])) for pair in CASES])
def test_engines_agree_over_100_steps(case: Case, allowed: Differences) -> None:
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    check(differences(case), allowed)


@pytest.mark.parametrize("case", PYNATIVE_CASES, ids=str)
def test_engines_agree_in_pynative_mode(case: Case) -> None:
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    check(differences(case, epochs=2, length=5), ROUNDING)


def test_adamw_of_the_docs_is_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspore
    import parity_networks_mindspore

    text = DOCUMENT.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    # GRAPH mode reads a Cell's source from its file, and imports its module by name.
    (tmp_path / "adamw_of_the_docs.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("adamw_of_the_docs")
    monkeypatch.setitem(parity_networks_mindspore.OPTIMIZERS, "adamw", module.adamw)

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    check(differences(Case("mlp", "adamw", 0.001)), ADAM)
