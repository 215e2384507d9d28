"""A small Vision Transformer for 8x8 images in MindSpore; vit_torch.py is the same line by line."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn, ops
from weights import initial_weights


class Attention(nn.Cell):
    """Self-attention with several heads, from basic operations."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.query = nn.Dense(dim, dim, has_bias=False)
        self.key = nn.Dense(dim, dim, has_bias=False)
        self.value = nn.Dense(dim, dim, has_bias=False)
        self.softmax = nn.Softmax(-1)
        self.output = nn.Dense(dim, dim)

    def construct(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        heads = (batch, tokens, self.heads, dim // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = self.softmax(ops.matmul(query, key.swapaxes(2, 3)) * self.scale)
        mixed = ops.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, dim))
        return self.output(mixed)


class Block(nn.Cell):
    """An encoder layer: attention, then a small MLP, each around a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm((dim,), epsilon=1e-5)  # MindSpore's default is 1e-7
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm((dim,), epsilon=1e-5)
        self.expand = nn.Dense(dim, 2 * dim)
        self.gelu = nn.GELU(approximate=False)  # MindSpore's default is the tanh form
        self.contract = nn.Dense(2 * dim, dim)

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class ViT(nn.Cell):
    """Cut an 8x8 image into patches, 4 of 4x4 or 16 of 2x2, encode them, and classify their mean."""

    def __init__(
        self, patch: int = 4, dim: int = 64, heads: int = 4, layers: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.patch = patch
        self.side = 8 // patch
        self.embed = nn.Dense(patch * patch, dim)
        self.position = Parameter(ops.zeros((1, self.side**2, dim)))
        self.blocks = nn.SequentialCell(*[Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm((dim,), epsilon=1e-5)
        self.head = nn.Dense(dim, classes)

    def construct(self, images: Tensor) -> Tensor:
        side, patch = self.side, self.patch
        patches = images.reshape((-1, side, patch, side, patch)).swapaxes(2, 3)
        patches = patches.reshape((-1, side * side, patch * patch))
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


def build(
    seed: int, learning_rate: float, *, patch: int = 4, layers: int = 4, weight_decay: float = 0.0
) -> tuple[Any, Any, Any]:
    """Return network, loss function and optimizer."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    network = ViT(patch, layers=layers)
    # A LayerNorm's gamma and beta are PyTorch's weight and bias.
    named = {
        parameter.name.replace("gamma", "weight").replace("beta", "bias"): parameter
        for parameter in network.trainable_params()
    }
    weights = initial_weights({name: tuple(parameter.shape) for name, parameter in named.items()}, seed)
    for name, parameter in named.items():
        parameter.set_data(Tensor(weights[name]))  # before the first step, else use ops.assign
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    parameters = network.trainable_params()
    optimizer = nn.Adam(parameters, learning_rate=learning_rate, weight_decay=weight_decay)
    return network, loss_fn, optimizer
