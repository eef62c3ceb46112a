"""One rank's part in an audit: it trains the decoder in each scenario and records what passes the three taps.

The scenarios of a backend follow each other in one process group, each on a fresh build. A test compares the results
with those in process groups of their own.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.audit.job import ScenarioJob, audited
from bench.audit.scenario import Fault, Reduction, Scenario, Split
from bench.backends.base import Backend, registry
from bench.launch.rank import failure as failure_of
from bench.measure.taps import EventKind, Taps
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LETTERS = {EventKind.FETCH: "F", EventKind.LOSS: "L", EventKind.STEP: "S"}
"""A fetch, a loss, and an inner optimizer step, as they are recorded."""


@dataclass(kw_only=True)
class AuditTask(Task):
    """Scenarios for one backend, all with one world size."""

    work: ClassVar[str] = "bench.audit.observe:work"

    scenarios: tuple[Scenario, ...]


PEERS_S = 3.0
"""How long a rank that failed waits for the others to fail too, or to finish."""


class MicroBatchError(RuntimeError):
    """The exception of a scenario, raised in the loss of a micro-batch."""


class _BoundReached(Exception):  # noqa: N818 - no error: it stops a training that would not end
    """A micro-batch was requested after all that the scenario can need."""


class _Saved(Exception):  # noqa: N818 - no error: it stops the first half of a training
    """The checkpoint is written."""


def work(task: AuditTask, rank: int, device: torch.device) -> dict[str, Any]:
    """One rank's part; see ``bench.plan.task.Task``."""
    backend = audited(registry([task.backend])[task.backend])
    return {"status": Status.OK, "audits": [_audit(task, i, backend, rank, device) for i in range(len(task.scenarios))]}


def _audit(task: AuditTask, index: int, backend: type[Backend], number: int, device: torch.device) -> dict[str, Any]:
    """One scenario on this rank; see ``Audit.run``. All ranks share a folder for checkpoints.

    Raises the error of a scenario that failed on this rank only, since the other ranks wait for it in a collective.
    """
    import torch.distributed as dist

    gc.collect()  # frees the previous scenario, whose frameworks leave reference cycles
    checkpoints = Path(task.folder) / f"checkpoints-{index}"
    if number == 0:
        checkpoints.mkdir()
    dist.barrier()
    audit = Audit(task.scenarios[index], backend, number, device, checkpoints)
    found = audit.run()
    (Path(task.folder) / f"done-{index}-{number}").touch()
    if audit.error is not None and not _all_done(task, index):
        raise audit.error
    dist.barrier()
    return found


def _all_done(task: AuditTask, index: int) -> bool:
    """Whether all ranks finish a scenario or fail in it within ``PEERS_S``."""
    deadline = time.monotonic() + PEERS_S
    while time.monotonic() < deadline:
        if all((Path(task.folder) / f"done-{index}-{rank}").exists() for rank in range(task.world_size)):
            return True
        time.sleep(0.02)
    return False


