"""What tests read from the package's source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PRIVATE = re.compile(r"_[a-z]\w*|(torch|mindspore)\..*\b_[a-z].*")


def private_names(file: Path) -> set[str]:
    """Return the private names in a file's strings and in its imports of frameworks."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if PRIVATE.fullmatch(name)}
