"""What limits the numbers of a run, as findings: for check, beside numbers, and for citations.

All follows from run.json and the journal, and of built-in backends from their classes
(``bench.judge.as_benched``), so no backend of another package is imported.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.backends.base import BF16_AUTOCAST, Lossy
from bench.findings import Finding, Level, good, warning
from bench.formatting import plural, scientific, size, some
from bench.judge import samples
from bench.judge.as_benched import AS_BENCHED, as_benched
from bench.judge.baseline import percent, widest
from bench.judge.evidence import CellEvidence
from bench.judge.formulas import layout_of, not_covered
from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair, Pair, judge_pairs
from bench.judge.pool import Pool
from bench.judge.run_spread import spread_of
from bench.judge.statistics import MIN_TRIALS, Interval
from bench.judge.verdicts import DIFFERENT, Verdict, is_off, num_judged, scope_words
from bench.measure.host import IDLE_SHARE
from bench.plan.categories import PEAK, UNTRACKED
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Status
from bench.plan.schedule import Ended
from bench.run.machine import unlike_nodes
from bench.run.manifest import Manifest

WAYS = "bf16 is computed in different ways, which by itself changes time and memory: "
IMPLIES = {BF16_AUTOCAST: ", which keeps the residual stream and norms in fp32"}
"""What a way of computing bf16 implies."""
BARE_LOOPS = Path(__file__).with_name("bare_loops.json")
"""By backend, the ratio of its step under the bench to a bare loop's, on the CPU, with a 95 %
interval.

``nox -s overhead`` writes it beside docs/performance.md.
"""
IMBALANCE = 1.05
"""Ratio of the slowest to the median rank's step time from which a cell is reported."""
TRANSFER = "rankings of this model over gloo do not transfer to GPUs"
"""What does not follow from times on CPUs."""
GLOO_SCATTERS = (
    "gloo reduces and scatters by a copy and an all-reduce, "
    "so these step times include a cost of gloo's own"
)
"""What limits times of backends that reduce-scatter on CPUs; docs/settings.md says how much."""
CONTROL, VERDICTS, OTHER_DAYS = "A/A pair", "verdicts", "other days"
"""Topics; the last is what another day may change."""
UNTRACKED_BYTES, UNTRACKED_SHARE = 4 * 2**20, 0.25
"""What a sound backend may have in use besides the counted tensors: a constant, and a share of its
peak."""
MOST_NOTES = 3
"""Different notes on telemetry that are told."""


def caveats(found: Sequence[Finding], *ids: str) -> list[str]:
    """What a citation of these cells carries, shortest form, from the findings of ``limits``."""
    concerned: dict[str, set[str]] = {}
    for finding in found:
        concerned.setdefault(finding.brief, set()).update(finding.cells)
    texts: dict[str, None] = {}
    for finding in found:
        if not finding.brief or (finding.cells and not set(ids) & set(finding.cells)):
            continue
        text = finding.brief
        if finding.subject and not concerned[text].issuperset(ids):
            text = f"{finding.subject}: {text}"
        texts[text] = None
    return list(texts)


def limits(
    pool: Pool,
    control: ComparedPair | None,
    rows: Sequence[ComparedPair],
    doubts: Sequence[Finding],
) -> list[Finding]:
    """The findings on the numbers of a run, those on single cells first.

    ``rows`` are its verdicts, and ``doubts`` what ``against_the_copy`` finds of them.

    Of a pool they are on its first run, and on what all of them say.
    """
    run = pool.first
    timed = tuple(cell_id for cell_id, cell in run.cells.items() if cell.world.is_timed)
    of_times = [
        _code(run),
        *_starts(run, timed),
        *_machine(run, timed),
        *_nodes(run),
        *_blocks(run, timed),
        *_control(control, timed),
        *doubts,
    ]
    if not timed:
        of_times = [replace(finding, brief="") for finding in of_times]
    found: list[Finding] = []
    for cell_id in run.cells:
        found += _of_cell(run, cell_id)
    return [
        *found,
        *_state(run),
        *of_times,
        *_samples(run),
        *_verdicts(run, rows),
        *_other_days(pool, rows, timed),
        *_bare_loops(run),
    ]


