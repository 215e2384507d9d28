"""What packages require of each other, as their metadata says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dualtrain.doctor.facts import Facts


def requirements(
    facts: Facts, lines: Sequence[str], extras: Sequence[str] = ()
) -> Iterator[tuple[Requirement, str | None]]:
    """Read ``Requires-Dist``: what applies on this machine, and the extra that asks for it.

    Args:
        facts: What ``gather`` returns.
        lines: The requirements of one package.
        extras: Those of its extras that count. What other extras ask for is left out, and so is a
            line that is no requirement by today's rules: old packages have such.
    """
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        for extra in ("", *extras):
            marker = requirement.marker
            if marker is None or marker.evaluate({**facts["markers"], "extra": extra}):
                yield requirement, extra or None
                break


def own_requirements(facts: Facts) -> Iterator[tuple[Requirement, str | None]]:
    """Return what dualtrain itself asks for."""
    return requirements(facts, facts["dualtrain"]["requires"], facts["dualtrain"]["extras"])


def short(requirement: Requirement) -> str:
    """Return a requirement as one types it, without its marker: ``torch>=2.6``."""
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


def satisfies(version: str, specifiers: SpecifierSet | str) -> bool:
    """Say whether a version is in a range such as ``>=2.7,<2.11``; one that is no version is."""
    try:
        found = Version(version)
    except InvalidVersion:
        return True
    return SpecifierSet(str(specifiers)).contains(found, prereleases=True)
