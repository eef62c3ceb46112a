"""What runs need of the GPUs: driver, torch's build, NCCL, links, and nobody else who uses them."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

from bench.findings import Finding, Level, error, good, warning
from bench.launch import gpus
from bench.launch.nvml import Nvml, NvmlUnavailableError
from bench.launch.torch_facts import TorchDevice, TorchFacts

SHM_BYTES, SHM_LEAST_BYTES = 2**30, 64 * 2**20
"""Size of /dev/shm that NCCL may want for eight GPUs without peer access, and a container's
default."""
INDEX = "https://download.pytorch.org/whl"
BUILDS = ((12, 6), (13, 0))
"""Versions of CUDA for which every tested torch has a build."""
ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")
"""Kernels as torch names them: sm_90, sm_90a, compute_90."""


class SeenGpu(TypedDict):
    """A GPU of this machine."""

    name: str
    uuid: str
    visible: bool
    num_processes: int | None
    """Processes that compute on it; None if they cannot be listed."""
    mig: bool
    """Whether it is split into instances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What the checks look at; unknown facts are None or empty."""

    torch: TorchFacts | None
    device_nodes: int = 0
    """Number of GPUs with a device node from NVIDIA's kernel driver."""
    nvml_error: str = ""
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver can run."""
    gpus: Sequence[SeenGpu] = ()
    environment: Mapping[str, str]
    shm_bytes: int | None
    """Size of /dev/shm."""

    @property
    def visible(self) -> list[SeenGpu]:
        return [gpu for gpu in self.gpus if gpu["visible"]]

    @property
    def gpu_torch(self) -> TorchFacts | None:
        """Torch, if it answered and there is a GPU for it."""
        if self.visible:
            return self.torch
        return None


def gather(torch: TorchFacts | None) -> GpuFacts:
    """The facts of this machine: GPUs as NVML reports them, or where it does not answer, torch."""
    driver, driver_cuda, nvml_error = "", None, ""
    found: list[SeenGpu] = []
    try:
        with Nvml() as nvml:
            driver, driver_cuda = nvml.driver, nvml.cuda
            visible = {gpu["uuid"] for gpu in gpus.gpus()}
            for gpu in nvml.gpus:
                seen: SeenGpu = {
                    "name": gpu.about()["name"],
                    "uuid": gpu.uuid,
                    "visible": gpu.uuid in visible,
                    "num_processes": None,
                    "mig": bool(gpu.ask("mig")),
                }
                pids = gpu.sample(processes=True)["pids"]
                if pids is not None:
                    seen["num_processes"] = len(pids)
                found.append(seen)
    except NvmlUnavailableError as problem:
        nvml_error = str(problem)
        if torch is not None:
            found = [_as_seen(device) for device in torch.devices]
    shm, shm_bytes = Path("/dev/shm"), None
    if shm.exists():
        shm_bytes = shutil.disk_usage(shm).total
    return GpuFacts(
        torch=torch,
        device_nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        nvml_error=nvml_error,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=found,
        environment=os.environ,
        shm_bytes=shm_bytes,
    )


def _as_seen(device: TorchDevice) -> SeenGpu:
    """A GPU of which torch alone tells."""
    return {
        "name": device["name"],
        "uuid": device["uuid"],
        "visible": True,
        "num_processes": None,
        "mig": False,
    }


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _build_for(driver_cuda: tuple[int, int] | None) -> str:
    """The command that installs the newest torch that this driver can run."""
    newest = None
    if driver_cuda is not None:
        for major, minor in BUILDS:
            if major <= driver_cuda[0]:  # any minor version: CUDA's minor version compatibility
                newest = f"cu{major}{minor}"
    if newest is None:
        return "update the driver, since no supported torch runs with it"
    return f"pip install --force-reinstall torch --index-url {INDEX}/{newest}"


def driver(facts: GpuFacts) -> Iterator[Finding]:
    """Whether there are GPUs, and a driver that answers."""
    if facts.gpus:
        names = Counter(gpu["name"] for gpu in facts.gpus)
        what = ", ".join(f"{number} x {name}" for name, number in names.items())
        if facts.driver:
            what += f"; driver {facts.driver}"
        if facts.driver_cuda:
            what += f", for CUDA up to {_dotted(facts.driver_cuda)}"
        yield good("gpu", what)
    elif facts.device_nodes:
        fix = (
            "see nvidia-smi; reboot after a driver update; in a container, pass the GPUs in "
            "(--gpus all)"
        )
        if "pynvml" in facts.nvml_error:
            fix = "pip install nvidia-ml-py"
        yield error(
            "gpu",
            f"{facts.device_nodes} GPU(s) whose driver does not answer ({facts.nvml_error}): {fix}",
        )
    else:
        yield good("gpu", "none: runs use the CPU, over gloo")
    if facts.gpus and facts.nvml_error:
        what = "clocks, power, energy and other processes are unknown, because NVML does not answer"
        yield warning(
            "gpu",
            f"{what} ({facts.nvml_error}): for NVIDIA's GPUs, install its driver's libnvidia-ml",
        )
    if num_hidden := len(facts.gpus) - len(facts.visible):
        setting = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        what = f"CUDA_VISIBLE_DEVICES='{setting}' hides {num_hidden} of {len(facts.gpus)}"
        level = Level.ERROR
        if facts.visible:
            level = Level.WARNING
        yield Finding(level, "gpu", f"{what}: unset CUDA_VISIBLE_DEVICES")


def build(facts: GpuFacts) -> Iterator[Finding]:
    """Whether torch is built for this driver and these GPUs."""
    torch = facts.gpu_torch
    if torch is None:
        return
    if not torch.built_for:
        yield error(
            "cuda",
            f"torch {torch.version} is built for the CPU alone: {_build_for(facts.driver_cuda)}",
        )
        return
    named = f"torch {torch.version} is built for {torch.built_for}"
    if torch.cuda and facts.driver_cuda and int(torch.cuda.split(".")[0]) > facts.driver_cuda[0]:
        what = f"{named}, and driver {facts.driver} supports at most {_dotted(facts.driver_cuda)}"
        yield error("cuda", f"{what}: update the driver, or {_build_for(facts.driver_cuda)}")
    elif torch.device_error or not torch.devices:
        problem = "it finds no device"
        if torch.device_error:
            problem = torch.device_error
        fix = "see nvidia-smi, then restart the programs that hold the driver, or reboot"
        yield error("cuda", f"torch cannot use the GPUs that the driver reports: {problem}: {fix}")
    else:
        yield good(
            "cuda", f"torch {torch.version} uses {len(torch.devices)}, built for {torch.built_for}"
        )
    if not torch.cuda:
        return
    kernels = _kernels(torch)
    for capability in sorted({tuple(device["capability"]) for device in torch.devices}):
        if any(_runs(capability, kernel) for kernel in kernels):
            continue
        what = f"torch {torch.version} has no kernels for compute capability {_dotted(capability)}"
        newest = max((kernel.built_for for kernel in kernels), default=(0, 0))
        fix = "install a torch that is older"
        if capability > newest:
            fix = "install a torch that is newer"
        yield error("cuda", f"{what} (it has {', '.join(torch.architectures)}): {fix}")


class KernelKind(NamedTuple):
    """An architecture that torch has kernels for, such as sm_90a."""

    is_ptx: bool
    """Whether the driver compiles them for later GPUs."""
    built_for: tuple[int, int]
    """Compute capability."""
    is_special: bool
    """Whether they run on that very GPU alone."""


def _kernels(torch: TorchFacts) -> list[KernelKind]:
    """Each architecture that torch has kernels for and that is named as usual."""
    found: list[KernelKind] = []
    for name in torch.architectures:
        match = ARCHITECTURE.fullmatch(name)
        if match is not None:
            kind, major, minor, special = match.groups()
            found.append(
                KernelKind(kind == "compute", (int(major), int(minor)), is_special=bool(special))
            )
    return found


def _runs(capability: tuple[int, ...], kernel: KernelKind) -> bool:
    """Whether kernels run on a GPU.

    Binaries do on their major version from their minor one on, PTX on all later ones.
    """
    if kernel.is_special:
        return kernel.built_for == capability
    if kernel.built_for > capability:
        return False
    return kernel.is_ptx or kernel.built_for[0] == capability[0]


def nccl(facts: GpuFacts) -> Iterator[Finding]:
    """Whether torch has NCCL (RCCL on AMD's GPUs), which ranks on GPUs need."""
    torch = facts.gpu_torch
    if torch and torch.built_for and torch.nccl:
        yield good("nccl", "included in torch")
    elif torch and torch.built_for:
        what = f"torch {torch.version} is built without it, so no rank starts on a GPU"
        yield error("nccl", f"{what}: {_build_for(facts.driver_cuda)}")


def peers(facts: GpuFacts) -> Iterator[Finding]:
    """Whether GPUs read each other's memory, or go through the host's."""
    torch = facts.gpu_torch
    if torch is None or len(facts.visible) < 2:
        return
    if facts.environment.get("NCCL_P2P_DISABLE", "").lower() in {"1", "true", "yes", "on"}:
        what = "NCCL_P2P_DISABLE is set, so all traffic goes through host memory"
        yield warning("p2p", f"{what}: unset NCCL_P2P_DISABLE")
    if pairs := sorted({tuple(sorted(pair)) for pair in torch.no_peers}):
        some = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
        if len(pairs) > 4:
            some += " ..."
        what = (
            f"GPUs {some} cannot access each other's memory, so their traffic goes through "
            "host memory"
        )
        fix = (
            "turn off the IOMMU and PCIe ACS (nvidia-smi topo -p2p r shows more), or mention it "
            "with the times"
        )
        yield warning("p2p", f"{what}: {fix}")
    elif len(torch.devices) > 1:
        yield good("p2p", "all GPUs can access each other's memory")


def shared_memory(facts: GpuFacts) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for NCCL."""
    fix = "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    if len(facts.visible) < 2:
        yield good("/dev/shm", "is needed only with several GPUs")
    elif facts.shm_bytes is None:
        yield error("/dev/shm", f"does not exist, and NCCL needs it between GPUs: {fix}")
    elif facts.shm_bytes < SHM_BYTES:
        what = f"has {facts.shm_bytes / 2**20:.3g} MiB, too little for NCCL between GPUs"
        level = Level.WARNING
        if facts.shm_bytes <= SHM_LEAST_BYTES:
            level = Level.ERROR
        yield Finding(level, "/dev/shm", f"{what}: {fix}")
    else:
        yield good("/dev/shm", f"has {facts.shm_bytes / 2**30:.3g} GiB")


def alone(facts: GpuFacts) -> Iterator[Finding]:
    """Whether nobody else computes on the GPUs, and none is split."""
    for gpu in facts.visible:
        if number := gpu["num_processes"]:
            who = f"{number} other processes compute"
            if number == 1:
                who = "1 other process computes"
            fix = "end it (nvidia-smi lists it), or choose another GPU with CUDA_VISIBLE_DEVICES"
            yield warning("gpu", f"{who} on {gpu['uuid']}, so times are not comparable: {fix}")
        if gpu["mig"]:
            what = (
                "is split into MIG instances, so power, clocks and processes are those of the "
                "whole GPU"
            )
            yield warning("gpu", f"{gpu['uuid']} {what}: nvidia-smi -i {gpu['uuid']} -mig 0")
    counts = [gpu["num_processes"] for gpu in facts.visible]
    if None in counts and not facts.nvml_error:
        yield warning(
            "gpu",
            "the processes on the GPUs cannot be listed: run as a user who may query the driver",
        )
    elif counts and not any(counts) and not facts.nvml_error:
        yield good("gpu", "no other process computes on the GPUs")


CHECKS: tuple[Callable[[GpuFacts], Iterator[Finding]], ...] = (
    driver,
    build,
    nccl,
    peers,
    shared_memory,
    alone,
)
"""In the order of their output."""
USABLE = (driver, build, nccl)
"""The checks without which every trial on a GPU crashes."""
