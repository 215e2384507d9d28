"""Networks and train steps of the tests, for MindSpore: in a file, since GRAPH mode reads their source."""

import random

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


class Weight(nn.Cell):
    """One weight: ``w * x``."""

    def __init__(self, w):
        super().__init__()
        self.w = Parameter(Tensor(float(w), mindspore.float32), name="w")

    def construct(self, x):
        return self.w * x


class MeanLoss(nn.Cell):
    def construct(self, output, label):
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
    x, label = batch
    return {"los": (network(x) + label).mean()}


def step_vector(network, batch):
    x, label = batch
    return network(x) + label


def step_number(network, batch):
    x, label = batch
    return (network(x) + label).mean().asnumpy()


def step_detached(network, batch):
    x, label = batch
    return ops.stop_gradient((network(x) + label).mean())


class TwoWeights(nn.Cell):
    """Two weights: ``a * x + b * x``."""

    def __init__(self):
        super().__init__()
        self.a = Parameter(Tensor(1.0, mindspore.float32), name="a")
        self.b = Parameter(Tensor(1.0, mindspore.float32), name="b")

    def construct(self, x):
        return self.a * x + self.b * x


class Normed(nn.Cell):
    """A batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def construct(self, x):
        return self.norm(x)


def step_item(network, batch):
    x, label = batch
    return (network(x) + label).mean().item()


def step_numpy(network, batch):
    x, label = batch
    return (network(x) + label).mean().asnumpy()


class Plane(nn.Cell):
    """Two weights, each with a column of its own: ``a * x[:, 0] + b * x[:, 1]``."""

    def __init__(self):
        super().__init__()
        self.a = Parameter(Tensor(1.0, mindspore.float32), name="a")
        self.b = Parameter(Tensor(1.0, mindspore.float32), name="b")

    def construct(self, x):
        return self.a * x[:, 0] + self.b * x[:, 1]


class Dropped(nn.Cell):
    """One weight times what a dropout lets through: ``w * dropout(x)``."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(1.0, mindspore.float32), name="w")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return self.w * self.dropout(x)


class Perceptron(nn.Cell):
    """Two layers with a batch norm between them, and a dropout of one number.

    On a CPU, MindSpore looks for the best number of threads in a dropout's first calls, and what it
    draws for several numbers depends on that: such runs differ from each other by themselves.
    """

    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(p=0.5)
        self.out = nn.Dense(8, 1)

    def construct(self, x):
        kept = self.dropout(ops.ones((1, 1), mindspore.float32))
        return self.out(ops.relu(self.norm(self.hidden(x)))) * kept


class Idle(nn.Cell):
    """One weight that is used, one times 0, one that is not used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.used = Parameter(Tensor(1.0, mindspore.float32), name="used")
        self.times_zero = Parameter(Tensor(2.0, mindspore.float32), name="times_zero")
        self.unused = Parameter(Tensor(3.0, mindspore.float32), name="unused")
        self.frozen = Parameter(Tensor(4.0, mindspore.float32), name="frozen", requires_grad=False)

    def construct(self, x):
        return self.used * x + 0 * self.times_zero + self.frozen


class Tied(nn.Cell):
    """Two layers without bias that share their weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(1, 1, weight_init=2.0, has_bias=False)
        self.second = nn.Dense(1, 1, has_bias=False)
        self.second.weight = self.first.weight

    def construct(self, x):
        return self.second(self.first(x))


class Log(nn.Cell):
    def construct(self, x):
        return ops.log(x)


class LogBlock(nn.Cell):
    """A block that hands on the logarithm of its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Identity()
        self.log = Log()

    def construct(self, x):
        return self.log(self.first(x))


class Fragile(nn.Cell):
    """A nested network with a place for each fault, a column of the input for each.

    ``w * dropout(norm(x[:, 0])) + log(x[:, 1]) + sqrt(w * x[:, 2])``: 0 in the second makes the output of
    ``block.log`` infinite, 0 in the third the gradient of ``w`` NaN.
    """

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(1.0, mindspore.float32), name="w")
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout(p=0.5)
        self.block = LogBlock()

    def construct(self, x):
        dropped = self.dropout(self.norm(x[:, 0:1]))
        return self.w * dropped + self.block(x[:, 1:2]) + ops.sqrt(self.w * x[:, 2:3])


class CountedDropout(nn.Cell):
    """Drop numbers by a count of its calls, which goes on in evaluation too.

    Of nn.Dropout, MindSpore draws other numbers in a second run on the CPU, whatever the seed.
    """

    def __init__(self, width):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, mindspore.float32), name="calls", requires_grad=False)
        self.places = Tensor(np.arange(width), mindspore.float32)

    def construct(self, x):
        calls = ops.assign(self.calls, self.calls + 1)
        return x * ((self.places * 7 + calls * 3) % 5 < 3).astype(mindspore.float32)


class Attending(nn.Cell):
    """Attention of two heads over rows of eight numbers, a batch norm and a dropout: one number each."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = CountedDropout(8)
        self.no_dropout = nn.Dropout(p=0.0)
        self.out = nn.Dense(8, 1)

    def construct(self, x):
        x = (x + self.attention(x, x, x)[0]).mean(1)
        return self.out(self.no_dropout(self.dropout(self.norm(x))))[:, 0]


class Softmax(nn.Cell):
    """A softmax of some kind, along some axis."""

    def __init__(self, kind, axis=-1):
        super().__init__()
        self.kind = kind
        self.axis = axis
        self.cell = nn.Softmax(axis)
        self.operator = ops.Softmax(axis)

    def construct(self, x):
        if self.kind == "cell":
            return self.cell(x)
        if self.kind == "operator":
            return self.operator(x)
        if self.kind == "mint":
            return mint.nn.functional.softmax(x, self.axis)
        if self.kind == "method":
            return x.softmax(self.axis)
        return ops.softmax(x, self.axis)


class Changing(nn.Cell):
    """Changes itself and its surroundings in each forward pass, and then may fail."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.still = nn.SequentialCell(nn.BatchNorm1d(8), nn.Dropout(p=0.5))
        self.target = Parameter(Tensor(np.ones(2), mindspore.float32), name="target", requires_grad=False)
        self.calls = 0
        self.last = None
        self.history, self.by_call = [], {}
        self.fails = False

    def construct(self, x):
        self.calls += 1
        self.last = self.attention(x, x, x)[0]
        self.history.append(self.last)
        self.by_call[self.calls] = self.last
        ops.assign(self.target, self.target * 2 + random.random() + np.random.random())
        ops.rand(2)
        if self.fails:
            raise RuntimeError("this network fails")
        return self.still(self.last.mean(1)).sum()


def step_of_six(network, batch):
    x, label = batch
    if x.shape[0] != 6:
        raise ValueError("this step takes six samples")
    return ((network(x) - label) ** 2).mean()
