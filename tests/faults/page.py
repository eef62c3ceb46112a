"""What the full form found, kept as JSON and written as the second part of a page."""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from bench.formatting import plain, plural
from bench.run import machine
from tests.faults.harness import HANG_S, TIMEOUT_S
from tests.faults.leaks import ENDING_S
from tests.varied_table import varied_table

Facts = dict[str, dict[str, dict[str, Any]]]
"""Rows by section and name: their ``cells``, and when they were ``measured``."""
HEADING = "## What `nox -s faults` found\n"
"""What stands above it is written by hand, and kept."""
SECTIONS = {
    "faults": (
        "### Faults\n\n"
        "A backend misbehaves in the second window of its trial (W = 2, gloo), on rank 1 if no other is named, after "
        "the reference and before a sound backend, which both have to be ok. Limits are "
        f"{HANG_S} s without progress and {TIMEOUT_S} s of a trial; seconds are the longest trial's. What is left "
        f"{ENDING_S:g} s after the run's end (processes, ports, shared memory, semaphores, locks, temporary files) "
        "would be named. What is not as it must be is bold.",
        (),
    ),
    "machine": ("", ()),
    "kills": (
        "### Kills\n\n"
        "The runner gets a signal at seeded random moments and is resumed, until the run is finished. Its journal must "
        "then have the trials of an undisturbed run, each once, equal in all but timings. *Lost* are finished trials "
        "that it lacks after a kill. Seconds are the longest from a signal to the runner's end.",
        (
            "signal",
            "of",
            "kills",
            "runs",
            "trials compared",
            "lost",
            "differing",
            "seconds",
            "left behind",
        ),
    ),
    "fuzz": (
        "### Hostile input\n\n"
        "Inputs are made by hypothesis, the same ones every time (numbers in brackets). Each must end in a result or "
        "in one line that says what is wrong, and nothing may be written outside of the output folder.",
        (),
    ),
    "attacks": (
        "### Attacks that were tried\n\n"
        "What a stranger's folder, a stranger on the network, or an accident can do. "
        "[reliability.json](reliability.json) says what each must lead to, and what it led to in 1.1.0.",
        ("what is tried", "tests passed"),
    ),
    "null": (
        "### What the bench costs\n\n"
        "The runner's time per trial is that between two lines of the journal without the trial, and must stay under "
        "0.2 s. *Beside training* is the median of what else a trial takes, from forking its ranks to ending them. "
        "Memory is the runner's, resident, and its growth is counted from a tenth of the trials on.",
        (),
    ),
}
"""Of each section its heading and text, and the head of its table."""
COMMANDS_OF = ("an edited or broken run, read by ", "arguments of ")
"""Beginnings of rows that differ by command."""


