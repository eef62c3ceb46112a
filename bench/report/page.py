"""A run as one page that can be opened, sent, printed and cited: report.html.

The page asks for nothing over a network: plots, style and script are in it. All words that come from a run are escaped
by the template.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from bench.judge.bootstrap import LEVEL, RESAMPLES
from bench.judge.loading import Run
from bench.judge.quoting import Quotes
from bench.judge.samples import NAME
from bench.judge.standing import Standing
from bench.judge.statistics import MARGIN, MIN_TRIALS
from bench.judge.verdicts import NEXT
from bench.report import clipboard, figure_data
from bench.report.answer import answer
from bench.report.citation import cite_plot, formats, words_of_cell
from bench.report.figures import kind_of
from bench.report.inline import DARK_PAPER, INK, PAPER, Picture, in_the_dark, picture, variable
from bench.report.overview import REASONS, VERDICTS, Material, Overview, choices, overview
from bench.report.sections import failures, sections
from bench.words import plain, plural

PAGE = "report.html"
FIRST_PLOT = "memory_vs_time"
LONG = 12
"""Rows from which a table is folded."""
PLOTS_BYTES = 2_500_000
"""Of plots in a page; what is beyond that is linked to."""
RAW = {
    "run.json": "what ran where, with which versions",
    "trials.jsonl": "the journal: a line per trial, from which everything else follows",
    "trials.parquet": "a row per trial",
    "steps.parquet": "a row per timed optimizer step",
    "losses.parquet": "a row per optimizer step",
    "collectives.parquet": "calls and bytes by operation",
    "memory.parquet": "bytes by category",
    "ratios.parquet": "ratios, intervals and verdicts against the run's own baseline",
}
"""Files that a report links to, beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """The plots of one section."""

    first: Picture | None
    more: tuple[Picture, ...]
    linked: tuple[tuple[str, str], ...]
    """Names and links of those for which the page has no room."""


def write(
    folder: Path, run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame, plots: Sequence[Path]
) -> Path:
    """Write the page of a run into its folder; returns the path.

    ``cells`` has a row per cell (``terminal.by_cell``), and ``plots`` are the files that were drawn.
    """
    path = folder / PAGE
    draft = path.with_suffix(".tmp")
    draft.write_text(render(folder, run, standings, cells, plots), encoding="utf-8")
    draft.replace(path)
    return path


def render(
    folder: Path, run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame, plots: Sequence[Path]
) -> str:
    """The page, as it stands in the folder."""
    own = next(iter(standings.values()))
    material = Material(run=run, standing=own, cells=cells)
    table = overview(run, standings, cells)
    asked = sections(material)
    shown, colours = _shown(folder, [[FIRST_PLOT], *(section.plots for section in asked)], plots)
    words = figure_data.FigureData(run.tables, dict(run.manifest)).words("")
    return _template().render(
        run=run,
        title=plain(run.name),
        subject=words.subtitle,
        machine=words.footer.partition("; machine: ")[2],
        answer=[plain(sentence) for sentence in answer(run, standings, cells)],
        table=table,
        remarks=[plain(text) for text in own.remarks],
        choices=choices(table.lines),
        first=shown[0],
        sections=[
            (replace(section, sentences=tuple(map(plain, section.sentences))), plots_of)
            for section, plots_of in zip(asked, shown[1:], strict=True)
        ],
        failures=failures(material),
        data=_data(run, standings, table, shown),
        properties=_properties(colours),
        long=LONG,
        raw=[(name, about) for name, about in RAW.items() if (folder / name).exists()],
        method={"level": LEVEL, "margin": MARGIN, "trials": MIN_TRIALS, "resamples": RESAMPLES, "name": NAME},
        facts=facts(run.manifest),
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
    )


@cache
def _template() -> jinja2.Template:
    here = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plural"] = plural
    return environment.get_template("report.html")


