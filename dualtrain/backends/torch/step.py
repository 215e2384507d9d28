"""What happens to one batch on PyTorch: forward, backward, update; and the forward of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dualtrain.backends._arguments import split_batch
from dualtrain.backends.torch.optimizer import TorchLearningRate
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.protocol import Native

logger = logging.getLogger(__name__)


class OutputTensor(torch.Tensor):
    """A detached tensor that also answers MindSpore's ``asnumpy()``; otherwise an ordinary tensor."""

    # As nn.Parameter does: operations on it give plain tensors, at the cost of plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def asnumpy(self) -> Any:
        """Return the values as a numpy array on the host. One device sync."""
        plain = self.as_subclass(torch.Tensor)
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).cpu().numpy()


def as_outputs(value: Native) -> Native:
    """Detach what a step returned, also inside tuples, lists and mappings, so that no graph lives on."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(OutputTensor)
    if isinstance(value, (tuple, list)):
        return tuple(as_outputs(item) for item in value)
    if isinstance(value, Mapping):
        return {key: as_outputs(item) for key, item in value.items()}
    return value


class TrainStep:
    """Train on one batch: zero gradients, forward, loss, backward, update.

    Args:
        network: The network.
        loss_fn: ``loss_fn(network(*inputs), label)``; None: the network or ``train_step`` gives the loss.
        optimizer: Its optimizer.
        train_step: ``train_step(network, batch)``, in place of network and ``loss_fn``.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Native,
        train_step: Callable[..., Any] | None,
    ) -> None:
        self._forward = forward_of(network, loss_fn, train_step)
        self._source = "train_step" if train_step is not None else "loss_fn" if loss_fn else "the network"
        self._optimizer = optimizer
        self.learning_rate = TorchLearningRate(optimizer)
        self.global_step = 0
        self.skipped_batches = 0

    def __call__(self, batch: Native) -> Native:
        """Train on a batch and return its outputs, detached."""
        self._optimizer.zero_grad()
        outputs = self._forward(batch)
        if outputs is None:
            self._skip()
            return None
        loss = checked_loss(outputs, self._source)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.global_step += 1
        return as_outputs(outputs)

    def _skip(self) -> None:
        self.skipped_batches += 1
        if self.skipped_batches == 1:
            logger.warning(
                "%s returned None: the batch is skipped, without an update; further ones are only counted.",
                self._source,
            )


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
            inputs, label = split_batch(batch)
            return loss_fn(network(*inputs), label)

        return supervised
    return lambda batch: call_network(network, batch)


def call_network(network: torch.nn.Module, batch: Native) -> Native:
    """Call a network with a whole batch: a mapping by keyword, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, (tuple, list)) else network(batch)


def loss_in(outputs: Native, source: str) -> Native:
    """Return the loss in what a step returned: itself, a mapping's ``"loss"``, a tuple's first item."""
    if isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise ArgumentValueError(
                f"{source} returned a mapping without 'loss' (it has {', '.join(map(repr, outputs))}): "
                f"expected a scalar loss under that key."
            )
        return outputs["loss"]
    if isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    return outputs


def checked_loss(outputs: Native, source: str) -> torch.Tensor:
    """Return the loss that can be trained on, or say what came instead and why that may be.

    Raises:
        ArgumentTypeError: It is not a tensor.
        ArgumentValueError: It is missing, not a scalar, or has no gradient.
    """
    loss = outputs if isinstance(outputs, torch.Tensor) else loss_in(outputs, source)
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


class EvalStep:
    """Evaluate one batch: ``(loss, outputs, label)``, each None where it is not known.

    Args:
        network, loss_fn, train_step: As in ``TrainStep``. Without ``loss_fn``, what
            ``train_step`` (or the network) returns may be a mapping with ``loss``, and with
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
            triple = (self._loss_fn(outputs, label), outputs, label)
        else:
            result = self._forward(batch)
            known = result if isinstance(result, Mapping) else {}
            triple = (loss_in(result, self._source), known.get("outputs"), known.get("label"))
        return as_outputs(triple)  # type: ignore[no-any-return]