def _of_cell(run: Run, cell_id: str) -> Iterator[Finding]:
    """Why a cell is not comparable, its failed trials, its link, and what to say of its backend."""
    cell, subject = run.cells[cell_id], run.labels[cell_id]
    evidence = run.evidence.of(cell)

    def finding(level: Level, topic: str, text: str) -> Finding:
        return Finding(level, topic, text, subject=subject, cells=(cell_id,), brief=text)

    if evidence.barred:
        topic = "gates" if evidence.is_wrong else "machine"
        yield finding(Level.WARNING, topic, f"not comparable: {'; '.join(evidence.barred)}")
    for level, text in _failed_trials(evidence):
        yield finding(level, "trials", text)
    if cell.world.caveat:
        yield finding(Level.NOTE, "link", cell.world.caveat)
    elif cell.device is Device.CPU and cell.world_size > 1:
        yield finding(Level.NOTE, "link", f"{link_words([cell])}; {TRANSFER}")
        if scatters_over_gloo(run, cell_id):
            yield finding(Level.NOTE, "link", GLOO_SCATTERS)
    if what := _not_covered(run, cell_id):
        text = f"collectives and held memory are measured, and held against no formula: {what}"
        yield finding(Level.NOTE, "bytes", text)
    for level, topic, text in _of_backend(run, cell_id):
        yield finding(level, topic, text)


def _failed_trials(evidence: CellEvidence) -> Iterator[tuple[Level, str]]:
    """How many trials of a cell failed alike, and why."""
    for (status, reason), count in evidence.failures.items():
        why = reason
        if not why:
            why = "no reason was recorded"
        level = Level.WARNING
        if status == Status.UNSUPPORTED:
            level = Level.NOTE
        yield level, f"{count} of {plural(evidence.num_trials, 'trial')} ended {status}: {why}"


def _not_covered(run: Run, cell_id: str) -> str:
    """What the formulas do not cover of the first layout of a cell that is not covered.

    Or that no trial which counted has a layout.
    """
    has_counted, has_layout = False, layout_of(run.cells[cell_id]) is not None
    for record in run.records:
        if record.cell_id != cell_id:
            continue
        has_counted = has_counted or record.collectives is not None
        if record.layout is None:
            continue
        has_layout = True
        if what := not_covered(record.layout):
            return what
    if has_counted and not has_layout:
        return "the layout of the model was not recorded, as where one device cannot hold all of it"
    return ""


def _of_backend(run: Run, cell_id: str) -> Iterator[tuple[Level, str, str]]:
    """What it held unseen, loses on purpose, was not checked for, remarks, and changes."""
    if unseen := _unseen_bytes(run, cell_id):
        yield Level.WARNING, "memory", unseen
    if (lossy := run.manifest.lossy.get(cell_id)) is not None:
        yield Level.NOTE, "lossy", _declared(run, cell_id, lossy)
    for row in run.tables.trial_rows:
        if row.cell.cell_id == cell_id and row.unchecked:
            yield Level.NOTE, "gates", f"not compared with the reference: {row.unchecked}"
            break
    if text := run.manifest.remarks.get(cell_id):
        yield Level.NOTE, "backend", text
    for words in as_benched(run.cells[cell_id]):
        yield Level.NOTE, "framework", f"{AS_BENCHED}, {words}"


def _unseen_bytes(run: Run, cell_id: str) -> str:
    """What the process held beside the counted tensors, if sound backends leave less there."""
    for record in run.records:
        memory = record.memory
        if record.cell_id != cell_id or not memory:
            continue
        unseen = memory.get(f"{PEAK}_{UNTRACKED}", 0)
        if unseen > UNTRACKED_BYTES + UNTRACKED_SHARE * memory.get(PEAK, 0):
            return (
                f"its process came to hold {size(unseen)} beside the tensors that were counted, "
                "since before it was built: arrays, a library's buffers, or tensors of threads "
                "that Python did not start"
            )
    return ""


def _declared(run: Run, cell_id: str, lossy: Lossy) -> str:
    """What a backend declares to lose, beside what its update was off by."""
    text = f"it loses on purpose: {lossy.why}"
    if lossy.reduce_dtype != "fp32":
        text += f", reduced in {lossy.reduce_dtype}"
    text += f"; its update may be off by {scientific(lossy.tolerance)}"
    for row in run.tables.trial_rows:
        if row.cell.cell_id == cell_id and row.update_error is not None:
            return f"{text}, and is by {scientific(row.update_error)}"
    return text


