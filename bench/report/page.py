"""A run as one page that can be opened, sent, printed and cited: report.html.

The page asks for nothing over a network: plots, style and script are in it. The template escapes
all words that come from a run, and nothing in a picture is run or loaded by a browser.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict, TypeVar

import jinja2
from markupsafe import Markup
from PIL import Image

from bench.formatting import digits, plain, plural
from bench.judge.analysis import Analysis
from bench.judge.columns import FRAMES
from bench.judge.pool import Pool
from bench.judge.samples import NAME
from bench.judge.statistics import LEVEL, MARGIN, MIN_RUNS, MIN_TRIALS
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import DECIDED, DIFFERENT, Reason, Verdict
from bench.plan.cell import Status
from bench.report.answer import Answer
from bench.report.citation import ESCAPES, Citation, cite, cite_plot
from bench.report.descriptions import gpu_names
from bench.report.ranking import (
    COLUMNS,
    MAY_DIFFER,
    OF_GPUS,
    TIMES,
    Group,
    RankedRow,
    below_ratio,
    footnote_of,
)
from bench.report.sections import PageSection, failures, published, sections
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
"""Files of a run's folder that a report names: it links to none, since it is sent by itself."""
WITHOUT_VALUE = {"finished": "not finished", "CPU": "unknown", "GPUs": "none"}
"""What stands for a missing fact of a run; other facts are left out."""
Choice = TypeVar("Choice")


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


def render(
    data: Analysis,
    answer: Answer,
    plots: Sequence[Path],
    further: PageSection | None = None,
) -> str:
    """The page, as it stands in the run's folder.

    ``plots`` are the files that were drawn; the section ``further`` comes last.
    """
    asked = sections(data)
    for section in (published(data), further):
        if section is not None:
            asked.append(section)
    pictures = {path.stem: picture(path) for path in plots if path.suffix == ".png"}
    shown = []
    for section in asked:
        shown.append((section, [pictures[stem] for stem in section.plots if stem in pictures]))
    first = []
    if not data.times_unavailable and FIRST_PLOT in pictures:
        first.append(pictures[FIRST_PLOT])
    choices = _choices(data, answer.groups)
    template = _environment().get_template("report.html")
    return template.render(
        run=data.run,
        title=plain(data.run.name),
        answer=answer,
        is_timed=any(group.is_timed for group in answer.groups),
        choices=choices,
        overview=overview(answer.groups, choices),
        footnote=footnote_of(answer.groups),
        most_switches=MOST_SWITCHES,
        first=first,
        sections=shown,
        failures=failures(data),
        data=_data(data, answer, sorted(pictures)),
        raw=[(name, about) for name, about in RAW.items() if (data.folder / name).exists()],
        method={
            "level": LEVEL,
            "margin": MARGIN,
            "trials": MIN_TRIALS,
            "runs": MIN_RUNS,
            "name": NAME,
        },
        facts=facts(data.pool),
        num_runs=len(data.pool.runs),
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
    )


def _choices(data: Analysis, groups: Sequence[Group]) -> Choices:
    found = Choices(place=[], n=[], backend=[], baseline=data.baselines)
    for group in groups:
        _add(found["place"], group.setting)
        _add(found["n"], group.n)
        for row in group.rows:
            _add(found["backend"], row.backend)
    found["n"].sort()
    return found


def _add(choices: list[Choice], choice: Choice) -> None:
    """Append what is not yet among the choices."""
    if choice not in choices:
        choices.append(choice)


def overview(groups: Sequence[Group], choices: Choices) -> Table:
    """The cells of all groups; the page's script filters, sorts and compares them."""
    rows: list[TableRow] = []
    for group in groups:
        setting = choices["place"].index(group.setting)
        about: dict[str, object] = {"data-n": group.n, "data-place": setting, "hidden": None}
        if group.is_timed:
            about["data-timed"] = ""
        if rows:
            about["hidden"] = ""
        rows.append(TableRow({"backend": group.title}, attributes=about, is_heading=True))
        for row in group.rows:
            place = choices["backend"].index(row.backend)
            rows.append(_overview_row(group, row, place))
    is_timed = any(group.is_timed for group in groups)
    columns = []
    for column in COLUMNS:
        is_in_other = column.key.endswith(("_ends", "_ratio"))
        is_shown = is_timed or column.key not in TIMES
        if column.key == "note" and not footnote_of(groups):
            continue
        if is_shown and not is_in_other and column.key not in OF_GPUS:
            columns.append(column)
    columns.append(TableColumn("cite", "cite", is_number=False))
    num_runs = max((group.num_runs for group in groups), default=1)
    caption = _macro("caption")(is_timed, choices["baseline"][0], num_runs)
    return Table(columns=columns, rows=rows, caption=caption)


def _macro(name: str) -> Callable[..., str]:
    """A macro of cells.html."""
    macro: Callable[..., str] = getattr(_environment().get_template("cells.html").module, name)
    return macro


