"""What ``python -m bench semantics`` prints and writes: observations, weight maps, and a page."""

from __future__ import annotations

import argparse
import datetime
import html
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from bench import files
from bench.audit import conformance
from bench.audit.diagnosis import Observation, counters_text
from bench.audit.weight_figure import weight_figure
from bench.errors import InputError
from bench.formatting import markdown, plural
from bench.grouping import grouped
from bench.report import canvas
from bench.report.citation import VERSIONS
from bench.run import machine

About: TypeAlias = dict[str, Any]
"""What a suite was run with, as in run.json."""
UPDATES_SHOWN = 12
"""Updates listed for each backend on the terminal; --json has all."""
MOST_PROCESSES = 8
"""Processes that draw."""
OBSERVATIONS, MARKDOWN = "observations.json", "conformance.md"
SCHEMA_VERSION = 2
"""Of OBSERVATIONS: an object of ``schema_version``, ``about`` (as in run.json), ``scenarios``,
``observations``."""


def show(found: Sequence[Observation]) -> None:
    """Print verdict and diagnosis of each observation, and every update of a lone scenario."""
    is_single = len(conformance.scenarios(found)) == 1
    for seen in found:
        facts = plural(len(seen["updates"]), "update")
        if seen["weight_ratio"] is not None:
            facts += f", {seen['weight_ratio']:.4g} of the right weight"
        print(f"{seen['backend']} [{seen['scenario']['name']}]: {seen['verdict']} ({facts})")
        print(f"  {seen['diagnosis']}")
        if is_single:
            _show_updates(seen)


def _show_updates(seen: Observation) -> None:
    updates = seen["updates"]
    for number, update in enumerate(updates[:UPDATES_SHOWN], start=1):
        ranges = _ranges(update["samples"])
        samples = ", ".join(f"{numbers} x {value:.4g}" for numbers, value in ranges.items())
        print(f"  update {number}: samples {samples}; sum {update['sum']:.4g}")
    if len(updates) > UPDATES_SHOWN:
        print(f"  ... and {len(updates) - UPDATES_SHOWN} more; --json has all")
    if seen["steps_reported"]:
        print(f"  reported: {counters_text(seen['steps_reported'])}")


def write(
    arguments: argparse.Namespace, found: Sequence[Observation], folder: Path, plots: Path
) -> None:
    """Write what --out and --suite ask for, and say on stderr where.

    Raises InputError if it cannot.
    """
    about = {
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": arguments.device,
        "git": machine.git_state(),
        "machine": machine.machine(),
        "packages": machine.packages(),
    }
    with files.writing(f"--out {folder}"):
        write_tables(found, about, folder)
        pictures = write_pictures(found, about, plots)
    print(f"tables: {folder}\nplots:  {plots} ({len(pictures)} pictures)", file=sys.stderr)


def write_tables(observations: Sequence[Observation], about: About, folder: Path) -> None:
    """Write the observations, and the page with every table and diagnosis."""
    folder.mkdir(parents=True, exist_ok=True)
    store(observations, about, folder / OBSERVATIONS)
    files.write(folder / MARKDOWN, page(observations, about))


def page(observations: Sequence[Observation], about: About) -> str:
    """An overview, a table for each family of backends, and every diagnosis."""
    facts = [f"{markdown(name)} {markdown(value)}" for name, value in facts_of(about).items()]
    lines = ["# Every backend in every scenario", ""]
    lines += [f"Written by `{' '.join(about['command'])}` with {', '.join(facts)}.", ""]
    lines.append(conformance.overview(observations))
    for name, members in conformance.families(observations).items():
        lines += [f"## {name}", "", conformance.markdown(members)]
    lines += [conformance.KEY, "", "## Every diagnosis", ""]
    for backend, seen in grouped((seen["backend"], seen) for seen in observations).items():
        lines += _diagnoses(backend, seen)
    return "\n".join(lines)


def _diagnoses(backend: str, observations: Sequence[Observation]) -> list[str]:
    """The lines of one backend, folded up below the numbers of its verdicts."""
    counts = Counter(seen["level"] for seen in observations)
    told = []
    for word, level in (("right", "detail"), ("note", "note"), ("wrong", "wrong")):
        if counts[level]:
            told.append(f"{counts[level]} {word}")
    lines = [f"<details><summary>{html.escape(backend)}: {', '.join(told)}</summary>", ""]
    for seen in observations:
        text = f"{seen['scenario']['name']}, {seen['verdict']}: {seen['diagnosis']}"
        lines.append("- " + markdown(text))
    return [*lines, "", "</details>", ""]


