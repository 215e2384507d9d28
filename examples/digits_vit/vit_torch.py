"""A small Vision Transformer for 8x8 images in PyTorch; vit_mindspore.py is the same line by line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from weights import initial_weights


class Attention(nn.Module):
    """Self-attention with several heads, from basic operations."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.softmax = nn.Softmax(-1)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        heads = (batch, tokens, self.heads, dim // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = self.softmax(torch.matmul(query, key.swapaxes(2, 3)) * self.scale)
        mixed = torch.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, dim))
        return self.output(mixed)


class Block(nn.Module):
    """An encoder layer: attention, then a small MLP, each around a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm((dim,), eps=1e-5)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm((dim,), eps=1e-5)
        self.expand = nn.Linear(dim, 2 * dim)
        self.gelu = nn.GELU(approximate="none")
        self.contract = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class ViT(nn.Module):
    """Cut an 8x8 image into patches, 4 of 4x4 or 16 of 2x2, encode them, and classify their mean."""

    def __init__(
        self, patch: int = 4, dim: int = 64, heads: int = 4, layers: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.patch = patch
        self.side = 8 // patch
        self.embed = nn.Linear(patch * patch, dim)
        self.position = nn.Parameter(torch.zeros((1, self.side**2, dim)))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm((dim,), eps=1e-5)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        side, patch = self.side, self.patch
        patches = images.reshape((-1, side, patch, side, patch)).swapaxes(2, 3)
        patches = patches.reshape((-1, side * side, patch * patch))
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


def build(
    seed: int, learning_rate: float, *, patch: int = 4, layers: int = 4, weight_decay: float = 0.0
) -> tuple[Any, Any, Any]:
    """Return network, loss function and optimizer."""
    network = ViT(patch, layers=layers)
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    weights = initial_weights(shapes, seed)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    return network, loss_fn, optimizer
