"""What an engine offers: the verbs of a backend, of its learning rate and of its step.

Native objects (networks, optimizers, tensors, datasets) go in; floats, numpy arrays and
native objects come out. Tensors are never wrapped. What a backend cannot do it does not
fake: the capability is absent, and a callback that needs it is told so at train begin.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dualtrain.events import Event

Native: TypeAlias = Any
"""An object of the framework at hand; dualtrain hands it on and never looks inside."""

Rate: TypeAlias = float | tuple[float, ...]
"""A learning rate: one float, or one per parameter group when there are several."""


class Capability(str, Enum):
    """Something that not every engine has in every mode.

    A callback lists what it cannot do without in ``needs``; it is refused at train begin
    where the engine lacks it, in one sentence naming the callback, the capability and the mode.
    """

    STEP_EVENTS = "step_events"
    """Step events fire for every batch. Absent where data is sunk to the device (MindSpore
    GRAPH mode with ``dataset_sink_mode=True``): there they fire once per sink chunk."""

    CHECKPOINT_EVENTS = "checkpoint_events"
    """``on_checkpoint_save`` and ``on_checkpoint_load`` fire."""

    def __str__(self) -> str:
        return self.value


EVENT_CAPABILITY: dict[Event, Capability] = {
    Event.CHECKPOINT_SAVE: Capability.CHECKPOINT_EVENTS,
    Event.CHECKPOINT_LOAD: Capability.CHECKPOINT_EVENTS,
}
"""The capability that an extension event comes with."""


@runtime_checkable
class LearningRate(Protocol):
    """The learning rate of one optimizer, whatever form it has there."""

    def read(self) -> Rate:
        """Return the rate in force: at step end the one this step used, until it is changed.

        Cost: PyTorch none for float rates; MindSpore one host read of the rate.
        """

    def write(self, rate: Rate) -> None:
        """Set the rate from the next update on.

        Args:
            rate: One float for every group, or one per group.

        Raises:
            ArgumentValueError: The form of this optimizer's rate cannot be set to a value
                (a schedule: scale it instead), or the number of groups differs.
        """

    def scale(self, factor: float, min_lr: float = 0.0) -> Rate:
        """Multiply the rate by ``factor``, not below ``min_lr``, on top of any schedule.

        Returns:
            The new rate.
        """


@runtime_checkable
class Backend(Protocol):
    """One framework. Stateless: every verb takes the native objects that it works on."""

    name: str
    """``"torch"``, ``"mindspore"``, ...; also ``str(backend)``."""

    def owns(self, obj: Native) -> bool:
        """Tell whether ``obj`` is a network, optimizer or tensor of this framework."""

    def model_class(self) -> type:
        """Return the class that ``dt.Model`` builds for this framework's networks."""

    def capabilities(self) -> frozenset[Capability]:
        """Return what the engine can do in the mode it is in now."""

    def describe_mode(self) -> str:
        """Return the engine's mode in words for messages: "PyTorch", "MindSpore GRAPH mode"."""

    def version(self) -> str:
        """Return the framework's version."""

    def to_float(self, value: Native) -> float:
        """Return a scalar tensor's value, or the mean of a larger one. One device sync."""

    def to_numpy(self, value: Native) -> Any:
        """Return a tensor's values as a numpy array of the same shape, on the host."""

    def learning_rate(self, optimizer: Native) -> LearningRate:
        """Return the learning rate of an optimizer, to read and to write."""

    def rank(self) -> int:
        """Return this process's rank, 0 where nothing is distributed."""

    def world_size(self) -> int:
        """Return the number of processes that train together, 1 where there is one."""

    def any_rank(self, flag: bool) -> bool:
        """Tell whether ``flag`` is true on any rank. A collective: call it on all ranks."""


class Step(Protocol):
    """What a run context asks of the step that trains: one object per run, owned by the engine."""

    @property
    def learning_rate(self) -> LearningRate | None:
        """The optimizer's learning rate; None where there is no optimizer."""

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run so far."""
