"""Record a transformer's gradient norms and attention during training."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from dualtrain.arguments import checked_path, checked_rank, checked_sinks, positive_int
from dualtrain.callbacks._log_writing import LogWriting
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, DualTrainError
from dualtrain.protocol import AttentionLayer, Capability
from dualtrain.records import Record
from dualtrain.sinks.run_log import Later, RunLog
from dualtrain.sinks.sink import Sink

_logger = logging.getLogger(__name__)


class TransformerMonitor(LogWriting):
    """Record the gradient norm of each update, and each head's attention at intervals.

    Training with it is bit-identical to training without it: attention is computed in a separate
    forward pass over a few samples of the current batch, in evaluation mode, and all state is restored
    (see ``RunContext.attention``). A sample is taken before the step: at the first one, then every
    ``attention_interval`` steps. Attention is detected in ``nn.MultiheadAttention`` and modules built
    from it, on PyTorch in every call of ``scaled_dot_product_attention``, and on both engines in a
    softmax along the last of four dimensions; for other networks use ``attention_fn``.

    A row of the log has ``step``, ``epoch``, ``global_step``, ``grad_norm`` (the global L2 norm,
    unscaled, before clipping), ``grad_norm_clipped``, and with a sample of attention a list
    ``attention`` of ``{layer, head, attention_entropy, attention_max, attention_first,
    attention_distance}``: nats, probabilities, positions (see ``dualtrain.protocol.AttentionLayer``).
    The mean attention per key is in ``<log_file>.arrays``: one array ``layer<i>`` of shape (heads, keys)
    for each layer, which ``dualtrain.logs.plot_attention`` draws as heat maps.

    Args:
        monitor_layers: Indexes of attention layers, in the order of the forward pass. None: all.
        grad_norm_threshold: A lower norm causes a warning (vanishing), once until it is above again.
            1e-3 is far below the norms of a healthy run and far above float32's rounding.
        log_file: Path of the log; read at train begin. None, without ``sinks``: ``grad_norm``,
            ``grad_norm_clipped`` and the means over heads, as ``attention_entropy/<layer>``, go to
            ``run_context.log``, for a StepLogger after this callback in the list.
        grad_interval: Updates between two rows.
        attention_interval: Steps between two samples. At 50 a sample of the default size costs about
            1 % of the training time for a batch of eight, 2 to 4 % in MindSpore's GRAPH mode, and less
            for larger batches.
        explosion_threshold: A higher norm causes a warning (exploding), and so does a non-finite norm,
            except in updates that fp16 skips while it adjusts the loss scale.
        attention_samples: Number of samples of a batch in the extra forward pass; None: all. With 8,
            means are accurate to a few percent at a low cost.
        attention_fn: ``attention_fn(network, batch)`` that returns each layer's probabilities, of
            shape (samples, heads, queries, keys); called without side effects on training.
        rank: ``"main"``: only rank 0 writes. ``"all"``: each rank writes its own file. Attention is
            sampled on all ranks.
        sinks: Further sinks for each row, on the ranks that write. They are closed at the end of the
            run: create new ones for each run. A ``MemorySink`` stays readable.

    Attributes:
        attention: The last sample: a list of ``AttentionLayer``, one per monitored layer.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid; at the first step, before any
            update, if the network has no layer of an index in ``monitor_layers``, or ``attention_fn``
            returns no probabilities. A later failure of a sample causes a warning, and sampling ends.

    A network without attention causes one warning; gradient norms are still recorded.

    Cost: one device sync per row for the norm, and per sample one more and a forward pass of
    ``attention_samples`` samples. On a GPU, with PyTorch and a ``log_file``, the norm is read when the next
    step ends, without a sync. On MindSpore it is part of every step: 10 to 40 % of a tiny one.
    Events: train begin, step begin, step end, teardown.
    """

    needs = frozenset({Capability.GRAD_NORM})

    def __init__(
        self,
        monitor_layers: Sequence[int] | None = None,
        grad_norm_threshold: float = 1e-3,
        *,
        log_file: str | os.PathLike[str] | None = None,
        grad_interval: int = 1,
        attention_interval: int = 50,
        explosion_threshold: float = 1e3,
        attention_samples: int | None = 8,
        attention_fn: Callable[[Any, Any], Sequence[Any]] | None = None,
        rank: str = "main",
        sinks: Sequence[Sink] = (),
    ) -> None:
        _check_layers(monitor_layers)
        if not 0 <= grad_norm_threshold < explosion_threshold:
            raise ArgumentValueError(
                f"TransformerMonitor takes 0 <= grad_norm_threshold < explosion_threshold, but got "
                f"{grad_norm_threshold!r} and {explosion_threshold!r}."
            )
        if attention_fn is not None and not callable(attention_fn):
            raise ArgumentTypeError(
                f"TransformerMonitor(attention_fn=...) takes a function, but got {attention_fn!r}."
            )
        self.monitor_layers = monitor_layers
        self.grad_norm_threshold = grad_norm_threshold
        self.log_file = checked_path("TransformerMonitor", "log_file", log_file, optional=True)
        self.grad_interval = positive_int("TransformerMonitor", "grad_interval", grad_interval)
        self.attention_interval = positive_int(
            "TransformerMonitor", "attention_interval", attention_interval
        )
        self.explosion_threshold = explosion_threshold
        if attention_samples is not None:
            positive_int("TransformerMonitor", "attention_samples", attention_samples)
        self.attention_samples = attention_samples
        self.attention_fn = attention_fn
        self.rank = checked_rank("TransformerMonitor", rank)
        self.sinks = checked_sinks("TransformerMonitor", sinks)
        self._forget_run()

    def _forget_run(self) -> None:
        self.attention: list[AttentionLayer] = []
        self._log: RunLog | None = None
        self._rows = 0
        self._next_sample: float = 0
        self._sampled_now = False
        self._updates = 0
        self._trouble: str | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        resuming, rows = self._resuming, self._rows
        self._resuming = False
        self._forget_run()
        if resuming:
            self._rows = rows
        self._log = RunLog.open(
            run_context,
            self.log_file,
            sinks=self.sinks,
            rank=self.rank,
            append=resuming,
            meta={"attention_interval": self.attention_interval, "grad_interval": self.grad_interval},
        )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        step = run_context.step or 0
        if step >= self._next_sample:
            self._next_sample = step + self.attention_interval
            self._sample(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        sampled, self._sampled_now = self._sampled_now, False
        due = False
        if run_context.is_update_step:
            due = self._updates % self.grad_interval == 0
            self._updates += 1
        if not (sampled or due):
            return
        step, skipped = run_context.step or 0, run_context.step_skipped
        handing_on = self.log_file is None and not self.sinks
        norms_later = None if handing_on else run_context.grad_norms_later()
        if norms_later is None:
            norms = self._watched(step, skipped, run_context.grad_norm, run_context.grad_norm_clipped)
            if handing_on:
                self._hand_on(run_context, norms, sampled)
            else:
                self._write(run_context, norms, sampled)
        elif self._log is None:  # another rank writes
            run_context.defer(lambda: self._watch_norm(step, skipped, norms_later()[0]))
        else:
            self._write(run_context, {}, sampled, lambda: self._watched(step, skipped, *norms_later()))

    def _end_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, which continues this log."""
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the log in the next run instead of starting a new one."""
        self._rows = state["rows"]
        self._resuming = self._rows > 0

    def _sample(self, run_context: RunContext) -> None:
        if Capability.PROBING not in run_context.capabilities:
            self._give_up(
                "found no attention: this run cannot call the network outside of its training step"
            )
            return
        first = not self.attention
        try:
            found = run_context.attention(self.attention_samples, self.attention_fn)
            if first:
                self._check_layers_exist(found)
        except Exception as error:
            # The network may raise any error for a part of a batch. The first sample raises errors of
            # configuration, but later samples do not end the run.
            if first and isinstance(error, DualTrainError):
                raise
            self._give_up(f"could not look at attention ({type(error).__name__}: {error})")
            return
        chosen = [
            layer for layer in found if self.monitor_layers is None or layer.layer in self.monitor_layers
        ]
        if not chosen:
            network = type(run_context.original_args().get("network")).__name__
            self._give_up(f"found no attention in {network}")
            return
        self.attention = chosen
        self._sampled_now = True

    def _check_layers_exist(self, found: list[AttentionLayer]) -> None:
        unknown = [layer for layer in self.monitor_layers or () if layer >= len(found)]
        if unknown and found:
            names = ", ".join(f"{layer.layer} ({layer.name})" for layer in found)
            raise ArgumentValueError(
                f"TransformerMonitor(monitor_layers=...) names layer {unknown[0]}, but the network has "
                f"{len(found)} attention layers: {names}."
            )

    def _give_up(self, reason: str) -> None:
        """End sampling in this run, since every sample would fail, with one warning."""
        self._next_sample = math.inf
        warnings.warn(
            f"TransformerMonitor {reason}: only gradient norms are recorded; attention_fn can give the "
            f"probabilities, and attention_samples=None takes whole batches.",
            stacklevel=4,
        )

    def _watch_norm(self, step: int, skipped: bool, norm: float | None) -> None:
        if norm is None or skipped:  # overflows are expected while fp16 adjusts the loss scale
            return
        trouble = None
        if norm < self.grad_norm_threshold:
            trouble = f"vanishing: below {self.grad_norm_threshold:g}"
        elif not math.isfinite(norm):
            trouble = "not finite"
        elif norm > self.explosion_threshold:
            trouble = f"exploding: above {self.explosion_threshold:g}"
        if trouble is not None and trouble != self._trouble:
            _logger.warning("step %s: the gradient norm, %g, is %s.", step, norm, trouble)
        self._trouble = trouble

    def _watched(
        self, step: int, skipped: bool, norm: float | None, clipped: float | None
    ) -> dict[str, float | None]:
        self._watch_norm(step, skipped, norm)
        return {"grad_norm": norm, "grad_norm_clipped": clipped}

    def _write(
        self,
        run_context: RunContext,
        norms: dict[str, float | None],
        sampled: bool,
        later: Later | None = None,
    ) -> None:
        if self._log is None:
            return
        values: dict[str, Any] = {
            "global_step": run_context.global_step,
            "grad_norm": None,
            "grad_norm_clipped": None,
            **norms,
        }
        arrays = {}
        if sampled:
            values["attention"] = [row for layer in self.attention for row in _heads(layer)]
            arrays = {f"layer{layer.layer}": layer.per_key for layer in self.attention}
        row = Record(run_context.step or 0, run_context.epoch, "train", time.time(), values, arrays)
        self._log.write(row, later=later)
        self._rows += 1

    def _hand_on(self, run_context: RunContext, norms: dict[str, float | None], sampled: bool) -> None:
        for name, norm in norms.items():
            if norm is not None:
                run_context.log(name, norm)
        for layer in self.attention if sampled else ():
            run_context.log(f"attention_entropy/{layer.layer}", sum(layer.entropy) / len(layer.entropy))
            run_context.log(f"attention_max/{layer.layer}", sum(layer.maximum) / len(layer.maximum))


def _heads(layer: AttentionLayer) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer.layer,
            "head": head,
            "attention_entropy": layer.entropy[head],
            "attention_max": layer.maximum[head],
            "attention_first": layer.first[head],
            "attention_distance": None if layer.distance is None else layer.distance[head],
        }
        for head in range(len(layer.entropy))
    ]


def _check_layers(layers: Any) -> None:
    if layers is None:
        return
    if not isinstance(layers, (list, tuple, range)) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in layers
    ):
        raise ArgumentTypeError(
            f"TransformerMonitor(monitor_layers=...) takes a list of indexes or None, but got {layers!r}."
        )
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise ArgumentValueError(
            f"TransformerMonitor(monitor_layers=...) takes different indexes >= 0, but got {list(layers)}."
        )
