"""``dt.Run``: a run that the user's own loop drives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.context import RunContext, RunState, registered_backends
from dualtrain.counted_step import CountedStep
from dualtrain.engine import RunEngine
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.evaluation import Evaluation, length_of, steps_over
from dualtrain.events import Event
from dualtrain.protocol import Backend, Capability, Native


class Run:
    """Drive callbacks from a loop of your own.

    >>> with dt.Run(callbacks, network=net, optimizer=optimizer, epochs=3) as run:  # doctest: +SKIP
    ...     for epoch in run.epochs():
    ...         for x, y in run.batches(loader):
    ...             optimizer.zero_grad()
    ...             loss = loss_fn(net(x), y)
    ...             loss.backward()
    ...             optimizer.step()
    ...             run.outputs = loss

    ``with`` emits ``on_train_begin`` and ``on_train_end`` around its body; an error in it goes to
    ``on_exception``. A requested stop ends the iteration over batches and epochs. A step or epoch that
    the loop leaves by ``break`` is ended by the next verb, or at the end of ``with``. The network's mode
    is the loop's business.

    Updates, the learning rate and gradient norms are known through the optimizer: on PyTorch by its
    hooks, on MindSpore by its step counter and ``count_update(gradients)``. There are no gradient events,
    no accumulation and no skipping here: a callback that needs one is refused when the run is entered.

    Args:
        callbacks: One callback, a list or a tuple.
        network: The network, for callbacks that read or restore its weights.
        optimizer: The optimizer, or a mapping name -> optimizer (as for a GAN).
        loss_fn: The loss function, for callbacks that look at it.
        lr_scheduler: The schedule that the loop steps, so that ``scale_lr`` works on top of it. PyTorch.
        epochs: The epoch to end at; None: until a stop, or until the loop breaks.
        batches_per_epoch: Batches per epoch, if known; None: the length of the loader, once it is given.
        initial_epoch: Epochs before this run; the first one is the one after.
        evaluations: How many evaluations the loop makes, if known.
        backend: The backend or its name; None: found from the network or the optimizer.
        handle_signals: Whether SIGTERM requests a stop at the end of the current step. The process then
            ends with status 143. A second SIGTERM, and Ctrl-C, end the run at once.
        max_steps: Request a stop after so many batches.
        limit_batches: Use at most so many batches per epoch and per evaluation, for a dry run.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument cannot be used.
    """

    def __init__(
        self,
        callbacks: Any = None,
        *,
        network: Native = None,
        optimizer: Native = None,
        loss_fn: Any = None,
        lr_scheduler: Native = None,
        epochs: int | None = None,
        batches_per_epoch: int | None = None,
        initial_epoch: int = 0,
        evaluations: int | None = None,
        backend: str | Backend | None = None,
        handle_signals: bool = True,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        counts = {"max_steps": max_steps, "limit_batches": limit_batches}
        _check_counts(initial_epoch, epochs=epochs, batches_per_epoch=batches_per_epoch, **counts)
        optimizers = _named(optimizer)
        found = _find_backend(backend, network, optimizers)
        self._epochs = epochs
        self._epoch = self._initial_epoch = initial_epoch
        self._limit = limit_batches
        mode = "a hand-written loop" if found is None else f"a hand-written loop ({found.describe_mode()})"
        self.engine = RunEngine(
            callbacks,
            params={
                "network": network,
                "train_network": network,
                "optimizer": optimizer,
                "loss_fn": loss_fn,
                "batch_num": batches_per_epoch,
            },
            backend=found,
            mode=mode,
            epochs=epochs,
            initial_epoch=initial_epoch,
            evaluations=evaluations,
            max_steps=max_steps,
            handle_signals=handle_signals,
        )
        self._step = _step_of(found, self.engine.bus.asked_for(), optimizers, network, lr_scheduler)
        self.engine.use(self._step)
        self._as_outputs = getattr(found, "as_outputs", lambda value: value)
        self._outputs: Native = None
        self._is_entered = self._in_epoch = self._in_step = False

    @property
    def context(self) -> RunContext:
        """The run context that callbacks get."""
        return self.engine.context

    @property
    def outputs(self) -> Native:
        """The detached outputs of the current step, such as its loss; None if not set.

        Callbacks see them as ``net_outputs``.
        """
        return self._outputs

    @outputs.setter
    def outputs(self, value: Native) -> None:
        self._outputs = self._as_outputs(value)
        self.context.original_args()["net_outputs"] = self._outputs

    def epochs(self) -> Iterator[int]:
        """Go through the epochs, counted from 1, with the epoch events around each body.

        Ends after the last epoch, or after the one in which a stop was requested. A second call
        continues with the next epoch.

        Raises:
            RunStateError: Outside of ``with run:``.
        """
        self._check_entered("epochs")
        self._end_epoch()
        is_over = self._epoch > self._initial_epoch and self.context.get_stop_requested()
        return iter(()) if is_over else self._numbers()

    def _numbers(self) -> Iterator[int]:
        while self._epochs is None or self._epoch < self._epochs:
            self._begin_epoch()
            yield self._epoch
            self._end_epoch()
            if self.engine.should_stop():
                return

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Go through the batches of an epoch, with the step events around each body.

        Ends with the batches, or after the step in which a stop was requested.

        Args:
            loader: Any iterable of batches; a batch is fetched when the body needs it.

        Raises:
            RunStateError: Outside of an epoch.
        """
        self._check_entered("batches")
        if not self._in_epoch:
            raise RunStateError(
                "run.batches() belongs inside `for epoch in run.epochs():`, but no epoch is open."
            )
        self._end_step()
        params = self.context.original_args()
        params["train_dataset"] = loader
        length = length_of(loader, self._limit)
        if length is not None:
            params["batch_num"] = length
        return steps_over(loader, self._limit, self._begin_step, self._end_step, self.engine.should_stop)

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        """Make one training step without a loader, as in reinforcement learning: ``with run.step():``.

        Outside of ``run.epochs()`` the first step opens an epoch.

        Args:
            batch: What callbacks see as the batch, if there is one.
        """
        self._begin_step(batch)
        try:
            yield
        except BaseException:
            self._outputs = None  # if the error is caught, the next verb ends the step
            raise
        self._end_step()
        self.engine.should_stop()  # ranks agree here

    def evaluation(self, batches: int | None = None) -> Evaluation:
        """Evaluate, between steps or after an epoch: ``with run.evaluation() as evaluation:``.

        The eval events are emitted around its body. Set ``evaluation.outputs`` in each step, or
        ``evaluation.metrics`` once.

        Args:
            batches: The number of batches, if callbacks are to know it at ``on_eval_begin``.
        """
        self._check_entered("evaluation")
        self._end_step()
        return Evaluation(self.engine, self._as_outputs, batches=batches, limit=self._limit)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients so that their global norm is at most ``max_norm``. PyTorch.

        ``grad_norm`` is then the norm before, ``grad_norm_clipped`` the norm after. With clipping of
        your own both are the norm of the gradients that the optimizer receives.

        Args:
            max_norm: The largest norm; positive.

        Raises:
            RunStateError: The run has no optimizer of PyTorch's.
        """
        self._step.clip(max_norm)

    def count_update(self, gradients: Native = None, *, skipped: bool = False) -> None:
        """Report an update where the optimizer has no hooks, as on MindSpore.

        Args:
            gradients: The gradients that the optimizer has received, for ``grad_norm``.
            skipped: Whether the update was skipped, as after an overflow.
        """
        self._step.count_update(gradients, skipped=skipped)

    def __enter__(self) -> Run:
        self.engine.__enter__()
        try:
            self.engine.begin()
            self.engine.emit(Event.TRAIN_BEGIN)
        except BaseException as error:
            self.engine.__exit__(type(error), error, error.__traceback__)
            raise
        self._is_entered = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._is_entered = False
        if error is None:
            try:
                self._end_epoch()
                self.engine.end()
                self.engine.emit(Event.TRAIN_END)
            except BaseException as failure:
                self.engine.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self.engine.__exit__(kind, error, traceback)

    def _begin_epoch(self) -> None:
        self._check_entered("epochs")
        self._end_epoch()
        self._in_epoch = True
        self._epoch += 1
        self.engine.begin_epoch(self._epoch)
        self.engine.emit(Event.TRAIN_EPOCH_BEGIN)

    def _end_epoch(self) -> None:
        self._end_step()
        if self._in_epoch:
            self._in_epoch = False
            self.engine.end_epoch()
            self.engine.emit(Event.TRAIN_EPOCH_END)

    def _begin_step(self, batch: Any) -> None:
        self._check_entered("step")
        if self._in_step:
            self._end_step()
        if not self._in_epoch:
            self._begin_epoch()
        self._in_step, self._outputs = True, None
        self.engine.begin_step(batch)
        self.engine.emit(Event.TRAIN_STEP_BEGIN)

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self.engine.end_step(self._outputs)
            self.engine.emit(Event.TRAIN_STEP_END)
        else:
            self.engine.leave_evaluation()  # one that ended by an error

    def _check_entered(self, verb: str) -> None:
        if not self._is_entered:
            raise RunStateError(f"run.{verb}() belongs inside `with run:`, but the run is not open.")


def _check_counts(initial_epoch: int, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None:
            positive_int("Run", name, value)
    epochs = counts["epochs"]
    if isinstance(initial_epoch, bool) or not isinstance(initial_epoch, int):
        raise ArgumentTypeError(f"Run(initial_epoch=...) takes an integer, but got {initial_epoch!r}.")
    if initial_epoch < 0 or (epochs is not None and initial_epoch >= epochs):
        raise ArgumentValueError(
            f"Run(initial_epoch=...) is at least 0 and less than epochs={epochs}, but got {initial_epoch}."
        )


def _named(optimizer: Native) -> dict[str, Native]:
    if optimizer is None:
        return {}
    if isinstance(optimizer, (list, tuple)):
        raise ArgumentTypeError(
            f"Run(optimizer=...) takes one optimizer, or a mapping name -> optimizer for several, but got "
            f"a {type(optimizer).__name__} of {len(optimizer)}: give each a name."
        )
    return dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}


def _find_backend(
    backend: str | Backend | None, network: Native, optimizers: Mapping[str, Native]
) -> Backend | None:
    if isinstance(backend, str):
        found: Backend = registered_backends().find_backend(backend)
        return found
    if backend is not None:
        return backend
    native = {"network": network, "optimizer": next(iter(optimizers.values()), None)}
    return RunState(native).find_backend()


def _step_of(
    backend: Backend | None,
    asked_for: frozenset[Capability],
    optimizers: Mapping[str, Native],
    network: Native,
    lr_scheduler: Native,
) -> Any:
    observe = getattr(backend, "observe", None)
    if lr_scheduler is not None and (observe is None or not optimizers):
        raise ArgumentValueError(
            "Run(lr_scheduler=...) takes the schedule of a PyTorch optimizer that is given as well,"
            " but got none: leave it out."
        )
    if observe is not None:
        return observe(optimizers, network=network, lr_scheduler=lr_scheduler, asked_for=asked_for)
    rates = [] if backend is None else [backend.learning_rate(one) for one in optimizers.values()]
    return CountedStep(rates[0] if len(rates) == 1 else None)
