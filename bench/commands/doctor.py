"""``doctor``: says what this machine can run and what it cannot, why, and how to fix it.

With ``--json`` one object: ``findings``, each with ``level`` (error, warning, good), ``topic`` and ``text``; ``errors``
and ``warnings``, their numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from bench.errors import BAD, GOOD
from bench.files import RESULTS
from bench.words import plural

DESCRIPTION = (
    "Looks at Python, packages and their known defects, torch, the GPUs and their driver, NCCL, what is between the "
    "GPUs, /dev/shm, the loopback device, cores, memory, disk, and other processes; takes some seconds. Exit status 1 "
    "if something cannot run or would compute something else, 0 with warnings alone."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor", help="say what this machine can run, and how to fix what it cannot", description=DESCRIPTION
    )
    option = parser.add_argument
    option("--out", type=Path, default=RESULTS, metavar="DIR", help="where runs will go (default: results)")
    option("--json", action="store_true", help="one JSON object; its keys: see bench/commands/doctor.py")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine and print the findings; 1 if there is an error."""
    from bench.backends.base import registry
    from bench.findings import Level
    from bench.plan.cell import REFERENCES, Device
    from bench.run import doctor

    backends = {name: backend for name, backend in registry().items() if name not in REFERENCES}
    missing = {str(device): {name: backend.missing(device) for name, backend in backends.items()} for device in Device}
    found = doctor.examine(arguments.out, missing)
    errors, warnings = (sum(finding.level is level for finding in found) for level in (Level.ERROR, Level.WARNING))
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in found]
        print(json.dumps({"findings": findings, "errors": errors, "warnings": warnings}))
        return BAD if errors else GOOD
    from bench.report.terminal import show_findings

    verdict = (
        "fix the errors first" if errors else "runs are possible; mind the warnings" if warnings else "all is well"
    )
    show_findings(found, f"{plural(errors, 'error')}, {plural(warnings, 'warning')}: {verdict}")
    return BAD if errors else GOOD
