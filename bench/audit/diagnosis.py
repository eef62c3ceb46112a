"""What a backend did wrong in a scenario: rules over decoded coefficients and counters.

None of them knows a backend. Each rule yields its findings as a word and a sentence with numbers;
RULES has their order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TypedDict

from bench.audit.decoded_scenario import (
    DecodedRecord,
    DecodedScenario,
    DecodedUpdate,
    FailureRecord,
    Use,
)
from bench.audit.scenario import Fault, Split
from bench.audit.semantics_findings import (
    RIGHT,
    TOLERANCE,
    all_divided_twice,
    count_range,
    divided_twice,
    hidden_by_clipping,
    is_near,
    samples_text,
    share_of_updates,
    verdict,
)
from bench.findings import Finding, Level, error, good, note
from bench.formatting import plural
from bench.plan.cell import Status

STORED_LEVELS = {Level.ERROR: "wrong", Level.NOTE: "note", Level.GOOD: "detail"}
"""How files name the levels."""
SCHEDULER_COUNTER = "lr_scheduler.last_epoch"
STEP_COUNTERS = (
    "trainer.global_step",
    "state.global_step",
    "engine.global_steps",
    "trainer.step",
    SCHEDULER_COUNTER,
)
"""Counters that should say how many updates were made."""
RESTARTS = {Fault.EXCEPTION, Fault.CHECKPOINT}
"""Faults after which training is started again: windows end early there, and there are two sets of
counters."""
OPTIMIZER_STATE = (
    ": no update, but what torch.distributed.checkpoint calls, with learning rate 0, to "
    "create optimizer state"
)


class FindingRecord(TypedDict):
    """A finding, as plain JSON."""

    word: str
    level: str
    """One of STORED_LEVELS."""
    text: str


class Observation(DecodedRecord):
    """One backend in one scenario: what it computed, and what is said of that."""

    verdict: str
    level: str
    findings: list[FindingRecord]
    """The gravest first."""
    diagnosis: str


def observation(decoded: DecodedScenario) -> Observation:
    """The decoded as plain JSON with its findings, the verdict and the diagnosis."""
    found = findings(decoded)
    chosen = verdict(found)
    told = found
    if not found:
        told = [RIGHT]
    return {
        **decoded.to_record(),
        "verdict": chosen.topic,
        "level": STORED_LEVELS[chosen.level],
        "findings": list(map(_finding_record, found)),
        "diagnosis": "; ".join(finding.text for finding in told),
    }


def _finding_record(found: Finding) -> FindingRecord:
    return {"word": found.topic, "level": STORED_LEVELS[found.level], "text": found.text}


def findings(decoded: DecodedScenario) -> list[Finding]:
    """Everything that the rules find, the gravest first."""
    found: list[Finding] = []
    for rule in RULES:
        found += rule(decoded)
    return sorted(found, key=lambda finding: finding.level.rank)


def counters_text(values: Mapping[str, int]) -> str:
    """Counters with their values, in one line."""
    if not values:
        return "no counters"
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _outcome(decoded: DecodedScenario) -> Iterator[Finding]:
    """Whether training failed, never ended or made no update, and whether replicas diverged."""
    scenario = decoded.scenario
    done = plural(decoded.num_micro_batches, "micro-batch")
    if decoded.failure:
        yield _failure(decoded.failure, decoded, done)
    if decoded.stopped == "bound":
        counters = counters_text(decoded.reported)
        updates = plural(len(decoded.updates), "update")
        limit = f"max_steps = {scenario.max_steps}"
        text = f"{limit} had not stopped training after {done} and {updates} ({counters})"
        yield error("never stops", text)
    if decoded.diverged_at is not None:
        text = f"the ranks' parameters differ from update {decoded.diverged_at} on"
        yield error("replicas differ", text)
    if decoded.failure:
        return
    if not decoded.updates and decoded.num_micro_batches:
        yield error("no update", f"{done} led to no update")
    if scenario.fault is not Fault.NONE and not decoded.first["faults"]:
        yield note("no fault", f"training ended before the {scenario.fault} could happen")


def _failure(failure: FailureRecord, decoded: DecodedScenario, done: str) -> Finding:
    reason = " ".join(failure["reason"].split())
    if failure["status"] == Status.UNSUPPORTED:
        return note("unsupported", reason)
    if decoded.stopped == "lost":
        return error(str(failure["status"]), f"no rank finished the scenario: {reason}")
    if not decoded.num_micro_batches:
        return note("refused", f"the framework refused before the first micro-batch: {reason}")
    if decoded.first["faults"]:
        text = f"training failed after the {decoded.scenario.fault}: {reason}"
        return error("cannot continue", text)
    return error("crashed", f"training failed after {done}: {reason}")


def _too_early(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault in RESTARTS:
        return
    epochs = [decoded.first["fetches"][fetch]["epoch"] for fetch in decoded.computed]
    early = []
    for update in decoded.updates:
        if not 0 < update.losses_before < len(epochs):
            continue
        epoch, next_epoch = epochs[update.losses_before - 1], epochs[update.losses_before]
        in_mid_epoch = epoch == next_epoch
        if in_mid_epoch and 0 < update.num_losses < decoded.scenario.accumulate_in(epoch):
            early.append(update)
    if early:
        yield error("steps too early", f"in mid-epoch, {_window_lengths(decoded, early)}")


def _too_late(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault in RESTARTS:
        return
    late = [update for update in decoded.updates if update.num_losses > _n(decoded, update)]
    if late:
        yield error("steps too late", _window_lengths(decoded, late))


def _window_lengths(decoded: DecodedScenario, updates: list[DecodedUpdate]) -> str:
    after = count_range(update.num_losses for update in updates)
    n = count_range(_n(decoded, update) for update in updates)
    share = share_of_updates(updates, decoded.updates)
    return f"{share} came after {after} instead of N = {n} micro-batches"


def _n(decoded: DecodedScenario, update: DecodedUpdate) -> int:
    """N in the epoch of the last micro-batch before an update."""
    if not update.num_losses:
        return max(decoded.scenario.accumulate)
    closed_by = decoded.first["fetches"][decoded.last_fetch(update)]
    return decoded.scenario.accumulate_in(closed_by["epoch"])


def _not_cleared(decoded: DecodedScenario) -> Iterator[Finding]:
    seen: set[Use] = set()
    again: set[Use] = set()
    for update in decoded.updates:
        again |= seen & update.coefficients.keys()
        seen |= update.coefficients.keys()
    if again:
        text = f"gradients were not cleared: {samples_text(list(again))} in more than one update"
        yield error("not cleared", text)


def _last_only(decoded: DecodedScenario) -> Iterator[Finding]:
    longer = [update for update in decoded.updates if update.num_losses > 1]
    for update in longer:
        if update.fetches != [decoded.last_fetch(update)]:
            return
    if longer:
        lengths = count_range(update.num_losses for update in longer)
        yield error("last only", f"each update contains only the last of {lengths} micro-batches")


def _lost(decoded: DecodedScenario) -> Iterator[Finding]:
    if not decoded.lost or decoded.scenario.fault is Fault.ZERO_GRAD:
        return
    by_fault, others = [], []
    for use in decoded.lost:
        if decoded.scenario.fault in RESTARTS and use.fetch in decoded.interrupted:
            by_fault.append(use)
        else:
            others.append(use)
    level, why = Level.ERROR, "since the checkpoint does not contain them"
    if decoded.scenario.fault is Fault.EXCEPTION:
        level, why = Level.GOOD, "since the exception discarded their window"
    if by_fault:
        yield Finding(level, "lost", f"{samples_text(by_fault)} reached no update, {why}")
    if others:
        yield error("lost", f"{samples_text(others)} reached no update, although updates followed")


def _cleared(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault is not Fault.ZERO_GRAD or decoded.failure:
        return
    if not decoded.first["faults"]:
        return
    before = decoded.interrupted
    if not before:
        text = "zero_grad was called between two windows and cleared nothing"
        yield good("nothing open", text)
        return
    if any(before.intersection(update.fetches) for update in decoded.updates):
        yield note("kept", "zero_grad did not clear the gradients accumulated before it")
        return
    rest = _rest_of_cleared_window(decoded)
    if rest is not None:
        discarded = plural(len(before), "micro-batch")
        text = f"zero_grad discarded the {discarded} before it"
        yield note("cleared", f"{text}; the sum of the update is {rest.sum:.3g}")


def _rest_of_cleared_window(decoded: DecodedScenario) -> DecodedUpdate | None:
    """The first update after zero_grad was called in mid-window."""
    if decoded.scenario.fault is not Fault.ZERO_GRAD or not decoded.first["faults"]:
        return None
    for update in decoded.updates:
        if update.losses_before > decoded.first["faults"][0]:
            return update
    return None


def _mixed_epochs(decoded: DecodedScenario) -> Iterator[Finding]:
    aborted, mixed = [], []
    for update in decoded.updates:
        if decoded.aborted_epoch in update.epochs[:-1]:
            aborted.append(update)
        elif len(update.epochs) > 1:
            mixed.append(update)
    if aborted:
        update = aborted[0]
        text = f"the next update, whose sum is {update.sum:.3g}, "
        text += "contains the window that the exception interrupted"
        if update.ratio > 1 + TOLERANCE:
            yield error("leaks", text)
        else:
            yield note("carried over", text)
    if mixed:
        share = share_of_updates(mixed, decoded.updates)
        yield note("carried over", f"{share} mixed the end of one epoch with the start of the next")


def _wrong_sum(decoded: DecodedScenario) -> Iterator[Finding]:
    cleared = _rest_of_cleared_window(decoded)
    small, large = [], []
    for update in decoded.updates:
        if update.ratio > 1 + TOLERANCE:
            large.append(update)
        elif update.ratio < 1 - TOLERANCE and update is not cleared:
            small.append(update)
    if small and not all_divided_twice(decoded):
        reasons = dict.fromkeys(_why_small(decoded, update) for update in small)
        share = share_of_updates(small, decoded.updates)
        yield error("under-weighted", f"{share} came out too small: {'; '.join(reasons)}")
    if large:
        ratio = max(update.ratio for update in large)
        share = share_of_updates(large, decoded.updates)
        text = f"{share} came out too large, up to {ratio:.3g} times the right one"
        yield error("over-weighted", text)


def _why_small(decoded: DecodedScenario, update: DecodedUpdate) -> str:
    n = decoded.accumulate_of(update)
    size = f"{update.ratio:.3g} of the right update"
    for factor in update.factors.values():
        if not is_near(factor, 1 / n):
            return size
    return f"{plural(len(update.fetches), 'micro-batch')} divided by N = {n} gave {size}"


def _mean_of_means(decoded: DecodedScenario) -> Iterator[Finding]:
    uneven = [update for update in decoded.updates if update.distortion > 1 + TOLERANCE]
    if not uneven:
        return
    unit, where = "sample", "its micro-batch"
    if decoded.scenario.token_weights:
        unit = "token"
    if all(map(_is_even_on_ranks, uneven)):
        where = "its rank's window"
    worst = max(update.distortion for update in uneven)
    much = f"by a factor of up to {worst:.3g}"
    if math.isinf(worst):
        much = "without bound"
    share = share_of_updates(uneven, decoded.updates)
    text = f"in {share}, a {unit}'s weight depends on how many {unit}s {where} has, "
    yield error("mean of means", f"{text}and differs from that in the full batch {much}")


def _is_even_on_ranks(update: DecodedUpdate) -> bool:
    """Whether weights are right within each rank, though its micro-batches differ in tokens."""
    ratios: dict[int, list[float]] = {}
    tokens: dict[int, Counter[int]] = {}
    for use, coefficient in update.coefficients.items():
        ratios.setdefault(use.rank, []).append(coefficient / update.right[use])
        tokens.setdefault(use.rank, Counter())[use.fetch] += use.tokens
    are_even = True
    for rank, of_rank in ratios.items():
        if not is_near(max(of_rank), min(of_rank)):
            return False
        are_even = are_even and len(set(tokens[rank].values())) == 1
    return not are_even


def _left_open(decoded: DecodedScenario) -> Iterator[Finding]:
    if not decoded.left_open or decoded.failure:
        return
    level = Level.GOOD
    if decoded.scenario.max_steps is None:
        level = Level.NOTE
    text = f"{samples_text(decoded.left_open)} at the end of training reached no update"
    yield Finding(level, "left open", text)


def _repeated(decoded: DecodedScenario) -> Iterator[Finding]:
    padding = min(len(decoded.repeated), decoded.num_padding)
    again = decoded.repeated[padding:]
    if again:
        text = f"{samples_text(again)} trained on twice: the loader started over"
        yield error("repeated", text)
    if padding:
        yield good("padded", f"{plural(padding, 'sample')} repeated on another rank as padding")


def _never_fetched(decoded: DecodedScenario) -> Iterator[Finding]:
    scenario = decoded.scenario
    if decoded.stopped != "ended":
        return
    dropped = min(decoded.num_never_fetched, decoded.num_dropped)
    if dropped:
        options = ("drop_last", "sampler_drop_last", "limit_batches")
        given = [name for name in options if getattr(scenario, name)]
        text = f"{plural(dropped, 'sample')} left out by {' and '.join(given)}, over all epochs"
        yield good("dropped", text)
    missing = decoded.num_never_fetched - dropped
    if missing:
        level = Level.ERROR
        if scenario.fault is Fault.NONE:
            level = Level.NOTE
        text = f"{plural(missing, 'sample')} never trained on, over all epochs"
        yield Finding(level, "skipped", text)


def _limit(decoded: DecodedScenario) -> Iterator[Finding]:
    scenario, taken = decoded.scenario, len(decoded.updates)
    limit = scenario.max_steps
    if limit is None or decoded.stopped != "ended" or taken == limit:
        return
    updates, fetched = plural(taken, "update"), decoded.num_micro_batches
    if taken > limit:
        word = "stops late"
    elif scenario.epochs and fetched >= scenario.epochs * scenario.micro_batches_per_epoch:
        text = f"the epochs ended after {updates}, before max_steps = {limit}"
        yield good("epochs end first", text)
        return
    else:
        word = "stops early"
    after = f"{updates} and {plural(fetched, 'micro-batch')}"
    yield error(word, f"max_steps = {limit} stopped training after {after}")


def _counters(decoded: DecodedScenario) -> Iterator[Finding]:
    """Whether what the framework counts or foresees is the number of updates."""
    if decoded.failure:
        return
    taken, reported, fault = len(decoded.updates), decoded.reported, decoded.scenario.fault
    observed = f"but {plural(taken, 'update')} were observed"
    if taken == 1:
        observed = "but 1 update was observed"
    yield from _step_counters(decoded, observed)
    estimate = reported.get("trainer.estimated_stepping_batches", taken)
    if estimate != taken and fault is Fault.NONE and decoded.scenario.max_steps is None:
        text = f"trainer.estimated_stepping_batches = {estimate}, {observed}"
        yield note("misestimated", text)
    calls = reported.get("on_before_optimizer_step", taken)
    if calls > taken and fault not in RESTARTS:
        text = f"on_before_optimizer_step was called {calls} times for {plural(taken, 'update')}"
        yield note("hooks too often", text)


def _step_counters(decoded: DecodedScenario, observed: str) -> Iterator[Finding]:
    taken, fault = len(decoded.updates), decoded.scenario.fault
    since = taken
    if fault is Fault.EXCEPTION and decoded.first["faults"]:
        raised_after = decoded.first["faults"][0]
        since = sum(update.losses_before > raised_after for update in decoded.updates)
    anew: dict[str, int] = {}
    wrong: dict[str, int] = {}
    for name in STEP_COUNTERS:
        if name == SCHEDULER_COUNTER and fault in RESTARTS:
            continue
        value = decoded.reported.get(name, taken)
        if value == taken:
            continue
        if value == since:
            anew[name] = value
        else:
            wrong[name] = value
    if anew:
        text = "it counts from 0 again when training is started again after the exception"
        yield note("counted anew", f"{counters_text(anew)}: {text}")
    if wrong:
        yield error("miscounted", f"{counters_text(wrong)}, {observed}")


def _empty_steps(decoded: DecodedScenario) -> Iterator[Finding]:
    """Steps of the inner optimizer that changed nothing, apart from those of a restart."""
    of_restart, others = 0, 0
    for update in decoded.all_updates:
        if update.coefficients:
            continue
        if update.is_of_restart:
            of_restart += update.num_inner_steps
        else:
            others += update.num_inner_steps
    what = "of the inner optimizer changed nothing"
    if of_restart:
        yield good("empty step", f"{plural(of_restart, 'step')} {what}{OPTIMIZER_STATE}")
    if others:
        yield error("empty step", f"{plural(others, 'step')} {what}")


def _shuffled(decoded: DecodedScenario) -> Iterator[Finding]:
    scenario = decoded.scenario
    if scenario.split is not Split.FRAMEWORK:
        return
    offered: list[set[int]] = []  # by micro-batch, on all ranks together
    for together in zip(*map(scenario.offered, range(scenario.world_size)), strict=True):
        offered.append(set(chain(*together)))
    for use in decoded.uses.values():
        if use.sample not in offered[use.fetch % scenario.micro_batches_per_epoch]:
            text = "the framework shuffled the samples when it split them, "
            yield note("shuffled", f"{text}although the loader was in order")
            return


RULES: tuple[Callable[[DecodedScenario], Iterator[Finding]], ...] = (
    _outcome,
    divided_twice,
    _last_only,
    _too_early,
    _not_cleared,
    _mixed_epochs,
    _lost,
    _cleared,
    _wrong_sum,
    hidden_by_clipping,
    _too_late,
    _mean_of_means,
    _limit,
    _counters,
    _repeated,
    _left_open,
    _never_fetched,
    _empty_steps,
    _shuffled,
)
"""In the order in which findings of one level are listed."""
