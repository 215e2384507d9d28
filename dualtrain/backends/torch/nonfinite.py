"""Locate the first non-finite values of a step on PyTorch, by repeating its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from dualtrain.backends._contract import describe_nonfinite, not_repeatable
from dualtrain.backends.torch.out_of_band import out_of_band
from dualtrain.protocol import Native


def explain_nonfinite(
    network: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    forward: Callable[[Any], Any] | None,
    batch: Native,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Return a message about the first non-finite values of a step.

    Args:
        network: The network, with the step's gradients.
        loss_fn: The loss function; if it is a module, its modules are checked too.
        forward: Returns a batch's loss, or a mapping or tuple with it; None: it cannot be repeated.
        batch: The batch.
        autocast: Returns the autocast context of the step.
    """
    parameter = next((name for name, p in network.named_parameters() if not is_finite(p)), None)
    if forward is None:
        prefix = "" if parameter is None else f"parameter {parameter} is not finite already; "
        return prefix + not_repeatable("train_step makes its updates itself")
    modules = dict(network.named_modules())
    roots = [network]
    if isinstance(loss_fn, torch.nn.Module):
        roots.append(loss_fn)
        modules.update({f"loss_fn.{name}".rstrip("."): module for name, module in loss_fn.named_modules()})
    found: list[tuple[str, str, bool]] = []
    try:
        with out_of_band(*roots, training=True), ExitStack() as hooks, autocast():
            for name, module in modules.items():

                def hook(module: Any, inputs: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    if not found and not is_finite(output):
                        given = is_finite(inputs) and is_finite(kwargs)
                        found.append((name, type(module).__name__, given))

                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            loss_is_finite = is_finite(forward(batch))
    except Exception as error:  # noqa: BLE001 - of the user's forward pass; not the fault to report
        return not_repeatable(f"{type(error).__name__}: {error}")
    return describe_nonfinite(
        parameter=parameter,
        module=found[0] if found else None,
        loss_is_finite=loss_is_finite,
        gradients=[name for name, p in network.named_parameters() if not is_finite(p.grad)],
    )


def is_finite(value: Native) -> bool:
    """Return whether all numbers in tensors, also inside tuples, lists and mappings, are finite."""
    if isinstance(value, torch.Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return True
        try:
            return bool(torch.isfinite(value.detach()).all())
        except (RuntimeError, NotImplementedError):
            return True  # a kind of tensor without isfinite
    if isinstance(value, (tuple, list)):
        return all(map(is_finite, value))
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return True
