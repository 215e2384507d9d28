"""Iterate over batches and move them to a PyTorch network's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dualtrain.backends._arguments import check_iterable, empty, used_up
from dualtrain.errors import ArgumentTypeError
from dualtrain.protocol import Native
from dualtrain.window import LookAhead, end_pass

_NOTHING = object()


class Batches:
    """The batches of a dataset, each moved to a device; iterated once per epoch.

    Args:
        role: The argument's name, for messages.
        dataset: Any iterable of batches, with or without a length.
        device: The device for tensors and numpy arrays; other objects are not changed.
        passes: The number of passes over the dataset.
        limit: The maximum number of batches per pass; None: all.
        ahead: Keeps a batch that was fetched early, also for the next run.

    Attributes:
        length: The number of batches per pass; None: unknown.
        looks_ahead: Whether ``ahead`` has to detect the last batch of a pass.
        at_end: Called after the last batch of a pass; not if the pass ends early.

    Raises:
        ArgumentTypeError: The dataset is not an iterable of batches.
        ArgumentValueError: The dataset is empty, or an iterator with several passes.
    """

    def __init__(
        self,
        role: str,
        dataset: Any,
        device: torch.device,
        *,
        passes: int,
        limit: int | None = None,
        ahead: LookAhead | None = None,
    ) -> None:
        if hasattr(dataset, "create_tuple_iterator"):
            raise ArgumentTypeError(
                f"{role} is a mindspore.dataset ({type(dataset).__name__}), but the network is a "
                f"torch.nn.Module: pass an iterable of batches, such as a torch DataLoader."
            )
        if isinstance(dataset, torch.utils.data.Dataset) and not hasattr(dataset, "__iter__"):
            raise ArgumentTypeError(
                f"{role} is a Dataset of single samples ({type(dataset).__name__}): "
                f"wrap it in a torch.utils.data.DataLoader, which makes batches."
            )
        length = check_iterable(role, dataset, passes=passes)
        self.length = length if limit is None or length is None else min(length, limit)
        self.looks_ahead = length is None or limit is not None
        self.at_end: Callable[[], None] | None = None
        self._role = role
        self._dataset = dataset
        self._device = device
        self._limit = limit
        self._ahead = LookAhead() if ahead is None else ahead
        self._is_begun = length is None  # only the first batch shows whether it is empty
        if self._is_begun:
            self._ahead.begin(dataset, None, limit)
            if self._ahead.is_last:
                raise empty(role)

    def close(self) -> None:
        """Close the pass that was begun to check for batches, unless it has been continued."""
        if self._is_begun:
            self._ahead.close()

    def _begin(self) -> Iterator[Any]:
        if not self.looks_ahead:
            return iter(self._dataset)
        if self._is_begun:
            self._is_begun = False
        else:
            self._ahead.begin(self._dataset, self.length, self._limit)
        return self._ahead

    def __iter__(self) -> Iterator[Any]:
        device, tensor_type = self._device, torch.Tensor
        batch: Any = _NOTHING
        iterator = self._begin()
        try:
            for batch in iterator:
                if type(batch) is tuple:  # usually of tensors on the device: checked without a call
                    for item in batch:
                        if type(item) is not tensor_type or item.device != device:
                            batch = to_device(batch, device)
                            break
                else:
                    batch = to_device(batch, device)
                yield batch
            if self.at_end is not None:
                self.at_end()
        finally:
            end_pass(iterator, self._dataset)
        if batch is _NOTHING:
            raise used_up(self._role)


def to_device(value: Native, device: torch.device) -> Native:
    """Move tensors and numpy arrays, also those inside tuples, lists and mappings, to a device."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        items = [to_device(item, device) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.as_tensor(value).to(device, non_blocking=True)
    return value
