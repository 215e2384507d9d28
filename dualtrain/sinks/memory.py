"""A sink that keeps records in memory."""

from __future__ import annotations

from dualtrain.records import Record


class MemorySink:
    """Keep records in a list, ``records``."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Append the record."""
        self.records.append(record)

    def flush(self) -> None:
        """Do nothing: there is nothing to flush."""

    def close(self) -> None:
        """Do nothing: the records stay readable."""

    def __repr__(self) -> str:
        return f"MemorySink({len(self.records)} records)"
