"""The gradients of an update that a hand-written loop reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from mindspore import Tensor

from dualtrain.backends.mindspore.tensors import norm, to_numpy
from dualtrain.errors import ArgumentTypeError, RunStateError
from dualtrain.protocol import Native


class ReportedGradients:
    """Compute the norm of the gradients that ``run.count_update(gradients)`` gives, when it is read.

    The norm is computed on the host in float64. The loop clips the gradients itself, so the norm after
    clipping is the same.

    Args:
        is_update_step: Returns whether the batch has made an update.
        optimizers: The optimizers.
        network: The network; None: all parameters of the optimizers belong to it.
    """

    loss_scale: float | None = None

    def __init__(
        self, is_update_step: Callable[[], bool], optimizers: Sequence[Native], network: Native
    ) -> None:
        self._is_update_step = is_update_step
        self._optimizers = optimizers
        self._network = network
        self._tensors: list[Tensor] = []
        self._norm: float | None = None

    def report(self, gradients: Native) -> None:
        """Store the gradients of an update; several updates of a batch are combined in one norm."""
        self._tensors.extend(_tensors_in(gradients))
        self._norm = None

    def forget(self) -> None:
        """Begin a batch."""
        self._tensors = []
        self._norm = None

    def grad_norm(self) -> float | None:
        if not self._is_update_step():
            return None
        if not self._tensors:
            raise RunStateError(
                "grad_norm is not known: MindSpore does not keep gradients; report them in the loop by "
                "run.count_update(gradients)."
            )
        if self._norm is None:
            self._norm = sqrt(sum(norm(to_numpy(tensor)) ** 2 for tensor in self._tensors))
        return self._norm

    def grad_norm_clipped(self) -> float | None:
        return self.grad_norm()

    def trained_parameters(self) -> dict[str, Native]:
        own = None if self._network is None else {id(p) for p in self._network.get_parameters()}
        return {
            parameter.name: parameter
            for optimizer in self._optimizers
            for parameter in getattr(optimizer, "parameters", ())
            if parameter.requires_grad and (own is None or id(parameter) in own)
        }


def _tensors_in(gradients: Native) -> Iterator[Any]:
    if isinstance(gradients, Tensor):
        yield gradients
    elif isinstance(gradients, (tuple, list)):
        for item in gradients:
            yield from _tensors_in(item)
    elif isinstance(gradients, Mapping):
        yield from _tensors_in(tuple(gradients.values()))
    elif gradients is not None:
        raise ArgumentTypeError(
            f"count_update(gradients) takes MindSpore tensors, or a tuple, list or mapping of them, but "
            f"got {type(gradients).__name__}."
        )