def _state(run: Run) -> Iterator[Finding]:
    ran = []
    for row in run.tables.trial_rows:
        if row.status in (Status.OK, Status.INVALID) and row.cell.world.computes:
            ran.append(row)
    if ran and all(row.status is Status.OK for row in ran):
        checked = "step counts, updates and losses"
        if not all(row.cell.world.has_values for row in ran):
            checked = "step counts"
        yield good("gates", f"{checked} of all trials that ran are right")
    if run.manifest.finished is None:
        text = "the run has not finished: continue it with run --resume"
        yield warning("trials", text, brief="the run has not finished, so the hash will change")


def _code(run: Run) -> Finding:
    """Whether the code of the run can be run again."""
    topic, git = "code", run.manifest.git
    if git.commit is None:
        return warning(topic, "the commit is unknown: the code was not a git checkout")
    commit = f"commit {git.commit[:12]}"
    if git.clean:
        return good(topic, f"{commit}, without changes")
    text = f"{commit} with uncommitted changes: nobody can run the same code again"
    return warning(topic, text)


def _starts(run: Run, timed: tuple[str, ...]) -> Iterator[Finding]:
    """How trials started."""
    topic, known = "starts", [record.cold for record in run.records if record.cold is not None]
    cold, trials_started = sum(known), f"{plural(len(known), 'trial')} started from"
    if 0 < cold < len(known):
        text = (
            f"{cold} of {trials_started} new interpreters, others from the fork server, "
            "which may differ in speed"
        )
        yield warning(topic, text, cells=timed, brief=text)
    elif cold and not run.manifest.cold:
        text = (
            f"{trials_started} new interpreters without --cold: "
            "forked processes could not use the device"
        )
        yield warning(topic, text, cells=timed, brief=text)
    elif cold:
        yield good(topic, f"{trials_started} new interpreters, as requested")
    elif known:
        yield good(topic, f"{trials_started} the fork server, as requested")


def _machine(run: Run, timed: tuple[str, ...]) -> Iterator[Finding]:
    """The load and clocks of the machine."""
    topic, trials = "machine", run.tables.trials
    cores = trials["num_cpus"].max()
    others = {
        "other programs": trials["foreign_cores"].dropna(),
        "the hypervisor": trials["stolen_cores"].dropna(),
    }
    if unknown := [who for who, seen in others.items() if seen.empty]:
        text = f"the share of its CPUs that {' and '.join(unknown)} took was not measured"
        yield warning(topic, text, cells=timed, brief=text)
    for who, seen in others.items():
        if not seen.empty:
            text = f"{who} took {seen.median():.2g} of {cores} CPUs, at most {seen.max():.2g}"
            if seen.median() > IDLE_SHARE * cores:
                yield warning(topic, text, cells=timed, brief=text)
            else:
                yield good(topic, text)
    slowed = trials[trials["clock_slowdowns"].fillna("") != ""]
    for reasons, rows in slowed.groupby("clock_slowdowns"):
        text = f"clocks were held down in {plural(len(rows), 'trial')}: {reasons}"
        yield warning(topic, text, cells=timed, brief=text)
    notes: Counter[str] = Counter()
    for record in run.records:
        if record.gpus:
            notes.update(record.gpus.notes)
    for text, number in list(notes.items())[:MOST_NOTES]:
        yield warning(topic, f"{text} ({plural(number, 'trial')})")


def _nodes(run: Run) -> Iterator[Finding]:
    """Whether the nodes are alike, which a citation has beside the machine."""
    topic, others = "nodes", run.manifest.nodes
    if not others:
        return
    unlike = list(unlike_nodes(run.manifest))
    for text in unlike:
        yield warning(topic, text)
    if not unlike:
        text = f"{1 + len(others)} nodes have the same hardware, packages and environment"
        yield good(topic, text)


def _blocks(run: Run, timed: tuple[str, ...]) -> Iterator[Finding]:
    """Whether the cells as a whole were slower in some blocks than in others."""
    found = samples.block_effects(run.tables.trials)
    if found is None:
        return
    effects, tested = found
    if not tested.found:
        yield good(
            "blocks", "no block is shown to be slower or faster than the others over all cells"
        )
        return
    ordered = sorted(effects.items(), key=lambda item: float(item[1]))
    (fastest, least), (slowest, most) = ordered[0], ordered[-1]
    low = f"block {fastest} by {percent(math.expm1(least), '+')}"
    high = f"block {slowest} by {percent(math.expm1(most), '+')}"
    text = (
        f"differ over all cells (Friedman's test, p = {tested.p_value:.1g}): {low} and {high}; "
        "ratios are taken within blocks, so this is not in them"
    )
    brief = f"blocks of the run differ over all cells, from {low} to {high}"
    yield warning("blocks", text, cells=timed, brief=brief)


