"""``nox -s hosts``: runs the bench on the hosts of a rig, breaks it, and writes docs/hosts.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
`nox -s hosts` writes this section from docs/hosts.json, and exits with 1 if something is not as it must be. Hosts are
network namespaces on one machine, joined by virtual links, under a real Slurm; they share a kernel, and train the smoke
matrix over gloo. What nodes say of jobs that cannot start is in the JSON. Nothing was run on several machines, or over
NCCL between hosts.
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
        "minutes": round((time.monotonic() - began) / 60),
        "rows": [{"cells": row.cells, "good": row.good} for row in rows],
    }


def page(head: str, data: Mapping[str, Any]) -> str:
    """The page: what is written by hand, then a subsection for each part that was tried."""
    tried = {name: data[name] for name in PARTS if name in data}
    times = {_when(found) for found in tried.values()}
    lines = [HEADING, WHERE]
    if len(times) == 1:
        lines += [*times, ""]
    for name, found in tried.items():
        part = PARTS[name]
        lines += [f"### {part.title}", ""]
        if len(times) > 1:
            lines += [_when(found), ""]
        shown = [place for place, title in enumerate(part.header) if title not in part.unshown]
        rows = [[*row["cells"][:-1], _result(row)] for row in found["rows"]]
        titles = [part.header[place] for place in shown]
        lines += varied_table(titles, [[row[place] for place in shown] for row in rows])
    return head + "\n".join(lines)


def _when(found: Mapping[str, Any]) -> str:
    return f"On {found['date']}, at commit {found['commit']}, on {found['cores']} cores."


def _result(row: Mapping[str, Any]) -> str:
    return str(row["cells"][-1] if row["good"] else f"**wrong:** {row['cells'][-1]}")


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
                data = json.loads(DATA.read_text(encoding="utf-8")) | {name: try_(name, on)}
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
