"""One configuration of the matrix: immutable, and identified by a hash of its content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

from pydantic import ConfigDict

from bench import validation
from bench.formatting import plural
from bench.plan.world import World
from bench.validation import Amount, Flag, Natural, Positive

REFERENCE, SHARDED_REFERENCE = "reference", "reference-sharded"
REFERENCES = (REFERENCE, SHARDED_REFERENCE)
"""Names of the reference backends: one process that trains the full batch at once in fp32, in plain
PyTorch; and the same sharded over all ranks, for models whose state does not fit on one GPU."""
SINGLE_STATE_BYTES = 64 * 2**30
"""Largest state (fp32 parameters, gradients and AdamW moments, 16 bytes per parameter) that an 80
GB GPU holds together with the activations of a slice."""
SLICE_TOKENS = 2048
"""Most tokens of a slice in which a reference sees its batch, unless a single sample has more."""
REFERENCE_FLOPS = 1e15
"""Model FLOPs that each GPU of a reference may spend on the time pass: 45 s in fp32 on an H100,
every forward computed twice."""
REFERENCE_WINDOWS = 2
"""Minimum number of windows that a reference trains: the loss before any update, and after one."""
SGD = "sgd"
"""The optimizer whose step is proportional to the gradient, so that a wrong gradient scale shows in
the losses."""
SMALLEST_SHARDS = 2
"""Fewest ranks over which a replica of HSDP is sharded; with one, nothing would be."""
ADDED_FIELDS: dict[str, str | float | bool] = {
    "clip_norm": 0.0,
    "twin": "",
    "virtual": False,
    "fake_tensors": False,
    "shared_gpu": False,
    "shared_nccl": False,
    "activation_checkpointing": False,
    "selective_checkpointing": False,
    "compiled": False,
    "ranks_per_node": 0,
    "replicate": 0,
}
"""Fields added after the first release, with the default that stands for the earlier behaviour."""


class Sync(StrEnum):
    """When gradients are reduced across ranks."""

    NONE = "none"
    """Never: there is only one rank."""
    EAGER = "eager"
    """After the backward of every micro-batch."""
    DEFERRED_ALL_REDUCE = "deferred-all-reduce"
    """Within a shard group after every micro-batch, across replicas once per window (HSDP)."""
    DEFERRED = "deferred"
    """Once per window, after its last micro-batch."""


class RankGroup(StrEnum):
    """The ranks that take part in a collective, as seen from one of them."""

    WORLD = "world"
    """All ranks."""
    SHARD = "shard"
    """The consecutive ranks that share one replica of a model (HSDP)."""
    REPLICATE = "replicate"
    """The ranks with the same shard of every replica."""


def among(group: str) -> str:
    """The ranks of a collective in a sentence; nothing for all ranks."""
    if group == RankGroup.WORLD:
        return ""
    return f" in the {group} group"


class Sharding(StrEnum):
    """What is split across ranks between the micro-batches of a window."""

    NONE = "none"
    """Nothing: every rank holds everything (DDP)."""
    OPTIMIZER = "optimizer"
    """The optimizer state (ZeRO-1); parameters and gradients stay complete for the whole window."""
    GRADS = "grads"
    """Gradients and optimizer state (ZeRO-2; FSDP2 without resharding after forward)."""
    PARAMS = "params"
    """Parameters too (ZeRO-3, FSDP2)."""


class Stepping(StrEnum):
    """How a backend handles the incomplete window at the end of an epoch."""

    WINDOW = "window"
    """Step at the end of the epoch; divide by the number of micro-batches in the window (correct
    mean)."""
    OVERRIDE = "override"
    """As ``window``, but a limit of steps overrides the number of epochs."""
    FLUSH = "flush"
    """Step at the end of the epoch, but divide by N: the update is too small."""
    CARRY = "carry"
    """Do not step: keep counting into the next epoch. Micro-batches left at the end of training are
    lost."""
    CANCEL = "cancel"
    """As ``carry``, but a window is fetched as a whole first: one that the data do not fill is not
    trained on."""
    SPLIT = "split"
    """The engine that steps behaves as ``carry``, while the trainer above it restarts its count
    every epoch."""
    UNKNOWN = "unknown"
    """Not declared; can only be measured."""


class Precision(StrEnum):
    """Dtype of forward and backward. Masters and accumulation are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


class Device(StrEnum):
    """What the ranks run on: ``cpu`` uses gloo; ``cuda`` uses NCCL with one GPU per rank.

    Ranks that share a GPU use NCCL where it works between them, otherwise gloo
    (``bench.launch.shared_nccl``).
    """

    CPU = "cpu"
    CUDA = "cuda"


