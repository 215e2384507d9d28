"""Change the number of batches per update by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from dualtrain.arguments import positive_int
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.protocol import Capability


class GradientAccumulationScheduler(Callback):
    """Set the number of batches per update for each epoch.

    Args:
        scheduling: Epoch, counted from 0 -> batches per update from that epoch on. The largest key
            up to the current epoch applies; before the first key the value is 1.
            ``{0: 8, 4: 4, 8: 1}``: 8 in epochs 0 to 3, 4 in epochs 4 to 7, then 1.

    Raises:
        ArgumentTypeError, ArgumentValueError: The mapping is empty, or has an invalid epoch or
            number of batches; or at train begin, the Model also has a fixed ``accumulate_steps``.
        CapabilityError: At train begin, under manual optimisation.

    Cost: none per step. Events: train begin, train epoch begin.
    """

    needs = frozenset({Capability.ACCUMULATION})

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        name = type(self).__name__
        if not isinstance(scheduling, Mapping):
            raise ArgumentTypeError(f"{name} takes a mapping epoch -> batches, but got {scheduling!r}.")
        if not scheduling:
            raise ArgumentValueError(f"{name} takes at least one epoch, but got an empty mapping.")
        for epoch, factor in scheduling.items():
            if isinstance(epoch, bool) or not isinstance(epoch, int):
                raise ArgumentTypeError(f"{name} takes integer epochs, but got {epoch!r}.")
            if epoch < 0:
                raise ArgumentValueError(f"{name} counts epochs from 0, but got {epoch}.")
            positive_int(name, f"scheduling[{epoch}]", factor)
        self.scheduling = dict(sorted(scheduling.items()))

    def on_train_begin(self, run_context: RunContext) -> None:
        if run_context.accumulate_steps != 1:
            raise ArgumentValueError(
                f"{self!r} and Model(accumulate_steps={run_context.accumulate_steps}) both set the number "
                f"of batches per update: leave one of them out."
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        epoch = (run_context.epoch or 1) - 1
        in_force = [factor for first, factor in self.scheduling.items() if first <= epoch]
        run_context.accumulate_steps = in_force[-1] if in_force else 1
