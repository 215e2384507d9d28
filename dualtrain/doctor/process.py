"""Run a program that may hang, crash, or print arbitrary output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run(command: Sequence[str], timeout: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a command in a temporary directory.

    Returns:
        ``status``: the exit status, negative for a signal, None after a timeout;
        ``output``: stdout; ``errors``: the end of stderr.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        with (
            open(Path(directory, "errors"), "w+b") as errors,
            open(Path(directory, "output"), "w+b") as output,
        ):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # files, since a child of a hanging process could keep pipes open
                    stderr=errors,
                    cwd=directory,
                    env=dict(environ),
                    start_new_session=True,
                )
            except OSError as error:
                return {"status": 127, "output": "", "errors": str(error)}
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
            output.seek(0)
            errors.seek(0)
            return {
                "status": status,
                "output": output.read().decode("utf-8", "replace"),
                "errors": errors.read().decode("utf-8", "replace")[-2000:],
            }


def end(process: subprocess.Popen[bytes]) -> None:
    """End a running process and its child processes."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, OSError):  # no process groups on Windows
            process.kill()
        process.wait()


def told_in(output: str) -> list[dict[str, Any]]:
    """Return the results in a program's output, which may also contain other lines."""
    found = []
    for line in output.splitlines():
        if line.startswith("dualtrain: "):
            try:
                found.append(json.loads(line.removeprefix("dualtrain: ")))
            except ValueError:  # cut short by the end of the process
                continue
    return found
