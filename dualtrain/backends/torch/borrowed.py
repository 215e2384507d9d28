"""The private names of PyTorch that dualtrain uses. Each is optional; all were seen in 2.6 to 2.14.

``torch._C._disabled_torch_function_impl``
    Operations on a step's outputs give plain tensors, at their cost. Without it results keep the class of
    the outputs, and operations on them are slower.
``Optimizer._optimizer_step_pre_hooks``, ``Optimizer._optimizer_step_post_hooks``
    Show whether gradients are still unchanged after the update. Without them a needed gradient norm is
    computed before the update.
``OptimizedModule._orig_mod``
    The network inside ``torch.compile``. Without it names of its parameters keep their prefix, and its
    attention is sampled through the compiled network.
``Tensor._version``
    Shows whether gradients have changed since the update of a hand-written loop. Without it their norm is
    computed at each update.
``F.multi_head_attention_forward.__code__``
    The scores inside a fused ``nn.MultiheadAttention``. Without it that attention is not found.
``torch._dynamo``
    Shows, by ``sys.modules``, whether anything may be compiled: its import takes seconds. Without it
    compiled functions inside a network stay compiled during a probe, and their attention may not be found.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dualtrain.protocol import Native

COMPILED_PREFIX = "_orig_mod."
"""The prefix that ``torch.compile`` puts before the names of parameters."""


def plain_results(cls: type) -> type:
    """Let operations on a tensor subclass give plain tensors, at the cost of plain tensors."""
    implementation = getattr(torch._C, "_disabled_torch_function_impl", None)
    if implementation is not None:
        cls.__torch_function__ = implementation  # type: ignore[attr-defined]
    return cls


def may_have_step_hooks(optimizer: Native) -> bool:
    """Return whether hooks may run around an optimizer's step."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, True) for name in names)


def compiled_network(network: torch.nn.Module) -> torch.nn.Module | None:
    """Return the network that ``torch.compile`` has wrapped; None if it has not."""
    return getattr(network, "_orig_mod", None)


def may_be_compiled() -> bool:
    """Return whether anything in this process may be compiled by ``torch.compile``."""
    return "torch._dynamo" in sys.modules


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor has been changed in place; None where that is not known."""
    return getattr(tensor, "_version", None)


def with_names(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a Python function with other global names; None where it has no code of its own."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    arguments = getattr(function, "__defaults__", None)
    return types.FunctionType(code, dict(names), argdefs=arguments)
