"""The questions of a report, one section each: two sentences written from the data, and the table behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.judge.expected import cells_watched
from bench.judge.gates import tolerance
from bench.judge.losses import extent
from bench.judge.pairs import ComparedPair
from bench.judge.remarks import note
from bench.judge.samples import NAME
from bench.judge.standing import Standing
from bench.judge.verdicts import NEXT, Exact, Verdict
from bench.plan.categories import PEAK, Category
from bench.plan.cell import Device, Status
from bench.plan.columns import DASH
from bench.report.answer import noise, sentence, size
from bench.report.bars import MIB, TOTAL, by_operation
from bench.report.bars import by_cell as memory_by_cell
from bench.report.overview import (
    Material,
    PageSection,
    Table,
    interval,
    number,
    scaled,
    status_words,
    table_of,
    text,
    title,
)
from bench.report.panels import GIB_ABOVE
from bench.report.rows import DEVIATION, deviations
from bench.words import plural, some

BESIDE = (
    "mfu",
    "mfu_of_matmul",
    "energy_j_per_step",
    "energy_j_per_token",
    "cpu_s_per_micro_batch",
    "num_operators_per_micro_batch",
    "num_launches_per_micro_batch",
)
"""Columns of trials that stand beside step times where any trial has them."""


def sections(material: Material) -> list[PageSection]:
    """All questions, in order."""
    return [ask(material) for ask in (speed, memory, correctness, communication, semantics, noise_section)]


def speed(of: Material) -> PageSection:
    """How long an optimizer step takes."""
    rows = of.standing.rows
    counts = Counter(row.judgement.verdict for row in rows)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    first = f"Of {plural(len(rows), 'comparison')} with {of.standing.baseline}: {said or 'none'}."
    trials = of.run.tables.trials
    more = [name for name in BESIDE if trials[name].notna().any()]
    good = trials[trials["status"] == Status.OK].groupby("cell_id")[more].median() if more else pd.DataFrame()

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        extra = (text(name, good[name].get(cell["cell_id"])) for name in more)
        return (
            of.label(cell["cell_id"]),
            str(cell["num_trials"] - cell["num_bad"]),
            text("step_time_s", cell["step_time_s"]),
            interval(cell["step_time_low_s"], cell["step_time_high_s"]),
            *(text("step_time_s", cell[name]) for name in ("fastest_s", "slowest_s")),
            text("tokens_per_s", cell["tokens_per_s"]),
            *extra,
        )

    caption = f"Step times: {NAME} over the good trials of a cell, as they are cited; the fastest and the slowest trial"
    ends = ("95 % interval", "fastest", "slowest")
    header = ("cell", "good trials", title("step_time_s"), *ends, *map(title, ("tokens_per_s", *more)))
    return PageSection(
        key="speed",
        title="Speed: how long does an optimizer step take?",
        sentences=(first, _largest(of, rows)),
        plots=("step_time_ratio", "step_time", "speed_up"),
        table=table_of(caption, header, of.cells, line),
    )


def _largest(of: Material, rows: Sequence[ComparedPair]) -> str:
    """The verdict whose difference is largest; else why there is none."""
    decided = [row for row in rows if row.judgement.verdict in {Verdict.FASTER, Verdict.SLOWER} and row.time]
    if decided:
        far = max(decided, key=lambda row: abs(_factor(row)))
        return f"The largest certain difference: {sentence(of.run, far)}"
    reasons = Counter(row.judgement.reason for row in rows)
    if not reasons:
        return "There is nothing to compare: no two cells differ in the backend alone."
    reason, times = reasons.most_common(1)[0]
    return f"No difference is certain; the most frequent reason ({times}) is: {reason} ({NEXT[reason]})."


def _factor(row: ComparedPair) -> float:
    ratio = row.time.ratio if row.time else 1.0
    return ratio if ratio >= 1 else 1 / ratio


def memory(of: Material) -> PageSection:
    """How much memory a rank needs."""
    known = of.others[of.others["peak_memory_bytes"].notna()]
    if known.empty:
        sentences: tuple[str, ...] = ("No cell has a measured peak memory.",)
    else:
        most = known["accumulate"].max()
        there = known[known["accumulate"] == most].sort_values("peak_memory_bytes", kind="stable")
        ends = [(of.label(row["cell_id"]), size(float(row["peak_memory_bytes"]))) for _, row in there.iterrows()]
        second = f"At N = {most} the least is {ends[0][1]} ({ends[0][0]})"
        second += f", and the most {ends[-1][1]} ({ends[-1][0]})." if len(ends) > 1 else "."
        sentences = (*_peaks_against(of.standing), second)
    parts = memory_by_cell(of.run.tables.memory, PEAK)
    used = [str(c) for c in Category if str(c) in parts and (parts[str(c)] > 0).any()]
    largest = of.cells["peak_memory_bytes"].max()
    unit, name = (2.0**30, "GiB") if pd.notna(largest) and largest >= GIB_ABOVE else (2.0**20, "MiB")
    sources = (
        of.run.tables.trials.dropna(subset=["peak_memory_source"]).groupby("cell_id")["peak_memory_source"].first()
    )
    rows = of.standing.by_cell

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        cell_id = cell["cell_id"]
        row = rows.get(cell_id)
        share = None if row is None else row.memory.verdict.ratio
        own = parts.loc[cell_id] if cell_id in parts.index else {}
        return (
            of.label(cell_id),
            str(sources.get(cell_id, DASH)),
            scaled(cell["peak_memory_bytes"], unit),
            number(share, ".3f"),
            *(scaled(own.get(part), unit) for part in used),
        )

    header = ("cell", "measured by", f"peak ({name})", "peak / baseline's", *(p.replace("_", " ") for p in used))
    caption = f"Peak memory of a rank, and what it is made of, in {name}"
    return PageSection(
        key="memory",
        title="Memory: how much does a rank need?",
        sentences=sentences,
        plots=("memory_categories", "peak_memory", "held_gradients"),
        table=table_of(caption, header, of.cells, line, words=2),
    )


def _peaks_against(standing: Standing) -> Iterator[str]:
    """How many peaks are above the baseline's and how many below, and why others are not compared."""
    known = Counter(row.memory.verdict.verdict for row in standing.rows)
    unknown = Counter(_why_no_memory(row) for row in standing.rows if row.memory.verdict.verdict is Exact.UNKNOWN)
    if said := ", ".join(f"{known[one]} {one}" for one in Exact if one is not Exact.UNKNOWN and known[one]):
        yield f"Bytes have no noise: against {standing.baseline}'s, peaks are {said}."
    if unknown:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in unknown.most_common())
        yield f"Not compared with {standing.baseline}'s: {plural(unknown.total(), 'peak')}: {reasons}."


