"""Metrics on PyTorch: torchmetrics by name, or the user's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dualtrain._lazy import require
from dualtrain.backends._arguments import check_metric_object, metric_names
from dualtrain.protocol import Native


class LossMetric:
    """The mean of the batches' mean losses, with one device sync per evaluation."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._losses: list[torch.Tensor] = []

    def update(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach().float().mean())

    def eval(self) -> float:
        losses = torch.stack(self._losses).tolist()
        return float(sum(losses) / len(losses))


class NamedMetric:
    """A metric of torchmetrics, created at the first batch, which shows the number of classes.

    Values are as in MindSpore: ``f1``, ``precision`` and ``recall`` give one value per class, and
    ``mae`` and ``mse`` sum over a sample's outputs and average over the samples.

    Args:
        name: One of ``METRIC_NAMES`` except ``loss``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._library = require("torchmetrics", extra="torch")
        self._metric: Any = None

    def clear(self) -> None:
        if self._metric is not None:
            self._metric.reset()

    def update(self, outputs: torch.Tensor, label: torch.Tensor) -> None:
        if self._name in ("mae", "mse"):
            outputs, label = (x.reshape(len(outputs), -1).squeeze(1) for x in (outputs, label))
        elif label.ndim == outputs.ndim:
            label = label.argmax(1)  # one-hot
        if self._metric is None:
            self._metric = self._make(outputs.shape[1] if outputs.ndim > 1 else 1).to(outputs.device)
        self._metric.update(outputs, label)

    def eval(self) -> Any:
        value = self._metric.compute()
        if self._name in ("mae", "mse"):
            value = value.sum()
        return _plain(value)

    def _make(self, outputs: int) -> Any:
        classification = self._library.classification
        match self._name:
            case "acc" | "accuracy" | "top_1_accuracy":
                return classification.MulticlassAccuracy(outputs, average="micro")
            case "top_5_accuracy":
                return classification.MulticlassAccuracy(outputs, top_k=5, average="micro")
            case "f1":
                return classification.MulticlassF1Score(outputs, average=None)
            case "precision":
                return classification.MulticlassPrecision(outputs, average=None)
            case "recall":
                return classification.MulticlassRecall(outputs, average=None)
            case "mae":
                return self._library.MeanAbsoluteError(num_outputs=outputs)
            case "mse":
                return self._library.MeanSquaredError(num_outputs=outputs)
        raise AssertionError(self._name)


class TorchmetricsObject:
    """Adapt a torchmetrics object to a metric with clear, update and eval."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def clear(self) -> None:
        self._metric.reset()

    def update(self, outputs: torch.Tensor, label: torch.Tensor) -> None:
        self._metric.to(outputs.device).update(outputs, label)

    def eval(self) -> Any:
        return _plain(self._metric.compute())


def make_metrics(metrics: Native) -> dict[str, Any]:
    """Return name -> metric object for the argument ``metrics``.

    Raises:
        ArgumentTypeError: The argument is neither names nor a mapping, or an object is not a metric.
        ArgumentValueError: A name is unknown.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return {name: _adapt(name, metric) for name, metric in metrics.items()}
    return {name: LossMetric() if name == "loss" else NamedMetric(name) for name in metric_names(metrics)}


def _adapt(name: str, metric: Any) -> Any:
    theirs = ("reset", "update", "compute")
    kinds = "a torchmetrics object or one with clear, update and eval"
    check_metric_object(name, metric, kinds, theirs, ("clear", "update", "eval"))
    return TorchmetricsObject(metric) if all(hasattr(metric, verb) for verb in theirs) else metric


def _plain(value: Any) -> Any:
    """Return a scalar tensor as a float, a larger one as a numpy array, other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.ndim == 0 else value.cpu().numpy()
