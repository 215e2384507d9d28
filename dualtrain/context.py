"""The view of a run that callbacks get: MindSpore's RunContext with typed, framework-neutral properties."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualtrain._lazy import resolve
from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.events import Event
from dualtrain.protocol import STEP_CAPABILITIES, AttentionLayer, Backend, Capability, Native, Rate

RESERVED_NAMES = frozenset(
    {"step", "epoch", "global_step", "mode", "elapsed_sec", "timestamp", "nonfinite"}
)
"""Fields of a log row that ``log`` cannot set."""


class CallbackParams(dict[str, Any]):
    """The parameters of a run: a dict whose items are attributes too, as in MindSpore.

    A missing attribute raises AttributeError, so ``hasattr`` and ``getattr`` with a default
    work (MindSpore's own raises KeyError). The dict is its own ``__dict__``: an attribute
    read costs what it costs on a plain object.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self

    def __deepcopy__(self, memo: dict[int, Any]) -> CallbackParams:
        """Copy every item that can be copied and share the others (loaders, live graphs)."""
        twin = CallbackParams()
        memo[id(self)] = twin
        for key, value in self.items():
            try:
                twin[key] = copy.deepcopy(value, memo)
            except Exception:  # noqa: BLE001 - a native object's copy may raise anything
                twin[key] = value
        return twin

    def __reduce__(self) -> Any:
        return CallbackParams, (dict(self),)


class RunState:
    """The state of a run, which the run writes and its context reads.

    Args:
        params: MindSpore's parameter mapping, kept by reference.
        backend: The backend; None: found from the objects in ``params``.
        step: The training step, in parts (see ``dualtrain.protocol.Step``); None in a lone evaluation.
        capabilities: The capabilities of this run; None: those of the backend that need no step.
        callbacks: The callback list as it was given.
        initial_epoch: Epochs before this run.
        evaluations: How many evaluations the run makes; None: not known.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        backend: Backend | None = None,
        step: Any = None,
        capabilities: frozenset[Capability] | None = None,
        callbacks: Sequence[Any] | None = None,
        initial_epoch: int = 0,
        evaluations: int | None = None,
    ) -> None:
        self.params = params
        self.backend = backend
        self.capabilities = capabilities
        self.callbacks = callbacks
        self.initial_epoch = initial_epoch
        self.evaluations = evaluations
        self.epoch_start: int | None = None
        self.stop_requested = False
        self.stop_reason: str | None = None
        self.raise_after: BaseException | None = None
        self.metrics: Mapping[str, Any] = {}
        self.logged: dict[str, tuple[int, float]] = {}
        self.log_count = 0
        self.callback_times: Mapping[str, float] = {}
        self.deferred: list[Callable[[], None]] = []
        self.use(step)

    def use(self, step: Any) -> None:
        """Take the training step, with the parts that it has."""
        self.step = step
        self.gradients = getattr(step, "gradients", None)
        self.parameter_norms = getattr(step, "parameter_norms", None)
        self.accumulation = getattr(step, "accumulation", None)
        self.manual = getattr(step, "manual", None)
        self.probing = getattr(step, "probing", None)

    def find_backend(self) -> Backend | None:
        """Return the backend, found from the framework's objects where no engine has given it."""
        if self.backend is None:
            registry = registered_backends()
            for key in ("optimizer", "network", "train_network", "net_outputs"):
                self.backend = registry.find_backend(self.params.get(key), missing_ok=True)
                if self.backend is not None:
                    break
        return self.backend

    def remember_metrics(self) -> None:
        """Keep the results of the evaluation that has put them into the parameters."""
        found = self.params.get("eval_results")
        if found is None:
            found = self.params.get("metrics")
        if found is not None:
            self.metrics = found


def registered_backends() -> Any:
    """Return the table of backends: the one reference upwards, by name.

    A run that is given a framework's objects alone has to ask which framework they belong to.
    """
    return resolve("dualtrain.backends")


class RunContext:
    """Information about the run, and the way to stop it.

    Args:
        args: MindSpore's parameter mapping, kept by reference. Enough by itself: without an
            engine the backend is found from the optimizer or network in it, and what is
            unknown reads None.

    Counting follows MindSpore: ``step`` and ``epoch`` start at 1.
    """

    def __init__(self, args: Mapping[str, Any] | RunState) -> None:
        if isinstance(args, RunState):
            self._state = args
        elif isinstance(args, Mapping):
            self._state = RunState(args)
        else:
            raise ArgumentTypeError(
                f"RunContext needs a mapping of parameters, but got {type(args).__name__}."
            )
        self._loss_key: tuple[Any, Any] = (None, self)  # equals no step
        self._loss: float | None = None
        self.event: Event | None = None
        """The event being dispatched."""

    # MindSpore's own four names.

    def original_args(self) -> Any:
        """Return the parameter mapping (``cb_params``), live: the engine changes it in place."""
        return self._state.params

    def request_stop(self, reason: str | None = None, *, raise_after: BaseException | None = None) -> None:
        """End the run in the ordinary way after the current step.

        The evaluation that is due, ``on_train_epoch_end`` and ``on_train_end`` still happen.

        Args:
            reason: Why, for logs and people; the first reason given is kept.
            raise_after: An error to raise from ``train``/``fit`` once the run has ended
                normally. The first one given is kept.

        Raises:
            ArgumentTypeError: ``raise_after`` is not an exception.
        """
        if raise_after is not None and not isinstance(raise_after, BaseException):
            raise ArgumentTypeError(
                f"request_stop(raise_after=...) takes an exception instance, but got {raise_after!r}."
            )
        state = self._state
        state.stop_requested = True
        if state.stop_reason is None:
            state.stop_reason = reason
        if state.raise_after is None:
            state.raise_after = raise_after

    def get_stop_requested(self) -> bool:
        """Return whether a stop has been requested in this run."""
        return self._state.stop_requested

    # Position.

    @property
    def stop_reason(self) -> str | None:
        """The reason given with the first ``request_stop`` that gave one."""
        return self._state.stop_reason

    @property
    def mode(self) -> str | None:
        """``"train"``, or ``"eval"`` during an evaluation, also inside ``fit``."""
        return self._state.params.get("mode")

    @property
    def step(self) -> int:
        """Batches so far, from 1 (``cur_step_num``); in an evaluation the evaluation's batches.

        None in a context without an engine whose mapping has no ``cur_step_num``.
        """
        step: int = self._state.params.get("cur_step_num")  # type: ignore[assignment]
        return step

    @property
    def global_step(self) -> int:
        """Optimizer updates of this run so far; 0 in a lone evaluation.

        None in a context without an engine.
        """
        step = self._state.step
        if step is None:
            return 0 if self.mode == "eval" else None  # type: ignore[return-value]
        count: int = step.global_step
        return count

    @property
    def epoch(self) -> int | None:
        """The epoch, from 1 and absolute (``cur_epoch_num``); None in a lone evaluation."""
        return self._state.params.get("cur_epoch_num")

    @property
    def epochs(self) -> int | None:
        """The epoch at which the run ends, counted as ``epoch`` is; None if it has no end of its own."""
        remaining = self._state.params.get("epoch_num")
        return None if remaining is None else remaining + self._state.initial_epoch

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in an epoch of the present phase; None if the data has no known length."""
        batches = self._state.params.get("batch_num")
        return batches if isinstance(batches, int) else None

    @property
    def step_in_epoch(self) -> int | None:
        """Batches so far in this epoch, from 1."""
        step, begin = self.step, self._state.epoch_start
        if step is None or self.mode == "eval":
            return step
        if begin is not None:
            return step - begin
        batches = self.batches_per_epoch
        return (step - 1) % batches + 1 if batches and step else step

    @property
    def evaluations(self) -> int | None:
        """Evaluations that this run makes if nothing stops it; None where that is not known."""
        return self._state.evaluations

    @property
    def callbacks(self) -> Sequence[Any]:
        """The callback list as it was given (``list_callback`` has MindSpore's own beside them)."""
        given = self._state.callbacks
        return self._state.params.get("list_callback", ()) if given is None else given

    # The engine.

    @property
    def network(self) -> Native:
        """The network, as the framework has it; None where it is not known."""
        return self._state.params.get("network")

    @property
    def optimizer(self) -> Native:
        """The optimizer, or a mapping name -> optimizer; None where there is none."""
        return self._state.params.get("optimizer")

    @property
    def batch(self) -> Native:
        """The current batch: of training, or during an evaluation that of the evaluation."""
        key = "eval_dataset_element" if self.mode == "eval" else "train_dataset_element"
        return self._state.params.get(key)

    @property
    def backend(self) -> Backend | None:
        """The backend that runs; ``str(backend)`` is its name."""
        return self._state.find_backend()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of this run; without an engine those that need no training step."""
        if self._state.capabilities is not None:
            return self._state.capabilities
        backend = self.backend
        return frozenset() if backend is None else backend.capabilities() - STEP_CAPABILITIES

    @property
    def rank(self) -> int:
        """This process's rank; 0 where nothing is distributed."""
        rank = getattr(self.backend, "rank", None)
        return 0 if rank is None else rank()

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        world_size = getattr(self.backend, "world_size", None)
        return 1 if world_size is None else world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which does the input and output that is done once."""
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank. A collective: call it on all ranks.

        Cost: nothing on one rank, else one all-reduce of one number.
        """
        return bool(flag) if self.world_size == 1 else bool(self.backend.any_rank(flag))  # type: ignore[union-attr]

    # Values.

    @property
    def outputs(self) -> Native:
        """The outputs of the step, as it returned them; None before the first step."""
        return self._state.params.get("net_outputs")

    @property
    def loss(self) -> float:
        """The loss of this step; None where the step gave none.

        A vector reads as its mean, a tuple or list as its first item, a mapping as its
        ``"loss"``. Cost: one device sync at the first read in a step, none after it.
        """
        params = self._state.params
        outputs, step = params.get("net_outputs"), params.get("cur_step_num")
        if self._loss_key[0] != step or self._loss_key[1] is not outputs:
            self._loss = self._to_float(outputs)
            self._loss_key = (step, outputs)
        return self._loss  # type: ignore[return-value]

    def loss_later(self) -> Callable[[], float] | None:
        """Begin to read the loss of this step, for a callback that needs it one step later at the earliest.

        Returns:
            A function that returns the value of ``loss``. Called when the next step ends, it hardly waits,
            while a read of ``loss`` leaves the device idle until the host has the number. None where
            nothing is gained: on the CPU, on MindSpore, or if the loss of this step has been read already.

        Cost: a copy into pinned memory, and no device sync.
        """
        params = self._state.params
        outputs = params.get("net_outputs")
        known = self._loss_key[0] == params.get("cur_step_num") and self._loss_key[1] is outputs
        later = None if known else getattr(self.backend, "to_float_later", None)
        value = loss_in(outputs)
        if later is None or value is None or isinstance(value, (int, float)):
            return None
        read: Callable[[], float] | None = later(value)
        return read

    def defer(self, action: Callable[[], None]) -> None:
        """Call an action once, when the next step has ended: before its listeners are called.

        For numbers that a device is copying meanwhile. Where no step follows, the action is called at the
        epoch's end, or on the run's way out.
        """
        self._state.deferred.append(action)

    @property
    def lr(self) -> Rate | None:
        """The learning rate: a float, or a tuple of floats with several parameter groups.

        At step end it is the rate this step used, until a callback changes it. Assigning
        sets the rate from the next update on.
        """
        rate = self._learning_rate()
        return None if rate is None else rate.read()

    @lr.setter
    def lr(self, value: Rate) -> None:
        self._writable_learning_rate().write(value)

    def scale_lr(self, factor: float, min_lr: float = 0.0) -> Rate:
        """Multiply the learning rate, on top of the schedule in force.

        Args:
            factor: Finite and positive.
            min_lr: The floor of the new rate.

        Returns:
            The new rate.
        """
        if not 0 < factor < float("inf") or not min_lr >= 0:
            raise ArgumentValueError(
                f"scale_lr needs a positive finite factor and min_lr >= 0, "
                f"but got factor={factor!r}, min_lr={min_lr!r}."
            )
        rate: Rate = self._writable_learning_rate().scale(factor, min_lr)
        return rate

    @property
    def grad_norm(self) -> float | None:
        """The global L2 norm of this update's gradients: unscaled, before clipping.

        The square root of the sum of squares over all of the optimizer's parameters. None where
        this batch makes no update. Cost: on PyTorch one fused norm and one device sync, only if
        it is read; on MindSpore it is part of the step.

        Raises:
            RunStateError: The norm is not known: on MindSpore, where no callback has
                ``Capability.GRAD_NORM`` in its ``needs`` and ``clip_norm`` is not set; in a hand-written
                loop, where the gradients are gone or were not reported.
        """
        gradients = self._state.gradients
        return None if gradients is None else gradients.grad_norm()

    @property
    def grad_norm_clipped(self) -> float | None:
        """The same norm after clipping; equal to ``grad_norm`` where nothing was clipped."""
        gradients = self._state.gradients
        return None if gradients is None else gradients.grad_norm_clipped()

    def grad_norms_later(self) -> Callable[[], tuple[float | None, float | None]] | None:
        """Begin to read ``(grad_norm, grad_norm_clipped)`` of this update; otherwise as ``loss_later``."""
        later = getattr(self._state.gradients, "grad_norms_later", None)
        return None if later is None else later()

    @property
    def trained_parameters(self) -> dict[str, Native]:
        """The network's parameters that an optimizer has and that are not frozen, by name.

        The native parameters themselves; tied weights are there once, under their first name. Under
        ``torch.compile`` names are those of the network that was compiled. Cost: a walk over the network.
        """
        gradients = self._state.gradients
        return {} if gradients is None else gradients.trained_parameters()

    def request_parameter_grad_norms(self) -> None:
        """Request ``parameter_grad_norms`` for the next update, before that update.

        A request holds until an update has been measured. A callback that makes one has
        ``Capability.PARAMETER_GRAD_NORMS`` in its ``needs``.

        Raises:
            RunStateError: There is no training step, or on MindSpore no callback of the run
                has that capability in its needs: the norms are not compiled into the step.
        """
        if self._state.parameter_norms is None:
            raise RunStateError(
                "parameter_grad_norms are not known in this run: it has no training step that measures the "
                "gradient of each parameter; train with dt.Model."
            )
        self._state.parameter_norms.request_parameter_grad_norms()

    @property
    def parameter_grad_norms(self) -> dict[str, float] | None:
        """The L2 norm of each trained parameter's gradient in this update: unscaled, before clipping.

        By the names of ``trained_parameters``. A missing gradient reads 0.0; any other that is not all
        zeros reads above it. None where this batch makes no update, or nobody has requested them. Under
        manual optimisation the parameters of optimizers that made no update are left out. Cost:
        on PyTorch one pass over the gradients and one device sync in an update for which they are
        requested; on MindSpore they are part of every step of a run that needs them.
        """
        norms = self._state.parameter_norms
        return None if norms is None else norms.parameter_grad_norms()

    @property
    def is_update_step(self) -> bool:
        """Whether this batch ends a window of accumulation; known from the step's end on."""
        step = self._state.step
        return step is not None and bool(step.is_update_step)

    @property
    def step_skipped(self) -> bool:
        """Whether this batch's update was skipped because its gradients overflowed or were not finite."""
        step = self._state.step
        return step is not None and bool(step.step_skipped)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of mixed precision; None without one. Cost: one sync."""
        gradients = self._state.gradients
        return None if gradients is None else gradients.loss_scale

    @property
    def accumulate_steps(self) -> int:
        """Batches per update. Assign it in ``on_train_epoch_begin``, for the epochs from there on."""
        accumulation = self._state.accumulation
        return 1 if accumulation is None else accumulation.accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        accumulation = self._state.accumulation
        if Capability.ACCUMULATION not in self.capabilities:
            raise RunStateError("This run cannot accumulate gradients, so accumulate_steps cannot be set.")
        if accumulation is None:
            raise RunStateError(
                "accumulate_steps can be set only if the callback that sets it has Capability.ACCUMULATION "
                "in its needs, since the step is chosen for it at train begin."
            )
        accumulation.accumulate_steps = positive_int("RunContext", "accumulate_steps", value)

    def attention(
        self,
        samples: int | None = 8,
        function: Callable[[Native, Native], Sequence[Native]] | None = None,
    ) -> list[AttentionLayer]:
        """Describe the attention of each layer on the current training batch.

        It is computed by a forward pass of its own: in evaluation mode, without gradient, not compiled,
        with random state, buffers, frozen parameters and the modules' attributes restored afterwards. So
        training continues as without it, unless the network, hooks on it or ``train_step`` change objects
        outside of the network, such as a global list. The weights are the present ones: at
        ``on_train_step_begin``
        those that the step is about to use.

        Args:
            samples: How many samples of the batch are used, the first ones; None: all. Batches
                whose arrays differ along their first dimension are used whole.
            function: ``function(network, batch)`` that returns each layer's probabilities, of shape
                (samples, heads, queries, keys), for a network whose attention is not found by itself.

        Returns:
            The layers, in the order of the forward pass; empty where there is no attention.

        Raises:
            RunStateError: There is no training batch, or the engine cannot call the network by itself.

        Cost: a forward pass over ``samples`` samples, the probabilities of a few rows at a time, a copy
        of buffers and frozen parameters meanwhile, and one device sync (one for each of those copies).
        """
        batch = self._state.params.get("train_dataset_element")
        if batch is None:
            raise RunStateError("attention() needs a batch of training: call it in a step's event.")
        if self._state.probing is None:
            raise RunStateError(
                "attention() needs an engine that can call the network outside of the training step, which "
                "this run does not have: train with dt.Model."
            )
        layers: list[AttentionLayer] = self._state.probing.attention(batch, samples, function)
        return layers

    # Stages of a step, for a train_step under automatic_optimization=False.

    def zero_grad(self, optimizer: Native = None) -> None:
        """Clear an optimizer's gradients.

        Args:
            optimizer: The optimizer or its name in the Model's mapping; None: the only one.
        """
        self._manual_stages().zero_grad(optimizer)

    def backward(self, loss: Native) -> None:
        """Compute the gradients of a loss, scaled where mixed precision scales it."""
        self._manual_stages().backward(loss)

    def optimizer_step(self, optimizer: Native = None) -> None:
        """Unscale an optimizer's gradients, clip them if the Model has ``clip_norm``, and update."""
        self._manual_stages().optimizer_step(optimizer)

    def explain_nonfinite(self) -> str:
        """Say, as part of a sentence, where the values of this training step stop being finite.

        That is the first module whose output is not finite, or the parameters whose gradients are not;
        "" where it is not known. In a distributed run call it on all ranks.

        Cost: one more forward pass of this batch, with a device sync for each module. The network, its
        buffers and its random numbers are restored.
        """
        probing = self._state.probing
        batch = self._state.params.get("train_dataset_element")
        return "" if probing is None else str(probing.explain_nonfinite(batch))

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The results of the last evaluation; empty before the first."""
        self._state.remember_metrics()
        return self._state.metrics

    def log(self, name: str, value: float) -> None:
        """Record a number with every logging callback of the run.

        It goes into the row being written or, for a logger that has already run at this
        step, into its next row; of several values for one name the last one wins.

        Args:
            name: A column name, other than the fields that every row has.
            value: A number, or a scalar tensor (read at once: one device sync).
        """
        if not isinstance(name, str) or name in RESERVED_NAMES:
            raise ArgumentValueError(
                f"log() needs a name other than {', '.join(sorted(RESERVED_NAMES))}, but got {name!r}."
            )
        try:
            # torch warns when a tensor that still has a gradient is read as a number
            number = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"log({name!r}, ...) takes a number or a scalar tensor, "
                f"but got {type(value).__name__}: {error}"
            ) from error
        self._state.log_count += 1
        self._state.logged[name] = (self._state.log_count, number)

    @property
    def callback_times(self) -> Mapping[str, float]:
        """Class name -> seconds that the hooks of callbacks of that class have taken in this run so far.

        Empty where no callback of the run needs ``Capability.CALLBACK_TIMES``. A hook counts when it
        has returned. Callbacks that MindSpore ships are not measured.
        """
        return self._state.callback_times

    def logged_since(self, mark: int) -> tuple[int, dict[str, float]]:
        """Return the values logged after ``mark``, and the mark to pass next time (0 at first)."""
        count = self._state.log_count
        if mark == count:
            return mark, {}
        return count, {name: value for name, (at, value) in self._state.logged.items() if at > mark}

    def _manual_stages(self) -> Any:
        if self._state.manual is None:
            raise RunStateError(
                "zero_grad, backward and optimizer_step are for Models with automatic_optimization=False: "
                "here the Model itself drives them."
            )
        return self._state.manual

    def _learning_rate(self) -> Any:
        if self._state.step is not None:
            return self._state.step.learning_rate
        optimizer, backend = self.optimizer, self.backend
        return None if optimizer is None or backend is None else backend.learning_rate(optimizer)

    def _writable_learning_rate(self) -> Any:
        rate = self._learning_rate()
        if rate is None:
            raise RunStateError("There is no optimizer in this run, so no learning rate to set.")
        return rate

    def _to_float(self, outputs: Native) -> float | None:
        value = loss_in(outputs)
        if value is None or isinstance(value, (int, float)):
            return None if value is None else float(value)
        backend = self._state.backend or self.backend
        return float(value.mean()) if backend is None else backend.to_float(value)


def loss_in(outputs: Native) -> Native:
    """Return the loss in a step's outputs: the outputs, a mapping's ``"loss"``, a tuple's first item."""
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if outputs else None
    if hasattr(outputs, "shape"):  # a tensor, the usual case: whether it is a Mapping is slow to see
        return outputs
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
