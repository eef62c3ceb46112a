"""What a comparison of splits means: what depends on the split, what rightly may, and what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bench.audit.invariance.inside.state_records import COPY, PARAMETER
from bench.audit.invariance.rounding_bounds import STORED, unit
from bench.audit.invariance.split_runs import RankState, SplitRun, TensorSketch, align
from bench.audit.invariance.state_comparison import Likeness, SplitComparison, TensorPair
from bench.audit.invariance.window_comparison import (
    Samples,
    SamplesCheck,
    backwards,
    check_samples,
    compare_rows,
    rows,
    same_updates,
    uneven_terms,
)
from bench.errors import BAD, GOOD, UNCHECKED
from bench.findings import Finding, Level, error, note, warning
from bench.formatting import plural, some

BITWISE, ROUNDED = "bitwise equal", "equal to rounding"
DIFFERENT, NOT_JUDGED, NOT_COMPARABLE = "differs", "not judged", "not comparable"
SAME_FACTOR = 0.02
"""Factors that differ by less are the same."""
SAME_POSITION = 1e-6
MOST_POSITIONS = 4
MANY = 5
"""So many tensors need not be named if they are all."""
CONTRASTIVE = 0.5
"""Share of micro-batches from which on a training is contrastive."""


class InvarianceVerdict:
    """The findings of all splits beside the first: errors depend on the split, warnings say what is not known."""

    def __init__(self, runs: Sequence[SplitRun], again: SplitRun, updates: int) -> None:
        """``again`` is the first split once more; ``updates`` were to be sampled."""
        self.first, self.others, self.again = runs[0], list(runs[1:]), again
        self.updates = updates
        self.twin: SplitComparison | None = None
        """The first split against itself."""
        self.comparisons: list[SplitComparison] = []
        self.samples: dict[str, SamplesCheck] = {}
        """By the label of a split."""
        self._is_refused = False
        self._is_unclear = False
        found = list(self._all())
        self.findings = sorted(found, key=lambda each: each.level.rank)

    @property
    def verdict(self) -> str:
        """Of all splits."""
        if any(found.level is Level.ERROR for found in self.findings):
            return DIFFERENT
        if self._is_refused:
            return NOT_COMPARABLE
        if self._is_unclear:
            return NOT_JUDGED
        likenesses = {comparison.likeness for comparison in self.comparisons}
        if likenesses == {Likeness.BITWISE}:
            return BITWISE
        return ROUNDED

    @property
    def status(self) -> int:
        """Of the command line."""
        if self.verdict == DIFFERENT:
            return BAD
        return GOOD if self.verdict in (BITWISE, ROUNDED) else UNCHECKED

    def _all(self) -> Iterator[Finding]:
        runs = [self.first, self.again, *self.others]
        for run in runs[1:]:
            align(self.first, run)
        for run in runs:
            obstacle = _obstacle(run)
            if obstacle:
                yield self._refuse("not comparable", f"{run.split.label}: {obstacle}")
                return
        yield from self._of_twin()
        if self._is_refused:
            return
        unchanged = self._unchanged()
        if unchanged:
            yield self._refuse("nothing varies", unchanged)
            return
        for other in self.others:
            yield from self._of_split(other)
        for run in (self.first, *self.others):
            yield from _of_replicas(run)

    def _refuse(self, topic: str, text: str) -> Finding:
        self._is_refused = True
        return warning(topic, text)

    def _of_twin(self) -> Iterator[Finding]:
        """The same command must do the same twice, or nothing can be said of another."""
        start = _start_differs(self.first, self.again)
        if start:
            files = self.first.written
            if files:
                hint = f"if it resumes from {some(files)}, give each run a folder of its own with {{run}}"
                start += f"; seed the model, or {hint}"
            else:
                start += "; seed the model"
            yield self._refuse("A/A", f"run twice, {self.first.split.label}: {start}")
            return
        self.twin = SplitComparison(self.first, self.again, same_updates(self.first, self.again))
        samples = check_samples(self.first, self.again, self.twin.bound)
        if samples.samples is Samples.OTHER:
            yield self._refuse("A/A", f"run twice, {self.first.split.label}: {samples.reason}")
            return
        different = self.twin.different()
        if different:
            pair = different[0]
            text = (
                f"run twice, {self.first.split.label} differs from itself in {pair.kind} of {pair.name}, "
                f"update {pair.update}: seed what is random"
            )
            if _draws(self.first):
                text += " (torch draws random numbers in the forward)"
            yield self._refuse("A/A", text)

    def _unchanged(self) -> str:
        """Why N varies in name alone; empty if it does not."""
        if self.first.split.accumulate is None:
            return ""
        for other in self.others:
            for update in range(1, min(other.updates, self.first.updates) + 1):
                if backwards(other, update) != backwards(self.first, update):
                    return ""
                if rows(other, update) != rows(self.first, update):
                    return ""
        count = plural(backwards(self.first, 1), "backward")
        return f"all splits have {count} of as many rows per update: the option changes nothing"

    def _of_split(self, other: SplitRun) -> Iterator[Finding]:
        label = other.split.label
        start = _start_differs(self.first, other)
        if start:
            if _begins_alike(self.first, other):
                text = "parameters change between the micro-batches of update 1, before its step"
                yield error("parameters move", f"{label}: {text}: {start.split()[0]} and others")
            else:
                yield self._refuse("not comparable", f"{label}: {start}")
            return
        floor = 0.0 if self.twin is None else self.twin.largest()
        updates = same_updates(self.first, other)
        comparison = SplitComparison(self.first, other, max(updates, 1), floor)
        mismatch = self._of_rows(other)
        if mismatch is not None:
            yield mismatch
            yield from _of_positions(comparison)
            return
        check = check_samples(self.first, other, comparison.bound)
        self.samples[label] = check
        if check.samples is Samples.OTHER:
            yield self._refuse(str(check.samples), f"{label}: {check.reason}")
            return
        made = min(other.updates, self.first.updates)
        if updates < made:
            text = f"{label}: update {updates + 1} has other samples or another number of them"
            yield warning("other samples", f"{text}; compared is what is before it")
        elif made < self.updates:
            yield warning(
                "ended early", f"{label}: made {made} of {plural(self.updates, 'update')}"
            )
        self.comparisons.append(comparison)
        yield from _of_positions(comparison)
        yield from self._of_tensors(comparison, check)

    def _of_rows(self, other: SplitRun) -> Finding | None:
        """The first update of a split has not the rows of the first split's."""
        counts = compare_rows(self.first, other, 1)
        if counts is None or counts[0] == counts[1]:
            return None
        first_rows, its_rows = counts
        first_count, count = backwards(self.first, 1), backwards(other, 1)
        text = (
            f"{other.split.label}: update 1 sees {plural(its_rows, 'row')} in {plural(count, 'backward')}, and "
            f"{first_rows} in {plural(first_count, 'backward')} with {self.first.split.label}"
        )
        ours, theirs = self.first.split, other.split
        is_split = ours.batch is not None and theirs.batch is not None
        if is_split and first_count and count:
            assert ours.batch is not None and theirs.batch is not None
            is_cut = math.isclose(
                its_rows / count * ours.batch, first_rows / first_count * theirs.batch
            )
            wanted = first_count * (theirs.accumulate or 1) / (ours.accumulate or 1)
            if is_cut and count != wanted:
                text += f": {count} of {wanted:g} micro-batches reach it"
                return error("micro-batches", text)
        return self._refuse("other samples", f"{text}: keep the samples of an update")

    def _of_tensors(self, comparison: SplitComparison, check: SamplesCheck) -> Iterator[Finding]:
        different = comparison.different()
        if not different:
            if comparison.likeness is Likeness.UNCLEAR:
                self._is_unclear = True
                yield warning(
                    "not judged", f"{comparison.other.split.label}: no tensor could be compared"
                )
            return
        label = comparison.other.split.label
        certain = [pair for pair in different if pair.factor is not None]
        update = min(pair.update for pair in different)
        first = [pair for pair in different if pair.update == update]
        is_factor = bool(certain) and certain[0].update == update and _is_one_factor(first)
        excuses = list(_excuses(self.first, comparison.other))
        if excuses and not is_factor:
            self._is_unclear = True
            names = _named([pair for pair in first if pair.kind == first[0].kind], comparison)
            yield note(
                "not judged",
                f"{label}: {first[0].kind} of {names} differs in update {update}, as it may: {some(excuses)}",
            )
            return
        if check.samples is Samples.UNKNOWN and not is_factor:
            yield self._refuse("unknown samples", f"{label}: {check.reason}")
            return
        terms = uneven_terms(comparison.other)
        if terms is not None and not is_factor:
            text = (
                f"{label}: micro-batches of an update have from {terms[0]} to {terms[1]} terms, and "
                "their losses are averaged as if they had as many"
            )
            yield error("mean of means", text)
        yield from _of_kinds(comparison, first)


