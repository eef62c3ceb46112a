"""One point of the matrix: frozen, documented, and named by a hash of its content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import ConfigDict

from bench import fields
from bench.fields import Amount, Flag, Natural, Positive
from bench.plan.world import World
from bench.words import plural

REFERENCE, SHARDED_REFERENCE = REFERENCES = ("reference", "reference-sharded")
"""Names of the backends that are the truth: the full batch at once in fp32, by one process in plain PyTorch; or by all
ranks, where one GPU cannot hold the model's state."""
SINGLE_STATE_BYTES = 64 * 2**30
"""fp32 parameters, gradients and AdamW's moments, 16 bytes per parameter, that a GPU of 80 GB holds beside a slice's
activations."""
REFERENCE_FLOPS = 1e15
"""Model FLOPs that each GPU of a reference may spend on the time pass: 45 s in fp32 on an H100, all forwards twice."""
REFERENCE_WINDOWS = 2
"""Windows that a reference trains at least: the loss before any update, and that after one."""
SGD = "sgd"
"""The optimizer whose step is in proportion to the gradient, so that a wrong scale of it is seen in the losses."""
LATER: dict[str, Any] = {
    "clip_norm": 0.0,
    "twin": "",
    "virtual": False,
    "fake_tensors": False,
    "shared_gpu": False,
    "activation_checkpointing": False,
    "compiled": False,
}
"""Fields of a cell that came after the first release, with the default that stands for what was done before."""


class Sync(StrEnum):
    """When gradients are reduced across ranks."""

    NONE = "none"
    """Never: there is one rank."""
    EAGER = "eager"
    """After the backward of every micro-batch."""
    DEFERRED = "deferred"
    """Once per window, after its last micro-batch."""


class Sharding(StrEnum):
    """What is split across ranks between the micro-batches of a window."""

    NONE = "none"
    """Nothing: every rank holds all (DDP)."""
    OPTIMIZER = "optimizer"
    """The optimizer state (ZeRO-1): parameters and gradients stay whole for the whole window."""
    GRADS = "grads"
    """Gradients and optimizer state (ZeRO-2; FSDP2 without resharding after forward)."""
    PARAMS = "params"
    """Parameters too (ZeRO-3, FSDP2)."""


class Stepping(StrEnum):
    """When a window that the end of an epoch leaves incomplete becomes an update, and by what its loss is divided."""

    WINDOW = "window"
    """At the end of the epoch, divided by the number of its micro-batches: the big batch of what there is."""
    FLUSH = "flush"
    """At the end of the epoch, divided by N all the same: an update too small by the share of the window it has."""
    CARRY = "carry"
    """Not at all: micro-batches are counted on into the next epoch, and what is open at the end of training is lost."""
    SPLIT = "split"
    """As ``carry`` in the engine that steps, while the trainer above it counts micro-batches anew in every epoch."""
    UNKNOWN = "unknown"
    """Not declared: nothing is calculated, it can only be measured."""


