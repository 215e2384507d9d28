"""``dualtrain doctor``: installed packages, working devices, and problems of an installation.

``gather`` collects facts, ``check`` derives findings and ``report`` formats them. ``check`` is a
pure function of the facts, which are plain data, so that each problem can be tested without having it.

No framework is imported into this process. Versions are read from package metadata; devices are
tested by ``backends/*/devices.py`` in separate processes, with a time limit.
"""

from __future__ import annotations

from dualtrain.doctor.checks import Finding, check
from dualtrain.doctor.facts import FRAMEWORKS, PACKAGES, Facts, gather
from dualtrain.doctor.report import as_json, report

__all__ = ["FRAMEWORKS", "PACKAGES", "Facts", "Finding", "as_json", "check", "gather", "report"]
