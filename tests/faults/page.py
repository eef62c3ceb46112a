"""What the full form found, kept as JSON and written as a page."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from bench.run import machine

SCHEMA = 1
Facts = dict[str, dict[str, dict[str, Any]]]
"""By section and name of the row."""


def write(page: Path, facts: Facts, outcomes: Mapping[str, str]) -> None:
    """Write the page and, beside it, its data; rows that were not measured now are kept from before."""
    data = page.with_suffix(".json")
    now = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
    }
    sections: Facts = {}
    bad: dict[str, str] = {}
    if data.exists():
        stored = json.loads(data.read_text(encoding="utf-8"))
        if stored["schema"] == SCHEMA:
            sections, bad = stored["sections"], stored["not_passed"]
    for section, rows in facts.items():
        for name, row in rows.items():
            sections.setdefault(section, {})[name] = {**row, "measured": now}
    bad = {name: outcome for name, outcome in (bad | dict(outcomes)).items() if outcome != "passed"}
    page.parent.mkdir(parents=True, exist_ok=True)
    stored = {"schema": SCHEMA, "sections": sections, "not_passed": bad}
    data.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(sections, bad), encoding="utf-8")


def _commit() -> str:
    """Of what was measured; empty if it is not a commit."""
    git = machine.git_state()
    return str(git["commit"])[:12] if git["commit"] and git["clean"] else ""


def due() -> list[tuple[str, str]]:
    """Section and name of every row of a complete page."""
    from bench.commands import COMMANDS
    from tests.faults.test_faults import CASES
    from tests.faults.test_fuzz import PARSED, READERS, spelled
    from tests.faults.test_kills import REAL, SCRIPTED, SIGNALS

    names: dict[str, Iterable[str]] = {
        "faults": [*(case.name for case in CASES), "f-oom-killer", "f-sound"],
        "machine": ["disk"],
        "kills": [f"{kind.name} {number.name}" for kind in (SCRIPTED, REAL) for number in SIGNALS],
        "damage": ["cuts", "flips"],
        "fuzz": [
            *PARSED,
            *map(spelled, READERS),
            *(f"arguments of {command}" for command in chain(*COMMANDS.values())),
        ],
        "null": ["scripted", "real"],
    }
    return [(section, name) for section, rows in names.items() for name in rows]


def markdown(sections: Facts, bad: Mapping[str, str]) -> str:
    """The page; ``bad`` are the tests that failed or were skipped."""
    lacking = [f"{section}: {name}" for section, name in due() if name not in sections.get(section, {})]
    parts = [
        "# Reliability",
        "Written by `nox -s faults`, which runs tests/faults in their full form; `nox -s faults -- -k NAME` measures "
        "some rows again and keeps the others. `python -m pytest tests/faults` runs a short form of the same.",
        "\n".join(_when(sections)),
        *(
            [
                "These tests did not pass:\n\n"
                + "\n".join(f"- **{_cell(f'{name}: {how}')}**" for name, how in bad.items())
            ]
            if bad
            else []
        ),
        *([f"**The page is not complete. Not measured: {_cell('; '.join(lacking))}.**"] if lacking else []),
        *_faults(sections.get("faults", {}), sections.get("machine", {})),
        *_kills(sections.get("kills", {})),
        *_damage(sections.get("damage", {})),
        *_fuzz(sections.get("fuzz", {})),
        *_null(sections.get("null", {})),
    ]
    return "\n\n".join(parts) + "\n"


def _when(sections: Facts) -> list[str]:
    """One line per date and environment."""
    groups: dict[str, int] = {}
    for rows in sections.values():
        for row in rows.values():
            about = row["measured"]
            words = (
                f"Measured on {about['date']} with torch {about['torch']} and Python {about['python']} on "
                f"{about['cores']} cores, "
                + (f"at commit {about['commit']}" if about["commit"] else "from code that is no commit")
            )
            groups[words] = groups.get(words, 0) + 1
    return [f"- {words}: {number} row{'s' * (number != 1)}." for words, number in groups.items()]


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
        f"A backend misbehaves on command, in the second window of its trial (W = 2, gloo). The limit of inactivity is "
        f"{HANG_S} s, that of a trial {TIMEOUT_S} s. Each fault is a run of its own, with the reference before it and "
        "a sound backend after it, which both have to be ok. Seconds are from the trial's start to its end. Left "
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
        "The runner gets a signal at a seeded random moment of its life, is resumed, gets it again, and so on until "
        "the run is finished. Then the journal is compared with that of a run that nobody disturbed: the same "
        "trials, each once, and equal in all but timings. Lost is a finished trial that was not in the journal after "
        "a kill. Seconds are the most that passed from the signal to the end of the runner.",
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
        "Made by hypothesis, the same every time; rows that name atheris have inputs chosen by the code that they "
        "reach, for a minute each. Each input has to end in a result or in one line that says what is wrong, never in "
        "a traceback, and nothing may be written outside of the folder that output was asked for in. One that did "
        "otherwise would stand above, among the tests that did not pass.\n\n"
        "No pickle that could run code is read from disk. Checkpoints are read by torch.load with `weights_only`, "
        "which every rank is made to use; the `.metadata` of torch's distributed checkpoints, which is a pickle too, "
        "by a reader that knows the names of plain data and no others; torch.compile's caches, which hold pickled "
        "graphs, are off.",
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
        "The runner's own time is what passes between two lines of the journal beyond the trial itself, which lasts "
        "from the request to the launcher until its answer: choosing the trial, looking at the disk, judging what the "
        "ranks wrote, the record and its fsync, the display; and in real trials the start of new fork servers, at most "
        "every 30 s. It has to stay under 0.2 s. In a trial, what is not training is forking the ranks, connecting "
        "them, making the model and the tokens, ending the processes and looking that none is left; the median is "
        "given. Memory is the resident size of the runner's process; growth is counted from a tenth of the trials on.",
        _table(("trials", "number", "runner, per trial", "in a trial, beside training", "growth", "largest"), rows),
    ]


def _left(left: Sequence[str]) -> str:
    return _marked("; ".join(left), False) if left else "nothing"


def _marked(text: str, good: bool) -> str:
    return text if good else f"**{text}**"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
