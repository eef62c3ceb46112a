"""What the full form found, kept as JSON and written as a page."""

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

from bench.formatting import plural
from bench.run import machine
from tests.studies import markdown as md

Facts = dict[str, dict[str, dict[str, Any]]]
"""Rows by section and name."""


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
    sections: Facts = {}
    bad: dict[str, str] = {}
    if data.exists():
        stored = json.loads(data.read_text(encoding="utf-8"))
        sections, bad = stored["sections"], stored["not_passed"]
    for section, rows in facts.items():
        for name, row in rows.items():
            sections.setdefault(section, {})[name] = {**row, "measured": now}
    rows = expected_rows()
    sections = {
        section: {name: row for name, row in found.items() if (section, name) in rows}
        for section, found in sections.items()
    }
    bad = {name: outcome for name, outcome in (bad | dict(outcomes)).items() if outcome != "passed"}
    page.parent.mkdir(parents=True, exist_ok=True)
    stored = {"schema": 1, "sections": sections, "not_passed": bad}
    data.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(sections, bad), encoding="utf-8")


def expected_rows() -> list[tuple[str, str]]:
    """Section and name of every row of a complete page."""
    from bench.commands import COMMANDS
    from tests.faults.test_faults import CASES
    from tests.faults.test_fuzz import PARSED, READERS, spelled
    from tests.faults.test_guided import NAMES
    from tests.faults.test_kills import REAL, SCRIPTED, SIGNALS

    names: dict[str, Iterable[str]] = {
        "faults": [*(case.name for case in CASES), "f-oom-killer", "f-sound"],
        "machine": ["disk"],
        "kills": [f"{kind.name} {number.name}" for kind in (SCRIPTED, REAL) for number in SIGNALS],
        "damage": ["cuts", "flips"],
        "fuzz": [
            *PARSED,
            *NAMES.values(),
            *map(spelled, READERS),
            *(f"arguments of {command}" for command in chain(*COMMANDS.values())),
        ],
        "null": ["scripted", "real"],
    }
    return [(section, name) for section, rows in names.items() for name in rows]


def markdown(sections: Facts, bad: Mapping[str, str]) -> str:
    """The page; ``bad`` are the tests that failed or were skipped."""
    lacking = [f"{section}: {name}" for section, name in expected_rows() if name not in sections.get(section, {})]
    parts = [
        "# Reliability",
        "Written by `nox -s faults`, which runs tests/faults in their full form; `nox -s faults -- -k NAME` measures "
        "some rows again and keeps the others. `python -m pytest tests/faults` runs a short form of the same.",
        "\n".join(_when(sections)),
    ]
    if bad:
        lines = [f"- **{md.cell(f'{name}: {how}')}**" for name, how in bad.items()]
        parts.append("\n".join(["These tests did not pass:", "", *lines]))
    if lacking:
        parts.append(f"**The page is not complete. Not measured: {md.cell('; '.join(lacking))}.**")
    parts += [
        *_faults(sections.get("faults", {}), sections.get("machine", {})),
        *_kills(sections.get("kills", {})),
        *_damage(sections.get("damage", {})),
        *_fuzz(sections.get("fuzz", {})),
        *_null(sections.get("null", {})),
    ]
    return "\n\n".join(parts) + "\n"


def _when(sections: Facts) -> list[str]:
    """One line per date and environment."""
    groups = collections.Counter(
        f"Measured on {about['date']} with torch {about['torch']} and Python {about['python']} on {about['cores']} "
        f"cores, {'at commit ' + about['commit'] if about['commit'] else 'with changes that are not committed'}"
        for rows in sections.values()
        for about in (row["measured"] for row in rows.values())
    )
    return [f"- {words}: {plural(number, 'row')}." for words, number in groups.items()]


