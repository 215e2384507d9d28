"""Record the attention of a PyTorch network in a forward pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualtrain.backends._attention import MASKED, calling_module, finished, not_probabilities
from dualtrain.backends.torch.borrowed import with_names
from dualtrain.protocol import AttentionLayer

_CHUNK = 1 << 22
"""Maximum number of probabilities in memory: 32 MiB of float64."""

_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class AttentionWatch(TorchFunctionMode):
    """Record the statistics of every attention computed inside this context.

    It intercepts calls of PyTorch's functions on this thread, without hooks on modules or replaced
    functions. Fused attention returns no probabilities; they are recomputed from its queries and
    keys. The statistics stay on the device until ``layers`` is called.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in network.named_modules()}
        self._found: list[tuple[str, bool, list[torch.Tensor]]] = []

    def layers(self) -> list[AttentionLayer]:
        """Return the recorded layers in order, with one device sync."""
        tensors = [tensor for _, _, own in self._found for tensor in own]
        if not tensors:
            return []
        values = torch.cat([tensor.flatten() for tensor in tensors]).cpu().double().numpy()
        ends = np.cumsum([tensor.numel() for tensor in tensors])
        parts = iter(
            part.reshape(tensor.shape)
            for part, tensor in zip(np.split(values, ends[:-1]), tensors, strict=True)
        )
        return [
            finished(layer, name, next(parts), next(parts), next(parts), one_sequence)
            for layer, (name, one_sequence, _) in enumerate(self._found)
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._scaled_dot_product(*args, **kwargs)
        if func in _SOFTMAX:
            self._softmax(*args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Run nn.MultiheadAttention's function by its fused path, and record the fused call.

        A copy of the function with the same code has its own globals for two of its functions, so that
        other callers are not affected.
        """
        call = _MULTI_HEAD.bind(*args, **kwargs)
        wants_weights = call.arguments.get("need_weights", True)
        call.arguments["need_weights"] = False
        if wants_weights:
            call.arguments["is_causal"] = False  # only a hint: attn_mask has the same content
        names = {
            **vars(F),
            "has_torch_function": lambda tensors: False,
            "scaled_dot_product_attention": self._scaled_dot_product,
        }
        function = F.multi_head_attention_forward
        fused = with_names(function, names)
        if fused is None:
            return function(*args, **kwargs)
        result = fused(*call.args, **call.kwargs)
        return function(*args, **kwargs) if wants_weights else result

    def _scaled_dot_product(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.ndim >= 3:
            self._add_scaled_dot_product(query, key, attn_mask, is_causal, scale)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _add_scaled_dot_product(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        queries, keys = query.shape[-2], key.shape[-2]
        dtype = _precise(query)
        if mask is not None:
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
            mask = _four_dimensional(mask.expand(*query.shape[:-1], keys))
        query, key = _four_dimensional(query), _four_dimensional(key)
        samples, heads, _, width = query.shape
        if key.shape[1] != heads:  # grouped-query attention: several query heads share a key head
            key = key.repeat_interleave(heads // key.shape[1], dim=1)
        key = key.expand(samples, -1, -1, -1)
        factor = width**-0.5 if scale is None else scale

        def scores_of(some: slice, rows: slice) -> torch.Tensor:
            with torch.autocast(query.device.type, enabled=False):
                scores = query[some, :, rows].to(dtype) @ key[some].to(dtype).mT * factor
            if mask is not None:
                scores = scores + mask[some, :, rows].to(dtype)
            if is_causal:
                places = torch.arange(max(queries, keys), device=scores.device)
                scores = scores.masked_fill(places[:keys] > places[rows, None], -math.inf)
            return scores

        self._add((samples, heads, queries, keys), scores_of, mask)

    def _softmax(self, input: torch.Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Record a softmax along the last of four dimensions as attention."""
        if input.ndim == 4 and dim in (-1, 3):
            self._add_scores(input)

    def add_probabilities(self, probabilities: Any) -> None:
        """Record the attention returned by the user's ``attention_fn``."""
        layer = len(self._found)
        if not isinstance(probabilities, torch.Tensor) or probabilities.ndim != 4:
            raise not_probabilities(layer, probabilities)
        probabilities = probabilities.detach().to(_precise(probabilities))
        sums = probabilities.sum(-1)
        one = ((sums - 1).abs() < 0.01) | (sums == 0) | sums.isnan()  # a network that diverges has NaN
        if not bool(one.all()) or bool((probabilities < 0).any()):
            raise not_probabilities(layer, probabilities)
        self._add_scores(probabilities.log())

    def _add_scores(self, scores: torch.Tensor) -> None:
        dtype = _precise(scores)
        self._add(tuple(scores.shape), lambda some, rows: scores[some, :, rows].to(dtype), scores)

    def _add(
        self,
        shape: tuple[int, ...],
        scores_of: Callable[[slice, slice], torch.Tensor],
        masked: torch.Tensor | None,
    ) -> None:
        """Sum the statistics of a layer's rows, in chunks.

        Args:
            shape: (samples, heads, queries, keys).
            scores_of: Returns the scores of some rows of some samples: (samples, heads, rows, keys).
            masked: A tensor of the same shape with the masked scores; None: no score is masked.
        """
        samples, heads, queries, keys = shape
        if not samples * heads * queries * keys:
            return
        one_sequence = queries == keys
        rows_at_a_time = max(1, _CHUNK // (heads * keys))
        totals: list[torch.Tensor] | None = None
        for some in _slices(samples, max(1, rows_at_a_time // queries)):
            real = None if masked is None else _visible(masked[some]).flatten(1, 2).any(1)
            for rows in _slices(queries, rows_at_a_time):
                parts = _sums(scores_of(some, rows), real, rows, one_sequence)
                if totals is None:
                    totals = parts
                else:
                    for total, part in zip(totals, parts, strict=True):
                        total.add_(part)
        if totals is not None:
            self._found.append((calling_module(self._names), one_sequence, totals))


def _sums(
    scores: torch.Tensor, real: torch.Tensor | None, rows: slice, one_sequence: bool
) -> list[torch.Tensor]:
    """Return, per head, the number of rows, the sums of their statistics, and the sum for each key.

    Args:
        scores: The scores, of shape (samples, heads, rows, keys).
        real: A mask of the keys that are not padding, per sample; None: no padding.
        rows: The slice of the queries.
        one_sequence: Whether queries and keys are the same positions.
    """
    samples, heads, queries, keys = scores.shape
    p = scores.softmax(-1)
    if real is None:
        count = scores.new_full((heads, 1), samples * queries)
        first = p[..., 0]
    else:
        counted = _visible(scores).any(-1)
        if one_sequence:
            counted &= real[:, None, rows]
        p = torch.where(counted[..., None], p, 0.0)
        count = counted.sum((0, 2))[:, None].to(p.dtype)
        at = real.int().argmax(-1).view(-1, 1, 1, 1).expand(-1, heads, queries, 1)
        first = p.gather(-1, at).squeeze(-1)
    summed = p.sum(0)
    distance = summed.new_zeros(heads)
    if one_sequence:
        places = torch.arange(keys, dtype=p.dtype, device=p.device)
        distance = (summed * (places - places[rows, None]).abs()).sum((-2, -1))
    entropy = torch.special.entr(p).sum((0, 2, 3))
    sums = torch.stack([entropy, p.amax(-1).sum((0, 2)), first.sum((0, 2)), distance], -1)
    return [count, sums, summed.sum(-2)]


def _slices(length: int, at_a_time: int) -> Iterator[slice]:
    for start in range(0, length, at_a_time):
        yield slice(start, min(start + at_a_time, length))


def _visible(scores: torch.Tensor) -> torch.Tensor:
    """Return a mask of the scores that are not masked; NaN is not a mask."""
    return ~(scores <= MASKED)


def _four_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape a tensor to (samples, heads, ..., ...): missing dimensions are 1, extra ones are samples."""
    if tensor.ndim > 4:
        return tensor.flatten(0, -4)
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor if tensor.ndim == 4 else tensor[None, None]


def _precise(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.device.type == "cpu" else torch.float32
