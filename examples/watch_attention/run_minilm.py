"""Fine-tune a pretrained MiniLM on both engines from the same file of weights, and monitor its attention.

Writes three logs for each engine, pictures of them, and one picture of both engines.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level: only errors

from entropy import draw, entropies
from reviews import CLASSES, TEST, TRAIN, Reviews

import dualtrain as dt

ENGINES = ("torch", "mindspore")
GROUPS = {
    **{f"attention {layer}": rf"^layers\.{layer}\.(query|key|value|output|norm1)" for layer in range(6)},
    **{f"MLP {layer}": rf"^layers\.{layer}\.(expand|contract|norm2)" for layer in range(6)},
    "head": r"^head",
}


def train(engine: str, steps: int, learning_rate: float, seed: int, folder: Path) -> list[Path]:
    """Train on one engine, and return the logs."""
    bert = importlib.import_module(f"bert_{engine}")
    network, loss_fn, optimizer = bert.build(CLASSES, seed, learning_rate)
    train_batches, test_batches = Reviews(TRAIN), Reviews(TEST)
    epochs = math.ceil(steps / len(train_batches))
    log, attention, parameters = (folder / f"{name}.jsonl" for name in ("steps", "attention", "parameters"))
    history = dt.callbacks.MetricHistory()
    # Attention is sampled once per epoch, at its first batch: on the same reviews each time.
    callbacks = [
        dt.callbacks.LearningRateWarmup(steps=5, start_factor=0.2),
        dt.callbacks.SmartTrainer(patience=8, smoothing=0.5),
        dt.callbacks.NanGuard(),
        dt.callbacks.EarlyStopping("acc", patience=10),
        dt.callbacks.TransformerMonitor(log_file=attention, attention_interval=len(train_batches)),
        dt.callbacks.ParameterMonitor(interval=max(1, steps // 16), patterns=GROUPS, log_file=parameters),
        dt.callbacks.Throughput(interval=4),
        history,
        dt.callbacks.StepLogger(log, log_interval=1),
        dt.callbacks.ProgressBar(),
    ]
    model = dt.Model(network, loss_fn, optimizer, {"acc"})
    model.fit(epochs, train_batches, test_batches, callbacks=callbacks)
    losses, accuracies = dt.logs.read_log(log).column("loss")[1], history.history["acc"]
    print(
        f"{engine:<10}{len(losses)} steps, loss {losses[0]:.6f} to {losses[-1]:.6f}, "
        f"test accuracy {accuracies[0]:.0%} after the first epoch and {accuracies[-1]:.0%} after the last",
        flush=True,
    )
    return [log, attention, parameters]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument(
        "--steps", type=int, default=40, help="batches of 8, in whole epochs of 4; default: 40"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0, help="of the new head's weights")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    arguments = parser.parse_args()

    sampled, pictures = {}, []
    for engine in ENGINES if arguments.engine == "both" else (arguments.engine,):
        folder = arguments.out / f"minilm_{engine}"
        logs = train(engine, arguments.steps, arguments.learning_rate, arguments.seed, folder)
        sampled[engine] = entropies(logs[1])
        maps = folder.with_name(f"{folder.name}_attention.png")
        pictures.append(dt.logs.plot_monitor(logs, folder.with_suffix(".png")))
        pictures.append(dt.logs.plot_attention(logs[1], maps, layers=[0, 2, 5]))
    for engine, steps in sampled.items():
        print(f"\n{engine}: entropy of attention at step 1, nats; a row a layer, a column a head")
        for layer in steps[1]:
            print("  " + " ".join(f"{entropy:7.4f}" for entropy in layer))
    if len(sampled) == 2:
        difference = abs(sampled["torch"][1] - sampled["mindspore"][1]).max()
        print(f"\nlargest difference between the engines at step 1, of 72 heads: {difference:.1e} nats")
    pictures.append(draw(sampled, arguments.out / "minilm_entropy.png"))
    print("\n" + "\n".join(str(picture) for picture in pictures))


if __name__ == "__main__":
    main()
