"""Checks of arguments that every backend's Model takes, so that both say the same."""

from __future__ import annotations

from typing import Any

from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.triggers import positive_int

METRIC_NAMES = frozenset(
    {"acc", "accuracy", "loss", "mae", "mse", "top_1_accuracy", "top_5_accuracy", "f1", "precision", "recall"}
)


def check_epochs(epoch: int, initial_epoch: int) -> int:
    """Check the two counts and return the number of epochs to train."""
    positive_int("train", "epoch", epoch)
    if isinstance(initial_epoch, bool) or not isinstance(initial_epoch, int):
        raise ArgumentTypeError(f"initial_epoch takes an integer, but got {initial_epoch!r}.")
    if not 0 <= initial_epoch < epoch:
        raise ArgumentValueError(
            f"initial_epoch must be at least 0 and less than epoch={epoch}, but got {initial_epoch}."
        )
    return epoch - initial_epoch


def check_valid_frequency(valid_frequency: Any) -> None:
    """Check that it is a positive integer or a list of epochs."""
    if isinstance(valid_frequency, list):
        for epoch in valid_frequency:
            positive_int("fit", "valid_frequency", epoch)
    else:
        positive_int("fit", "valid_frequency", valid_frequency)


def check_iterable(role: str, dataset: Any, *, passes: int) -> int | None:
    """Check a dataset that is a Python iterable of batches.

    Args:
        role: The argument's name, for messages.
        dataset: The iterable.
        passes: How many times it will be gone through.

    Returns:
        Its number of batches, or None if it has no length.
    """
    if isinstance(dataset, (str, bytes, dict)) or hasattr(dataset, "ndim") or not _iterates(dataset):
        raise ArgumentTypeError(
            f"{role} has to be an iterable of batches, such as a list of (inputs, label) tuples "
            f"or a data loader, but got {type(dataset).__name__}."
        )
    if passes > 1 and iter(dataset) is dataset:
        raise ArgumentValueError(
            f"{role} is a one-shot iterator ({type(dataset).__name__}) and {passes} passes over it were "
            f"asked for: pass something that can be iterated again, such as a list or a data loader."
        )
    try:
        length = len(dataset)
    except TypeError:
        return None
    if length == 0:
        raise empty(role)
    return length


def empty(role: str) -> ArgumentValueError:
    """Return the error for a dataset without batches."""
    return ArgumentValueError(f"{role} is empty: expected at least one batch.")


def check_metric_names(names: Any, known: frozenset[str] = METRIC_NAMES) -> None:
    """Check names of metrics."""
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"metrics takes names or a mapping name -> object, but got {name!r}.")
        if name not in known:
            raise ArgumentValueError(
                f"metrics has no {name!r}; the names are {', '.join(sorted(known, key=str.lower))}."
            )


def check_loss_and_step(loss_fn: Any, train_step: Any) -> None:
    """Check the two ways of getting a loss."""
    if train_step is not None and loss_fn is not None:
        raise ArgumentValueError(
            "train_step replaces loss_fn, but both were given: call the loss inside train_step."
        )
    for name, value in (("loss_fn", loss_fn), ("train_step", train_step)):
        if isinstance(value, type) or (value is not None and not callable(value)):
            raise ArgumentTypeError(f"{name} has to be callable, but got {value!r:.60}.")


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the label of a batch.

    A tuple or list is ``(inputs..., label)``. In a mapping the label is the item called
    ``label``, ``labels``, ``target`` or ``y``, else the last one, and the other items are the
    inputs in their order.
    """
    if isinstance(batch, dict):
        label_name = next((n for n in ("label", "labels", "target", "y") if n in batch), None)
        if label_name is None:
            label_name = next(reversed(batch))
        return tuple(v for k, v in batch.items() if k != label_name), batch[label_name]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise ArgumentTypeError(
        f"with loss_fn a batch has to be (inputs..., label) or a mapping with a label, but got "
        f"{type(batch).__name__}{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}."
    )


def _iterates(dataset: Any) -> bool:
    return hasattr(dataset, "__iter__")
