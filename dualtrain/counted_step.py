"""The training step of a hand-written loop whose framework cannot be watched."""

from __future__ import annotations

from dualtrain.errors import RunStateError
from dualtrain.protocol import Capability, LearningRate, Native


class CountedStep:
    """Count the updates that the user's loop reports by ``run.count_update()``.

    Args:
        learning_rate: The optimizer's learning rate; None where there is no optimizer.

    Attributes:
        capabilities: What the step adds to the run.
    """

    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, learning_rate: LearningRate | None = None) -> None:
        self.learning_rate = learning_rate
        self.global_step = 0
        self.is_update_step = False
        self.step_skipped = False

    def begin(self) -> None:
        """Begin a batch: it has made no update yet."""
        self.is_update_step = self.step_skipped = False

    def count_update(self, gradients: Native = None, *, skipped: bool = False) -> None:
        """Count an update, unless it was skipped."""
        self.is_update_step = True
        self.step_skipped = skipped
        self.global_step += not skipped

    def clip(self, max_norm: float) -> None:
        """Refuse: the gradients are not known here.

        Raises:
            RunStateError: Always.
        """
        raise RunStateError(
            "clip_gradients() needs the gradients of a PyTorch optimizer that was given as "
            "dt.Run(optimizer=...): clip in the loop itself, and report the update by count_update()."
        )
