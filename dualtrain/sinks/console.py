"""A sink that prints one line per record."""

from __future__ import annotations

import sys
from typing import TextIO

from dualtrain.records import Record


class ConsoleSink:
    """Print each record as one line, numbers with six significant digits.

    Args:
        stream: The output stream; None: the current ``sys.stdout`` at each write.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, record: Record) -> None:
        """Print the record."""
        epoch = "" if record.epoch is None else f"epoch {record.epoch}  "
        mode = "" if record.mode == "train" else f"{record.mode}  "
        values = "  ".join(f"{name} {_short(value)}" for name, value in record.values.items())
        print(f"{mode}{epoch}step {record.step}  {values}", file=self._target())

    def flush(self) -> None:
        """Flush the stream."""
        self._target().flush()

    def close(self) -> None:
        """Flush the stream; its owner closes it."""
        self.flush()

    def _target(self) -> TextIO:
        return sys.stdout if self._stream is None else self._stream

    def __repr__(self) -> str:
        return f"ConsoleSink(stream={self._stream!r})"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_short, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
