"""What is trained: the same model, weights and tokens for every backend."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.cell import Cell
from bench.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn


LLAMA = "llama"
"""The workload that is shipped."""
ENTRY_POINTS = "bench.workloads"
"""Entry-point group in which other packages offer workload factories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """What a workload factory is told."""

    model: str
    """Size of the model, as the factory understands it."""
    sequence_length: int
    """Tokens per sample that are predicted."""
    seed: int
    """Of the weights and of the data."""
    corpus: Path | None
    """A text file to draw tokens from; None for the workload's own source."""


class Workload(Protocol):
    """A model, its data and its loss. All methods are deterministic: the same spec gives the same bytes everywhere.

    But weights that a GPU draws, those of ``llama``, are the same on GPUs of one kind alone.
    """

    tokens_per_sample: int
    """Predicted tokens per sample, for tokens/s."""
    entropy_floor: float | None
    """Nats per token that no model can beat; None if unknown."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward per sample, for MFU; None if unknown."""

    def model(self) -> nn.Module:
        """A new model on the CPU in fp32, with the seeded initial weights."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The submodules that are sharded as units of their own; the rest is the root's unit."""

    def data(self, num_samples: int) -> Tensor:
        """Samples 0 to ``num_samples`` - 1 along the first dimension; a micro-batch is a slice of it."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean loss of a micro-batch, a scalar, by calling ``model`` once."""


def load(cell: Cell, corpus: Path | None) -> Workload:
    """The cell's workload. Raises InputError if the factory cannot be found."""
    spec = WorkloadSpec(model=cell.model, sequence_length=cell.sequence_length, seed=cell.seed, corpus=corpus)
    workload: Workload = find_factory(cell.workload)(spec)
    return workload


def _place(name: str) -> str:
    """Where the factory called ``name`` is, as module:function. Raises InputError if there is no such name."""
    if name == LLAMA:
        return "bench.workload.llama:LlamaWorkload"
    if ":" in name:
        return name
    installed = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        known = ", ".join([*installed, LLAMA])
        raise InputError(f"workload '{name}': unknown; use {known} or 'package.module:factory'")
    return installed[name]


def sources(name: str) -> list[Path]:
    """The files that the workload called ``name`` is made of: all Python files of its package, or its one module.

    None for what the bench ships. Raises InputError if it cannot be found.
    """
    module = _place(name).partition(":")[0]
    if module.startswith(f"{__name__.partition('.')[0]}."):
        return []
    try:
        found = importlib.util.find_spec(module)
        package = importlib.util.find_spec(found.parent) if found is not None and found.parent else None
    except Exception as error:  # looking for a module runs the code of the packages that it is in
        raise InputError(f"workload '{name}': {error}; use 'llama' or 'package.module:factory'") from error
    if found is None:
        raise InputError(f"workload '{name}': there is no module {module}; use 'llama' or 'package.module:factory'")
    folders = (package and package.submodule_search_locations) or ()
    files = [Path(found.origin)] if found.origin and not folders else []
    files += [path for folder in folders for path in Path(folder).rglob("*.py")]
    return sorted(path for path in files if path.is_file())


def find_factory(name: str) -> Callable[[WorkloadSpec], Any]:
    """The factory called ``name``: ``llama``, an installed entry point of ``bench.workloads``, or module:function.

    Raises InputError if there is no such thing, with the reason.
    """
    module, _, attribute = _place(name).partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise InputError(f"workload '{name}': {error}; use 'llama' or 'package.module:factory'") from error
    if not callable(factory):
        raise InputError(f"workload '{name}': {attribute} is not callable; name a factory that takes a WorkloadSpec")
    return factory  # type: ignore[no-any-return]
