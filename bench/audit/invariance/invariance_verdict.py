"""What a comparison of splits means: what depends on the split, and what may rightly do so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from bench.audit.command.audited_command import NO_RECORD
from bench.audit.invariance.inside.state_records import (
    BUFFER,
    CLIPPED,
    COPY,
    GRADIENT,
    PARAMETER,
)
from bench.audit.invariance.rounding_bounds import STORED, unit
from bench.audit.invariance.split_runs import RankState, RecordedMicroBatch, SplitRun, align
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
STATUSES = {BITWISE: GOOD, ROUNDED: GOOD, DIFFERENT: BAD}
"""Of the command line, by verdict; of any other it is UNCHECKED."""
SAME_FACTOR = 0.02
"""Factors that differ by less are the same."""
SAME_POSITION = 1e-6
MOST_POSITIONS = 4
MANY = 5
"""So many tensors need not be named if they are all."""
CONTRASTIVE = 0.5
"""Share of micro-batches from which on a training is contrastive."""
IN_WORDS = {
    GRADIENT: "the gradient of",
    CLIPPED: "the clipped gradient of",
    BUFFER: "the buffer of",
    PARAMETER: "the change of",
    COPY: "a copy of parameters in",
}
"""By kind of state, what stands before the names of tensors."""


class InvarianceVerdict:
    """The findings of all splits but the first.

    An error depends on the split; a warning says what is not known.
    """

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
        self.findings = sorted(self._all(), key=lambda found: found.level.rank)

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
        return STATUSES.get(self.verdict, UNCHECKED)

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
        twice = f"run twice, {self.first.split.label}"
        start = _start_differs(self.first, self.again)
        if start:
            advice = "seed the model"
            files = self.first.written
            if files:
                hint = "give each run a folder of its own with {run}"
                advice += f", or if it resumes from {some(files)}, {hint}"
            yield self._refuse("A/A", f"{twice}: {start}; {advice}")
            return
        self.twin = SplitComparison(self.first, self.again, same_updates(self.first, self.again))
        samples = check_samples(self.first, self.again, self.twin.bound)
        if samples.samples is Samples.OTHER:
            yield self._refuse("A/A", f"{twice}: {samples.reason}")
            return
        different = self.twin.different()
        if different:
            pair = different[0]
            what = f"{_in_words(pair.kind)} {pair.name}, update {pair.update}"
            text = f"{twice} differs from itself in {what}: seed what is random"
            if any(found.drew for found in self.first.micro_batches()):
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
        same = "the same number of rows per update"
        return f"all splits have {count} and {same}: the option changes nothing"

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
        floor = 0.0
        if self.twin is not None:
            floor = self.twin.largest()
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
            text = f"update {updates + 1} has other inputs or another number of them"
            yield warning("other inputs", f"{label}: {text}; what comes before it is compared")
        elif made < self.updates:
            text = f"made {made} of {plural(self.updates, 'update')}"
            yield warning("ended early", f"{label}: {text}")
        self.comparisons.append(comparison)
        yield from _of_positions(comparison)
        yield from self._of_tensors(comparison, check)

    def _of_rows(self, other: SplitRun) -> Finding | None:
        """The first update of a split has not the rows of the first split's."""
        counts = compare_rows(self.first, other, 1)
        if counts is None or counts.are_equal:
            return None
        ours, theirs = self.first.split, other.split
        num_first, num_other = backwards(self.first, 1), backwards(other, 1)
        text = (
            f"{theirs.label}: update 1 sees {plural(counts.other, 'row')} in "
            f"{plural(num_other, 'backward')}, and {counts.first} in "
            f"{plural(num_first, 'backward')} with {ours.label}"
        )
        if ours.batch is not None and theirs.batch is not None and num_first and num_other:
            first_size, other_size = counts.first / num_first, counts.other / num_other
            is_cut = math.isclose(other_size * ours.batch, first_size * theirs.batch)
            wanted = num_first * ours.batch / theirs.batch
            if is_cut and num_other != wanted:
                reach = f"{num_other} of {wanted:g} micro-batches reach it"
                return error("micro-batches", f"{text}: {reach}")
        return self._refuse("other samples", f"{text}: keep the samples of an update the same")

    def _of_tensors(self, comparison: SplitComparison, check: SamplesCheck) -> Iterator[Finding]:
        label = comparison.other.split.label
        different = comparison.different()
        if not different:
            if comparison.likeness is Likeness.UNCLEAR:
                self._is_unclear = True
                yield warning("not judged", f"{label}: {_of_unclear(comparison)}")
            return
        update = different[0].update
        first = [pair for pair in different if pair.update == update]
        if not _is_one_factor(first):
            excuses = list(_excuses(self.first, comparison.other))
            if excuses:
                self._is_unclear = True
                kind = first[0].kind
                names = _named(_of_kind(first, kind), comparison)
                text = f"{_in_words(kind)} {names} differs in update {update}, as it may"
                yield note("not judged", f"{label}: {text}: {some(excuses)}")
                return
            if check.samples is Samples.UNKNOWN:
                yield self._refuse("unknown samples", f"{label}: {check.reason}")
                return
            terms = uneven_terms(comparison.other)
            if terms is not None:
                text = (
                    f"micro-batches of an update have from {terms.fewest} to {terms.most} terms, "
                    "and their losses are averaged as if all had the same number"
                )
                yield error("mean of means", f"{label}: {text}")
        yield from _of_kinds(comparison, first)


