"""A sink that passes records to several sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualtrain.errors import ArgumentTypeError
from dualtrain.records import Record
from dualtrain.sinks.sink import Sink


class FanOut:
    """Pass each record to several sinks, in order.

    An error of one sink does not affect the others: the first error is raised after all have been
    called. The same holds for ``flush`` and ``close``.

    Args:
        sinks: The sinks; closed with this one.

    Attributes:
        lost: The sum of records that the sinks could not write: a sink's own ``lost`` if it has one,
            otherwise the number of failed calls of its ``write``.

    Raises:
        ArgumentTypeError: An argument is not a sink.
    """

    def __init__(self, *sinks: Sink) -> None:
        for sink in sinks:
            if isinstance(sink, type) or not isinstance(sink, Sink):
                raise ArgumentTypeError(f"FanOut takes sinks with write, flush, close, but got {sink!r}.")
        self.sinks = sinks
        self._failed = [0] * len(sinks)

    @property
    def lost(self) -> int:
        """Records that could not be written, summed over the sinks."""
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
