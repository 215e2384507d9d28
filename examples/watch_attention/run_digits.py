"""Train the Vision Transformer of examples/digits_vit with all monitors on both engines, and draw the logs.

Writes three logs for each engine, and two pictures of them: the run's curves and its attention maps.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from pathlib import Path

# The networks are small: a second thread for one operator costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level: only errors
sys.path.append(str(Path(__file__).parent.parent / "digits_vit"))

from data import load_batches

import dualtrain as dt

ENGINES = ("torch", "mindspore")
LEARNING_RATE = 2e-3
GROUPS = {
    "embedding": r"^(embed|position)",
    **{f"attention {layer}": rf"^blocks\.{layer}\.(norm1|attention)" for layer in range(4)},
    **{f"MLP {layer}": rf"^blocks\.{layer}\.(norm2|expand|contract)" for layer in range(4)},
    "head": r"^(norm|head)",
}


class StopAfter:
    """End the run after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_step_end(self, run_context: dt.RunContext) -> None:
        if run_context.step == self.steps:
            run_context.request_stop(f"{self.steps} steps done")


def train(engine: str, steps: int, patch: int, seed: int, folder: Path) -> list[Path]:
    """Train on one engine, and return the logs."""
    vit = importlib.import_module(f"vit_{engine}")
    network, loss_fn, optimizer = vit.build(seed, LEARNING_RATE, patch=patch)
    train_batches, test_batches = load_batches(seed)
    epochs = math.ceil(steps / len(train_batches))
    attention, parameters, log = (folder / f"{name}.jsonl" for name in ("attention", "parameters", "steps"))
    history = dt.callbacks.MetricHistory()
    throughput = dt.callbacks.Throughput(interval=22)
    smart_trainer = dt.callbacks.SmartTrainer(patience=15, smoothing=0.8)
    callbacks = [
        dt.callbacks.LearningRateWarmup(steps=30, start_factor=0.1),
        smart_trainer,
        dt.callbacks.NanGuard(),
        dt.callbacks.EarlyStopping("acc", patience=5),
        dt.callbacks.TransformerMonitor(log_file=attention, attention_interval=max(1, steps // 20)),
        dt.callbacks.ParameterMonitor(interval=5, patterns=GROUPS, log_file=parameters),
        throughput,
        history,
        StopAfter(steps),
        dt.callbacks.StepLogger(log, log_interval=1),
        dt.callbacks.ProgressBar(),
    ]
    model = dt.Model(network, loss_fn, optimizer, {"acc"})
    model.fit(epochs, train_batches, test_batches, callbacks=callbacks)

    maps = dt.logs.read_log(attention).column("attention")
    print(f"\n{engine}: test accuracy {history.history['acc'][-1]:.2%} after {steps} steps")
    speed = throughput.summary
    print(
        f"  {speed['samples_per_sec']:.0f} images/s at the end; the slowest callback is {speed['slowest']}"
    )
    for step, lr in smart_trainer.lr_history:
        print(f"  step {step}: SmartTrainer lowered the learning rate to {lr:.2g}")
    print("  mean entropy of attention, nats    " + "".join(f"layer {layer:<4}" for layer in range(4)))
    for step, heads in (maps[0][0], maps[1][0]), (maps[0][-1], maps[1][-1]):
        print(f"    step {step:<6}" + " " * 23 + "".join(f"{mean:<10.4f}" for mean in layer_means(heads)))
    return [log, attention, parameters]


def layer_means(heads: tuple[dict[str, float], ...]) -> list[float]:
    """Return the mean entropy of each layer's heads."""
    layers = sorted({head["layer"] for head in heads})
    own = [[head["attention_entropy"] for head in heads if head["layer"] == layer] for layer in layers]
    return [sum(entropies) / len(entropies) for entropies in own]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--steps", type=int, default=264, help="batches of 64 images; default: 264")
    parser.add_argument("--patch", type=int, choices=(2, 4), default=2, help="side of a patch; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the shuffling")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    arguments = parser.parse_args()

    pictures = []
    for engine in ENGINES if arguments.engine == "both" else (arguments.engine,):
        folder = arguments.out / engine
        logs = train(engine, arguments.steps, arguments.patch, arguments.seed, folder)
        pictures += [
            dt.logs.plot_monitor(logs, arguments.out / f"digits_{engine}.png"),
            dt.logs.plot_attention(logs[1], arguments.out / f"digits_{engine}_attention.png"),
        ]
    print("\n" + "\n".join(str(picture) for picture in pictures))


if __name__ == "__main__":
    main()
