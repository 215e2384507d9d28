"""Change a loss function's label smoothing by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.protocol import Capability


class LabelSmoothing(Callback):
    """Set ``loss_fn.label_smoothing`` at each epoch's begin, and restore the original value at the end.

    Args:
        scheduling: Epoch, counted from 0 -> smoothing from that epoch on, at least 0 and below 1.
            The largest key up to the current epoch applies; before the first key the loss keeps
            its own value.

    Raises:
        ArgumentTypeError, ArgumentValueError: The mapping is invalid; or at train begin, the
            loss has no label smoothing.
        CapabilityError: At train begin in MindSpore's GRAPH mode, which compiles the value as a constant.

    Cost: none per step. Evaluations inside ``fit`` use the current value.
    Events: train begin, train epoch begin, teardown.
    """

    needs = frozenset({Capability.EAGER})

    def __init__(self, scheduling: Mapping[int, float]) -> None:
        if not isinstance(scheduling, Mapping):
            raise ArgumentTypeError(
                f"LabelSmoothing takes a mapping epoch -> smoothing, but got {scheduling!r}."
            )
        if not scheduling:
            raise ArgumentValueError("LabelSmoothing takes at least one epoch, but got an empty mapping.")
        for epoch, smoothing in scheduling.items():
            if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)):
                raise ArgumentTypeError(f"LabelSmoothing takes numbers, but got {smoothing!r}.")
            if isinstance(epoch, bool) or not isinstance(epoch, int):
                raise ArgumentTypeError(f"LabelSmoothing takes integer epochs, but got {epoch!r}.")
            if epoch < 0 or not 0 <= smoothing < 1:
                raise ArgumentValueError(
                    f"LabelSmoothing takes epochs from 0 and values of at least 0 and below 1, "
                    f"but got {epoch}: {smoothing!r}."
                )
        self.scheduling = dict(sorted(scheduling.items()))
        self._loss_fn: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        loss_fn = run_context.original_args().get("loss_fn")
        if not hasattr(loss_fn, "label_smoothing"):
            raise ArgumentValueError(
                f"LabelSmoothing sets loss_fn.label_smoothing, which {type(loss_fn).__name__} does not "
                f"have: use a loss that has it, such as CrossEntropyLoss."
            )
        self._loss_fn, self._original = loss_fn, loss_fn.label_smoothing

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        epoch = (run_context.epoch or 1) - 1
        in_force = [value for first, value in self.scheduling.items() if first <= epoch]
        if in_force:
            self._loss_fn.label_smoothing = in_force[-1]

    def on_teardown(self, run_context: RunContext) -> None:
        if self._loss_fn is not None:
            self._loss_fn.label_smoothing = self._original
            self._loss_fn = None

    def __getstate__(self) -> dict[str, Any]:
        return {"scheduling": self.scheduling, "_loss_fn": None}
