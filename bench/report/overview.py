"""The table of all cells on a report's first screen, the ratios to every baseline, and how numbers become words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair
from bench.judge.standing import Standing
from bench.judge.verdicts import Reason, Verdict
from bench.plan.cell import LATER, REFERENCES, Cell, Status
from bench.plan.columns import COLUMNS, DASH, Column
from bench.report.answer import size
from bench.report.comparison import DECIDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of plain words under a header."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """How many first columns hold words; the others hold numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSection:
    """One question."""

    key: str
    title: str
    sentences: tuple[str, ...]
    plots: tuple[str, ...]
    """Names of figures, without the number of a page: the first that was drawn is shown, the others can be unfolded."""
    table: Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What sections are made of."""

    run: Run
    standing: Standing
    """Against the run's own baseline."""
    cells: pd.DataFrame
    """A row per cell: ``terminal.by_cell``."""

    def label(self, cell_id: str) -> str:
        """The name of a cell."""
        return self.run.cells[cell_id].label

    @property
    def others(self) -> pd.DataFrame:
        """The cells but for the reference; all if there is nothing else."""
        found = self.cells[~self.cells["backend"].isin(REFERENCES)]
        return self.cells if found.empty else found


def table_of(
    caption: str,
    header: Sequence[str],
    cells: pd.DataFrame,
    line: Callable[[Mapping[str, Any]], tuple[str, ...]],
    words: int = 1,
) -> Table:
    """A table with a row per cell."""
    rows: Iterable[Any] = cells.to_dict("records")
    return Table(caption=caption, header=tuple(header), rows=tuple(line(row) for row in rows), words=words)


def status_words(cell: Mapping[str, Any]) -> str:
    """The status, and in how many trials, if it is not good."""
    status = str(cell["status"])
    return status if status == Status.OK else f"{status}, {cell['num_bad']} of {cell['num_trials']}"


def title(name: str) -> str:
    """What stands above a column of trials in a table."""
    return TRIALS[name].title or name


def text(name: str, value: Any) -> str:
    """A value of a column of trials in a table."""
    return TRIALS[name].shown(None if pd.isna(value) else value)


def number(value: Any, form: str) -> str:
    """A number, or a dash if there is none."""
    if value is None or pd.isna(value):
        return DASH
    return format(int(value) if form == "d" else float(value), form)


def interval(low: Any, high: Any) -> str:
    """The ends of an interval, or a dash if there is none."""
    return DASH if pd.isna(low) or pd.isna(high) else f"{number(low, '.4g')} - {number(high, '.4g')}"


def scaled(value: Any, unit: float) -> str:
    """A number of units, or a dash."""
    return DASH if value is None or pd.isna(value) else f"{float(value) / unit:,.2f}"


def count(amount: int, noun: str) -> str:
    """A number of things."""
    return f"{amount} {noun}" + ("" if amount == 1 else "s")


SHOWN = ("backend", "accumulate", "world_size")
TRIALS = COLUMNS["trials"]
VERDICTS, REASONS = tuple(Verdict), tuple(Reason)
RATIO_DIGITS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CellColumn:
    """One column of the table."""

    key: str
    title: str
    is_number: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """What one line says in one column."""

    text: str
    value: float | str | None
    """By which the column is sorted; None comes last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One cell."""

    cell_id: str
    label: str
    backend: str
    accumulate: int
    world_size: int
    status: str
    """As filters know it."""
    ended: str
    """The status, and in how many trials, if it is not good."""
    fields: Mapping[str, Field]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """The table, as it is without a script: against the run's own baseline."""

    columns: tuple[CellColumn, ...]
    """Of facts; the verdict's and the status's follow them."""
    lines: tuple[Line, ...]
    baseline: str
    baselines: tuple[str, ...]
    """All that can be picked, the run's own first."""
    ratios: Mapping[str, list[list[float | int | None]]]
    """By cell: for each baseline with such a cell its place in ``baselines``, ratio, low and high ends of the interval,
    places in VERDICTS and REASONS."""


