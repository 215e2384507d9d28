"""Requirements of packages, from their metadata."""

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
    """Read ``Requires-Dist``: requirements that apply on this machine, each with its extra.

    Args:
        facts: The result of ``gather``.
        lines: The requirements of one package.
        extras: The extras to include. Requirements of other extras are left out, and so are
            invalid lines of old packages.
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
    """Return dualtrain's own requirements."""
    return requirements(facts, facts["dualtrain"]["requires"], facts["dualtrain"]["extras"])


def short(requirement: Requirement) -> str:
    """Return a requirement without its marker: ``torch>=2.6``."""
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


def satisfies(version: str, specifiers: SpecifierSet | str) -> bool:
    """Return whether a version is in a range such as ``>=2.7,<2.11``; True for an invalid version."""
    try:
        found = Version(version)
    except InvalidVersion:
        return True
    return SpecifierSet(str(specifiers)).contains(found, prereleases=True)
