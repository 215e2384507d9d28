"""Where the repository's files are, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
"""The modules that the tests share; scripts that tests start put it on their ``sys.path``."""

ROOT = SUPPORT.parent.parent
"""The repository, with its documents, examples and pyproject.toml."""

EXAMPLES = ROOT / "examples"