def overview(run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame) -> Overview:
    """``cells`` has a row per cell: ``terminal.by_cell``."""
    baselines = tuple(standings)
    ratios: dict[str, list[list[float | int | None]]] = {}
    ids = {cell: cell_id for cell_id, cell in run.cells.items()}
    for place, standing in enumerate(standings.values()):
        for row in standing.rows:
            if not row.pair.b.twin:
                ratios.setdefault(ids[row.pair.b], []).append([place, *_ratio(row)])
    own = {} if not baselines else standings[baselines[0]].by_cell
    names = varying(run)
    about = {name: _column(name) for name in names}
    columns = [CellColumn(key=name, title=one.title or name, is_number=one.is_number) for name, one in about.items()]
    columns += [
        CellColumn(key="seconds", title=title("step_time_s"), is_number=True),
        CellColumn(key="memory", title="peak memory", is_number=True),
    ]
    lines = []
    for cell in cells.to_dict("records"):
        one = run.cells[cell["cell_id"]]
        judged = own.get(cell["cell_id"])
        facts = {name: _fact(one, name) for name in names}
        facts |= {
            "seconds": Field(text=text("step_time_s", cell["step_time_s"]), value=_value(cell["step_time_s"])),
            "memory": Field(
                text=DASH if pd.isna(cell["peak_memory_bytes"]) else size(float(cell["peak_memory_bytes"])),
                value=_value(cell["peak_memory_bytes"]),
            ),
        }
        facts |= verdict_fields(judged, is_baseline=bool(baselines) and one.backend == baselines[0])
        status = str(cell["status"])
        lines.append(
            Line(
                cell_id=str(cell["cell_id"]),
                label=one.label,
                backend=one.backend,
                accumulate=one.accumulate,
                world_size=one.world_size,
                status=status,
                ended=status if status == Status.OK else f"{status} {cell['num_bad']}/{cell['num_trials']}",
                fields=facts,
            )
        )
    return Overview(
        columns=tuple(columns),
        lines=tuple(lines),
        baseline=baselines[0] if baselines else DASH,
        baselines=baselines,
        ratios=ratios,
    )


def varying(run: Run) -> list[str]:
    """The fields of cells that the table shows: SHOWN, and all in which cells of a backend differ, or of any."""
    cells = [cell for cell in run.cells.values() if not cell.twin]
    others = [cell for cell in cells if not cell.is_reference] or cells
    names = [field.name for field in fields(Cell) if field.name not in {*SHOWN, "twin"}]
    return [*SHOWN, *(name for name in names if len({getattr(cell, name) for cell in others}) > 1)]


def _column(name: str) -> Column:
    """The column of a field of a cell; some are no column of the trials."""
    return TRIALS.get(name, Column("boolean" if isinstance(LATER.get(name), bool) else "string", "", ""))


def _fact(cell: Cell, name: str) -> Field:
    column, value = _column(name), getattr(cell, name)
    return Field(text=column.shown(value), value=value if column.is_number else str(value))


def _value(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def _ratio(row: ComparedPair) -> list[float | int | None]:
    time, judgement = row.time, row.judgement
    numbers = [None, None, None] if time is None else [time.ratio, time.low, time.high]
    return [
        *(None if value is None else round(value, RATIO_DIGITS) for value in numbers),
        VERDICTS.index(judgement.verdict),
        REASONS.index(judgement.reason),
    ]


def verdict_fields(row: ComparedPair | None, *, is_baseline: bool) -> dict[str, Field]:
    """Ratio, interval and verdict in words; the script says the same of the baseline that a reader picks."""
    empty = Field(text=DASH, value=None)
    if is_baseline:
        return {"ratio": Field(text="1", value=1.0), "interval": empty, "verdict": Field(text="baseline", value="")}
    if row is None:
        return {"ratio": empty, "interval": empty, "verdict": empty}
    time, judgement = row.time, row.judgement
    word = str(judgement.verdict) if judgement.reason in DECIDED else f"{judgement.verdict}: {judgement.reason}"
    verdict = Field(text=word, value=word)
    if time is None:
        return {"ratio": empty, "interval": empty, "verdict": verdict}
    ends = "none" if time.low is None or time.high is None else f"{time.low:.3f} - {time.high:.3f}"
    return {
        "ratio": Field(text=f"{time.ratio:.3f}", value=round(time.ratio, RATIO_DIGITS)),
        "interval": Field(text=ends, value=None if time.low is None else round(time.low, RATIO_DIGITS)),
        "verdict": verdict,
    }


def choices(lines: Sequence[Line]) -> dict[str, list[Any]]:
    """What the filters offer."""
    return {
        "backend": list(dict.fromkeys(line.backend for line in lines)),
        "accumulate": sorted({line.accumulate for line in lines}),
        "world_size": sorted({line.world_size for line in lines}),
        "status": list(dict.fromkeys(line.status for line in lines)),
    }
