"""What a callback is handed: MindSpore's RunContext with typed, framework-neutral properties."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualtrain._lazy import resolve
from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.events import Event
from dualtrain.protocol import AttentionLayer, Backend, Capability, Native, Rate, Step

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
            except Exception:  # noqa: BLE001 - whatever a native object's copy may raise
                twin[key] = value
        return twin

    def __reduce__(self) -> Any:
        return CallbackParams, (dict(self),)


class RunContext:
    """Information about the run at hand, and the way to stop it.

    Args:
        args: MindSpore's parameter mapping, kept by reference. Enough by itself: without an
            engine the backend is found from the optimizer or network in it, and what is
            unknown reads None.

    Counting follows MindSpore: ``step`` and ``epoch`` start at 1.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        *,
        backend: Backend | None = None,
        step: Step | None = None,
        initial_epoch: int = 0,
        capabilities: frozenset[Capability] | None = None,
        callbacks: Sequence[Any] | None = None,
        evaluations: int | None = None,
    ) -> None:
        if not isinstance(args, Mapping):
            raise ArgumentTypeError(
                f"RunContext needs a mapping of parameters, but got {type(args).__name__}."
            )
        self._args = args
        self._backend = backend
        self._step = step
        self._initial_epoch = initial_epoch
        self._capabilities = capabilities
        self._callbacks = callbacks
        self._evaluations = evaluations
        self._epoch_start: int | None = None
        self._stop_requested = False
        self._stop_reason: str | None = None
        self._raise_after: BaseException | None = None
        self._metrics: Mapping[str, Any] = {}
        self._logged: dict[str, tuple[int, float]] = {}
        self._log_count = 0
        self._callback_times: Mapping[str, float] = {}
        self._deferred: deque[Callable[[], None]] = deque()
        self._loss_key: tuple[Any, Any] = (None, self)  # equals no step
        self._loss: float | None = None
        self.event: Event | None = None
        """The event being dispatched."""

    # MindSpore's own four names.

    def original_args(self) -> Any:
        """Return the parameter mapping (``cb_params``), live: the engine changes it in place."""
        return self._args

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
        self._stop_requested = True
        if self._stop_reason is None:
            self._stop_reason = reason
        if self._raise_after is None:
            self._raise_after = raise_after

    def get_stop_requested(self) -> bool:
        """Tell whether a stop has been requested in this run."""
        return self._stop_requested

    # Where the run is.

    @property
    def stop_reason(self) -> str | None:
        """The reason given with the first ``request_stop`` that gave one."""
        return self._stop_reason

    @property
    def mode(self) -> str | None:
        """``"train"``, or ``"eval"`` during an evaluation, also inside ``fit``."""
        return self._args.get("mode")

    @property
    def step(self) -> int | None:
        """Batches so far, from 1 (``cur_step_num``); in evaluation the evaluation's batches."""
        return self._args.get("cur_step_num")

    @property
    def global_step(self) -> int | None:
        """Optimizer updates of this run so far; 0 in a lone evaluation."""
        if self._step is None:
            return 0 if self.mode == "eval" else None
        return self._step.global_step

    @property
    def epoch(self) -> int | None:
        """The epoch, from 1 and absolute (``cur_epoch_num``); None in a lone evaluation."""
        return self._args.get("cur_epoch_num")

    @property
    def epochs(self) -> int | None:
        """The epoch at which the run ends, counted as ``epoch`` is."""
        remaining = self._args.get("epoch_num")
        return None if remaining is None else remaining + self._initial_epoch

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in an epoch of the phase at hand; None if the data has no known length."""
        batches = self._args.get("batch_num")
        return batches if isinstance(batches, int) else None

    @property
    def step_in_epoch(self) -> int | None:
        """Batches so far in this epoch, from 1."""
        step = self.step
        if step is None or self.mode == "eval":
            return step
        if self._epoch_start is not None:
            return step - self._epoch_start
        batches = self.batches_per_epoch
        return (step - 1) % batches + 1 if batches and step else step

    @property
    def evaluations(self) -> int | None:
        """Evaluations that this run makes if nothing stops it; None where that is not known."""
        return self._evaluations

    @property
    def callbacks(self) -> Sequence[Any]:
        """The run's callbacks, as they were listed (``list_callback`` has MindSpore's own beside them)."""
        return self._args.get("list_callback", ()) if self._callbacks is None else self._callbacks

    # The engine.

    @property
    def backend(self) -> Backend | None:
        """The backend that runs, ``str(backend)`` being its name."""
        if self._backend is None:
            # The one reference upwards, by name: a context may be used without an engine,
            # and then has to ask which framework its objects belong to.
            find_backend = resolve("dualtrain.backends:find_backend")
            for key in ("optimizer", "network", "train_network", "net_outputs"):
                self._backend = find_backend(self._args.get(key), missing_ok=True)
                if self._backend is not None:
                    break
        return self._backend

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the engine can do in this run."""
        if self._capabilities is None:
            backend = self.backend
            return frozenset() if backend is None else backend.capabilities()
        return self._capabilities

    @property
    def rank(self) -> int:
        """This process's rank; 0 where nothing is distributed."""
        backend = self.backend
        return 0 if backend is None else backend.rank()

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        backend = self.backend
        return 1 if backend is None else backend.world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which does the input and output that is done once."""
        return self.rank == 0

    # Values.

    @property
    def outputs(self) -> Native:
        """What the step returned, untouched; None before the first step."""
        return self._args.get("net_outputs")

    @property
    def loss(self) -> float | None:
        """The loss of this step.

        A vector reads as its mean, a tuple or list as its first item, a mapping as its
        ``"loss"``. Cost: one device sync at the first read in a step, none after it.
        """
        outputs = self._args.get("net_outputs")
        step = self._args.get("cur_step_num")
        if self._loss_key[0] != step or self._loss_key[1] is not outputs:
            self._loss = self._to_float(outputs)
            self._loss_key = (step, outputs)
        return self._loss

    def loss_later(self) -> Callable[[], float] | None:
        """Begin to read the loss of this step, for a callback that does not need it before the next one.

        Returns:
            A function that returns what ``loss`` is. Called when the next step ends, it hardly waits, while
            to read ``loss`` leaves the device without work until the host has it. None where nothing is
            gained: on the CPU, on MindSpore, or if the loss of this step has been read already.

        Cost: a copy into pinned memory, and no device sync.
        """
        outputs = self._args.get("net_outputs")
        known = self._loss_key[0] == self._args.get("cur_step_num") and self._loss_key[1] is outputs
        later = None if known else getattr(self.backend, "to_float_later", None)
        value = _loss_in(outputs)
        if later is None or value is None or isinstance(value, (int, float)):
            return None
        read: Callable[[], float] | None = later(value)
        return read

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
        """Multiply the learning rate, on top of whatever schedule is in force.

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
            RunStateError: On MindSpore, where no callback has ``Capability.GRAD_NORM`` in its
                ``needs`` and ``clip_norm`` is not set: the norm is not computed.
        """
        return None if self._step is None else self._step.grad_norm()

    @property
    def grad_norm_clipped(self) -> float | None:
        """The same norm after clipping; equal to ``grad_norm`` where nothing was clipped."""
        return None if self._step is None else self._step.grad_norm_clipped()

    def grad_norms_later(self) -> Callable[[], tuple[float | None, float | None]] | None:
        """Begin to read ``(grad_norm, grad_norm_clipped)`` of this update; otherwise as ``loss_later``."""
        later = getattr(self._step, "grad_norms_later", None)
        return None if later is None else later()

    @property
    def trained_parameters(self) -> dict[str, Native]:
        """The network's parameters that an optimizer has and that are not frozen, by name.

        The native parameters themselves; tied weights are there once, under their first name. Under
        ``torch.compile`` names are those of the network that was compiled. Cost: a walk over the network.
        """
        return {} if self._step is None else self._step.trained_parameters()

    def request_parameter_grad_norms(self) -> None:
        """Ask, before an update, for ``parameter_grad_norms`` at its step end.

        A request holds until an update has been measured. A callback that makes one has
        ``Capability.PARAMETER_GRAD_NORMS`` in its ``needs``.

        Raises:
            RunStateError: There is no training step to ask, or on MindSpore no callback of the run
                has that capability in its needs: the norms are not compiled into the step.
        """
        if self._step is None:
            raise RunStateError("There is no training step in this run, so no gradients to measure.")
        self._step.request_parameter_grad_norms()

    @property
    def parameter_grad_norms(self) -> dict[str, float] | None:
        """The L2 norm of each trained parameter's gradient in this update: unscaled, before clipping.

        By the names of ``trained_parameters``. A missing gradient reads 0.0; any other that is not all
        zeros reads above it. None where this batch makes no update, or nobody has requested them. Under
        manual optimisation the parameters of optimizers that made no update are left out. Cost:
        on PyTorch one pass over the gradients and one device sync in an update for which they are
        requested; on MindSpore they are part of every step of a run that needs them.
        """
        return None if self._step is None else self._step.parameter_grad_norms()

    @property
    def is_update_step(self) -> bool:
        """Whether this batch ends a window of accumulation; known from the step's end on."""
        return self._step is not None and self._step.is_update_step

    @property
    def step_skipped(self) -> bool:
        """Whether this batch's update was skipped because its gradients overflowed or were not finite."""
        return self._step is not None and self._step.step_skipped

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of mixed precision; None without one. Cost: one sync."""
        return None if self._step is None else self._step.loss_scale

    @property
    def accumulate_steps(self) -> int:
        """Batches per update. Assign it in ``on_train_epoch_begin``, for the epochs from there on."""
        return 1 if self._step is None else self._step.accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        if self._step is None or Capability.ACCUMULATION not in self.capabilities:
            raise RunStateError("This run cannot accumulate gradients, so accumulate_steps cannot be set.")
        self._step.accumulate_steps = positive_int("RunContext", "accumulate_steps", value)

    def attention(
        self,
        samples: int | None = 8,
        function: Callable[[Native, Native], Sequence[Native]] | None = None,
    ) -> list[AttentionLayer]:
        """Describe the attention of each layer on the training batch at hand.

        It is taken from a forward pass of its own: in evaluation mode, without gradient, with
        random state, buffers, frozen parameters and the modules' attributes put back afterwards, and not
        compiled. So training goes on as if nothing had been looked at, unless the network, hooks on it
        or ``train_step`` change what is not theirs, such as a global list. The weights are those of the
        moment: at ``on_train_step_begin`` the ones that the step is about to use.

        Args:
            samples: How many samples of the batch are taken, the first ones; None: all. Batches
                whose arrays differ along their first dimension are taken whole.
            function: ``function(network, batch)`` that returns each layer's probabilities, of shape
                (samples, heads, queries, keys), for a network whose attention is not found by itself.

        Returns:
            The layers, in the order of the forward pass; empty where there is no attention.

        Raises:
            RunStateError: There is no training batch, or the engine cannot call the network alone.

        Cost: a forward pass over ``samples`` samples, the probabilities of a few rows at a time, a copy
        of buffers and frozen parameters meanwhile, and one device sync (one for each of those copies).
        """
        if self._step is None or self._args.get("train_dataset_element") is None:
            raise RunStateError("attention() needs a batch of training: call it in a step's event.")
        return self._step.attention(samples, function)

    # Stages of a step, for a train_step under automatic_optimization=False.

    def zero_grad(self, optimizer: Native = None) -> None:
        """Clear an optimizer's gradients.

        Args:
            optimizer: The optimizer or its name in the Model's mapping; None: the only one.
        """
        self._manual_step().zero_grad(optimizer)

    def backward(self, loss: Native) -> None:
        """Compute the gradients of a loss, scaled where mixed precision scales it."""
        self._manual_step().backward(loss)

    def optimizer_step(self, optimizer: Native = None) -> None:
        """Unscale an optimizer's gradients, clip them if the Model has ``clip_norm``, and update."""
        self._manual_step().optimizer_step(optimizer)

    def explain_nonfinite(self) -> str:
        """Say, as part of a sentence, where the values of this training step stop being finite.

        That is the first module whose output is not finite, or the parameters whose gradients are not;
        "" where it is not known. In a distributed run call it on all ranks.

        Cost: one more forward pass of this batch, with a device sync for each module. The network, its
        buffers and its random numbers are left as they were.
        """
        return (
            "" if self._step is None else self._step.explain_nonfinite(self._args["train_dataset_element"])
        )

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The results of the last evaluation; empty before the first."""
        self._remember_metrics()
        return self._metrics

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
        self._log_count += 1
        self._logged[name] = (self._log_count, number)

    @property
    def callback_times(self) -> Mapping[str, float]:
        """Class name -> seconds that the hooks of callbacks of that class have taken in this run so far.

        Empty where no callback of the run asks for ``Capability.CALLBACK_TIMES``. A hook counts when it
        has returned. Callbacks that MindSpore ships are not measured.
        """
        return self._callback_times

    def logged_since(self, mark: int) -> tuple[int, dict[str, float]]:
        """Return what was logged after ``mark``, and the mark to pass next time (0 at first)."""
        if mark == self._log_count:
            return mark, {}
        news = {name: value for name, (count, value) in self._logged.items() if count > mark}
        return self._log_count, news

    def defer(self, action: Callable[[], None]) -> None:
        """Call ``action`` once when the next step has ended, at the epoch's end, or on the way out."""
        self._deferred.append(action)

    # For engines.

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def _stop_as_agreed(self) -> None:
        """Note a stop that the ranks have agreed on."""
        if not self._stop_requested:
            self.request_stop("another rank requested it")

    def _begin_epoch(self) -> None:
        self._epoch_start = self._args["cur_step_num"]

    def _remember_metrics(self) -> None:
        found = self._args.get("eval_results")
        if found is None:
            found = self._args.get("metrics")
        if found is not None:
            self._metrics = found

    def _manual_step(self) -> Step:
        if self._step is None or Capability.MANUAL_OPTIMIZATION not in self.capabilities:
            raise RunStateError(
                "zero_grad, backward and optimizer_step are for Models with automatic_optimization=False: "
                "here the Model itself drives them."
            )
        return self._step

    def _learning_rate(self) -> Any:
        if self._step is not None:
            return self._step.learning_rate
        optimizer = self._args.get("optimizer")
        backend = self.backend
        if optimizer is None or backend is None:
            return None
        return backend.learning_rate(optimizer)

    def _writable_learning_rate(self) -> Any:
        rate = self._learning_rate()
        if rate is None:
            raise RunStateError("There is no optimizer in this run, so no learning rate to set.")
        return rate

    def _to_float(self, outputs: Native) -> float | None:
        value = _loss_in(outputs)
        if value is None or isinstance(value, (int, float)):
            return None if value is None else float(value)
        backend = self.backend
        return float(value.mean()) if backend is None else backend.to_float(value)


def _loss_in(outputs: Native) -> Native:
    """The loss in what a step returned: itself, a mapping's ``"loss"``, a tuple's first item."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, (tuple, list)):
        return outputs[0] if outputs else None
    return outputs
