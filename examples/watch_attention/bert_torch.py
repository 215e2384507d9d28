"""MiniLM, a small BERT, in PyTorch; bert_mindspore.py is the same line by line."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from minilm import pretrained_weights
from torch import Tensor, nn

MASKED = -1e9


class Layer(nn.Module):
    """An encoder layer: attention, then a small MLP, each with a shortcut and a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.softmax = nn.Softmax(-1)
        self.output = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm((width,), eps=1e-12)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="none")
        self.contract = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm((width,), eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = self.softmax(torch.matmul(query, key.swapaxes(2, 3)) * self.scale + mask)
        mixed = torch.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, width))
        x = self.norm1(x + self.output(mixed))
        return self.norm2(x + self.contract(self.gelu(self.expand(x))))


class MiniLM(nn.Module):
    """Embed sentences by the mean over their tokens, with padding 0, and classify the embedding."""

    def __init__(self, classes: int, width: int = 384, heads: int = 12, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, width)
        self.positions = nn.Embedding(512, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm((width,), eps=1e-12)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return an embedding of each sentence."""
        real = (tokens != 0).float()
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.types.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, (1 - real)[:, None, None] * MASKED)
        return (x * real[..., None]).sum(1) / real.sum(1)[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def build(classes: int, seed: int, learning_rate: float) -> tuple[Any, Any, Any]:
    """Return the pretrained network with a new head, loss function and optimizer. Embeddings are frozen."""
    network = MiniLM(classes)
    weights = pretrained_weights(classes, seed)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    for embedding in (network.words, network.positions, network.types):
        embedding.requires_grad_(False)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return network, nn.CrossEntropyLoss(), torch.optim.Adam(trained, lr=learning_rate)


def embeddings(network: MiniLM, tokens: np.ndarray) -> np.ndarray:
    """Return the embeddings of sentences as a numpy array."""
    with torch.no_grad():
        return network.embed(torch.from_numpy(tokens)).numpy()
