"""The interfaces of a backend: its verbs, its learning rate and its step, each a core and optional parts.

Native objects (networks, optimizers, tensors, datasets) go in; floats, numpy arrays and
native objects come out. Tensors are never wrapped. A backend leaves out the parts that it does not
have: the capability is absent, and a callback that needs it is refused at train begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from dualtrain.capability import CAPABILITY_ADVICE as CAPABILITY_ADVICE
from dualtrain.capability import EVENT_CAPABILITY as EVENT_CAPABILITY
from dualtrain.capability import STEP_CAPABILITIES as STEP_CAPABILITIES
from dualtrain.capability import Capability as Capability

Native: TypeAlias = Any
"""An object of the framework; dualtrain passes it on and does not look inside."""

Rate: TypeAlias = float | tuple[float, ...]
"""A learning rate: one float, or one per parameter group when there are several."""


class BatchShape(NamedTuple):
    """The shape and kind of a batch's first array, known without reading its values."""

    shape: tuple[int, ...]
    integers: bool
    """Whether it holds integers."""


@dataclass(frozen=True)
class AttentionLayer:
    """Statistics of one layer's attention on the samples of a batch.

    A row holds the probabilities of one query of one head over the keys; they sum to one. Their
    mean is one over the number of keys for every model, so other statistics are recorded, as means
    over the rows of all samples, in float64 on the host and on the CPU.

    Padding is left out: keys that no query of the sample can see, and where there are as many
    queries as keys the queries at the same positions, and rows that see nothing. A head without any
    row has NaN.

    Attributes:
        layer: Its index, counted from 0 in the order of the forward pass.
        name: The module that it was found in; empty where it is not known.
        entropy: One value per head, as the next three: ``-sum(p * log(p))`` in nats, which is
            log(keys) where attention is uniform and 0 where it is on one key.
        maximum: The largest probability of a row.
        first: The probability of the first position that is not padding.
        distance: ``sum(p * abs(query - key))`` in positions; None where queries and keys differ in
            number, so that they are not one sequence.
        per_key: The mean probability of each key: a float32 array of shape (heads, keys) whose rows sum
            to one.
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
    """The learning rate of one optimizer, in any form that the optimizer has it."""

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
    """One framework: the core. Stateless: every verb takes the native objects that it works on.

    Optional parts are further protocols of this module that the same object satisfies: ``Weights``,
    ``ParameterCopies``, ``Ranks``, ``HandWrittenLoops``. Optional single verbs are

    - ``batch_shape(batch) -> BatchShape | None``: the shape of a batch's first array, also inside tuples,
      lists and mappings, without a device sync; None where there is no array;
    - ``to_float_later(value) -> Callable[[], float] | None``: begin to copy a scalar, or the mean of a
      larger tensor, to the host, and return the function that waits for that copy alone; None where the
      host has the value already;
    - ``seed(seed)``: seed the framework's random numbers on every device;
    - ``signal_watch(request_stop)``: a replacement for ``dualtrain.signals.SignalWatch``.
    """

    name: str
    """``"torch"``, ``"mindspore"``, ...; also ``str(backend)``."""

    def owns(self, obj: Native) -> bool:
        """Return whether ``obj`` is a network, optimizer or tensor of this framework."""

    def model_class(self) -> Callable[..., Any]:
        """Return the class that ``dt.Model`` builds for this framework's networks."""

    def capabilities(self) -> frozenset[Capability]:
        """Return what the engine can do in its present mode."""

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


@runtime_checkable
class Weights(Protocol):
    """Optional part of a backend: copy and restore a network's weights."""

    def weights(self, network: Native) -> dict[str, Any]:
        """Return a copy of a network's weights and buffers: name -> native tensor, on their device."""

    def assign_weights(self, network: Native, weights: dict[str, Any]) -> None:
        """Assign the result of ``weights``, or numpy arrays, to a network, to continue training from it.

        Works after the first step too, where MindSpore's own ``set_data`` and
        ``load_param_into_net`` freeze PYNATIVE training without a word.

        Raises:
            ArgumentValueError: A name or a shape differs from the network's.
        """


@runtime_checkable
class ParameterCopies(Protocol):
    """Optional part of a backend: measure how far parameters have moved."""

    def copy_parameters(self, parameters: dict[str, Native]) -> dict[str, Native]:
        """Return a copy of each tensor, on its device, or on MindSpore on the host. No sync on PyTorch."""

    def parameter_changes(
        self, before: dict[str, Native], now: dict[str, Native]
    ) -> dict[str, tuple[float, float]]:
        """Return by name the L2 norm of a copied tensor and that of its change since then.

        Half precision is computed in float32. Cost: one pass over the tensors, and on PyTorch one
        device sync for all of them.

        Args:
            before: What ``copy_parameters`` returned; it is overwritten.
            now: The same tensors now; further ones are ignored.
        """


