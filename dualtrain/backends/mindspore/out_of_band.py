"""Call a MindSpore network outside of the training step, and restore its state afterwards."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from dualtrain.backends.mindspore.borrowed import no_grad, same_hook_version
from dualtrain.protocol import Native

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
"""The containers in a Cell's attributes that are restored; subclasses may not allow it."""


@contextmanager
def out_of_band(network: Native, *, training: bool = False) -> Iterator[None]:
    """Restore gradients, random state, buffers, attributes and flags of a network after calls of it.

    MindSpore is in PYNATIVE mode meanwhile: GRAPH mode would hide intermediate values and recompile.
    The network is in evaluation mode, and no gradients are recorded. With ``training`` each Cell keeps
    its own mode, but dropouts are off: the state of their random numbers is inside MindSpore's
    kernels, and can be neither read nor restored.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    attributes = [dict(vars(cell)) for cell in cells]
    containers = [
        (value, value.copy()) for own in attributes for value in own.values() if type(value) in _CONTAINERS
    ]
    flags = [cell.training for cell in cells]
    values = [(p, p.asnumpy().copy()) for p in network.get_parameters() if not p.requires_grad]
    states = random.getstate(), np.random.get_state(), mindspore.get_rng_state()
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    try:
        # Adding and removing hooks would recompile the graph, and MindSpore 2.7's dropout would restart
        # its random numbers.
        with same_hook_version():
            if training:
                for cell in cells:
                    if isinstance(cell, _DROPOUTS):
                        cell.set_train(False)
                yield
            else:
                network.set_train(False)
                with no_grad():
                    yield
    finally:
        for parameter, value in values:
            if not np.array_equal(parameter.asnumpy(), value, equal_nan=value.dtype.kind == "f"):
                ops.assign(parameter, Tensor(value))
        for cell, own, flag in zip(cells, attributes, flags, strict=True):
            cell.add_flags(training=flag)
            vars(cell).clear()
            vars(cell).update(own)
        for container, content in containers:
            container.clear()
            (container.update if hasattr(container, "update") else container.extend)(content)
        mindspore.set_context(mode=mode)
        random.setstate(states[0])
        np.random.set_state(states[1])
        mindspore.set_rng_state(states[2])


def first_samples(batch: tuple[Native, ...], samples: int | None) -> tuple[Native, ...]:
    """Return the first samples of a batch, if all its columns have the same length."""
    sizes = {column.shape[0] for column in batch if column.ndim}
    if samples is None or len(sizes) != 1 or sizes.pop() <= samples:
        return tuple(batch)
    return tuple(column[:samples] if column.ndim else column for column in batch)
