"""Checks of arguments that several callables take alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dualtrain.errors import ArgumentTypeError, ArgumentValueError


def positive_int(owner: str, name: str, value: int) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise naming ``owner`` and ``name``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{owner}({name}=...) takes an integer, but got {value!r}.")
    if value < 1:
        raise ArgumentValueError(f"{owner}({name}=...) must be at least 1, but got {value}.")
    return value


def checked_path(
    owner: str, name: str, value: str | os.PathLike[str] | None, *, optional: bool = False
) -> Any:
    """Return ``value`` if it is a path, or None where that is allowed, else raise."""
    if isinstance(value, (str, os.PathLike)) or (optional and value is None):
        return value
    kinds = "a path or None" if optional else "a path"
    raise ArgumentTypeError(f"{owner}({name}=...) takes {kinds}, but got {value!r}.")


def checked_rank(owner: str, value: str) -> str:
    """Return ``value`` if it names the ranks that write, else raise."""
    if value not in ("main", "all"):
        raise ArgumentValueError(f"{owner}(rank=...) is 'main' or 'all', but got {value!r}.")
    return value


def checked_sinks(owner: str, value: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``value`` as a tuple if it is a list or tuple of sinks, else raise."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(f"{owner}(sinks=...) takes a list of sinks, but got {value!r}.")
    for sink in value:
        if isinstance(sink, type) or not all(
            callable(getattr(sink, verb, None)) for verb in ("write", "flush", "close")
        ):
            raise ArgumentTypeError(
                f"{owner}(sinks=...) takes sinks, objects with write, flush and close, but got {sink!r}."
            )
    return tuple(value)
