"""What ``python -m bench semantics`` prints and writes: observations, conformance table, weight maps, and the page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.audit import conformance, scenario, semantics_page
from bench.audit.conformance_picture import conformance_figure
from bench.audit.weight_figure import weight_figure
from bench.errors import InputError
from bench.files import RESULTS
from bench.report import canvas
from bench.report.citation import VERSIONS
from bench.run import machine
from bench.words import plural

UPDATES_SHOWN = 12
"""Updates listed for each backend on the terminal; --json has all."""
OBSERVATIONS, TABLE, MARKDOWN = "observations.json", "conformance.parquet", "conformance.md"
SCHEMA_VERSION = 1
"""Of OBSERVATIONS: an object with ``schema_version``, ``about`` (as in run.json) and ``observations``."""
PICTURED = ("partial-window", "resume", "exception", "zero-grad")
"""Scenarios whose weight maps are on the page; of a suite without them, the first ones."""


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the verdict and diagnosis of each observation, with every update if there is only one scenario."""
    is_single = len({json.dumps(one["scenario"]) for one in found}) == 1
    for one in found:
        updates, ratio = one["updates"], one["weight_ratio"]
        weight = "" if ratio is None else f", {ratio:.4g} of the right weight"
        counted = plural(len(updates), "update")
        print(f"{one['backend']} [{one['scenario']['name']}]: {one['verdict']} ({counted}{weight})")
        print(f"  {one['diagnosis']}")
        if not is_single:
            continue
        for number, update in enumerate(updates[:UPDATES_SHOWN], start=1):
            print(f"  update {number}: samples {_runs(update['samples'])}; sum {update['sum']:.4g}")
        if len(updates) > UPDATES_SHOWN:
            print(f"  ... and {len(updates) - UPDATES_SHOWN} more; --json has all")
        if one["steps_reported"]:
            print("  reported: " + ", ".join(f"{name} = {value}" for name, value in one["steps_reported"].items()))


def _runs(coefficients: dict[str, float]) -> str:
    """Samples with their coefficients, neighbours with the same coefficient as a range: ``0-7 x 0.125``."""
    runs: list[list[Any]] = []
    for text, coefficient in coefficients.items():
        sample = int(text)
        if runs and runs[-1][1] == sample - 1 and abs(runs[-1][2] - coefficient) <= 1e-6 * abs(coefficient):
            runs[-1][1] = sample
        else:
            runs.append([sample, sample, coefficient])
    return ", ".join(f"{first}-{last} x {c:.4g}" if last > first else f"{first} x {c:.4g}" for first, last, c in runs)


def write(arguments: argparse.Namespace, found: Sequence[dict[str, Any]], folder: Path, plots: Path) -> None:
    """Write what --out, --suite and --docs ask for, and say on stderr where. Raises InputError if it cannot."""
    about = {
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": arguments.device,
        "git": machine.git_state(),
        "machine": machine.machine(),
        "packages": machine.packages(),
    }
    try:
        write_tables(found, about, folder)
        pictures = write_pictures(found, about, plots)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written ({error.strerror}); name a folder that can") from error
    print(f"tables: {folder}\nplots:  {plots} ({len(pictures)} pictures)", file=sys.stderr)
    if arguments.docs:
        is_shipped = arguments.suite == scenario.SUITE and not arguments.scenario
        throughput = RESULTS / "throughput" / "throughput.md" if is_shipped else None
        try:
            write_page(found, about, pictures, arguments.docs, throughput)
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); name a file that can"
            raise InputError(f"--docs {arguments.docs}: {reason}") from error
        print(f"page:   {arguments.docs}", file=sys.stderr)


def write_tables(observations: Sequence[dict[str, Any]], about: Mapping[str, Any], folder: Path) -> None:
    """Write the observations, one per line so that two suites can be compared by lines, and the conformance table."""
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"schema_version": SCHEMA_VERSION, "about": about, "observations": []}).removesuffix("]}")
    lines = ",\n".join(json.dumps(one) for one in observations)
    (folder / OBSERVATIONS).write_text(f"{head}\n{lines}\n]}}\n")
    conformance.table(observations).to_parquet(folder / TABLE)
    tables = [f"## {name}\n\n{conformance.markdown(own)}" for name, own in conformance.families(observations).items()]
    (folder / MARKDOWN).write_text("\n".join([conformance.overview(observations), *tables, conformance.KEY, ""]))


def write_pictures(observations: Sequence[dict[str, Any]], about: Mapping[str, Any], plots: Path) -> dict[str, Path]:
    """Write the weight maps and the tables' pictures; their paths by scenario and by family."""
    plots.mkdir(parents=True, exist_ok=True)
    footer = ", ".join(f"{name} {value}" for name, value in _facts(about).items() if name not in {"device", "date"})
    figures = {}
    for family, own in conformance.families(observations).items():
        slug = family.lower().replace(" ", "-")
        figures[family] = (f"conformance-{slug}", conformance_figure(own, family, footer=footer))
    for name in conformance.scenarios(observations):
        own = [one for one in observations if one["scenario"]["name"] == name]
        if map_ := weight_figure(own, footer=footer):
            figures[name] = (f"weights-{name}", map_)
    return {name: canvas.save(figure, plots / stem, words) for name, (stem, (figure, words)) in figures.items()}


def write_page(
    observations: Sequence[dict[str, Any]],
    about: Mapping[str, Any],
    pictures: Mapping[str, Path],
    path: Path,
    throughput: Path | None,
) -> None:
    """Write the page of docs, with links relative to it; ``throughput`` is the page on ThroughputMonitor."""

    def link(target: Path) -> str:
        return Path(os.path.relpath(target, path.parent)).as_posix()

    known = throughput if throughput and throughput.exists() else None
    families = list(conformance.families(observations))
    shown = [name for name in PICTURED if name in pictures] or [name for name in pictures if name not in families]
    text = semantics_page.page(
        observations,
        {name: link(pictures[name]) for name in [*families, *shown[: len(PICTURED)]] if name in pictures},
        command=" ".join(about["command"]),
        about=_facts(about),
        throughput=link(known) if known else "",
        throughput_findings=[line for line in known.read_text().splitlines() if line.startswith("- ")] if known else (),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _facts(about: Mapping[str, Any]) -> dict[str, str]:
    """The versions, device and date that a reader must know."""
    versions = {name: about["packages"][name] for name in VERSIONS if name in about["packages"]}
    return {**versions, "python": about["machine"]["python"], "device": about["device"], "date": about["date"]}
