"""Format facts and findings as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from packaging.utils import canonicalize_name

from dualtrain.doctor.checks import Finding
from dualtrain.doctor.facts import PACKAGES, Facts, told_by, version_of
from dualtrain.doctor.requirements import own_requirements


def report(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """Return the output lines of ``dualtrain doctor``."""
    python = facts["python"]
    rows = [
        (
            "Python",
            python["version"],
            f"{python['executable']} ({python['environment'] or 'no environment'})",
        ),
        ("dualtrain", facts["dualtrain"]["version"], facts["dualtrain"]["location"]),
    ]
    for name in PACKAGES:
        version = version_of(facts, name)
        rows.append((name, version or "-", _devices(facts, name) if version else _how(facts, name)))
    complete = _extras(facts)
    if complete:
        rows.append(("extras", "", ", ".join(complete)))
    hardware = [*facts["hardware"]["nvidia"], *facts["hardware"]["ascend"]]
    rows.append(("accelerators", "", ", ".join(hardware) or "none"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]
    for finding in findings:
        lines += ["", f"{finding.level}: {finding.text}"]
        if finding.command:
            lines.append(f"    {finding.command}")
    problems = sum(finding.level == "problem" for finding in findings)
    verdict = "Nothing is wrong." if not problems else f"{problems} problem{'s' if problems > 1 else ''}."
    return [*lines, "", verdict]


def _devices(facts: Facts, name: str) -> str:
    """Return a text with a framework's devices and whether they work."""
    told = told_by(facts, name)
    names = {line["device"]: line["name"] for line in told if "name" in line}
    works = {line["device"]: line["works"] for line in told if "works" in line}
    shown = []
    for device, title in names.items():
        shown.append(
            f"{device}{f' ({title})' if title else ''} {'works' if works.get(device) else 'does not work'}"
        )
    return ", ".join(shown)


def _how(facts: Facts, name: str) -> str:
    extra = PACKAGES[name]
    offered = facts["dualtrain"]["extras"]
    what = name if extra is None or (offered and extra not in offered) else f"dualtrain[{extra}]"
    return f"not installed (pip install '{what}')"


def _extras(facts: Facts) -> list[str]:
    """Return the extras of dualtrain whose packages are all installed."""
    needs: dict[str, list[str]] = {}
    for requirement, extra in own_requirements(facts):
        if extra is not None:
            needs.setdefault(extra, []).append(canonicalize_name(requirement.name))
    return [extra for extra, names in needs.items() if all(name in facts["installed"] for name in names)]


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return facts and findings as JSON."""
    return json.dumps({"facts": facts, "findings": [f._asdict() for f in findings]}, indent=2)
