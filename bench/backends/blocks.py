"""What is done to a model's blocks before a framework gets the model, and which cells cannot run here.

First activation checkpointing, then torch.compile: the order of torchtitan
(torchtitan/models/llama3/infra/parallelize.py), where each block is checkpointed, then compiled by itself, and only
then sharded or wrapped. Here the block's ``forward`` is replaced and not the block, so that parameters keep their
names, and what a framework hooks to a block stays outside of both: FSDP2 does not gather again for what is computed
again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.backends.base import Backend
from bench.files import private
from bench.plan.cell import Cell, Device

if TYPE_CHECKING:
    from torch import nn

COMPILER = "inductor"
"""The backend of torch.compile."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable: the folder of what it compiled."""


def skip(cell: Cell, backend: type[Backend]) -> str:
    """Why a cell cannot run here, in one line; empty if it can."""
    return backend.missing(cell.device) or refusal(cell, backend) or missing(cell)


def skipped(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """Why cells cannot run here, by id; those that can are not listed."""
    reasons = {cell.cell_id: skip(cell, backends[cell.backend]) for cell in cells}
    return {cell_id: reason for cell_id, reason in reasons.items() if reason}


def refusal(cell: Cell, backend: type[Backend]) -> str:
    """Why the backend cannot run such a cell at all, in one line; empty if it can.

    What is missing on this machine is not asked: see ``missing``.
    """
    if reason := cell.world.refusal(backend):
        return reason
    if cell.activation_checkpointing and backend.not_checkpointed:
        return f"{backend.name} cannot run with activation checkpointing: {backend.not_checkpointed}"
    if cell.compiled and not cell.world.computes:
        return "fake tensors are not compiled: what is compiled allocates by itself, and would not be seen"
    if cell.compiled and backend.not_compiled:
        return f"{backend.name} cannot run with compiled blocks: {backend.not_compiled}"
    return ""


def missing(cell: Cell) -> str:
    """What this machine lacks to compile, and what to do; empty if nothing, or if nothing is to be compiled."""
    if not cell.compiled:
        return ""
    # torch._inductor builds C++ kernels for the CPU, and Triton a launcher in C for each of its kernels.
    names = ("g++", "clang++", "c++") if cell.device is Device.CPU else ("gcc", "clang", "cc")
    own = os.environ.get("CXX" if cell.device is Device.CPU else "CC", "")
    if not any(shutil.which(name) for name in (own, *names) if name):
        return f"torch.compile needs a compiler: install {names[0]}"
    if cell.device is Device.CUDA and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton: pip install triton"
    return ""


def prepare(blocks: Sequence[nn.Module], cell: Cell, compiler: str = COMPILER) -> None:
    """Checkpoint and compile the blocks of a built model, in place, as the cell asks.

    A graph that breaks is an error, and so is one block too many that needs a graph of its own: what is said to be
    compiled is.
    """
    import torch

    if cell.activation_checkpointing:
        for block in blocks:
            block.forward = types.MethodType(_checkpointed, block)
    if cell.compiled:
        own_cache()
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=compiler, fullgraph=True)


def own_cache() -> None:
    """Have compiled code kept where nobody but this user can write: it is run, and the folder's name can be foreseen.

    Where somebody else can, it is kept in the launcher's temporary folder, and not for longer than that.
    """
    if not (name := os.environ.get(CACHE)):
        return
    with contextlib.suppress(FileExistsError):
        Path(name).mkdir(mode=0o700, parents=True)
    if not private(Path(name)):
        del os.environ[CACHE]


@contextmanager
def compiled_once(cell: Cell) -> Iterator[Callable[[], None]]:
    """Gives a function, to be called when warm-up is over: from then on no block is compiled again in this context.

    One that would be raises a RuntimeError that names its function: the step's time would be the compiler's.
    """
    if not cell.compiled:  # nor is the compiler imported
        yield lambda: None
        return
    import torch

    try:
        yield lambda: torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


def _checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the block's class, of which only the inputs are kept for the backward.

    Random numbers are not: a workload draws none in training, by its protocol.
    """
    from torch.utils.checkpoint import checkpoint

    return checkpoint(type(block).forward, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