@runtime_checkable
class Ranks(Protocol):
    """Optional part of a backend: the processes that train together. Without it there is one."""

    def rank(self) -> int:
        """Return this process's rank, 0 where nothing is distributed."""

    def world_size(self) -> int:
        """Return the number of processes that train together, 1 where there is one."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank. A collective: call it on all ranks."""


@runtime_checkable
class HandWrittenLoops(Protocol):
    """Optional part of a backend: watch the training step of a loop that the user writes.

    Without it ``dt.Run`` counts the updates that the user reports by ``run.count_update()``.
    """

    def observe(
        self,
        optimizers: Mapping[str, Native],
        *,
        network: Native,
        lr_scheduler: Native,
        asked_for: frozenset[Capability],
    ) -> ObservedStep:
        """Return the step of a run whose loop is the user's.

        Args:
            optimizers: Name -> optimizer; empty where the run has none.
            network: The network, or None.
            lr_scheduler: A schedule that the user's loop steps, or None.
            asked_for: Capabilities that callbacks need or use if available.
        """

    def as_outputs(self, value: Native) -> Native:
        """Return a step's outputs without the graph that they were computed by."""


class Step(Protocol):
    """The training step of a run: the core, which every engine has. One object per run.

    Optional parts are attributes; a step leaves out those that it does not have: ``gradients``
    (``Gradients``), ``parameter_norms`` (``ParameterNorms``), ``accumulation`` (``Accumulation``),
    ``manual`` (``ManualStages``) and ``probing`` (``Probing``). Optional, too: ``begin()``, called when a
    batch begins, and ``__enter__`` and ``__exit__``, called around the run.
    """

    @property
    def learning_rate(self) -> LearningRate | None:
        """The optimizer's learning rate; None where there is no optimizer."""

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run so far."""

    @property
    def is_update_step(self) -> bool:
        """Whether this batch ends a window, so that the optimizer is called."""

    @property
    def step_skipped(self) -> bool:
        """Whether the update of this batch was skipped, because its gradients overflowed, or its loss or
        gradients were not finite in a run with ``Capability.SKIP_NONFINITE``."""


class ObservedStep(Step, Protocol):
    """The step of a hand-written loop, between whose events the user's code updates."""

    capabilities: frozenset[Capability]
    """What this step adds to the run."""

    def count_update(self, gradients: Native, *, skipped: bool) -> None:
        """Count an update that the user reports."""

    def clip(self, max_norm: float) -> None:
        """Scale the gradients so that their global norm is at most ``max_norm``."""


class Gradients(Protocol):
    """Optional part of a step: the gradients of an update.

    It may also have ``grad_norms_later()``, which does for ``(grad_norm, grad_norm_clipped)`` what a
    backend's ``to_float_later`` does for a tensor.
    """

    @property
    def loss_scale(self) -> float | None:
        """The factor that the loss is multiplied by before backward; None without scaling."""

    def grad_norm(self) -> float | None:
        """Return the norm before clipping; None where this batch makes no update. One sync."""

    def grad_norm_clipped(self) -> float | None:
        """Return the norm after clipping; None where this batch makes no update. One sync."""

    def trained_parameters(self) -> dict[str, Native]:
        """Return the network's parameters that an optimizer has and that are not frozen: name -> native."""


class ParameterNorms(Protocol):
    """Optional part of a step: the norm of each parameter's gradient."""

    def request_parameter_grad_norms(self) -> None:
        """Request ``parameter_grad_norms`` for the next update.

        Raises:
            RunStateError: On MindSpore, where no callback of the run needs the capability.
        """

    def parameter_grad_norms(self) -> dict[str, float] | None:
        """Return each trained parameter's gradient norm before clipping. One sync.

        None where this batch makes no update or they were not requested.
        """


class Accumulation(Protocol):
    """Optional part of a step: several batches make one update."""

    accumulate_steps: int
    """Batches per update, from the next window on."""


class ManualStages(Protocol):
    """Optional part of a step: the stages of an update, driven by the user's ``train_step``."""

    def zero_grad(self, optimizer: Native) -> None:
        """Clear the gradients."""

    def backward(self, loss: Native) -> None:
        """Compute gradients."""

    def optimizer_step(self, optimizer: Native) -> None:
        """Unscale, clip and update."""


class Probing(Protocol):
    """Optional part of a step: call the network outside of training, and leave it as it was."""

    def attention(
        self,
        batch: Native,
        samples: int | None,
        function: Callable[[Native, Native], Sequence[Native]] | None,
    ) -> list[AttentionLayer]:
        """Describe the attention of each layer on a batch; see ``RunContext.attention``."""

    def explain_nonfinite(self, batch: Native) -> str:
        """Say, as part of a sentence, where the values of this step stop being finite; "" if unknown.

        Repeats the forward pass of the batch; the network, its buffers and its random numbers
        are restored afterwards.
        """