def _faults(faults: Mapping[str, Any], of_machine: Mapping[str, Any]) -> list[str]:
    from tests.faults.harness import HANG_S, TIMEOUT_S
    from tests.faults.leaks import ENDING_S

    rows = [
        (
            row["what"],
            row["must"],
            _marked(row["found"], row["found"] == row["must"]),
            "" if row["seconds"] is None else _marked(f"{row['seconds']:.1f}", row["seconds"] <= row["within"]),
            f"{row['within']:.0f}",
            _left(row["left"]),
        )
        for row in faults.values()
    ]
    text = [
        "## Faults",
        f"A backend misbehaves on command in the second window of its trial (W = 2, gloo). The limit of inactivity is "
        f"{HANG_S} s, the limit of a trial {TIMEOUT_S} s. Each fault has a run of its own, with the reference before "
        "it and a sound backend after it; both have to be ok. Seconds are from the trial's start to its end. Left "
        "behind are processes, open ports, shared memory, semaphores, locks and temporary files of the run that are "
        f"still there {ENDING_S:g} s after its end.",
        _table(("what happens", "must be", "found", "seconds", "at most", "left behind"), rows),
    ]
    others = [(row["what"], row["must"], row["found"], _left(row["left"])) for row in of_machine.values()]
    if others:
        text.append(_table(("what happens", "what must come of it", "found", "left behind"), others))
    return text


def _kills(kills: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["signal"],
            row["what"],
            str(row["kills"]),
            str(row["runs"]),
            str(row["trials"]),
            _marked(str(row["lost"]), not row["lost"]),
            _marked(str(row["differing"]), not row["differing"]),
            f"{row['slowest_s']:.1f}",
            _left(row["left"]),
        )
        for row in kills.values()
    ]
    return [
        "## Kills",
        "The runner gets a signal at a seeded random moment, is resumed, gets the signal again, and so on until the "
        "run is finished. Then its journal is compared with that of an undisturbed run: it must have the same trials, "
        "each once, and equal in all but timings. A finished trial that was not in the journal after a kill is lost. "
        "Seconds are the longest time from the signal to the end of the runner.",
        _table(
            ("signal", "of", "kills", "runs", "trials compared", "lost", "differing", "seconds", "left behind"), rows
        ),
    ]


def _damage(damage: Mapping[str, Any]) -> list[str]:
    rows = [
        (row["what"], row["must"], f"{row['count']:,}", _marked(str(row["wrong"]), not row["wrong"]), row["more"])
        for row in damage.values()
    ]
    return ["## A damaged journal", _table(("what happens", "what must come of it", "cases", "wrong", "besides"), rows)]


def _fuzz(fuzz: Mapping[str, Any]) -> list[str]:
    rows = [(name, f"{row['count']:,}") for name, row in fuzz.items()]
    return [
        "## Hostile input",
        "Inputs are made by hypothesis, the same ones every time. In the rows that name atheris they are chosen for "
        "one minute by the code that they reach. Each input has to end in a result or in one line that says what is "
        "wrong, never in a traceback, and nothing may be written outside of the output folder. A failure would stand "
        "above, among the tests that did not pass.\n\n"
        "No pickle that could run code is read from disk: every rank loads checkpoints with `weights_only`, and "
        "torch.compile's caches, which hold pickled graphs, are off.",
        _table(("of", "inputs"), rows),
    ]


def _null(null: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["what"],
            f"{row['trials']:,}",
            f"{1e3 * row['overhead_s']:.0f} ms",
            f"{1e3 * row['inside_s']:.0f} ms" if "inside_s" in row else "no trial",
            f"{row['growth_bytes'] / 2**20:.1f} MiB",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        )
        for row in null.values()
    ]
    return [
        "## What the bench costs",
        "The runner's own time is the time between two lines of the journal without the trial itself, which lasts from "
        "the request to the launcher until its answer. The runner chooses the trial, looks at the disk, judges what "
        "the ranks wrote, writes the record with fsync, and updates the display; in real trials it also starts new "
        "fork servers, at most every 30 s. Its time has to stay under 0.2 s. In a trial, ranks are forked and "
        "connected, model and tokens are made, and processes are ended beside the training; the median is given. "
        "Memory is the resident size of the runner's process; its growth is counted from a tenth of the trials on.",
        _table(("trials", "number", "runner, per trial", "in a trial, beside training", "growth", "largest"), rows),
    ]


def _left(left: Sequence[str]) -> str:
    return _marked("; ".join(left), False) if left else "nothing"


def _marked(text: str, good: bool) -> str:
    return text if good else f"**{text}**"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(md.table(head, rows)[:-1])
