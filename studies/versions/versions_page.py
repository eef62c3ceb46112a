"""What was measured of each version: stored as JSON, shown as a page with two tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import Version
from pydantic import TypeAdapter

from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S
from bench.tabular import markdown_table
from tests.varied_table import varied_table

INTRODUCTION = """# Versions, and what they do under accumulation

Written by `nox -s versions`; `-- --smoke` measures the first table again, and `-- lightning==2.2.0` one version of \
the second.

## Lowest and newest versions

The matrix `smoke` ran every backend once with the lowest torch that `pyproject.toml` allows and with the newest one \
tested, each with the other packages at their lowest and at their newest. A backend whose packages are too old must \
say so before it trains (`unsupported`).
"""
ACCUMULATION = f"""## Behaviour under accumulation

Each version was installed alone (`pip install --no-deps`) on top of the project's environment; Lightning also got a \
setuptools below 81, for the pkg_resources that old versions import. A ratio is the samples/s that ThroughputMonitor \
logged, divided by the true ones, on a virtual clock ({MICRO_BATCH_S:g} s per micro-batch, {OPTIMIZER_S:g} s per \
optimizer step). DeepSpeed trains one weight per micro-batch by SGD with learning rate 1, in one process over gloo on \
the CPU. **Bold** is not what a user would want, though it may be a documented default. [versions.json](versions.json) \
has what is the same in all versions, such as [wrong rates](claims.md#throughputmonitor), and 0.25 from ZeRO-3 where \
grad_accum_dtype is not set.
"""
IN_WEIGHTS = "micro-batches in each update"
"""A finding that the section on weights has of more versions."""
RUNS_HERE = "runs here"
"""The first finding of each package, which has all its versions."""


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
    header = [*(smokes[0].packages if smokes else ()), "Python", "date", "result", "as expected"]
    lines = [INTRODUCTION, *varied_table(header, ends(smokes))]
    lines += [ACCUMULATION, *measured_on, ""]
    lines += markdown_table(["finding", "versions", "measured"], behaviour(entries))
    return "\n".join([*lines, weights])


def ends(smokes: Sequence[Smoke]) -> list[list[str]]:
    """A row for the runs with one torch that ended alike, with all versions of the other packages."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for smoke in smokes:
        torch, *others = smoke.packages.values()
        ended = torch, smoke.python, smoke.date, smoke.result, _yes(smoke.good)
        alike.setdefault(ended, []).append(others)
    return [
        [torch, *(" and ".join(dict.fromkeys(each)) for each in zip(*others, strict=True)), *ended]
        for (torch, *ended), others in alike.items()
    ]


def behaviour(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """What differs between versions: findings, versions, and what was measured; findings that are alike share rows.

    Each package is named with its first finding, which has all its versions.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for package, finding, version, measured, good in rows(entries):
        if IN_WEIGHTS not in finding:
            text = measured.split(". ")[0]
            shown = text if good == _yes(True) else f"**{text}**"
            found.setdefault((package, finding), {}).setdefault(shown, []).append(version)
    shared: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for (package, finding), by_text in found.items():
        measured_in = tuple((text, ", ".join(versions)) for text, versions in by_text.items())
        shared.setdefault((package, measured_in), []).append(finding)
    table = []
    for (package, measured_in), findings in shared.items():
        title = "; ".join(findings)
        if RUNS_HERE in findings:
            title = f"{package}, {title}"
        elif len(measured_in) == 1:
            continue
        for text, versions in measured_in:
            table.append((title, versions, text))
            title = ""
    return table


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
    return VersionFact(RUNS_HERE, entry.error or f"yes{asked}", not entry.error)