PASSED = {
    "drift": "no cell is shown to have got faster or slower in the course of the run",
    "outliers": "no trial is ten standard deviations from its cell's median",
    "two modes": "no cell is shown to have two modes",
    "ranks": "no rank holds up the others",
}
"""By topic of ``_samples``, what holds if cells were tested and none has a finding of it."""


def _samples(run: Run) -> Iterator[Finding]:
    """Drift, outliers, two modes and imbalance of each cell.

    A topic that too few trials of every cell can show anything of is not told.
    """
    tested: set[str] = set()
    has_findings: set[str] = set()
    for key, texts in _sample_texts(run):
        for topic, text in texts.items():
            if text is None:
                continue
            tested.add(topic)
            if text:
                has_findings.add(topic)
                yield warning(topic, text, subject=run.labels[key], cells=(key,), brief=text)
    for topic, text in PASSED.items():
        if topic in tested - has_findings:
            yield good(topic, text)


def _sample_texts(run: Run) -> Iterator[tuple[str, dict[str, str | None]]]:
    """By cell, what is found of each topic of PASSED: empty if nothing is, None if untested."""
    slots: dict[tuple[str, int], int] = {}
    ranks: dict[tuple[str, int], Sequence[Sequence[float]]] = {}
    for number, record in enumerate(run.records):
        slots[record.key] = number
        if record.time and record.time.ranks_agree:
            ranks[record.key] = record.time.rank_step_seconds
    trials = run.tables.trials
    is_timed = trials["status"].isin([Status.OK, Status.INVALID]) & trials["step_time_s"].notna()
    for cell_id, rows in trials[is_timed].groupby("cell_id", sort=False):
        key = str(cell_id)
        places: list[int] = []
        steps_of_ranks: list[Sequence[Sequence[float]]] = []
        for number, repeat in enumerate(rows["repeat"]):
            trial = key, int(repeat)
            places.append(slots.get(trial, number))
            if steps := ranks.get(trial):
                steps_of_ranks.append(steps)
        medians = rows["step_time_s"].astype(float).tolist()
        texts = {
            "drift": _drift(places, medians),
            "outliers": _outliers(medians),
            "two modes": _modes(medians),
            "ranks": _imbalance(run.cells[key], steps_of_ranks),
        }
        yield key, texts


def _drift(slots: Sequence[int], medians: Sequence[float]) -> str | None:
    if len(medians) < MIN_TRIALS:
        return None
    moved = samples.drift(slots, medians)
    if not moved.found:
        return ""
    return f"{percent(moved.size, '+')} from first to last trial (p = {moved.p_value:.1g})"


