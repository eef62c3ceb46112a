"""The files of ``python -m bench semantics``: what was observed, the conformance table, the maps, the page of docs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.report import conformance, semantics_page
from bench.report.weights import draw_weight_map

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
        if picture := conformance.draw(observations, plots, footer=footer):
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