# What differs


def _of_kinds(comparison: SplitComparison, first: list[TensorPair]) -> Iterator[Finding]:
    """The first update that differs, kind by kind; what follows from another kind is not repeated."""
    label = comparison.other.split.label
    kinds = list(dict.fromkeys(pair.kind for pair in first))
    update = first[0].update
    known: set[str] = set()
    followed = []
    for kind in kinds:
        pairs = [pair for pair in first if pair.kind == kind]
        new = [pair for pair in pairs if _plain_name(pair.name) not in known]
        known.update(_plain_name(pair.name) for pair in pairs)
        if not new:
            followed.append(kind)
            continue
        only = "only " if len(kinds) == 1 and len(kinds) < _num_kinds(comparison, update) else ""
        names = _named(new, comparison)
        text = f"{label}: {only}{_in_words(kind)} {names} differs {_how(new, comparison)} in update {update}"
        yield error(f"{kind} differs", text)
    if followed:
        yield note("follows", f"{label}: {some(followed)} of the same tensors differ, too")


def _in_words(kind: str) -> str:
    if kind == COPY:
        return "a copy of parameters in"
    if kind == PARAMETER:
        return "the change of"
    return f"{kind} of"


def _plain_name(name: str) -> str:
    return name.removesuffix(" (part)")


