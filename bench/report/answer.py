"""What a run says of its backends, in words that are made from verdicts and exact counts, never from raw means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair
from bench.judge.remarks import EXPECTED, documented
from bench.judge.standing import Floor, Standing
from bench.judge.statistics import MARGIN, Interval
from bench.judge.verdicts import NEXT, Exact, Verdict, band
from bench.plan.cell import Cell, Device, Status
from bench.plan.columns import WAYS, differing, says
from bench.report.panels import GIB_ABOVE
from bench.words import plural, some

SAME = f"the same within {100 * MARGIN:g} %"
MOST_TWINS = 3
"""Pairs of eager and deferred sync that are put into words."""
LONGEST = 240
"""Characters of a reason; the whole of it is in the table of failed cells."""
REPEATS = re.compile(r"repeat [\d, ]+: ")
NUMBERS = re.compile(r"\d[\d.e+-]*")
TRIED = "Nothing was compared: no two cells of the run differ in the backend alone"


def answer(run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame) -> list[str]:
    """The sentences of the first screen. ``cells`` has a row per cell: ``terminal.by_cell``."""
    own = next(iter(standings.values()))
    last = [*(f"{text}." for text in own.remarks), *_of_one_process(run), *_trouble(run, cells), noise(own.floor)]
    if own.rows and all(row.judgement.verdict is Verdict.NOT_COMPARABLE for row in own.rows):
        return [*_general(own), *last]
    rows = headline(own)
    twins = list(_twins(run, standings))
    told = {(row.pair.a, row.pair.b) for row in twins}
    left = [row for row in rows if (row.pair.a, row.pair.b) not in told]
    return [*_general(own), *(sentence(run, row) for row in twins), *_against(run, own, left), *last]


def headline(standing: Standing) -> list[ComparedPair]:
    """The verdicts at the largest N, and the most ranks there: every backend against one cell of the baseline."""
    groups: dict[Cell, list[ComparedPair]] = {}
    for row in standing.rows:
        if not row.pair.b.twin:
            groups.setdefault(row.pair.a, []).append(row)
    return max(groups.values(), key=lambda g: (*_extent(g[0].pair.a), len(g)), default=[])


def _extent(cell: Cell) -> tuple[bool, int, int]:
    """By which the largest of cells is found: a world that is there before one that is pretended, then N and W."""
    return not cell.virtual, cell.accumulate, cell.world_size


def where(cell: Cell, run: Run) -> str:
    """N and W, and what else tells the cell from others of its backend in the run."""
    words = [f"N={cell.accumulate}", f"W={cell.world_size}"]
    others = [one for one in run.cells.values() if not one.is_reference]
    words += [text.replace(" = ", "=") for text in says(cell, differing(others, ("precision", *WAYS)))]
    return " ".join([*words, *["virtual"] * cell.virtual])


def _of_one_process(run: Run) -> Iterator[str]:
    """That times say nothing of communication, where there is one rank."""
    real = [cell for cell in run.cells.values() if not cell.is_reference and not cell.virtual]
    if real and all(cell.world_size == 1 for cell in real):
        who = "One GPU" if all(cell.device is Device.CUDA for cell in real) else "One process"
        yield f"{who}: no bytes move between ranks, so times show host overhead and memory policy, not communication."


def _general(standing: Standing) -> Iterator[str]:
    """What holds for all of the run, if it is that nothing can be said."""
    rows = standing.rows
    if not rows:
        yield f"{TRIED}."
        return
    barred = [row for row in rows if row.judgement.verdict is Verdict.NOT_COMPARABLE]
    if len(barred) == len(rows):
        reason, count = Counter(row.judgement.reason for row in rows).most_common(1)[0]
        first = next(row for row in rows if row.judgement.reason is reason)
        some = "" if len(rows) == 1 else f" ({count} of {len(rows)} cells)"
        yield f"Nothing can be compared with {standing.baseline}: {reason}{some}. To do: {NEXT[reason]}."
        yield f"{'The reason' if len(rows) == 1 else 'The first of them'}: {_why(first)}."
        return
    decided = any(row.judgement.verdict in {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME} for row in rows)
    if not decided:
        reasons = Counter(row.judgement.reason for row in rows if row.judgement.verdict is Verdict.AMBIGUOUS)
        reason, count = reasons.most_common(1)[0]
        some = "" if count == len(rows) - len(barred) else f" ({count} of {plural(len(rows), 'cell')})"
        what = f"No cell is called faster or slower than {standing.baseline}'s, or the same"
        yield f"{what}: {reason}{some}. To do: {NEXT[reason]}."


def _twins(run: Run, standings: Mapping[str, Standing]) -> Iterator[ComparedPair]:
    """Deferred against eager sync of one framework and sharding, at the largest N and the most ranks."""
    about = run.manifest["backends"]
    found = []
    for eager, standing in standings.items():
        kind = about.get(eager, {})
        if kind.get("sync") != "eager":
            continue
        for name in standings:
            other = about.get(name, {})
            same = all(other.get(key) == kind.get(key) for key in ("framework", "sharding"))
            if not same or other.get("sync") != "deferred":
                continue
            rows = [row for row in standing.rows if row.pair.b.backend == name and not row.pair.b.twin]
            if rows:
                found.append(max(rows, key=lambda row: _extent(row.pair.a)))
    decided = [row for row in found if row.judgement.verdict is not Verdict.AMBIGUOUS or _has_interval(row)]
    yield from decided[:MOST_TWINS]


def _has_interval(row: ComparedPair) -> bool:
    return row.time is not None and row.time.low is not None


def sentence(run: Run, row: ComparedPair) -> str:
    """One verdict, with memory beside it."""
    a, b, place = row.pair.a.backend, row.pair.b.backend, where(row.pair.b, run)
    verdict, time = row.judgement.verdict, row.time
    if verdict is Verdict.NOT_COMPARABLE:
        return f"{b} and {a} are not comparable at {place}: {_why(row)}."
    memory = memory_words(row)
    then = f" and {memory}" if memory else ""
    if verdict is Verdict.FASTER and time is not None:
        return f"{b} is {_times(time.inverse())} faster than {a} at {place}{then}."
    if verdict is Verdict.SLOWER and time is not None:
        return f"{b} takes {_times(time)} as long as {a} at {place}{then}."
    if verdict is Verdict.SAME and time is not None:
        return f"{b} is as fast as {a} at {place}, {SAME} (time {_interval(time)}){then}."
    seen = f" (time {_interval(time)})" if time is not None and time.low is not None else ""
    known = f"; it {memory}" if memory else ""
    return f"Whether {b} is faster than {a} at {place} is open{seen}: {_why(row)}{known}."


def memory_words(row: ComparedPair) -> str:
    """How much more peak memory than the baseline a cell takes; empty if that is not known."""
    number = row.memory
    if number.verdict.verdict is Exact.UNKNOWN or number.a is None or number.b is None:
        return ""
    if number.verdict.verdict is Exact.EQUAL:
        return "takes the same memory"
    more = "more" if number.b > number.a else "less"
    return f"takes {size(abs(number.b - number.a), max(number.a, number.b))} {more} memory"


def size(number: float, beside: float | None = None) -> str:
    """Bytes in words; in the unit that suits the number ``beside`` it, if that is to be told apart in it."""
    if max(number, beside or 0) >= GIB_ABOVE and number >= 0.05 * 2**30:
        return f"{number / 2**30:,.2f} GiB"
    return f"{number / 2**20:,.1f} MiB" if number >= 0.05 * 2**20 else f"{number:,.0f} bytes"


def _against(run: Run, standing: Standing, rows: Sequence[ComparedPair]) -> Iterator[str]:
    """Each verdict with its backends, against one cell of the baseline."""
    if not rows:
        return
    place = f"{standing.baseline} at {where(rows[0].pair.a, run)}"
    by: dict[Verdict, list[ComparedPair]] = {verdict: [] for verdict in Verdict}
    for row in rows:
        by[row.judgement.verdict].append(row)
    fastest = sorted(by[Verdict.FASTER], key=lambda row: row.time.ratio if row.time else 1.0)
    slowest = sorted(by[Verdict.SLOWER], key=lambda row: -row.time.ratio if row.time else -1.0)
    if fastest:
        names = [f"{row.pair.b.backend} {_times(row.time.inverse())}" for row in fastest if row.time]
        yield f"Faster than {place}: {some(names)}."
    if slowest:
        names = [f"{row.pair.b.backend} takes {_times(row.time)} as long" for row in slowest if row.time]
        yield f"Slower than {place}: {some(names)}."
    if by[Verdict.SAME]:
        yield f"As fast as {place}, {SAME}: {some([row.pair.b.backend for row in by[Verdict.SAME]])}."
    if by[Verdict.AMBIGUOUS] and (fastest or slowest or by[Verdict.SAME]):
        open_still = by[Verdict.AMBIGUOUS]
        reason, _ = Counter(row.judgement.reason for row in open_still).most_common(1)[0]
        yield f"Undecided against {place}: {some([r.pair.b.backend for r in open_still])} ({reason}: {NEXT[reason]})."
    if by[Verdict.NOT_COMPARABLE] and len(by[Verdict.NOT_COMPARABLE]) < len(standing.rows):
        reasons: dict[str, dict[str, str]] = {}
        for row in by[Verdict.NOT_COMPARABLE]:
            why = _why(row, without=row.pair.b.backend)
            reasons.setdefault(NUMBERS.sub("#", why), {})[row.pair.b.backend] = why
        for said in reasons.values():
            first, *others = dict.fromkeys(said.values())
            yield f"Not comparable with {place}: {some(list(said))}: {first}{' (numbers of the first)' * bool(others)}."


def _why(row: ComparedPair, without: str = "") -> str:
    """The reason of a verdict, without the numbers of the repeats; a backend that the sentence names is not named."""
    judgement = row.judgement
    detail = REPEATS.sub("", judgement.detail)
    if without and detail.startswith(f"{without} "):
        detail = detail.split(": ", 1)[-1]
    if judgement.verdict is Verdict.AMBIGUOUS:
        return f"{judgement.reason} ({judgement.next})"
    return cut(detail or str(judgement.reason))


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, shortened at a space if it is too long."""
    return text if len(text) <= longest else text[: longest - 5].rsplit(" ", 1)[0] + " [...]"


