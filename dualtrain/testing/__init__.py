"""Tools to test callbacks and backends with; the project's own tests use them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualtrain._lazy import lazy_exports

if TYPE_CHECKING:
    from dualtrain.testing.contract import backend_contract as backend_contract
    from dualtrain.testing.fake_loop import FakeLoop as FakeLoop
    from dualtrain.testing.recording import RecordingCallback as RecordingCallback
    from dualtrain.testing.recording import TracedEvent as TracedEvent
    from dualtrain.testing.recording import assert_trace as assert_trace

_EXPORTS = {
    "FakeLoop": "dualtrain.testing.fake_loop:FakeLoop",
    "RecordingCallback": "dualtrain.testing.recording:RecordingCallback",
    "TracedEvent": "dualtrain.testing.recording:TracedEvent",
    "assert_trace": "dualtrain.testing.recording:assert_trace",
    "backend_contract": "dualtrain.testing.contract:backend_contract",
}

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
