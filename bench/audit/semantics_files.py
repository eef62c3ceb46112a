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
from typing import Any

from bench import files
from bench.audit import conformance
from bench.audit.weight_figure import weight_figure
from bench.errors import InputError
from bench.formatting import markdown, plural
from bench.grouping import grouped
from bench.report import canvas
from bench.report.citation import VERSIONS
from bench.run import machine

UPDATES_SHOWN = 12
"""Updates listed for each backend on the terminal; --json has all."""
MOST_PROCESSES = 8
"""Processes that draw."""
OBSERVATIONS, MARKDOWN = "observations.json", "conformance.md"
SCHEMA_VERSION = 2
"""Of OBSERVATIONS: an object with ``schema_version``, ``about`` (as in run.json), ``scenarios``, ``observations``."""


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the verdict and diagnosis of each observation, with every update if there is only one scenario."""
    is_single = len({json.dumps(seen["scenario"]) for seen in found}) == 1
    for seen in found:
        updates, ratio = seen["updates"], seen["weight_ratio"]
        weight = "" if ratio is None else f", {ratio:.4g} of the right weight"
        counted = plural(len(updates), "update")
        print(f"{seen['backend']} [{seen['scenario']['name']}]: {seen['verdict']} ({counted}{weight})")
        print(f"  {seen['diagnosis']}")
        if not is_single:
            continue
        for number, update in enumerate(updates[:UPDATES_SHOWN], start=1):
            samples = ", ".join(f"{numbers} x {value:.4g}" for numbers, value in _ranges(update["samples"]).items())
            print(f"  update {number}: samples {samples}; sum {update['sum']:.4g}")
        if len(updates) > UPDATES_SHOWN:
            print(f"  ... and {len(updates) - UPDATES_SHOWN} more; --json has all")
        if seen["steps_reported"]:
            print("  reported: " + ", ".join(f"{name} = {value}" for name, value in seen["steps_reported"].items()))


def write(arguments: argparse.Namespace, found: Sequence[dict[str, Any]], folder: Path, plots: Path) -> None:
    """Write what --out and --suite ask for, and say on stderr where. Raises InputError if it cannot."""
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


def write_tables(observations: Sequence[dict[str, Any]], about: Mapping[str, Any], folder: Path) -> None:
    """Write the observations, and the page with every table and diagnosis."""
    folder.mkdir(parents=True, exist_ok=True)
    store(observations, about, folder / OBSERVATIONS)
    (folder / MARKDOWN).write_text(page(observations, about), encoding="utf-8")


def page(observations: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> str:
    """An overview, a table for each family of backends, and every diagnosis."""
    facts = ", ".join(f"{markdown(name)} {markdown(value)}" for name, value in facts_of(about).items())
    lines = ["# Every backend in every scenario", "", f"Written by `{' '.join(about['command'])}` with {facts}.", ""]
    lines.append(conformance.overview(observations))
    for name, members in conformance.families(observations).items():
        lines += [f"## {name}", "", conformance.markdown(members)]
    lines += [conformance.KEY, "", "## Every diagnosis", ""]
    for backend in dict.fromkeys(seen["backend"] for seen in observations):
        of_backend = [seen for seen in observations if seen["backend"] == backend]
        counts = Counter("right" if seen["level"] == "detail" else str(seen["level"]) for seen in of_backend)
        summary = ", ".join(f"{counts[level]} {level}" for level in ("right", "note", "wrong") if counts[level])
        lines += [f"<details><summary>{html.escape(backend)}: {summary}</summary>", ""]
        for seen in of_backend:
            lines.append("- " + markdown(f"{seen['scenario']['name']}, {seen['verdict']}: {seen['diagnosis']}"))
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def store(observations: Sequence[dict[str, Any]], about: Mapping[str, Any], path: Path) -> None:
    """Write observations, one per line so that two suites can be compared by lines.

    Scenarios stand in it once, and equal values of neighbouring samples as one: ``"0-7": 0.125``.
    """
    head = {"schema_version": SCHEMA_VERSION, "about": about, "scenarios": conformance.scenarios(observations)}
    lines = []
    for seen in observations:
        updates = [
            {key: value for key, value in update.items() if key != "samples"}
            | {key: {e: _ranges(update[key][e]) for e in update[key]} for key in ("by_epoch", "relative")}
            for update in seen["updates"]
        ]
        lines.append(_json({**seen, "scenario": seen["scenario"]["name"], "updates": updates}))
    text = ",\n".join(lines)
    path.write_text(f'{_json(head).removesuffix("}")},"observations":[\n{text}\n]}}\n', encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """About the suite, and its observations, as ``store`` was given them. Raises InputError for another version."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{path}: is of version {stored['schema_version']}, not {SCHEMA_VERSION}; run the suite again")
    for seen in stored["observations"]:
        seen["scenario"] = stored["scenarios"][seen["scenario"]]
        for update in seen["updates"]:
            for key in ("by_epoch", "relative"):
                update[key] = {epoch: _samples(ranges) for epoch, ranges in update[key].items()}
            sums: dict[int, float] = {}
            for values in update["by_epoch"].values():
                for sample, value in values.items():
                    sums[int(sample)] = sums.get(int(sample), 0.0) + value
            update["samples"] = {str(sample): float(f"{sums[sample]:.7g}") for sample in sorted(sums)}
    return stored["about"], stored["observations"]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _ranges(values: Mapping[str, float]) -> dict[str, float]:
    """Values by range of neighbouring samples with the same one."""
    found: list[tuple[list[str], float]] = []
    for sample, value in values.items():
        if found and int(found[-1][0][-1]) == int(sample) - 1 and found[-1][1] == value:
            found[-1][0].append(sample)
        else:
            found.append(([sample], value))
    return {"-".join(dict.fromkeys((samples[0], samples[-1]))): value for samples, value in found}


def _samples(ranges: Mapping[str, float]) -> dict[str, float]:
    """The inverse of ``_ranges``."""
    found: dict[str, float] = {}
    for text, value in ranges.items():
        first, _, last = text.partition("-")
        found |= {str(sample): value for sample in range(int(first), int(last or first) + 1)}
    return found


def write_pictures(observations: Sequence[dict[str, Any]], about: Mapping[str, Any], plots: Path) -> dict[str, Path]:
    """Draw the weight maps, several at a time; their paths by scenario."""
    plots.mkdir(parents=True, exist_ok=True)
    footer = ", ".join(f"{name} {value}" for name, value in facts_of(about).items() if name not in {"device", "date"})
    by_scenario = grouped((seen["scenario"]["name"], seen) for seen in observations)
    stems = [plots / f"weights-{name}" for name in by_scenario]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES), get_context("spawn")) as pool:
        drawn = pool.map(_draw, by_scenario.values(), stems, repeat(footer))
        return {name: path for name, path in zip(by_scenario, drawn, strict=True) if path}


def _draw(of_scenario: Sequence[dict[str, Any]], stem: Path, footer: str) -> Path | None:
    drawn = weight_figure(of_scenario, footer=footer)
    return canvas.save(drawn[0], stem, drawn[1]) if drawn else None


def facts_of(about: Mapping[str, Any]) -> dict[str, str]:
    """The versions, device and date that a reader must know."""
    versions = {name: version for name, version in about["packages"].items() if name in VERSIONS}
    return {**versions, "python": about["machine"]["python"], "device": about["device"], "date": about["date"]}