def _num_kinds(comparison: SplitComparison, update: int) -> int:
    return len({pair.kind for pair in comparison.pairs if pair.update == update})


def _is_one_factor(pairs: Sequence[TensorPair]) -> bool:
    """Whether the first kind that differs is multiplied by one factor."""
    kind = pairs[0].kind
    factors = [pair.factor for pair in pairs if pair.kind == kind]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) * 0.9:
        return False
    return all(math.isclose(factor, known[0], rel_tol=SAME_FACTOR) for factor in known)


def _how(pairs: Sequence[TensorPair], comparison: SplitComparison) -> str:
    """By which factor, or by how much."""
    known = [pair.factor for pair in pairs if pair.factor is not None]
    if _is_one_factor(pairs):
        name = _name_of_factor(known[0], comparison, pairs[0].update)
        return f"by the factor {known[0]:.3g}{name}"
    least, most = min(pair.relative for pair in pairs), max(pair.relative for pair in pairs)
    if most < 1.2 * least or len(pairs) == 1:
        return f"by {most:.2g} of its norm"
    return f"by {least:.2g} to {most:.2g} of its norm"


def _name_of_factor(factor: float, comparison: SplitComparison, update: int) -> str:
    """What a factor may be, as `` (1/N)``; empty if it is nothing known."""
    first, other = comparison.first, comparison.other
    numbers = {}
    if first.split.accumulate and other.split.accumulate:
        numbers["N"] = other.split.accumulate / first.split.accumulate
    else:
        counts = [backwards(run, 1) for run in (first, other)]
        if counts[0] and counts[1]:
            numbers["N"] = counts[1] / counts[0]
    if update == 1:
        numbers["W"] = float(len(comparison.ranks))
    names = []
    for name, number in numbers.items():
        for shown, value in ((name, number), (f"1/{name}", 1 / number), (f"1/{name}²", number**-2)):
            if number != 1 and math.isclose(factor, value, rel_tol=SAME_FACTOR):
                names.append(shown)
    return f" ({' or '.join(names)})" if names else ""


def _named(pairs: Sequence[TensorPair], comparison: SplitComparison) -> str:
    """Tensors by module: ``all 11 tensors``, ``the 4 tensors of router``, or their names."""
    names = list(dict.fromkeys(pair.name for pair in pairs))
    every = {
        pair.name
        for pair in comparison.pairs
        if pair.kind == pairs[0].kind and pair.update == pairs[0].update
    }
    if len(names) == len(every) >= MANY:
        return f"all {len(names)} tensors"
    modules = _modules(names, every)
    return f"{some(modules)} ({len(names)} of {plural(len(every), 'tensor')})"


def _modules(names: Sequence[str], every: set[str]) -> list[str]:
    """The outermost modules all of whose tensors are among these, and what is in none."""
    left = set(names)
    found = []
    for name in names:
        if name not in left:
            continue
        parts = name.replace("[", ".[").split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth]).replace(".[", "[")
            inside = {each for each in every if each.startswith((f"{module}.", f"{module}["))}
            if len(inside) > 1 and inside <= left:
                found.append(_innermost(module, inside))
                left -= inside
                break
        else:
            found.append(name)
            left.discard(name)
    return found


def _innermost(module: str, names: set[str]) -> str:
    """The innermost module that has all of these."""
    inner = module
    for parts in zip(*(name.split(".")[:-1] for name in sorted(names)), strict=False):
        candidate = parts[0] if parts[0] == inner or not inner else f"{inner}.{parts[0]}"
        if all(name.startswith(f"{candidate}.") for name in names):
            inner = candidate
    return inner


