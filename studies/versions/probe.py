"""``python -m studies.versions.probe PACKAGE ANSWER``: measures the version in whose environment it runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement


def main(package: str, answer: Path) -> None:
    """Import the package, run its probes, and write what was measured to the file ``answer``."""
    import torch

    module = importlib.import_module(package)
    probes = importlib.import_module(f"studies.versions.{package}_probe")
    found = {
        "version": module.__version__,
        # Rather than that of the environment below.
        "own": Path(str(module.__file__)).is_relative_to(sys.prefix),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "departures": departures(package),
        "findings": [dataclasses.asdict(finding) for finding in probes.findings()],
    }
    answer.write_text(json.dumps(found), encoding="utf-8")


def departures(package: str) -> list[str]:
    """What the package's metadata requires and does not get here."""
    found = []
    for line in requires(package) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement.name} (not here)")
            continue
        if not requirement.specifier.contains(here, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier} ({here} here)")
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