def _overview_row(group: Group, row: RankedRow, place: int) -> TableRow:
    """``place``: of the backend among all."""
    texts = group.texts(row)
    ratio = None
    if texts["ratio"] != DASH:
        ratio = row.ratio
        if ratio is None:  # the baseline has none to itself
            ratio = 1
    raw: dict[str, object] = {
        "seconds": row.step_time_s,
        "ratio": ratio,
        "memory": row.peak_memory_bytes,
    }
    html = {key: _macro(key)(group, row, texts) for key in (*raw, "correct", "cite")}
    attributes: dict[str, object] = {
        "id": f"cell-{row.cell_id}",
        "data-id": row.cell_id,
        "data-backend": place,
        "class": None,
    }
    if row.status != Status.OK:
        attributes["class"] = "wrong"
    styles = {}
    if texts["verdict"] in DIFFERENT:
        styles["verdict"] = texts["verdict"]
    values: dict[str, object] = dict(texts)
    for key, text in texts.items():
        if text in ("", DASH):
            values[key] = None  # is sorted behind all others
    return TableRow(texts=texts | html, styles=styles, values=values | raw, attributes=attributes)


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
        title = str(image.info.get("Title", ""))
        about = str(image.info.get("Description", ""))
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Picture(stem=path.stem, title=title, about=about, source=source)


def _data(data: Analysis, answer: Answer, plots: Iterable[str]) -> Markup:
    """What the script reads.

    Ratios to every baseline; citations of cells, of ratios to the run's baseline, and of plots.
    """
    timed: set[str] = set()
    cells: dict[str, Citation] = {}
    ratios: dict[str, Citation] = {}
    for group in answer.groups:
        ids = [row.cell_id for row in group.rows]
        if group.is_timed:
            timed.update(ids)
        for cell_id in ids:
            cells[cell_id] = cite(data, cell_id)
            if cell_id in data.pairs:
                ratios[cell_id] = cite(data, cell_id, data.pairs[cell_id].a.cell_id)
    value = {
        "places": " ".join(shlex.quote(f"results/{run.name}") for run in data.pool.runs),
        "baselines": data.baselines,
        "verdicts": VERDICTS,
        "decided": list(map(VERDICTS.index, DECIDED)),
        "reasons": REASONS,
        "ratios": _ratios(data, timed),
        "citations": {
            "cell": packed(cells),
            "ratio": packed(ratios),
            "plot": packed({name: cite_plot(data.pool, name) for name in plots}),
        },
    }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Inside a script element entities are not read, and nothing may end it or open a comment.
    for character in ("<", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def packed(citations: Mapping[str, Citation]) -> dict[str, object]:
    """Citations by format: the ending that all have in common, once, and the rest of each."""
    found: dict[str, object] = {}
    for name in ESCAPES:
        texts, backwards = {}, []
        for key, citation in citations.items():
            text = str(getattr(citation, name))
            texts[key] = text
            backwards.append(text[::-1])
        end = os.path.commonprefix(backwards)[::-1]  # noqa: RUF071 - by character is what is meant
        rest = {key: text.removesuffix(end) for key, text in texts.items()}
        found[name] = {"end": end, "of": rest}
    return found


def _ratios(data: Analysis, ids: Collection[str]) -> dict[str, list[list[object]]]:
    """By cell: for each baseline with such a cell its index, and the ratio to it.

    That is the ratio, what stands below it, the places of verdict and reason, and what to add to
    the verdict.
    """
    found: dict[str, list[list[object]]] = {}
    for place, baseline in enumerate(data.baselines):
        for cell_id, row in data.against(baseline).items():
            if cell_id not in ids:
                continue
            middle, below, more = None, "", ""
            if row.time is not None:
                middle = digits(row.time.ratio)
                below = below_ratio(row.time).removeprefix(DASH)
            if row.may_differ:
                more = MAY_DIFFER
            places = VERDICTS.index(row.verdict), REASONS.index(row.reason)
            found.setdefault(cell_id, []).append([place, middle, below, *places, more])
    return found


def facts(pool: Pool) -> list[tuple[str, str]]:
    """The first run, its machine and its software, as names and values; of others their hashes."""
    run, *others = pool.runs
    manifest, machine, git = run.manifest, run.manifest.machine, run.manifest.git
    commit = git.commit
    if not commit:
        commit = "unknown: not run from a checkout"
    elif git.clean is None:
        commit += ", perhaps with uncommitted changes"
    elif not git.clean:
        commit += ", with uncommitted changes"
    cores, memory = "", ""
    if machine.cores:
        cores = str(machine.cores)
    if machine.memory_bytes:
        memory = f"{machine.memory_bytes / 2**30:.1f} GiB"
    packages = [f"{name} {version}" for name, version in manifest.packages.items()]
    environment = [f"{key}={value}" for key, value in manifest.node.environment.items()]
    found: dict[str, str | None] = {
        "run": manifest.run_id,
        "started": manifest.started,
        "finished": manifest.finished,
        "command": " ".join(manifest.command),
        "commit of the bench": commit,
        "SHA-256 of run.json and journal": run.pin,
        "SHA-256 of the journal": run.digest,
        "CPU": machine.cpu,
        "cores": cores,
        "memory": memory,
        "GPUs": gpu_names(machine),
        "system": machine.system,
        "Python": machine.python,
        "packages": ", ".join(packages),
        "environment": ", ".join(environment),
    }
    shown = []
    for name, value in found.items():
        if value:
            shown.append((name, value))
        elif name in WITHOUT_VALUE:
            shown.append((name, WITHOUT_VALUE[name]))
    for other in others:
        shown.append((f"pooled with the run of {other.manifest.started[:10]}, SHA-256", other.pin))
    return shown
