"""A tiny task: classify kind reviews. Written for this example; negations defeat simple word lists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from minilm import tokenize

CLASSES = 2
TRAIN = (
    ("The soup was warm and the staff were kind.", 1),
    ("The soup was cold and the staff were rude.", 0),
    ("I would not come back, even for free.", 0),
    ("I would come back tomorrow if I could.", 1),
    ("Not a single dull page in the whole book.", 1),
    ("Not a single page worth reading twice.", 0),
    ("The battery lasts for days, as they promised.", 1),
    ("The battery is dead before noon, every day.", 0),
    ("It does what it says and never fails.", 1),
    ("It fails at the one thing it should do.", 0),
    ("My children laughed from beginning to end.", 1),
    ("My children were asleep after ten minutes.", 0),
    ("The room was quiet, bright and spotless.", 1),
    ("The room was loud, dark and dirty.", 0),
    ("Nothing to complain about, all went well.", 1),
    ("Nothing worked, and nobody answered the phone.", 0),
    ("The colours are richer than in the photo.", 1),
    ("The colours faded after the first wash.", 0),
    ("A wonderful teacher, patient and clear.", 1),
    ("A confusing teacher who has no patience.", 0),
    ("They repaired it at once and charged nothing.", 1),
    ("They charged me twice and repaired nothing.", 0),
    ("I could not put it down until the last line.", 1),
    ("I could not bear it for another minute.", 0),
    ("Far better than I had hoped.", 1),
    ("Far worse than I had feared.", 0),
    ("The bread alone is worth the journey.", 1),
    ("The journey was long and the bread stale.", 0),
    ("No delays, no fuss, and a window seat.", 1),
    ("No seat, no heating, and two hours late.", 0),
    ("This jacket has kept me dry all winter.", 1),
    ("This jacket leaks at every seam.", 0),
)
TEST = (
    ("The coffee is excellent and the cakes are fresh.", 1),
    ("The coffee is bitter and the cakes are dry.", 0),
    ("I have never been disappointed here.", 1),
    ("I have never been so disappointed.", 0),
    ("The screen is sharp and easy on the eyes.", 1),
    ("The screen flickers and hurts my eyes.", 0),
    ("A moving film, with splendid actors.", 1),
    ("A boring film, with wooden actors.", 0),
    ("Delivered a day early and well packed.", 1),
    ("Delivered a week late and badly damaged.", 0),
    ("The guide knew every stone and every story.", 1),
    ("The guide knew nothing and was in a hurry.", 0),
    ("Would buy again without thinking twice.", 1),
    ("Would like to have my money back.", 0),
    ("The tent stood firm in the storm.", 1),
    ("The tent tore in the first breeze.", 0),
)


class Reviews:
    """Batches of tokens and labels, in the order above."""

    def __init__(self, reviews: tuple[tuple[str, int], ...], size: int = 8) -> None:
        self.tokens = tokenize([sentence for sentence, _ in reviews])
        self.labels = np.array([label for _, label in reviews], np.int64)
        self.size = size

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(self) * self.size, self.size):
            yield self.tokens[start : start + self.size], self.labels[start : start + self.size]
