"""The files of ``python -m bench semantics``: what was observed, the conformance table, the maps, the page of docs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.audit import conformance, conformance_picture, scenario, semantics_page
from bench.audit.weights import draw_weight_map
from bench.errors import InputError
from bench.words import plural

UPDATES_SHOWN = 12
"""Updates that are listed for each backend on the terminal; --json has all."""


def show_conformance(found: Sequence[dict[str, Any]]) -> None:
    """One block per observation if there are few scenarios, the table of verdicts if there are many."""
    for one in found:
        updates, ratio = one["updates"], one["weight_ratio"]
        weight = "" if ratio is None else f", {ratio:.4g} of the right weight"
        counted = plural(len(updates), "update")
        print(f"{one['backend']} [{one['scenario']['name']}]: {one['verdict']} ({counted}{weight})")
        print(f"  {one['diagnosis']}")
        if len({json.dumps(other["scenario"]) for other in found}) > 1:
            continue
        for number, update in enumerate(updates[:UPDATES_SHOWN], start=1):
            print(f"  update {number}: {_samples(update['samples'])}; sum {update['sum']:.4g}")
        if len(updates) > UPDATES_SHOWN:
            print(f"  ... and {len(updates) - UPDATES_SHOWN} more; --json has all")
        if one["steps_reported"]:
            print("  reported: " + ", ".join(f"{name} = {value}" for name, value in one["steps_reported"].items()))


def _samples(coefficients: dict[str, float]) -> str:
    """Samples with their coefficients, runs of equal ones taken together: ``0-7 x 0.125``."""
    runs: list[list[Any]] = []
    for text, coefficient in coefficients.items():
        sample = int(text)
        if runs and runs[-1][1] == sample - 1 and abs(runs[-1][2] - coefficient) <= 1e-6 * abs(coefficient):
            runs[-1][1] = sample
        else:
            runs.append([sample, sample, coefficient])
    shown = [f"{first}-{last} x {c:.4g}" if last > first else f"{first} x {c:.4g}" for first, last, c in runs]
    return "samples " + ", ".join(shown)


def write_files(arguments: argparse.Namespace, found: list[dict[str, Any]], folder: Path, plots: Path) -> None:
    """What --out, --suite and --docs ask for; says on stderr what was written."""
    from bench.files import RESULTS
    from bench.run import machine

    about = {
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": arguments.device,
        "git": machine.git_state(),
        "machine": machine.machine(),
        "packages": machine.packages(),
    }
    pictures = write(found, about, folder, plots)
    print(f"tables: {folder}\nplots:  {plots} ({len(pictures)} pictures)", file=sys.stderr)
    if arguments.docs:
        shipped = arguments.suite == scenario.SUITE and not arguments.scenario
        throughput = RESULTS / "throughput" / "throughput.md" if shipped else None
        write_page(found, about, pictures, arguments.docs, throughput)
        print(f"page:   {arguments.docs}", file=sys.stderr)


OBSERVATIONS, TABLE, MARKDOWN = "observations.json", "conformance.parquet", "conformance.md"
SCHEMA_VERSION = 1
"""Of OBSERVATIONS: an object with ``schema_version``, ``about`` (as run.json has it) and ``observations``."""


def write(
    observations: Sequence[dict[str, Any]], about: Mapping[str, Any], folder: Path, plots: Path
) -> dict[str, Path]:
    """Write everything of a suite but the page; the pictures by scenario, and the table's as ``conformance``.

    Raises InputError if a folder cannot be written.
    """
    footer = _footer(about)
    pictures = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots.mkdir(parents=True, exist_ok=True)
        (folder / OBSERVATIONS).write_text(_json(observations, about))
        conformance.table(observations).to_parquet(folder / TABLE)
        (folder / MARKDOWN).write_text(conformance.markdown(observations))
        if picture := conformance_picture.draw(observations, plots, footer=footer):
            pictures["conformance"] = picture
        for name in conformance.scenarios(observations):
            of_one = [one for one in observations if one["scenario"]["name"] == name]
            if picture := draw_weight_map(of_one, plots, footer=footer):
                pictures[name] = picture
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written ({error.strerror}); name a folder that can") from error
    return pictures


def write_page(
    observations: Sequence[dict[str, Any]],
    about: Mapping[str, Any],
    pictures: Mapping[str, Path],
    path: Path,
    throughput: Path | None,
) -> None:
    """Write the page of docs. Its links are relative to it; ``throughput``, a page of its own, is if it exists."""

    def link(target: Path) -> str:
        return Path(os.path.relpath(target, path.parent)).as_posix()

    known = throughput is not None and throughput.exists()
    shown = [name for name in ("conformance", *semantics_page.telling(observations)) if name in pictures]
    text = semantics_page.page(
        observations,
        {name: link(pictures[name]) for name in shown},
        command=" ".join(about["command"]),
        about=_facts(about),
        throughput=link(throughput) if throughput and known else "",
        throughput_findings=_bullets(throughput) if throughput and known else (),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"--docs {path}: cannot be written ({error.strerror}); name a file that can") from error


def _json(observations: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> str:
    """One observation per line, so that two suites can be compared by lines."""
    head = json.dumps({"schema_version": SCHEMA_VERSION, "about": about, "observations": []})
    lines = ",\n".join(json.dumps(one) for one in observations)
    return f"{head.removesuffix(']}')}\n{lines}\n]}}\n"


def _bullets(page: Path) -> list[str]:
    """The list items of a Markdown page, without their dashes."""
    return [line.removeprefix("- ") for line in page.read_text().splitlines() if line.startswith("- ")]


def _facts(about: Mapping[str, Any]) -> dict[str, str]:
    """What a reader must know of the machine and the software."""
    versions = {
        name: about["packages"][name] for name in ("torch", "lightning", "deepspeed") if name in about["packages"]
    }
    return {**versions, "python": about["machine"]["python"], "device": about["device"], "date": about["date"]}


def _footer(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in _facts(about).items() if name not in {"device", "date"})
