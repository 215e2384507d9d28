"""The networks that tests/parity/test_parity.py trains on both engines, for PyTorch.

``parity_networks_mindspore.py`` has the same names, and networks that are the same line by line.
Parameters are named alike, so that weights map one to one.
"""

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import dualtrain as dt

LABEL_DTYPE = np.int64  # of the labels that nn.CrossEntropyLoss takes


def mlp():
    """Return 16 features -> 32 -> 32 -> 10 classes, with LayerNorm (eps 1e-5) and the exact GELU."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.LayerNorm((32,), eps=1e-5),
        nn.GELU(approximate="none"),
        nn.Linear(32, 32),
        nn.GELU(approximate="none"),
        nn.Linear(32, 10),
    )


class Attention(nn.Module):
    """Self-attention with several heads, from basic operations."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x):
        batch, tokens, dim = x.shape
        heads = (batch, tokens, self.heads, dim // self.heads)
        query = self.query(x).reshape(heads).swapaxes(1, 2)
        key = self.key(x).reshape(heads).swapaxes(1, 2)
        value = self.value(x).reshape(heads).swapaxes(1, 2)
        attention = torch.softmax(torch.matmul(query, key.swapaxes(2, 3)) * self.scale, -1)
        return self.output(torch.matmul(attention, value).swapaxes(1, 2).reshape((batch, tokens, dim)))


class Block(nn.Module):
    """An encoder layer: attention, then a small MLP, each around a shortcut."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm((dim,), eps=1e-5)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm((dim,), eps=1e-5)
        self.expand = nn.Linear(dim, 2 * dim)
        self.gelu = nn.GELU(approximate="none")
        self.contract = nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """Encode 8 tokens of 8 features in 2 layers of 32, and classify their mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.zeros((1, 8, 32)))
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.norm = nn.LayerNorm((32,), eps=1e-5)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        x = self.blocks(self.embed(tokens) + self.position)
        return self.head(self.norm(x).mean(1))


def transformer():
    """Return the transformer."""
    return Transformer()


def shapes(network):
    """Return the shapes of a network's weights, by name."""
    return {name: tuple(weight.shape) for name, weight in network.named_parameters()}


def load(network, weights):
    """Give a network its weights, before its first step."""
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})


def read(network):
    """Return a network's weights, by name."""
    return {name: weight.detach().numpy() for name, weight in network.named_parameters()}


def decaying(network, weight_decay):
    """Return two groups: MindSpore's weight_decay leaves LayerNorms out, so they have none here."""
    norms, others = [], []
    for name, weight in network.named_parameters():
        module = network.get_submodule(name.rpartition(".")[0])
        (norms if isinstance(module, nn.LayerNorm) else others).append(weight)
    return [{"params": others, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]


OPTIMIZERS = {
    "sgd": lambda network, lr: torch.optim.SGD(network.parameters(), lr),
    "momentum": lambda network, lr: torch.optim.SGD(network.parameters(), lr, momentum=0.9),
    "nesterov": lambda network, lr: torch.optim.SGD(network.parameters(), lr, momentum=0.9, nesterov=True),
    "adam": lambda network, lr: torch.optim.Adam(network.parameters(), lr, eps=1e-8),
    "adam_tiny_eps": lambda network, lr: torch.optim.Adam(network.parameters(), lr, eps=1e-12),
    "adamw": lambda network, lr: torch.optim.AdamW(network.parameters(), lr, weight_decay=0.01),
    "adam_l2": lambda network, lr: torch.optim.Adam(decaying(network, 0.01), lr, eps=1e-8),
}


def model(network, optimizer, rates, torch_own, **contract):
    """Return a Model.

    Args:
        network: The network.
        optimizer: A key of ``OPTIMIZERS``.
        rates: The learning rate, or a list with one for each update.
        torch_own: Whether to let PyTorch's LinearLR and CosineAnnealingLR come to these rates,
            instead of a LambdaLR that takes them from the list.
        contract: What Model takes on both engines.
    """
    schedule = None
    if isinstance(rates, float):
        native = OPTIMIZERS[optimizer](network, rates)
    elif not torch_own:
        native = OPTIMIZERS[optimizer](network, 1.0)
        # It asks for one rate more than there are updates.
        schedule = LambdaLR(native, lambda i: rates[min(i, len(rates) - 1)])
    else:
        highest = max(rates)
        warmup = rates.index(highest)
        native = OPTIMIZERS[optimizer](network, highest)
        rising = LinearLR(native, rates[0] / highest, total_iters=warmup)
        falling = CosineAnnealingLR(native, len(rates) - warmup)
        schedule = SequentialLR(native, [rising, falling], milestones=[warmup])
    return dt.Model(network, nn.CrossEntropyLoss(), native, lr_scheduler=schedule, **contract)
