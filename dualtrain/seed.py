"""Seed every source of random numbers that is in use."""

from __future__ import annotations

import random
import sys

from dualtrain.backends import loaded_backends
from dualtrain.errors import ArgumentTypeError, ArgumentValueError

_LARGEST = 2**32 - 1
"""The largest seed that numpy takes."""


def seed_everything(seed: int) -> int:
    """Seed Python, numpy and every framework that has been imported, on all of its devices.

    A framework that is imported later is not seeded: call this after its import.

    Args:
        seed: From 0 to 2**32 - 1.

    Returns:
        The seed.

    Raises:
        ArgumentTypeError, ArgumentValueError: It is not such an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(f"seed_everything() takes an integer, but got {seed!r}.")
    if not 0 <= seed <= _LARGEST:
        raise ArgumentValueError(f"seed_everything() takes a seed from 0 to {_LARGEST}, but got {seed}.")
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    for backend in loaded_backends():
        seed_framework = getattr(backend, "seed", None)
        if seed_framework is not None:
            seed_framework(seed)
    return seed
