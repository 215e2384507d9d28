"""Train a GAN on 8x8 digits: two optimizers, driven by hand, under the usual callbacks.

The discriminator is updated at every step, the generator at every second one. Writes a log and a
picture, and prints how near the generated digits have come to real ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
    """A generator of images, 64 pixels from -1 to 1, and a discriminator that scores how real one is."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)
        self.generator = nn.Sequential(*layers, nn.Tanh())
        layers = nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 64)
        self.discriminator = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))

    def sample(self, count: int) -> Tensor:
        """Generate images."""
        return self.generator(torch.randn(count, NOISE))


def train_step(network: GAN, batch: tuple[Tensor], run_context: dt.RunContext) -> Tensor:
    """Drive backward and updates; what is returned is the run's loss."""
    (real,) = batch
    fake = network.sample(len(real))
    run_context.zero_grad("discriminator")
    real_score, fake_score = network.discriminator(real), network.discriminator(fake.detach())
    d_loss = softplus(-real_score).mean() + softplus(fake_score).mean()
    run_context.backward(d_loss)
    run_context.optimizer_step("discriminator")
    run_context.log("d_loss", d_loss.detach())
    if run_context.step % 2 == 0:
        run_context.zero_grad("generator")
        g_loss = softplus(-network.discriminator(fake)).mean()
        run_context.backward(g_loss)
        run_context.optimizer_step("generator")
        run_context.log("g_loss", g_loss.detach())
    return d_loss


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
    model = dt.Model(network, optimizer=optimizers, train_step=train_step, automatic_optimization=False)
    batches = DataLoader(TensorDataset(torch.from_numpy(real)), batch_size=50, shuffle=True)
    model.train(arguments.epochs, batches, callbacks)
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