def _why_no_memory(row: ComparedPair) -> str:
    """Why the peaks of two cells are not compared."""
    if row.judgement.verdict is Verdict.NOT_COMPARABLE:
        return str(row.judgement.reason)
    number = row.memory
    return "measured differently" if number.a is not None and number.b is not None else "not measured"


def correctness(of: Material) -> PageSection:
    """Whether the updates are those of the big batch."""
    cells = of.others
    fine, invalid = cells[cells["status"] == Status.OK], cells[cells["status"] == Status.INVALID]
    first = f"{len(fine)} of {plural(len(cells), 'cell')} passed every gate."
    if not invalid.empty:
        names = list(dict.fromkeys(invalid["backend"]))
        first = first[:-1] + f"; {len(invalid)} failed one, all of {some(names)}."
    error = fine["update_error"].dropna()
    if error.empty:
        second = "No valid cell's update was compared with the reference's."
    else:
        worst = fine.loc[error.index[int(error.astype(float).to_numpy().argmax())]]
        cell = of.run.cells[worst["cell_id"]]
        limit = tolerance(cell.precision, cell.workload, cell.model).update_error
        second = (
            f"Among the cells that passed, the largest error of an update is {float(error.max()):.2g} "
            f"({of.label(worst['cell_id'])}; the limit is {limit:g})."
        )
    trials = of.run.tables.trials
    summed = trials.dropna(subset=["accumulated_in"]).groupby("cell_id")["accumulated_in"].first()
    final = trials.groupby("cell_id")["final_loss"].median()
    checked = ("update_scale", "update_error", "max_loss_deviation")

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        return (
            of.label(cell["cell_id"]),
            status_words(cell),
            str(summed.get(cell["cell_id"], DASH)),
            *(text(name, cell[name]) for name in checked),
            text("final_loss", final.get(cell["cell_id"])),
        )

    header = ("cell", "status", *map(title, ("accumulated_in", *checked, "final_loss")))
    return PageSection(
        key="correctness",
        title="Correctness: does every update equal that of the big batch?",
        sentences=tuple(filter(None, (first, second, extent(of.run.tables)))),
        plots=("loss_curves",),
        table=table_of("What the gates checked", header, of.cells, line, words=3),
    )


