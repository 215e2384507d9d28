"""Measure the cost of training loops and their callbacks, compared with an equivalent hand-written loop.

dualtrain and other trainers do the same work on the same batches from the same weights. Each loop runs in a
separate process, one at a time, and every measurement is made between two measurements of the hand-written
loop in the same process. Figures are medians over the rounds of the differences from the mean of these two,
so that disturbances by other programs mostly cancel. Trained weights are compared: loops with different
results are marked.

    make bench
    make bench ARGS="--workloads W0 --loops dualtrain,ignite --rounds 3"
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from loops import ENGINES, TITLES
from loops.common import CLOCKS, CONDITIONS, NotApplicable, TimedBatches

WORKLOADS = {
    "W0": "a network of one weight: the step is nearly nothing but overhead",
    "W1": "an MLP 128-256-10, batches of 64, AdamW",
    "W2": "a ViT of width 192 and 4 layers, batches of 32, AdamW",
}
STEPS = {"W0": (50, 1000), "W1": (30, 400), "W2": (2, 10)}
"""Workload -> steps to warm up, steps to measure."""

MONITORED_STEPS = 50
"""Steps to measure where something happens every so many steps only."""

PACKAGES = (
    "dualtrain",
    "torch",
    "mindspore",
    "numpy",
    "pytorch-ignite",
    "skorch",
    "lightning",
    "transformers",
    "accelerate",
    "keras",
)

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOG_v": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "KERAS_BACKEND": "torch",
}


def main() -> None:
    options = parse()
    os.environ.update(ENVIRONMENT)
    conditions = [CONDITIONS[name] for name in options.conditions]
    workers = [
        Worker(engine, loop)
        for engine in options.engines
        for loop in ENGINES[engine]
        if loop in options.loops
    ]
    started = time.time()
    samples: dict[str, Any] = {}
    load = []
    try:
        for workload in options.workloads:
            samples[workload] = {worker.name: {} for worker in workers}
            for worker in workers:
                warm_up(worker, workload, conditions, samples[workload][worker.name])
        for round_ in range(options.rounds):
            for workload in options.workloads:
                for worker in workers:
                    measure(worker, workload, options, samples[workload][worker.name])
            load.append(os.getloadavg()[0])
            report(samples, about(options, started, load), options)
            print(f"round {round_ + 1} of {options.rounds}, {time.time() - started:.0f} s", file=sys.stderr)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
    finally:
        for worker in workers:
            worker.stop()
    if not load:
        return
    result = report(samples, about(options, started, load), options)
    tables = "\n\n".join(table(workload, rows, options) for workload, rows in result["summary"].items())
    print(f"\n{tables}\n\n{sentence(result['about'])}")
    draw(result["summary"], options)
    print(f"Written: {options.out / 'overhead.json'}, {options.out / 'overhead.png'}")


def report(samples: dict[str, Any], about: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return and write all results so far, so that an interrupted run keeps them."""
    result = {"about": about, "samples": samples, "summary": summary(samples)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_loop = dict.fromkeys(loop for loops in ENGINES.values() for loop in loops)
    parser.add_argument("--workloads", **names(WORKLOADS))
    parser.add_argument("--engines", **names(ENGINES))
    parser.add_argument("--loops", **names(every_loop))
    parser.add_argument("--conditions", **names(CONDITIONS))
    parser.add_argument("--rounds", type=int, default=7, help="rounds, after one warm-up round")
    parser.add_argument("--steps", type=float, default=1.0, help="factor for the steps of a measurement")
    clocks = "; ".join(f"{name}: {words}" for name, words in CLOCKS.items())
    parser.add_argument(
        "--clock", choices=CLOCKS, default="cpu", help=f"clock of the table and the picture; {clocks}"
    )
    parser.add_argument("--out", type=Path, default=Path("out/overhead"), help="output folder")
    return parser.parse_args()


def names(known: Any) -> Any:
    """Return a parser of an option with comma-separated names."""

    def split(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return found

    return {"type": split, "default": list(known), "metavar": ",".join(known)}


class Worker:
    """A process that runs one loop, and the hand-written loop, on request."""

    def __init__(self, engine: str, loop: str) -> None:
        self.name = f"{engine}/{loop}"
        self.is_bare = loop == ENGINES[engine][0]
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, engine, loop), daemon=True)
        self._process.start()
        other.close()

    def ask(self, workload: str, condition: str, steps: tuple[int, int], *, bare: bool) -> dict[str, Any]:
        """Measure once."""
        try:
            self._connection.send((workload, condition, steps, bare))
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, BrokenPipeError):
            return {"skipped": "the process has died"}
        return answer

    def stop(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def warm_up(worker: Worker, workload: str, conditions: list[Any], found: dict[str, Any]) -> None:
    """Import and compile, and query the conditions that the loop supports."""
    worker.ask(workload, "none", (2, 8), bare=True)
    for condition in conditions:
        answer = worker.ask(workload, condition.name, (2, 8), bare=False)
        if "skipped" in answer:
            print(f"{workload} {worker.name} {condition.name}: {answer['skipped']}", flush=True)
        found[condition.name] = answer if "skipped" in answer else []


def measure(worker: Worker, workload: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure each condition between two measurements of the hand-written loop."""
    warm, usual = STEPS[workload]
    steps = warm, max(1, int(usual * options.steps))
    before: dict[str, Any] | None = None
    for name, samples in found.items():
        if not isinstance(samples, list):
            continue
        if CONDITIONS[name].monitor and steps[1] < MONITORED_STEPS:
            steps, before = (warm, MONITORED_STEPS), None
        if before is None:
            before = worker.ask(workload, "none", steps, bare=True)
        own = worker.ask(workload, name, steps, bare=False)
        after = worker.ask(workload, "none", steps, bare=True)
        failed = next((answer for answer in (before, own, after) if "skipped" in answer), None)
        if failed is not None:
            found[name] = failed
            print(f"{workload} {worker.name} {name}: {failed['skipped']}", flush=True)
            continue
        samples.append(
            {
                "bare": {clock: (before[clock] + after[clock]) / 2 for clock in CLOCKS},
                "own": {clock: own[clock] for clock in CLOCKS},
                "same": own["weights"] == after["weights"],
            }
        )
        before = after


def serve(connection: Any, engine: str, loop: str) -> None:
    """Answer requests: ``(workload, condition, (warm, steps), bare)``."""
    with tempfile.TemporaryDirectory() as folder:
        quiet(Path(folder) / "output.txt")
        logs = (Path(folder) / f"{number}.jsonl" for number in count())
        module: Any = None
        while True:
            try:
                workload, condition, steps, bare = connection.recv()
            except EOFError:
                return
            try:
                if module is None:
                    module = load(engine)
                name = ENGINES[engine][0] if bare else loop
                answer = run(module, name, workload, CONDITIONS[condition], steps, next(logs))
            except NotApplicable as reason:
                answer = {"skipped": str(reason)}
            except ImportError as error:
                answer = {"skipped": f"not installed: {error}"}
            except Exception as error:  # noqa: BLE001 - of whatever framework
                traceback.print_exc()
                answer = {"skipped": f"{type(error).__name__}: {error}"[:300]}
            connection.send(answer)


def quiet(path: Path) -> None:
    """Redirect the output of frameworks to a file."""
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def load(engine: str) -> Any:
    if engine == "torch":
        return importlib.import_module("loops.torch_loops")
    module = importlib.import_module("loops.mindspore_loops")
    module.set_mode(engine)
    return module


def run(module: Any, loop: str, workload: str, condition: Any, steps: tuple[int, int], log: Path) -> Any:
    """Train once; return the microseconds per step and a digest of the trained weights."""
    work = module.work(workload)
    data = TimedBatches(work.batches, *steps)
    gc.collect()
    module.LOOPS[loop](work, condition, data, log)
    if condition.log_interval:
        rows, due = len(log.read_text().splitlines()), len(data) // condition.log_interval
        if not due <= rows <= due + 1:
            raise RuntimeError(f"wrote {rows} rows instead of {due}")
        log.unlink()
    return {**data.microseconds(), "weights": digest(work) if module.SAME_WEIGHTS else None}


def digest(work: Any) -> str:
    """Return a digest of the weights."""
    import hashlib

    return hashlib.sha256(b"".join(array.tobytes() for array in work.weights())).hexdigest()


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Return workload -> loop -> condition -> added cost, in microseconds and in percent."""
    return {
        workload: {
            loop: {condition: add_up(kept) for condition, kept in by_condition.items()}
            for loop, by_condition in loops.items()
        }
        for workload, loops in samples.items()
    }


def add_up(kept: Any) -> dict[str, Any]:
    if not kept or isinstance(kept, dict):
        return kept or {"skipped": "not measured yet"}
    result: dict[str, Any] = {"same": all(sample["same"] for sample in kept)}
    for clock in CLOCKS:
        pairs = [(sample["own"][clock], sample["bare"][clock]) for sample in kept]
        result[clock] = {
            "bare": median(bare for _, bare in pairs),
            "us": spread([own - bare for own, bare in pairs]),
            "percent": spread([100 * (own / bare - 1) for own, bare in pairs]),
        }
    return result


def spread(values: list[float]) -> list[float]:
    """Return the median, and half the distance between the quartiles."""
    if len(values) == 1:
        return [values[0], 0.0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return [median(values), (high - low) / 2]


def title(loop: str) -> str:
    engine, name = loop.split("/")
    return TITLES.get(name, name) + ("" if engine == "torch" else f", {engine.upper()}")


def unit(workload: str) -> str:
    return "us" if workload == "W0" else "percent"


def table(workload: str, rows: dict[str, Any], options: argparse.Namespace) -> str:
    """Return a Markdown table."""
    in_us = unit(workload) == "us"
    what = f"added to the hand-written loop, {'us a step' if in_us else '%'} ({options.clock} time)"
    lines = [
        f"{workload}: {WORKLOADS[workload]}; {what}",
        "",
        "| loop | hand-written, us | " + " | ".join(options.conditions) + " |",
        "|" + "---|" * (len(options.conditions) + 2),
    ]
    for loop, by_condition in rows.items():
        cells, floors = [], []
        for name in options.conditions:
            found = by_condition.get(name, {"skipped": ""})
            if "skipped" in found:
                cells.append("-")
                continue
            value, half = found[options.clock][unit(workload)]
            floors.append(found[options.clock]["bare"])
            digits = 0 if in_us and abs(value) >= 100 else 1
            cells.append(f"{value:+.{digits}f} ±{half:.{digits}f}" + ("" if found["same"] else " *"))
        if floors:
            lines.append(f"| {title(loop)} | {median(floors):.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def about(options: argparse.Namespace, started: float, load: list[float]) -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return {
        "versions": found,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "seconds": round(time.time() - started),
        "load": load,
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def sentence(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"{about['rounds']} rounds, {about['cores']} cores, load {min(about['load']):.1f} to "
        f"{max(about['load']):.1f} (1 is the benchmark itself). Python {about['python']}, {versions}. "
        f"±: half the distance between the quartiles. *: other weights than the hand-written loop's."
    )


def draw(summary: dict[str, Any], options: argparse.Namespace) -> None:
    """Draw the cost of the conditions, with one panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loops = list(dict.fromkeys(loop for rows in summary.values() for loop in rows))
    figure, axes = pyplot.subplots(
        1,
        len(summary),
        figsize=(2 + 4.5 * len(summary), 1.5 + 0.42 * len(loops)),
        sharey=True,
        squeeze=False,
    )
    for axis, (workload, rows) in zip(axes[0], summary.items(), strict=True):
        for number, condition in enumerate(options.conditions):
            shift = (number + 0.5) / len(options.conditions) - 0.5
            points = [
                (place + 0.7 * shift, *found[options.clock][unit(workload)])
                for place, loop in enumerate(loops)
                if "skipped" not in (found := rows.get(loop, {}).get(condition, {"skipped": ""}))
            ]
            if points:
                heights, values, halves = zip(*points, strict=True)
                axis.errorbar(
                    values, heights, xerr=halves, fmt="o", markersize=4, color=f"C{number}",
                    label=CONDITIONS[condition].words,
                )  # fmt: skip
        axis.axvline(0, color="0.6", linewidth=1)
        axis.set_xscale("symlog", linthresh=10)
        axis.set_title(workload)
        axis.set_xlabel(("microseconds a step" if unit(workload) == "us" else "%") + " added")
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks(range(len(loops)), [title(loop) for loop in loops])
    axes[0][0].invert_yaxis()
    handles = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight() * 1.4, 1, 1))
    figure.savefig(options.out / "overhead.png", dpi=120)


if __name__ == "__main__":
    main()