def store(observations: Sequence[Observation], about: About, path: Path) -> None:
    """Write observations, one per line so that two suites can be compared by lines.

    Scenarios stand in it once, and equal values of neighbouring samples as one: ``"0-7": 0.125``.
    """
    head = {
        "schema_version": SCHEMA_VERSION,
        "about": about,
        "scenarios": conformance.scenarios(observations),
    }
    text = ",\n".join(map(_line, observations))
    opened = _json(head).removesuffix("}")
    files.write(path, f'{opened},"observations":[\n{text}\n]}}\n')


def _line(seen: Observation) -> str:
    """An observation as it is written."""
    updates = []
    for update in seen["updates"]:
        stored: dict[str, Any] = dict(update)
        del stored["samples"]
        for key in ("by_epoch", "relative"):
            by_epoch = {}
            for epoch, values in stored[key].items():
                by_epoch[epoch] = _ranges(values)
            stored[key] = by_epoch
        updates.append(stored)
    return _json({**seen, "scenario": seen["scenario"]["name"], "updates": updates})


def load(path: Path) -> tuple[About, list[Observation]]:
    """About the suite, and its observations, as ``store`` was given them.

    Raises InputError for another version.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["schema_version"] != SCHEMA_VERSION:
        version = stored["schema_version"]
        raise InputError(
            f"{path}: is of version {version}, not {SCHEMA_VERSION}; run the suite again"
        )
    for seen in stored["observations"]:
        seen["scenario"] = stored["scenarios"][seen["scenario"]]
        for update in seen["updates"]:
            _restore(update)
    return stored["about"], stored["observations"]


def _restore(update: dict[str, Any]) -> None:
    """Undo what ``_line`` did to an update."""
    for key in ("by_epoch", "relative"):
        for epoch, ranges in update[key].items():
            update[key][epoch] = _samples(ranges)
    sums: dict[int, float] = {}
    for values in update["by_epoch"].values():
        for sample, value in values.items():
            sums[int(sample)] = sums.get(int(sample), 0.0) + value
    update["samples"] = {}
    for number in sorted(sums):
        update["samples"][str(number)] = float(f"{sums[number]:.7g}")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _ranges(values: Mapping[str, float]) -> dict[str, float]:
    """Values by range of neighbouring samples with the same one."""
    found: dict[str, float] = {}
    first, last, value_of_range = "", "", 0.0
    for sample, value in values.items():
        if first and int(sample) == int(last) + 1 and value == value_of_range:
            found.pop(_range(first, last))
        else:
            first, value_of_range = sample, value
        last = sample
        found[_range(first, last)] = value
    return found


def _range(first: str, last: str) -> str:
    if first == last:
        return first
    return f"{first}-{last}"


def _samples(ranges: Mapping[str, float]) -> dict[str, float]:
    """The inverse of ``_ranges``."""
    found: dict[str, float] = {}
    for text, value in ranges.items():
        first, dash, last = text.partition("-")
        if not dash:
            last = first
        for sample in range(int(first), int(last) + 1):
            found[str(sample)] = value
    return found


def write_pictures(
    observations: Sequence[Observation], about: About, plots: Path
) -> dict[str, Path]:
    """Draw the weight maps, several at a time; their paths by scenario."""
    plots.mkdir(parents=True, exist_ok=True)
    facts = facts_of(about)
    del facts["device"], facts["date"]
    footer = ", ".join(f"{name} {value}" for name, value in facts.items())
    by_scenario = grouped((seen["scenario"]["name"], seen) for seen in observations)
    stems = [plots / f"weights-{name}" for name in by_scenario]
    processes = os.cpu_count()
    if processes is None:
        processes = 1
    processes = min(processes, MOST_PROCESSES)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        drawn = pool.map(_draw, by_scenario.values(), stems, repeat(footer))
        return {name: path for name, path in zip(by_scenario, drawn, strict=True) if path}


def _draw(of_scenario: Sequence[Observation], stem: Path, footer: str) -> Path | None:
    drawn = weight_figure(of_scenario, footer=footer)
    if drawn is None:
        return None
    figure, words = drawn
    return canvas.save(figure, stem, words)


def facts_of(about: About) -> dict[str, str]:
    """The versions, device and date that a reader must know."""
    facts = {name: version for name, version in about["packages"].items() if name in VERSIONS}
    facts["python"] = about["machine"]["python"]
    facts["device"] = about["device"]
    facts["date"] = about["date"]
    return facts