def _times(ratio: Interval) -> str:
    return f"{ratio.ratio:.2f}x ({_ends(ratio)})"


def _interval(ratio: Interval) -> str:
    return f"{ratio.ratio:.3f}x, {_ends(ratio, 3)}"


def _ends(ratio: Interval, digits: int = 2) -> str:
    if ratio.low is None or ratio.high is None:
        return "no interval"
    return f"95 % {ratio.low:.{digits}f}-{ratio.high:.{digits}f}"


def _trouble(run: Run, cells: pd.DataFrame) -> Iterator[str]:
    """How many cells have no good result, by status, and how many of them were to be expected."""
    bad = cells[cells["status"] != Status.OK]
    if bad.empty:
        return
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    yield f"{len(bad)} of {plural(len(cells), 'cell')} failed ({counts}); each is listed with its reason."
    known: dict[str, list[str]] = {}
    for cell in bad.to_dict("records"):
        if defect := documented(run.manifest, cell):
            known.setdefault(defect, []).append(run.cells[cell["cell_id"]].label)
    for defect, labels in known.items():
        yield f"Invalid because of {EXPECTED}: {some(labels)}: {defect}."


def noise(floor: Floor | None) -> str:
    """The noise floor: what the machine makes of no difference at all."""
    if floor is None:
        return (
            "Noise floor: unknown. The run has no A/A pair, and without one no difference can be told from the noise."
        )
    found = floor.interval
    if found is None or found.low is None:
        return f"Noise floor: unknown. {floor.cell.label} against itself gave no interval: {cut(floor.reason)}."
    return (
        f"Noise floor: {100 * (band(found) - 1):.2g} %. {floor.cell.label} against itself came out as "
        f"{found.ratio:.4f} (95 % {found.low:.4f}-{found.high:.4f}, n = {found.num_trials}), and no smaller difference "
        "counts as one."
    )
