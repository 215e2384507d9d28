"""MiniLM, a small BERT, in MindSpore; bert_torch.py is the same line by line."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from minilm import pretrained_weights

MASKED = -1e9


class Layer(nn.Cell):
    """An encoder layer: attention, then a small MLP, each with a shortcut and a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.query = nn.Dense(width, width)
        self.key = nn.Dense(width, width)
        self.value = nn.Dense(width, width)
        self.softmax = nn.Softmax(-1)
        self.output = nn.Dense(width, width)
        self.norm1 = nn.LayerNorm((width,), epsilon=1e-12)
        self.expand = nn.Dense(width, 4 * width)
        self.gelu = nn.GELU(approximate=False)  # MindSpore's default is the tanh form
        self.contract = nn.Dense(4 * width, width)
        self.norm2 = nn.LayerNorm((width,), epsilon=1e-12)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = self.softmax(ops.matmul(query, key.swapaxes(2, 3)) * self.scale + mask)
        mixed = ops.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, width))
        x = self.norm1(x + self.output(mixed))
        return self.norm2(x + self.contract(self.gelu(self.expand(x))))


class MiniLM(nn.Cell):
    """Embed sentences by the mean over their tokens, with padding 0, and classify the embedding."""

    def __init__(self, classes: int, width: int = 384, heads: int = 12, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, width)
        self.positions = nn.Embedding(512, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm((width,), epsilon=1e-12)
        self.layers = nn.CellList([Layer(width, heads) for _ in range(layers)])
        self.head = nn.Dense(width, classes)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return an embedding of each sentence."""
        real = (tokens != 0).astype(mindspore.float32)
        x = self.words(tokens) + self.positions.embedding_table[: tokens.shape[1]]
        x = self.norm(x + self.types.embedding_table[0])
        for layer in self.layers:
            x = layer(x, (1 - real)[:, None, None] * MASKED)
        return (x * real[..., None]).sum(1) / real.sum(1)[:, None]

    def construct(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def build(classes: int, seed: int, learning_rate: float) -> tuple[Any, Any, Any]:
    """Return the pretrained network with a new head, loss function and optimizer. Embeddings are frozen."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)  # no compilation for a few steps
    mindspore.runtime.launch_blocking()  # otherwise PYNATIVE mode is many times slower on a CPU
    network = MiniLM(classes)
    weights = pretrained_weights(classes, seed)
    for parameter in network.get_parameters():
        # A LayerNorm's gamma and beta are PyTorch's weight and bias.
        name = parameter.name.replace("gamma", "weight").replace("beta", "bias")
        name = name.replace("embedding_table", "weight")
        parameter.set_data(Tensor(weights.pop(name)))  # before the first step, else use ops.assign
    assert not weights
    for embedding in (network.words, network.positions, network.types):
        embedding.embedding_table.requires_grad = False
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return network, loss_fn, nn.Adam(network.trainable_params(), learning_rate=learning_rate)


def embeddings(network: MiniLM, tokens: np.ndarray) -> np.ndarray:
    """Return the embeddings of sentences as a numpy array."""
    network.set_train(False)
    return network.embed(Tensor(tokens)).asnumpy()
