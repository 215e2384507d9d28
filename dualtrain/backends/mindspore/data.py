"""Iterate over batches and convert them for a MindSpore network."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
from mindspore import Tensor

from dualtrain.backends._arguments import check_iterable, empty, label_last, used_up
from dualtrain.errors import ArgumentTypeError
from dualtrain.protocol import Native
from dualtrain.window import LookAhead

_NONE = object()


class Batches:
    """A Python iterable of numpy batches, with the methods of a ``mindspore.dataset`` that Model calls.

    Batches are not prefetched and no pipeline is started: a batch costs only its conversion to tensors.

    Args:
        role: The argument's name, for messages.
        dataset: Any iterable of batches of numpy arrays, with or without a length.
        passes: The number of passes over it.
        limit: The maximum number of batches per pass; None: all.

    Raises:
        ArgumentTypeError: The dataset is not an iterable of batches.
        ArgumentValueError: The dataset is empty, or an iterator with several passes.
    """

    def __init__(self, role: str, dataset: Any, *, passes: int, limit: int | None = None) -> None:
        self._length = check_iterable(role, dataset, passes=passes)
        self.keys: tuple[str, ...] = ()
        """The keys of mapping batches, in the order of the columns."""
        self.ahead = LookAhead()
        """The batches of the current pass."""
        self._role = role
        self._dataset = dataset
        self._limit = limit
        # The first pass begins here and is continued later: a loader may shuffle in each iter().
        self._is_open = False
        self._first = self._begin()
        if self._first is _NONE:
            raise empty(role)
        if isinstance(self._first, Mapping):
            self.keys = label_last(self._first)
        self._columns(self._first)  # an invalid batch is an error before the first step

    def get_dataset_size(self) -> float:
        """Return the number of batches; infinity without a length, so that comparisons work."""
        if self._length is None:
            return float("inf")
        return self._length if self._limit is None else min(self._length, self._limit)

    def create_tuple_iterator(self, num_epochs: int = -1, do_copy: bool = True) -> Batches:
        """Return this object as the iterator; it begins a new pass after each end."""
        return self

    def __next__(self) -> tuple[Any, ...]:
        batch, self._first = self._first, _NONE
        if batch is _NONE:
            if self._is_open:
                batch = next(self.ahead, _NONE)
            else:
                batch = self._begin()
                if batch is _NONE:
                    raise used_up(self._role)
        if batch is _NONE:
            self.close()
            raise StopIteration
        return self._columns(batch)

    def reset(self) -> None:
        """Begin a new pass with the next batch, for example after an epoch ended by a stop."""
        if self._first is _NONE:
            self.close()

    def close(self) -> None:
        """End the current pass."""
        self._first = _NONE
        if self._is_open:
            self._is_open = False
            self.ahead.close()

    def _begin(self) -> Any:
        """Begin a pass and return its first batch."""
        self.ahead.begin(self._dataset, None, self._limit)  # a length may be wrong
        self._is_open = True
        return next(self.ahead, _NONE)

    def _columns(self, batch: Any) -> tuple[Any, ...]:
        if _is_ready(batch):
            return batch  # type: ignore[no-any-return]
        if isinstance(batch, Mapping):
            batch = tuple(batch[key] for key in self.keys)
        elif not isinstance(batch, (tuple, list)):
            batch = (batch,)
        return tuple(self._tensor(column) for column in batch)

    def _tensor(self, column: Any) -> Native:
        if isinstance(column, Tensor):
            return column
        array = np.asarray(column)
        if array.dtype.kind not in "biuf":
            raise ArgumentTypeError(
                f"{self._role} has to give batches of numpy arrays, but a column is "
                f"{type(column).__name__} of dtype {array.dtype}."
            )
        return Tensor(array)


def _is_ready(batch: Any) -> bool:
    """Return, at a low cost, whether a batch is already a tuple of tensors."""
    if type(batch) is not tuple:
        return False
    for column in batch:  # noqa: SIM110 - a loop is faster than all() with a generator
        if not isinstance(column, Tensor):
            return False
    return True


def closing_passes(dataset: Any) -> AbstractContextManager[Any]:
    """Return a context that closes ``Batches`` at its end; a ``mindspore.dataset`` closes itself."""
    return closing(dataset) if isinstance(dataset, Batches) else nullcontext()


def as_dataset(role: str, dataset: Any, *, passes: int, limit: int | None = None) -> Any:
    """Return a ``mindspore.dataset`` unchanged, and an iterable of numpy batches as ``Batches``.

    Args:
        role: The argument's name, for messages.
        dataset: The dataset.
        passes: The number of passes over it.
        limit: The maximum number of batches per pass; None: all.
    """
    if not hasattr(dataset, "create_tuple_iterator"):
        return Batches(role, dataset, passes=passes, limit=limit)
    if dataset.get_dataset_size() == 0:
        raise empty(role)
    if limit is not None and limit < dataset.get_dataset_size():
        return deepcopy(dataset).take(limit)  # a node of a pipeline can have only one consumer
    return dataset
