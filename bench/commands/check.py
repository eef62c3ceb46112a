"""``check``: a finished run audited from its raw samples.

With ``--json`` one object: ``run``, its folder; ``findings``, each with ``level`` (error, warning, good), ``topic`` and
``text``; ``errors`` and ``warnings``, their numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from bench.errors import BAD, GOOD

DESCRIPTION = (
    "Reads a run's journal again, recomputes what follows from it, and says what a reader should know before citing "
    "it: schema and hashes, medians, order, drift, outliers, two modes, ranks out of balance, noise floor, gates. Exit "
    "status 1 if the data is not what it says it is; warnings alone are no reason."
)
STYLES = {"error": "bold red", "warning": "yellow", "good": "green"}


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("check", help="audit a finished run from its raw samples", description=DESCRIPTION)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. results/<run>")
    parser.add_argument("--json", action="store_true", help="one JSON object; its keys: see bench/commands/check.py")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and show; 1 if there is an error."""
    from rich.console import Console
    from rich.text import Text

    from bench.analysis.check import Level, check

    found = check(arguments.run)
    errors, warnings = (sum(one.level is level for one in found) for level in (Level.ERROR, Level.WARNING))
    if arguments.json:
        findings = [dataclasses.asdict(one) for one in found]
        print(json.dumps({"run": str(arguments.run), "findings": findings, "errors": errors, "warnings": warnings}))
        return BAD if errors else GOOD
    console = Console()
    width = max(len(one.topic) for one in found)
    for one in found:
        mark = Text(f"{one.level:7}  {one.topic:{width}}  ", style=STYLES[one.level])
        console.print(mark + Text(one.text), soft_wrap=True)
    verdict = "do not cite it" if errors else "say these things when you cite it" if warnings else "clean"
    console.print(f"{errors} errors, {warnings} warnings: {verdict}", highlight=False)
    return BAD if errors else GOOD
