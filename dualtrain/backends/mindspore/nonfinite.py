"""Where a step's values stop being finite on MindSpore: its forward pass, repeated out of band."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.train.model import _pynative_executor

from dualtrain.backends._contract import describe_nonfinite, not_repeatable
from dualtrain.backends.mindspore.backend import BACKEND
from dualtrain.protocol import Native

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def explain_nonfinite(network: nn.Cell, forward: nn.Cell | None, optimizer: Native, batch: Native) -> str:
    """Say where the values of a step stop being finite.

    Python hooks are called in PYNATIVE mode only, so that is the mode in which the forward pass is
    repeated, and where it is finite the backward pass too: gradients are not kept.

    Args:
        network: The network, whose Cells are named.
        forward: The Cell that gives a batch's loss; None: there is none.
        optimizer: The optimizer, whose parameters have gradients.
        batch: The batch's columns.
    """
    parameter = next((p.name for p in network.trainable_params() if not is_finite(p)), None)
    if forward is None or batch is None:
        prefix = "" if parameter is None else f"parameter {parameter} is not finite already; "
        return prefix + not_repeatable("MindSpore's own train step does not give it away")
    names = {id(cell): name.lstrip("_") for name, cell in forward.cells_and_names()}
    names.update({id(cell): name for name, cell in network.cells_and_names()})
    found: list[tuple[str, str, bool]] = []

    def hook(cell: nn.Cell, inputs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append((names[id(cell)], type(cell).__name__, is_finite(inputs)))

    gradients: list[str] = []
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    try:
        with undisturbed(forward):
            with ExitStack() as hooks:
                for _, cell in forward.cells_and_names():
                    if cell is not forward or cell is network:
                        hooks.callback(cell.register_forward_hook(hook).remove)
                loss_is_finite = is_finite(forward(*batch))
            if loss_is_finite and optimizer is not None:
                weights = optimizer.parameters
                values = ops.GradOperation(get_by_list=True)(forward, weights)(*batch)
                gradients = [w.name for w, g in zip(weights, values, strict=True) if not is_finite(g)]
    except Exception as error:  # noqa: BLE001 - the user's forward; what is being told is another fault
        _pynative_executor.clear_res()  # an error inside a Cell leaves MindSpore recording
        return not_repeatable(f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        mindspore.set_context(mode=mode)
    return describe_nonfinite(
        parameter=parameter,
        module=found[0] if found else None,
        loss_is_finite=loss_is_finite,
        gradients=gradients,
    )


@contextmanager
def undisturbed(network: nn.Cell) -> Iterator[None]:
    """Compute out of band: buffers and the random state are put back.

    Dropouts let everything through meanwhile: the state of their random numbers is inside MindSpore's
    kernels, where it can be neither read nor restored.
    """
    buffers = [(p, p.asnumpy().copy()) for p in network.get_parameters() if not p.requires_grad]
    dropouts = [c for _, c in network.cells_and_names() if isinstance(c, _DROPOUTS) and c.training]
    random_state = mindspore.get_rng_state()
    for dropout in dropouts:
        dropout.set_train(False)
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.set_train()
        for parameter, values in buffers:  # such as BatchNorm's
            ops.assign(parameter, Tensor(values))
        mindspore.set_rng_state(random_state)


def is_finite(value: Native) -> bool:
    """Tell whether all numbers in tensors, also inside tuples, lists and mappings, are finite."""
    if isinstance(value, Tensor):
        array = BACKEND.to_numpy(value)
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if isinstance(value, (tuple, list)):
        return all(map(is_finite, value))
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return True
