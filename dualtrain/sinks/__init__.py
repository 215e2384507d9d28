"""Sinks: destinations of records, independent of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualtrain._lazy import lazy_exports

if TYPE_CHECKING:
    from dualtrain.sinks.async_ import AsyncSink as AsyncSink
    from dualtrain.sinks.console import ConsoleSink as ConsoleSink
    from dualtrain.sinks.fan_out import FanOut as FanOut
    from dualtrain.sinks.jsonl import JsonlSink as JsonlSink
    from dualtrain.sinks.memory import MemorySink as MemorySink
    from dualtrain.sinks.run_log import RunLog as RunLog
    from dualtrain.sinks.sink import Sink as Sink

_EXPORTS = {
    "AsyncSink": "dualtrain.sinks.async_:AsyncSink",
    "ConsoleSink": "dualtrain.sinks.console:ConsoleSink",
    "FanOut": "dualtrain.sinks.fan_out:FanOut",
    "JsonlSink": "dualtrain.sinks.jsonl:JsonlSink",
    "MemorySink": "dualtrain.sinks.memory:MemorySink",
    "RunLog": "dualtrain.sinks.run_log:RunLog",
    "Sink": "dualtrain.sinks.sink:Sink",
}

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
