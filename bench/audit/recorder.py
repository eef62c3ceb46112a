"""One rank's part in a scenario: it trains the decoder and records what passes the three taps."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.audit.decoded_scenario import FailureRecord, FetchRecord, RankRecord
from bench.audit.job import AuditedTrainer, ScenarioJob, evaluate
from bench.audit.scenario import RESTART, Fault, Reduction, Scenario, Split
from bench.backends.base import Backend
from bench.launch.rank import failure as failure_of
from bench.measure.taps import EventKind, Taps
from bench.plan.cell import Cell, Device

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

LETTERS = {EventKind.FETCH: "F", EventKind.LOSS: "L", EventKind.STEP: "S"}
"""A fetch, a loss, and an inner optimizer step, as they are recorded."""


class MicroBatchError(RuntimeError):
    """The exception of a scenario, raised in the loss of a micro-batch."""


class _BoundReached(Exception):  # noqa: N818 - no error: it stops a training that would not end
    """A micro-batch was requested after all that the scenario can need."""


class _Saved(Exception):  # noqa: N818 - no error: it stops the first half of a training
    """The checkpoint is written."""


class _SamplerPart:
    """A part of a sampler's positions, from the second pass on without its start skipped."""

    def __init__(self, sampler: Iterable[int], skip: int, limit: int) -> None:
        self._positions, self._skip = list(sampler)[:limit], skip

    def __len__(self) -> int:
        return len(self._positions) - self._skip

    def __iter__(self) -> Iterator[int]:
        start, self._skip = self._skip, 0
        return iter(self._positions[start:])


