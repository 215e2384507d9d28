"""What is installed, which devices work, and what is wrong: ``dualtrain doctor``.

``gather`` collects facts, ``check`` judges them and ``report`` writes them down. ``check`` is a
pure function of the facts, which are plain data: any clash can be described without having it.

No framework is imported into this process. Versions come from what pip has recorded; devices are
tried by ``backends/*/devices.py`` in processes of their own, with a time limit.
"""

from __future__ import annotations

from dualtrain.doctor.checks import Finding, check
from dualtrain.doctor.facts import FRAMEWORKS, PACKAGES, Facts, gather
from dualtrain.doctor.report import as_json, report

__all__ = ["FRAMEWORKS", "PACKAGES", "Facts", "Finding", "as_json", "check", "gather", "report"]
