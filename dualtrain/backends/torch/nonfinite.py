"""Where a step's values stop being finite on PyTorch: its forward pass, repeated out of band."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from dualtrain.backends._contract import describe_nonfinite, not_repeatable
from dualtrain.protocol import Native


def explain_nonfinite(
    network: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    forward: Callable[[Any], Any] | None,
    batch: Native,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Say where the values of a step stop being finite.

    Args:
        network: The network, with the step's gradients.
        loss_fn: The loss function, whose module is named too if it is one.
        forward: Gives a batch's loss, or a mapping or tuple with it; None: it cannot be repeated.
        batch: The batch.
        autocast: Makes the context that the step computes its loss in.
    """
    parameter = next((name for name, p in network.named_parameters() if not is_finite(p)), None)
    if forward is None:
        prefix = "" if parameter is None else f"parameter {parameter} is not finite already; "
        return prefix + not_repeatable("train_step makes its updates itself")
    modules = dict(network.named_modules())
    if isinstance(loss_fn, torch.nn.Module):
        modules.update({f"loss_fn.{name}".rstrip("."): module for name, module in loss_fn.named_modules()})
    found: list[tuple[str, str, bool]] = []
    try:
        with undisturbed(*modules.values()), ExitStack() as hooks, autocast():
            for name, module in modules.items():

                def hook(module: Any, inputs: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    if not found and not is_finite(output):
                        given = is_finite(inputs) and is_finite(kwargs)
                        found.append((name, type(module).__name__, given))

                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            loss_is_finite = is_finite(forward(batch))
    except Exception as error:  # noqa: BLE001 - the user's forward; what is being told is another fault
        return not_repeatable(f"{type(error).__name__}: {error}")
    return describe_nonfinite(
        parameter=parameter,
        module=found[0] if found else None,
        loss_is_finite=loss_is_finite,
        gradients=[name for name, p in network.named_parameters() if not is_finite(p.grad)],
    )


@contextmanager
def undisturbed(*modules: torch.nn.Module) -> Iterator[None]:
    """Compute out of band: without gradient, and with buffers, flags and random states put back."""
    flags = [(module, module.training) for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as contexts:
        for device in {p.device for module in modules for p in module.parameters(recurse=False)}:
            if device.type != "cpu":
                contexts.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
        contexts.enter_context(torch.random.fork_rng([]))
        if "torch._dynamo" in sys.modules:  # something may be compiled, and hooks in it would not be called
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with torch.no_grad():
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            with torch.no_grad():
                for module, name, buffer, values in buffers:
                    buffer.copy_(values)
                    module._buffers[name] = buffer
            for module, training in flags:
                module.training = training


def is_finite(value: Native) -> bool:
    """Tell whether all numbers in tensors, also inside tuples, lists and mappings, are finite."""
    if isinstance(value, torch.Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return True
        try:
            return bool(torch.isfinite(value.detach()).all())
        except (RuntimeError, NotImplementedError):
            return True  # a kind of tensor that cannot be asked
    if isinstance(value, (tuple, list)):
        return all(map(is_finite, value))
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return True
