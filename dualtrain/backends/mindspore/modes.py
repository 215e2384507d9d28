"""MindSpore's execution modes, and dualtrain's capabilities in each."""

from __future__ import annotations

import mindspore

from dualtrain.protocol import Capability

STEP_CELL_CAPABILITIES = frozenset(
    {
        Capability.GRADIENT_EVENTS,
        Capability.GRAD_NORM,
        Capability.PARAMETER_GRAD_NORMS,
        Capability.ACCUMULATION,
        Capability.SKIP_NONFINITE,
    }
)
"""The capabilities that need a ``StepCell`` instead of MindSpore's own train step."""

_IN_BOTH_MODES = frozenset(
    {
        Capability.STEP_EVENTS,
        Capability.GRAD_NORM,
        Capability.PARAMETER_GRAD_NORMS,
        Capability.ACCUMULATION,
        Capability.SKIP_NONFINITE,
        Capability.CALLBACK_TIMES,
        Capability.PROBING,
    }
)
_IN_PYNATIVE_MODE = frozenset({Capability.GRADIENT_EVENTS, Capability.EAGER})


def graph_mode() -> bool:
    """Return whether MindSpore is currently in GRAPH mode."""
    return bool(mindspore.get_context("mode") == mindspore.GRAPH_MODE)


def describe_mode() -> str:
    """Return the name of the mode, for messages."""
    return f"MindSpore {'GRAPH' if graph_mode() else 'PYNATIVE'} mode"


def capabilities() -> frozenset[Capability]:
    """Return the capabilities of the Model in the current mode."""
    return _IN_BOTH_MODES if graph_mode() else _IN_BOTH_MODES | _IN_PYNATIVE_MODE


def sinks_steps(dataset_sink_mode: bool) -> bool:
    """Return whether steps run on the device without Python in between; never on the CPU."""
    return dataset_sink_mode and graph_mode() and mindspore.get_context("device_target") != "CPU"