def _text(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _shown(folder: Path, wanted: Iterable[Sequence[str]], plots: Sequence[Path]) -> tuple[list[Shown], frozenset[str]]:
    """The plots of each section, while there is room, and the colours in them. First come those that are open."""
    files = {path.stem: path for path in plots if path.suffix == ".svg"}
    groups = [[name for stem in stems for name in _pages(stem, files)] for stems in wanted]
    room, pictures = PLOTS_BYTES, dict[str, Picture]()
    firsts = [group[0] for group in groups if group]
    for name in dict.fromkeys([*firsts, *(name for group in groups for name in group)]):
        length = files[name].stat().st_size
        if length > room and name not in firsts:
            continue
        pictures[name] = picture(files[name].read_text(encoding="utf-8"), name)
        room -= len(pictures[name].markup)
    found = []
    for group in groups:
        inside = [pictures[name] for name in group if name in pictures]
        outside = [(name, link(folder, files[name])) for name in group if name not in pictures]
        found.append(Shown(first=inside[0] if inside else None, more=tuple(inside[1:]), linked=tuple(outside)))
    return found, frozenset(colour for one in pictures.values() for colour in one.colours)


def _pages(stem: str, files: Mapping[str, Path]) -> list[str]:
    """The names of a figure's pages: ``stem``, or ``stem-1`` and so on."""
    if stem in files:
        return [stem]
    numbered = [name for name in files if kind_of(name) == stem]
    return sorted(numbered, key=lambda name: int(name.rpartition("-")[2]))


def link(folder: Path, path: Path) -> str:
    """From the page to a file, for a browser."""
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return urllib.parse.quote(Path(relative).as_posix())


def _properties(colours: frozenset[str]) -> dict[str, list[tuple[str, str]]]:
    """The custom properties that the plots are drawn with, on light paper and on dark."""
    every = sorted({*colours, PAPER, INK})
    dark = [(variable(colour), DARK_PAPER if colour == PAPER else in_the_dark(colour)) for colour in every]
    return {"light": [(variable(colour), colour) for colour in every], "dark": dark}


def _data(run: Run, standings: Mapping[str, Standing], table: Overview, shown: Sequence[Shown]) -> Markup:
    """What the script reads: ratios to every baseline, and citations."""
    names = [one.stem for group in shown for one in (group.first, *group.more) if one is not None]
    value = {
        "run": run.name,
        "baselines": table.baselines,
        "verdicts": VERDICTS,
        "reasons": REASONS,
        "next": [NEXT[reason] for reason in REASONS],
        "ratios": table.ratios,
        "citations": _citations(run, standings, [line.cell_id for line in table.lines], names),
    }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Inside a script nothing is an entity, and nothing may end it or open a comment.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _citations(run: Run, standings: Mapping[str, Standing], ids: Sequence[str], plots: Iterable[str]) -> dict[str, Any]:
    """The citations of cells, of their ratios to every baseline, and of plots."""
    quotes = Quotes(run, standings)
    return {
        "cell": clipboard.packed({cell_id: formats(words_of_cell(quotes, cell_id)) for cell_id in ids}),
        "ratio": clipboard.ratios(quotes, standings, ids),
        "plot": clipboard.packed({name: cite_plot(run, name) for name in dict.fromkeys(plots)}),
    }


def facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The run, its machine and its software, as names and values."""
    machine = manifest.get("machine") or {}
    gpus = [str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or []]
    git = manifest.get("git") or {}
    commit = str(git.get("commit") or "unknown: it was no checkout")
    found = [
        ("run", manifest.get("run_id")),
        ("started", manifest.get("started")),
        ("finished", manifest.get("finished") or "not finished"),
        ("command", " ".join(map(str, manifest.get("command") or ()))),
        ("commit of the bench", commit + (", with uncommitted changes" if git.get("clean") is False else "")),
        ("SHA-256 of the journal", manifest.get("journal_sha256") or "not stored when the run ended"),
        ("CPU", f"{machine.get('cpu') or 'unknown'}, {_cores(machine.get('cores'))}"),
        ("memory", _gib(machine.get("memory_bytes"))),
        ("GPUs", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"),
        ("system", machine.get("system")),
        ("Python", machine.get("python")),
        ("packages", ", ".join(f"{name} {version}" for name, version in (manifest.get("packages") or {}).items())),
        ("environment", ", ".join(f"{key}={value}" for key, value in (manifest.get("environment") or {}).items())),
    ]
    return [(name, str(value)) for name, value in found if value]


def _cores(number: Any) -> str:
    return plural(number, "core") if isinstance(number, int) else "an unknown number of cores"


def _gib(size: Any) -> str:
    return f"{size / 2**30:.1f} GiB" if isinstance(size, int) else ""
