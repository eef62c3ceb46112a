"""A run as one page that can be opened, sent, printed and cited: report.html.

The page asks for nothing over a network: plots, style and script are in it. The template escapes all words that come
from a run, and nothing in a picture is run or loaded by a browser.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import jinja2
from markupsafe import Markup
from PIL import Image

from bench.formatting import digits, plain, plural
from bench.judge.analysis import Analysis
from bench.judge.columns import FRAMES
from bench.judge.loading import Run
from bench.judge.samples import NAME
from bench.judge.statistics import LEVEL, MARGIN, MIN_TRIALS
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import DECIDED, NEXT, Reason, Verdict
from bench.plan.cell import Status
from bench.report.answer import Answer
from bench.report.citation import ESCAPES, Citation, cite, cite_plot
from bench.report.descriptions import gpu_names
from bench.report.ranking import COLUMNS, MAY_DIFFER, TIMES, Group, RankedRow
from bench.report.sections import SCENARIOS, PageSection, failures, published, sections
from bench.tabular import Table, TableColumn, TableRow

PAGE = "report.html"
FIRST_PLOT = "memory_vs_time"
MOST_SWITCHES = 8
"""Values of N that a row of buttons offers; more are in a list."""
VERDICTS, REASONS = tuple(Verdict), tuple(Reason)
RAW = {
    "run.json": "what ran where, with which versions",
    "trials.jsonl": "the journal: one line per trial, from which everything else follows",
    **{f"{name}.parquet": about for name, about in FRAMES.items()},
}
"""Files that a report links to where they lie beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A plot of the page."""

    stem: str
    title: str
    about: str
    """All words around its panels, for readers who cannot see it."""
    source: str
    """The PNG as a data URL."""


class Choices(TypedDict):
    """What a reader of the table of all cells may choose from."""

    place: list[str]
    n: list[int]
    backend: list[str]
    baseline: list[str]


def render(data: Analysis, answer: Answer, plots: Sequence[Path], further: PageSection | None = None) -> str:
    """The page, as it stands in the run's folder; ``plots`` are the files that were drawn, ``further`` comes last."""
    asked = [*sections(data), *filter(None, [published(data), further])]
    pictures = {path.stem: picture(path) for path in plots if path.suffix == ".png"}
    shown = [[pictures[stem] for stem in section.plots if stem in pictures] for section in asked]
    choices = Choices(
        place=list(dict.fromkeys(group.setting for group in answer.groups)),
        n=sorted({group.n for group in answer.groups}),
        backend=list(dict.fromkeys(row.backend for group in answer.groups for row in group.rows)),
        baseline=data.baselines,
    )
    template = _environment().get_template("report.html")
    return template.render(
        run=data.run,
        title=plain(data.run.name),
        answer=answer,
        is_timed=any(group.is_timed for group in answer.groups),
        choices=choices,
        overview=overview(answer.groups, choices),
        most_switches=MOST_SWITCHES,
        first=[] if data.times_unavailable else [pictures[FIRST_PLOT]] if FIRST_PLOT in pictures else [],
        sections=list(zip(asked, shown, strict=True)),
        semantics=link(data.folder, SCENARIOS) if SCENARIOS.exists() else "",
        failures=failures(data),
        data=_data(data, answer, sorted(pictures)),
        raw=[(name, about) for name, about in RAW.items() if (data.folder / name).exists()],
        method={"level": LEVEL, "margin": MARGIN, "trials": MIN_TRIALS, "name": NAME},
        facts=facts(data.run),
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
    )


def overview(groups: Sequence[Group], choices: Choices) -> Table:
    """The cells of all groups; the page's script filters, sorts and compares them."""
    cells: Any = _environment().get_template("cells.html").module
    rows = []
    for place, group in enumerate(groups):
        setting, hidden = choices["place"].index(group.setting), "" if place else None
        about = {"data-n": group.n, "data-place": setting, "hidden": hidden}
        rows.append(TableRow({"backend": group.title}, attributes=about, is_heading=True))
        rows += [_overview_row(cells, group, row, choices["backend"].index(row.backend)) for row in group.rows]
    is_timed = any(group.is_timed for group in groups)
    columns = [column for column in COLUMNS if is_timed or column.key not in TIMES]
    columns = [column for column in columns if not column.key.endswith(("_ends", "_ratio"))]  # these are in others
    columns.append(TableColumn("cite", "cite", is_number=False))
    return Table(columns=columns, rows=rows, caption=cells.caption(is_timed, choices["baseline"][0]))