class Precision(StrEnum):
    """In which dtype forward and backward compute. Masters and accumulation are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


class Device(StrEnum):
    """What the ranks run on: ``cpu`` talks over gloo, ``cuda`` over NCCL with one GPU per rank.

    Where ranks share a GPU, they talk over gloo there too: NCCL refuses two ranks on one device.
    """

    CPU = "cpu"
    CUDA = "cuda"


class Status(StrEnum):
    """How a trial ended. All but ``ok`` carry a reason."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    HANG = "hang"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One configuration that a trial runs. Two cells of equal content have equal ids, on every machine."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    backend: str
    """Name of the backend in the registry."""
    accumulate: Positive
    """N: micro-batches per window on each rank."""
    world_size: Positive
    """W: ranks."""
    global_batch_size: Natural
    """B: samples per optimizer step over all ranks, the same for every cell that is compared."""
    sequence_length: Natural
    """Tokens per sample that are predicted."""
    workload: str = "llama"
    """``llama``, an installed workload's name, or ``package.module:factory`` of one's own."""
    model: str = "tiny"
    """Size of the model, as the workload understands it."""
    corpus: str = "markov"
    """``markov``, or ``name@sha256:...`` of a text file's bytes."""
    precision: Precision = Precision.FP32
    """dtype of forward and backward."""
    accumulation_dtype: str = "fp32"
    """dtype in which gradients are summed over the window."""
    optimizer: str = "adamw-foreach"
    """``adamw-foreach``, ``adamw-fused``, or ``sgd``: plain, without momentum."""
    learning_rate: Amount = 1e-3
    """Of the optimizer; the update pass always uses SGD with learning rate 1."""
    warmup_windows: Natural = 3
    """Windows trained before the first timed one."""
    timed_windows: Natural = 12
    """Windows whose time is kept, one sample each."""
    seed: Natural = 0
    """Of the initial weights and of the tokens."""
    device: Device = Device.CPU
    """What the ranks run on."""
    clip_norm: Amount = 0.0
    """The largest L2 norm of the whole gradient that an update may use; 0 for no clipping."""
    twin: str = ""
    """A second label for the same work, so that a cell can be compared with itself; empty for the cell itself."""
    virtual: Flag = False
    fake_tensors: Flag = False
    shared_gpu: Flag = False
    """Which ``world`` it is, as ids have it; nobody asks these three."""
    activation_checkpointing: Flag = False
    """Whether a block keeps only its input for the backward, and computes its forward once more there."""
    compiled: Flag = False
    """Whether each block is compiled by ``torch.compile``."""

    @property
    def world(self) -> World:
        """What its ranks are."""
        return World.of(virtual=self.virtual, fake_tensors=self.fake_tensors, shared_gpu=self.shared_gpu)

    @property
    def num_processes(self) -> int:
        """Ranks that exist: W, or rank 0 alone."""
        return self.world_size if self.world.has_all_ranks else 1

    @property
    def micro_batch_size(self) -> int:
        """Samples that one forward sees on one rank: B / (N x W)."""
        return self.global_batch_size // (self.accumulate * self.world_size)

    @property
    def windows(self) -> int:
        """Optimizer steps of the time pass, warm-up included."""
        return self.warmup_windows + self.timed_windows

    @property
    def cell_id(self) -> str:
        """The first 12 hex digits of the SHA-256 of the canonical JSON of all fields.

        Ids are for ever: a field of LATER counts only where it is not at its default, as if it had never been added.
        """
        content = {name: value for name, value in self.to_dict().items() if LATER.get(name) != value}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """A short name for people: backend, N, W, precision, and what else is not as usual."""
        named = f"{self.backend} N={self.accumulate} W={self.world_size} {self.precision} {self.world.word}".rstrip()
        named += " checkpointed" * self.activation_checkpointing + " compiled" * self.compiled
        return named + (f" (A/A {self.twin})" if self.twin else "")

    @property
    def is_reference(self) -> bool:
        """Whether the backend is there to be held against, and not to be compared with."""
        return self.backend in REFERENCES

    def reference(self, *, sharded: bool | None = None) -> Cell:
        """The cell whose update and losses are the truth for this one: whole batch, fp32, not compiled, N = 1.

        One process, not checkpointed; or ``sharded`` over as many GPUs as this cell has, and checkpointed, if the state
        of a shipped model exceeds SINGLE_STATE_BYTES. What is computed is the same.

        On CUDA it trains as many windows as REFERENCE_FLOPS pay for, and the gates compare the losses that it has: a
        batch of 32 samples for each of eight GPUs takes one GPU in fp32 29 s. That is enough to tell a wrong cell: the
        update pass proves the gradient of a whole window to 1e-5, every later window repeats that work, and how many
        micro-batches and updates there are is counted in all of them.
        """
        from bench.plan.models import SIZES  # which is of a package that imports this module

        size = SIZES.get(self.model) if self.device is Device.CUDA and self.workload == "llama" else None
        if sharded is None:
            too_large = size is not None and 16 * size.num_parameters > SINGLE_STATE_BYTES
            sharded = too_large and not self.world.shares_gpus
        sharded = sharded and self.world_size > 1
        found = dataclasses.replace(
            self,
            backend=SHARDED_REFERENCE if sharded else REFERENCE,
            accumulate=1,
            world_size=self.world_size if sharded else 1,
            precision=Precision.FP32,
            twin="",
            shared_gpu=False,
            activation_checkpointing=sharded,
            compiled=False,
        )
        if size is None:
            return found
        tokens = self.global_batch_size * self.sequence_length / found.world_size
        most = int(REFERENCE_FLOPS / (tokens * size.flops_per_token(self.sequence_length)))
        most = max(REFERENCE_WINDOWS, most)
        return found if found.windows <= most else dataclasses.replace(found, warmup_windows=1, timed_windows=most - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``Cell.from_dict`` is the inverse."""
        # Not dataclasses.asdict: its deep copies would take most of the time of a plan of many cells.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {key: value.value if isinstance(value, StrEnum) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """The cell of ``to_dict``'s values.

        Raises InputError for a key that is unknown or missing, or for a value that cannot be.
        """
        return fields.read(cls, values)


def counted(cells: Iterable[Cell], baseline: str) -> str:
    """How many cells a run has, and what they are there for: ``19 cells: 17 compared, 1 reference, 1 A/A twin``."""
    every = list(cells)
    own = [cell for cell in every if not cell.is_reference and not cell.twin]
    others, own = ([cell for cell in own if (cell.backend == baseline) is same] for same in (False, True))
    kinds = {
        f"{len(others)} compared with {baseline}": others,
        f"{len(own)} of {baseline} itself": own,
        plural(sum(cell.is_reference for cell in every), "reference"): [cell for cell in every if cell.is_reference],
        plural(sum(bool(cell.twin) for cell in every), "A/A twin"): [cell for cell in every if cell.twin],
    }
    said = ", ".join(kind for kind, those in kinds.items() if those)
    return f"{plural(len(every), 'cell')}: {said}"
