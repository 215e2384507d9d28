"""Networks and train steps of the tests, for PyTorch."""

import random

import numpy as np
import torch


class Weight(torch.nn.Module):
    """One weight: ``w * x``."""

    def __init__(self, w):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(float(w)))

    def forward(self, x):
        return self.w * x


def mean_loss(output, label):
    return (output + label).mean()


def step_ok(network, batch):
    x, label = batch
    return (network(x) + label).mean()


def step_mapping(network, batch):
    x, label = batch
    output = network(x)
    return {"loss": (output + label).mean(), "outputs": output, "label": label}


def step_named(network, batch):
    return (network(batch["x"]) + batch["label"]).mean()


def step_without_loss(network, batch):
    return {"los": step_ok(network, batch)}


def step_vector(network, batch):
    x, label = batch
    return network(x) + label


def step_number(network, batch):
    return step_ok(network, batch).item()


def step_detached(network, batch):
    return step_ok(network, batch).detach()


class TwoWeights(torch.nn.Module):
    """Two weights: ``a * x + b * x``."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(1.0))
        self.b = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.a * x + self.b * x


class Normed(torch.nn.Module):
    """Two batch norms side by side."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.other = torch.nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(x) + self.other(x)


def step_item(network, batch):
    return step_ok(network, batch).item()


def step_numpy(network, batch):
    return step_ok(network, batch).detach().numpy()


class Plane(torch.nn.Module):
    """Two weights, each with a column of its own: ``a * x[:, 0] + b * x[:, 1]``."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(1.0))
        self.b = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.a * x[:, 0] + self.b * x[:, 1]


class Dropped(torch.nn.Module):
    """One weight times what a dropout lets through: ``w * dropout(x)``."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.w * self.dropout(x)


class Perceptron(torch.nn.Module):
    """Two layers with a batch norm and a dropout between them."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.dropout(torch.relu(self.norm(self.hidden(x)))))


class Idle(torch.nn.Module):
    """One weight that is used, one times 0, one that is not used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.used = torch.nn.Parameter(torch.tensor(1.0))
        self.times_zero = torch.nn.Parameter(torch.tensor(2.0))
        self.unused = torch.nn.Parameter(torch.tensor(3.0))
        self.frozen = torch.nn.Parameter(torch.tensor(4.0), requires_grad=False)

    def forward(self, x):
        return self.used * x + 0 * self.times_zero + self.frozen


class Tied(torch.nn.Module):
    """Two layers without bias that share their weight."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1, 1, bias=False)
        self.second = torch.nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        torch.nn.init.constant_(self.first.weight, 2.0)

    def forward(self, x):
        return self.second(self.first(x))


class Log(torch.nn.Module):
    def forward(self, x):
        return torch.log(x)


class LogBlock(torch.nn.Module):
    """A block that hands on the logarithm of its input."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Identity()
        self.log = Log()

    def forward(self, x):
        return self.log(self.first(x))


class Fragile(torch.nn.Module):
    """A nested network with a place for each fault, a column of the input for each.

    ``w * dropout(norm(x[:, 0])) + log(x[:, 1]) + sqrt(w * x[:, 2])``: 0 in the second makes the output of
    ``block.log`` infinite, 0 in the third the gradient of ``w`` NaN.
    """

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))
        self.norm = torch.nn.BatchNorm1d(1)
        self.dropout = torch.nn.Dropout(0.5)
        self.block = LogBlock()

    def forward(self, x):
        dropped = self.dropout(self.norm(x[:, 0:1]))
        return self.w * dropped + self.block(x[:, 1:2]) + torch.sqrt(self.w * x[:, 2:3])


class Calling(torch.nn.Module):
    """A network that is a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Attending(torch.nn.Module):
    """Attention of two heads over rows of eight numbers, a batch norm and a dropout: one number each."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x):
        x = (x + self.attention(x, x, x)[0]).mean(1)
        return self.out(self.dropout(self.norm(x)))[:, 0]


class Frozen(dict):
    """A mapping that refuses to be changed, as some libraries keep a network's settings in."""

    def update(self, *args):
        raise TypeError("a frozen mapping")

    __setitem__ = clear = update


class Changing(torch.nn.Module):
    """Changes itself and its surroundings in each forward pass, in many ways, and then may fail."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(8)
        self.still = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)).eval()
        self.target = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("missing", None)
        self.state = torch.zeros(2)
        self.calls = 0
        self.last = None
        self.history, self.by_call, self.kinds = [], {}, set()
        self.settings = Frozen(width=8)
        self.fails = False

    def forward(self, x):
        self.calls += 1
        self.last = self.attention(x, x, x)[0]
        self.history.append(self.last)
        self.by_call[self.calls] = self.last
        self.kinds.add(x.dtype)
        self.added = torch.nn.Identity()
        self.count += random.random()
        self.state += np.random.random()
        self.replaced = self.replaced + torch.rand(2)
        self.missing = self.replaced
        with torch.no_grad():
            self.target.mul_(2)
        norm = self.norm
        mixed = torch.nn.functional.batch_norm(
            self.last.mean(1), norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True
        )
        if self.fails:
            raise RuntimeError("this network fails")
        return self.still(mixed).sum()


def step_of_six(network, batch):
    x, label = batch
    if x.shape[0] != 6:
        raise ValueError("this step takes six samples")
    return ((network(x) - label) ** 2).mean()