def _of_positions(comparison: SplitComparison) -> Iterator[Finding]:
    """Schedules, learning rates, scalers and counts of steps that stand elsewhere."""
    label = comparison.other.split.label
    told: set[str] = set()
    for update in range(1, comparison.updates + 1):
        for rank in comparison.ranks:
            mine = comparison.first.ranks[rank].positions.get(update, {})
            others = comparison.other.ranks[rank].positions.get(update, {})
            for name in mine:
                if name in told or name not in others:
                    continue
                if not math.isclose(mine[name], others[name], rel_tol=SAME_POSITION):
                    told.add(name)
                    if len(told) <= MOST_POSITIONS:
                        text = (
                            f"{label}: {name} stands at {others[name]:g} instead of {mine[name]:g} "
                            f"in update {update}"
                        )
                        yield error("position", text)


def _of_replicas(run: SplitRun) -> Iterator[Finding]:
    """Parameters that DistributedDataParallel holds, and that ranks change differently."""
    numbers = list(run.ranks)
    first = run.ranks[numbers[0]]
    begun = first.tensors.get((0, PARAMETER), {})
    for update in range(1, run.updates + 1):
        mine = first.tensors.get((update, PARAMETER), {})
        apart = []
        for name, tensor in mine.items():
            start = begun.get(name)
            if start is None or not tensor.replicated or not start.norm:
                continue
            for number in numbers[1:]:
                other = run.ranks[number].tensors
                begin, end = (other.get((at, PARAMETER), {}).get(name) for at in (0, update))
                if begin is None or end is None or not begin.is_bitwise(start):
                    continue
                change = float(abs(tensor.values[1:] - start.values[1:]).max())
                difference = float(abs(end.values[1:] - tensor.values[1:]).max())
                noise = STORED * unit([tensor.dtype]) * tensor.norm
                if difference > max(0.01 * change, noise):
                    apart.append(name)
        if apart:
            names = some(_modules(list(dict.fromkeys(apart)), set(mine)))
            text = (
                f"{run.split.label}: ranks begin with the same {names}, and differ in it after update "
                f"{update}: its gradient is not reduced"
            )
            yield error("not reduced", text)
            return


# What stands in the way


def _obstacle(run: SplitRun) -> str:
    """Why a run cannot be compared with any; empty if it can."""
    if run.nothing or not run.ranks:
        return run.nothing or "no process could write its record: is TMPDIR full?"
    for rank in run.ranks.values():
        if rank.finish is not None and rank.finish.failure:
            return rank.finish.failure
        if rank.trainer.obstacles:
            return rank.trainer.obstacles[0]
    world = next(iter(run.ranks.values())).trainer.world
    if len(run.ranks) < world:
        return f"{len(run.ranks)} of {world} ranks have made an update"
    return "" if run.updates else "no optimizer of torch has made an update"


def _start_differs(first: SplitRun, other: SplitRun) -> str:
    """What is not the same before the first update; empty if all is."""
    if first.ranks.keys() != other.ranks.keys():
        return f"{plural(len(other.ranks), 'rank')} instead of {len(first.ranks)}"
    for number, rank in first.ranks.items():
        mine, others = (_start(found) for found in (rank, other.ranks[number]))
        common = mine.keys() & others.keys()
        if not common:
            return "no parameter has the same name and size in both"
        for name in mine:
            if name in common and not mine[name].is_bitwise(others[name]):
                return f"{name} begins with other values"
    return ""


def _begins_alike(first: SplitRun, other: SplitRun) -> bool:
    """Whether the parameters are the same at the first backward."""
    for number, rank in first.ranks.items():
        hashes = [
            found[0].leaves if found else None
            for found in (rank.of_update(1), other.ranks[number].of_update(1))
        ]
        if hashes[0] is None or hashes[0] != hashes[1]:
            return False
    return True


def _start(rank: RankState) -> dict[str, TensorSketch]:
    return rank.tensors.get((0, PARAMETER), {})


def _excuses(first: SplitRun, other: SplitRun) -> Iterator[str]:
    """What may rightly depend on how a batch is split."""
    ranks = [*first.ranks.values(), *other.ranks.values()]
    count = max(rank.trainer.batch_norms for rank in ranks)
    if count:
        yield f"{plural(count, 'BatchNorm module')} in training mode normalize each micro-batch by itself"
    dropouts = max(rank.trainer.dropouts for rank in ranks)
    micro_batches = [found for rank in ranks for found in rank.micro_batches]
    if dropouts or any(found.dropout for found in micro_batches):
        yield "dropout draws other numbers for each micro-batch: set it to 0"
    elif any(found.drew for found in micro_batches):
        yield "torch draws random numbers between batch and backward, as dropout does: set it to 0"
    contrasts = [
        found.contrasts or any(criterion.in_batch for criterion in found.criteria)
        for found in micro_batches
    ]
    if contrasts and sum(contrasts) > CONTRASTIVE * len(contrasts):
        yield "rows of a micro-batch are contrasted with each other, so it has fewer negatives"


def _draws(run: SplitRun) -> bool:
    return any(found.drew for rank in run.ranks.values() for found in rank.micro_batches)
