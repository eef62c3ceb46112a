"""``bytes``: the page on collectives and memory, from runs that counted them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import reading
from bench.errors import GOOD, InputError

DESCRIPTION = (
    "Writes docs/memory-and-bytes.md from runs that are there: of the matrix 'bytes', and of large models with "
    "--fake-tensors. Nothing is measured."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bytes", help="what was counted and held, beside what formulas say, as a page", description=DESCRIPTION
    )
    option = parser.add_argument
    option("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, e.g. results/bytes")
    option("--accumulation", type=Path, metavar="FILE", help="what 'accumulation --errors --json' printed")
    option("--docs", type=Path, metavar="FILE", help="write the page there instead of printing it")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write or print the page."""
    from bench.analysis.loading import load
    from bench.report.bytes_page import page

    runs = []
    seen: dict[str, Path] = {}
    for folder in arguments.runs:
        found = load(folder)
        twice = sorted(found.cells.keys() & seen.keys())
        if twice:
            raise InputError(
                f"{folder}: holds {found.cells[twice[0]].label}, as {seen[twice[0]]} does; name one run of each cell"
            )
        seen |= dict.fromkeys(found.cells, folder)
        runs.append(found)
    rows = _rows(arguments.accumulation) if arguments.accumulation else []
    parts = ["python -m bench bytes", *map(str, arguments.runs)]
    parts += [f"--accumulation {arguments.accumulation}"] * bool(arguments.accumulation)
    text = page(runs, rows, " ".join([*parts, f"--docs {arguments.docs}" if arguments.docs else ""]).strip())
    if not arguments.docs:
        print(text)
        return GOOD
    try:
        arguments.docs.parent.mkdir(parents=True, exist_ok=True)
        arguments.docs.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--docs {arguments.docs}: cannot be written ({error.strerror}); name a file that can"
        ) from error
    return GOOD


def _rows(path: Path) -> list[dict[str, Any]]:
    content = reading.read(path, f"--accumulation {path}", "name a file that can")
    try:
        return [json.loads(line) for line in content.decode().splitlines() if line]
    except (ValueError, RecursionError) as error:
        raise InputError(f"--accumulation {path}: is not JSON lines ({error})") from error
