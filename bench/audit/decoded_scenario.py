"""From what ranks recorded of a scenario to what the backend computed: updates and coefficients.

A *use* is one sample in one micro-batch on one rank. The decoder (``bench.audit.decoder``) has one
weight per use, so an update is decoded into one coefficient per use, and everything below is
arithmetic on those coefficients.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NotRequired, TypedDict, TypeVar

from bench.audit.scenario import RESTART, Fault, Scenario

Key = TypeVar("Key")


class FetchRecord(TypedDict):
    """A micro-batch that a rank fetched."""

    epoch: int
    samples: list[int]


class FailureRecord(TypedDict):
    """How training failed on a rank, or the outcome of its process group."""

    status: str
    reason: str
    traceback: str


class RankRecord(TypedDict):
    """One rank's record of a scenario, as plain JSON."""

    scenario: str
    stopped: str
    """``ended``, ``failed``, ``bound`` if training would not have ended, or ``lost`` with its
    process group."""
    failure: FailureRecord | None
    own_slots: int
    """Slots of each rank (``Scenario.slots_per_rank``)."""
    fetches: list[FetchRecord]
    losses: list[int]
    """The fetch of each loss."""
    faults: list[int]
    """The number of losses before each fault."""
    events: str
    """The taps' events in order, one letter each (``recorder.LETTERS``), and RESTART."""
    changes: list[list[tuple[int, float]]]
    """For each update, the coefficients by slot."""
    digests: list[str]
    """Of all weights after each update, equal on all ranks if their replicas are."""
    reported: dict[str, int]
    """The framework's own counters."""
    unclipped: NotRequired[RankRecord]
    """In a scenario that clips: the record of the same training without."""


class UpdateRecord(TypedDict):
    """One update, as plain JSON; coefficients are rounded to 7 digits."""

    samples: dict[str, float]
    """Coefficients by sample."""
    sum: float
    right_sum: float
    epochs: list[int]
    micro_batches: int
    by_epoch: dict[str, dict[str, float]]
    """Coefficients by epoch and sample."""
    relative: dict[str, dict[str, float]]
    """The same divided by the coefficient of one use of the sample in a full batch: 1 is right, 2
    counts twice."""
    distortion: float | None
    """None where it has no bound."""


class ReportedFailure(TypedDict):
    """What an observation says of a failure."""

    status: str
    reason: str


class DecodedRecord(TypedDict):
    """What one backend computed in one scenario, as plain JSON, without findings."""

    backend: str
    scenario: dict[str, Any]
    """As from ``Scenario.to_dict``."""
    updates: list[UpdateRecord]
    optimizer_steps_observed: int
    optimizer_steps_without_effect: int
    steps_reported: dict[str, int]
    """The framework's own counters."""
    samples_lost: int
    samples_left_open: int
    samples_duplicated: int
    samples_never_fetched: int
    lost: dict[str, list[int]]
    """The samples counted in ``samples_lost``, by epoch, each once."""
    left_open: dict[str, list[int]]
    """The samples counted in ``samples_left_open``, likewise."""
    weight_ratio: float | None
    micro_batches: int
    stopped: str
    failure: ReportedFailure | None


