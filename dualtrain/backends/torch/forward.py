"""From a batch to its loss: the forward pass, and the checks of what it gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dualtrain.backends._arguments import split_batch
from dualtrain.context import loss_in
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.protocol import Native

logger = logging.getLogger(__name__)


def forward_of(
    network: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    train_step: Callable[..., Any] | None,
) -> Callable[[Any], Any]:
    """Return the function from a batch to the loss, or to a mapping or tuple that holds it."""
    if train_step is not None:
        return lambda batch: train_step(network, batch)
    if loss_fn is not None:

        def supervised(batch: Native) -> Native:
            if type(batch) is tuple and len(batch) == 2:  # the usual case: a call less
                single, label = batch
                return loss_fn(network(single), label)
            inputs, label = split_batch(batch)
            return loss_fn(network(*inputs), label)

        return supervised
    return lambda batch: call_network(network, batch)


def source_of(loss_fn: Any, train_step: Any) -> str:
    """Return the name of what gives the loss, for messages."""
    return "train_step" if train_step is not None else "loss_fn" if loss_fn else "the network"


def call_network(network: torch.nn.Module, batch: Native) -> Native:
    """Call a network with a whole batch: a mapping by keyword, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, (tuple, list)) else network(batch)


def known_loss(outputs: Native, source: str) -> Native:
    """Return the loss in a step's outputs.

    Raises:
        ArgumentValueError: The outputs are a mapping without it.
    """
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise ArgumentValueError(
            f"{source} returned a mapping without 'loss' (it has {', '.join(map(repr, outputs))}): "
            f"expected a scalar loss under that key."
        )
    return loss_in(outputs)


def checked_loss(outputs: Native, source: str) -> torch.Tensor:
    """Return the loss that can be trained on, or report what came instead and the likely cause.

    Raises:
        ArgumentTypeError: It is not a tensor.
        ArgumentValueError: It is missing, not a scalar, or has no gradient.
    """
    loss = outputs if isinstance(outputs, torch.Tensor) else known_loss(outputs, source)
    if not isinstance(loss, torch.Tensor):
        hint = " (was .item() or float() called on it?)" if isinstance(loss, (int, float)) else ""
        raise ArgumentTypeError(
            f"{source} has to give a scalar loss tensor with a gradient, but gave {type(loss).__name__} "
            f"{loss!r:.40}{hint}."
        )
    if loss.ndim != 0:
        raise ArgumentValueError(
            f"{source} has to give a scalar loss, but gave a tensor of shape {tuple(loss.shape)}: "
            f"reduce it, for instance with .mean()."
        )
    if not loss.requires_grad:
        raise ArgumentValueError(
            f"{source} gave a loss without a gradient, so there is nothing to train: it was detached, "
            f"computed under torch.no_grad(), or every parameter is frozen."
        )
    return loss


class SkippedBatches:
    """Count the batches for which ``None`` came in place of a loss.

    Args:
        source: What gives the loss, for messages.
        data_parallel: Whether other ranks wait for this one's gradients.
    """

    def __init__(self, source: str, *, data_parallel: bool) -> None:
        self._source = source
        self._data_parallel = data_parallel
        self._count = 0

    def add(self) -> None:
        """Count a batch, and log the first one.

        Raises:
            RunStateError: The run is data parallel.
        """
        if self._data_parallel:
            raise RunStateError(
                f"{self._source} returned None, which skips the batch, but the other ranks of a data "
                f"parallel run would wait for its gradients: return a loss on every rank."
            )
        self._count += 1
        if self._count == 1:
            logger.warning(
                "%s returned None: the batch is skipped, without an update; further ones are only counted.",
                self._source,
            )


class TrainStepGuard:
    """Call the user's ``train_step``, and refuse an optimizer step inside: the Model steps afterwards.

    Optimizer steps are watched between ``__enter__`` and ``__exit__``.

    Args:
        forward: Calls ``train_step`` with a batch.
        optimizer: The optimizer.
    """

    def __init__(self, forward: Callable[[Any], Any], optimizer: Native) -> None:
        self._forward = forward
        self._optimizer = optimizer
        self._is_inside = False
        self._hook: Any = None

    def __call__(self, batch: Native) -> Native:
        self._is_inside = True
        try:
            return self._forward(batch)
        finally:
            self._is_inside = False

    def __enter__(self) -> TrainStepGuard:
        if isinstance(self._optimizer, torch.optim.Optimizer):
            self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _before_step(self, *args: Any) -> None:
        if self._is_inside:
            raise RunStateError(
                "train_step called optimizer.step(), which the Model does itself after it, so that every "
                "batch would update twice: return the loss alone, or pass automatic_optimization=False."
            )


class EvalStep:
    """Evaluate one batch: ``(loss, outputs, label)``, each None where it is not known.

    Args:
        network, loss_fn, train_step: As for ``forward_of``. Without ``loss_fn``, the result of
            ``train_step`` (or of the network) may be a mapping with ``loss``, and with
            ``outputs`` and ``label`` for the metrics.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        train_step: Callable[..., Any] | None,
    ) -> None:
        self._network = network
        self._loss_fn = loss_fn
        self._forward = forward_of(network, loss_fn, train_step)
        self._source = "train_step" if train_step is not None else "the network"

    def __call__(self, batch: Native) -> tuple[Native, Native, Native]:
        if self._loss_fn is not None:
            inputs, label = split_batch(batch)
            outputs = self._network(*inputs)
            return self._loss_fn(outputs, label), outputs, label
        result = self._forward(batch)
        known = result if isinstance(result, Mapping) else {}
        return known_loss(result, self._source), known.get("outputs"), known.get("label")
