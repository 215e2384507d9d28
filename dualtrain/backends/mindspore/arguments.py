"""Checks and conversions of the arguments of MindSpore's Model."""

from __future__ import annotations

import math
import warnings
from typing import Any

import mindspore
from mindspore import nn

from dualtrain.arguments import positive_int
from dualtrain.backends._arguments import foreign_parameters, not_this_optimizer
from dualtrain.backends.mindspore.cells import CLAIM
from dualtrain.backends.mindspore.modes import graph_mode
from dualtrain.backends.mindspore.optimizer import table_length
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, DualTrainError, RunStateError
from dualtrain.protocol import Native

MINDSPORES_CHOICE: Any = type("MindSporesChoice", (), {"__repr__": lambda self: "<MindSpore's own>"})()
"""Default of arguments that are not passed to MindSpore, which distinguishes them from None."""


def check_engine(lr_scheduler: Any, automatic_optimization: bool) -> None:
    """Refuse arguments that only PyTorch supports."""
    if lr_scheduler is not None:
        raise ArgumentValueError(
            "lr_scheduler is PyTorch's: a MindSpore optimizer takes its schedule as learning_rate."
        )
    if not automatic_optimization:
        raise ArgumentValueError(
            "automatic_optimization=False is PyTorch's: in MindSpore pass a network that trains "
            "itself, such as a TrainOneStepCell of your own, without an optimizer."
        )


def check_limits(verb: str, max_steps: int | None, limit_batches: int | None) -> None:
    """Check the two limits of a run."""
    for name, value in {"max_steps": max_steps, "limit_batches": limit_batches}.items():
        if value is not None:
            positive_int(verb, name, value)


def check_optimizer(network: nn.Cell, optimizer: Native) -> None:
    """Check that an optimizer is one of MindSpore's and has parameters of the network."""
    if optimizer is None:
        return
    parameters = getattr(optimizer, "parameters", None)
    if not isinstance(optimizer, nn.Cell) or parameters is None:
        raise not_this_optimizer("mindspore", optimizer)
    own = {id(parameter) for parameter in network.get_parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        raise foreign_parameters(network, "trainable_params()")


def mixed_precision(amp: str, amp_level: str, native: dict[str, Any]) -> tuple[Any, str]:
    """Return the loss scaler and the ``amp_level`` for ``amp``, and adapt MindSpore's own arguments."""
    if amp not in ("fp16", "bf16"):
        raise ArgumentValueError(f"amp is None, 'fp16' or 'bf16', but got {amp!r}.")
    if amp == "bf16":
        raise ArgumentValueError(
            "amp='bf16' is PyTorch's: MindSpore's Model has no bfloat16 level; use amp='fp16' or amp_level."
        )
    if amp_level != "O0" or "loss_scale_manager" in native:
        raise ArgumentValueError(
            "amp and MindSpore's own amp_level or loss_scale_manager set the same option: pass one."
        )
    native["loss_scale_manager"] = None  # O2's default does not work on MindSpore's CPU
    # Initially the largest power of two in float16; window and factor are those of torch's GradScaler.
    return mindspore.amp.DynamicLossScaler(2.0**15, 2, 2000), "O2"


def warn_of_short_table(optimizer: Native, epochs: int, batches: float, accumulate_steps: int) -> None:
    """Warn if a list of learning rates is shorter than the run."""
    length = table_length(optimizer) if isinstance(optimizer, nn.Optimizer) else None
    if length is None or batches == float("inf"):
        return
    left = length - int(optimizer.global_step.item())
    updates = epochs * math.ceil(batches / accumulate_steps)
    if left < updates:
        warnings.warn(
            f"the optimizer's list of learning rates has rates for {left} more updates, but this run "
            f"has {updates}: MindSpore fails after the last rate.",
            stacklevel=6,
        )


def explain_train_step_error(error: BaseException) -> Exception | None:
    """Return an error that explains a failed first step with ``train_step``; None if it is clear."""
    if not isinstance(error, Exception) or isinstance(error, DualTrainError):
        return None
    text = str(error).strip().lstrip("'")
    sentence = text.splitlines()[0].rstrip("'") if text else ""
    if sentence.startswith(CLAIM):
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        return kind(sentence + ".")
    if getattr(error, "__notes__", None) or not graph_mode():
        return None  # an error of a callback or of the user's code
    return RunStateError(
        f"train_step failed in MindSpore's GRAPH mode, which compiles it; write it with operations that "
        f"GRAPH mode supports, in a file, or use PYNATIVE mode: {type(error).__name__}: {sentence}"
    )
