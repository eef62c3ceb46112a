"""Workloads: the same model, weights and tokens for every backend, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.errors import InputError, shown
from bench.plan.cell import SLICE_TOKENS, Cell
from bench.plan.models import HUGGING_FACE, LLAMA, config_file, find_factory, read_config

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = Any
"""A tensor, or tuples, lists and dicts of tensors, whose first dimension counts samples."""
Loss = Callable[["nn.Module", Batch], "Tensor"]
"""The mean loss of a micro-batch, from one call of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """The arguments of a workload factory."""

    model: str
    """Size of the model, interpreted by the factory."""
    sequence_length: int
    """Predicted tokens per sample."""
    seed: int
    """Seed of the weights and of the data."""
    corpus: Path | None
    """Text file to draw tokens from; None for the workload's own source."""


class Workload(Protocol):
    """A model, its data and its loss.

    All methods are deterministic: equal specs give equal bytes everywhere. The exception is weights
    of large models that are drawn on a GPU (``llama``): equal only on GPUs of the same kind.
    """

    tokens_per_sample: int
    """Predicted tokens per sample, for tokens/s."""
    entropy_floor: float | None
    """Lowest reachable loss in nats per token; None if unknown."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward per sample, for MFU; None if unknown."""

    def model(self) -> nn.Module:
        """A new fp32 model on the CPU, with the seeded initial weights."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The submodules that are sharded as separate units; all else belongs to the root unit."""

    def data(self, num_samples: int) -> Batch:
        """Samples 0 to ``num_samples`` - 1 along the first dimension of its tensors.

        A micro-batch is a slice of it.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch, a scalar, computed by one call of ``model``."""


def load(cell: Cell, corpus: Path | None) -> Workload:
    """Load the cell's workload. Raises InputError if the factory cannot be found."""
    spec = WorkloadSpec(
        model=cell.model, sequence_length=cell.sequence_length, seed=cell.seed, corpus=corpus
    )
    if cell.workload == LLAMA:
        from bench.workload.llama import LlamaWorkload

        return LlamaWorkload(spec)
    if cell.workload.startswith(HUGGING_FACE):
        from bench.workload.causal import CausalWorkload

        return CausalWorkload(spec, read_config(cell.workload), str(config_file(cell.workload)))
    workload: Workload = find_factory(cell.workload)(spec)
    _check_tokens(cell.workload, workload)
    return workload


def _check_tokens(name: str, workload: Workload) -> None:
    """Raises InputError if a workload of one's own does not say how long a sample is."""
    try:
        tokens: object = workload.tokens_per_sample
    except AttributeError as error:
        raise InputError(f"{name}: {error}; see 'A model of your own' in docs/matrix.md") from error
    if not isinstance(tokens, int) or tokens < 1:
        raise InputError(
            f"{name}: tokens_per_sample is {shown(tokens)}; it must be an integer of at least 1"
        )


class Loader:
    """The micro-batches of one rank in order; sized, and can be iterated repeatedly.

    Update t uses samples t*B ... (t+1)*B - 1 for any N and W. Micro-batch j of rank r is contiguous
    piece j*W + r of them, with B / (N*W) samples.
    """

    def __init__(
        self,
        fetch: Callable[[range], Batch],
        *,
        windows: int,
        accumulate: int,
        world_size: int,
        rank: int,
        global_batch_size: int,
    ) -> None:
        micro_batch_size, rest = divmod(global_batch_size, accumulate * world_size)
        assert rest == 0 and micro_batch_size > 0, (
            "the matrix refuses a batch that is not divisible"
        )
        self._fetch = fetch
        self._ranges = []
        for window in range(windows):
            for piece in range(accumulate):
                start = window * global_batch_size + (piece * world_size + rank) * micro_batch_size
                self._ranges.append(range(start, start + micro_batch_size))

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._fetch, self._ranges)


def slice_size(num_samples: int, tokens_per_sample: int) -> int:
    """Samples per slice; all of them if they fit into SLICE_TOKENS."""
    return min(num_samples, max(1, SLICE_TOKENS // tokens_per_sample))


def sliced(loss: Loss, num_samples: int, tokens_per_sample: int) -> Loss:
    """The mean loss of ``num_samples`` samples, computed slice by slice.

    It is the mean over slices, weighted by their samples; ``loss`` itself if one slice holds them
    all. Every slice is checkpointed, so its activations are recomputed in the backward. There is
    still one loss and one backward: nothing is accumulated by hand.
    """
    size = slice_size(num_samples, tokens_per_sample)
    if size == num_samples:
        return loss

    def of_slices(model: nn.Module, batch: Batch) -> Tensor:
        import torch
        from torch.utils.checkpoint import checkpoint

        from bench.workload.batches import length, split

        shares = []
        for part in split(batch, size):
            mean = checkpoint(loss, model, part, use_reentrant=False, preserve_rng_state=False)
            shares.append(mean * (length(part) / length(batch)))
        return torch.stack(shares).sum()

    return of_slices
