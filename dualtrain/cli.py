"""The command line: ``dualtrain show``, ``dualtrain plot`` and ``dualtrain doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dualtrain._version import __version__
from dualtrain.errors import DualTrainError
from dualtrain.logs.reader import Log, read_log

_WIDTH = 28


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; None: those of the process.

    Returns:
        The exit status: 0; 1 if a log cannot be read or drawn (with a message on stderr) or if
        ``doctor`` finds a problem. Wrong usage exits with 2, from argparse.
    """
    parser = argparse.ArgumentParser(
        prog="dualtrain", description="Show and plot training logs, and check the installation."
    )
    parser.add_argument("--version", action="version", version=f"dualtrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="summarise a log: the run, its steps, each value")
    show.add_argument("log", metavar="LOG")
    plot = commands.add_parser(
        "plot",
        help="draw one or more logs as a picture",
        description="Logs of several runs are compared, one line per run. The logs of one run's monitors "
        "are drawn as one picture of its curves, and one of its attention: FILE.attention.png.",
    )
    plot.add_argument("logs", metavar="LOG", nargs="+")
    plot.add_argument("-o", "--output", metavar="FILE.png", default="dualtrain.png")
    doctor = commands.add_parser("doctor", help="check packages and devices, and report problems")
    doctor.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    doctor.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=120.0, help="limit for each framework (120)"
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor(arguments.timeout, arguments.json)
    try:
        if arguments.command == "show":
            print("\n".join(_summary(read_log(arguments.log))))  # noqa: T201
        else:
            logs = [read_log(log) for log in arguments.logs]
            for picture in _pictures(logs, Path(arguments.output)):
                print(picture)  # noqa: T201
    except (DualTrainError, OSError, ValueError) as error:
        print(f"dualtrain: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _doctor(timeout: float, as_json: bool) -> int:
    from dualtrain import doctor

    facts = doctor.gather(timeout=timeout)
    findings = doctor.check(facts)
    print(doctor.as_json(facts, findings) if as_json else "\n".join(doctor.report(facts, findings)))  # noqa: T201
    return int(any(finding.level == "problem" for finding in findings))


def _pictures(logs: Sequence[Log], output: Path) -> Iterator[Path]:
    """Draw one picture of the logs' values, and one picture for each log with arrays."""
    if _of_one_monitored_run(logs):
        from dualtrain.logs.monitor_plot import plot_monitor

        yield plot_monitor(logs, output)
    else:
        from dualtrain.logs.plot import plot_logs

        yield plot_logs(logs, output)
    with_arrays = [(number, log) for number, log in enumerate(logs, 1) if log.arrays()]
    for number, log in with_arrays:
        from dualtrain.logs.attention_plot import plot_attention

        which = f".{number}" if len(with_arrays) > 1 else ""
        name = f"{output.stem}.attention{which}{output.suffix or '.png'}"
        yield plot_attention(log, output.with_name(name))


def _of_one_monitored_run(logs: Sequence[Log]) -> bool:
    """Return whether these are logs of one run: a monitor's, perhaps with logs of other values."""
    names = [set(log.names) - {"global_step"} for log in logs]
    return len(set().union(*names)) == sum(map(len, names)) and any(
        {"attention", "parameters"} & own for own in names
    )


def _summary(log: Log) -> list[str]:
    lines = [f"{log.path}: {len(log.records)} records"]
    evaluations = sum(record.mode == "eval" for record in log.records)
    if evaluations:
        lines[0] += f", {evaluations} of them evaluations"
    if log.records:
        first, last = log.records[0], log.records[-1]
        lines[0] += f", steps {first.step} to {last.step}, epochs {first.epoch} to {last.epoch}"
    if log.torn:
        lines.append(f"{len(log.torn)} torn lines left out")
    if log.meta:
        told = ("started", "model", "backend", "backend_version", "dualtrain", "python")
        lines.append("  ".join(f"{key} {log.meta[key]}" for key in told if log.meta.get(key) is not None))
    for mode, heading in (("train", "value"), ("eval", "evaluation")):
        if mode == "train" or log.names_of(mode):
            lines += _columns(log, mode, heading)
    return lines


def _columns(log: Log, mode: str, heading: str) -> list[str]:
    lines = []
    if log.records:
        lines.append(f"{heading:<{_WIDTH}}{'first':>14}{'last':>14}{'min':>14}{'max':>14}")
    for name in log.names_of(mode):
        values = log.column(name, mode)[1]
        groups = max((len(v) for v in values if isinstance(v, tuple)), default=0)
        if not groups:
            lines += _row(name, values)
        if any(isinstance(item, dict) for v in values if isinstance(v, tuple) for item in v):
            lines += _table(values)
            continue
        for group in range(groups):
            of_group = [v[group] for v in values if isinstance(v, tuple) and group < len(v)]
            lines += _row(f"{name} group {group}", of_group)
    return lines


def _table(tables: Sequence[Any]) -> list[str]:
    """Summarise the numbers of a table by their means over its rows."""
    rows = [[row for row in table if isinstance(row, dict)] for table in tables if isinstance(table, tuple)]
    lines = []
    for name in dict.fromkeys(name for table in rows for row in table for name in row):
        of_steps = [[row[name] for row in table if isinstance(row.get(name), float)] for table in rows]
        lines += _row(f"mean {name}", [sum(numbers) / len(numbers) for numbers in of_steps if numbers])
    return lines


def _row(name: str, values: Sequence[object]) -> list[str]:
    numbers = [v for v in values if isinstance(v, (int, float))]
    if not numbers:
        return []
    ordered = [v for v in numbers if v == v] or numbers  # NaN cannot be ordered
    shown = (numbers[0], numbers[-1], min(ordered), max(ordered))
    return [f"{name:<{_WIDTH}}" + "".join(f"{number:>14.6g}" for number in shown)]
