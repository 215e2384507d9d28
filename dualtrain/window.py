"""The accumulation window: which batches make one update, and whether a batch is its epoch's last."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from dualtrain.errors import RunStateError

logger = logging.getLogger(__name__)

_END = object()
_UNKNOWN = object()


class LookAhead:
    """One pass after another over batches, with the answer whether a batch is the last of its pass.

    The length of the data gives the answer. Only where that is not known, or is reached, the next batch is
    fetched, when ``is_last`` is read: the later that is, the longer a loader may reuse the buffer of its
    last batch. A fetched batch that a stop leaves over is kept for the next pass over the same iterator.
    """

    def __init__(self) -> None:
        self._batches: Iterable[Any] = ()
        self._iterator: Iterator[Any] = iter(())
        self._next: Any = _UNKNOWN
        self._left: float | None = 0
        self._limit = float("inf")

    def begin(self, batches: Iterable[Any], length: int | None = None, limit: int | None = None) -> None:
        """Begin a pass.

        Args:
            batches: The batches; an iterator continues where the last pass has stopped.
            length: The number of batches; None: not known.
            limit: The largest number of batches of this pass; None: all.
        """
        iterator = iter(batches)
        if iterator is not self._iterator:
            self._next = _UNKNOWN
        self._batches, self._iterator = batches, iterator
        self._left = length
        self._limit = float("inf") if limit is None else limit

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        if self._limit <= 0:
            raise StopIteration
        batch, self._next = self._next, _UNKNOWN
        if batch is _UNKNOWN:
            batch = next(self._iterator)
        elif batch is _END:
            raise StopIteration
        self._limit -= 1
        if self._left is not None:
            self._left -= 1
        return batch

    @property
    def is_last(self) -> bool:
        """Whether the batch given out last is the last of its pass. May fetch the next one."""
        if self._limit <= 0:
            return True
        if self._left is not None and self._left > 0:
            return False
        if self._next is _UNKNOWN:
            self._next = next(self._iterator, _END)
        return self._next is _END

    def close(self) -> None:
        """End the pass; an iterator that is the caller's own stays open, with the batch fetched from it."""
        if self._iterator is not self._batches:
            end_pass(self._iterator, self._batches)
            self._batches, self._iterator, self._next = (), iter(()), _UNKNOWN


class Window:
    """Count the batches of a window, which ends when it is full or with the epoch.

    Args:
        batches: Gives the epoch's batches, and knows the last one.
        accumulate_steps: Batches per update.

    Attributes:
        filled: Batches of the open window so far; 0 where none is open.
        size: Batches of a full window; an epoch's last window may have fewer.
    """

    def __init__(self, batches: LookAhead, accumulate_steps: int = 1) -> None:
        self._batches = batches
        self._accumulate_steps = accumulate_steps
        self.filled = 0
        self.size = accumulate_steps

    @property
    def accumulate_steps(self) -> int:
        """Batches per update, from the next window on.

        Raises:
            RunStateError: When assigned inside a window.
        """
        return self._accumulate_steps

    @accumulate_steps.setter
    def accumulate_steps(self, value: int) -> None:
        if self.filled:
            raise RunStateError(
                f"accumulate_steps cannot change inside a window, of which {self.filled} of {self.size} "
                f"batches are done: set it in on_train_epoch_begin."
            )
        self._accumulate_steps = value

    def add(self) -> None:
        """Count a batch; the first one opens a window."""
        if self.filled == 0:
            self.size = self._accumulate_steps
        self.filled += 1

    @property
    def closes(self) -> bool:
        """Whether the batch counted last ends the window. May fetch the next batch."""
        return self.filled >= self.size or self._batches.is_last

    def drop(self) -> None:
        """Drop an open window after a stop, with a warning."""
        if self.filled:
            logger.warning(
                "The run was stopped inside a window: the gradients of its %d batches, of %d, are dropped.",
                self.filled,
                self.size,
            )
            self.filled = 0


def end_pass(iterator: Iterator[Any], batches: Iterable[Any]) -> None:
    """Close an iterator over batches, for every way in which its pass can end.

    A pass that an error ends would otherwise stay open, with its files and worker processes, for as long
    as somebody keeps the error. An iterator that is the caller's own is left open.
    """
    close = getattr(iterator, "close", None)
    if close is not None and iterator is not batches:
        close()
