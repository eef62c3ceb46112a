"""Why no times of a run can be compared, and the whole command that would change it."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bench.backends.base import built_in
from bench.findings import Finding, note, warning
from bench.formatting import plural
from bench.judge.baseline import baseline_of
from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair
from bench.judge.statistics import MIN_REPEATS, MIN_TRIALS
from bench.judge.verdicts import MORE_HELPS, Reason, Verdict
from bench.plan.cell import REFERENCES, Sync

BENCH = ("python", "-m", "bench")
VIRTUAL = (
    "Virtual world: one process is rank 0 of W and nothing is sent, so no step is timed; "
    "memory, calls and bytes are those of a real rank"
)
SHARED = (
    "The ranks shared GPUs, so no step is timed; memory, calls and updates are those of real ranks"
)
ONLY_REFERENCES = "Only references have trials, with which nothing is compared"
FAILED = frozenset({Reason.FAILED_TRIALS, Reason.NO_TRIALS})
UNAVAILABLE = "No times can be compared"


def times_unavailable(run: Run, rows: Sequence[ComparedPair], folder: Path) -> Finding | None:
    """What keeps all times of a run from being compared; None if there is a ratio with an interval.

    It is a warning with a command, or a note on a run that was not meant to have times.
    """
    worlds = {cell.world for cell in run.cells.values() if not cell.is_reference}
    if not worlds:
        return note("No times", ONLY_REFERENCES)
    if not any(world.times_communication for world in worlds):
        if all(world.has_all_ranks for world in worlds):
            return note("No times", SHARED)
        return note("No times", VIRTUAL)
    compared = [row for row in rows if not row.b.twin]
    timed = [row for row in compared if row.b.world.times_communication]
    if not timed:
        return _nothing_to_compare(run)
    if any(map(_has_ratio, timed)):
        return None
    # Cells that failed are statements of their own.
    tried = [row for row in timed if row.reason not in (Reason.GATE, Reason.NO_TRIALS)]
    if not tried:
        tried = timed
    reasons = Counter(row.reason for row in tried)
    texts = _reason_texts(tried, reasons)
    if Reason.FEW_TRIALS not in reasons and _repeats(run) < MIN_TRIALS:
        texts.append(f"{plural(_repeats(run), 'repeat')}, and an interval needs {MIN_TRIALS}")
    text = re.sub(r"^an ", "An ", "; ".join(texts))
    return warning(UNAVAILABLE, text, command=next_command(run, set(reasons), folder))


def _has_ratio(row: ComparedPair) -> bool:
    """Whether the pair has a ratio that may be told, with an interval or of several runs."""
    if row.verdict is Verdict.NOT_COMPARABLE:
        return False
    has_runs = row.time is not None and len(row.time.runs) > 0
    return row.has_interval or has_runs


def _reason_texts(tried: Sequence[ComparedPair], reasons: Counter[Reason]) -> list[str]:
    """Each reason in the words of its first pair, the most frequent first."""
    details: dict[Reason, str] = {}
    for row in tried:
        details.setdefault(row.reason, row.details[0])
    texts = []
    for reason, count in reasons.most_common():
        text = details[reason]
        if len(reasons) > 1:
            text += f" ({count} of {plural(len(tried), 'comparison')})"
        texts.append(text)
    return texts


def _nothing_to_compare(run: Run) -> Finding:
    """That no two cells differ in the backend alone, with the command that adds a backend."""
    named: list[str] = []
    for cell in run.manifest.cells:  # in the order of the matrix
        if cell.is_reference or cell.twin or cell.cell_id not in run.cells:
            continue
        if cell.backend not in named:
            named.append(cell.backend)
    baseline = baseline_of(run.manifest)
    if len(named) > 1 and baseline in REFERENCES:
        text = "The baseline is a reference, with which no times are compared"
        return warning(UNAVAILABLE, text, command=again(run, **{"--baseline": named[0]}))
    options: dict[str, object] = {}
    if _repeats(run) < MIN_TRIALS:
        options["--repeats"] = MIN_REPEATS
    if named and baseline not in {*named, *REFERENCES}:
        return warning(
            UNAVAILABLE, f"The baseline, {baseline}, has no trial", command=again(run, **options)
        )
    for name, kind in built_in().items():
        if kind.is_mechanism and kind.sync is Sync.DEFERRED and name not in named:
            named.append(name)
            break
    options["--backend"] = named
    return warning(
        UNAVAILABLE,
        "No two cells of the run differ in the backend alone",
        command=again(run, **options),
    )


def next_command(run: Run, reasons: Collection[Reason], folder: Path, num_runs: int = 1) -> str:
    """The command that would make verdicts with these reasons certain; empty if none would.

    Over several runs, one more of them.
    """
    place = shlex.quote(str(folder))
    asked = set(reasons)
    if asked <= FAILED:
        return on_each_node(run, f"{shlex.join(BENCH)} run --resume {place} --retry-failed")
    lacks_runs = num_runs > 1 and not asked.isdisjoint({*MORE_HELPS, Reason.FEW_RUNS})
    if lacks_runs or asked == {Reason.CONTROL_OFF}:
        return _another_run(run, reasons)
    if asked == {Reason.WIDE}:
        return ""  # the difference may be as small as any
    if Reason.DISTURBED not in asked and not asked & MORE_HELPS:
        return f"{shlex.join(BENCH)} check {place}"
    more: dict[str, object] = {}
    if _repeats(run) < MIN_TRIALS:
        more["--repeats"] = MIN_REPEATS
    elif Reason.DISTURBED not in reasons:
        more["--repeats"] = 2 * _repeats(run)
    command = again(run, **more)
    if Reason.DISTURBED in reasons:
        return f"{shlex.join(BENCH)} doctor && {command}"
    return command


def _another_run(run: Run, reasons: Collection[Reason]) -> str:
    """The command that measures the same again, after a look at a machine with suspect times."""
    if Reason.CONTROL_OFF in reasons:
        return f"{shlex.join(BENCH)} doctor && {again(run)}"
    return again(run)


def _repeats(run: Run) -> int:
    return int(run.tables.trials["repeat"].nunique())


def again(run: Run, **options: object) -> str:
    """The command that measures the matrix of a run again, into a new folder, with other options.

    It is made from the matrix as it was run, not from the words of the first command. More repeats
    get a budget of the time that they need, and a tenth more, if the run has one.
    """
    manifest, matrix = run.manifest, run.manifest.matrix
    is_shipped = matrix.source == f"{matrix.name}.toml"
    given: dict[str, object] = {"--matrix": matrix.source}
    if is_shipped:
        given["--matrix"] = matrix.name
    classes = {name: about.get("class", name) for name, about in manifest.backends.items()}
    for key, option in matrix.places.items():
        value = matrix.values[key]
        follows_from_others = not option.startswith("--") or option == "--alone" or value == "auto"
        if follows_from_others:
            continue
        given[option] = value
        if option == "--budget":
            given[option] = f"{manifest.settings.budget_s:g}s"
    if manifest.cold:
        given["--cold"] = True
    if "--repeats" in options:
        given.pop("--max-repeats", None)
        if manifest.settings.budget_s:
            options["--budget"] = _budget(run, int(str(options["--repeats"])))
    words: list[str] = []
    for option, value in (given | options).items():
        words.append(option)
        if word := _word(value, classes):
            words.append(word)
    return on_each_node(run, shlex.join([*BENCH, "run", *words]))


def _budget(run: Run, repeats: int) -> str:
    """The time of so many repeats and a tenth more, in tens of minutes."""
    trials = run.tables.trials
    walls = trials[~trials["cell_id"].isin(run.manifest.once)].groupby("cell_id")["wall_s"]
    return f"{10 * math.ceil(1.1 * repeats * walls.mean().sum() / 600)}m"


def on_each_node(run: Run, command: str) -> str:
    """The command, with where to start it if the run had several nodes."""
    others = run.manifest.nodes
    if not others:
        return command
    return f"{command} # on each of {1 + len(others)} nodes: docs/hosts.md"


def _word(value: object, classes: Mapping[str, str]) -> str:
    """A value as its option takes it; empty for a switch."""
    if value is True:
        return ""
    if isinstance(value, list):
        words: list[str] = []
        for part in value:
            word = _part(part)
            words.append(classes.get(word, word))
        return ",".join(words)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _part(value: object) -> str:
    """A value in a list."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
