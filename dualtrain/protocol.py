"""What an engine offers: the verbs of a backend, of its learning rate and of its step.

Native objects (networks, optimizers, tensors, datasets) go in; floats, numpy arrays and
native objects come out. Tensors are never wrapped. What a backend cannot do it does not
fake: the capability is absent, and a callback that needs it is told so at train begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from dualtrain.events import Event

Native: TypeAlias = Any
"""An object of the framework at hand; dualtrain hands it on and never looks inside."""

Rate: TypeAlias = float | tuple[float, ...]
"""A learning rate: one float, or one per parameter group when there are several."""


class BatchShape(NamedTuple):
    """What a batch's first array tells without its values."""

    shape: tuple[int, ...]
    integers: bool
    """Whether it holds integers."""


class Capability(str, Enum):
    """Something that not every engine has in every mode.

    A callback lists what it cannot do without in ``needs``; it is refused at train begin
    where the engine lacks it, in one sentence naming the callback, the capability and the mode.
    """

    STEP_EVENTS = "step_events"
    """Step events fire for every batch. Absent where data is sunk to the device (MindSpore
    GRAPH mode with ``dataset_sink_mode=True``): there they fire once per sink chunk."""

    GRADIENT_EVENTS = "gradient_events"
    """``on_after_backward``, ``on_gradients_ready``, ``on_before_optimizer_step`` and
    ``on_after_optimizer_step`` fire inside a step. Absent in MindSpore's GRAPH mode."""

    GRAD_NORM = "grad_norm"
    """``run_context.grad_norm`` can be read. MindSpore computes it in the step only for a run in
    which a callback needs this, or ``clip_norm`` is set; PyTorch when it is read."""

    PARAMETER_GRAD_NORMS = "parameter_grad_norms"
    """``run_context.parameter_grad_norms`` can be read. MindSpore computes them in the step only for
    a run in which a callback needs this; PyTorch in the updates for which they are requested."""

    ACCUMULATION = "accumulation"
    """``run_context.accumulate_steps`` can be set. Absent under manual optimisation, and in
    MindSpore where data is sunk or a native step does its own scaling."""

    SKIP_NONFINITE = "skip_nonfinite"
    """An update whose loss or gradients are not finite is not made, as in an overflow of mixed precision:
    ``step_skipped`` is true, and weights, optimizer state, ``global_step`` and the learning rate's schedule
    stay. Only in a run in which a callback asks for it. Absent under manual optimisation, and in MindSpore
    where data is sunk or a native step does its own scaling."""

    CALLBACK_TIMES = "callback_times"
    """``run_context.callback_times`` says how long callbacks take. The event bus measures it, for any
    engine, only in a run in which a callback asks for it."""

    EAGER = "eager"
    """Python runs in every step, so that an attribute of a network or loss function that a callback
    changes takes effect. Absent in MindSpore's GRAPH mode, which compiles attributes in."""

    MANUAL_OPTIMIZATION = "manual_optimization"
    """The run is one in which the user's step drives backward and update itself."""

    THREADS = "threads"
    """Several threads of a process can train at once, each with a Model of its own. Absent in
    MindSpore, which crashes or hangs then."""

    CHECKPOINT_EVENTS = "checkpoint_events"
    """``on_checkpoint_save`` and ``on_checkpoint_load`` fire."""

    def __str__(self) -> str:
        return self.value


EVENT_CAPABILITY: dict[Event, Capability] = {
    Event.AFTER_BACKWARD: Capability.GRADIENT_EVENTS,
    Event.GRADIENTS_READY: Capability.GRADIENT_EVENTS,
    Event.BEFORE_OPTIMIZER_STEP: Capability.GRADIENT_EVENTS,
    Event.AFTER_OPTIMIZER_STEP: Capability.GRADIENT_EVENTS,
    Event.CHECKPOINT_SAVE: Capability.CHECKPOINT_EVENTS,
    Event.CHECKPOINT_LOAD: Capability.CHECKPOINT_EVENTS,
}
"""The capability that an extension event comes with."""

CAPABILITY_ADVICE: dict[Capability, str] = {
    Capability.THREADS: "train in the main thread (n_jobs=1), or in several processes started by spawn",
}
"""What to do where a capability is absent, other than to do without the callback or change the mode."""