class Audit:
    """One scenario under one backend on one rank."""

    def __init__(
        self,
        scenario: Scenario,
        backend: type[Backend],
        number: int,
        device: torch.device,
        folder: Path,
    ) -> None:
        from bench.audit.decoder import DecoderWorkload

        self.scenario, self.backend_class = scenario, backend
        self.rank, self.device, self.folder = number, device, folder
        self.num_slots = scenario.world_size * scenario.slots_per_rank
        num_shares = scenario.accumulate[0] * scenario.world_size
        self.workload = DecoderWorkload(self.num_slots, scenario.reduction, num_shares)
        self.backend: Backend
        self.taps = Taps(time.perf_counter)
        self.weights = self.workload.model().state_dict()
        self.fetches: list[FetchRecord] = []
        self.losses: list[int] = []
        self.faults: list[int] = []
        self.changes: list[dict[int, float]] = []
        self.digests: list[str] = []
        self.schedulers: list[LRScheduler] = []
        self.first_epoch = self.skip = 0
        """Where a resumed training goes on: the epoch, and the micro-batches of it that the loader
        skips."""
        self.restart: int | None = None
        """The number of events before the checkpoint."""
        self.is_resuming = False
        self.error: Exception | None = None
        self._first_sample: int | None = None
        self._epoch = -1
        self._read_upto = 0

    def run(self) -> RankRecord:
        """What happened."""
        stopped = "ended"
        failure: FailureRecord | None = None
        try:
            self._train()
            self._read()
        except _BoundReached:
            stopped = "bound"
        except Exception as error:
            self.error = error
            stopped, failure = "failed", _failure_record(error)
        reported: dict[str, int] = {}
        with suppress(Exception):  # a framework that failed early may have no counters
            reported = self.backend.reported()
        if self.schedulers:
            reported["lr_scheduler.last_epoch"] = self.schedulers[-1].last_epoch
        return {
            "scenario": self.scenario.name,
            "stopped": stopped,
            "failure": failure,
            "own_slots": self.scenario.slots_per_rank,
            "fetches": self.fetches,
            "losses": self.losses,
            "faults": self.faults,
            "events": self._events(),
            "changes": [sorted(change.items()) for change in self.changes],
            "digests": self.digests,
            "reported": reported,
        }

    def _train(self) -> None:
        """Train, and train again after the scenario's fault."""
        self.backend = self.backend_class()
        try:
            self.backend.train(self._job())
        except MicroBatchError:
            self.first_epoch = self._epoch
            self.backend.continue_training(self._job())
        except _Saved:
            self.is_resuming, self._epoch = True, self.first_epoch
            self.backend = self.backend_class()
            self.backend.train(self._job(resume=self.folder))

    def _events(self) -> str:
        letters = [LETTERS[event.kind] for event in self.taps.events]
        if self.restart is not None:
            letters.insert(self.restart, RESTART)
        return "".join(letters)

    def _job(self, resume: Path | None = None) -> ScenarioJob:
        import torch

        scenario = self.scenario
        cell = Cell(
            backend=self.backend_class.name,
            accumulate=scenario.accumulate[0],
            world_size=scenario.world_size,
            global_batch_size=scenario.batch_size * scenario.accumulate[0] * scenario.world_size,
            sequence_length=1,
            workload="decoder",
            model=str(self.num_slots),
            device=Device(self.device.type),
            replicate=self.backend_class.replicate,
        )

        def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
            return self.taps.optimizer(torch.optim.SGD(parameters, lr=1.0))

        def scheduler(optimizer: Optimizer) -> LRScheduler:
            self.schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
            return self.schedulers[-1]

        return ScenarioJob(
            cell=cell,
            rank=self.rank,
            world_size=scenario.world_size,
            device=self.device,
            windows=math.ceil(scenario.bound / scenario.accumulate[0]),
            accumulate=scenario.accumulate[0],
            block_parameters=self.num_slots,
            num_parameters=self.num_slots,
            build=self._build,
            blocks=self.workload.blocks,
            loader=self._loader(limit=scenario.micro_batches_per_epoch),
            scenario=scenario,
            whole=self._loader(),
            first_epoch=self.first_epoch,
            loss=self._loss,
            optimizer=optimizer,
            keep_parameters=True,
            clip_norm=scenario.clip_norm,
            scheduler=scheduler,
            resume=resume,
            validate=self._validate,
            epoch_ended=self._end_epoch,
        )

    def _build(self) -> nn.Module:
        """A new model with the current weights."""
        model = self.workload.model()
        model.load_state_dict(self.weights)
        return model.to(self.device)

    def _loader(self, limit: int | None = None) -> DataLoader[int]:
        """A DataLoader over the numbers of samples, tapped where it collates.

        With a limit, of this rank's samples in that many micro-batches, without those that a
        resumed training skips. Otherwise of all samples of this rank, or of all ranks if the
        framework splits them.
        """
        from torch.utils.data import DataLoader, DistributedSampler

        scenario = self.scenario
        data: Any = range(scenario.samples)
        sampler: Iterable[int] | None = None
        if limit or scenario.split is Split.GIVEN:
            sampler = DistributedSampler(
                data,
                scenario.world_size,
                self.rank,
                shuffle=False,
                drop_last=scenario.sampler_drop_last,
            )
            if limit:
                skipped = self.skip * scenario.batch_size
                sampler = _SamplerPart(sampler, skipped, limit * scenario.batch_size)
        return DataLoader(
            data,
            batch_size=scenario.batch_size,
            drop_last=scenario.drop_last,
            sampler=sampler,
            collate_fn=self._collate,
        )

    def _collate(self, samples: list[int]) -> Tensor:
        """A micro-batch of the decoder. Every fetch comes through here."""
        import torch

        self._read()
        if len(self.fetches) == self.scenario.bound:
            raise _BoundReached
        self._cause_fault()
        self._count_epochs(samples[0])
        scenario = self.scenario
        first_slot = self.rank * scenario.slots_per_rank
        first_slot += len(self.fetches) * scenario.largest_batch
        self.fetches.append({"epoch": self._epoch, "samples": samples})
        self.taps.record(EventKind.FETCH)
        of_window = 0
        if scenario.reduction is Reduction.WINDOW:
            of_window = self._tokens_of_window()
        rows = []
        for slot, sample in enumerate(samples, start=first_slot):
            rows.append((slot, scenario.tokens(sample), of_window))
        return torch.tensor(rows, device=self.device)

    def _count_epochs(self, sample: int) -> None:
        """Notice a new epoch, which begins with the same sample as the first one.

        A framework that splits the samples may shuffle them, so micro-batches are counted there. A
        resumed training goes on in the epoch of its checkpoint, even if its loader starts over.
        """
        if self.scenario.split is Split.FRAMEWORK:
            self._epoch = len(self.fetches) // self.scenario.micro_batches_per_epoch
        elif self.is_resuming:
            self.is_resuming = False
        elif self._first_sample in {None, sample}:
            self._first_sample = sample
            self._epoch += 1

    def _tokens_of_window(self) -> int:
        """Tokens on all ranks in the complete window of the newest micro-batch."""
        scenario = self.scenario
        size = scenario.accumulate_in(self._epoch) * scenario.batch_size * scenario.world_size
        of_epoch = sum(fetch["epoch"] == self._epoch for fetch in self.fetches)
        start = (of_epoch - 1) // scenario.accumulate_in(self._epoch) * size
        return sum(scenario.tokens(sample) for sample in range(start, start + size))

    def _loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        # A loader that fetches ahead does not fetch between an epoch's last two updates.
        self._read()
        scenario = self.scenario
        slot = int(batch[0, 0]) - self.rank * scenario.slots_per_rank
        number = slot // scenario.largest_batch
        raises = scenario.fault is Fault.EXCEPTION and number + 1 == scenario.at
        if raises and not self.faults:
            self.workload.loss(model, batch)
            self.faults.append(len(self.losses))
            raise MicroBatchError(f"micro-batch {scenario.at} of the scenario raises")
        self.losses.append(number)
        return self.taps.loss(self.workload.loss)(model, batch)

    def _cause_fault(self) -> None:
        """Cause the scenario's fault, if it happens before the next micro-batch."""
        scenario, fetched = self.scenario, len(self.fetches)
        if scenario.fault is Fault.VALIDATION and fetched and fetched % scenario.at == 0:
            if not isinstance(self.backend, AuditedTrainer):  # which validates by itself
                evaluate(self.backend, self._validate)
        elif fetched == scenario.at and not self.faults:
            if scenario.fault is Fault.ZERO_GRAD:
                self.faults.append(len(self.losses))
                self.backend.zero_grad()
            elif scenario.fault is Fault.CHECKPOINT:
                self._save()

    def _save(self) -> None:
        """Write a checkpoint and stop the training."""
        self.faults.append(len(self.losses))
        self.restart = len(self.taps.events)
        per_epoch = self.scenario.micro_batches_per_epoch
        epoch, seen = divmod(self.scenario.at, per_epoch)
        skip = self.backend.save(self.folder, seen, self.scenario.accumulate[0])
        self.first_epoch, self.skip = divmod(epoch * per_epoch + skip, per_epoch)
        raise _Saved

    def _end_epoch(self) -> None:
        """Called where the framework writes the checkpoint of an epoch."""
        scenario = self.scenario
        is_due = scenario.fault is Fault.CHECKPOINT and len(self.fetches) == scenario.at
        if is_due and not self.faults:
            self._read()
            self._save()

    def _validate(self, model: nn.Module) -> None:
        """Evaluate the model on the first sample of all, outside of the taps."""
        import torch

        self.faults.append(len(self.losses))
        self.workload.loss(model, torch.tensor([(0, 1, 1)], device=self.device))

    def _read(self) -> None:
        """Record what the last update changed, if there was one since the last call. Collective."""
        from bench.audit.decoder import PARAMETER

        new = self.taps.events[self._read_upto :]
        self._read_upto += len(new)
        if not any(event.kind is EventKind.STEP for event in new):
            return
        after = self.backend.full_parameters()[PARAMETER].detach().float().cpu().clone()
        change = (self.weights[PARAMETER] - after).double()
        self.weights = {PARAMETER: after}
        self.digests.append(hashlib.sha256(after.numpy().tobytes()).hexdigest()[:12])
        slots = change.nonzero().flatten()
        self.changes.append(dict(zip(slots.tolist(), change[slots].tolist(), strict=True)))


def _failure_record(error: Exception) -> FailureRecord:
    found = failure_of(error)
    return {
        "status": found["status"],
        "reason": found["reason"],
        "traceback": found["traceback"],
    }


def lost_record(scenario: Scenario, failure: FailureRecord) -> RankRecord:
    """The record of a scenario whose process group failed as a whole."""
    return {
        "scenario": scenario.name,
        "stopped": "lost",
        "failure": failure,
        "own_slots": scenario.slots_per_rank,
        "fetches": [],
        "losses": [],
        "faults": [],
        "events": "",
        "changes": [],
        "digests": [],
        "reported": {},
    }
