"""Checks of arguments shared by all backends' Models, so that their messages are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualtrain.arguments import positive_int
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.loop import is_due

METRIC_NAMES = frozenset(
    {
        "acc",
        "accuracy",
        "loss",
        "mae",
        "mse",
        "top_1_accuracy",
        "top_5_accuracy",
        "f1",
        "precision",
        "recall",
    }
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


def check_limits(max_steps: Any, limit_batches: Any) -> None:
    """Check the two limits of a dry run."""
    for name, value in (("max_steps", max_steps), ("limit_batches", limit_batches)):
        if value is not None:
            positive_int("train", name, value)


def check_valid_frequency(valid_frequency: Any) -> None:
    """Check that ``valid_frequency`` is a positive integer or a list of epochs."""
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
        passes: The number of passes over it.

    Returns:
        Its number of batches, or None if it has no length.
    """
    if (
        isinstance(dataset, (str, bytes, dict))
        or hasattr(dataset, "ndim")
        or not hasattr(dataset, "__iter__")
    ):
        raise ArgumentTypeError(
            f"{role} has to be an iterable of batches, such as a list of (inputs, label) tuples "
            f"or a data loader, but got {type(dataset).__name__}."
        )
    if passes > 1 and hasattr(dataset, "__next__"):
        raise ArgumentValueError(
            f"{role} is a one-shot iterator ({type(dataset).__name__}), but {passes} passes over it are "
            f"needed: pass an iterable that can be iterated again, such as a list or a data loader."
        )
    try:
        length = len(dataset)
    except TypeError:
        return None
    if length == 0:
        raise empty(role)
    return length


def evaluations_due(epoch: int, initial_epoch: int, valid_frequency: int | list[int]) -> int:
    """Return the number of evaluations in a fit."""
    return sum(is_due(number, valid_frequency) for number in range(initial_epoch + 1, epoch + 1))


def used_up(role: str) -> ArgumentValueError:
    """Return the error for a dataset without batches in a later pass."""
    return ArgumentValueError(
        f"{role} gave no batches in a later pass over it: it can be iterated only once, so pass "
        f"an iterable that can be iterated again, such as a list or a data loader."
    )


def empty(role: str) -> ArgumentValueError:
    """Return the error for a dataset without batches."""
    return ArgumentValueError(f"{role} is empty: expected at least one batch.")


def metric_names(metrics: Any, known: frozenset[str] = METRIC_NAMES) -> list[str]:
    """Return the names in a set, list or tuple of metric names; ``acc`` is the same as ``accuracy``.

    Raises:
        ArgumentTypeError: ``metrics`` has another type, or its items are not names.
        ArgumentValueError: A name is unknown.
    """
    if not isinstance(metrics, (set, frozenset, list, tuple)):
        raise ArgumentTypeError(
            f"metrics takes a set, list or tuple of names, or a mapping name -> object, "
            f"but got {type(metrics).__name__} {metrics!r:.60}."
        )
    for name in metrics:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"metrics takes names or a mapping name -> object, but got {name!r}.")
        if name not in known:
            raise ArgumentValueError(
                f"metrics has no {name!r}; the names are {', '.join(sorted(known, key=str.lower))}."
            )
    return [name for name in metrics if not (name == "accuracy" and "acc" in metrics)]


def check_metric_object(name: str, metric: Any, kinds: str, *verb_sets: tuple[str, ...]) -> None:
    """Check that an object has all methods of one of the sets.

    Args:
        name: Its key in ``metrics``.
        metric: The object.
        kinds: The expected kinds of objects, for the message.
        verb_sets: Alternative sets of method names.
    """
    if isinstance(metric, type):
        raise ArgumentTypeError(f"metrics[{name!r}] is a class, not an instance: pass {metric.__name__}().")
    if not any(all(hasattr(metric, verb) for verb in verbs) for verbs in verb_sets):
        raise ArgumentTypeError(f"metrics[{name!r}] has to be {kinds}, but got {type(metric).__name__}.")


def metric_needs_outputs(name: str) -> ArgumentValueError:
    """Return the error for a metric that cannot be computed from only a loss."""
    return ArgumentValueError(
        f"metric {name!r} needs the network's outputs and the label: without loss_fn, "
        f"return them from train_step in a mapping, under 'outputs' and 'label'."
    )


