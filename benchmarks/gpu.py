"""Measure the cost of dualtrain on a GPU, compared with a hand-written loop, and check for device syncs.

A decoder of about 100 million parameters trains in bf16 on one batch that stays on the GPU, eagerly and
compiled. Each condition is measured between two measurements of the hand-written loop; a figure is the
median of the rounds. Then steps that are not logged run under ``torch.cuda.set_sync_debug_mode("error")``,
in which every sync raises an error. Takes less than 5 minutes on a recent GPU.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --small    # tests the program itself, with a tiny network
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loops.common import CONDITIONS, Condition, NotApplicable
from loops.dualtrain_callbacks import callbacks as callbacks_for
from torch import nn

import dualtrain as dt
from dualtrain.errors import DualTrainError


class Decoder(nn.Module):
    """A GPT: learned positions, layers with causal attention, and the embedding as output."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(words) + self.position, mask=self.mask, is_causal=True)
        return x @ self.embed.weight.T


def loss_fn(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each next word."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class TimedBatch:
    """Repeat one batch, and measure the time of all steps after the first ``warm`` ones.

    Args:
        batch: The batch.
        warm: Steps before the clock starts, and one more after it stops.
        steps: Steps to time.
        before: Called before each step with its number, from 1.
        synchronize: Waits for the device.
    """

    def __init__(
        self,
        batch: Any,
        warm: int,
        steps: int,
        synchronize: Callable[[], None],
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._batch, self._warm, self._steps = batch, warm, steps
        self._synchronize = synchronize
        self._before = before
        self.milliseconds = 0.0

    def __len__(self) -> int:
        return self._warm + self._steps

    def __iter__(self) -> Iterator[Any]:
        for step in range(1, len(self) + 1):
            if step == self._warm + 1:
                self._synchronize()
                started = time.perf_counter()
            if self._before is not None:
                self._before(step)
            yield self._batch
        self._synchronize()
        self.milliseconds = (time.perf_counter() - started) * 1e3 / self._steps


def train_by_hand(network: nn.Module, optimizer: Any, device: str, data: TimedBatch) -> None:
    for words, labels in data:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_fn(network(words), labels)
        loss.backward()
        optimizer.step()


def train_by_dualtrain(network: nn.Module, optimizer: Any, callbacks: Any, data: TimedBatch) -> None:
    dt.Model(network, loss_fn, optimizer, amp="bf16").train(1, data, callbacks)


def main() -> None:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py needs a GPU that torch can use; --device cpu --small tries the program itself.")
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    words, length, batch_size, sizes = (
        (64, 16, 2, {"width": 32, "layers": 2, "heads": 4})
        if options.small
        else (16_384, 512, 8, {"width": 768, "layers": 12, "heads": 12})
    )
    torch.manual_seed(0)
    network = Decoder(words, length, **sizes).to(options.device)
    batch = torch.randint(words, (batch_size, length), device=options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    about = f"{parameters / 1e6:.2f} million parameters, {batch_size} x {length} words, {device}"
    print(f"{about}, torch {torch.__version__}")
    print(f"\nAdded to a step of the hand-written loop, %; median of {options.rounds} rounds\n")
    conditions = [condition for condition in CONDITIONS.values() if condition.name != "idle"]
    print("| | hand-written, ms | " + " | ".join(c.name for c in conditions) + " |")
    print("|" + "---|" * (len(conditions) + 2), flush=True)

    def timed(run: Callable[[TimedBatch], None]) -> float:
        data = TimedBatch((batch, batch), 3, options.steps, synchronize)
        run(data)
        return data.milliseconds

    # Compiling for a CPU takes minutes, and there is nothing to be learnt from it.
    compiled = torch.compile(network, backend="inductor" if options.device == "cuda" else "aot_eager")
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, own in (("eager", network), ("compiled", compiled)):
            by_hand = partial(train_by_hand, own, optimizer, options.device)
            timed(by_hand)  # compiles
            floors: list[float] = []
            added: dict[str, list[float]] = {condition.name: [] for condition in conditions}
            for round_ in range(options.rounds):
                before = timed(by_hand)
                for condition in conditions:
                    log = Path(folder) / f"{name}-{round_}-{condition.name}.jsonl"
                    try:
                        callbacks = callbacks_for(condition, log)
                        measured = timed(partial(train_by_dualtrain, own, optimizer, callbacks))
                    except (NotApplicable, DualTrainError) as error:
                        reasons[f"{name}, {condition.name}"] = str(error)
                        continue
                    after = timed(by_hand)
                    floors.append((before + after) / 2)
                    added[condition.name].append(100 * (measured / floors[-1] - 1))
                    before = after
            cells = [f"{median(values):+.1f}" if values else "-" for values in added.values()]
            print(f"| {name} | {median(floors):.2f} | " + " | ".join(cells) + " |", flush=True)

        print("\n" + "; ".join(f"{c.name}: {c.words}" for c in conditions) + ".")
        for where, reason in reasons.items():
            print(f"-, {where}: {reason}")
        if options.device != "cuda":
            print("Skipped, since only CUDA can tell: that no step but a logged one waits for the GPU.")
            return
        check_synchronizations(network, optimizer, batch, Path(folder))


def check_synchronizations(network: nn.Module, optimizer: Any, batch: Any, folder: Path) -> None:
    """Run steps without device syncs, except the first one and those that are logged immediately.

    Raises:
        RuntimeError: From torch, at an operation with a sync.
    """
    logger, monitor = dt.callbacks.StepLogger, dt.callbacks.TransformerMonitor
    every_step = [
        logger(folder / "late.jsonl", 1),
        monitor(log_file=folder / "monitor.jsonl", attention_interval=1000),
    ]
    listening = callbacks_for(Condition("", "", callbacks=10, listening=True), folder)
    loops = {
        "hand-written loop": partial(train_by_hand, network, optimizer, "cuda"),
        "dualtrain, ten listeners": partial(train_by_dualtrain, network, optimizer, listening),
        "dualtrain, loss and norm of every step, read late": partial(
            train_by_dualtrain, network, optimizer, every_step
        ),
        "dualtrain, StepLogger": partial(
            train_by_dualtrain, network, optimizer, [logger(folder / "sync.jsonl", 10, asynchronous=False)]
        ),
    }
    for what, run in loops.items():
        logged = 10 if what.endswith("StepLogger") else 1000

        def forbid(step: int, logged: int = logged) -> None:
            torch.cuda.set_sync_debug_mode("default" if step == 1 or step % logged == 0 else "error")

        data = TimedBatch((batch, batch), 1, 99, lambda: None, forbid)  # the last step is a logged one
        try:
            run(data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        print(f"{what}: no step waited for the GPU" + (", but the logged ones" if logged == 10 else ""))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a network of a few thousand parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="steps of a measurement")
    return parser.parse_args()


if __name__ == "__main__":
    main()
