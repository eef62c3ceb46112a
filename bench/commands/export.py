"""``export``: a run in the formats of other programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import GOOD, InputError

if TYPE_CHECKING:
    from bench.analysis.frames import Frames

FORMATS = ("pytest-benchmark", "csv", "parquet")
DESCRIPTION = (
    "Writes a run for other programs: pytest-benchmark (a JSON file for pytest-benchmark compare and dashboards that "
    "read it; a round is a trial, and what is not comparable is left out), csv (a folder with one file per frame and "
    "columns.csv with units; text never acts as a formula) or parquet (a folder; units in each field's metadata)."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("export", help="write a run for other programs", description=DESCRIPTION)
    option = parser.add_argument
    option("run", type=Path, metavar="RUN", help="the run's folder, e.g. results/<run>")
    option("--format", required=True, choices=FORMATS, help="what to write")
    option("--out", required=True, type=Path, metavar="PATH", help="a .json file, or for csv and parquet a folder")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write, and say what."""
    import bench

    frames = bench.load(arguments.run)
    try:
        written = _write(frames, arguments.format, arguments.out)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--out {arguments.out}: cannot be written ({why}); name a path that can") from error
    names = ", ".join(path.name for path in written)
    print(f"written: {names} to {written[0].parent}", file=sys.stderr)
    return GOOD


def _write(frames: Frames, form: str, out: Path) -> list[Path]:
    if form != "pytest-benchmark":
        from bench.report import export

        if out.resolve() == frames.folder.resolve():
            raise InputError(f"--out {out}: is the run's own folder; name another one")
        return export.write_csv(frames, out) if form == "csv" else export.write_parquet(frames, out, frames.run_id)
    from bench.report.pytest_benchmark import document

    if out.suffix != ".json":
        raise InputError(f"--out {out}: pytest-benchmark reads files that end in .json; name one")
    found = document(frames)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=4, allow_nan=False) + "\n", encoding="utf-8")
    for one in found["left_out"]:
        print(f"left out: {one['name']}: {one['why'] or one['status']}", file=sys.stderr)
    if not found["benchmarks"]:
        print("left out: every cell, so the file holds no benchmark", file=sys.stderr)
    return [out]
