"""Batches on their way to a PyTorch network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from dualtrain.backends._arguments import check_iterable, empty, used_up
from dualtrain.errors import ArgumentTypeError
from dualtrain.loop import end_pass
from dualtrain.protocol import Native

_NOTHING = object()
_device_of = attrgetter("device")  # asked of every batch, and in C as map is


class Batches:
    """The batches of a dataset, each moved to a device; iterated once per epoch.

    Args:
        role: The argument's name, for messages.
        dataset: Any iterable of batches, sized or not.
        device: Where tensors and numpy arrays go; other objects are handed on.
        passes: How many times the dataset will be gone through.

    Raises:
        ArgumentTypeError: It is not an iterable of batches.
        ArgumentValueError: It is empty, or can be iterated once only where more is asked.
    """

    def __init__(self, role: str, dataset: Any, device: torch.device, *, passes: int) -> None:
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
        self.length = check_iterable(role, dataset, passes=passes)
        self._role = role
        self._dataset = dataset
        self._device = device
        self._begun: tuple[Any, Iterator[Any]] | None = None
        if self.length is None:  # only its first batch tells whether it is empty
            iterator = iter(dataset)
            try:
                self._begun = next(iterator), iterator
            except StopIteration:
                raise empty(role) from None

    def close(self) -> None:
        """Close the pass that was begun to see whether there is anything, if nobody has gone on with it."""
        if self._begun is not None:
            end_pass(self._begun[1], self._dataset)

    def __iter__(self) -> Iterator[Any]:
        device, devices = self._device, {self._device}
        batch: Any = _NOTHING
        begun, self._begun = self._begun, None
        if begun is None:
            iterator = iter(self._dataset)
        else:
            batch, iterator = begun
        try:
            if begun is not None:
                yield to_device(batch, device)
            for batch in iterator:
                try:  # whether it is a tuple of tensors on the device, as it usually is on the CPU
                    is_there = type(batch) is tuple and {*map(_device_of, batch)} == devices
                except AttributeError:
                    is_there = False
                yield batch if is_there else to_device(batch, device)
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
