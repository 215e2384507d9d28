"""scikit-learn's 8x8 digits as batches of numpy arrays, for both frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

TEST_SIZE = 360  # of 1797


class Batches:
    """Batches of images and labels, iterated once per epoch.

    With shuffling, the order of each epoch depends on the seed and on the number of completed
    epochs: two objects with the same seed give the same batches.

    Args:
        images: float32, (samples, 8, 8).
        labels: int64, (samples,).
        size: Samples in a batch. An incomplete last batch is dropped, so that all batches have the
            same shape: MindSpore's GRAPH mode compiles the network for each shape.
        seed: Seed of the shuffling; None: no shuffling.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, size: int, seed: int | None = None) -> None:
        self.images = images
        self.labels = labels
        self.size = size
        self.seed = seed
        self.epochs_finished = 0

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.arange(len(self.labels))
        if self.seed is not None:
            np.random.default_rng((self.seed, self.epochs_finished)).shuffle(order)
        for start in range(0, len(self) * self.size, self.size):
            chosen = order[start : start + self.size]
            yield self.images[chosen], self.labels[chosen]
        self.epochs_finished += 1


def load_batches(seed: int) -> tuple[Batches, Batches]:
    """Return the batches for training and for testing, with a fixed split."""
    digits = load_digits()
    images = (digits.images / 8 - 1).astype(np.float32)  # 0..16 becomes -1..1
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Batches(images[train], labels[train], 64, seed), Batches(images[test], labels[test], 120)
