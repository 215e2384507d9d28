"""The sink protocol: three verbs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dualtrain.records import Record


@runtime_checkable
class Sink(Protocol):
    """Take records and put them somewhere."""

    def write(self, record: Record) -> None:
        """Take one record. It is a snapshot: nothing changes it later."""

    def flush(self) -> None:
        """Make everything written so far readable by others."""

    def close(self) -> None:
        """Flush and release what is held. Closing twice is harmless."""