def communication(of: Material) -> PageSection:
    """What ranks hand to collectives."""
    table = of.run.tables.collectives
    sent = by_operation(table)
    totals = sent[TOTAL] if not sent.empty else pd.Series(dtype=float)
    cells = of.others.assign(sent=of.others["cell_id"].map(totals))
    good = cells[(cells["status"] == Status.OK) & cells["sent"].notna()]
    checked = table.dropna(subset=["expected_calls"])
    same = (checked["calls"] == checked["expected_calls"]) & (
        checked["payload_bytes"] == checked["expected_payload_bytes"]
    )
    if good.empty:
        sentences: tuple[str, ...] = ("No valid cell's collectives were counted.",)
    else:
        most = good["accumulate"].max()
        there = good[good["accumulate"] == most].sort_values("sent", kind="stable")
        least, largest = there.iloc[0], there.iloc[-1]
        first = f"At N = {most} a rank hands {scaled(least['sent'], MIB)} MiB to collectives in an optimizer step "
        first += f"({of.label(least['cell_id'])})"
        if len(there) > 1 and largest["sent"] > least["sent"]:
            first += f" to {scaled(largest['sent'], MIB)} MiB ({of.label(largest['cell_id'])})"
        second = (
            f"{int(same.sum())} of {len(checked)} operation counts match their formula in calls and bytes."
            if len(checked)
            else "There is no formula for what these backends should send."
        )
        sentences = (first + ".", second)
    by_id: dict[str, list[dict[Any, Any]]] = {}
    for row in _first_repeat(table).to_dict("records"):
        by_id.setdefault(str(row["cell_id"]), []).append(row)
    seen = of.run.tables.trials.dropna(subset=["exposed_s"]).groupby("cell_id")[["collective_s", "exposed_s"]].first()
    times = [] if seen.empty else list(seen.columns)  # on CUDA

    watched = cells_watched(of.run.tables)

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        operations = by_id.get(cell["cell_id"], [])
        unseen = of.run.cells[cell["cell_id"]].device is Device.CUDA and cell["cell_id"] not in watched
        nothing = "not counted at this N" if unseen else "none"
        said = [f"{row['op']} of {row['dtype']}: {row['calls']} x, {scaled(row[TOTAL], MIB)} MiB" for row in operations]
        due = [row for row in operations if pd.notna(row["expected_calls"])]
        right = sum(
            row["calls"] == row["expected_calls"] and row[TOTAL] == row["expected_payload_bytes"] for row in due
        )
        return (
            of.label(cell["cell_id"]),
            "; ".join(said) or (nothing if cell["status"] == Status.OK else DASH),
            f"{right} of {len(due)}" if due else DASH,
            scaled(totals.get(cell["cell_id"]), MIB),
            *(text(name, seen[name].get(cell["cell_id"])) for name in times),
        )

    header = ("cell", "operations of one optimizer step", "as the formula", "MiB in all", *map(title, times))
    return PageSection(
        key="communication",
        title="Communication: what do ranks send?",
        sentences=sentences,
        plots=("communication",),
        table=table_of("Collectives between two updates, on one rank", header, of.cells, line, words=3),
    )


