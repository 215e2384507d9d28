"""The Cells of a step. In GRAPH mode MindSpore compiles their `construct` from this source.

For that reason `construct` uses only syntax that the compiler supports, and raises constant messages only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops

from dualtrain.backends._contract import EPSILON
from dualtrain.backends.mindspore.distributed import world_size
from dualtrain.protocol import Native

CLAIM = "train_step has to give "
"""The beginning of the error messages of `ForwardCell`."""

_add = ops.MultitypeFuncGraph("add")
_add_into = ops.MultitypeFuncGraph("add_into")
_multiply = ops.MultitypeFuncGraph("multiply")
_clear = ops.MultitypeFuncGraph("clear")


@_add.register("Tensor", "Tensor")
def _add_tensors(total, gradient):  # type: ignore[no-untyped-def]
    return total + gradient


@_add_into.register("Tensor", "Tensor")
def _add_into_tensor(total, gradient):  # type: ignore[no-untyped-def]
    return ops.assign_add(total, gradient)


@_multiply.register("Tensor", "Tensor")
def _multiply_tensor(factor, gradient):  # type: ignore[no-untyped-def]
    return gradient * factor.astype(gradient.dtype)


@_clear.register("Tensor")
def _clear_tensor(total):  # type: ignore[no-untyped-def]
    return ops.assign(total, ops.zeros_like(total))


def _square_sum(gradient):  # type: ignore[no-untyped-def]
    return ops.reduce_sum(ops.square(_as_float32(gradient)))  # type: ignore[no-untyped-call]


def _largest(gradient):  # type: ignore[no-untyped-def]
    return ops.reduce_max(ops.abs(_as_float32(gradient)))  # type: ignore[no-untyped-call]


def _as_float32(gradient):  # type: ignore[no-untyped-def]
    return gradient if gradient.dtype == mindspore.float32 else gradient.astype(mindspore.float32)


def as_number(loss):  # type: ignore[no-untyped-def]
    """Return the sum of a loss, which is finite only if all its values are."""
    return ops.reduce_sum(loss.astype(mindspore.float32))


class GradientCell(nn.Cell):  # type: ignore[misc]
    """Compute the gradients of a batch, scaled by its share of the window; None: the batch is the window.

    Args:
        native: MindSpore's own train step, for its network, weights and optimizer.
        scaler: A ``mindspore.amp.DynamicLossScaler``; None: the loss is not scaled.
    """

    def __init__(self, native: nn.TrainOneStepCell, scaler: Native) -> None:
        super().__init__(auto_prefix=False)
        self.network = native.network
        self.weights = native.weights
        self.scaler = scaler
        self.gradient = ops.GradOperation(get_by_list=True)
        self.share_of_gradient = ops.GradOperation(get_by_list=True, sens_param=True)
        self.map = ops.HyperMap()

    def gradients(self, loss, share, inputs):  # type: ignore[no-untyped-def]
        if share is None and self.scaler is None:  # no operations for a factor of one
            return self.gradient(self.network, self.weights)(*inputs)
        sens = Tensor(1.0, mindspore.float32) if share is None else share
        if self.scaler is not None:
            sens = sens * self.scaler.scale_value
        sens = ops.ones_like(loss) * sens.astype(loss.dtype)
        return self.share_of_gradient(self.network, self.weights)(*inputs, sens)


class AccumulateCell(GradientCell):
    """Add the gradients of a batch inside a window to the totals."""

    def __init__(
        self, native: nn.TrainOneStepCell, scaler: Native, totals: Native, kept: Kept, guarded: bool
    ) -> None:
        super().__init__(native, scaler)
        self.totals = totals
        self.guarded = guarded
        self.losses = kept.losses

    def construct(self, share, *inputs):  # type: ignore[no-untyped-def]
        loss = self.network(*inputs)
        if self.guarded:
            loss = ops.depend(loss, self.remember(loss))  # type: ignore[no-untyped-call]
        gradients = self.gradients(loss, share, inputs)  # type: ignore[no-untyped-call]
        return ops.depend(loss, self.map(_add_into, self.totals, gradients))

    def remember(self, loss):  # type: ignore[no-untyped-def]
        return ops.assign_add(self.losses, as_number(loss))  # type: ignore[no-untyped-call]


class UpdateCell(GradientCell):
    """Update with the batch that ends a window: reduce, unscale, measure, clip, and call the optimizer.

    With callbacks of gradient events, which only PYNATIVE mode has, the parts of ``construct`` are called
    one by one. If the window is only this batch, ``share`` and ``rescale`` are None, and the
    multiplication by them is not compiled.

    Args:
        native, scaler: As for ``GradientCell``.
        totals: The gradients of the window's earlier batches; None: the window is this batch.
        clip_norm: The largest norm; None: any.
        kept: The values that callbacks may read.
        parameter_norms: Whether the norm of each weight's gradient is computed, too.
        guarded: Whether updates with a non-finite loss or gradients are skipped.
    """

    def __init__(
        self,
        native: nn.TrainOneStepCell,
        scaler: Native,
        totals: Native,
        clip_norm: float | None,
        kept: Kept,
        parameter_norms: bool,
        guarded: bool,
    ) -> None:
        super().__init__(native, scaler)
        self.guarded = guarded
        self.losses = kept.losses
        self.made = kept.made
        self.votes = ops.AllReduce() if guarded and world_size() > 1 else None
        self.optimizer = native.optimizer
        self.reducer = native.grad_reducer
        self.totals = totals
        self.clip_norm = clip_norm
        self.epsilon = EPSILON
        self.norm = kept.norm
        self.finite = kept.finite
        self.parameter_norms = parameter_norms
        self.square_sums = kept.square_sums
        self.largest = kept.largest
        self.partial = ops.Partial()

    def construct(self, share, rescale, *inputs):  # type: ignore[no-untyped-def]
        loss = self.network(*inputs)
        gradients = self.whole_gradients(loss, share, rescale, inputs)  # type: ignore[no-untyped-call]
        norm = self.measure(gradients, loss)  # type: ignore[no-untyped-call]
        gradients = self.clipped(gradients, norm)  # type: ignore[no-untyped-call]
        return self.apply(loss, gradients)  # type: ignore[no-untyped-call]

    def whole_gradients(self, loss, share, rescale, inputs):  # type: ignore[no-untyped-def]
        gradients = self.gradients(loss, share, inputs)  # type: ignore[no-untyped-call]
        if self.totals is not None:
            gradients = self.map(_add, self.totals, gradients)
        if self.scaler is not None:
            rescale = (1.0 if rescale is None else rescale) / self.scaler.scale_value
        if rescale is not None:
            gradients = self.map(self.partial(_multiply, rescale), gradients)
        return self.reducer(gradients)

    def measure(self, gradients, loss):  # type: ignore[no-untyped-def]
        square_sums = [_square_sum(gradient) for gradient in gradients]  # type: ignore[no-untyped-call]
        norm = ops.sqrt(ops.addn(square_sums))
        ops.assign(self.norm, norm)
        if self.parameter_norms:
            ops.assign(self.square_sums, ops.stack(square_sums))
            largest = [_largest(gradient) for gradient in gradients]  # type: ignore[no-untyped-call]
            ops.assign(self.largest, ops.stack(largest))
        if self.scaler is not None:
            ops.assign(self.finite, amp.all_finite(gradients))
            ops.assign(self.made, self.finite)
        if self.guarded:
            sound = self.is_sound(norm, loss)  # type: ignore[no-untyped-call]
            if self.scaler is not None:
                sound = ops.logical_and(sound, self.finite)
            ops.assign(self.made, sound)
        return norm

    def is_sound(self, norm, loss):  # type: ignore[no-untyped-def]
        losses = as_number(loss)  # type: ignore[no-untyped-call]
        if self.totals is not None:
            losses = losses + self.losses
        sound = ops.logical_and(ops.isfinite(norm), ops.isfinite(losses))
        if self.votes is None:  # gradients are equal on all ranks, losses are not
            return sound
        against = self.votes(ops.logical_not(sound).astype(mindspore.float32).reshape((1,)))
        return ops.equal(against.reshape(()), Tensor(0.0, mindspore.float32))

    def clipped(self, gradients, norm):  # type: ignore[no-untyped-def]
        if self.clip_norm is None:
            return gradients
        factor = ops.minimum(self.clip_norm / (norm + self.epsilon), Tensor(1.0, mindspore.float32))
        return self.map(self.partial(_multiply, factor), gradients)

    def apply(self, loss, gradients):  # type: ignore[no-untyped-def]
        if self.scaler is not None:
            loss = ops.depend(loss, self.scaler.adjust(self.finite))
        # GRAPH mode evaluates the first of these at compilation, the second in each step.
        if self.scaler is None and not self.guarded:  # noqa: SIM114
            loss = ops.depend(loss, self.optimizer(gradients))
        elif self.made:
            loss = ops.depend(loss, self.optimizer(gradients))
        if self.totals is not None:
            loss = ops.depend(loss, self.map(_clear, self.totals))
            if self.guarded:
                loss = ops.depend(loss, ops.assign(self.losses, ops.zeros_like(self.losses)))
        return loss


class Kept:
    """Parameters that hold the values of a step that callbacks may read after it.

    Args:
        weights: The number of weights.
    """

    def __init__(self, weights: int) -> None:
        self.norm = Parameter(Tensor(0.0, mindspore.float32), name="grad_norm", requires_grad=False)
        self.finite = Parameter(Tensor(True), name="gradients_finite", requires_grad=False)
        """Whether the gradients are finite; set if the loss is scaled."""
        self.made = Parameter(Tensor(True), name="update_made", requires_grad=False)
        """Whether the optimizer was called; set if updates may be skipped."""
        self.losses = Parameter(Tensor(0.0, mindspore.float32), name="window_losses", requires_grad=False)
        """The sum of the losses of the window's earlier batches; set if updates are guarded."""
        self.square_sums = Parameter(_zeros(weights), name="gradient_square_sums", requires_grad=False)
        self.largest = Parameter(_zeros(weights), name="gradient_largest", requires_grad=False)


