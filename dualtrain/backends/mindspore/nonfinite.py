"""Locate the first non-finite values of a step on MindSpore, by repeating its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from dualtrain.backends._contract import describe_nonfinite, not_repeatable
from dualtrain.backends.mindspore.borrowed import stop_recording
from dualtrain.backends.mindspore.out_of_band import out_of_band
from dualtrain.backends.mindspore.tensors import to_numpy
from dualtrain.protocol import Native


def explain_nonfinite(network: nn.Cell, forward: nn.Cell | None, optimizer: Native, batch: Native) -> str:
    """Return a message about the first non-finite values of a step.

    Python hooks are called only in PYNATIVE mode, so the forward pass is repeated in that mode. If it is
    finite, the backward pass is repeated too, since gradients are not kept.

    Args:
        network: The network.
        forward: The Cell that returns a batch's loss; None: there is none.
        optimizer: The optimizer.
        batch: The batch's columns.
    """
    parameter = next((p.name for p in network.trainable_params() if not is_finite(p)), None)
    if forward is None or batch is None:
        prefix = "" if parameter is None else f"parameter {parameter} is not finite already; "
        return prefix + not_repeatable("MindSpore's own train step does not expose it")
    names = {id(cell): name.lstrip("_") for name, cell in forward.cells_and_names()}
    names.update({id(cell): name for name, cell in network.cells_and_names()})
    found: list[tuple[str, str, bool]] = []

    def hook(cell: nn.Cell, inputs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append((names[id(cell)], type(cell).__name__, is_finite(inputs)))

    gradients: list[str] = []
    try:
        with out_of_band(forward, training=True):
            with ExitStack() as hooks:
                for _, cell in forward.cells_and_names():
                    if cell is not forward or cell is network:
                        hooks.callback(cell.register_forward_hook(hook).remove)
                loss_is_finite = is_finite(forward(*batch))
            if loss_is_finite and optimizer is not None:
                weights = optimizer.parameters
                values = ops.GradOperation(get_by_list=True)(forward, weights)(*batch)
                gradients = [w.name for w, g in zip(weights, values, strict=True) if not is_finite(g)]
    except Exception as error:  # noqa: BLE001 - of the user's forward pass; not the fault to report
        stop_recording()
        return not_repeatable(f"{type(error).__name__}: {error}".splitlines()[0])
    return describe_nonfinite(
        parameter=parameter,
        module=found[0] if found else None,
        loss_is_finite=loss_is_finite,
        gradients=gradients,
    )


def is_finite(value: Native) -> bool:
    """Return whether all numbers in tensors, also inside tuples, lists and mappings, are finite."""
    if isinstance(value, Tensor):
        array = to_numpy(value)
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if isinstance(value, (tuple, list)):
        return all(map(is_finite, value))
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return True
