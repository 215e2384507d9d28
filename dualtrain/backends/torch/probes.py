"""Look into a PyTorch network during training: its attention, and where its values stop being finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dualtrain.backends._arguments import split_batch
from dualtrain.backends.torch.attention import AttentionWatch
from dualtrain.backends.torch.forward import call_network, forward_of
from dualtrain.backends.torch.nonfinite import explain_nonfinite
from dualtrain.backends.torch.out_of_band import first_samples, out_of_band, unwrapped
from dualtrain.backends.torch.precision import Precision
from dualtrain.errors import RunStateError
from dualtrain.protocol import AttentionLayer, Native


class TorchProbe:
    """Call a network as its training step does, outside of training.

    Args:
        network: The network.
        loss_fn: The loss function, or None.
        train_step: ``train_step(network, batch)`` in place of network and loss, or None.
        precision: Mixed precision.
        automatic: False: ``train_step`` makes updates, and cannot be called here.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        train_step: Callable[..., Any] | None,
        precision: Precision,
        *,
        automatic: bool,
    ) -> None:
        self._network = network
        self._loss_fn = loss_fn
        self._train_step = train_step
        self._precision = precision
        self._automatic = automatic

    def attention(
        self,
        batch: Native,
        samples: int | None,
        function: Callable[[Native, Native], Sequence[Native]] | None,
    ) -> list[AttentionLayer]:
        """Describe the attention of each layer on a batch."""
        if not self._automatic and function is None:
            raise RunStateError(
                "under automatic_optimization=False train_step cannot be run to look at attention alone: "
                "pass a function that computes it."
            )
        with self._precision.autocast():
            return sample_attention(self._network, self._forward, batch, samples, function)

    def _forward(self, network: torch.nn.Module, batch: Native) -> Native:
        """Call a network as the step does, without a separate loss."""
        if self._train_step is not None:
            return self._train_step(network, batch)
        return call_network(network, split_batch(batch)[0] if self._loss_fn is not None else batch)

    def explain_nonfinite(self, batch: Native) -> str:
        """Say where the values of a step on a batch stop being finite."""
        forward = forward_of(self._network, self._loss_fn, self._train_step) if self._automatic else None
        return explain_nonfinite(
            self._network, self._loss_fn, forward, batch, autocast=self._precision.autocast
        )


def sample_attention(
    network: torch.nn.Module,
    forward: Callable[[torch.nn.Module, Native], Any],
    batch: Native,
    samples: int | None,
    function: Callable[[Native, Native], Sequence[Native]] | None,
) -> list[AttentionLayer]:
    """Describe the attention of each layer on samples of a batch.

    Args:
        network: The network.
        forward: Takes the network, without wrappers, and a batch, and calls the one with the other.
        batch: The batch.
        samples: How many of its samples are taken; None: all.
        function: Takes the same two and returns the probabilities of each layer, of shape
            (samples, heads, queries, keys). None: they are found in the forward pass.
    """
    inner = unwrapped(network)
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in inner.parameters()):
        raise RunStateError(
            "attention cannot be looked at before the network's lazy layers know their shapes: call the "
            "network once with a batch before training."
        )
    batch = first_samples(batch, samples)
    with out_of_band(inner):
        watch = AttentionWatch(inner)
        if function is None:
            with watch:
                forward(inner, batch)
        else:
            for probabilities in function(inner, batch):
                watch.add_probabilities(probabilities)
        return watch.layers()
