"""``nox -s hosts``: runs the bench on the hosts of a rig, breaks it, and writes docs/hosts.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.formatting import plural
from bench.run.machine import git_state
from tests.conftest import ROOT
from tests.hosts import parts
from tests.hosts.rig import alone
from tests.varied_table import varied_table

PAGE = ROOT / "docs" / "hosts.md"
DATA = PAGE.with_suffix(".json")
"""What the parts found, by name."""
HEADING = "## What was tried\n"
WHERE = """\
Written by `nox -s hosts`. Hosts are network namespaces on one machine, joined by virtual links, under Slurm.
They share a kernel, and train the smoke matrix over gloo. Nothing was run on several machines, or over NCCL between
hosts. [hosts.json](hosts.json) has what nodes say of jobs that cannot start.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """What is tried, as a subsection of the page."""

    title: str
    header: Sequence[str]
    rows: Callable[[parts.Hosts], Iterator[parts.Row]]
    unshown: Sequence[str] = ()
    """Columns that only the data has."""


FOUND = ("what", "result")
PARTS = {
    "smoke": Part("Every backend", FOUND, parts.smoke),
    "bits": Part(
        "Two ranks on one host, and one on each of two",
        ("backend", "update, bit for bit", "losses", "collectives"),
        parts.bits,
    ),
    "four": Part("All hosts", FOUND, parts.four),
    "faults": Part("Harm to host b while a trial runs", ("harm", "result"), parts.faults),
    "interrupts": Part("Interrupts at random moments, and `--resume`", FOUND, parts.interrupts),
    "batch": Part("The batch script", FOUND, parts.batch),
    "refusals": Part(
        "Jobs that cannot start",
        ("wrong with node 1", "node 0 says", "node 1 says", "exit status", "left behind"),
        parts.refusals,
        unshown=("node 0 says", "node 1 says"),
    ),
}
"""All parts by name, in the order of the page."""


def try_(name: str, on: parts.Hosts) -> dict[str, Any]:
    """What a part finds, and where and when; prints each row at once."""
    began, rows = time.monotonic(), []
    for row in PARTS[name].rows(on):
        rows.append(row)
        print(f"{name}: {'' if row.good else 'WRONG: '}{' | '.join(row.cells)}", flush=True)
        if not row.good:
            print((on.log).read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
    git = git_state()
    return {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "commit": f"{str(git['commit'])[:12]}{'' if git['clean'] else ' with changes'}",
        "cores": os.cpu_count(),
        "slurm": slurm_version(),
        "minutes": round((time.monotonic() - began) / 60),
        "rows": [{"cells": row.cells, "good": row.good} for row in rows],
    }


def slurm_version() -> str:
    """Name and version, such as ``Slurm 22.05.8``."""
    told = subprocess.run(["slurmd", "-V"], stdout=subprocess.PIPE, text=True, check=True)
    return f"Slurm {told.stdout.split()[-1]}"


def page(head: str, data: Mapping[str, Any]) -> str:
    """The page: what is written by hand, then a subsection for each part that was tried."""
    tried = {name: data[name] for name in PARTS if name in data}
    lines = [HEADING, WHERE]
    mostly = ""
    if times := Counter(_when(found) for found in tried.values()):
        mostly, _ = times.most_common(1)[0]
        unless = ", unless said below" * (len(times) > 1)
        lines += [f"{mostly}{unless}.", ""]
    for name, found in tried.items():
        part = PARTS[name]
        lines += [f"### {part.title}", ""]
        if _when(found) != mostly:
            lines += [f"{_when(found)}.", ""]
        shown = [place for place, title in enumerate(part.header) if title not in part.unshown]
        rows = [[*row["cells"][:-1], _result(row)] for row in found["rows"]]
        titles = [part.header[place] for place in shown]
        cells = [[row[place] for place in shown] for row in rows]
        if len(cells) == 1:
            lines += [f"{': '.join(cells[0])}.", ""]
            continue
        in_all = _shared_by_all(cells)
        lines += varied_table(titles, _counted(cells))
        if in_all:
            lines += [f"In all: {'; '.join(in_all)}.", ""]
    return head + "\n".join(lines)


def _shared_by_all(rows: Sequence[list[str]]) -> list[str]:
    """What the results of several rows all say beside other things; taken out of them."""
    results = [row[-1].split("; ") for row in rows]
    shared = [part for part in results[0] if all(part in result for result in results)]
    if any(set(result) <= set(shared) for result in results):
        return []
    for row, result in zip(rows, results, strict=True):
        row[-1] = "; ".join(part for part in result if part not in shared)
    return shared


def _counted(rows: Sequence[list[str]]) -> list[list[str]]:
    """Equal rows as one, with their number."""
    numbers = Counter(map(tuple, rows))
    return [
        [f"{what}, {plural(number, 'time')}" if number > 1 else what, *others]
        for (what, *others), number in numbers.items()
    ]


def _when(found: Mapping[str, Any]) -> str:
    slurm = f", by {found['slurm']}" if "slurm" in found else ""
    return f"On {found['date']}, at commit {found['commit']}, on {found['cores']} cores{slurm}"


def _result(row: Mapping[str, Any]) -> str:
    """What came of it; backends that are invalid for the same reason are named together."""
    parts_of: dict[str, list[str]] = {}
    for part in row["cells"][-1].split("; "):
        if part.startswith("so "):  # what follows from the part before
            continue
        backend, _, reason = part.rpartition(" is invalid: ")
        parts_of.setdefault(reason, []).append(backend)
    told = [
        f"{' and '.join(names)} invalid: {reason}" if all(names) else reason
        for reason, names in parts_of.items()
    ]
    return ("" if row["good"] else "**wrong:** ") + "; ".join(told)


def main() -> None:
    names = list(PARTS)
    parser = argparse.ArgumentParser(prog="nox -s hosts --", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="the other parts of the page stay"
    )
    parser.add_argument(
        "--hosts", type=int, choices=range(2, 9), default=4, help="how many; most parts use two"
    )
    arguments = parser.parse_args()
    alone("-m", "tests.hosts", *sys.argv[1:])
    good = True
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        parts.hosts(arguments.hosts, Path(folder)) as on,
    ):
        for name in arguments.only:
            try:
                found = try_(name, on)
                data = json.loads(DATA.read_text(encoding="utf-8")) | {name: found}
                DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
                PAGE.write_text(
                    page(PAGE.read_text(encoding="utf-8").partition(HEADING)[0], data),
                    encoding="utf-8",
                )
                good = good and all(row["good"] for row in data[name]["rows"])
            except Exception:  # the other parts can still be tried
                traceback.print_exc()
                good = False
    sys.exit(not good)


if __name__ == "__main__":
    main()
