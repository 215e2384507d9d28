"""The built-in callbacks: one class per file, without framework imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualtrain._lazy import lazy_exports

if TYPE_CHECKING:
    from dualtrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dualtrain.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from dualtrain.callbacks.label_smoothing import LabelSmoothing as LabelSmoothing
    from dualtrain.callbacks.learning_rate_warmup import LearningRateWarmup as LearningRateWarmup
    from dualtrain.callbacks.lr_check import LrCheck as LrCheck
    from dualtrain.callbacks.metric_history import MetricHistory as MetricHistory
    from dualtrain.callbacks.nan_guard import NanGuard as NanGuard
    from dualtrain.callbacks.optuna_callback import OptunaCallback as OptunaCallback
    from dualtrain.callbacks.parameter_monitor import ParameterMonitor as ParameterMonitor
    from dualtrain.callbacks.progress_bar import ProgressBar as ProgressBar
    from dualtrain.callbacks.smart_trainer import SmartTrainer as SmartTrainer
    from dualtrain.callbacks.step_logger import StepLogger as StepLogger
    from dualtrain.callbacks.throughput import Throughput as Throughput
    from dualtrain.callbacks.transformer_monitor import TransformerMonitor as TransformerMonitor

_EXPORTS = {
    "EarlyStopping": "dualtrain.callbacks.early_stopping:EarlyStopping",
    "GradientAccumulationScheduler": (
        "dualtrain.callbacks.gradient_accumulation_scheduler:GradientAccumulationScheduler"
    ),
    "LabelSmoothing": "dualtrain.callbacks.label_smoothing:LabelSmoothing",
    "LearningRateWarmup": "dualtrain.callbacks.learning_rate_warmup:LearningRateWarmup",
    "LrCheck": "dualtrain.callbacks.lr_check:LrCheck",
    "MetricHistory": "dualtrain.callbacks.metric_history:MetricHistory",
    "NanGuard": "dualtrain.callbacks.nan_guard:NanGuard",
    "OptunaCallback": "dualtrain.callbacks.optuna_callback:OptunaCallback",
    "ParameterMonitor": "dualtrain.callbacks.parameter_monitor:ParameterMonitor",
    "ProgressBar": "dualtrain.callbacks.progress_bar:ProgressBar",
    "SmartTrainer": "dualtrain.callbacks.smart_trainer:SmartTrainer",
    "StepLogger": "dualtrain.callbacks.step_logger:StepLogger",
    "Throughput": "dualtrain.callbacks.throughput:Throughput",
    "TransformerMonitor": "dualtrain.callbacks.transformer_monitor:TransformerMonitor",
}

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