class Audit:
    """One scenario under one backend on one rank."""

    def __init__(
        self, scenario: Scenario, backend: type[Backend], number: int, device: torch.device, folder: Path
    ) -> None:
        from bench.audit.decoder import DecoderWorkload

        self.scenario, self.backend_class, self.rank, self.device = scenario, backend, number, device
        self.folder = folder
        self.num_slots = scenario.world_size * self.scenario.slots_per_rank
        self.workload = DecoderWorkload(
            self.num_slots, scenario.reduction, scenario.accumulate[0] * scenario.world_size
        )
        self.backend: Backend
        self.taps = Taps(time.perf_counter)
        self.weights = self.workload.model().state_dict()
        self.fetches: list[dict[str, Any]] = []
        self.losses: list[int] = []
        self.faults: list[int] = []
        self.changes: list[dict[int, float]] = []
        self.digests: list[str] = []
        self.schedulers: list[LRScheduler] = []
        self.skip = 0
        """Micro-batches that the loader of a resumed training skips."""
        self.error: Exception | None = None
        self._first_sample: int | None = None
        self._epoch = -1
        self._read_upto = 0

    def run(self) -> dict[str, Any]:
        """What happened, as plain JSON; see ``record`` for its keys."""
        stopped, failure = "ended", None
        try:
            self._train()
            self._read()
        except _BoundReached:
            stopped = "bound"
        except Exception as error:
            self.error = error
            stopped, failure = "failed", failure_of(error)
        reported: dict[str, int] = {}
        with suppress(Exception):  # a framework that failed early may have no counters
            reported = self.backend.reported()
        if self.schedulers:
            reported["lr_scheduler.last_epoch"] = self.schedulers[-1].last_epoch
        return record(
            self.scenario,
            stopped,
            failure,
            fetches=self.fetches,
            losses=self.losses,
            faults=self.faults,
            events="".join(LETTERS[event.kind] for event in self.taps.events),
            changes=[sorted(change.items()) for change in self.changes],
            digests=self.digests,
            reported=reported,
        )

    def _train(self) -> None:
        """Train, and train again after the scenario's fault."""
        self.backend = self.backend_class()
        try:
            self.backend.train(self._job())
        except MicroBatchError:
            self.backend.continue_training(self._job())
        except _Saved:
            self.backend = self.backend_class()
            self.backend.train(self._job(resume=self.folder))

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
            build=self._build,
            blocks=self.workload.blocks,
            loader=self._loader(sharded=True),
            scenario=scenario,
            unsharded=self._loader(sharded=False) if scenario.split is Split.FRAMEWORK else None,
            loss=self._loss,
            optimizer=optimizer,
            keep_parameters=True,
            clip_norm=scenario.clip_norm,
            scheduler=scheduler,
            resume=resume,
        )

    def _build(self) -> nn.Module:
        """A new model with the current weights."""
        model = self.workload.model()
        model.load_state_dict(self.weights)
        return model.to(self.device)

    def _loader(self, *, sharded: bool) -> Any:
        """A DataLoader over the numbers of this rank's samples, or of all samples, tapped where it collates."""
        from torch.utils.data import DataLoader, DistributedSampler

        scenario = self.scenario
        data: Any = range(scenario.samples)
        sampler: Any = None
        if sharded:
            sampler = DistributedSampler(data, scenario.world_size, self.rank, shuffle=False)
            if self.skip:
                sampler, self.skip = list(sampler)[self.skip * scenario.batch_size :], 0
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
        if len(self.fetches) == self.scenario.at and not self.faults:
            self._fault()
        self._count_epochs(samples[0])
        slot = self.rank * self.scenario.slots_per_rank + len(self.fetches) * self.scenario.largest_batch
        self.fetches.append({"epoch": self._epoch, "samples": samples})
        self.taps.record(EventKind.FETCH)
        tokens = [self.scenario.tokens(sample) for sample in samples]
        of_window = self._tokens_of_window() if self.scenario.reduction is Reduction.WINDOW else 0
        rows = [(slot + index, count, of_window) for index, count in enumerate(tokens)]
        return torch.tensor(rows, device=self.device)

    def _count_epochs(self, sample: int) -> None:
        """Notice a new epoch, which begins with the same sample as the first one.

        A framework that splits the samples may shuffle them, so micro-batches are counted there. A resumed training is
        in the same epoch, even if its loader starts over.
        """
        if self.scenario.split is Split.FRAMEWORK:
            self._epoch = len(self.fetches) // self.scenario.micro_batches
        elif self.scenario.fault is Fault.CHECKPOINT:
            self._epoch = 0
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
        if self.scenario.fault is Fault.EXCEPTION and len(self.fetches) == self.scenario.at and not self.faults:
            self.workload.loss(model, batch)
            self.faults.append(len(self.losses))
            raise MicroBatchError(f"micro-batch {self.scenario.at} of the scenario raises")
        self.losses.append((int(batch[0, 0]) - self.rank * self.scenario.slots_per_rank) // self.scenario.largest_batch)
        return self.taps.loss(self.workload.loss)(model, batch)

    def _fault(self) -> None:
        """Do what the scenario has between two micro-batches, if anything."""
        if self.scenario.fault is Fault.ZERO_GRAD:
            self.faults.append(len(self.losses))
            self.backend.zero_grad()
        elif self.scenario.fault is Fault.CHECKPOINT:
            self.faults.append(len(self.losses))
            self.skip = self.backend.save(self.folder, self.scenario.at, self.scenario.accumulate[0])
            raise _Saved

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
        self.changes.append({int(slot): change[slot].item() for slot in change.nonzero().flatten()})


def record(scenario: Scenario, stopped: str, failure: dict[str, Any] | None, **observed: Any) -> dict[str, Any]:
    """One rank's record of a scenario, as plain JSON.

    ``stopped``: ``ended``, ``failed``, ``bound`` if training would not have ended, or ``lost`` with its process group;
    ``failure``: as from ``rank.failure``; ``fetches``: epoch and samples of each micro-batch; ``losses``: the fetch of
    each loss; ``faults``: the number of losses before each fault; ``events``: the taps' events in order, one letter
    each; ``changes``: for each update, the coefficients by slot; ``digests``: of all weights after each update, equal
    on all ranks if their replicas are; ``reported``: the framework's own counters.
    """
    nothing: dict[str, Any] = {name: [] for name in ("fetches", "losses", "faults", "changes", "digests")}
    nothing |= {"events": "", "reported": {}}
    known = {"scenario": scenario.name, "stopped": stopped, "failure": failure, "own_slots": scenario.slots_per_rank}
    return known | nothing | observed
