"""Batches on their way to a MindSpore network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np
from mindspore import Tensor

from dualtrain.backends._arguments import check_iterable, empty, label_last, used_up
from dualtrain.errors import ArgumentTypeError
from dualtrain.loop import end_pass
from dualtrain.protocol import Native

_END = object()
_UNKNOWN = object()


class Batches:
    """A Python iterable of numpy batches, with as much of a ``mindspore.dataset`` as Model asks for.

    Nothing is copied ahead and no pipeline is started: a batch costs its conversion to tensors.

    Args:
        role: The argument's name, for messages.
        dataset: Any iterable of batches of numpy arrays, sized or not.
        passes: How many times it will be gone through.

    Raises:
        ArgumentTypeError: It is not an iterable of batches.
        ArgumentValueError: It is empty, or can be iterated once only where more is asked.
    """

    def __init__(self, role: str, dataset: Any, *, passes: int) -> None:
        self.length = check_iterable(role, dataset, passes=passes)
        self.keys: tuple[str, ...] = ()
        """The keys of mapping batches, in the order of the columns that they are handed on as."""
        self._role = role
        self._dataset = dataset
        # The first pass is begun here and gone on with: a loader that shuffles in iter() is asked once.
        self._batches: Iterator[Any] | None = iter(dataset)
        self._following = first = next(self._batches, _END)
        self._is_untouched = True
        if first is _END:
            raise empty(role)
        if isinstance(first, Mapping):
            self.keys = label_last(first)
        self._columns(first)  # a batch of the wrong kind is an error before the first step

    def get_dataset_size(self) -> float:
        """Return the number of batches; infinite where there is no length, so that comparing works."""
        return float("inf") if self.length is None else self.length

    def create_tuple_iterator(self, num_epochs: int = -1, do_copy: bool = True) -> Batches:
        """Return the iterator: this object, which starts anew after each end."""
        return self

    def __next__(self) -> tuple[Any, ...]:
        self._is_untouched = False
        if self._batches is None:
            self._batches = iter(self._dataset)
            self._following = next(self._batches, _END)
            if self._following is _END:
                raise used_up(self._role)
        batch = next(self._batches, _END) if self._following is _UNKNOWN else self._following
        self._following = _UNKNOWN
        if batch is _END:
            self.close()
            raise StopIteration
        return self._columns(batch)

    def is_last(self) -> bool:
        """Tell whether the batch given out last is the epoch's last one, by looking one ahead."""
        if self._following is _UNKNOWN and self._batches is not None:
            self._following = next(self._batches, _END)
        return self._following is _END

    def reset(self) -> None:
        """Start anew with the next batch, as after an epoch that was left early."""
        if not self._is_untouched:
            self.close()

    def close(self) -> None:
        """End the pass at hand, however far it is."""
        batches, self._batches, self._following = self._batches, None, _UNKNOWN
        if batches is not None:
            end_pass(batches, self._dataset)

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
    """Tell cheaply that a batch is a tuple of tensors already."""
    if type(batch) is not tuple:
        return False
    for column in batch:  # noqa: SIM110 - a loop is faster than all() with a generator
        if not isinstance(column, Tensor):
            return False
    return True


def closing_passes(dataset: Any) -> AbstractContextManager[Any]:
    """Close what ``as_dataset`` has returned, if it is ours; a ``mindspore.dataset`` sees to itself."""
    return closing(dataset) if isinstance(dataset, Batches) else nullcontext()


def as_dataset(role: str, dataset: Any, *, passes: int) -> Any:
    """Return a ``mindspore.dataset`` as it is, and an iterable of numpy batches as ``Batches``."""
    if not hasattr(dataset, "create_tuple_iterator"):
        return Batches(role, dataset, passes=passes)
    if dataset.get_dataset_size() == 0:
        raise empty(role)
    return dataset
