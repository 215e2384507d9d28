"""The sink protocol: three methods."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dualtrain.records import Record


@runtime_checkable
class Sink(Protocol):
    """A destination of records."""

    def write(self, record: Record) -> None:
        """Write one record, which does not change afterwards."""

    def flush(self) -> None:
        """Make all written records readable by others."""

    def close(self) -> None:
        """Flush and release resources. A second call has no effect."""
