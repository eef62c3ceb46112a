"""What the full form found, kept as JSON and written as a page."""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from bench.formatting import plain, plural
from bench.run import machine
from bench.tabular import markdown_table
from tests.faults.harness import HANG_S, TIMEOUT_S
from tests.faults.leaks import ENDING_S

Facts = dict[str, dict[str, dict[str, Any]]]
"""Rows by section and name: their ``cells``, and when they were ``measured``."""
SECTIONS = {
    "faults": (
        "## Faults\n\n"
        f"A backend misbehaves on command in the second window of its trial (W = 2, gloo). The limit of inactivity is "
        f"{HANG_S} s, the limit of a trial {TIMEOUT_S} s. Each fault has a run of its own, with the reference before "
        "it and a sound backend after it; both have to be ok. Seconds are from the trial's start to its end. Left "
        "behind are processes, open ports, shared memory, semaphores, locks and temporary files of the run that are "
        f"still there {ENDING_S:g} s after its end.",
        ("what happens", "must be", "found", "seconds", "at most", "left behind"),
    ),
    "machine": ("", ("what happens", "what must come of it", "found", "left behind")),
    "kills": (
        "## Kills\n\n"
        "The runner gets a signal at a seeded random moment, is resumed, gets the signal again, and so on until the "
        "run is finished. Then its journal is compared with that of an undisturbed run: it must have the same trials, "
        "each once, and equal in all but timings. A finished trial that was not in the journal after a kill is lost. "
        "Seconds are the longest time from the signal to the end of the runner.",
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
        "## Hostile input\n\n"
        "Inputs are made by hypothesis, the same ones every time. Each input has to end in a result or in one line "
        "that says what is wrong, never in a traceback, and nothing may be written outside of the output folder. A "
        "failure would stand above, among the tests that did not pass.\n\n"
        "No pickle that could run code is read from disk: every rank loads checkpoints with `weights_only`, and "
        "torch.compile's caches, which hold pickled graphs, are off.",
        ("of", "inputs"),
    ),
    "attacks": (
        "## Attacks that were tried\n\n"
        "What a stranger's folder, a stranger on the network, or an accident can do, what came of it in version 1.1.0, "
        "and what has to come of it now. The last column counts the tests that passed. "
        "[SECURITY.md](../SECURITY.md) says what is promised and what is not.",
        ("what is tried", "in 1.1.0", "now", "tests"),
    ),
    "null": (
        "## What the bench costs\n\n"
        "The runner's own time is the time between two lines of the journal without the trial itself, which lasts from "
        "the request to the launcher until its answer. The runner chooses the trial, looks at the disk, judges what "
        "the ranks wrote, writes the record with fsync, and updates the display; in real trials it also starts new "
        "fork servers, at most every 120 s. Its time has to stay under 0.2 s. In a trial, ranks are forked and "
        "connected, model and tokens are made, and processes are ended beside the training; the median is given. "
        "Memory is the resident size of the runner's process; its growth is counted from a tenth of the trials on.",
        (
            "trials",
            "number",
            "runner, per trial",
            "in a trial, beside training",
            "growth",
            "largest",
        ),
    ),
}
"""Of each section its heading and text, and the head of its table."""


def write(page: Path, facts: Facts, outcomes: Mapping[str, str]) -> None:
    """Write the page and, beside it, its data; rows that were not measured now are kept from before."""
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
    data.write_text(
        json.dumps({"schema": 2, "sections": sections, "not_passed": bad}, indent=1) + "\n", "utf-8"
    )
    page.write_text(markdown(sections, bad), encoding="utf-8")


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
    """The page; ``bad`` are the tests that failed or were skipped."""
    lacking = [
        f"{section}: {name}"
        for section, name in expected_rows()
        if name not in sections.get(section, {})
    ]
    measured = [row["measured"] for rows in sections.values() for row in rows.values()]
    groups = collections.Counter(
        f"Measured on {about['date']} with torch {about['torch']} and Python {about['python']} on {about['cores']} "
        f"cores, {'at commit ' + about['commit'] if about['commit'] else 'with changes that are not committed'}"
        for about in measured
    )
    parts = [
        "# Reliability",
        "Written by `nox -s faults`, which runs tests/faults in their full form; `nox -s faults -- -k NAME` measures "
        "some rows again and keeps the others. `python -m pytest tests/faults` runs a short form of the same.",
        "\n".join(f"- {words}: {plural(number, 'row')}." for words, number in groups.items()),
    ]
    if bad:
        lines = [f"- **{plain(f'{name}: {how}')}**" for name, how in bad.items()]
        parts.append("\n".join(["These tests did not pass:", "", *lines]))
    if lacking:
        parts.append(f"**The page is not complete. Not measured: {plain('; '.join(lacking))}.**")
    for section, (text, head) in SECTIONS.items():
        rows = [row["cells"] for row in sections.get(section, {}).values()]
        parts += filter(
            None, [text, "\n".join(markdown_table(head, rows)[:-1]) if rows or text else ""]
        )
    return "\n\n".join(parts) + "\n"
