"""A sink that passes records to several others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualtrain.errors import ArgumentTypeError
from dualtrain.records import Record
from dualtrain.sinks.sink import Sink


class FanOut:
    """Pass each record to every one of several sinks, in their order.

    An error of one sink keeps nothing from the others: the first error is raised when all have been
    called. ``flush`` and ``close`` are passed on in the same way.

    Args:
        sinks: Where the records go; closed with this one.

    Attributes:
        lost: The sum of what the sinks could not write: a sink's own ``lost`` if it has one, else the
            records for which its ``write`` failed.

    Raises:
        ArgumentTypeError: One of them is not a sink.
    """

    def __init__(self, *sinks: Sink) -> None:
        for sink in sinks:
            if isinstance(sink, type) or not isinstance(sink, Sink):
                raise ArgumentTypeError(f"FanOut takes sinks with write, flush, close, but got {sink!r}.")
        self.sinks = sinks
        self._failed = [0] * len(sinks)

    @property
    def lost(self) -> int:
        """Records that could not be written, of all the sinks."""
        return sum(
            getattr(sink, "lost", failed) for sink, failed in zip(self.sinks, self._failed, strict=True)
        )

    def write(self, record: Record) -> None:
        """Pass the record to every sink."""
        self._call_each("write", record)

    def flush(self) -> None:
        """Flush every sink."""
        self._call_each("flush")

    def close(self) -> None:
        """Close every sink."""
        self._call_each("close")

    def __repr__(self) -> str:
        return f"FanOut({', '.join(map(repr, self.sinks))})"

    def _call_each(self, verb: str, *record: Any) -> None:
        first: BaseException | None = None
        for index, sink in enumerate(self.sinks):
            action: Callable[..., None] = getattr(sink, verb)
            try:
                action(*record)
            except BaseException as error:  # noqa: BLE001 - raised below
                self._failed[index] += len(record)
                first = first or error
        if first is not None:
            raise first
