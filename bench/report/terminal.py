"""The table in the terminal at the end of a run, the words under it, and findings of ``check`` and ``doctor``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bench.judge.integrity import Finding, Level
from bench.judge.losses import extent
from bench.judge.pairs import ComparedPair
from bench.judge.remarks import note
from bench.judge.samples import NAME, step_times, tokens_per_step
from bench.judge.standing import Standing
from bench.judge.tables import Tables
from bench.judge.verdicts import NEXT, Reason, Verdict
from bench.plan.cell import REFERENCES, Status
from bench.plan.columns import WAYS, Axis, axes, differing, says
from bench.plan.schedule import Ended
from bench.report.answer import noise
from bench.report.overview import text, title
from bench.words import plural

TITLE = f"""s/step: {NAME} over a cell's good trials, as it is cited; the fastest and slowest in brackets.
steps due/taken/told: optimizer steps expected, observed at the inner optimizer, and reported by the framework.
update: scale of the backend's update relative to the reference's. loss off by: largest deviation in nats per token.
time / baseline: ratio of the step time to {{}}'s, its 95 % interval over trials, and the verdict."""

MAX_WIDTH = 1000
NAMES = axes(Axis.NAME)


def by_cell(tables: Tables) -> pd.DataFrame:
    """One row per cell: what its good trials (all if none is good) make of it, worst status and its reason.

    ``step_time_s`` is the estimate that is cited, with the ends of its interval; ``tokens_per_s`` follows from it,
    ``peak_memory_bytes`` is the largest. Twins have no row: they are their cells once more, and are there for the noise
    floor.
    """
    own = tables.trials[tables.trials["twin"].fillna("") == ""]
    fine = own["status"] == Status.OK
    good = own[fine | ~fine.groupby(own["cell_id"]).transform("any")]
    # The first trial that is not good speaks for its cell, if there is one.
    first = own.assign(_fine=fine).sort_values("_fine", kind="stable").drop_duplicates("cell_id").set_index("cell_id")
    first = first.loc[own["cell_id"].unique()]
    times = step_times(own)
    seconds, low, high = (
        first.index.to_series().map({cell_id: getattr(one, end) for cell_id, one in times.items()}).astype("Float64")
        for end in ("seconds", "low", "high")
    )
    of_good, of_all = good.groupby("cell_id"), own.groupby("cell_id")
    cells = (
        first[[*NAMES, "framework", *WAYS, "status", "reason"]]
        .assign(
            num_trials=of_all.size(),
            num_bad=(~fine).groupby(own["cell_id"]).sum().astype(int),
            step_time_s=seconds,
            step_time_low_s=low,
            step_time_high_s=high,
            tokens_per_s=tokens_per_step(good) / seconds,
            peak_memory_bytes=of_good["peak_memory_bytes"].max(),
            update_scale=of_good["update_scale"].median(),
            fastest_s=of_good["step_time_s"].min(),
            slowest_s=of_good["step_time_s"].max(),
            max_loss_deviation=of_all["max_loss_deviation"].max(),
            update_error=of_all["update_error"].max(),
            **{f"steps_{name}": first[f"optimizer_steps_{name}"] for name in ("expected", "observed", "reported")},
        )
        .reset_index()
    )
    order = ~cells["backend"].isin(REFERENCES)
    return cells.assign(_order=order).sort_values(
        ["_order", "precision", "world_size", *WAYS, "accumulate", "step_time_s"], ignore_index=True
    )


