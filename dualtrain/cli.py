"""The command line: ``dualtrain show``, ``dualtrain plot`` and ``dualtrain doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dualtrain._version import __version__
from dualtrain.errors import DualTrainError
from dualtrain.logs.reader import Log, read_log


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; None: those of the process.

    Returns:
        The exit status: 0, 1 when a log cannot be read or drawn (with a sentence on stderr) or when
        ``doctor`` finds something wrong; 2 for wrong usage comes from argparse.
    """
    parser = argparse.ArgumentParser(
        prog="dualtrain", description="Look at training logs, and at the installation."
    )
    parser.add_argument("--version", action="version", version=f"dualtrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="summarise a log: the run, its steps, each value")
    show.add_argument("log", metavar="LOG")
    plot = commands.add_parser("plot", help="draw one or more logs as a picture")
    plot.add_argument("logs", metavar="LOG", nargs="+")
    plot.add_argument("-o", "--output", metavar="FILE.png", default="dualtrain.png")
    doctor = commands.add_parser("doctor", help="say what is installed, which devices work, what is wrong")
    doctor.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    doctor.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=120.0, help="for a framework to answer (120)"
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor(arguments.timeout, arguments.json)
    try:
        if arguments.command == "show":
            print("\n".join(_summary(read_log(arguments.log))))  # noqa: T201
        else:
            from dualtrain.logs.plot import plot_logs

            print(plot_logs(arguments.logs, arguments.output))  # noqa: T201
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


def _summary(log: Log) -> list[str]:
    lines = [f"{log.path}: {len(log.records)} records"]
    if log.records:
        first, last = log.records[0], log.records[-1]
        lines[0] += f", steps {first.step} to {last.step}, epochs {first.epoch} to {last.epoch}"
    if log.torn:
        lines.append(f"{len(log.torn)} torn lines left out")
    if log.meta:
        told = ("started", "model", "backend", "backend_version", "dualtrain", "python")
        lines.append("  ".join(f"{key} {log.meta[key]}" for key in told if log.meta.get(key) is not None))
    if log.records:
        lines.append(f"{'value':<20}{'first':>14}{'last':>14}{'min':>14}{'max':>14}")
    for name in log.names:
        values = log.column(name)[1]
        groups = max((len(v) for v in values if isinstance(v, tuple)), default=0)
        if not groups:
            lines += _row(name, values)
        for group in range(groups):
            of_group = [v[group] for v in values if isinstance(v, tuple) and group < len(v)]
            lines += _row(f"{name} group {group}", of_group)
    return lines


def _row(name: str, values: Sequence[object]) -> list[str]:
    numbers = [v for v in values if isinstance(v, (int, float))]
    if not numbers:
        return []
    ordered = [v for v in numbers if v == v] or numbers  # NaN has no place in an order
    shown = (numbers[0], numbers[-1], min(ordered), max(ordered))
    return [f"{name:<20}" + "".join(f"{number:>14.6g}" for number in shown)]
