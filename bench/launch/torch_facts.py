"""What torch reports of itself and of the accelerator.

``python -m bench.launch.torch_facts`` prints it as JSON. It is another process, because importing
torch takes seconds and may fail, and a driver may hang.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from bench.files import ROOT, python_path

TIMEOUT_S = 180.0
"""Time limit of the process, on a slow disk."""
GLOO = "--gloo"
"""Option of the process that also tests gloo."""
GLOO_RANKS, GLOO_TIMEOUT_S = 2, 60.0
"""Ranks of that test, and its time limit."""


class TorchDevice(TypedDict):
    """A GPU, as torch reports it."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    capability: Sequence[int]
    """Its compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts:
    """What torch reports."""

    version: str
    cuda: str | None
    """Version of CUDA that it is built for."""
    hip: str | None
    """Version of ROCm that it is built for."""
    devices: Sequence[TorchDevice] = ()
    """Those that are visible."""
    device_error: str = ""
    architectures: Sequence[str] = ()
    """Architectures of its kernels, such as sm_90 or compute_90."""
    no_peers: Sequence[Sequence[int]] = ()
    """Pairs of GPUs that cannot read each other's memory."""
    nccl: bool = False
    gloo_error: str = ""

    @property
    def built_for(self) -> str:
        """The platform that it is built for; empty if for the CPU alone."""
        if self.cuda:
            return f"CUDA {self.cuda}"
        if self.hip:
            return f"ROCm {self.hip}"
        return ""


def ask_torch(
    *options: str, command: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> tuple[TorchFacts | None, str]:
    """What torch reports, or why it does not answer."""
    if not command:
        command = [sys.executable, "-m", "bench.launch.torch_facts", *options]
    try:
        process = subprocess.run(
            list(command),
            env=os.environ | {"PYTHONPATH": python_path(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return None, str(error)
    try:
        return TorchFacts(**json.loads(process.stdout.strip().splitlines()[-1])), ""
    except (IndexError, ValueError, TypeError):
        lines = process.stderr.strip().splitlines()
        if lines:
            return None, lines[-1]
        return None, f"exit status {process.returncode}"


def _devices() -> dict[str, object]:
    """The facts of the accelerator, by the names of ``TorchFacts``."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.accelerator.is_available()
    if not usable:
        problems = [_in_one_line(warning.message) for warning in caught]
        return {"device_error": "; ".join(problems)}
    try:
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        devices: list[TorchDevice] = []
        for index in range(torch.accelerator.device_count()):
            about = module.get_device_properties(index)
            uuid = f"GPU-{index}"
            if hasattr(about, "uuid"):
                uuid = f"GPU-{about.uuid}"  # as NVML writes it
            devices.append(
                {
                    "index": index,
                    "name": about.name,
                    "uuid": uuid,
                    "memory_bytes": about.total_memory,
                    "capability": [about.major, about.minor],
                }
            )
        no_peers = []
        for a, b in itertools.permutations(range(len(devices)), 2):
            if not module.can_device_access_peer(a, b):
                no_peers.append([a, b])
        return {"devices": devices, "architectures": module.get_arch_list(), "no_peers": no_peers}
    except (RuntimeError, AssertionError, AttributeError) as error:
        return {"device_error": _in_one_line(error)}


def _in_one_line(words: object) -> str:
    return " ".join(str(words).split())


def _gloo() -> str:
    """Why forked processes cannot all-reduce over gloo on the loopback; empty if they can."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("fork").Pool(GLOO_RANKS) as pool:
        try:
            ranks = [(rank, port) for rank in range(GLOO_RANKS)]
            sums = pool.starmap_async(_sum_over_gloo, ranks).get(GLOO_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            return f"no answer within {GLOO_TIMEOUT_S:g} s"
        except Exception as error:  # any error is the answer
            return _in_one_line(f"{type(error).__name__}: {error}")
    if set(sums) == {GLOO_RANKS}:
        return ""
    return f"{GLOO_RANKS} ones add up to {sums}"


def _sum_over_gloo(rank: int, port: int) -> float:
    import datetime

    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=GLOO_TIMEOUT_S / 2)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timeout=limit, rank=rank, world_size=GLOO_RANKS
    )
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def main() -> None:
    """Print the facts."""
    import torch
    import torch.distributed as dist

    # Processes cannot be forked after CUDA was initialized, so gloo comes first.
    gloo_error = ""
    if GLOO in sys.argv:
        gloo_error = _gloo()
    facts: dict[str, object] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": dist.is_nccl_available(),
        "gloo_error": gloo_error,
    }
    print(json.dumps(facts | _devices()))


if __name__ == "__main__":
    main()
