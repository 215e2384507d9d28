"""Run contexts without a run, for tests of what a context reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualtrain.context import RunContext, RunState


def context_of(params: Mapping[str, Any], **state: Any) -> RunContext:
    """Return the context of a run in a state: its backend, step, callbacks and so on."""
    return RunContext(RunState(params, **state))
