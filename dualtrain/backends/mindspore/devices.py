"""Try the devices that MindSpore is asked for, as a program: one line of JSON for each finding.

It runs in a process of its own (``dualtrain doctor`` starts it), so that a device which hangs or
crashes takes nothing with it. A device is named before it is tried: the last one named without a
result is the one that ended the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def tell(**found: Any) -> None:
    """Print one finding. Frameworks print too, so the line says whose it is."""
    print("dualtrain: " + json.dumps(found), flush=True)  # noqa: T201


def main(targets: Sequence[str]) -> None:
    """Compute ``2 * 2`` on a device and bring the result to numpy.

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
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the finding
        tell(device=target, works=False, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
