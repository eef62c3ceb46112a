"""``nox -s hosts``: runs the bench on the hosts of a rig, at several rates, breaks it, and writes docs/hosts.md."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.run.machine import git_state
from tests.conftest import ROOT
from tests.hosts import parts
from tests.hosts.rig import alone

PAGE = ROOT / "docs" / "hosts.md"
HEADING = "## What was tried\n"
RATES = ("", "1gbit", "200mbit")
WHERE = """`nox -s hosts` writes this section, and exits with 1 if something is not as it must be. It makes network
namespaces on one machine, joined by virtual links whose rate `tc tbf` limits, under a real Slurm, and trains the smoke
matrix over gloo. All hosts share one kernel, so the load of one is not counted as foreign to the others. Nothing was
run on several machines, or over NCCL between hosts.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """What is tried, as a subsection of the page."""

    title: str
    header: Sequence[str]
    rows: Callable[[parts.Hosts], Iterator[parts.Row]]
    note: str = ""


def every(rates: Sequence[str]) -> dict[str, Part]:
    """All parts by name, in the order of the page."""
    found = ("what", "result")
    timed = ("link", "trials ok", "all-reduce, bus MB/s", *(f"{name}, s/step" for name in parts.TIMED))
    once = "One trial of the smallest model each: do not cite these times."
    return {
        "smoke": Part("Every backend", found, parts.smoke),
        "rates": Part("Links of several rates, 2 + 2 ranks", timed, partial(parts.rates, limits=rates), once),
        "bits": Part(
            "Two ranks on one host, and one on each of two",
            ("backend", "update, bit for bit", "losses", "collectives"),
            parts.bits,
        ),
        "four": Part("All hosts", found, parts.four),
        "faults": Part("Harm to host b while a trial runs", ("harm", "result"), parts.faults),
        "interrupts": Part("Interrupts at random moments, and `--resume`", found, parts.interrupts),
        "refusals": Part(
            "Jobs that cannot start",
            ("wrong with node 1", "node 0 says", "node 1 says", "exit status", "left behind"),
            parts.refusals,
        ),
    }


def write(name: str, text: str) -> None:
    """Put a subsection into the page, in its place among those that are there."""
    head, _, section = PAGE.read_text(encoding="utf-8").partition(HEADING)
    found = {part.partition("\n")[0]: part for part in section.split("\n### ")[1:]}
    found[every(RATES)[name].title] = text
    kept = [found[part.title] for part in every(RATES).values() if part.title in found]
    shown = "".join(f"\n### {part.strip()}\n" for part in kept)
    PAGE.write_text(f"{head}{HEADING}\n{WHERE}{shown}", encoding="utf-8")


def try_(name: str, part: Part, on: parts.Hosts) -> tuple[str, bool]:
    """The subsection of a part, and whether all is as it must be; prints each row at once."""
    began, rows = time.monotonic(), []
    for row in part.rows(on):
        rows.append(row)
        print(f"{name}: {'' if row.good else 'WRONG: '}{' | '.join(row.cells)}", flush=True)
        if not row.good:
            print((on.log).read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
    good = all(row.good for row in rows)
    cells = [part.header, ["---"] * len(part.header), *([*row.cells[:-1], _told(row)] for row in rows)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    git = git_state()
    code = f"commit {str(git['commit'])[:12]}{'' if git['clean'] else ' with changes'}"
    when = f"On {datetime.datetime.now(datetime.UTC).date()}, at {code}, on {os.cpu_count()} cores"
    minutes = f"in {(time.monotonic() - began) / 60:.0f} minutes"
    return "\n\n".join(filter(None, (part.title, f"{when}, {minutes}.", table, part.note))), good


def _told(row: parts.Row) -> str:
    return row.cells[-1].replace("|", "\\|") if row.good else f"**wrong:** {row.cells[-1]}"


def main() -> None:
    names = list(every(RATES))
    parser = argparse.ArgumentParser(prog="nox -s hosts --", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the other parts of the page stay")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, as tc names them; '' for no limit")
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=4, help="how many; most parts use two")
    arguments = parser.parse_args()
    alone("-m", "tests.hosts", *sys.argv[1:])
    good = True
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, parts.hosts(arguments.hosts, Path(folder)) as on:
        for name in arguments.only:
            try:
                text, fine = try_(name, every(arguments.rates)[name], on)
                write(name, text)
                good = good and fine
            except Exception:  # the other parts can still be tried
                traceback.print_exc()
                good = False
    sys.exit(not good)


if __name__ == "__main__":
    main()