@dataclass(frozen=True, slots=True)
class Use:
    """One sample in one micro-batch on one rank."""

    rank: int
    fetch: int
    """Index of the micro-batch on its rank, from 0."""
    epoch: int
    sample: int
    tokens: int

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and sample: what several uses may share."""
        return self.epoch, self.sample


@dataclass(frozen=True, kw_only=True)
class DecodedUpdate:
    """One update of the parameters."""

    coefficients: Mapping[Use, float]
    num_losses: int
    """Losses computed on each rank since the previous update."""
    losses_before: int
    """Losses computed on each rank before this update, in total."""
    num_inner_steps: int
    """Steps of the inner optimizer that it consists of."""
    is_of_restart: bool
    """Whether no micro-batch lies between these steps and the checkpoint."""
    clip_norm: float

    @property
    def sum(self) -> float:
        """Sum of the coefficients; 1 in a right update that is not clipped."""
        return math.fsum(self.coefficients.values())

    @cached_property
    def right(self) -> dict[Use, float]:
        """The coefficients in a full batch of the same uses: by tokens, then clipped."""
        tokens = sum(use.tokens for use in self.coefficients)
        shares = {use: use.tokens / tokens for use in self.coefficients}
        norm = math.sqrt(math.fsum(share**2 for share in shares.values()))
        if self.clip_norm and norm > self.clip_norm:
            scale = self.clip_norm / norm
            return {use: share * scale for use, share in shares.items()}
        return shares

    @property
    def right_sum(self) -> float:
        return math.fsum(self.right.values())

    @property
    def ratio(self) -> float:
        """Sum of the coefficients over the right sum."""
        return self.sum / self.right_sum

    @property
    def distortion(self) -> float:
        """By what factor a use's share is off at most, up or down; 1 if every share is right."""
        whole, right_whole = self.sum, self.right_sum
        worst = 1.0
        for use, coefficient in self.coefficients.items():
            factor = (coefficient / whole) / (self.right[use] / right_whole)
            if not factor > 0:
                return math.inf
            worst = max(worst, factor, 1 / factor)
        return worst

    @cached_property
    def factors(self) -> dict[int, float]:
        """Coefficient of each micro-batch's loss, averaged over ranks, by fetch.

        Right is 1 over their number.
        Where a loss is a mean, this is the sum over the uses of the micro-batch on all ranks,
        whatever their tokens.
        """
        return _totals(self.coefficients, lambda use: use.fetch)

    @property
    def fetches(self) -> list[int]:
        """Its micro-batches, in order."""
        return sorted(self.factors)

    @property
    def epochs(self) -> list[int]:
        """The epochs of its samples, in order."""
        return sorted({use.epoch for use in self.coefficients})

    def to_record(self) -> UpdateRecord:
        totals = _totals(self.coefficients, lambda use: use.sample)
        samples = {}
        for sample, value in sorted(totals.items()):
            samples[str(sample)] = _rounded(value)
        relative = {}
        for use, value in self.coefficients.items():
            relative[use] = value / self.right[use]
        distortion = None
        if math.isfinite(self.distortion):
            distortion = _rounded(self.distortion)
        return {
            "samples": samples,
            "sum": _rounded(self.sum),
            "right_sum": _rounded(self.right_sum),
            "epochs": self.epochs,
            "micro_batches": self.num_losses,
            "by_epoch": _by_epoch(self.coefficients),
            "relative": _by_epoch(relative),
            "distortion": distortion,
        }


