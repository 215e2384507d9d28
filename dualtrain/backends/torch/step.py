"""What happens to one batch on PyTorch: forward, backward, update; and the forward of an evaluation."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from dualtrain.backends._arguments import split_batch
from dualtrain.backends._contract import (
    EPSILON,
    inside_window,
    norm_after_clipping,
    warn_of_batch_norm,
    warn_of_dropped_window,
)
from dualtrain.backends.torch import distributed
from dualtrain.backends.torch.data import Batches
from dualtrain.backends.torch.late import to_float_later
from dualtrain.backends.torch.nonfinite import explain_nonfinite
from dualtrain.backends.torch.norms import Norms, scale, total_norm
from dualtrain.backends.torch.optimizer import Schedule, TorchLearningRate, zero_grad_of
from dualtrain.backends.torch.probes import sample_attention
from dualtrain.bus import EventBus
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.events import Event
from dualtrain.loop import end_pass
from dualtrain.protocol import AttentionLayer, Capability, Native

logger = logging.getLogger(__name__)

_END = object()
_UNKNOWN = object()
_EVENTS_OF_STEPS = (
    Event.TRAIN_STEP_BEGIN,
    Event.TRAIN_STEP_END,
    Event.AFTER_BACKWARD,
    Event.GRADIENTS_READY,
    Event.BEFORE_OPTIMIZER_STEP,
    Event.AFTER_OPTIMIZER_STEP,
)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OutputTensor(torch.Tensor):
    """A detached tensor that also answers MindSpore's ``asnumpy()``; otherwise an ordinary tensor."""

    # As nn.Parameter does: operations on it give plain tensors, at the cost of plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def asnumpy(self) -> Any:
        """Return the values as a numpy array on the host. One device sync."""
        plain = self.as_subclass(torch.Tensor)
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).cpu().numpy()


def as_outputs(value: Native) -> Native:
    """Detach what a step returned, also inside tuples, lists and mappings, so that no graph lives on."""
    if isinstance(value, torch.Tensor):
        detached = value.data  # detached, in half the time of detach()
        detached.__class__ = OutputTensor  # a third of what torch.Tensor._make_subclass takes
        return detached
    if isinstance(value, (tuple, list)):
        return tuple(as_outputs(item) for item in value)
    if isinstance(value, Mapping):
        return {key: as_outputs(item) for key, item in value.items()}
    return value


