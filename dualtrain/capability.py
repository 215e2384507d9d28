"""The features that an engine has or lacks, and the events that depend on them."""

from __future__ import annotations

from enum import Enum

from dualtrain.events import Event


class Capability(str, Enum):
    """A feature that not every engine has in every mode.

    A callback lists its required capabilities in ``needs``. A run whose engine lacks one is refused
    at train begin, in one sentence naming the callback, the capability and the mode.
    """

    STEP_EVENTS = "step_events"
    """Step events fire for every batch. Absent where data is sunk to the device (MindSpore
    GRAPH mode with ``dataset_sink_mode=True``): there they fire once per sink chunk."""

    GRADIENT_EVENTS = "gradient_events"
    """``on_after_backward``, ``on_gradients_ready``, ``on_before_optimizer_step`` and
    ``on_after_optimizer_step`` fire inside a step. Absent in MindSpore's GRAPH mode."""

    GRAD_NORM = "grad_norm"
    """``run_context.grad_norm`` can be read. MindSpore computes it in the step only for a run in
    which a callback needs this, or ``clip_norm`` is set; PyTorch when it is read."""

    PARAMETER_GRAD_NORMS = "parameter_grad_norms"
    """``run_context.parameter_grad_norms`` can be read. MindSpore computes them in the step only for
    a run in which a callback needs this; PyTorch in the updates for which they are requested."""

    ACCUMULATION = "accumulation"
    """``run_context.accumulate_steps`` can be set. Absent under manual optimisation, and in
    MindSpore where data is sunk or a native step does its own scaling."""

    SKIP_NONFINITE = "skip_nonfinite"
    """An update whose loss or gradients are not finite is skipped, as in an overflow of mixed precision:
    ``step_skipped`` is true, and weights, optimizer state, ``global_step`` and the learning rate's schedule
    stay. Only in a run in which a callback needs or uses it. Absent under manual optimisation, and in
    MindSpore where data is sunk or a native step does its own scaling."""

    CALLBACK_TIMES = "callback_times"
    """``run_context.callback_times`` says how long callbacks take. The event bus measures it, for any
    engine, only in a run in which a callback needs it."""

    PROBING = "probing"
    """``run_context.attention`` and ``run_context.explain_nonfinite`` can call the network outside of the
    training step. Absent in a hand-written loop, where only the user's code knows how to call it."""

    EAGER = "eager"
    """Python runs in every step, so that an attribute of a network or loss function that a callback
    changes takes effect. Absent in MindSpore's GRAPH mode, which compiles attributes in."""

    MANUAL_OPTIMIZATION = "manual_optimization"
    """The run is one in which the user's step drives backward and update itself."""

    THREADS = "threads"
    """Several threads of a process can train at once, each with a Model of its own. Absent in
    MindSpore, which crashes or hangs then."""

    def __str__(self) -> str:
        return self.value


EVENT_CAPABILITY: dict[Event, Capability] = {
    Event.AFTER_BACKWARD: Capability.GRADIENT_EVENTS,
    Event.GRADIENTS_READY: Capability.GRADIENT_EVENTS,
    Event.BEFORE_OPTIMIZER_STEP: Capability.GRADIENT_EVENTS,
    Event.AFTER_OPTIMIZER_STEP: Capability.GRADIENT_EVENTS,
}
"""The capability that an extension event comes with."""

STEP_CAPABILITIES: frozenset[Capability] = frozenset(
    {
        Capability.GRADIENT_EVENTS,
        Capability.GRAD_NORM,
        Capability.PARAMETER_GRAD_NORMS,
        Capability.ACCUMULATION,
        Capability.SKIP_NONFINITE,
        Capability.CALLBACK_TIMES,
        Capability.PROBING,
        Capability.MANUAL_OPTIMIZATION,
    }
)
"""Capabilities that a run has only through its step or its event bus, not by its framework alone."""

CAPABILITY_ADVICE: dict[Capability, str] = {
    Capability.THREADS: "train in the main thread (n_jobs=1), or in several processes started by spawn",
}
"""Advice where a capability is absent, other than to remove the callback or change the mode."""