def checked_rate(value: Any) -> float:
    """Return a learning rate as a float, or raise an error if it is invalid."""
    try:
        rate = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"a learning rate is a number, but got {value!r}.") from error
    if not 0 <= rate < float("inf"):
        raise ArgumentValueError(f"a learning rate is finite and not negative, but got {rate!r}.")
    return rate


def checked_rates(rate: Any, groups: int) -> list[float]:
    """Return one learning rate per parameter group, from a single rate or a sequence."""
    rates = list(rate) if isinstance(rate, (tuple, list)) else [rate] * groups
    if len(rates) != groups:
        raise ArgumentValueError(
            f"expected one learning rate or {groups}, one per parameter group, but got {len(rates)}."
        )
    return [checked_rate(value) for value in rates]


def lowered(rate: float, factor: float, min_lr: float) -> float:
    """Return ``rate * factor``, but at least ``min_lr``; a rate already below it is not changed."""
    return max(rate * factor, min(min_lr, rate))


def not_this_optimizer(framework: str, optimizer: Any) -> ArgumentTypeError:
    """Return the error for an object that is not an optimizer of the network's framework."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    what = f"{'the class ' if kind is optimizer else ''}{kind.__name__}"
    owner = kind.__module__.partition(".")[0]
    return ArgumentTypeError(
        f"the network is of {framework}, so its optimizer has to be one of {framework}'s, but got "
        f"{what}{'' if owner in ('builtins', framework) else f' of {owner}'}."
    )


def foreign_parameters(network: Any, accessor: str) -> ArgumentValueError:
    """Return the error for an optimizer that has none of the network's parameters."""
    return ArgumentValueError(
        f"the optimizer has none of the parameters of {type(network).__name__}, so training would "
        f"change nothing: make it from this network's {accessor}."
    )


NO_OPTIMIZER = "Model has no optimizer, which train and fit need: pass optimizer=..."


def check_loss_and_step(loss_fn: Any, train_step: Any, automatic_optimization: bool = True) -> None:
    """Check ``loss_fn`` and ``train_step``."""
    if train_step is not None and loss_fn is not None and automatic_optimization:
        raise ArgumentValueError(
            "train_step replaces loss_fn, but both were given: call the loss inside train_step."
        )
    for name, value in (("loss_fn", loss_fn), ("train_step", train_step)):
        if isinstance(value, type) or (value is not None and not callable(value)):
            raise ArgumentTypeError(f"{name} has to be callable, but got {value!r:.60}.")


def check_same_weights(own: dict[str, tuple[int, ...]], given: Mapping[str, Any]) -> None:
    """Check that weights fit a network.

    Args:
        own: The network's names -> shapes.
        given: The weights.
    """
    if missing := sorted(own.keys() ^ given.keys()):
        raise ArgumentValueError(
            f"the weights do not fit the network: only one of the two has {', '.join(missing[:5])}."
        )
    for name, shape in own.items():
        came = tuple(given[name].shape)
        if came != shape:
            raise ArgumentValueError(
                f"the weights do not fit the network: {name} has shape {shape}, but got {came}."
            )


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the label of a batch: ``(inputs..., label)`` or a mapping.

    Raises:
        ArgumentTypeError: The batch has another type, or has no label.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Mapping) and len(batch) >= 2:  # second, since this isinstance is slow
        columns = tuple(batch[key] for key in label_last(batch))
        return columns[:-1], columns[-1]
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
    raise ArgumentTypeError(
        f"with loss_fn a batch has to be (inputs..., label) or a mapping with a label, but got "
        f"{type(batch).__name__}{size}."
    )


def first_array(batch: Any) -> Any:
    """Return the first object with a shape and a dtype in a batch, or None."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return batch
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (tuple, list)):
        return None
    return next((array for item in batch if (array := first_array(item)) is not None), None)


def label_last(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a mapping's keys in order, with the label last.

    The label is ``label``, ``labels``, ``target`` or ``y``, otherwise the last item.
    """
    keys = tuple(batch)
    label = next((name for name in ("label", "labels", "target", "y") if name in batch), keys[-1])
    return (*(key for key in keys if key != label), label)