class Precision:
    """Mixed precision: autocast, and for fp16 a loss scale.

    Args:
        amp: None, ``"bf16"`` or ``"fp16"``.
        device: Where the network is.
    """

    def __init__(self, amp: str | None, device: torch.device) -> None:
        if amp is not None and amp not in _DTYPES:
            raise ArgumentValueError(f"amp is None, 'fp16' or 'bf16', but got {amp!r}.")
        self.amp = amp
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None

    def autocast(self) -> Any:
        """Return the context to compute a loss in."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=_DTYPES[self.amp])


class TrainStep:
    """Train on one batch, and update once per window of ``accumulate_steps`` batches.

    An update is: zero gradients, then for each batch of the window forward, loss / window and
    backward, then unscale, norm, clip, optimizer step, schedule. The window that an epoch ends
    in is as short as it is, and its gradients are the mean over what it has. Iterating over the
    step gives the batches of an epoch, so that it knows which one is the last.

    Args:
        network: The network.
        loss_fn: ``loss_fn(network(*inputs), label)``; None: the network or ``train_step`` gives the loss.
        optimizers: Name -> optimizer; under automatic optimisation there is one.
        train_step: ``train_step(network, batch)``, in place of network and ``loss_fn``; under manual
            optimisation ``train_step(network, batch, run_context)``.
        batches: The batches of an epoch.
        accumulate_steps: Batches per update.
        clip_norm: The largest norm that the gradients of an update may have; None: any.
        learning_rate: The optimizers' learning rate, which outlives the run with what it was scaled by.
        schedule: The learning rate's schedule, if there is one.
        precision: Mixed precision.
        automatic: False: ``train_step`` drives backward and updates.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizers: dict[str, Native],
        train_step: Callable[..., Any] | None,
        batches: Batches,
        *,
        accumulate_steps: int,
        clip_norm: float | None,
        learning_rate: TorchLearningRate,
        schedule: Schedule | None,
        precision: Precision,
        automatic: bool,
    ) -> None:
        self._network = network
        self._loss_fn = loss_fn
        self._source = "train_step" if train_step is not None else "loss_fn" if loss_fn else "the network"
        self._train_step = train_step
        forward = forward_of(network, loss_fn, train_step)
        self._forward = forward if train_step is None else self._watched(forward)
        self._optimizers = optimizers
        self._optimizer = self._last_optimizer = next(iter(optimizers.values()))
        self._zero_grad = zero_grad_of(self._optimizer)
        self._batches = batches
        self._clip_norm = clip_norm
        self._schedule = schedule
        self._autocast = None if precision.amp is None else precision.autocast
        self._scaler = precision.scaler
        self._automatic = automatic
        self._no_sync = getattr(network, "no_sync", None)
        self.learning_rate = learning_rate
        learning_rate.release()
        self.global_step = 0
        self.is_update_step = False
        self.step_skipped = False
        self._accumulate_steps = accumulate_steps
        self._warn_of_batch_norm(accumulate_steps)
        self._window = self._filled = 0
        self._iterator: Iterator[Native] = iter(())
        self._following: Any = _UNKNOWN
        self._last_loss: torch.Tensor | None = None
        self._skipped_batches = 0
        self._stepped = self._driving = False
        self._scaled_in_batch = False
        self._inside_train_step = False
        self._norm: torch.Tensor | float | None = None
        self._norm_is_due = False
        self._norm_needed = False
        self._is_plain = False
        self._outputs_are_read = True
        self._parameter_norms_requested = False
        self._measured: list[tuple[list[Native], Norms]] = []
        self._parameter_norms: dict[str, float] | None = None
        self._guarded = False
        self._losses: torch.Tensor | None = None
        self._any_rank: Callable[[bool], bool] | None = None

    @contextmanager
    def listening(self, bus: EventBus, context: RunContext) -> Iterator[None]:
        """Emit events to a bus, and watch the optimizers, for the duration of a run."""
        self._context = context
        self._params = context.original_args()
        self._after_backward = bus.emitter(Event.AFTER_BACKWARD)
        self._gradients_ready = bus.emitter(Event.GRADIENTS_READY)
        self._before_optimizer_step = bus.emitter(Event.BEFORE_OPTIMIZER_STEP)
        self._after_optimizer_step = bus.emitter(Event.AFTER_OPTIMIZER_STEP)
        asked_for = bus.asked_for()
        # Where gradients are still after the update what they were before, their norm can wait until it is
        # read. PyTorch's optimizers leave them alone, but for Nesterov momentum, which is added in place.
        optimizers = self._optimizers.values()
        in_place = any(group.get("nesterov") for o in optimizers for group in o.param_groups)
        may_change = (
            in_place
            or not self._automatic
            or self._before_optimizer_step is not None
            or self._after_optimizer_step is not None
            or any(_has_code_of_others(optimizer) for optimizer in optimizers)
        )
        needed = Capability.GRAD_NORM in asked_for
        self._norm_needed = (needed and may_change) or (in_place and bool(bus.callbacks))
        measuring = Capability.PARAMETER_GRAD_NORMS in asked_for and not self._automatic
        self._guarded = self._automatic and Capability.SKIP_NONFINITE in asked_for
        schedule = self._schedule
        self._outputs_are_read = (schedule is not None and schedule.monitor == "loss") or any(
            bus.emitter(event) is not None for event in _EVENTS_OF_STEPS
        )
        self._is_plain = self._automatic and not (
            self._after_backward
            or self._gradients_ready
            or self._before_optimizer_step
            or self._after_optimizer_step
            or self._norm_needed
            or self._guarded
            or self._clip_norm is not None
            or self._scaler is not None
            or self._autocast is not None
            or self._no_sync is not None
            or (schedule is not None and schedule.interval == "update")
        )
        if self._guarded and distributed.world_size() > 1:
            self._any_rank = distributed.any_rank  # gradients are the same on all ranks, losses not
        with ExitStack() as hooks:
            for optimizer in self._optimizers.values():
                if isinstance(optimizer, torch.optim.Optimizer):  # each hook costs a microsecond a step
                    if self._train_step is not None and self._automatic:
                        hooks.callback(optimizer.register_step_pre_hook(self._before_native_step).remove)
                    if measuring:  # train_step may call an optimizer itself
                        hooks.callback(optimizer.register_step_pre_hook(self._before_manual_step).remove)
                    if self._scaler is not None or not self._automatic:
                        hooks.callback(optimizer.register_step_post_hook(self._after_native_step).remove)
            try:
                yield
            except BaseException:
                self._forget_unscaled()
                raise
            self._drop_window()

    # Batches, and the window they make.

    @property
    def accumulate_steps(self) -> int:
        """Batches per update."""
        return self._accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        if self._filled:
            raise inside_window(self._filled, self._window)
        self._warn_of_batch_norm(value)
        self._accumulate_steps = value

    def __iter__(self) -> Iterator[Native]:
        """Go through the batches of an epoch."""
        self._iterator = iterator = iter(self._batches)
        self._following = _UNKNOWN
        try:
            while True:
                if self._following is _UNKNOWN:
                    batch = next(iterator, _END)
                else:
                    batch, self._following = self._following, _UNKNOWN
                if batch is _END:
                    return
                if self._schedule is not None:
                    self.learning_rate.release()
                self.is_update_step = self.step_skipped = self._norm_is_due = False
                if self._measured:
                    self._measured, self._parameter_norms = [], None
                    self._parameter_norms_requested = False
                yield batch
        finally:
            self._last_loss = None
            if not self._outputs_are_read:  # until now, when the pass is over
                self._params["net_outputs"] = as_outputs(self._params.get("net_outputs"))
            end_pass(iterator, self._batches)

    def _is_last(self) -> bool:
        """Whether this batch is the epoch's last one: only the next one tells, so look one ahead."""
        if self._following is _UNKNOWN:
            self._following = next(self._iterator, _END)
        return self._following is _END

    def __call__(self, batch: Native) -> Native:
        """Train on a batch and return its outputs, detached."""
        if not self._automatic:
            return self._run_manually(batch)
        if self._filled == 0:
            self._norm = self._losses = None
            self._zero_grad()
            self._window = self._accumulate_steps
            if self._is_plain and self._window == 1 and not self._parameter_norms_requested:
                return self._run(batch, closes=True, plainly=True)
        closes = self._filled + 1 >= self._window or self._is_last()
        if closes or self._no_sync is None:
            return self._run(batch, closes)
        with self._no_sync():  # gradients are reduced once, with the window's last batch
            return self._run(batch, closes)

    def _run(self, batch: Native, closes: bool, plainly: bool = False) -> Native:
        if self._autocast is None:
            outputs = self._forward(batch)
        else:
            with self._autocast():
                outputs = self._forward(batch)
        if outputs is None:
            self._skip_batch()
            return None
        loss = outputs
        if type(loss) is not torch.Tensor or loss.ndim != 0 or not loss.requires_grad:
            loss = checked_loss(outputs, self._source)
        # Until the next one, as by hand: autograd makes its nodes of weights anew where no graph has them.
        self._last_loss = loss
        if plainly:  # nothing is asked for in between: what comes below and ``_update``, 3 us faster
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.global_step += 1
            self.is_update_step = self._norm_is_due = True
            return as_outputs(outputs) if self._outputs_are_read else outputs
        if self._outputs_are_read:
            self._params["net_outputs"] = outputs = as_outputs(outputs)
        if self._guarded:
            native = loss.detach()
            self._losses = native if self._losses is None else self._losses + native
        if self._window != 1:
            loss = loss / self._window
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._filled += 1
        if self._after_backward is not None:
            self._after_backward(self._context)
        if closes:
            self._update()
        return outputs

    def _watched(self, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Note that the user's ``train_step`` is running, in which the optimizer must not step."""

        def watched(batch: Native) -> Native:
            self._inside_train_step = True
            try:
                return forward(batch)
            finally:
                self._inside_train_step = False

        return watched

    def _update(self) -> None:
        optimizer = self._optimizer
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if self._filled != self._window:  # the epoch has ended before the window was full
            scale(self._gradients(optimizer), self._window / self._filled)
        self._filled = 0
        self._finish_update(optimizer)

    def _finish_update(self, optimizer: Native) -> None:
        """Norm, clip, step, with the events around them; the gradients are whole and unscaled."""
        self.is_update_step = self._norm_is_due = True
        self.step_skipped = False
        if self._gradients_ready is not None:
            self._gradients_ready(self._context)
            self._norm = None  # a callback may have changed the gradients
        if self._parameter_norms_requested:
            self._measure_parameters(optimizer)
        if self._norm_needed or self._guarded or self._clip_norm is not None:
            gradients = self._gradients(optimizer)
            self._norm = norm = total_norm(gradients)
            self.step_skipped = self._guarded and not self._is_finite(norm)
            if self._clip_norm is not None and not self.step_skipped:
                scale(gradients, torch.clamp(self._clip_norm / (norm + EPSILON), max=1.0))
        if self._before_optimizer_step is not None:
            self._before_optimizer_step(self._context)
        self._driving = True
        if self.step_skipped:
            pass
        elif self._scaler is None:
            optimizer.step()
        else:
            self._stepped = False
            self._scaler.step(optimizer)  # skips if unscaling has met an infinity
            self.step_skipped = not self._stepped
        if self._scaler is not None and self._automatic:
            self._scaler.update()
        self._driving = False
        if not self.step_skipped:
            self._count_update(optimizer)
        if self._after_optimizer_step is not None:
            self._after_optimizer_step(self._context)

    def _is_finite(self, norm: torch.Tensor) -> bool:
        """Whether the gradients' norm and the losses of the window are finite, on all ranks. One sync."""
        assert self._losses is not None
        values = torch.stack((norm, self._losses.to(norm.device))).tolist()
        self._norm = values[0]
        finite = all(map(math.isfinite, values))
        return finite if self._any_rank is None else not self._any_rank(not finite)

    def _count_update(self, optimizer: Native) -> None:
        self.is_update_step = True
        self.global_step += 1
        schedule = self._schedule
        if schedule is not None and schedule.interval == "update" and schedule.belongs_to(optimizer):
            loss = self._context.loss if schedule.monitor == "loss" else None
            schedule.advance(self.learning_rate, {}, loss)

    def epoch_ended(self) -> None:
        """Step a schedule that goes by epochs."""
        schedule = self._schedule
        if schedule is not None and schedule.interval == "epoch":
            params = self._params
            metrics = params.get("eval_results") or params.get("metrics") or {}
            loss = self._context.loss if schedule.monitor == "loss" else None
            schedule.advance(self.learning_rate, metrics, loss)

    # Manual optimisation.

    def _run_manually(self, batch: Native) -> Native:
        assert self._train_step is not None
        self._scaled_in_batch = False
        with nullcontext() if self._autocast is None else self._autocast():
            outputs = self._train_step(self._network, batch, self._context)
        if self._scaler is not None and self._scaled_in_batch:
            self._scaler.update()
        return as_outputs(outputs)

    def zero_grad(self, optimizer: Native) -> None:
        self._named(optimizer).zero_grad()

    def backward(self, loss: Native) -> None:
        checked_loss(loss, "backward(loss)")
        self._params["net_outputs"] = as_outputs(loss)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        if self._after_backward is not None:
            self._after_backward(self._context)

    def optimizer_step(self, optimizer: Native) -> None:
        native = self._named(optimizer)
        self._norm, self._last_optimizer = None, native
        self.learning_rate.release()  # the batch may have updated before, and a schedule moved on
        if self._scaler is not None:
            self._scaler.unscale_(native)
            self._scaled_in_batch = True
        self._finish_update(native)

    def _named(self, optimizer: Native) -> Native:
        if isinstance(optimizer, str) and optimizer in self._optimizers:
            return self._optimizers[optimizer]
        if optimizer is None and len(self._optimizers) == 1:
            return self._optimizer
        if any(optimizer is own for own in self._optimizers.values()):
            return optimizer
        raise ArgumentValueError(
            f"expected one of this Model's optimizers ({', '.join(map(repr, self._optimizers))}) or its "
            f"name, but got {optimizer!r:.60}."
        )

    # What callbacks read.

    @property
    def loss_scale(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def grad_norm(self) -> float | None:
        norm = self._take_norm()
        if norm is not None:
            self._norm = norm = float(norm)
        return norm

    def grad_norms_later(self) -> Callable[[], tuple[float | None, float | None]] | None:
        norm = self._take_norm()
        read = to_float_later(norm) if isinstance(norm, torch.Tensor) else None
        if read is None:
            return None

        def norms() -> tuple[float | None, float | None]:
            norm = read()
            return norm, norm_after_clipping(norm, self._clip_norm)

        return norms

    def _take_norm(self) -> torch.Tensor | float | None:
        """The norm of this update, on the gradients' device where nobody has read it."""
        if not self._norm_is_due:
            return None
        if self._norm is None:
            self._norm = total_norm(self._gradients(self._last_optimizer))
        return self._norm

    def grad_norm_clipped(self) -> float | None:
        return norm_after_clipping(self.grad_norm(), self._clip_norm)

    def attention(
        self, samples: int | None, function: Callable[[Native, Native], Sequence[Native]] | None
    ) -> list[AttentionLayer]:
        if not self._automatic and function is None:
            raise RunStateError(
                "under automatic_optimization=False train_step cannot be run to look at attention alone: "
                "pass a function that computes it."
            )
        batch = self._params["train_dataset_element"]
        with nullcontext() if self._autocast is None else self._autocast():
            return sample_attention(self._network, self._forward_alone, batch, samples, function)

    def _forward_alone(self, network: torch.nn.Module, batch: Native) -> Native:
        """Call a network as the step does; without the loss, where that is apart."""
        if self._train_step is not None:
            return self._train_step(network, batch)
        return call_network(network, split_batch(batch)[0] if self._loss_fn is not None else batch)

    def trained_parameters(self) -> dict[str, Native]:
        optimized = {
            id(parameter)
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return {
            name.replace("_orig_mod.", ""): parameter  # which torch.compile puts into names
            for name, parameter in self._network.named_parameters()
            if parameter.requires_grad and id(parameter) in optimized
        }

    def request_parameter_grad_norms(self) -> None:
        self._parameter_norms_requested = True

    def parameter_grad_norms(self) -> dict[str, float] | None:
        if self._parameter_norms is None and self._measured:
            norms: dict[int, float] = {}
            read = Norms.read(*(measured for _, measured in self._measured))
            for (parameters, _), values in zip(self._measured, read, strict=True):
                norms.update(zip(map(id, parameters), values, strict=True))
            named = self.trained_parameters().items()
            self._parameter_norms = {name: norms[id(p)] for name, p in named if id(p) in norms}
        return self._parameter_norms

    def _measure_parameters(self, optimizer: Native) -> None:
        """Take the norms before clipping, and before the optimizer: some of torch's overwrite gradients."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        self._measured.append((parameters, Norms(gradients, exact_zeros=True)))

    def explain_nonfinite(self, batch: Native) -> str:
        return explain_nonfinite(
            self._network,
            self._loss_fn,
            self._forward if self._automatic else None,
            batch,
            autocast=self._autocast or nullcontext,
        )

    # Guards.

    def _gradients(self, optimizer: Native) -> list[torch.Tensor]:
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _before_native_step(self, *args: Any) -> None:
        if self._inside_train_step:
            raise RunStateError(
                "train_step called optimizer.step(), which the Model does itself after it, so that every "
                "batch would update twice: return the loss alone, or pass automatic_optimization=False."
            )

    def _before_manual_step(self, optimizer: Native, *args: Any) -> None:
        if self._parameter_norms_requested and not self._driving:
            self._measure_parameters(optimizer)

    def _after_native_step(self, optimizer: Native, *args: Any) -> None:
        # A fused optimizer is called on an overflow too, is handed the news, and does nothing.
        overflow = getattr(optimizer, "found_inf", None)
        self._stepped = overflow is None or not bool(overflow)
        if not self._driving and not self._automatic:  # train_step has called it itself
            self._count_update(optimizer)

    def _forget_unscaled(self) -> None:
        """Let the next run unscale anew where an error has come between unscaling and update."""
        if self._scaler is not None:
            try:
                self._scaler.update()
            except AssertionError:
                pass  # nothing had been unscaled

    def _drop_window(self) -> None:
        if self._filled:
            warn_of_dropped_window(self._filled, self._window)
            self._zero_grad()
            self._filled = 0

    def _skip_batch(self) -> None:
        if self._no_sync is not None or self._any_rank is not None:
            raise RunStateError(
                f"{self._source} returned None, which skips the batch, but the other ranks of a data "
                f"parallel run would wait for its gradients: return a loss on every rank."
            )
        self._params["net_outputs"] = None
        if self._filled and self._is_last():
            self._update()
        self._skipped_batches += 1
        if self._skipped_batches == 1:
            logger.warning(
                "%s returned None: the batch is skipped, without an update; further ones are only counted.",
                self._source,
            )

    def _warn_of_batch_norm(self, accumulate_steps: int) -> None:
        kinds = torch.nn.modules.batchnorm._BatchNorm
        names = [name for name, module in self._network.named_modules() if isinstance(module, kinds)]
        warn_of_batch_norm(names, accumulate_steps)


def _has_code_of_others(optimizer: Native) -> bool:
    """Whether an optimizer is not PyTorch's own, or hooks of the user's run around its step."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def check_steps_without_closure(optimizer: Native) -> None:
    """Refuse optimizers that evaluate the network themselves, such as LBFGS.

    Raises:
        ArgumentValueError: ``step`` needs a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentValueError(
            f"{type(optimizer).__name__}.step needs a closure, which the Model does not give it: use "
            f"automatic_optimization=False and call it in train_step."
        )


def forward_of(
    network: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    train_step: Callable[..., Any] | None,
) -> Callable[[Any], Any]:
    """Return the function from a batch to the loss, or to a mapping or tuple that holds it."""
    if train_step is not None:
        return lambda batch: train_step(network, batch)
    if loss_fn is not None:

        def supervised(batch: Native) -> Native:
            if type(batch) is tuple and len(batch) == 2:  # as it mostly is: a call less
                single, label = batch
                return loss_fn(network(single), label)
            inputs, label = split_batch(batch)
            return loss_fn(network(*inputs), label)

        return supervised
    return lambda batch: call_network(network, batch)


def call_network(network: torch.nn.Module, batch: Native) -> Native:
    """Call a network with a whole batch: a mapping by keyword, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, (tuple, list)) else network(batch)


def loss_in(outputs: Native, source: str) -> Native:
    """Return the loss in what a step returned: itself, a mapping's ``"loss"``, a tuple's first item."""
    if isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise ArgumentValueError(
                f"{source} returned a mapping without 'loss' (it has {', '.join(map(repr, outputs))}): "
                f"expected a scalar loss under that key."
            )
        return outputs["loss"]
    if isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    return outputs


def checked_loss(outputs: Native, source: str) -> torch.Tensor:
    """Return the loss that can be trained on, or say what came instead and why that may be.

    Raises:
        ArgumentTypeError: It is not a tensor.
        ArgumentValueError: It is missing, not a scalar, or has no gradient.
    """
    loss = outputs if isinstance(outputs, torch.Tensor) else loss_in(outputs, source)
    if not isinstance(loss, torch.Tensor):
        hint = " (was .item() or float() called on it?)" if isinstance(loss, (int, float)) else ""
        raise ArgumentTypeError(
            f"{source} has to give a scalar loss tensor with a gradient, but gave {type(loss).__name__} "
            f"{loss!r:.40}{hint}."
        )
    if loss.ndim != 0:
        raise ArgumentValueError(
            f"{source} has to give a scalar loss, but gave a tensor of shape {tuple(loss.shape)}: "
            f"reduce it, for instance with .mean()."
        )
    if not loss.requires_grad:
        raise ArgumentValueError(
            f"{source} gave a loss without a gradient, so there is nothing to train: it was detached, "
            f"computed under torch.no_grad(), or every parameter is frozen."
        )
    return loss


class EvalStep:
    """Evaluate one batch: ``(loss, outputs, label)``, each None where it is not known.

    Args:
        network, loss_fn, train_step: As in ``TrainStep``. Without ``loss_fn``, what
            ``train_step`` (or the network) returns may be a mapping with ``loss``, and with
            ``outputs`` and ``label`` for the metrics.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        train_step: Callable[..., Any] | None,
    ) -> None:
        self._network = network
        self._loss_fn = loss_fn
        self._forward = forward_of(network, loss_fn, train_step)
        self._source = "train_step" if train_step is not None else "the network"

    def __call__(self, batch: Native) -> tuple[Native, Native, Native]:
        if self._loss_fn is not None:
            inputs, label = split_batch(batch)
            outputs = self._network(*inputs)
            triple = (self._loss_fn(outputs, label), outputs, label)
        else:
            result = self._forward(batch)
            known = result if isinstance(result, Mapping) else {}
            triple = (loss_in(result, self._source), known.get("outputs"), known.get("label"))
        return as_outputs(triple)  # type: ignore[no-any-return]
