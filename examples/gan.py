"""Train a GAN on 8x8 digits: two optimizers in a hand-written loop, with the usual callbacks.

The discriminator is updated at every step, the generator at every second step. Writes a log and a
picture, and prints the similarity of generated and real digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import dualtrain as dt

NOISE = 32  # numbers that an image is made of
TEST_SIZE = 297  # of 1797 digits


class GAN(nn.Module):
    """A generator of images, 64 pixels from -1 to 1, and a discriminator of real and generated images."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)
        self.generator = nn.Sequential(*layers, nn.Tanh())
        layers = nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 64)
        self.discriminator = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))

    def sample(self, count: int) -> Tensor:
        """Generate images."""
        return self.generator(torch.randn(count, NOISE))


def train(run: dt.Run, network: GAN, optimizers: dict[str, Any], batches: DataLoader) -> None:
    """Update the two networks alternately; the discriminator's loss is the run's loss."""
    for _epoch in run.epochs():
        for (real,) in run.batches(batches):
            fake = network.sample(len(real))
            optimizers["discriminator"].zero_grad()
            real_score, fake_score = network.discriminator(real), network.discriminator(fake.detach())
            d_loss = softplus(-real_score).mean() + softplus(fake_score).mean()
            d_loss.backward()
            optimizers["discriminator"].step()
            run.outputs = d_loss
            run.context.log("d_loss", d_loss)
            if run.context.step % 2 == 0:
                optimizers["generator"].zero_grad()
                g_loss = softplus(-network.discriminator(fake)).mean()
                g_loss.backward()
                optimizers["generator"].step()
                run.context.log("g_loss", g_loss)


def draw(log: dt.logs.Log, pictures: dict[str, np.ndarray], path: Path) -> Path:
    """Draw the two losses, and 64 images of each set."""
    figure = Figure(figsize=(4.2 * (len(pictures) + 1), 3.9), layout="constrained")
    losses, *panels = figure.subplots(1, len(pictures) + 1)
    for name in ("d_loss", "g_loss"):
        losses.plot(*log.column(name), linewidth=1, label=name)
    losses.set(title="losses", xlabel="step")
    losses.legend(frameon=False)
    for panel, (title, images) in zip(panels, pictures.items(), strict=True):
        squares = np.pad(images[:64].reshape(8, 8, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
        panel.imshow(squares.swapaxes(1, 2).reshape(80, 80), cmap="gray")
        panel.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small: a second thread costs more than it saves
    torch.manual_seed(0)

    images, kinds = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)  # 0..16 becomes -1..1
    test, real = images[:TEST_SIZE], images[TEST_SIZE:]
    network = GAN()
    with torch.no_grad():
        samples = {"untrained": network.sample(TEST_SIZE).numpy()}
    optimizers = {
        name: torch.optim.Adam(getattr(network, name).parameters(), lr=3e-3, betas=(0.5, 0.999))
        for name in ("discriminator", "generator")
    }
    history = dt.callbacks.MetricHistory()
    callbacks = [history, dt.callbacks.StepLogger(arguments.out / "gan.jsonl")]
    batches = DataLoader(TensorDataset(torch.from_numpy(real)), batch_size=50, shuffle=True)
    with dt.Run(callbacks, network=network, optimizer=optimizers, epochs=arguments.epochs) as run:
        train(run, network, optimizers, batches)
    with torch.no_grad():
        samples |= {"trained": network.sample(TEST_SIZE).numpy(), "real": test}

    for name, optimizer in optimizers.items():
        print(f"updates of the {name}: {next(iter(optimizer.state.values()))['step']:.0f}")
    loss = history.history["loss"]
    print(f"discriminator's loss, first and last epoch: {loss[0]:.2f}, {loss[-1]:.2f} (guessing: 1.39)")
    nearest = KNeighborsClassifier(3).fit(real, kinds[TEST_SIZE:])
    for name, sample in samples.items():  # "real" are digits that the GAN has not seen
        distance = nearest.kneighbors(sample, 1)[0].mean()
        difference = np.sqrt(np.mean((sample.mean(0) - real.mean(0)) ** 2))
        print(
            f"{name:<9}  distance to the nearest digit {distance:.2f}  difference of the mean image "
            f"{difference:.3f}  kinds of digit {len(np.unique(nearest.predict(sample)))}"
        )
    print(arguments.out / "gan.jsonl")
    log = dt.logs.read_log(arguments.out / "gan.jsonl")
    print(draw(log, samples, arguments.out / "gan.png"))


if __name__ == "__main__":
    main()