def _outliers(medians: Sequence[float]) -> str | None:
    if len(medians) < MIN_TRIALS:
        return None
    far = samples.outliers(medians)
    if not far:
        return ""
    middle = sorted(medians)[len(medians) // 2]
    shares = np.asarray(medians)[far] / middle
    farthest = shares[np.abs(np.log(shares)).argmax()]
    return (
        f"{len(far)} of {plural(len(medians), 'trial')} are outliers, "
        f"the farthest {farthest:.2g} x the median"
    )


def _modes(medians: Sequence[float]) -> str | None:
    modes = samples.bimodal(medians)
    if modes is None:
        return None
    if not modes.found:
        return ""
    return f"two modes: {100 * modes.share:.0f} % of the trials are {modes.size:.3g} x slower"


def _imbalance(cell: Cell, trials: Sequence[Sequence[Sequence[float]]]) -> str | None:
    """Whether a rank holds up the others, and on several nodes which one does so in most trials."""
    apart = sorted(samples.imbalance(steps) for steps in trials if len(steps[0]))
    if not apart or cell.num_processes == 1:
        return None
    middle = apart[len(apart) // 2]
    if middle <= IMBALANCE:
        return ""
    text = f"the slowest rank takes {middle:.3g} x the median rank"
    if cell.num_nodes == 1:
        return text
    rank = Counter(map(samples.slowest, trials)).most_common(1)[0][0]
    return f"{text} (mostly rank {rank}, on node {rank // cell.ranks_per_node})"


def _control(control: ComparedPair | None, timed: tuple[str, ...]) -> Iterator[Finding]:
    topic = CONTROL
    if control is None or control.time is None or not control.has_interval:
        why, brief = "there is none", "the run has no A/A pair"
        if control is not None:
            why, brief = control.detail, f"A/A pair: {control.detail}"
        text = f"{why}; so no cell is called faster, slower or the same"
        yield warning(topic, text, cells=timed, brief=brief)
        return
    differs = suspect(control.a, control.time)
    if differs:
        yield warning(topic, differs[0], cells=timed, brief=differs[0])
    else:
        yield good(topic, f"{control.a.label} against itself: {control.time.words}")


def suspect(cell: Cell, control: Interval) -> list[str]:
    """The remark on times that are suspect because the A/A pair is off; none if it is not."""
    if not is_off(control):
        return []
    return [
        f"the A/A pair, {cell.label} twice, is off: {control.words}; distrust all times of "
        "this run: no cell is called faster, slower or the same"
    ]


def against_the_copy(
    pool: Pool, control: ComparedPair | None, rows: Sequence[ComparedPair]
) -> Iterator[Finding]:
    """Verdicts that are other ones if the baseline's cell is replaced by its copy of the A/A pair.

    That pair is of one cell. So ``rows`` with another baseline, N, world size or precision are not
    tried.
    """
    if control is None or control.time is None or is_off(control.time):
        return
    judged = [row for row in rows if row.is_judged]
    tried = [row for row in judged if row.a == control.a]
    pairs = [Pair(a=control.b, b=row.b, name=row.name) for row in tried]
    again = judge_pairs(pool, pool, pairs, control=control.time)
    for row, other in zip(tried, again, strict=True):
        if row.verdict not in DIFFERENT or other.verdict is row.verdict or other.time is None:
            continue
        text = (
            f"{row.b.label} is {row.verdict} than {row.a.backend}{scope_words(len(pool.runs))}, "
            f"and {other.verdict} beside its A/A copy: {other.time.words}"
        )
        yield warning(CONTROL, text, cells=(row.b.cell_id,), brief=text)


def _other_days(
    pool: Pool, rows: Sequence[ComparedPair], timed: tuple[str, ...]
) -> Iterator[Finding]:
    """Whether the verdicts hold on another day, and what the runs of a pool do not share."""
    topic, judged = OTHER_DAYS, [row for row in rows if row.is_judged]
    if pool.is_single:
        if judged:
            text = _days_of_single(pool.first)
            yield Finding(Level.NOTE, topic, text, cells=timed, brief=text)
        return
    for text in pool.notes:
        yield Finding(Level.NOTE, topic, text, cells=timed, brief=text)
    turning = [row.name for row in judged if row.may_differ]
    text = f"{plural(num_judged(rows), 'comparison')}{scope_words(len(pool.runs))}"
    if turning:
        text += f", of which {len(turning)} may differ on another day: {some(turning)}"
        yield warning(topic, text)
    elif judged:
        yield good(topic, f"{text}; where one is faster or slower, so should be the next run")


def _days_of_single(run: Run) -> str:
    spread = spread_of(run.manifest)
    if spread is not None:
        return f"the verdicts are of this run: {spread.sentence}"
    return (
        "the verdicts are of this run, and how much runs of this class of machines differ is not "
        "known"
    )


def _verdicts(run: Run, rows: Sequence[ComparedPair]) -> Iterator[Finding]:
    """What ended the run, and the counts of verdicts; citations of single cells need neither."""
    topic, ended = VERDICTS, run.manifest.ended_by
    if ended in {"budget", "max-repeats"}:
        wide, text = widest(rows), f"ended by {ended}"
        if wide is not None:
            text += f"; the widest interval is {percent(wide)}"
        if run.tables.trials["repeat"].nunique() < MIN_TRIALS:
            text += f"; with fewer than {MIN_TRIALS} repeats there are no intervals"
        yield warning(topic, text)
    elif ended == Ended.NOTHING_TO_COMPARE:
        yield warning(topic, f"ended with {ended}: {run.manifest.looks[-1].refused}")
    elif ended:
        yield good(topic, f"ended by {ended}")
    counts = Counter(row.verdict for row in rows)
    text = "none"
    if rows:
        text = f"against {rows[0].a.backend}: {_counts_text(counts)}"
    level = Level.GOOD
    if counts[Verdict.AMBIGUOUS]:
        level = Level.WARNING
    yield Finding(level, topic, text)


def _counts_text(counts: Mapping[Verdict, int]) -> str:
    """How many verdicts there are of each kind: ``3 slower, 1 ambiguous``."""
    parts = []
    for verdict in Verdict:
        if verdict in counts:
            parts.append(f"{counts[verdict]} {verdict}")
    return ", ".join(parts)


def _bare_loops(run: Run) -> Iterator[Finding]:
    """How the bench's own loops differ from bare ones, where that enters a comparison."""
    timed = set()
    for cell in run.cells.values():
        if cell.device is Device.CPU and cell.world.times_communication:
            timed.add(cell.backend)
    parts: list[str] = []
    ratios: list[float] = []
    for name, (ratio, low, high) in json.loads(BARE_LOOPS.read_text()).items():
        if name in timed:
            parts.append(f"{name} {ratio:.4f} ({low:.4f} to {high:.4f})")
            ratios.append(ratio)
    if len(ratios) < 2:
        return
    text = (
        "steps under the bench relative to a bare loop (docs/performance.md): "
        f"{', '.join(parts)}; up to {max(ratios) / min(ratios) - 1:.1%} of a difference between "
        "these backends may come from the bench"
    )
    yield Finding(Level.NOTE, "bare loops", text)


def scatters_over_gloo(run: Run, cell_id: str) -> bool:
    """Whether the cell was seen to reduce-scatter between ranks on CPUs."""
    cell, rows = run.cells[cell_id], run.tables.collectives
    if cell.device is not Device.CPU or cell.world_size == 1:
        return False
    return bool(((rows["cell_id"] == cell_id) & (rows["op"] == "reduce_scatter")).any())


def remarks(shown: Iterable[tuple[Manifest, Cell]]) -> list[str]:
    """The remarks on cells that are shown together, each with the manifest of its run.

    They are those of the cells' backends, as stored when the run began (``Backend.remark``), and
    ``ways_of_bf16``; all without their full stop.
    """
    cells = list(shown)
    found: dict[str, dict[str, None]] = {}
    for manifest, cell in cells:
        if text := manifest.remarks.get(cell.cell_id):
            found.setdefault(text, {})[cell.label] = None
    texts = []
    for text, labels in found.items():
        texts.append(f"{some(list(labels))}: {text}")
    return texts + ways_of_bf16(cells)


def ways_of_bf16(shown: Sequence[tuple[Manifest, Cell]]) -> list[str]:
    """How these cells compute bf16, if they do not all do it in the same way."""
    is_one_run = len({id(manifest) for manifest, _ in shown}) == 1
    ways: dict[str, dict[str, None]] = {}
    for manifest, cell in shown:
        if cell.precision is not Precision.BF16 or cell.backend == REFERENCE:
            continue
        about = manifest.backends.get(cell.backend, {})
        way = about.get("bf16_as", "a way that was not stored")
        name = cell.backend
        if not is_one_run:
            name += f" of {manifest.run_id}"
        ways.setdefault(way, {})[name] = None
    if len(ways) < 2:
        return []
    texts = []
    for way, names in ways.items():
        texts.append(f"{way}{IMPLIES.get(way, '')} ({some(list(names))})")
    return [WAYS + "; ".join(texts)]


def link_words(cells: Sequence[Cell]) -> str:
    """What the ranks of these cells communicate over."""
    num_nodes = max(cell.num_nodes for cell in cells)
    on_cpu = any(cell.device is Device.CPU for cell in cells)
    if all(cell.world_size == 1 for cell in cells):
        alone = "one process" if on_cpu else "one GPU"
        return f"{alone}, so no bytes move"
    if not any(cell.world.has_all_ranks for cell in cells):
        return "virtual world, nothing is sent"
    is_gloo = on_cpu or any(cell.world.shares_gpus and not cell.shared_nccl for cell in cells)
    link = "NCCL"
    if is_gloo and num_nodes > 1:
        link = "gloo"
    elif is_gloo:
        link = "gloo over loopback"
    if any(cell.shared_nccl for cell in cells):
        link += " between ranks that share a GPU"
    if num_nodes > 1:
        link += f" between {num_nodes} nodes"
    return link
