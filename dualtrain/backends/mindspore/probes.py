"""Probe a MindSpore network during training: its attention, and the origin of non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from dualtrain.backends.mindspore.attention import attention_watched, describe_given
from dualtrain.backends.mindspore.cells import TrainStepCell
from dualtrain.backends.mindspore.nonfinite import explain_nonfinite
from dualtrain.backends.mindspore.out_of_band import first_samples, out_of_band
from dualtrain.protocol import AttentionLayer, Native


class MindSporeProbe:
    """Call the network as the training step does, and restore its state.

    Args:
        network: The network.
        train_step: ``train_step`` as a Cell; None: the loss comes from a loss function or the network.
        loss: The Cell that returns a batch's loss; None: it is inside MindSpore's own step.
        optimizer: The optimizer, or None.
        has_label: Whether the last column of a batch is passed to the loss function.
    """

    def __init__(
        self,
        network: nn.Cell,
        train_step: TrainStepCell | None,
        loss: nn.Cell | None,
        optimizer: Native,
        *,
        has_label: bool,
    ) -> None:
        self._network = network
        self._train_step = train_step
        self._loss = loss
        self._optimizer = optimizer
        self._has_label = has_label

    def attention(
        self,
        batch: Native,
        samples: int | None,
        function: Callable[[Native, Native], Sequence[Native]] | None,
    ) -> list[AttentionLayer]:
        def given(columns: tuple[Native, ...]) -> Any:
            assert function is not None
            keys = () if self._train_step is None else self._train_step.keys
            return function(self._network, dict(zip(keys, columns, strict=True)) if keys else columns)

        probabilities = None if function is None else given
        return sample_attention(self._network, self._forward, tuple(batch), samples, probabilities)

    def explain_nonfinite(self, batch: Native) -> str:
        return explain_nonfinite(self._network, self._loss, self._optimizer, batch)

    def _forward(self, batch: tuple[Native, ...]) -> Native:
        """Call the network, without a separate loss."""
        if self._train_step is not None:
            return self._train_step.run(batch)  # type: ignore[no-untyped-call]
        if self._optimizer is None and trains_itself(self._network):
            return self._network.network(*batch)
        return self._network(*(batch[:-1] if self._has_label else batch))


def trains_itself(network: nn.Cell) -> bool:
    """Return whether a network has its own optimizer, like a TrainOneStepCell, which Model allows."""
    return getattr(network, "optimizer", None) is not None


def sample_attention(
    network: Native,
    forward: Callable[[Native], Any],
    batch: tuple[Native, ...],
    samples: int | None,
    function: Callable[[Native], Sequence[Native]] | None,
) -> list[AttentionLayer]:
    """Return the statistics of each layer's attention on samples of a batch.

    Args:
        network: The network.
        forward: Calls the network with the columns of a batch.
        batch: The columns.
        samples: The number of samples to use; None: all.
        function: Returns the probabilities of each layer for the columns, of shape (samples, heads,
            queries, keys). None: attention is detected in the forward pass.
    """
    with out_of_band(network):
        batch = first_samples(batch, samples)
        if function is not None:
            return [describe_given(i, given) for i, given in enumerate(function(batch))]
        with attention_watched(network) as layers:
            forward(batch)
        return layers
