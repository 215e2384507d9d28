"""Checks of arguments, so that every class says the same about the same fault."""

from __future__ import annotations

from dualtrain.errors import ArgumentTypeError, ArgumentValueError


def positive_int(owner: str, name: str, value: int) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise naming ``owner`` and ``name``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{owner}({name}=...) takes an integer, but got {value!r}.")
    if value < 1:
        raise ArgumentValueError(f"{owner}({name}=...) must be at least 1, but got {value}.")
    return value
