"""From what the ranks saw of a scenario to what was computed: coefficients of samples, updates, and plain facts.

A *use* is one sample in one micro-batch on one rank. The decoder (``bench.audit.decoder``) gives each use a weight
of its own, so an update is known as a coefficient per use, and every statement here is arithmetic on those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from bench.audit.scenario import Fault, Scenario


@dataclass(frozen=True, slots=True)
class Use:
    """One sample in one micro-batch on one rank."""

    rank: int
    fetch: int
    """The micro-batch's number on its rank, from 0."""
    epoch: int
    sample: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ReadUpdate:
    """One update of the parameters."""

    coefficients: Mapping[Use, float]
    num_losses: int
    """Micro-batches on each rank whose loss was computed since the update before."""
    behind: int
    """Losses computed on each rank before this update, in all."""
    clip_norm: float

    @property
    def sum(self) -> float:
        """Sum of the coefficients; 1 in a right update that is not clipped."""
        return math.fsum(self.coefficients.values())

    @cached_property
    def right(self) -> dict[Use, float]:
        """The coefficients that the big batch of the same uses would have: by tokens, then clipped."""
        tokens = sum(use.tokens for use in self.coefficients)
        shares = {use: use.tokens / tokens for use in self.coefficients}
        norm = math.sqrt(math.fsum(share**2 for share in shares.values()))
        scale = min(1.0, self.clip_norm / norm) if self.clip_norm and norm else 1.0
        return {use: share * scale for use, share in shares.items()}

    @property
    def right_sum(self) -> float:
        """The sum that the big batch of the same uses would have."""
        return math.fsum(self.right.values())

    @property
    def distortion(self) -> float:
        """The largest ratio of a use's share of the update to its share of the big batch; 1 if all are right.

        The shares of one sample may be too large or too small; the ratio is taken so that it is not below 1.
        """
        ratios = [(c / self.sum) / (self.right[use] / self.right_sum) for use, c in self.coefficients.items()]
        return max((max(ratio, 1 / ratio) if ratio > 0 else math.inf for ratio in ratios), default=1.0)

    @cached_property
    def factors(self) -> dict[int, float]:
        """By fetch: the coefficient that the micro-batch's own loss, its mean over ranks, has in the update.

        Right is 1 over their number. It is the sum over the uses of the micro-batch on all ranks, whatever their
        tokens, if its loss is a mean.
        """
        sums: dict[int, float] = {}
        for use, coefficient in self.coefficients.items():
            sums[use.fetch] = sums.get(use.fetch, 0.0) + coefficient
        return sums

    @property
    def fetches(self) -> list[int]:
        """The micro-batches that are in it, in order."""
        return sorted({use.fetch for use in self.coefficients})

    @property
    def epochs(self) -> list[int]:
        """The epochs that its uses are from, in order."""
        return sorted({use.epoch for use in self.coefficients})


