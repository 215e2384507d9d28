"""The norm of each parameter's gradient, measured at the updates for which it is requested."""

from __future__ import annotations

from collections.abc import Callable

from dualtrain.backends.torch.norms import Norms
from dualtrain.protocol import Native


class MeasuredParameters:
    """Measure gradients before clipping, and before the optimizer overwrites any of them.

    Args:
        trained_parameters: Returns the parameters by name.

    Attributes:
        requested: Whether the next update is to be measured.
        measured: For each measured update of this batch its parameters and the norms of their gradients.
    """

    def __init__(self, trained_parameters: Callable[[], dict[str, Native]]) -> None:
        self._trained_parameters = trained_parameters
        self._norms: dict[str, float] | None = None
        self.requested = False
        self.measured: list[tuple[list[Native], Norms]] = []

    def request_parameter_grad_norms(self) -> None:
        """Request the norms for the next update."""
        self.requested = True

    def measure(self, optimizer: Native) -> None:
        """Measure the gradients that an optimizer is about to receive."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        self.measured.append((parameters, Norms(gradients, exact_zeros=True)))

    def parameter_grad_norms(self) -> dict[str, float] | None:
        """Return the norms by name; None where nothing was measured. One sync."""
        if self._norms is None and self.measured:
            norms: dict[int, float] = {}
            read = Norms.read(*(measured for _, measured in self.measured))
            for (parameters, _), values in zip(self.measured, read, strict=True):
                norms.update(zip(map(id, parameters), values, strict=True))
            named = self._trained_parameters().items()
            self._norms = {name: norms[id(p)] for name, p in named if id(p) in norms}
        return self._norms

    def forget(self) -> None:
        """Begin a batch, after one that was measured."""
        self.measured, self._norms, self.requested = [], None, False