@dataclass(frozen=True)
class AttentionLayer:
    """What a layer's attention looks like on the samples of a batch.

    A row is what one query of one head gives to the keys: probabilities that sum to one. Their
    mean is one over the number of keys whatever the model does; so these are recorded, as means
    over the rows of all samples, in float64 on the host and on the CPU.

    Padding is left out: keys that no query of the sample can see, and where there are as many
    queries as keys the queries at the same places, and rows that see nothing. A head without any
    row has NaN.

    Attributes:
        layer: Its index, counted from 0 in the order of the forward pass.
        name: The module that it was found in; empty where it is not known.
        entropy: One value per head, as the next three: ``-sum(p * log(p))`` in nats, which is
            log(keys) where attention is uniform and 0 where it is on one key.
        maximum: The largest probability of a row.
        first: What goes to the first position that is not padding.
        distance: ``sum(p * abs(query - key))`` in positions; None where queries and keys differ in
            number, so that they are not one sequence.
        per_key: What each key gets: a float32 array of shape (heads, keys) whose rows sum to one.
    """

    layer: int
    name: str
    entropy: tuple[float, ...]
    maximum: tuple[float, ...]
    first: tuple[float, ...]
    distance: tuple[float, ...] | None
    per_key: Any


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
    """One framework. Stateless: every verb takes the native objects that it works on.

    A backend may also have ``to_float_later(value)``, which begins to copy a scalar, or the mean of a
    larger tensor, to the host and returns the function that waits for that copy alone and returns the
    float; None where the host has the value already, or the framework cannot.
    """

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

    def batch_shape(self, batch: Native) -> BatchShape | None:
        """Return the shape of a batch's first array, also inside tuples, lists and mappings; no sync.

        None where there is no array.
        """

    def learning_rate(self, optimizer: Native) -> LearningRate:
        """Return the learning rate of an optimizer, to read and to write."""

    def weights(self, network: Native) -> dict[str, Any]:
        """Return a copy of a network's weights and buffers: name -> native tensor, on their device."""

    def assign_weights(self, network: Native, weights: dict[str, Any]) -> None:
        """Put what ``weights`` returned, or numpy arrays, into a network, so that training goes on from it.

        Works after the first step too, where MindSpore's own ``set_data`` and
        ``load_param_into_net`` freeze PYNATIVE training without a word.

        Raises:
            ArgumentValueError: A name or a shape differs from the network's.
        """

    def copy_parameters(self, parameters: dict[str, Native]) -> dict[str, Native]:
        """Return a copy of each tensor, where ``parameter_changes`` wants it.

        That is on its device, and on MindSpore on the host. No device sync on PyTorch.
        """

    def parameter_changes(
        self, before: dict[str, Native], now: dict[str, Native]
    ) -> dict[str, tuple[float, float]]:
        """Return by name the L2 norm of a copied tensor and that of its change since then.

        Half precision is reckoned in float32. Cost: one pass over the tensors, and on PyTorch one
        device sync for all of them.

        Args:
            before: What ``copy_parameters`` returned; it is used up.
            now: The same tensors now; it may hold further ones.
        """

    def rank(self) -> int:
        """Return this process's rank, 0 where nothing is distributed."""

    def world_size(self) -> int:
        """Return the number of processes that train together, 1 where there is one."""

    def any_rank(self, flag: bool) -> bool:
        """Tell whether ``flag`` is true on any rank. A collective: call it on all ranks."""


class Step(Protocol):
    """What a run context asks of the step that trains: one object per run, owned by the engine.

    It may also have ``grad_norms_later()``, which does for ``(grad_norm, grad_norm_clipped)`` what a
    backend's ``to_float_later`` does for a tensor.
    """

    @property
    def learning_rate(self) -> LearningRate | None:
        """The optimizer's learning rate; None where there is no optimizer."""

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run so far."""

    accumulate_steps: int
    """Batches per update, from the next window on."""

    @property
    def is_update_step(self) -> bool:
        """Whether this batch ends a window, so that the optimizer is called."""

    @property
    def step_skipped(self) -> bool:
        """Whether the update of this batch was skipped, because its gradients overflowed, or its loss or
        gradients were not finite in a run with ``Capability.SKIP_NONFINITE``."""

    @property
    def loss_scale(self) -> float | None:
        """The factor that the loss is multiplied by before backward; None without scaling."""

    def grad_norm(self) -> float | None:
        """Return the norm before clipping; None where this batch makes no update. One sync."""

    def grad_norm_clipped(self) -> float | None:
        """Return the norm after clipping; None where this batch makes no update. One sync."""

    def attention(
        self, samples: int | None, function: Callable[[Native, Native], Sequence[Native]] | None
    ) -> list[AttentionLayer]:
        """Describe the attention of each layer on the batch at hand; see ``RunContext.attention``."""

    def trained_parameters(self) -> dict[str, Native]:
        """Return the network's parameters that an optimizer has and that are not frozen: name -> native."""

    def request_parameter_grad_norms(self) -> None:
        """Ask for ``parameter_grad_norms`` at the next update.

        Raises:
            RunStateError: On MindSpore, where no callback of the run needs the capability.
        """

    def parameter_grad_norms(self) -> dict[str, float] | None:
        """Return each trained parameter's gradient norm before clipping. One sync.

        None where this batch makes no update or they were not requested.
        """

    def explain_nonfinite(self, batch: Native) -> str:
        """Say, as part of a sentence, where the values of this step stop being finite; "" if unknown.

        Repeats the forward pass of the batch out of band; the network, its buffers and its random numbers
        are left as if that had not been.
        """

    def zero_grad(self, optimizer: Native) -> None:
        """Clear the gradients, under manual optimisation."""

    def backward(self, loss: Native) -> None:
        """Compute gradients, under manual optimisation."""

    def optimizer_step(self, optimizer: Native) -> None:
        """Unscale, clip and update, under manual optimisation."""
