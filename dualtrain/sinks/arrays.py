"""Save a record's arrays in a separate file next to the log."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualtrain.errors import ArgumentValueError
from dualtrain.records import Record

_TAKEN = ("file", "allow_pickle")
"""Names of ``numpy.savez``'s own arguments."""


def save_arrays(folder: Path, record: Record) -> None:
    """Write a record's arrays to an npz file, atomically: under a temporary name, then renamed.

    Raises:
        ArgumentValueError: An array has a name that ``numpy.savez`` refuses, or contains Python objects.
        OSError: The file cannot be written.
    """
    import numpy as np

    folder.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in record.arrays.items()}
    for name, array in arrays.items():
        if name in _TAKEN:
            raise ArgumentValueError(
                f"An array of step {record.step} is called {name!r}, but numpy.savez has an argument of "
                f"that name: rename the array."
            )
        if array.dtype.hasobject:
            raise ArgumentValueError(
                f"Object arrays would need pickle, but {name!r} of step {record.step} is one: "
                f"convert it to numbers or texts."
            )
    place = folder / f"step-{record.step:09d}.npz"
    beside = place.with_suffix(".npz.next")
    archive = io.BytesIO()  # savez does not close its archive if a write fails
    np.savez(archive, **arrays)
    try:
        beside.write_bytes(archive.getbuffer())
        beside.replace(place)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
