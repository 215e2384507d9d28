"""Networks and train steps of the tests, for PyTorch."""

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
