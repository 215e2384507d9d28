"""A program that tests each device of PyTorch and prints one line of JSON per result.

``dualtrain doctor`` runs it in a separate process, since a device may hang or crash. Each device is
named before its test: the last one named without a result is the one that ended the process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def tell(**found: Any) -> None:
    """Print one result. Its prefix marks it among other output of the framework."""
    print("dualtrain: " + json.dumps(found), flush=True)  # noqa: T201


def try_device(torch: Any, device: str, name: str) -> None:
    """Compute ``2 * 2`` on a device and copy the result to numpy."""
    tell(device=device, name=name)
    try:
        four = (torch.full((1,), 2.0, device=device) * 2).cpu().numpy()
        wrong = None if four[0] == 4 else f"2 * 2 is {four[0]:g} there"
        tell(device=device, works=wrong is None, error=wrong)
    except Exception as error:  # noqa: BLE001 - any error of the driver is the result
        tell(device=device, works=False, error=f"{type(error).__name__}: {error}")


def main(targets: Sequence[str] = ()) -> None:
    """Test the CPU, then every device of the accelerators that this build supports.

    Args:
        targets: Not used: one process can test all of PyTorch's devices.
    """
    import torch

    tell(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    try_device(torch, "cpu", "")
    kinds = [kind for kind in ("cuda", "mps", "npu", "xpu") if hasattr(torch, kind)]
    for kind in kinds:
        runtime = getattr(torch, kind)
        if not runtime.is_available():
            continue
        named = getattr(runtime, "get_device_name", lambda index: "")
        for index in range(runtime.device_count()):
            try_device(torch, f"{kind}:{index}", named(index))
    if torch.version.cuda is not None and not torch.cuda.is_available():
        try:  # its initialisation raises the reason
            torch.zeros(1, device="cuda")
        except Exception as error:  # noqa: BLE001 - see above
            tell(unavailable="cuda", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