def _overview_row(cells: Any, group: Group, row: RankedRow, place: int) -> TableRow:
    """``cells``: the macros of cells.html; ``place``: of the backend among all."""
    texts, is_ok, cell_id = group.texts(row), row.status == Status.OK, row.cell_id
    raw: dict[str, object] = {
        "seconds": row.step_time_s,
        "ratio": None if texts["ratio"] == DASH else row.ratio or 1,
        "memory": row.peak_memory_bytes,
    }
    html = {key: getattr(cells, key)(group, row, texts) for key in (*raw, "correct", "cite")}
    wrong = None if is_ok else "wrong"
    return TableRow(
        texts=texts | html,
        styles={"verdict": texts["verdict"]} if texts["verdict"] in (Verdict.FASTER, Verdict.SLOWER) else {},
        values=texts | raw,
        attributes={"id": f"cell-{cell_id}", "data-id": cell_id, "data-backend": place, "class": wrong},
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plural": plural, "plain": plain}
    return environment


def _text(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def picture(path: Path) -> Picture:
    """The plot in a PNG of ``bench.report.canvas``, which has its words as metadata."""
    with Image.open(path) as image:
        title, about = (str(image.info.get(name, "")) for name in ("Title", "Description"))
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Picture(stem=path.stem, title=title, about=about, source=source)


def link(folder: Path, path: Path) -> str:
    """From the page to a file, for a browser."""
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return urllib.parse.quote(Path(relative).as_posix())


def _data(data: Analysis, answer: Answer, plots: Iterable[str]) -> Markup:
    """What the script reads: ratios to every baseline; citations of cells, ratios to the run's baseline, and plots."""
    rows = {row.cell_id: group for group in answer.groups for row in group.rows}
    timed = frozenset(cell_id for cell_id, group in rows.items() if group.is_timed)
    cells = {cell_id: cite(data, cell_id) for cell_id in rows}
    ratios = {cell_id: cite(data, cell_id, data.pairs[cell_id].a.cell_id) for cell_id in rows if cell_id in data.pairs}
    value = {
        "run": data.run.name,
        "baselines": data.baselines,
        "verdicts": VERDICTS,
        "decided": [VERDICTS.index(verdict) for verdict in DECIDED],
        "reasons": REASONS,
        "next": [NEXT[reason] for reason in REASONS],
        "ratios": _ratios(data, timed),
        "citations": {
            "cell": packed(cells),
            "ratio": packed(ratios),
            "plot": packed({name: cite_plot(data.pool, name) for name in dict.fromkeys(plots)}),
        },
    }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Inside a script element entities are not read, and nothing may end it or open a comment.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def packed(citations: Mapping[str, Citation]) -> dict[str, object]:
    """Citations by format: the ending that all have in common, once, and the rest of each."""
    found: dict[str, object] = {}
    for name in ESCAPES:
        texts = {key: str(getattr(citation, name)) for key, citation in citations.items()}
        backwards = [text[::-1] for text in texts.values()]
        end = os.path.commonprefix(backwards)[::-1]  # noqa: RUF071 - character by character is what is meant
        found[name] = {"end": end, "of": {key: text.removesuffix(end) for key, text in texts.items()}}
    return found


def _ratios(data: Analysis, ids: frozenset[str]) -> dict[str, list[list[object]]]:
    """By cell: for each baseline with such a cell its index, ratio, low, high, and what to say of the verdict."""
    found: dict[str, list[list[object]]] = {}
    for place, baseline in enumerate(data.baselines):
        for cell_id, row in data.against(baseline).items():
            if cell_id in ids:
                numbers = [None] * 3 if row.time is None else [row.time.ratio, row.time.low, row.time.high]
                shown = [None if value is None else digits(value) for value in numbers]
                places = VERDICTS.index(row.verdict), REASONS.index(row.reason)
                found.setdefault(cell_id, []).append([place, *shown, *places, MAY_DIFFER if row.may_differ else ""])
    return found


def facts(run: Run) -> list[tuple[str, str]]:
    """The run, its machine and its software, as names and values."""
    manifest, machine, git = run.manifest, run.manifest.machine, run.manifest.git
    commit = git.commit or "unknown: not run from a checkout"
    if git.clean is False:
        commit += ", with uncommitted changes"
    found = [
        ("run", manifest.run_id),
        ("started", manifest.started),
        ("finished", manifest.finished or "not finished"),
        ("command", " ".join(manifest.command)),
        ("commit of the bench", commit),
        ("SHA-256 of the journal", run.digest),
        ("CPU", machine.cpu or "unknown"),
        ("cores", str(machine.cores or "")),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB" if machine.memory_bytes else ""),
        ("GPUs", gpu_names(machine) or "none"),
        ("system", machine.system or ""),
        ("Python", machine.python or ""),
        ("packages", ", ".join(f"{name} {version}" for name, version in manifest.packages.items())),
        ("environment", ", ".join(f"{key}={value}" for key, value in manifest.node.environment.items())),
    ]
    return [(name, value) for name, value in found if value]