# What differs


def _of_kinds(comparison: SplitComparison, first: Sequence[TensorPair]) -> Iterator[Finding]:
    """The first update that differs, kind by kind.

    What follows from another kind is not repeated.
    """
    label = comparison.other.split.label
    update = first[0].update
    kinds = list(dict.fromkeys(pair.kind for pair in first))
    only = ""
    if len(kinds) == 1 and _others_are_equal(kinds[0], comparison, update):
        only = "only "
    known: set[str] = set()
    followed = []
    for kind in kinds:
        pairs = _of_kind(first, kind)
        new = [pair for pair in pairs if _plain_name(pair) not in known]
        known.update(map(_plain_name, pairs))
        if not new:
            followed.append(kind)
            continue
        what = f"{only}{_in_words(kind)} {_named(new, comparison)}"
        how = _how(new, comparison)
        yield error(f"{kind} differs", f"{label}: {what} differs {how} in update {update}")
    if followed:
        yield note("follows", f"{label}: {some(followed)} of the same tensors differ too")


def _of_unclear(comparison: SplitComparison) -> str:
    """What differs where no difference is judged."""
    unclear = [pair for pair in comparison.pairs if not pair.is_judged]
    if not unclear:
        return "no tensor could be compared"
    update, kind = unclear[0].update, unclear[0].kind
    first = [pair for pair in _of_kind(unclear, kind) if pair.update == update]
    what = f"{_in_words(kind)} {_named(first, comparison)}"
    return (
        f"{what} differs in update {update}, but may do so by rounding, or holds integers or "
        "infinite numbers"
    )


def _others_are_equal(kind: str, comparison: SplitComparison, update: int) -> bool:
    """Whether tensors of all other kinds, of which there are some, are known to be equal."""
    of_update = [pair for pair in comparison.pairs if pair.update == update]
    others = [pair for pair in of_update if pair.kind != kind]
    return bool(others) and all(pair.is_judged for pair in others)


def _in_words(kind: str) -> str:
    """Any other kind is a state of an optimizer."""
    return IN_WORDS.get(kind, f"the state {kind} of")


def _of_kind(pairs: Sequence[TensorPair], kind: str) -> list[TensorPair]:
    return [pair for pair in pairs if pair.kind == kind]


def _plain_name(pair: TensorPair) -> str:
    return pair.name.removesuffix(" (part)")


def _is_one_factor(pairs: Sequence[TensorPair]) -> bool:
    """Whether the first kind that differs is multiplied by one factor."""
    pairs = _of_kind(pairs, pairs[0].kind)
    factors = _factors(pairs)
    if len(factors) < len(pairs) * 0.9:
        return False
    return all(math.isclose(factor, factors[0], rel_tol=SAME_FACTOR) for factor in factors)


def _factors(pairs: Sequence[TensorPair]) -> list[float]:
    return [pair.factor for pair in pairs if pair.factor is not None]


