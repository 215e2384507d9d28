"""The first bridge of a run, which also reports MindSpore's events to the run's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import train

from dualtrain.backends.mindspore.bridge import DualTrainBridge
from dualtrain.backends.mindspore.check import GradientCheck
from dualtrain.backends.mindspore.step import MindSporeStep
from dualtrain.context import CallbackParams
from dualtrain.engine import RunEngine
from dualtrain.protocol import Native


class LeadingBridge(DualTrainBridge):
    """Call the engine's methods before this part of the callbacks.

    Args:
        engine, callbacks, closing: As for ``DualTrainBridge``.
        step: The training step; None in a separate evaluation.
        loss_of: Returns the mean loss of an evaluation step's outputs; None if it is not known.
        check: The check of a ``train_step``, around the first training step.
    """

    def __init__(
        self,
        engine: RunEngine,
        callbacks: Sequence[Any],
        *,
        closing: bool,
        step: MindSporeStep | None,
        loss_of: Callable[[Native], float | None],
        check: GradientCheck | None,
    ) -> None:
        super().__init__(engine, callbacks, closing=closing)
        self._step: Any = step
        self._loss_of = loss_of
        self._check = check
        self._losses: list[float] = []

    def on_train_begin(self, run_context: Native) -> None:
        self._adopt(run_context)
        super().on_train_begin(run_context)

    def on_train_epoch_begin(self, run_context: Native) -> None:
        self._engine.begin_epoch(run_context.original_args()["cur_epoch_num"])
        self._step.begin_epoch()
        super().on_train_epoch_begin(run_context)

    def on_train_step_begin(self, run_context: Native) -> None:
        self._engine.begin_step()
        if self._check is not None:
            self._check.before_first_step(run_context.original_args()["train_dataset_element"])
        super().on_train_step_begin(run_context)

    def on_train_step_end(self, run_context: Native) -> None:
        self._step.end()
        self._engine.end_step()
        if self._check is not None:
            self._check.after_first_step(run_context.original_args()["train_dataset_element"])
            self._check = None
        super().on_train_step_end(run_context)

    def on_train_epoch_end(self, run_context: Native) -> None:
        self._engine.end_epoch()
        super().on_train_epoch_end(run_context)

    def on_train_end(self, run_context: Native) -> None:
        self._engine.end()
        super().on_train_end(run_context)

    def on_eval_begin(self, run_context: Native) -> None:
        self._adopt(run_context)
        self._losses.clear()
        self._engine.begin_evaluation()
        super().on_eval_begin(run_context)

    def on_eval_step_begin(self, run_context: Native) -> None:
        self._engine.begin_eval_step()
        super().on_eval_step_begin(run_context)

    def on_eval_step_end(self, run_context: Native) -> None:
        self._engine.end_eval_step()
        loss = self._loss_of(self._engine.context.outputs)
        if loss is not None:
            self._losses.append(loss)
        super().on_eval_step_end(run_context)

    def on_eval_end(self, run_context: Native) -> None:
        params = run_context.original_args()
        if "eval_results" in params and self._losses:  # MindSpore's value is the last batch's loss
            params["eval_results"]["eval_loss"] = sum(self._losses) / len(self._losses)
        self._engine.end_evaluation()
        super().on_eval_end(run_context)

    def _adopt(self, native: Native) -> None:
        """Change the class of MindSpore's parameter bag in place, since MindSpore keeps writing to it.

        Its own class raises KeyError for a missing attribute and cannot be copied.
        """
        bag = native.original_args()
        if bag is not self._engine.context.original_args():
            object.__setattr__(bag, "__class__", CallbackParams)  # its own __setattr__ would add an item
            bag.__dict__ = bag
            self._engine.adopt(bag)


def bridged(callbacks: Sequence[Any], engine: RunEngine, **leading: Any) -> list[Any]:
    """Return the callback list for MindSpore: native callbacks in their places, bridges for the others.

    Args:
        callbacks: The callback list.
        engine: The run.
        **leading: Further arguments of ``LeadingBridge``.
    """
    parts: list[Any] = [[]]  # every run has a leading bridge
    for callback in callbacks:
        if is_native(callback):
            parts.append(callback)
        elif isinstance(parts[-1], list):
            parts[-1].append(callback)
        else:
            parts.append([callback])
    if engine.context.world_size > 1 and not isinstance(parts[-1], list):
        parts.append([])
    last = max(i for i, part in enumerate(parts) if isinstance(part, list))
    bridges = [
        DualTrainBridge(engine, part, closing=i == last) if isinstance(part, list) else part
        for i, part in enumerate(parts[1:], 1)
    ]
    return [LeadingBridge(engine, parts[0], closing=last == 0, **leading), *bridges]


def is_native(callback: Any) -> bool:
    """Return whether a callback is an instance of one of MindSpore's own callback classes.

    A direct subclass of its Callback base class is not native, but a user's callback.
    """
    return any(
        cls.__module__.split(".")[0] == "mindspore" and cls is not train.Callback
        for cls in type(callback).__mro__
    )
