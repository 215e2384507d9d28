"""The networks that tests/parity/test_parity.py trains on both engines, for MindSpore.

``parity_networks_torch.py`` has the same names, and networks that are the same line by line.
A LayerNorm's ``gamma`` and ``beta`` go by PyTorch's names here, ``weight`` and ``bias``.
"""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import dualtrain as dt

LABEL_DTYPE = np.int32  # of the labels that nn.CrossEntropyLoss takes


def mlp():
    """Return 16 features -> 32 -> 32 -> 10 classes, with LayerNorm (eps 1e-5) and the exact GELU."""
    return nn.SequentialCell(
        nn.Dense(16, 32),
        nn.LayerNorm((32,), epsilon=1e-5),  # the default is 1e-7
        nn.GELU(approximate=False),  # the default is the tanh form
        nn.Dense(32, 32),
        nn.GELU(approximate=False),
        nn.Dense(32, 10),
    )


class Attention(nn.Cell):
    """Self-attention with several heads, from basic operations."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.query = nn.Dense(dim, dim)
        self.key = nn.Dense(dim, dim)
        self.value = nn.Dense(dim, dim)
        self.output = nn.Dense(dim, dim)

    def construct(self, x):
        batch, tokens, dim = x.shape
        heads = (batch, tokens, self.heads, dim // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = ops.softmax(ops.matmul(query, key.swapaxes(2, 3)) * self.scale, -1)
        return self.output(ops.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, dim)))


class Block(nn.Cell):
    """An encoder layer: attention, then a small MLP, each around a shortcut."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm((dim,), epsilon=1e-5)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm((dim,), epsilon=1e-5)
        self.expand = nn.Dense(dim, 2 * dim)
        self.gelu = nn.GELU(approximate=False)
        self.contract = nn.Dense(2 * dim, dim)

    def construct(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Cell):
    """Encode 8 tokens of 8 features in 2 layers of 32, and classify their mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Dense(8, 32)
        self.position = Parameter(Tensor(np.zeros((1, 8, 32)), mindspore.float32))
        self.blocks = nn.SequentialCell(Block(32, 4), Block(32, 4))
        self.norm = nn.LayerNorm((32,), epsilon=1e-5)
        self.head = nn.Dense(32, 10)

    def construct(self, tokens):
        x = self.blocks(self.embed(tokens) + self.position)
        return self.head(self.norm(x).mean(1))


def transformer():
    """Return the transformer."""
    return Transformer()


def _named(network):
    return {
        weight.name.replace("gamma", "weight").replace("beta", "bias"): weight
        for weight in network.trainable_params()
    }


def shapes(network):
    """Return the shapes of a network's weights, by name."""
    return {name: tuple(weight.shape) for name, weight in _named(network).items()}


def load(network, weights):
    """Give a network its weights, before its first step."""
    for name, weight in _named(network).items():
        weight.set_data(Tensor(weights[name]))


def read(network):
    """Return a network's weights, by name."""
    return {name: weight.asnumpy() for name, weight in _named(network).items()}


OPTIMIZERS = {
    "sgd": lambda weights, rates: nn.SGD(weights, rates),
    "momentum": lambda weights, rates: nn.SGD(weights, rates, momentum=0.9),
    "nesterov": lambda weights, rates: nn.SGD(weights, rates, momentum=0.9, nesterov=True),
    "adam": lambda weights, rates: nn.Adam(weights, rates, eps=1e-8),
    "adam_tiny_eps": lambda weights, rates: nn.Adam(weights, rates, eps=1e-12),
    "adam_l2": lambda weights, rates: nn.Adam(weights, rates, eps=1e-8, weight_decay=0.01),
}


def model(network, optimizer, rates, torch_own, **contract):
    """Return a Model; ``rates`` is the learning rate, or a list with one for each update."""
    native = OPTIMIZERS[optimizer](network.trainable_params(), rates)
    return dt.Model(network, nn.CrossEntropyLoss(), native, **contract)