def _how(pairs: Sequence[TensorPair], comparison: SplitComparison) -> str:
    """By which factor, or by how much."""
    if _is_one_factor(pairs):
        factor = _factors(pairs)[0]
        name = _name_of_factor(factor, comparison, pairs[0].update)
        return f"by the factor {factor:.3g}{name}"
    shares = [pair.relative for pair in pairs]
    least, most = min(shares), max(shares)
    if most < 1.2 * least or len(pairs) == 1:
        return f"by {most:.2g} of its norm"
    return f"by {least:.2g} to {most:.2g} of its norm"


def _name_of_factor(factor: float, comparison: SplitComparison, update: int) -> str:
    """What a factor may be, as `` (1/N)``; empty if it is nothing known."""
    first, other = comparison.first, comparison.other
    numbers: dict[str, float] = {}
    num_first, num_other = backwards(first, 1), backwards(other, 1)
    if first.split.accumulate and other.split.accumulate:
        numbers["N"] = other.split.accumulate / first.split.accumulate
    elif num_first and num_other:
        numbers["N"] = num_other / num_first
    if update == 1:
        numbers["W"] = float(len(comparison.ranks))
    names = []
    for letter, number in numbers.items():
        if number == 1:
            continue
        powers = {letter: number, f"1/{letter}": 1 / number, f"1/{letter}²": number**-2}
        for name, value in powers.items():
            if math.isclose(factor, value, rel_tol=SAME_FACTOR):
                names.append(name)
    if not names:
        return ""
    return f" ({' or '.join(names)})"


def _named(pairs: Sequence[TensorPair], comparison: SplitComparison) -> str:
    """Tensors by module: ``all 11 tensors``, ``router (2 of 11 tensors)``, or their names.

    Copies are always named, since their modules tell one copy of the parameters from another.
    """
    names = list(dict.fromkeys(pair.name for pair in pairs))
    every = set()
    for pair in _of_kind(comparison.pairs, pairs[0].kind):
        if pair.update == pairs[0].update:
            every.add(pair.name)
    if len(names) == len(every) >= MANY and pairs[0].kind != COPY:
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
        inside = {name}
        for module in _enclosing(name):
            tensors = {each for each in every if each.startswith((f"{module}.", f"{module}["))}
            if len(tensors) > 1 and tensors <= left:
                inside = tensors
                found.append(_innermost(module, inside))
                break
        else:
            found.append(name)
        left -= inside
    return found


def _enclosing(name: str) -> Iterator[str]:
    """The modules that a tensor is in by its name, the outermost first.

    Also a list that holds it.
    """
    for place, letter in enumerate(name):
        if letter in ".[" and place:
            yield name[:place]


def _innermost(module: str, names: Collection[str]) -> str:
    """The innermost module that has all of these."""
    inner = module
    paths = [name.split(".")[:-1] for name in sorted(names)]
    for part, *_ in zip(*paths, strict=False):
        candidate = f"{inner}.{part}"
        if part == inner or not inner:
            candidate = part
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
            for name, place in mine.items():
                other = others.get(name)
                if other is None or name in told:
                    continue
                if math.isclose(place, other, rel_tol=SAME_POSITION):
                    continue
                text = f"{name} stands at {other:g} instead of {place:g} in update {update}"
                yield error("position", f"{label}: {text}")
                told.add(name)
                if len(told) == MOST_POSITIONS:
                    return


def _of_replicas(run: SplitRun) -> Iterator[Finding]:
    """Parameters that DistributedDataParallel holds, and that ranks change differently."""
    first, *others = run.ranks.values()
    for update in range(1, run.updates + 1):
        mine = first.state(update, PARAMETER)
        apart = []
        for name in mine:
            if any(_drifts(name, update, first, other) for other in others):
                apart.append(name)
        if apart:
            names = some(_modules(apart, set(mine)))
            text = (
                f"ranks begin with the same {names}, and differ in it after update {update}: "
                "its gradient is not reduced"
            )
            yield error("not reduced", f"{run.split.label}: {text}")
            return


