"""Activation checkpointing and compilation of a model's blocks, and which cells cannot run here.

Checkpointing comes first, then torch.compile, as in torchtitan
(torchtitan/models/llama3/infra/parallelize.py), which shards or wraps the blocks only afterwards.
Here the block's ``forward`` is replaced instead of the block, so that parameters keep their names
and the framework's hooks stay outside: FSDP2 does not gather again for recomputation.

Selective checkpointing keeps what torchtitan's keeps (torchtitan 0.3.0,
distributed/activation_checkpoint.py): the results of attention and of every second matrix product.
Everything else is recomputed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.backends.base import Backend
from bench.files import private
from bench.plan.cell import Cell, Device

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

COMPILER = "inductor"
"""The backend of torch.compile."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for the cache folder of compiled code."""


def skip(cell: Cell, backend: type[Backend]) -> str:
    """Why a cell cannot run here, in one line; empty if it can."""
    if reason := backend.missing(cell.device):
        return reason
    if reason := refusal(cell, backend):
        return reason
    return missing(cell)


def skipped(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """Why cells cannot run here, by id; cells that can are left out."""
    reasons = {}
    for cell in cells:
        if reason := skip(cell, backends[cell.backend]):
            reasons[cell.cell_id] = reason
    return reasons


def refusal(cell: Cell, backend: type[Backend]) -> str:
    """Why the backend can never run such a cell, in one line; empty if it can.

    What this machine lacks is checked by ``missing``.
    """
    if reason := cell.world.refusal(backend):
        return reason
    refuses = backend.refuses
    if cell.activation_checkpointing and refuses.checkpointed:
        return f"{backend.name} cannot run with activation checkpointing: {refuses.checkpointed}"
    if cell.selective_checkpointing and not cell.activation_checkpointing:
        return "selective checkpointing needs activation checkpointing"
    if cell.compiled and not cell.world.computes:
        return (
            "fake tensors cannot be compiled: compiled code allocates by itself, which would not "
            "be seen"
        )
    if cell.compiled and refuses.compiled:
        return f"{backend.name} cannot run with compiled blocks: {refuses.compiled}"
    return ""


def missing(cell: Cell) -> str:
    """What this machine lacks for compilation, and a remedy.

    Empty if nothing, or if the cell is not compiled.
    """
    if not cell.compiled:
        return ""
    # torch._inductor builds C++ kernels for the CPU, and Triton a launcher in C for each of its
    # kernels.
    names, variable = ("gcc", "clang", "cc"), "CC"
    if cell.device is Device.CPU:
        names, variable = ("g++", "clang++", "c++"), "CXX"
    chosen = os.environ.get(variable, "")
    if not any(map(shutil.which, filter(None, (chosen, *names)))):
        return f"torch.compile needs a compiler: install {names[0]}"
    if cell.device is Device.CUDA and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton: pip install triton"
    return ""


def prepare(blocks: Sequence[nn.Module], cell: Cell, compiler: str = COMPILER) -> None:
    """Checkpoint and compile the blocks of a built model in place, as the cell asks.

    Graph breaks are errors, and so are recompilations beyond torch's limit, so compiled blocks
    really are compiled.
    """
    import torch

    if cell.activation_checkpointing:
        for block in blocks:
            checkpointed = _checkpointed
            if cell.selective_checkpointing:
                checkpointed = _selectively_checkpointed
            block.forward = types.MethodType(checkpointed, block)
    if cell.compiled:
        protect_cache()
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=compiler, fullgraph=True)


def protect_cache() -> None:
    """Create the cache folder of compiled code, writable only by this user.

    Its content is executed, and its name can be guessed. If others can write to it, the launcher's
    temporary folder is used instead.
    """
    if not (name := os.environ.get(CACHE)):
        return
    with contextlib.suppress(FileExistsError):
        Path(name).mkdir(mode=0o700, parents=True)
    if not private(Path(name)):
        del os.environ[CACHE]


@contextmanager
def compiled_once(cell: Cell) -> Iterator[Callable[[], None]]:
    """Yield a function to call after warm-up: any further compilation raises a RuntimeError.

    Otherwise the time of a step would be the compiler's.
    """
    if not cell.compiled:  # does not import the compiler
        yield lambda: None
        return
    import torch

    try:
        yield lambda: torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


def _checkpointed(block: nn.Module, *args: object, **kwargs: Any) -> object:
    """The checkpointed forward of the block's class.

    The RNG state is not preserved: by its protocol a workload draws no random numbers in training.
    """
    from torch.utils.checkpoint import checkpoint

    return checkpoint(
        type(block).forward, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
    )


def _selectively_checkpointed(block: nn.Module, *args: object, **kwargs: Any) -> object:
    """``_checkpointed``, but for what ``_policy`` keeps."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(
        type(block).forward,
        block,
        *args,
        context_fn=_contexts,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        **kwargs,
    )


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts of a block's forward and of its recomputation."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    forward, recomputation = create_selective_checkpoint_contexts(_policy())
    return forward, recomputation


def _policy() -> Callable[..., CheckpointPolicy]:
    """Decides for each operator of a block whether its result is kept.

    Products are counted in either pass.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.linear.default}
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
    }
    seen = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operator: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        seen[context.is_recompute] += operator in products
        is_kept = operator in attention or (
            operator in products and seen[context.is_recompute] % 2 == 1
        )
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
