"""From what the ranks recorded of a scenario to what the backend computed: updates, coefficients, and lost samples.

A *use* is one sample in one micro-batch on one rank. The decoder (``bench.audit.decoder``) has one weight per use, so
an update is decoded into one coefficient per use, and everything below is arithmetic on those coefficients.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from bench.audit.scenario import RESTART, Fault, Scenario
from bench.grouping import grouped

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Use:
    """One sample in one micro-batch on one rank."""

    rank: int
    fetch: int
    """Index of the micro-batch on its rank, from 0."""
    epoch: int
    sample: int
    tokens: int


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
        """The coefficients in the update that a full batch of the same uses gives: by tokens, then clipped."""
        tokens = sum(use.tokens for use in self.coefficients)
        norm = math.sqrt(math.fsum((use.tokens / tokens) ** 2 for use in self.coefficients))
        scale = min(1.0, self.clip_norm / norm) if self.clip_norm and norm else 1.0
        return {use: use.tokens / tokens * scale for use in self.coefficients}

    @property
    def right_sum(self) -> float:
        return math.fsum(self.right.values())

    @property
    def ratio(self) -> float:
        """Sum of the coefficients over the right sum."""
        return self.sum / self.right_sum

    @property
    def distortion(self) -> float:
        """By what factor a use's share of the update is off at most, in either direction; 1 if every share is right."""
        ratios = [(c / self.sum) / (self.right[use] / self.right_sum) for use, c in self.coefficients.items()]
        return max((max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in ratios), default=1.0)

    @cached_property
    def factors(self) -> dict[int, float]:
        """Coefficient of each micro-batch's loss, averaged over ranks, by fetch; right is 1 over their number.

        Where a loss is a mean, this is the sum over the uses of the micro-batch on all ranks, whatever their tokens.
        """
        return _totals((use.fetch, coefficient) for use, coefficient in self.coefficients.items())

    @property
    def fetches(self) -> list[int]:
        """Its micro-batches, in order."""
        return sorted({use.fetch for use in self.coefficients})

    @property
    def epochs(self) -> list[int]:
        """The epochs of its samples, in order."""
        return sorted({use.epoch for use in self.coefficients})

    def to_dict(self) -> dict[str, Any]:
        samples = _totals((use.sample, coefficient) for use, coefficient in self.coefficients.items())
        return {
            "samples": {str(sample): _rounded(samples[sample]) for sample in sorted(samples)},
            "sum": _rounded(self.sum),
            "right_sum": _rounded(self.right_sum),
            "epochs": self.epochs,
            "micro_batches": self.num_losses,
            "by_epoch": _by_epoch(self.coefficients),
            "relative": _by_epoch({use: c / self.right[use] for use, c in self.coefficients.items()}),
            "distortion": _rounded(self.distortion) if math.isfinite(self.distortion) else None,
        }