def _drifts(name: str, update: int, first: RankState, other: RankState) -> bool:
    """Whether a parameter that began the same on two ranks is not the same after an update."""
    start, end = first.state(0, PARAMETER).get(name), first.state(update, PARAMETER)[name]
    if start is None or not end.replicated or not start.norm:
        return False
    other_start = other.state(0, PARAMETER).get(name)
    other_end = other.state(update, PARAMETER).get(name)
    if other_start is None or other_end is None or not other_start.is_bitwise(start):
        return False
    change = float(abs(end.values[1:] - start.values[1:]).max())
    difference = float(abs(other_end.values[1:] - end.values[1:]).max())
    noise = STORED * unit([end.dtype]) * end.norm
    return difference > max(0.01 * change, noise)


# What stands in the way


def _obstacle(run: SplitRun) -> str:
    """Why a run cannot be compared with any; empty if it can."""
    if run.nothing:
        return run.nothing
    if not run.ranks:
        return NO_RECORD
    if of_ranks := _obstacle_of_ranks(run):
        return of_ranks
    world = next(iter(run.ranks.values())).trainer.world
    if len(run.ranks) < world:
        return f"only {len(run.ranks)} of {world} ranks made an update"
    if not run.updates:
        return "no optimizer of torch made an update"
    return ""


def _obstacle_of_ranks(run: SplitRun) -> str:
    """The first that a rank has recorded; empty if none has."""
    for rank in run.ranks.values():
        if rank.finish is not None and rank.finish.failure:
            return rank.finish.failure
        if rank.trainer.obstacles:
            return rank.trainer.obstacles[0]
    return ""


def _start_differs(first: SplitRun, other: SplitRun) -> str:
    """What is not the same before the first update; empty if all is."""
    if first.ranks.keys() != other.ranks.keys():
        return f"{plural(len(other.ranks), 'rank')} instead of {len(first.ranks)}"
    for number, rank in first.ranks.items():
        mine = rank.state(0, PARAMETER)
        others = other.ranks[number].state(0, PARAMETER)
        if mine.keys().isdisjoint(others):
            return "no parameter has the same name and size in both"
        for name, tensor in mine.items():
            if name in others and not tensor.is_bitwise(others[name]):
                return f"{name} begins with other values"
    return ""


def _begins_alike(first: SplitRun, other: SplitRun) -> bool:
    """Whether the parameters are the same at the first backward."""
    for number, rank in first.ranks.items():
        mine, others = rank.of_update(1), other.ranks[number].of_update(1)
        if not mine or not others:
            return False
        if mine[0].leaves is None or mine[0].leaves != others[0].leaves:
            return False
    return True


def _excuses(first: SplitRun, other: SplitRun) -> Iterator[str]:
    """What may rightly depend on how a batch is split."""
    count, has_dropout, draws, quantizes, normalizes = 0, False, False, False, False
    moving: set[str] = set()
    for trainer in (*first.trainers(), *other.trainers()):
        count = max(count, trainer.batch_norms)
        moving.update(trainer.moving)
        has_dropout = has_dropout or trainer.dropouts > 0
    micro_batches = [*first.micro_batches(), *other.micro_batches()]
    for micro_batch in micro_batches:
        has_dropout = has_dropout or micro_batch.dropout
        draws = draws or micro_batch.drew
        quantizes = quantizes or micro_batch.quantizes
        normalizes = normalizes or micro_batch.normalizes
    if count:
        modules = plural(count, "BatchNorm module")
        yield f"{modules} in training mode normalize each micro-batch by itself"
    elif normalizes:
        yield "a batch norm in training mode normalizes each micro-batch by itself"
    for kind in sorted(moving):
        yield f"{kind} moves at each forward"
    if has_dropout:
        yield "dropout draws other numbers for each micro-batch: set it to 0"
    elif draws:
        yield "torch draws random numbers between batch and backward, as dropout does: set it to 0"
    if quantizes:
        yield "tensors are quantized with scales that follow from the micro-batch"
    num_contrasted = sum(map(_contrasts, micro_batches))
    if num_contrasted > CONTRASTIVE * len(micro_batches):
        yield "rows of a micro-batch are contrasted with each other, so it has fewer negatives"


def _contrasts(micro_batch: RecordedMicroBatch) -> bool:
    """Whether its rows are contrasted with each other."""
    return micro_batch.contrasts or any(found.in_batch for found in micro_batch.criteria)