def _zeros(length: int) -> Tensor:
    return Tensor(np.zeros(length, np.float32))


class TrainStepCell(nn.Cell):  # type: ignore[misc]
    """``train_step(network, batch)`` as a Cell.

    Args:
        network: The network.
        train_step: Returns a scalar loss, or a mapping with it under ``"loss"``.
    """

    def __init__(self, network: nn.Cell, train_step: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.train_step = train_step
        self.keys: tuple[str, ...] = ()
        """The keys of mapping batches, in the order of the columns; set before the first call."""

    def run(self, batch):  # type: ignore[no-untyped-def]
        if len(self.keys) == 0:
            return self.train_step(self.network, batch)
        named = {}
        for i in range(len(self.keys)):
            named[self.keys[i]] = batch[i]
        return self.train_step(self.network, named)


class ForwardCell(TrainStepCell):
    """``train_step`` in training: returns the loss, checked."""

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        out = self.run(batch)  # type: ignore[no-untyped-call]
        if isinstance(out, dict):
            if "loss" not in out:
                raise ValueError("train_step has to give a mapping with 'loss', but that key is missing")
            out = out["loss"]
        if not isinstance(out, Tensor):
            raise TypeError(
                "train_step has to give a scalar loss tensor, but gave something else "
                "(was .item(), .asnumpy() or float() called on it, or nothing returned?)"
            )
        if out.ndim != 0:
            raise ValueError("train_step has to give a scalar loss, but gave a larger tensor: reduce it")
        return out


class EvalCell(TrainStepCell):
    """``train_step`` in an evaluation: ``(loss, outputs, label)`` if known, otherwise ``(loss,)``."""

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        out = self.run(batch)  # type: ignore[no-untyped-call]
        if isinstance(out, dict):
            if "outputs" in out and "label" in out:
                return out["loss"], out["outputs"], out["label"]
            return (out["loss"],)
        return (out,)


class LossEvalCell(nn.Cell):  # type: ignore[misc]
    """A network that returns the loss itself, in an evaluation: ``(loss,)``."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *batch):  # type: ignore[no-untyped-def]
        return (self.network(*batch),)


def has_gradient(cell: nn.Cell, weights: Native, batch: tuple[Native, ...]) -> bool:
    """Return whether a Cell's scalar output depends on any of the weights.

    A zero gradient by chance and a missing connection give equal gradients. With NaN as the initial
    gradient, only the first becomes NaN.
    """
    start = ops.full_like(cell(*batch), float("nan"))
    gradients = ops.GradOperation(get_by_list=True, sens_param=True)(cell, weights)(*batch, start)
    return any(bool(np.isnan(g.asnumpy()).any()) for g in gradients)
