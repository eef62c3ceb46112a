"""What was measured of each version: stored as JSON, shown as a page with two tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from packaging.version import Version
from pydantic import TypeAdapter

from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S
from bench.tabular import markdown_table

INTRODUCTION = """# Versions, and what they do under accumulation

Written by `nox -s versions`; `nox -s versions -- --smoke` measures the first table again, and `nox -s versions -- \
lightning==2.2.0` one version of the second.

## Lowest and newest versions

The matrix `smoke` ran every backend once with the lowest torch that `pyproject.toml` allows and with the newest one \
tested, each with the other packages at their lowest and at their newest. pip installed them, with all that they \
require. A backend whose packages are too old must say so before it trains (`unsupported`).
"""
ACCUMULATION = f"""## Behaviour under accumulation

Each version was installed alone (`pip install --no-deps`) on top of the project's environment, so all ran with the \
same torch; Lightning also gets a setuptools below 81, for the pkg_resources that old versions import. Rates are those \
of ThroughputMonitor on a virtual clock (`bench/audit/monitor.py`: {MICRO_BATCH_S:g} s per micro-batch and \
{OPTIMIZER_S:g} s per optimizer step), and the ratio is the logged samples/s divided by the true ones. DeepSpeed \
trains one weight per micro-batch by SGD with learning rate 1, in one process over gloo on the CPU. **Bold** is not \
what a user would want, though it may be a documented default.
"""
IN_WEIGHTS = "micro-batches in each update"
"""A finding that the section on weights has of more versions."""


@dataclass(frozen=True, slots=True)
class VersionFact:
    """One measurement of one version."""

    finding: str
    """What was measured, in the same words for every version."""
    measured: str
    good: bool
    """Whether that is what a user would want; False too if the probe failed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version: the environment in which it was measured, and the measurements."""

    package: str
    version: str
    """As imported, which is the version that was asked for."""
    torch: str
    python: str
    date: str
    """Of the measurement, ISO 8601, UTC."""
    error: str = ""
    """Why there are no measurements: the last line of pip, the import or the probe."""
    departures: tuple[str, ...] = ()
    """What the version's metadata requires and did not get."""
    findings: tuple[VersionFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Smoke:
    """A run of every backend with certain versions."""

    packages: dict[str, str]
    """Versions by package, as imported."""
    python: str
    date: str
    """Of the run, ISO 8601, UTC."""
    result: str
    """How the trials ended, or why there are none."""
    good: bool


def read(path: Path) -> tuple[list[Entry], list[Smoke]]:
    """What earlier sessions measured; nothing without a file."""
    if not path.exists():
        return [], []
    stored = json.loads(path.read_text(encoding="utf-8"))
    entries = TypeAdapter(list[Entry]).validate_python(stored["versions"])
    return entries, TypeAdapter(list[Smoke]).validate_python(stored["smoke"])


def merged(before: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """The newest entry of each version; Lightning first, older versions before newer ones."""
    newest = {
        (entry.package != "lightning", Version(entry.version)): entry for entry in (*before, *now)
    }
    return [newest[key] for key in sorted(newest)]


def write(entries: Sequence[Entry], smokes: Sequence[Smoke], weights: str, folder: Path) -> None:
    """Write the data and the page; ``weights`` is the section of ``grid_page``."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        "schema": 1,
        "versions": list(map(asdict, entries)),
        "smoke": list(map(asdict, smokes)),
    }
    (folder / "versions.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    (folder / "versions.md").write_text(markdown(entries, smokes, weights), encoding="utf-8")


def markdown(entries: Sequence[Entry], smokes: Sequence[Smoke], weights: str) -> str:
    """The page: a table with a row per smoke run, one with a row per measurement of a version, and the weights."""
    environments: dict[str, list[str]] = {}
    for entry in entries:
        words = f"Measured on {entry.date} with torch {entry.torch} and Python {entry.python}"
        environments.setdefault(words, []).append(f"{entry.package} {entry.version}")
    measured_on = [f"- {words}: {', '.join(names)}." for words, names in environments.items()]
    if len(environments) == 1:
        measured_on = [f"{words}." for words in environments]
    header = [*(smokes[0].packages if smokes else ()), "Python", "date", "result", "good"]
    runs = [
        [*smoke.packages.values(), smoke.python, smoke.date, smoke.result, _yes(smoke.good)]
        for smoke in smokes
    ]
    lines = [INTRODUCTION, *markdown_table(header, runs)]
    lines += [ACCUMULATION, *measured_on, ""]
    # Neighbouring versions with the same measurement share a row, and each finding is named once.
    shared: list[list[str]] = []
    last = ""
    for (package, finding, measured, good), alike in groupby(
        rows(entries), lambda row: (*row[:2], *row[3:])
    ):
        if IN_WEIGHTS in finding:
            continue
        named = f"{package}, {finding}"
        versions = ", ".join(row[2] for row in alike)
        text = measured.split(". ")[0]
        shown = text if good == _yes(True) else f"**{text}**"
        shared.append(["" if named == last else named, versions, shown])
        last = named
    lines += markdown_table(["package, finding", "versions", "measured"], shared)
    return "\n".join([*lines, weights])


def _yes(good: bool) -> str:
    return "yes" if good else "**no**"


def rows(entries: Sequence[Entry]) -> list[tuple[str, str, str, str, str]]:
    """Package, finding, version, measured, good; the versions of one finding follow each other."""
    found = [(entry, fact) for entry in entries for fact in (_installed(entry), *entry.findings)]
    order = list(dict.fromkeys((entry.package, fact.finding) for entry, fact in found))
    found.sort(key=lambda pair: order.index((pair[0].package, pair[1].finding)))
    return [
        (e.package, fact.finding, e.version, fact.measured, _yes(fact.good)) for e, fact in found
    ]


def _installed(entry: Entry) -> VersionFact:
    asked = f"; its metadata asks for {', '.join(entry.departures)}" if entry.departures else ""
    return VersionFact("runs here", entry.error or f"yes{asked}", not entry.error)
