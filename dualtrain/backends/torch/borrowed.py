"""The private names of PyTorch that dualtrain uses; each is optional.

=============================================  ==============================  ============  =======================
name                                           used for                        seen in       without it
=============================================  ==============================  ============  =======================
``torch._C._disabled_torch_function_impl``     operations on a step's outputs  2.6 to 2.14   outputs keep their class
                                               give plain tensors                            in operations: slower
``Optimizer._optimizer_step_pre_hooks``,       whether gradients are still     2.6 to 2.14   the gradient norm is
``Optimizer._optimizer_step_post_hooks``       unchanged after the update                    taken before the update
``OptimizedModule._orig_mod``                  the network inside              2.6 to 2.14   names of a compiled
                                               ``torch.compile``                             network keep its prefix
``Tensor._version``                            whether gradients have changed  2.6 to 2.14   the gradient norm of a
                                               since the update, in a                        hand-written loop is
                                               hand-written loop                             taken at the update
``F.multi_head_attention_forward.__code__``    the scores of a fused           2.6 to 2.14   attention of
                                               ``nn.MultiheadAttention``                     ``nn.MultiheadAttention``
                                                                                             by its weights alone
=============================================  ==============================  ============  =======================
"""

from __future__ import annotations

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
    """Tell whether hooks may run around an optimizer's step."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, True) for name in names)


def compiled_network(network: torch.nn.Module) -> torch.nn.Module | None:
    """Return the network that ``torch.compile`` has wrapped; None if it has not."""
    return getattr(network, "_orig_mod", None)


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