class DecodedScenario:
    """What one backend computed in one scenario, decoded from the records of its ranks."""

    def __init__(self, backend: str, scenario: Scenario, ranks: Sequence[RankRecord]) -> None:
        self.backend, self.scenario = backend, scenario
        self.ranks, self.first = ranks, ranks[0]
        self.failure = _first_failure(ranks)
        self.stopped = self.first["stopped"]
        self.reported = self.first["reported"]
        self.uses = self._uses()
        self.all_updates = self._updates()
        self.unclipped: DecodedScenario | None = None
        """The same training without clipping, if the scenario clips."""
        if "unclipped" in self.first:
            free = dataclasses.replace(scenario, clip_norm=0.0)
            records = [record["unclipped"] for record in ranks]
            self.unclipped = DecodedScenario(backend, free, records)

    def _uses(self) -> dict[int, Use]:
        """The uses of samples by slot."""
        found = {}
        for rank, record in enumerate(self.ranks):
            for number, fetch in enumerate(record["fetches"]):
                start = rank * record["own_slots"] + number * self.scenario.largest_batch
                for slot, sample in enumerate(fetch["samples"], start=start):
                    tokens = self.scenario.tokens(sample)
                    found[slot] = Use(rank, number, fetch["epoch"], sample, tokens)
        return found

    def _updates(self) -> list[DecodedUpdate]:
        """All updates; inner steps with no micro-batch in between are one (``taps.updates``)."""
        found: list[DecodedUpdate] = []
        events = self.first["events"]
        changes = iter(self.first["changes"])
        losses_so_far = 0
        for steps in re.finditer("S+", events):
            change = next(changes, None)
            if change is None:  # training failed before it was read
                break
            before = events[: steps.start()]
            losses_before = before.count("L")
            found.append(
                DecodedUpdate(
                    coefficients={self.uses[slot]: value for slot, value in change},
                    num_losses=losses_before - losses_so_far,
                    losses_before=losses_before,
                    num_inner_steps=len(steps[0]),
                    is_of_restart=before.endswith(RESTART),
                    clip_norm=self.scenario.clip_norm,
                )
            )
            losses_so_far = losses_before
        return found

    @cached_property
    def diverged_at(self) -> int | None:
        """The first update, from 1, after which the ranks' parameters differ; None if none does."""
        by_rank = [rank["digests"] for rank in self.ranks]
        for number, digests in enumerate(zip(*by_rank, strict=False), start=1):
            if len(set(digests)) > 1:
                return number
        return None

    @cached_property
    def updates(self) -> list[DecodedUpdate]:
        """The updates that changed something."""
        return [update for update in self.all_updates if update.coefficients]

    @cached_property
    def computed(self) -> list[int]:
        """The fetches whose loss was computed, in order."""
        return list(self.first["losses"])

    def last_fetch(self, update: DecodedUpdate) -> int:
        """The last micro-batch before an update."""
        return self.computed[update.losses_before - 1]

    def accumulate_of(self, update: DecodedUpdate) -> int:
        """N in the epoch of the last sample of an update."""
        return self.scenario.accumulate_in(update.epochs[-1])

    @cached_property
    def applied(self) -> set[Use]:
        """The uses that are in some update."""
        found: set[Use] = set()
        for update in self.updates:
            found |= update.coefficients.keys()
        return found

    @cached_property
    def unapplied(self) -> list[Use]:
        """Uses in no update, whose sample is in no update of that epoch by another use either.

        Those of the micro-batch that raises are left out: it has no gradient.
        """
        known = {use.place for use in self.applied}
        raised = None
        if self.scenario.fault is Fault.EXCEPTION:
            raised = self.scenario.at - 1
        found = []
        for use in self.uses.values():
            if use.fetch == raised:
                continue
            if use.place not in known:
                found.append(use)
        return found

    @cached_property
    def left_open(self) -> list[Use]:
        """Unapplied uses after the last update: those of a window that was never completed."""
        closed = 0
        if self.all_updates:
            closed = self.all_updates[-1].losses_before
        if self.scenario.fault is Fault.CHECKPOINT:  # what was open there could have been kept
            closed = max([closed, *self.first["faults"]])
        if not closed:
            return self.unapplied
        last = self.computed[closed - 1]
        return [use for use in self.unapplied if use.fetch > last]

    @cached_property
    def lost(self) -> list[Use]:
        """Unapplied uses before an update that should have contained them."""
        late = set(self.left_open)
        return [use for use in self.unapplied if use not in late]

    @cached_property
    def interrupted(self) -> set[int]:
        """Fetches in the window that a fault interrupted, and those an exception left unused."""
        if not self.first["faults"]:
            return set()
        at = self.first["faults"][0]
        opened = 0
        for update in self.updates:
            if update.losses_before <= at:
                opened = max(opened, update.losses_before)
        found = set(self.computed[opened:at])
        if self.scenario.fault is Fault.EXCEPTION:
            found |= set(range(self.num_micro_batches)) - set(self.computed)
        return found

    @property
    def aborted_epoch(self) -> int | None:
        """The epoch that an exception ended, if one did; it is trained again as the next one."""
        if self.scenario.fault is not Fault.EXCEPTION or not self.first["faults"]:
            return None
        return self.first["fetches"][self.scenario.at - 1]["epoch"]

    @cached_property
    def repeated(self) -> list[Use]:
        """Applied uses of a sample already applied in the epoch: padding, or a restarted loader."""
        seen: set[tuple[int, int]] = set()
        again = []
        for use in sorted(self.applied, key=lambda use: (use.fetch, use.rank)):
            if use.place in seen:
                again.append(use)
            seen.add(use.place)
        return again

    @property
    def num_padding(self) -> int:
        """Samples that the loaders offer twice, over the epochs that were fetched completely."""
        offered = self.scenario.offered_by_all
        whole_epochs = self.num_micro_batches // self.scenario.micro_batches_per_epoch
        return (len(offered) - len(set(offered))) * whole_epochs

    @property
    def num_dropped(self) -> int:
        """Samples that ``drop_last`` or ``limit_batches`` leave out, over all epochs."""
        if self.scenario.epochs is None:
            return 0
        offered = set(self.scenario.offered_by_all)
        return (self.scenario.samples - len(offered)) * self.scenario.epochs

    @property
    def num_never_fetched(self) -> int:
        """Samples never fetched, over all epochs; 0 if ``max_steps`` or a failure came first."""
        epochs = self.scenario.epochs
        if self.failure or epochs is None:
            return 0
        is_cut = self.num_micro_batches < epochs * self.scenario.micro_batches_per_epoch
        if is_cut and self.scenario.max_steps is not None:
            return 0
        seen = {use.place for use in self.uses.values() if use.epoch != self.aborted_epoch}
        return self.scenario.samples * epochs - len(seen)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches fetched on each rank."""
        return len(self.first["fetches"])

    @property
    def weight_ratio(self) -> float | None:
        """Mean of ``DecodedUpdate.ratio`` over the updates; None without an update."""
        if not self.updates:
            return None
        return math.fsum(update.ratio for update in self.updates) / len(self.updates)

    @property
    def num_empty_steps(self) -> int:
        """Inner steps that changed nothing."""
        number = 0
        for update in self.all_updates:
            if not update.coefficients:
                number += update.num_inner_steps
        return number

    def to_record(self) -> DecodedRecord:
        """The observation without findings."""
        weight_ratio = self.weight_ratio
        if weight_ratio is not None:
            weight_ratio = _rounded(weight_ratio)
        failure: ReportedFailure | None = None
        if self.failure is not None:
            failure = {"status": self.failure["status"], "reason": self.failure["reason"]}
        return {
            "backend": self.backend,
            "scenario": self.scenario.to_dict(),
            "updates": [update.to_record() for update in self.updates],
            "optimizer_steps_observed": len(self.updates),
            "optimizer_steps_without_effect": self.num_empty_steps,
            "steps_reported": dict(self.reported),
            "samples_lost": len(self.lost),
            "samples_left_open": len(self.left_open),
            "samples_duplicated": len(self.repeated),
            "samples_never_fetched": self.num_never_fetched,
            "lost": _samples(self.lost),
            "left_open": _samples(self.left_open),
            "weight_ratio": weight_ratio,
            "micro_batches": self.num_micro_batches,
            "stopped": self.stopped,
            "failure": failure,
        }


def _first_failure(ranks: Sequence[RankRecord]) -> FailureRecord | None:
    for rank in ranks:
        if rank["failure"]:
            return rank["failure"]
    return None


def _totals(values: Mapping[Use, float], key: Callable[[Use], Key]) -> dict[Key, float]:
    """Sums of the values of those uses that have the same key."""
    sums: dict[Key, float] = {}
    for use, value in values.items():
        sums[key(use)] = sums.get(key(use), 0.0) + value
    return sums


def _by_epoch(values: Mapping[Use, float]) -> dict[str, dict[str, float]]:
    """Values by epoch and sample, in order; several uses of a sample are summed."""
    found: dict[str, dict[str, float]] = {}
    for (epoch, sample), value in sorted(_totals(values, lambda use: use.place).items()):
        found.setdefault(str(epoch), {})[str(sample)] = _rounded(value)
    return found


def _samples(uses: Sequence[Use]) -> dict[str, list[int]]:
    """Samples by epoch, each once."""
    found: dict[str, list[int]] = {}
    for epoch, sample in sorted({use.place for use in uses}):
        found.setdefault(str(epoch), []).append(sample)
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
