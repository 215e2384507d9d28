"""The errors dualtrain raises, each also of the builtin kind that a caller would catch."""

from __future__ import annotations


class DualTrainError(Exception):
    """The parent of every error that dualtrain raises itself."""


class ArgumentTypeError(DualTrainError, TypeError):
    """An argument is of the wrong kind."""


class ArgumentValueError(DualTrainError, ValueError):
    """An argument is of the right kind, with a value that cannot be used."""


class UnknownEventError(DualTrainError, ValueError):
    """A callback has an ``on_*`` method that names no event and would never be called."""


class CapabilityError(DualTrainError, RuntimeError):
    """A callback needs something that this engine, in this mode, does not have."""


class MissingDependencyError(DualTrainError, ImportError):
    """A package that is needed here is not installed."""


class LogInUseError(DualTrainError, OSError):
    """Another live run is writing the log file that was asked for."""


class NonFiniteError(DualTrainError, FloatingPointError):
    """A loss or gradients that are NaN or infinite, in a run that was asked to end by an error then."""


class RunStateError(DualTrainError, RuntimeError):
    """Something was asked for at a moment when it cannot be had."""