def show(console: Console, tables: Tables, standing: Standing, manifest: Mapping[str, Any]) -> None:
    """Print the summary table, how sure it is, then every finding in words."""
    cells = by_cell(tables)
    rows = standing.by_cell
    table = Table(
        title=TITLE.format(standing.baseline),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown = [*NAMES, *differing(cells.itertuples())]
    for name in shown:
        table.add_column(title(name), no_wrap=True)
    for name in ("s/step (min - max)", "tokens/s", "MiB at peak", "steps due/taken/told", "update", "loss off by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("time / baseline", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for _, cell in cells.iterrows():
        table.add_row(
            *(Text(value) for value in _row(cell, shown, _ratio(rows.get(cell["cell_id"])))),
            style=None if cell["status"] == Status.OK else "red",
        )
    # Rather wrapped by the terminal than without some of its columns.
    needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).maximum
    console.width = max(console.width, needed)
    console.print(table)
    said = [textwrap.fill(f"{text}.", 118, subsequent_indent="    ") for text in standing.remarks]
    said += [compared] if (compared := extent(tables)) else []
    for line in [*certainty(standing, manifest), *said, *untimed(tables), *findings(cells, manifest)]:
        console.print(Text(line), highlight=False, soft_wrap=True)


def _ratio(row: ComparedPair | None) -> str:
    """A cell's ratio to the baseline's with its interval and verdict."""
    if row is None:
        return "-"
    time, verdict = row.time, row.judgement.verdict
    if time is None:
        return str(verdict)
    interval = "no interval" if time.low is None else f"{time.low:.3f} - {time.high:.3f}"
    return f"{time.ratio:.3f} ({interval}) {verdict}"


def certainty(standing: Standing, manifest: Mapping[str, Any]) -> list[str]:
    """How sure the ratios are: the noise floor, what ended the run, and why verdicts are open, with what to do."""
    lines = [noise(standing.floor)]
    looks = manifest.get("looks")
    if looks and manifest.get("ended_by"):
        last = looks[-1]
        width = next((look["widest"] for look in reversed(looks) if look["widest"] is not None), None)
        said = "" if width is None else f"; the widest interval was {100 * width:.2g} % at the last look"
        why = f"ended by {manifest['ended_by']}"
        if manifest["ended_by"] == Ended.NOTHING_TO_COMPARE:
            why = f"ended with {Ended.NOTHING_TO_COMPARE} ({last['refused']})"
        lines.append(f"{why}, after {plural(last['repeats'], 'repeat')}{said}")
    ambiguous = [row for row in standing.rows if row.judgement.verdict is Verdict.AMBIGUOUS]
    for reason in dict.fromkeys(row.judgement.reason for row in ambiguous):
        count = sum(row.judgement.reason is reason for row in ambiguous)
        lines.append(f"ambiguous ({count} of {plural(len(standing.rows), 'cell')}): {reason}: {NEXT[reason]}")
    barred = [row for row in standing.rows if row.judgement.verdict is Verdict.NOT_COMPARABLE]
    disturbed = [row.judgement for row in barred if row.judgement.reason is Reason.DISTURBED]
    if disturbed:
        share = f"{len(disturbed)} of {plural(len(standing.rows), 'cell')}"
        lines.append(f"not comparable ({share}): {Reason.DISTURBED}: {NEXT[Reason.DISTURBED]}")
        lines.append(f"such as {disturbed[0].detail}")
    return [textwrap.fill(line, 118, subsequent_indent="    ") for line in lines]


def untimed(tables: Tables) -> list[str]:
    """In one line, how many cells have ranks that share GPUs, and so no time."""
    cells = tables.trials.loc[tables.trials["shared_gpu"].fillna(False).astype(bool), "cell_id"].nunique()
    return [f"not timed: {plural(cells, 'cell')} whose ranks shared GPUs, over gloo"] if cells else []


def findings(cells: pd.DataFrame, manifest: Mapping[str, Any]) -> list[str]:
    """One paragraph for each different thing that went wrong, naming its cells, and whether it was to be expected."""
    bad = cells[cells["status"] != Status.OK]
    lines = []
    ways = differing(cells.itertuples())
    for (backend, status, reason, *_), group in bad.groupby(["backend", "status", "reason", *ways], sort=False):
        factors = ", ".join(f"{n}" for n in sorted(set(group["accumulate"])))
        sizes = ", ".join(f"{w}" for w in sorted(set(group["world_size"])))
        where = " ".join([str(backend), *says(group.iloc[0], ways), f"N={factors} W={sizes}"])
        known = note(manifest, group.iloc[0].to_dict())
        text = f"{status}: {where}: {reason}" + (f". This is {known}" if known else "")
        lines.append(textwrap.fill(text, 118, subsequent_indent="    "))
    return lines


def _row(cell: Any, shown: Sequence[str], ratio: str) -> list[str]:
    return [
        *(text(name, cell[name]) for name in shown),
        _seconds(cell),
        text("tokens_per_s", cell["tokens_per_s"]),
        _mebibytes(cell["peak_memory_bytes"]),
        "/".join(_number(cell[f"steps_{name}"], "d") for name in ("expected", "observed", "reported")),
        text("update_scale", cell["update_scale"]),
        _number(cell["max_loss_deviation"], ".1g"),
        ratio,
        cell["status"] if cell["status"] == Status.OK else f"{cell['status']} {cell['num_bad']}/{cell['num_trials']}",
    ]


def _seconds(cell: Any) -> str:
    if pd.isna(cell["step_time_s"]):
        return "-"
    return f"{cell['step_time_s']:.4f} ({cell['fastest_s']:.3f} - {cell['slowest_s']:.3f})"


def _number(value: Any, form: str) -> str:
    return "-" if pd.isna(value) else format(int(value) if form == "d" else value, form)


def _mebibytes(value: Any) -> str:
    return "-" if pd.isna(value) else f"{value / 2**20:,.1f}"


STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.GOOD: "green"}


def show_findings(findings: Sequence[Finding], verdict: str) -> None:
    """One line each, and the verdict on all."""
    console = Console()
    width = max((len(one.topic) for one in findings), default=0)
    for one in findings:
        mark = Text(f"{one.level:7}  {one.topic:{width}}  ", style=STYLES[one.level])
        console.print(mark + Text(one.text), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)
