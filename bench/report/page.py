"""A run as one page that can be opened, sent, printed and cited: report.html.

The page asks for nothing over a network: plots, style and script are in it. All words that come from a run are escaped
by the template.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bench.judge.pairs import ComparedPair
from bench.judge.samples import NAME
from bench.judge.standing import Standing
from bench.judge.statistics import LEVEL, MARGIN, MIN_TRIALS, RESAMPLES
from bench.judge.verdicts import NEXT, Reason, Verdict
from bench.report import epoch_end
from bench.report.answer import Answer
from bench.report.citation import ESCAPES, Citation, cite_plot, formats, words_of_cell, words_of_ratio
from bench.report.figures import kind_of
from bench.report.inline import Picture, picture
from bench.report.material import Material
from bench.report.ranking import COLUMNS, DECIDED, TIMES
from bench.report.sections import failures, sections
from bench.report.terminal import legend
from bench.words import digits, plain, plural

PAGE = "report.html"
FIRST_PLOT = "memory_vs_time"
MOST_SWITCHES = 8
"""Values of N that a row of buttons offers; more are in a list."""
PICTURE_BYTES = 400_000
"""Of a figure that is unfolded on demand; a larger one is linked to. The first of a section is always shown."""
VERDICTS, REASONS = tuple(Verdict), tuple(Reason)
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

    pictures: tuple[Picture, ...]
    linked: tuple[tuple[str, str], ...]
    """Names and links of those that the page does not hold."""


def render(of: Material, answer: Answer, plots: Sequence[Path]) -> str:
    """The page, as it stands in the run's folder; ``plots`` are the files that were drawn."""
    asked = sections(of)
    first = _shown(of.folder, [] if of.obstacle else [FIRST_PLOT], plots)
    shown = [_shown(of.folder, section.plots, plots) for section in asked]
    pictures = [one for each in (first, *shown) for one in each.pictures]
    timed = any(group.is_timed for group in answer.groups)
    return _template().render(
        run=of.run,
        title=plain(of.run.name),
        answer=answer,
        columns=[column for column in COLUMNS if timed or column.key not in TIMES],
        legend=legend(answer, answer.groups[0]) if answer.groups else "",
        is_timed=timed,
        choices={
            "place": list(dict.fromkeys(group.place for group in answer.groups)),
            "n": sorted({group.n for group in answer.groups}),
            "backend": list(dict.fromkeys(row.backend for group in answer.groups for row in group.rows)),
            "baseline": list(of.standings),
        },
        most_switches=MOST_SWITCHES,
        first=first,
        sections=list(zip(asked, shown, strict=True)),
        semantics=link(of.folder, epoch_end.PAGE) if epoch_end.PAGE.exists() else "",
        failures=failures(of),
        data=_data(of, answer, [one.stem for one in pictures]),
        raw=[(name, about) for name, about in RAW.items() if (of.folder / name).exists()],
        method={"level": LEVEL, "margin": MARGIN, "trials": MIN_TRIALS, "resamples": RESAMPLES, "name": NAME},
        facts=facts(of.run.manifest),
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
    environment.filters |= {"plural": plural, "plain": plain}
    return environment.get_template("report.html")


def _text(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _shown(folder: Path, stems: Iterable[str], plots: Sequence[Path]) -> Shown:
    """The first page of each of these figures that was drawn, if it is not too large; links to the others."""
    pictures: list[Picture] = []
    linked: list[tuple[str, str]] = []
    for stem in stems:
        files = sorted(path for path in plots if path.suffix == ".svg" and kind_of(path.stem) == stem)
        for path in files:
            if path is files[0] and (not pictures or path.stat().st_size <= PICTURE_BYTES):
                pictures.append(picture(path.read_text(encoding="utf-8"), path.stem))
            else:
                linked.append((path.stem, link(folder, path)))
    return Shown(pictures=tuple(pictures), linked=tuple(linked))


def link(folder: Path, path: Path) -> str:
    """From the page to a file, for a browser."""
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return urllib.parse.quote(Path(relative).as_posix())


def _data(of: Material, answer: Answer, plots: Iterable[str]) -> Markup:
    """What the script reads: ratios to every baseline; citations of cells, of ratios to the run's own, and of plots."""
    ids = [row.cell_id for group in answer.groups for row in group.rows]
    cells = {cell_id: formats(words_of_cell(of.quotes, cell_id)) for cell_id in ids}
    ratios = {
        cell_id: formats(words_of_ratio(of.quotes, cell_id, of.pairs[cell_id].pair.a.cell_id))
        for cell_id in ids
        if cell_id in of.pairs
    }
    value = {
        "run": of.run.name,
        "baselines": list(of.standings),
        "verdicts": VERDICTS,
        "decided": [VERDICTS.index(one) for one in DECIDED],
        "reasons": REASONS,
        "next": [NEXT[reason] for reason in REASONS],
        "ratios": _ratios(of.standings, frozenset(ids)),
        "citations": {
            "cell": packed(cells),
            "ratio": packed(ratios),
            "plot": packed({name: cite_plot(of.run, name) for name in dict.fromkeys(plots)}),
        },
    }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Inside a script nothing is an entity, and nothing may end it or open a comment.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def packed(citations: Mapping[str, Citation]) -> dict[str, Any]:
    """Citations by format: how all of them end, once, and what comes before it in each."""
    found = {}
    for name in ESCAPES:
        texts = {key: str(getattr(citation, name)) for key, citation in citations.items()}
        backwards = [text[::-1] for text in texts.values()]
        end = os.path.commonprefix(backwards)[::-1]  # noqa: RUF071 - character by character is what is meant
        found[name] = {"end": end, "of": {key: text.removesuffix(end) for key, text in texts.items()}}
    return found


def _ratios(standings: Mapping[str, Standing], ids: frozenset[str]) -> dict[str, list[list[Any]]]:
    """By cell: for each baseline with such a cell its place, ratio, low, high, and places of verdict and reason."""
    found: dict[str, list[list[Any]]] = {}
    for place, standing in enumerate(standings.values()):
        for cell_id, row in standing.by_cell.items():
            if cell_id in ids:
                found.setdefault(cell_id, []).append([place, *_ratio(row)])
    return found


def _ratio(row: ComparedPair) -> list[Any]:
    time, judgement = row.time, row.judgement
    numbers = [None, None, None] if time is None else [time.ratio, time.low, time.high]
    places = VERDICTS.index(judgement.verdict), REASONS.index(judgement.reason)
    return [*(None if value is None else digits(value) for value in numbers), *places]


def facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The run, its machine and its software, as names and values."""
    machine = manifest.get("machine") or {}
    gpus = [str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or []]
    git = manifest.get("git") or {}
    commit = str(git.get("commit") or "unknown: it was no checkout")
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    found = [
        ("run", manifest.get("run_id")),
        ("started", manifest.get("started")),
        ("finished", manifest.get("finished") or "not finished"),
        ("command", " ".join(map(str, manifest.get("command") or ()))),
        ("commit of the bench", commit + (", with uncommitted changes" if git.get("clean") is False else "")),
        ("SHA-256 of the journal", manifest.get("journal_sha256") or "not stored when the run ended"),
        ("CPU", machine.get("cpu") or "unknown"),
        ("cores", cores),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else ""),
        ("GPUs", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"),
        ("system", machine.get("system")),
        ("Python", machine.get("python")),
        ("packages", ", ".join(f"{name} {version}" for name, version in (manifest.get("packages") or {}).items())),
        ("environment", ", ".join(f"{key}={value}" for key, value in (manifest.get("environment") or {}).items())),
    ]
    return [(name, str(value)) for name, value in found if value]