def write(page: Path, facts: Facts, outcomes: Mapping[str, str]) -> None:
    """Write the page and, beside it, its data; rows that were not measured now are kept from before.

    What stands above HEADING is kept, too.
    """
    data, git = page.with_suffix(".json"), machine.git_state()
    now = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": str(git["commit"])[:12] if git["commit"] and git["clean"] else "",
    }
    stored: dict[str, Any] = {"sections": {}, "not_passed": {}}
    if data.exists():
        stored = json.loads(data.read_text(encoding="utf-8"))
    sections: Facts = {}
    for section, name in expected_rows():
        row = facts.get(section, {}).get(name)
        row = {**row, "measured": now} if row else stored["sections"].get(section, {}).get(name)
        if row:
            sections.setdefault(section, {})[name] = row
    bad = {
        name: outcome
        for name, outcome in (stored["not_passed"] | dict(outcomes)).items()
        if outcome != "passed"
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    by_hand = "# Reliability\n\n"
    if page.exists():
        by_hand = page.read_text(encoding="utf-8").partition(HEADING)[0]
    data.write_text(
        json.dumps({"schema": 2, "sections": sections, "not_passed": bad}, indent=1) + "\n", "utf-8"
    )
    page.write_text(by_hand + markdown(sections, bad), encoding="utf-8")


def expected_rows() -> list[tuple[str, str]]:
    """Section and name of every row of a complete page."""
    from bench.commands import COMMANDS
    from tests.faults.attacks import ATTACKS
    from tests.faults.test_faults import CASES
    from tests.faults.test_fuzz import PARSED, READERS, spelled
    from tests.faults.test_kills import REAL, SCRIPTED, SIGNALS
    from tests.faults.test_mutations import ROW

    names: dict[str, Iterable[str]] = {
        "faults": [*(case.name for case in CASES), "f-oom-killer", "f-sound"],
        "machine": ["disk"],
        "kills": [f"{kind.name} {number.name}" for kind in (SCRIPTED, REAL) for number in SIGNALS],
        "fuzz": [
            *PARSED,
            *map(spelled, READERS),
            ROW,
            *(f"arguments of {command}" for command in chain(*COMMANDS.values())),
        ],
        "attacks": [attack.what for attack in ATTACKS],
        "null": ["scripted", "real"],
    }
    return [(section, name) for section, rows in names.items() for name in rows]


def markdown(sections: Facts, bad: Mapping[str, str]) -> str:
    """The page from HEADING on; ``bad`` are the tests that failed or were skipped."""
    lacking = [
        f"{section}: {name}"
        for section, name in expected_rows()
        if name not in sections.get(section, {})
    ]
    parts = [
        HEADING.rstrip(),
        "It runs tests/faults in full, for an hour; `-- -k NAME` measures some rows again.",
        *_measured(row["measured"] for rows in sections.values() for row in rows.values()),
    ]
    if bad:
        lines = [f"- **{plain(f'{name}: {how}')}**" for name, how in bad.items()]
        parts.append("\n".join(["These tests did not pass:", "", *lines]))
    if lacking:
        parts.append(f"**The page is not complete. Not measured: {plain('; '.join(lacking))}.**")
    for section, (text, head) in SECTIONS.items():
        rows = [row["cells"] for row in sections.get(section, {}).values()]
        if section == "faults":
            parts += [text, "\n".join(_by_outcome(rows))]
            continue
        if section == "null":
            parts += [text, "\n".join(_cost(*row) for row in rows)]
            continue
        if section == "machine":
            parts.extend(f"- {what}: {found}{_left(left)}" for what, _, found, left in rows)
            continue
        if section == "fuzz":
            parts += [text, "\n".join(f"- {of} ({number})" for of, number in _joined(rows))]
            continue
        if section == "attacks":
            rows = [[what, _passed(tests)] for what, *_, tests in rows]
        if text:
            parts.append(text)
        if text or rows:
            parts.append("\n".join(varied_table(head, rows)[:-1]))
    return "\n\n".join(parts) + "\n"


def _measured(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """With what, when and at which commit rows were measured: a paragraph for each environment."""
    groups: dict[str, collections.Counter[str]] = {}
    for about in rows:
        where = f"torch {about['torch']}, Python {about['python']}, {about['cores']} cores"
        commit = "with changes that are not committed"
        if about["commit"]:
            commit = f"at commit {about['commit']}"
        groups.setdefault(where, collections.Counter())[f"on {about['date']} {commit}"] += 1
    paragraphs = []
    for where, times in groups.items():
        counted = [f"{plural(number, 'row')} {when}" for when, number in times.items()]
        paragraphs.append(f"Measured with {where}: {', '.join(counted)}.")
    return paragraphs


def _passed(tests: str) -> str:
    """How many tests passed, if not all."""
    if tests.startswith("**"):
        return tests
    return "all"


def _cost(what: str, number: str, runner: str, beside: str, growth: str, largest: str) -> str:
    """What the bench costs in trials of one kind, as a list item."""
    in_trial = "" if beside == "no trial" else f"; beside training {beside}"
    return (
        f"- {what} ({number}): {runner} per trial{in_trial}; memory grew by {growth} to {largest}"
    )


def _left(behind: str) -> str:
    """What is left behind, if anything is."""
    if behind == "nothing":
        return ""
    return f"; left behind: {behind}"


def _by_outcome(rows: Iterable[Sequence[str]]) -> list[str]:
    """One item for all faults that ended alike and left the same behind, with the longest of their seconds.

    How they must end, and in how many seconds, is not shown: what is not as it must be is bold.
    """
    found: dict[tuple[str, str], list[Sequence[str]]] = {}
    for row in rows:
        _, _, status, _, _, left = row
        found.setdefault((status, left), []).append(row)
    grouped = []
    for (status, left), alike in found.items():
        what = "; ".join(row[0].removeprefix("rank 1 ") for row in alike)
        longest = max((row[3] for row in alike), key=_seconds)
        grouped.append(f"- *{status}*, {longest} s: {what}{_left(left)}")
    return grouped


def _seconds(cell: str) -> tuple[bool, float]:
    """Whether they are bold, which no longer ones may hide, and how many they are."""
    number = cell.strip("*")
    if not number:
        return False, 0.0
    return cell != number, float(number)


def _joined(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """One row for all commands that were given as many inputs of one kind, with their number."""
    joined: dict[tuple[str, str], list[str]] = {}
    for name, number in rows:
        kind = next(filter(name.startswith, COMMANDS_OF), name)
        joined.setdefault((kind, number), []).append(name.removeprefix(kind))
    counted = []
    for (kind, number), commands in joined.items():
        of = commands[0]
        if len(commands) > 1:
            of = f"{len(commands)} commands"
        counted.append([kind + of, number])
    return counted
