"""Python programs that tests start in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK_FINISHED = """
import os as _os
open(f"finished{_os.environ['RANK']}", "w").close()
"""


def run_python(
    source: str, *arguments: Any, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that is given as text; return its exit status and what it printed."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def run_two_ranks(script: str, folder: Path) -> Path:
    """Run a script on two ranks by torchrun, check that it succeeds, and return its working directory.

    The run is repeated once, in a new directory, if PyTorch aborted processes that had finished the
    script: at the exit of the interpreter a thread of the gloo process group may still be running, and
    then C++ ends the process by SIGABRT, with "terminate called without an active exception". On a busy
    machine plain DDP scripts without dualtrain do so too. Any other failure is reported at once, as is
    a second abort.

    Args:
        script: The program of each rank.
        folder: Where the working directory is made.
    """
    result = _torchrun(script, folder / "first")
    if not _aborted_at_exit(result, folder / "first"):
        assert result.returncode == 0, result.stderr
        return folder / "first"
    result = _torchrun(script, folder / "second")
    assert result.returncode == 0, result.stderr
    return folder / "second"


def _torchrun(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "train.py").write_text(script + MARK_FINISHED, encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )


def _aborted_at_exit(result: subprocess.CompletedProcess[str], folder: Path) -> bool:
    """Tell whether the only failure is PyTorch's own abort of ranks that had finished the script."""
    # torchrun's report names each rank that failed by itself, not one that it has ended because of that.
    failures = re.findall(r"rank +: (\d+) \(local_rank: \d+\)\n +exitcode +: (-?\d+)", result.stderr)
    return (
        "terminate called without an active exception" in result.stderr
        and bool(failures)
        and all(code == "-6" and (folder / f"finished{rank}").exists() for rank, code in failures)
    )
