"""Call a PyTorch network outside of the training step, and restore its state afterwards."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from dualtrain.backends.torch.borrowed import compiled_network, may_be_compiled
from dualtrain.protocol import Native

_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
"""The containers in a module's attributes that are restored; subclasses may not allow changes."""


def unwrapped(network: torch.nn.Module) -> torch.nn.Module:
    """Return the network inside DistributedDataParallel and torch.compile."""
    while True:
        compiled = compiled_network(network)
        if isinstance(network, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            network = network.module
        elif compiled is not None:
            network = compiled
        else:
            return network


@contextmanager
def out_of_band(*networks: torch.nn.Module, training: bool = False) -> Iterator[None]:
    """Restore networks after calls: gradients, random state, buffers, attributes and mode.

    Compiled networks run eagerly meanwhile. The networks are in evaluation mode, or with ``training`` in
    each module's own mode.
    """
    modules = [module for network in networks for module in network.modules()]
    parameters = [parameter for network in networks for parameter in network.parameters()]
    attributes = [dict(vars(module)) for module in modules]
    held = [value for own in attributes for value in own.values()]
    containers = [(value, value.copy()) for value in held if type(value) in _CONTAINERS]
    buffers = [buffer for network in networks for buffer in network.buffers()]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    tensors = [*buffers, *frozen, *(v for v in held if isinstance(v, torch.Tensor))]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta]
    states = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(_forked_random_state(parameters))
            stack.enter_context(torch.no_grad())
            if may_be_compiled():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if not training:
                for network in networks:
                    network.eval()
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, own in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(own)
        for container, content in containers:
            container.clear()
            (container.update if hasattr(container, "update") else container.extend)(content)
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _forked_random_state(parameters: Sequence[torch.Tensor]) -> Any:
    kinds = {p.device.type for p in parameters} - {"cpu", "meta"}
    if not kinds:
        return torch.random.fork_rng(devices=[])
    kind = kinds.pop()
    devices = {p.device.index or 0 for p in parameters if p.device.type == kind}
    return torch.random.fork_rng(devices=sorted(devices), device_type=kind)


def first_samples(batch: Native, samples: int | None) -> Native:
    """Return the first samples of every tensor in a batch, if all have the same first dimension.

    If the sizes differ, not every first dimension counts samples, and the whole batch is returned.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch)}
    if samples is None or len(sizes) != 1 or sizes.pop() <= samples:
        return batch
    return _cut(batch, samples)


def _tensors(value: Native) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.ndim:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _cut(value: Native, samples: int) -> Native:
    if isinstance(value, torch.Tensor):
        return value[:samples] if value.ndim else value
    if isinstance(value, (tuple, list)):
        items = [_cut(item, samples) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _cut(item, samples) for key, item in value.items()}
    return value
