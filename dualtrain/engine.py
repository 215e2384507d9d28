"""The state of a run and the verbs that drive it: for engines, and for adapters to other trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dualtrain.bus import Dispatch, EventBus, attempt
from dualtrain.context import CallbackParams, RunContext, RunState, registered_backends
from dualtrain.events import Event
from dualtrain.lifecycle import Lifecycle
from dualtrain.protocol import STEP_CAPABILITIES, Backend, Capability
from dualtrain.signals import EXIT_CODE, SignalWatch

_TRAINING_KEYS = (
    *("network", "train_network", "loss_fn", "optimizer", "batch_num", "train_dataset"),
    *("train_dataset_element", "initial_step", "last_save_ckpt_step", "latest_ckpt_file"),
    "loss_scale_mananger",  # MindSpore's spelling
)


class RunEngine:
    """Count, dispatch and end a run, by the verbs that its driver calls.

    State and dispatch are apart. For each event the driver calls the verb that changes the state, then
    ``emit``, and after a step or an epoch ``should_stop``::

        with engine:                                  # open() and close()
            engine.begin()
            engine.emit(Event.TRAIN_BEGIN)
            for number in ...:
                engine.begin_epoch(number)
                engine.emit(Event.TRAIN_EPOCH_BEGIN)
                ...

    Args:
        callbacks: One callback, a list or tuple of them, or None.
        listed: The callback list as the user gave it, where it has a framework's own callbacks too.
        params: The first values of the parameter bag (``original_args()``).
        backend: The backend; None: found from the network or optimizer in ``params``.
        step: The training step, in parts; None where there is none.
        capabilities: The capabilities of the run; None: those of the backend that need no step, those of
            ``step.capabilities``, and the measuring of callbacks.
        mode: The engine in words, for messages; None: the backend's own words.
        epochs: The epoch at which the run ends; None: not known.
        initial_epoch: Epochs before this run.
        evaluations: How many evaluations the run makes; None: not known.
        max_steps: Request a stop after so many batches of this run; None: no limit.
        handle_signals: Whether SIGTERM requests a stop.

    Raises:
        ArgumentTypeError, UnknownEventError: Something in the list is not a callback.
    """

    def __init__(
        self,
        callbacks: Any = None,
        *,
        listed: Sequence[Any] | None = None,
        params: dict[str, Any] | None = None,
        backend: Backend | None = None,
        step: Any = None,
        capabilities: frozenset[Capability] | None = None,
        mode: str | None = None,
        epochs: int | None = None,
        initial_epoch: int = 0,
        evaluations: int | None = None,
        max_steps: int | None = None,
        handle_signals: bool = True,
    ) -> None:
        self.bus = EventBus(callbacks, native_bases=registered_backends().callback_bases())
        self._params = CallbackParams(params or {})
        self._state = RunState(
            self._params,
            backend=backend,
            callbacks=self.bus.callbacks if listed is None else listed,
            initial_epoch=initial_epoch,
            evaluations=evaluations,
        )
        backend = self._state.find_backend()
        if capabilities is None:
            own = frozenset() if backend is None else backend.capabilities() - STEP_CAPABILITIES
            capabilities = own | {Capability.CALLBACK_TIMES}
        self._state.capabilities = self._capabilities = capabilities
        if self.bus.callback_times is not None:
            self._state.callback_times = self.bus.callback_times
        self.context = RunContext(self._state)
        self._mode = mode or (backend.describe_mode() if backend is not None else "this run")
        self._epochs, self._initial_epoch = epochs, initial_epoch
        self._last_step = float("inf") if max_steps is None else max_steps
        self._counts = True
        self._training_values: dict[str, Any] | None = None
        self._stopped_before_evaluation = False
        any_rank = getattr(backend, "any_rank", None)
        self._any_rank: Callable[[bool], bool] | None = any_rank if self.context.world_size > 1 else None
        watch = getattr(backend, "signal_watch", SignalWatch)
        self._signals: Any = watch(self.context.request_stop) if handle_signals else None
        self._retake: Callable[[], None] | None = getattr(self._signals, "retake", None)
        self._begin_batch: Callable[[], None] | None = None
        self.use(step)
        self._lifecycle = Lifecycle(self.bus, self.context)

    # The whole of a run.

    def use(self, step: Any) -> None:
        """Take the training step, before the run is opened, and add ``step.capabilities`` to the run's."""
        self._state.use(step)
        self._state.capabilities = self._capabilities | getattr(step, "capabilities", frozenset())
        self._begin_batch = getattr(step, "begin", None)

    def adopt(self, params: Any) -> None:
        """Take over the parameter bag of an engine that counts by itself (MindSpore's Model)."""
        self._counts = False
        self._state.params = self._params = params

    def open(self) -> None:
        """Check the needs of callbacks, and enter them.

        Raises:
            RunStateError: The run is open or has ended, or a callback is in another open run.
            CapabilityError: A callback needs a capability that the run does not have.
        """
        stages = (self._signals, self._state.step)
        check = partial(self.bus.check_needs, self.context.capabilities, self._mode)
        self._lifecycle.enter(stages, check)

    def close(self, error: BaseException | None = None) -> BaseException | None:
        """Leave the run, for every way in which it can end. Never raises.

        An error goes to ``on_exception`` first; then comes ``on_teardown`` in reverse order, then each
        ``__exit__`` in reverse order. A run without an error ends by ``SystemExit(143)`` after a SIGTERM,
        else by the error of ``request_stop(raise_after=...)``.

        Args:
            error: The error that has ended the run, if any.

        Returns:
            The error to raise: the given one, with notes about failures on the way out; None for none.
        """
        while self._lifecycle.is_open and self._state.deferred:
            error = attempt(error, "a deferred action", self._state.deferred.pop(0))
        return self._lifecycle.leave(error, self._ending)

    def _ending(self) -> BaseException | None:
        if getattr(self._signals, "terminated", False):
            return SystemExit(EXIT_CODE)
        return self._state.raise_after

    def __enter__(self) -> RunEngine:
        was_open = self._lifecycle.is_open
        try:
            self.open()
        except BaseException as error:
            if not was_open:  # else this is a second call, and the open run continues
                self._raise(self.close(error), error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._raise(self.close(error), error)

    @staticmethod
    def _raise(error: BaseException | None, known: BaseException | None) -> None:
        """Raise an error, unless it is the one that is being raised already."""
        if error is not None and error is not known:
            try:
                raise error
            finally:
                del error, known  # no reference cycle through this frame

    # Dispatch.

    def part(self, callbacks: Sequence[Any]) -> Dispatch:
        """Return the part of the callback list that ``emit`` takes: callbacks between two native ones."""
        return self.bus.part(callbacks)

    def emit(self, event: Event, part: Dispatch | None = None) -> None:
        """Call the listeners of an event, in list order; with ``part`` those of a part of the list."""
        (self.bus if part is None else part).emit(event, self.context)

    def emitter(self, event: Event, part: Dispatch | None = None) -> Callable[[], None] | None:
        """Return the function that emits an event, for loops; None where it has no listener."""
        emit = (self.bus if part is None else part).emitter(event)
        return None if emit is None else partial(emit, self.context)

    def should_stop(self) -> bool:
        """Return whether to stop after the step, epoch or evaluation step that has ended.

        A stop that was requested before an evaluation does not cut that short. In training all ranks agree:
        call it on every rank, after the last part. Cost: on several ranks one all-reduce.
        """
        state = self._state
        if self._any_rank is None and not self._stopped_before_evaluation:
            return state.stop_requested
        if state.params.get("mode") == "eval":
            return state.stop_requested and not self._stopped_before_evaluation
        if self._any_rank is not None and self._any_rank(state.stop_requested) and not state.stop_requested:
            self.context.request_stop("another rank requested it")
        return state.stop_requested

    # Training.

    def begin(self) -> None:
        """Begin training: no step has been taken."""
        params, epochs = self._params, self._epochs
        world_size = self.context.world_size
        params.update(mode="train", cur_step_num=0)
        params.setdefault("epoch_num", None if epochs is None else epochs - self._initial_epoch)
        for key in _TRAINING_KEYS:
            params.setdefault(key, None)
        params["list_callback"] = self.bus.callbacks
        params.setdefault("parallel_mode", "stand_alone" if world_size == 1 else "data_parallel")
        params.setdefault("device_number", world_size)
        params.setdefault("dataset_sink_mode", False)

    def begin_epoch(self, number: int) -> None:
        """Begin an epoch, counted from 1."""
        self.leave_evaluation()
        self._forget_results()
        if self._counts:
            self._params["cur_epoch_num"] = number
        self._state.epoch_start = self._params["cur_step_num"]

    def begin_step(self, batch: Any = None) -> None:
        """Begin a training step on a batch."""
        if self._training_values is not None:
            self.leave_evaluation()
        if self._counts:
            params = self._params
            params["cur_step_num"] += 1
            params["train_dataset_element"] = batch
        if self._retake is not None:
            self._retake()
        if self._begin_batch is not None:
            self._begin_batch()

    def end_step(self, outputs: Any = None) -> None:
        """End a training step, with its outputs, detached."""
        params = self._params
        if self._counts:
            params["net_outputs"] = outputs
        if self._retake is not None:
            self._retake()
        if self._state.deferred:
            self._call_deferred()
        if params["cur_step_num"] >= self._last_step:
            self.context.request_stop(f"max_steps={self._last_step} is reached")

    def end_epoch(self) -> None:
        """End an epoch, its evaluation included; results stay readable until the next verb of training."""
        self.leave_evaluation()
        self._call_deferred()

    def end(self) -> None:
        """End training in the ordinary way."""
        self.leave_evaluation()
        self._call_deferred()
        self._forget_results()

    # Evaluation, inside of training or alone.

    def begin_evaluation(self, batches: int | float | None = None, **params: Any) -> None:
        """Begin an evaluation: the counters of training are kept until it has been left.

        Args:
            batches: The number of its batches; None: not known.
            **params: Further values for the parameter bag, such as ``valid_dataset``.
        """
        self.leave_evaluation()
        self._call_deferred()
        self._stopped_before_evaluation = self._state.stop_requested
        if not self._counts:
            return
        bag = self._params
        if bag.get("mode") == "train":
            self._training_values = {
                key: bag.get(key) for key in ("cur_step_num", "batch_num", "net_outputs")
            }
        else:
            bag["list_callback"] = self.bus.callbacks
            for key in ("dataset_sink_mode", "network", "eval_network", "valid_dataset"):
                bag.setdefault(key, False if key == "dataset_sink_mode" else None)
        bag.update(mode="eval", cur_step_num=0, batch_num=batches, **params)

    def begin_eval_step(self, batch: Any = None) -> None:
        """Begin an evaluation step on a batch."""
        if self._counts:
            self._params["cur_step_num"] += 1
            self._params["eval_dataset_element"] = batch
        if self._retake is not None:
            self._retake()

    def end_eval_step(self, outputs: Any = None) -> None:
        """End an evaluation step, with its outputs, detached."""
        if self._counts:
            self._params["net_outputs"] = outputs
        if self._retake is not None:
            self._retake()

    def end_evaluation(
        self, metrics: dict[str, Any] | None = None, *, eval_loss: float | None = None
    ) -> None:
        """End an evaluation with its results, after ``on_eval_epoch_end`` and before ``on_eval_end``.

        Args:
            metrics: Name -> result; None: they are in the adopted bag.
            eval_loss: The mean loss, for ``eval_results`` of an evaluation inside of training.
        """
        if metrics is not None:
            self._params["metrics"] = metrics
            if self._training_values is not None:
                loss = {} if eval_loss is None else {"eval_loss": eval_loss}
                self._params["eval_results"] = {**metrics, **loss}
        self._state.remember_metrics()

    def leave_evaluation(self) -> None:
        """Restore the counters of training after ``on_eval_end``. The next verb of training does it too."""
        if self._training_values is not None:
            self._params.update(self._training_values, mode="train")
            self._training_values = None

    def _forget_results(self) -> None:
        if self._counts:
            self._params.pop("metrics", None)
            self._params.pop("eval_results", None)

    def _call_deferred(self) -> None:
        deferred = self._state.deferred
        while deferred:
            deferred.pop(0)()
