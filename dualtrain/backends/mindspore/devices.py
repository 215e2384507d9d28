"""A program that tests a device of MindSpore and prints one line of JSON per result.

``dualtrain doctor`` runs it in a separate process, since a device may hang or crash. The device is
named before its test: if it is named without a result, it ended the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def tell(**found: Any) -> None:
    """Print one result. Its prefix marks it among other output of the framework."""
    print("dualtrain: " + json.dumps(found), flush=True)  # noqa: T201


def main(targets: Sequence[str]) -> None:
    """Compute ``2 * 2`` on a device and copy the result to numpy.

    Args:
        targets: ``["CPU"]``, ``["Ascend"]`` or ``["GPU"]``: a process of MindSpore has one target.
    """
    import mindspore

    tell(version=mindspore.__version__)
    (target,) = targets
    tell(device=target, name="")
    try:
        mindspore.set_device(target)
        four = (mindspore.Tensor([2.0], mindspore.float32) * 2).asnumpy()
        wrong = None if four[0] == 4 else f"2 * 2 is {four[0]:g} there"
        tell(device=target, works=wrong is None, error=wrong)
    except Exception as error:  # noqa: BLE001 - any error of the plugin is the result
        tell(device=target, works=False, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
