"""Count the processor's instructions in a step on PyTorch, independent of other programs on the machine.

The loops and conditions are those of overhead.py, with its smallest network. Each runs under
``valgrind --tool=callgrind``, which has to be installed, for half a minute or more. All threads are
counted, including the thread that writes a log.

    .venv-bench/bin/python benchmarks/instructions.py
    .venv-bench/bin/python benchmarks/instructions.py --loops dualtrain,ignite --conditions none,all
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from loops import ENGINES, TITLES
from loops.common import CONDITIONS, NotApplicable
from overhead import ENVIRONMENT, names

WARM = 50


class CountedBatches:
    """Batches for one epoch; instructions are counted between two of them.

    Args:
        batches: The batches, given out in turn.
        steps: Steps to count, after some others.
    """

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches = batches
        self._steps = steps

    def __len__(self) -> int:
        return WARM + self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        batches = cycle(self.batches)
        yield from islice(batches, WARM)
        gc.collect()
        switch("on")
        yield from islice(batches, self._steps)
        switch("off")
        yield next(batches)


def switch(to: str) -> None:
    """Start or stop counting in this process."""
    subprocess.run(["callgrind_control", "-i", to, str(os.getpid())], capture_output=True, check=True)


def main() -> None:
    options = parse()
    if options.inside:
        train(*options.inside, options.steps)
        return
    if shutil.which("valgrind") is None:
        sys.exit("expected valgrind, but it is not installed: install your system's package of that name.")
    wanted = [("bare", "none"), *((loop, name) for loop in options.loops for name in options.conditions)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        figures = dict(zip(wanted, pool.map(lambda pair: count(*pair, options.steps), wanted), strict=True))
    floor = figures["bare", "none"]
    if floor is None:
        sys.exit("the hand-written loop could not be counted.")
    print(f"Instructions of a step in thousands: {floor / 1e3:.1f} by hand, and what is added to them.\n")
    print("| loop | " + " | ".join(options.conditions) + " |")
    print("|" + "---|" * (len(options.conditions) + 1))
    for loop in options.loops:
        found = [figures[loop, name] for name in options.conditions]
        cells = ["-" if figure is None else f"{(figure - floor) / 1e3:+.1f}" for figure in found]
        print(f"| {TITLES.get(loop, loop)} | " + " | ".join(cells) + " |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", **names(ENGINES["torch"]))
    parser.add_argument("--conditions", **names(CONDITIONS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def count(loop: str, condition: str, steps: int) -> float | None:
    """Return the instructions of a step; None if the loop does not support the condition, or has failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
        command += [sys.executable, __file__, f"--steps={steps}", "--inside", loop, condition]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": "0"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", result.stderr)
    if result.returncode or collected is None:
        said = [line for line in result.stderr.splitlines() if not line.startswith("==")]
        print(f"{loop} {condition}: {said[-1] if said else 'nothing counted'}", file=sys.stderr)
        return None
    return int(collected[1]) / steps


def train(loop: str, condition: str, steps: int) -> None:
    """Train once, in a process under valgrind."""
    from loops import torch_loops

    work = torch_loops.work("W0")
    data: Any = CountedBatches(work.batches, steps)
    try:
        torch_loops.LOOPS[loop](work, CONDITIONS[condition], data, Path("log.jsonl"))
    except NotApplicable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