class Reading:
    """What one backend computed in one scenario, from the records of its ranks (``bench.audit.observe.Audit.run``)."""

    def __init__(self, backend: str, scenario: Scenario, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.backend, self.scenario = backend, scenario
        self.first = ranks[0]
        self.failure: Mapping[str, Any] | None = next((r["failure"] for r in ranks if r["failure"]), None)
        self.stopped: str = self.first["stopped"]
        self.reported: Mapping[str, int] = self.first["reported"]
        self.uses = self._uses(ranks)
        self.all_updates = self._updates()
        self.diverged_at = self._diverged_at(ranks)

    def _uses(self, ranks: Sequence[Mapping[str, Any]]) -> dict[int, Use]:
        """All uses by their slot."""
        scenario = self.scenario
        found = {}
        for rank, record in enumerate(ranks):
            for number, fetch in enumerate(record["fetches"]):
                start = rank * record["own_slots"] + number * scenario.largest_batch
                for slot, sample in enumerate(fetch["samples"], start=start):
                    found[slot] = Use(rank, number, fetch["epoch"], sample, scenario.tokens(sample))
        return found

    def _updates(self) -> list[ReadUpdate]:
        """All updates in order; inner steps without a micro-batch in between are one (``taps.updates``)."""
        behind, numbers = 0, []
        for is_step, group in groupby(self.first["events"], key=lambda letter: letter == "S"):
            if is_step:
                numbers.append(behind)
            else:
                behind += sum(letter == "L" for letter in group)
        changes = self.first["changes"]
        return [
            ReadUpdate(
                coefficients={self.uses[slot]: value for slot, value in change},
                num_losses=number - before,
                behind=number,
                clip_norm=self.scenario.clip_norm,
            )
            for change, number, before in zip(changes, numbers, [0, *numbers], strict=False)
        ]

    @staticmethod
    def _diverged_at(ranks: Sequence[Mapping[str, Any]]) -> int | None:
        """The number, from 1, of the first update after which the ranks' parameters differ; None if there is none."""
        for number, digests in enumerate(zip(*(rank["digests"] for rank in ranks), strict=False), start=1):
            if len(set(digests)) > 1:
                return number
        return None

    @cached_property
    def updates(self) -> list[ReadUpdate]:
        """The updates that changed something."""
        return [update for update in self.all_updates if update.coefficients]

    @property
    def num_empty_steps(self) -> int:
        """Steps of the inner optimizer that changed nothing."""
        return len(self.all_updates) - len(self.updates)

    @cached_property
    def computed(self) -> list[int]:
        """The fetches whose loss was computed, in order."""
        return list(self.first["losses"])

    @cached_property
    def applied(self) -> set[Use]:
        """The uses that are in some update."""
        return {use for update in self.updates for use in update.coefficients}

    @cached_property
    def unapplied(self) -> list[Use]:
        """Uses that were fetched and are in no update, nor is their sample by another use of that epoch.

        Without those of the micro-batch in which the scenario raises: it has no gradient.
        """
        known = {(use.epoch, use.sample) for use in self.applied}
        raised = self.scenario.at - 1 if self.scenario.fault is Fault.EXCEPTION else -1
        return [use for use in self.uses.values() if use.fetch != raised and (use.epoch, use.sample) not in known]

    @cached_property
    def left_open(self) -> list[Use]:
        """Unapplied uses that came after the last update: of a window that nothing has closed."""
        behind = self.all_updates[-1].behind if self.all_updates else 0
        if self.scenario.fault is Fault.CHECKPOINT:  # what was open then, nothing could close
            behind = max([behind, *self.first["faults"]])
        last = self.computed[behind - 1] if behind else -1
        return [use for use in self.unapplied if use.fetch > last]

    @cached_property
    def lost(self) -> list[Use]:
        """Unapplied uses that came before an update, in which they should have been."""
        late = set(self.left_open)
        return [use for use in self.unapplied if use not in late]

    @cached_property
    def repeated(self) -> list[Use]:
        """Applied uses of a sample that was applied before in the same epoch: padding, or a loader that began again."""
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
        """Samples that the loader offers twice in the epochs that were fetched whole."""
        offered = [
            sample
            for rank in range(self.scenario.world_size)
            for part in self.scenario.offered(rank)
            for sample in part
        ]
        return (len(offered) - len(set(offered))) * (self.num_micro_batches // self.scenario.micro_batches)

    @property
    def num_dropped(self) -> int:
        """Samples that the loader's ``drop_last`` keeps from the epochs that should have been fetched whole."""
        offered = {
            sample
            for rank in range(self.scenario.world_size)
            for part in self.scenario.offered(rank)
            for sample in part
        }
        return (self.scenario.samples - len(offered)) * self._whole_epochs

    @property
    def num_never_fetched(self) -> int:
        """Samples that the epochs should have shown and did not; 0 if ``max_steps`` or a failure cut them short.

        Also 0 if only ``max_steps`` ends the training: then no epoch has to be whole.
        """
        cut = self.num_micro_batches < self._whole_epochs * self.scenario.micro_batches
        if self.failure or not self._whole_epochs or (self.scenario.max_steps is not None and cut):
            return 0
        aborted = 1 if self.scenario.fault is Fault.EXCEPTION else 0
        seen = {(use.epoch, use.sample) for use in self.uses.values() if use.epoch >= aborted}
        return self.scenario.samples * self._whole_epochs - len(seen)

    @property
    def _whole_epochs(self) -> int:
        """Epochs that a training that runs to its end fetches whole; 0 if only ``max_steps`` ends it."""
        return self.scenario.epochs or 0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that were fetched on each rank."""
        return len(self.first["fetches"])

    @property
    def weight_ratio(self) -> float | None:
        """The mean over all updates of the sum of coefficients, over the sum that the big batch would have."""
        if not self.updates:
            return None
        return math.fsum(update.sum / update.right_sum for update in self.updates) / len(self.updates)

    def to_dict(self) -> dict[str, Any]:
        """The observation as plain JSON, without a judgement; coefficients by sample, rounded to 7 digits.

        Of each update ``samples`` has the coefficients summed over epochs, ``by_epoch`` by epoch and sample, and
        ``relative`` the same over the coefficient that one use of the sample has in the big batch: 1 is right, and 2
        is a sample that is in the update twice. ``distortion`` is None if it is without bound. ``lost`` and
        ``left_open`` have the samples of ``samples_lost`` and ``samples_left_open`` by epoch, each once.
        """
        return {
            "backend": self.backend,
            "scenario": self.scenario.to_dict(),
            "updates": [
                {
                    "samples": _by_sample(update),
                    "sum": _rounded(update.sum),
                    "right_sum": _rounded(update.right_sum),
                    "epochs": update.epochs,
                    "micro_batches": update.num_losses,
                    "by_epoch": _by_epoch(update.coefficients),
                    "relative": _by_epoch({use: c / update.right[use] for use, c in update.coefficients.items()}),
                    "distortion": _rounded(update.distortion) if math.isfinite(update.distortion) else None,
                }
                for update in self.updates
            ],
            "optimizer_steps_observed": len(self.updates),
            "optimizer_steps_without_effect": self.num_empty_steps,
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


def _by_sample(update: ReadUpdate) -> dict[str, float]:
    """Coefficients by sample, all uses of one summed, in the samples' order."""
    sums: dict[int, float] = {}
    for use, coefficient in update.coefficients.items():
        sums[use.sample] = sums.get(use.sample, 0.0) + coefficient
    return {str(sample): _rounded(sums[sample]) for sample in sorted(sums)}


def _by_epoch(values: Mapping[Use, float]) -> dict[str, dict[str, float]]:
    """Values by epoch and sample, in order, those of several uses of a sample summed."""
    sums: dict[tuple[int, int], float] = {}
    for use, value in values.items():
        key = (use.epoch, use.sample)
        sums[key] = sums.get(key, 0.0) + value
    found: dict[str, dict[str, float]] = {}
    for epoch, sample in sorted(sums):
        found.setdefault(str(epoch), {})[str(sample)] = _rounded(sums[epoch, sample])
    return found


def _samples(uses: Sequence[Use]) -> dict[str, list[int]]:
    """The samples of uses by epoch, in order, each once."""
    found: dict[str, list[int]] = {}
    for epoch, sample in sorted({(use.epoch, use.sample) for use in uses}):
        found.setdefault(str(epoch), []).append(sample)
    return found


def _rounded(value: float) -> float:
    """Seven digits: what fp32 has."""
    return float(f"{value:.7g}")
