"""The table of versions and findings: kept as JSON, written as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from bench.errors import InputError

SCHEMA = 1
PATHS = re.compile(r"(?<![\w.:/])(?:file://)?(?:/[\w.+~@-]+)+/(?=[\w.+~@-])")
"""The folders of absolute paths."""


@dataclass(frozen=True, slots=True)
class VersionFact:
    """One thing that was measured of one version."""

    finding: str
    """What was looked at; the same words for every version."""
    measured: str
    good: bool
    """Whether that is what a user would want; False too if the probe failed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version: what was run, with what, and what was found."""

    package: str
    version: str
    """As imported; it is checked to be the one that was asked for."""
    torch: str
    python: str
    date: str
    """Of the measurement, ISO 8601, UTC."""
    error: str = ""
    """Why there are no findings: the last line of what pip, the import or the probe said; empty if all went well."""
    departures: tuple[str, ...] = ()
    """What the version's metadata asks for and did not get."""
    findings: tuple[VersionFact, ...] = field(default=())

    @property
    def key(self) -> tuple[str, Version]:
        return self.package, Version(self.version)


def last_line(output: str) -> str:
    """What went wrong, from a program's output: pip's last error, or else the last line; without absolute paths."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return without_paths((errors or lines or ["no output"])[-1])


def without_paths(text: str) -> str:
    """The text with only the last part of each absolute path."""
    return PATHS.sub("", text)


def read(path: Path) -> list[Entry]:
    """The entries of an earlier run; none if there is no such file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema"] != SCHEMA:
            raise InputError(
                f"{path}: has schema {stored['schema']}, not {SCHEMA}; delete it and run all versions again"
            )
        return [_entry(entry) for entry in stored["versions"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is not a table of versions ({error}); delete it and run all again") from error


def _entry(stored: dict[str, Any]) -> Entry:
    findings = tuple(VersionFact(**finding) for finding in stored["findings"])
    return Entry(**{**stored, "departures": tuple(stored["departures"]), "findings": findings})


def merged(before: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """The newest entry of each version, in order of package and version."""
    newest = {entry.key: entry for entry in (*before, *now)}
    return [newest[key] for key in sorted(newest, key=lambda key: (key[0] != "lightning", key))]


def write(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Write ``versions.json`` and ``versions.md``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "versions.json", folder / "versions.md"
    stored = {"schema": SCHEMA, "versions": [asdict(entry) for entry in entries]}
    data.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(entries), encoding="utf-8")
    return [data, page]


def markdown(entries: Sequence[Entry]) -> str:
    """The page: how it was measured, and one table with the versions of a finding one below the other."""
    head = [
        "# Versions and what they do under accumulation",
        "",
        "Written by `nox -s versions`; `nox -s versions -- lightning==2.2.0` measures one version again. Each version "
        "was installed by itself (`pip install --no-deps`) into an environment of its own on top of the project's, so "
        "all ran with the same torch; beside Lightning lies a setuptools below 81, for the pkg_resources that old "
        "versions import. The numbers of ThroughputMonitor are from `bench/audit/monitor.py` (a micro-batch "
        f"takes {_workload()}; ratio: samples/s that it logged, to the tap's), those of "
        "DeepSpeed from a model with one weight per micro-batch, SGD with lr 1, one process, gloo, CPU.",
        "",
        *_when(entries),
        "",
        "| package | finding | versions | measured | good |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in joined(rows(entries))), ""])


def joined(lines: Iterable[Sequence[str]]) -> list[list[str]]:
    """The rows, with versions that follow one another and came out alike in one."""
    found: list[list[str]] = []
    for package, finding, version, *came_out in lines:
        if found and [*found[-1][:2], *found[-1][3:]] == [package, finding, *came_out]:
            found[-1][2] += f", {version}"
        else:
            found.append([package, finding, version, *came_out])
    return found


def _workload() -> str:
    from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S

    return f"{MICRO_BATCH_S:g} s and an optimizer step {OPTIMIZER_S:g} s, on a virtual clock"


def _when(entries: Iterable[Entry]) -> list[str]:
    """One line per date and environment."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        words = f"Measured on {entry.date} with torch {entry.torch} and Python {entry.python}"
        groups.setdefault(words, []).append(f"{entry.package} {entry.version}")
    return [f"- {words}: {', '.join(names)}." for words, names in groups.items()]


def rows(entries: Sequence[Entry]) -> list[tuple[str, str, str, str, str]]:
    """Package, finding, version, measured, good: the versions of one finding one after the other."""
    found = []
    for package in dict.fromkeys(entry.package for entry in entries):
        of_package = [entry for entry in entries if entry.package == package]
        found += [(package, "runs here", entry.version, *_installed(entry)) for entry in of_package]
        for name in dict.fromkeys(finding.finding for entry in of_package for finding in entry.findings):
            for entry in of_package:
                for finding in entry.findings:
                    if finding.finding == name:
                        found.append((package, name, entry.version, finding.measured, _yes(finding.good)))
    return found


def _installed(entry: Entry) -> tuple[str, str]:
    if entry.error:
        return entry.error, _yes(False)
    asked = f"; its metadata asks for {', '.join(entry.departures)}" if entry.departures else ""
    return f"yes{asked}", _yes(True)


def _yes(good: bool) -> str:
    return "yes" if good else "**no**"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
