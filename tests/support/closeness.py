"""One tolerance for numbers that both engines compute in float32."""

from __future__ import annotations

from typing import Any

import pytest


def close(value: Any, rel: float = 1e-6, abs: float = 1e-9) -> Any:
    """Return what equals a number, or each number of a container, but for rounding.

    The default allows about eight roundings in float32. Tests of longer calculations, or of small
    differences of large numbers, give a tolerance of their own.
    """
    return pytest.approx(value, rel=rel, abs=abs)
