"""The errors that dualtrain raises; each is also a subclass of the matching builtin error."""

from __future__ import annotations


class DualTrainError(Exception):
    """The base class of all errors of dualtrain."""


class ArgumentTypeError(DualTrainError, TypeError):
    """An argument has the wrong type."""


class ArgumentValueError(DualTrainError, ValueError):
    """An argument has the right type and an invalid value."""


class UnknownEventError(DualTrainError, ValueError):
    """A callback has an ``on_*`` method that is not an event and would never be called."""


class CapabilityError(DualTrainError, RuntimeError):
    """A callback needs a capability that this engine, in this mode, does not have."""


class MissingDependencyError(DualTrainError, ImportError):
    """A required package is not installed."""


class LogInUseError(DualTrainError, OSError):
    """Another run is writing the requested log file."""


class NonFiniteError(DualTrainError, FloatingPointError):
    """The loss or the gradients are NaN or infinite, in a run with ``NanGuard("raise")``."""


class RunStateError(DualTrainError, RuntimeError):
    """An operation or value is not available in the current state of the run."""
