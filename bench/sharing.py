"""Ranks that share GPUs: what a rank is told, so that it and the frameworks find one GPU and a group to talk in.

For values, step counts, collectives and memory where there are fewer GPUs than ranks. NCCL refuses two ranks on one
device, so they talk over gloo, which takes tensors of a GPU through the host's memory: ``all_reduce``, ``broadcast``,
``reduce``, ``all_gather``, ``all_gather_into_tensor``, ``reduce_scatter_tensor``, ``gather`` and ``scatter``, which is
what the built-in backends issue; not the coalesced ones (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). Whatever
takes a time is then that of copies, and of ranks in each other's way: it is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BACKEND = "cpu:gloo,cuda:gloo"
"""Of the process group. Not plain ``gloo``: beside that, ``DeviceMesh`` of some versions makes a group of NCCL's."""


def environment(rank: int, world_size: int, gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Environment variables of a rank, to be set before CUDA is used; ``gpus`` as ``machine.gpus`` tells of them.

    Ranks are dealt out to the GPUs in turn. Each sees its own GPU alone, and is told that it is alone on its node: so
    no framework counts the devices of the machine and finds too few. Raises RuntimeError if there is no GPU.
    """
    if not gpus:
        raise RuntimeError("no GPU is visible that ranks could share")
    gpu = gpus[rank % len(gpus)]
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in alone.items()} | {
        "CUDA_VISIBLE_DEVICES": str(gpu.get("mig") or gpu["uuid"])
    }