class DecodedScenario:
    """What one backend computed in one scenario, decoded from the records of its ranks (``recorder.Audit.run``)."""

    def __init__(self, backend: str, scenario: Scenario, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.backend, self.scenario = backend, scenario
        self.ranks, self.first = ranks, ranks[0]
        self.failure: Mapping[str, Any] | None = next((r["failure"] for r in ranks if r["failure"]), None)
        self.stopped: str = self.first["stopped"]
        self.reported: Mapping[str, int] = self.first["reported"]
        self.uses = self._uses()
        self.all_updates = self._updates()
        self.unclipped: DecodedScenario | None = None
        """The same training without clipping, if the scenario clips."""
        if "unclipped" in self.first:
            free = dataclasses.replace(scenario, clip_norm=0.0)
            self.unclipped = DecodedScenario(backend, free, [record["unclipped"] for record in ranks])

    def _uses(self) -> dict[int, Use]:
        scenario, found = self.scenario, {}
        for rank, record in enumerate(self.ranks):
            for number, fetch in enumerate(record["fetches"]):
                start = rank * record["own_slots"] + number * scenario.largest_batch
                for slot, sample in enumerate(fetch["samples"], start=start):
                    found[slot] = Use(rank, number, fetch["epoch"], sample, scenario.tokens(sample))
        return found

    def _updates(self) -> list[DecodedUpdate]:
        """All updates in order; inner steps with no micro-batch in between are one update (``taps.updates``)."""
        found: list[DecodedUpdate] = []
        changes = iter(self.first["changes"])
        for steps in re.finditer("S+", self.first["events"]):
            before = self.first["events"][: steps.start()]
            number, change = before.count("L"), next(changes, None)
            if change is None:  # training failed before it was read
                break
            found.append(
                DecodedUpdate(
                    coefficients={self.uses[slot]: value for slot, value in change},
                    num_losses=number - (found[-1].losses_before if found else 0),
                    losses_before=number,
                    num_inner_steps=len(steps[0]),
                    is_of_restart=before.endswith(RESTART),
                    clip_norm=self.scenario.clip_norm,
                )
            )
        return found

    @cached_property
    def diverged_at(self) -> int | None:
        """The first update, from 1, after which the ranks' parameters differ; None if they never do."""
        for number, digests in enumerate(zip(*(rank["digests"] for rank in self.ranks), strict=False), start=1):
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

    def closed_in(self, update: DecodedUpdate) -> int:
        """The epoch of the last micro-batch before an update."""
        return int(self.first["fetches"][self.computed[update.losses_before - 1]]["epoch"])

    @cached_property
    def applied(self) -> set[Use]:
        """The uses that are in some update."""
        return {use for update in self.updates for use in update.coefficients}

    @cached_property
    def unapplied(self) -> list[Use]:
        """Uses in no update, whose sample is in no update of that epoch by another use either.

        Those of the micro-batch that raises are left out: it has no gradient.
        """
        known = {(use.epoch, use.sample) for use in self.applied}
        raised = self.scenario.at - 1 if self.scenario.fault is Fault.EXCEPTION else -1
        return [use for use in self.uses.values() if use.fetch != raised and (use.epoch, use.sample) not in known]

    @cached_property
    def left_open(self) -> list[Use]:
        """Unapplied uses after the last update: those of a window that was never completed."""
        closed = self.all_updates[-1].losses_before if self.all_updates else 0
        if self.scenario.fault is Fault.CHECKPOINT:  # what was open at the checkpoint could still have been kept
            closed = max([closed, *self.first["faults"]])
        last = self.computed[closed - 1] if closed else -1
        return [use for use in self.unapplied if use.fetch > last]

    @cached_property
    def lost(self) -> list[Use]:
        """Unapplied uses before an update that should have contained them."""
        late = set(self.left_open)
        return [use for use in self.unapplied if use not in late]

    @cached_property
    def interrupted(self) -> set[int]:
        """The fetches in the window that was open when the fault happened, with those that an exception left unused."""
        if not self.first["faults"]:
            return set()
        at = self.first["faults"][0]
        opened = max((u.losses_before for u in self.updates if u.losses_before <= at), default=0)
        unused = set(range(self.num_micro_batches)) - set(self.computed)
        return set(self.computed[opened:at]) | (unused if self.scenario.fault is Fault.EXCEPTION else set())

    @property
    def aborted_epoch(self) -> int | None:
        """The epoch that an exception ended, if one did; it is trained again as the next one."""
        if self.scenario.fault is not Fault.EXCEPTION or not self.first["faults"]:
            return None
        return int(self.first["fetches"][self.scenario.at - 1]["epoch"])

    @cached_property
    def repeated(self) -> list[Use]:
        """Applied uses of a sample already applied in the same epoch: padding, or a loader that started over."""
        seen: set[tuple[int, int]] = set()
        again = []
        for use in sorted(self.applied, key=lambda use: (use.fetch, use.rank)):
            key = (use.epoch, use.sample)
            if key in seen:
                again.append(use)
            seen.add(key)
        return again

    @property
    def num_padding(self) -> int:
        """Samples that the loaders offer twice, over the epochs that were fetched completely."""
        offered = self.scenario.offered_by_all
        return (len(offered) - len(set(offered))) * (self.num_micro_batches // self.scenario.micro_batches_per_epoch)

    @property
    def num_dropped(self) -> int:
        """Samples that ``drop_last`` or ``limit_batches`` leave out, over all epochs."""
        return (self.scenario.samples - len(set(self.scenario.offered_by_all))) * (self.scenario.epochs or 0)

    @property
    def num_never_fetched(self) -> int:
        """Samples never fetched, over all epochs; 0 where ``max_steps`` or a failure ended the training early."""
        epochs = self.scenario.epochs or 0
        cut = self.num_micro_batches < epochs * self.scenario.micro_batches_per_epoch
        if self.failure or not epochs or (self.scenario.max_steps is not None and cut):
            return 0
        seen = {(use.epoch, use.sample) for use in self.uses.values() if use.epoch != self.aborted_epoch}
        return self.scenario.samples * epochs - len(seen)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches fetched on each rank."""
        return len(self.first["fetches"])

    @property
    def weight_ratio(self) -> float | None:
        """Mean of ``DecodedUpdate.ratio`` over the updates; None without an update."""
        return math.fsum(u.ratio for u in self.updates) / len(self.updates) if self.updates else None

    def to_dict(self) -> dict[str, Any]:
        """The observation as plain JSON, without findings; coefficients are rounded to 7 digits.

        In each update, ``samples`` has the coefficients by sample, ``by_epoch`` by epoch and sample, and ``relative``
        the same divided by the coefficient of one use of the sample in a full batch: 1 is right, 2 is a sample that
        counts twice. ``distortion`` is None where it has no bound. ``lost`` and ``left_open`` list the samples counted
        in ``samples_lost`` and ``samples_left_open``, by epoch, each once.
        """
        empty = (update for update in self.all_updates if not update.coefficients)
        return {
            "backend": self.backend,
            "scenario": self.scenario.to_dict(),
            "updates": [update.to_dict() for update in self.updates],
            "optimizer_steps_observed": len(self.updates),
            "optimizer_steps_without_effect": sum(update.num_inner_steps for update in empty),
            "steps_reported": dict(self.reported),
            "samples_lost": len(self.lost),
            "samples_left_open": len(self.left_open),
            "samples_duplicated": len(self.repeated),
            "samples_never_fetched": self.num_never_fetched,
            "lost": _samples(self.lost),
            "left_open": _samples(self.left_open),
            "weight_ratio": None if self.weight_ratio is None else _rounded(self.weight_ratio),
            "micro_batches": self.num_micro_batches,
            "stopped": self.stopped,
            "failure": self.failure and {key: self.failure[key] for key in ("status", "reason")},
        }


def _totals(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums


def _by_epoch(values: Mapping[Use, float]) -> dict[str, dict[str, float]]:
    """Values by epoch and sample, in order; several uses of a sample are summed."""
    found: dict[str, dict[str, float]] = {}
    for (epoch, sample), value in sorted(_totals(((u.epoch, u.sample), v) for u, v in values.items()).items()):
        found.setdefault(str(epoch), {})[str(sample)] = _rounded(value)
    return found


def _samples(uses: Sequence[Use]) -> dict[str, list[int]]:
    return grouped((str(epoch), sample) for epoch, sample in sorted({(use.epoch, use.sample) for use in uses}))


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
