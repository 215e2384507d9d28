"""Metrics on MindSpore: its own by name, or the user's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import train

from dualtrain.backends._arguments import METRIC_NAMES, check_metric_object, metric_names
from dualtrain.protocol import Native

_NATIVE_NAMES = {"f1": "F1"}


class MetricObject(train.Metric):  # type: ignore[misc]
    """Adapt an object with clear, update and eval to a MindSpore metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def clear(self) -> None:
        self._metric.clear()

    def update(self, *inputs: Native) -> None:
        self._metric.update(*inputs)

    def eval(self) -> Any:
        return self._metric.eval()


def make_metrics(metrics: Native, *, has_default: bool = False) -> dict[str, Any] | None:
    """Return MindSpore's metrics for the ``metrics`` of ``dt.Model``.

    Args:
        metrics: Names, or a mapping name -> object, or None.
        has_default: Whether None means only the loss.

    Raises:
        ArgumentTypeError: The argument is neither names nor a mapping, or an object is not a metric.
        ArgumentValueError: A name is unknown.
    """
    if metrics is None:
        return {"eval_loss": train.Loss()} if has_default else None
    if isinstance(metrics, Mapping):
        return {name: _adapt(name, metric) for name, metric in metrics.items()}
    names = metric_names(metrics, METRIC_NAMES | frozenset(train.names()))
    return {name: train.get_metric_fn(_NATIVE_NAMES.get(name, name)) for name in names}


def _adapt(name: str, metric: Any) -> Any:
    kinds = "a mindspore.train.Metric or an object with clear, update and eval"
    check_metric_object(name, metric, kinds, ("clear", "update", "eval"))
    return metric if isinstance(metric, train.Metric) else MetricObject(metric)