class Status(StrEnum):
    """How a trial ended. Every status but ``ok`` has a reason."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    HANG = "hang"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    INTERRUPTED = "interrupted"


OTHER_COMMIT = "at "
"""Begins the label of a twin that another commit of the bench trains."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration that a trial runs. Equal cells have equal ids on every machine."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    backend: str
    accumulate: Positive
    """N: micro-batches per window on each rank."""
    world_size: Positive
    """W: ranks."""
    global_batch_size: Natural
    """B: samples per optimizer step over all ranks, equal for all cells that are compared."""
    sequence_length: Natural
    """Predicted tokens per sample."""
    workload: str = "llama"
    """``llama``, the name of an installed workload, or ``package.module:factory``."""
    model: str = "tiny"
    """Size of the model, interpreted by the workload."""
    corpus: str = "markov"
    """``markov``, or ``name@sha256:...`` of a text file."""
    precision: Precision = Precision.FP32
    accumulation_dtype: str = "fp32"
    optimizer: str = "adamw-foreach"
    """``adamw-foreach``, ``adamw-fused``, or ``sgd``: plain, without momentum."""
    learning_rate: Amount = 1e-3
    """Learning rate of the optimizer. The update pass always uses SGD with learning rate 1."""
    warmup_windows: Natural = 3
    """Windows trained before the first timed window."""
    timed_windows: Natural = 12
    """Windows whose step time is recorded."""
    seed: Natural = 0
    """Seed of the initial weights and of the tokens."""
    device: Device = Device.CPU
    clip_norm: Amount = 0.0
    """Maximum L2 norm of the whole gradient in an update; 0 for no clipping."""
    twin: str = ""
    """Label of an A/A copy of a cell, which is compared with its original; empty for the
    original."""
    virtual: Flag = False
    fake_tensors: Flag = False
    shared_gpu: Flag = False
    """The ``world`` in the form that ids contain; use ``world`` instead of these three."""
    shared_nccl: Flag = False
    """Whether ranks that share a GPU communicate over NCCL; otherwise they do over gloo."""
    activation_checkpointing: Flag = False
    """Whether blocks keep only their input and recompute their forward in the backward."""
    selective_checkpointing: Flag = False
    """Whether checkpointed blocks also keep what is expensive to compute
    (``bench.backends.blocks``)."""
    compiled: Flag = False
    ranks_per_node: Natural = 0
    """Ranks on each of several nodes; 0 if all are on one."""
    replicate: Natural = 0
    """R: replicas of the model, each sharded over W / R ranks (HSDP); 0 for backends that do not
    combine the two."""

    @property
    def world(self) -> World:
        return World.of(
            virtual=self.virtual, fake_tensors=self.fake_tensors, shared_gpu=self.shared_gpu
        )

    @property
    def uses_nccl(self) -> bool:
        """Whether the ranks communicate over NCCL."""
        if self.device is not Device.CUDA or not self.world.has_all_ranks:
            return False
        return self.shared_nccl or not self.world.shares_gpus

    def group_size(self, group: str) -> int:
        """Number of ranks in a group; W where a backend has groups of its own, of unknown sizes."""
        if not self.replicate or group == RankGroup.WORLD:
            return self.world_size
        if group == RankGroup.REPLICATE:
            return self.replicate
        return self.world_size // self.replicate

    @property
    def fits_mesh(self) -> bool:
        """Whether the replicas of HSDP divide the ranks into shard groups of at least two."""
        if not self.replicate:
            return True
        return (
            self.world_size % self.replicate == 0
            and self.world_size >= SMALLEST_SHARDS * self.replicate
        )

    @property
    def num_processes(self) -> int:
        """Number of processes: W, or 1 (rank 0) in a virtual world."""
        if self.world.has_all_ranks:
            return self.world_size
        return 1

    @property
    def num_nodes(self) -> int:
        if self.ranks_per_node:
            return self.world_size // self.ranks_per_node
        return 1

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward on one rank: B / (N x W)."""
        return self.global_batch_size // (self.accumulate * self.world_size)

    @property
    def windows(self) -> int:
        """Optimizer steps of the time pass, including warm-up."""
        return self.warmup_windows + self.timed_windows

    @cached_property
    def cell_id(self) -> str:
        """The first 12 hex digits of the SHA-256 of the canonical JSON of all fields.

        Ids never change: a field of ADDED_FIELDS is left out of the hash while it has its default.
        """
        content = self.to_dict()
        for name, default in ADDED_FIELDS.items():
            if content[name] == default:
                del content[name]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """A short readable name: backend, N, W, precision, and whatever differs from the usual."""
        parts = [self.backend, f"N={self.accumulate}", f"W={self.world_size}"]
        if self.num_nodes > 1:
            parts.append(f"({self.num_nodes}x{self.ranks_per_node})")
        if self.replicate:
            parts.append(f"R={self.replicate}")
        parts.append(self.precision)
        if self.world.label:
            parts.append(self.world.label)
        if self.shared_nccl:
            parts.append("over NCCL")
        if self.selective_checkpointing:
            parts.append("selectively")
        if self.activation_checkpointing:
            parts.append("checkpointed")
        if self.compiled:
            parts.append("compiled")
        if self.other_commit:
            parts.append(f"({self.twin})")
        elif self.twin:
            parts.append(f"(A/A {self.twin})")
        return " ".join(parts)

    @property
    def other_commit(self) -> str:
        """The commit of the bench that trains this twin; empty for the running code."""
        if self.twin.startswith(OTHER_COMMIT):
            return self.twin.removeprefix(OTHER_COMMIT)
        return ""

    def at_commit(self, commit: str) -> Cell:
        """The same cell, trained by another commit of the bench."""
        return dataclasses.replace(self, twin=f"{OTHER_COMMIT}{commit[:12]}")

    @property
    def is_reference(self) -> bool:
        """Whether this is a reference, which others are checked against but not compared with."""
        return self.backend in REFERENCES

    @property
    def _num_slices(self) -> int:
        """The fewest micro-batches of a rank's samples so that each is a slice or one sample."""
        samples = self.global_batch_size // self.world_size
        most = max(1, SLICE_TOKENS // max(1, self.sequence_length))
        for number in range(1, samples + 1):
            if samples % number == 0 and samples // number <= most:
                return number
        return 1

    def reference(self, *, sharded: bool | None = None) -> Cell:
        """The reference cell of this one: whole batch, fp32, not compiled.

        It is one process with N = 1, without checkpointing; or ``sharded`` over as many GPUs as
        this cell has, with checkpointing, if the state of a shipped model exceeds
        SINGLE_STATE_BYTES. There the ranks sum the gradients of slices, since the activations of
        all their samples may not fit. Both compute the same.

        On CUDA it trains as many windows as REFERENCE_FLOPS allow, and the gates compare the losses
        that exist: a batch of 32 samples for each of eight GPUs takes one GPU 29 s in fp32. That is
        enough to detect a wrong cell: the update pass verifies the gradient of a whole window to
        1e-5, later windows repeat the same work, and micro-batches and updates are counted in all
        of them.
        """
        from bench.plan.models import SIZES  # not at the top: circular import

        size = None
        if self.device is Device.CUDA and self.workload == "llama":
            size = SIZES.get(self.model)
        if sharded is None:
            too_large = size is not None and 16 * size.num_parameters > SINGLE_STATE_BYTES
            sharded = too_large and not self.world.shares_gpus
        found = dataclasses.replace(
            self,
            backend=REFERENCE,
            accumulate=1,
            world_size=1,
            precision=Precision.FP32,
            twin="",
            shared_gpu=False,
            shared_nccl=False,
            activation_checkpointing=False,
            selective_checkpointing=False,
            compiled=False,
            ranks_per_node=0,
            replicate=0,
        )
        if sharded and self.world_size > 1:
            found = dataclasses.replace(
                found,
                backend=SHARDED_REFERENCE,
                accumulate=self._num_slices,
                world_size=self.world_size,
                activation_checkpointing=True,
                ranks_per_node=self.ranks_per_node,
            )
        if size is None:
            return found
        tokens = self.global_batch_size * self.sequence_length / found.world_size
        most = int(REFERENCE_FLOPS / (tokens * size.flops_per_token(self.sequence_length)))
        most = max(REFERENCE_WINDOWS, most)
        if found.windows <= most:
            return found
        return dataclasses.replace(found, warmup_windows=1, timed_windows=most - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``from_dict`` is the inverse."""
        # dataclasses.asdict makes deep copies, which dominate the time of planning many cells.
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, StrEnum):
                value = value.value
            found[field.name] = value
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """The inverse of ``to_dict``.

        Raises InputError for an unknown or missing key, or an invalid value.
        """
        return validation.read(cls, values)


def summarize(cells: Iterable[Cell], baseline: str) -> str:
    """A summary of the cells of a run: ``19 cells: 17 compared with X, 2 references``."""
    num_cells = num_compared = num_baseline = num_references = num_twins = num_others = 0
    for cell in cells:
        num_cells += 1
        num_references += cell.is_reference
        num_others += bool(cell.other_commit)
        num_twins += bool(cell.twin) and not cell.other_commit
        if not cell.is_reference and not cell.twin:
            is_baseline = cell.backend == baseline
            num_baseline += is_baseline
            num_compared += not is_baseline
    parts = []
    if num_compared:
        parts.append(f"{num_compared} compared with {baseline}")
    if num_baseline:
        parts.append(f"{num_baseline} of {baseline} itself")
    if num_references:
        parts.append(plural(num_references, "reference"))
    if num_twins:
        parts.append(plural(num_twins, "A/A twin"))
    if num_others:
        parts.append(f"{num_others} of another commit")
    return f"{plural(num_cells, 'cell')}: {', '.join(parts)}"
