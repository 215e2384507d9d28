"""Metrics on MindSpore: its own by name, or the user's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import train

from dualtrain.backends._arguments import METRIC_NAMES, check_metric_names
from dualtrain.errors import ArgumentTypeError
from dualtrain.protocol import Native

_NATIVE_NAMES = {"f1": "F1"}


class MetricObject(train.Metric):  # type: ignore[misc]
    """A user's object with clear, update and eval, seen as a MindSpore metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def clear(self) -> None:
        self._metric.clear()

    def update(self, *inputs: Native) -> None:
        self._metric.update(*inputs)

    def eval(self) -> Any:
        return self._metric.eval()


def make_metrics(metrics: Native) -> Any:
    """Return what MindSpore's Model takes for what the user passed as ``metrics``.

    Raises:
        ArgumentTypeError: It is neither names nor a mapping, or an object is no metric.
        ArgumentValueError: A name is unknown.
    """
    if metrics is None:
        return None
    if isinstance(metrics, Mapping):
        return {name: _adapt(name, metric) for name, metric in metrics.items()}
    if not isinstance(metrics, (set, frozenset, list, tuple)):
        raise ArgumentTypeError(
            f"metrics takes a set, list or tuple of names, or a mapping name -> object, "
            f"but got {type(metrics).__name__} {metrics!r:.60}."
        )
    check_metric_names(metrics, METRIC_NAMES | frozenset(train.names()))
    names = [n for n in metrics if not (n == "accuracy" and "acc" in metrics)]
    return {name: train.get_metric_fn(_NATIVE_NAMES.get(name, name)) for name in names}


def _adapt(name: str, metric: Any) -> Any:
    if isinstance(metric, type):
        raise ArgumentTypeError(f"metrics[{name!r}] is a class, not an instance: pass {metric.__name__}().")
    if isinstance(metric, train.Metric):
        return metric
    if all(hasattr(metric, verb) for verb in ("clear", "update", "eval")):
        return MetricObject(metric)
    raise ArgumentTypeError(
        f"metrics[{name!r}] has to be a mindspore.train.Metric or an object with clear, update and eval, "
        f"but got {type(metric).__name__}."
    )