def _first_repeat(table: pd.DataFrame) -> pd.DataFrame:
    """Of each cell, the rows of the first repeat that has some."""
    return table[table["repeat"] == table.groupby("cell_id")["repeat"].transform("min")]


def semantics(of: Material) -> PageSection:
    """Which steps were taken."""
    cells = of.others
    seen = cells[cells["steps_observed"].notna() & cells["steps_expected"].notna()]
    right = int((seen["steps_observed"] == seen["steps_expected"]).sum())
    told = seen[seen["steps_reported"].notna()]
    honest = int((told["steps_reported"] == told["steps_observed"]).sum())
    first = f"{right} of {plural(len(seen), 'cell')} took exactly as many optimizer steps as expected."
    second = (
        f"Of {plural(len(told), 'cell')} whose framework reports a number of steps, {honest} report what the inner "
        "optimizer was seen to do."
        if len(told)
        else "No framework in this run reports a number of steps."
    )
    trials = of.run.tables.trials.drop_duplicates("cell_id").set_index("cell_id")
    steps = ("steps_expected", "steps_observed", "steps_reported")

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        trial = trials.loc[cell["cell_id"]]
        return (
            of.label(cell["cell_id"]),
            text("optimizer_steps_reported_by", trial["optimizer_steps_reported_by"]),
            text("ranks_agree", trial["ranks_agree"]),
            *(text(f"optimizer_{name}", cell[name]) for name in steps),
            text("micro_batches_per_update", trial["micro_batches_per_update"]),
        )

    columns = ("optimizer_steps_reported_by", "ranks_agree", *(f"optimizer_{name}" for name in steps))
    header = ("cell", *map(title, (*columns, "micro_batches_per_update")))
    return PageSection(
        key="semantics",
        title="Semantics: which optimizer steps were taken?",
        sentences=(first if len(seen) else "No optimizer step of any cell was observed.", second),
        plots=("optimizer_steps",),
        table=table_of("Optimizer steps", header, of.cells, line, words=3),
    )


def noise_section(of: Material) -> PageSection:
    """How sure the numbers are."""
    found = deviations(of.run.tables.trials)
    spread = found.groupby("cell_id")[DEVIATION].agg(lambda values: values.max() - values.min())
    if spread.empty:
        second = "No cell has two good trials, so their spread is unknown."
    else:
        worst = str(spread.idxmax())
        second = (
            f"From its fastest to its slowest trial, the median cell spreads over {spread.median():.2g} % and "
            f"{of.label(worst)} over {spread.max():.2g} %."
        )
    trials = of.run.tables.trials
    others = 100 * (trials["foreign_cores"] + trials["stolen_cores"]) / trials["num_cpus"]
    busy = others.groupby(trials["cell_id"]).median()
    dropped = trials.groupby("cell_id")["num_warmup_steps"].max()

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        return (
            of.label(cell["cell_id"]),
            str(cell["num_trials"] - cell["num_bad"]),
            number(spread.get(cell["cell_id"]), ".2g"),
            number(dropped.get(cell["cell_id"]), "d"),
            number(busy.get(cell["cell_id"]), ".2g"),
        )

    header = (
        "cell",
        "good trials",
        "spread of trials (%)",
        "warm-up steps left out, at most",
        "CPUs used by others (%)",
    )
    return PageSection(
        key="noise",
        title="Noise: how certain are these numbers?",
        sentences=(noise(of.standing.floor), second),
        plots=("noise",),
        table=table_of("Spread of the trials of each cell", header, of.cells, line),
    )


def failures(of: Material) -> Table:
    """Every cell that did not end well, with its reason."""
    bad = of.cells[of.cells["status"] != Status.OK]

    def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
        known = note(of.run.manifest, cell)
        reason = (str(cell["reason"]) or "no reason was recorded") + (f". This is {known}" if known else "")
        return of.label(cell["cell_id"]), status_words(cell), reason

    return table_of("Cells without a valid result", ("cell", "status, trials", "reason"), bad, line, words=3)
