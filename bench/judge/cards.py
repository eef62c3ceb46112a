"""The doctor's checks of GPUs: driver, torch's build, NCCL, links between the GPUs, and who else uses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from bench.judge.integrity import Finding, Level, error, good, warning
from bench.run.surroundings import Card, Facts, Torch

SHM_BYTES, SHM_LEAST_BYTES = 2**30, 64 * 2**20
"""Size of /dev/shm that NCCL may want for eight GPUs without peer access, and a container's default."""
INDEX = "https://download.pytorch.org/whl"
BUILDS = ((12, 6), (13, 0))
"""Versions of CUDA for which every tested torch has a build."""
OFF = frozenset({"1", "true", "yes", "on"})
"""Values of NCCL_P2P_DISABLE that turn peer access off."""


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _build_for(driver_cuda: tuple[int, int] | None) -> str:
    """The command that installs the newest torch that this driver can run."""
    # Within one major version, any driver runs any build: CUDA's minor version compatibility.
    fitting = [build for build in BUILDS if driver_cuda is not None and build[0] <= driver_cuda[0]]
    if not fitting:
        return "update the driver, since no supported torch runs with it"
    return f"pip install --force-reinstall torch --index-url {INDEX}/cu{fitting[-1][0]}{fitting[-1][1]}"


def driver(facts: Facts) -> Iterator[Finding]:
    """Whether there are GPUs, and a driver that answers."""
    if facts.cards:
        names = [card.name for card in facts.cards]
        what = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        cuda = "" if facts.driver_cuda is None else f", for CUDA up to {_version(facts.driver_cuda)}"
        yield good("gpu", f"{what}; driver {facts.driver}{cuda}")
    elif facts.device_nodes and "nvidia-ml-py" not in facts.packages:
        what = f"{facts.device_nodes} GPU(s), but nvidia-ml-py is missing, so the bench cannot see them"
        yield error("gpu", f"{what}: pip install nvidia-ml-py")
    elif facts.device_nodes:
        fix = "see nvidia-smi; reboot after a driver update; in a container, pass the GPUs in (--gpus all)"
        what = f"{facts.device_nodes} GPU(s) whose driver does not answer ({facts.nvml_error})"
        yield error("gpu", f"{what}: {fix}")
    else:
        yield good("gpu", "none: runs use the CPU, over gloo")
    if hidden := [card for card in facts.cards if not card.visible]:
        setting = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        what = f"CUDA_VISIBLE_DEVICES='{setting}' hides {len(hidden)} of {len(facts.cards)}"
        level = Level.ERROR if len(hidden) == len(facts.cards) else Level.WARNING
        yield Finding(level, "gpu", f"{what}: unset CUDA_VISIBLE_DEVICES")


def _used(facts: Facts) -> list[Card]:
    return [card for card in facts.cards if card.visible]


def _asked(facts: Facts) -> Torch | None:
    """Torch, if it answered and there is a GPU for it."""
    return facts.torch if _used(facts) else None


def build(facts: Facts) -> Iterator[Finding]:
    """Whether torch is built for this driver and these GPUs."""
    torch = _asked(facts)
    if torch is None:
        return
    if torch.built_for is None:
        yield error("cuda", f"torch {torch.version} is built for the CPU alone: {_build_for(facts.driver_cuda)}")
        return
    named = f"torch {torch.version} is built for CUDA {torch.built_for}"
    if facts.driver_cuda is not None and int(torch.built_for.split(".")[0]) > facts.driver_cuda[0]:
        what = f"{named}, and driver {facts.driver} supports at most {_version(facts.driver_cuda)}"
        yield error("cuda", f"{what}: update the driver, or {_build_for(facts.driver_cuda)}")
    elif torch.cuda_error or not torch.num_devices:
        said = torch.cuda_error or "it finds no device"
        fix = "see nvidia-smi, then restart the programs that hold the driver, or reboot"
        yield error("cuda", f"torch cannot use the GPUs that the driver reports: {said}: {fix}")
    else:
        yield good("cuda", f"torch {torch.version} uses {torch.num_devices}, built for CUDA {torch.built_for}")
    kernels = [found.groups() for one in torch.architectures if (found := ARCHITECTURE.fullmatch(one))]
    for capability in sorted({(major, minor) for major, minor in torch.capabilities}):
        if not any(_runs(capability, *kernel) for kernel in kernels):
            what = f"torch {torch.version} has no kernels for compute capability {_version(capability)}"
            newest = max(((int(major), int(minor)) for _, major, minor, _ in kernels), default=(0, 0))
            fix = f"install a torch that is {'newer' if capability > newest else 'older'}"
            yield error("cuda", f"{what} (it has {', '.join(torch.architectures)}): {fix}")


ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")
"""Kernels as torch names them: sm_90, sm_90a, compute_90."""


def _runs(capability: tuple[int, int], kind: str, major: str, minor: str, special: str) -> bool:
    """Whether kernels run on a GPU: binaries on their major version from their minor one on, PTX on all later ones."""
    built = int(major), int(minor)
    if special:  # sm_90a: for that very GPU
        return built == capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def nccl(facts: Facts) -> Iterator[Finding]:
    """Whether torch has NCCL, which ranks on GPUs need."""
    torch = _asked(facts)
    if torch is None or torch.built_for is None:
        return
    if torch.nccl:
        yield good("nccl", "included in torch")
    else:
        what = f"torch {torch.version} is built without it, so no rank starts on a GPU"
        yield error("nccl", f"{what}: {_build_for(facts.driver_cuda)}")


def peers(facts: Facts) -> Iterator[Finding]:
    """Whether GPUs read each other's memory, or go through the host's."""
    torch = _asked(facts)
    if torch is None or len(_used(facts)) < 2:
        return
    if facts.environment.get("NCCL_P2P_DISABLE", "").lower() in OFF:
        what = "NCCL_P2P_DISABLE is set, so all traffic goes through host memory"
        yield warning("p2p", f"{what}: unset NCCL_P2P_DISABLE")
    if pairs := sorted({tuple(sorted(pair)) for pair in torch.no_peers}):
        some = ", ".join(f"{a}-{b}" for a, b in pairs[:4]) + (" ..." if len(pairs) > 4 else "")
        what = f"GPUs {some} cannot access each other's memory, so their traffic goes through host memory"
        fix = "turn off the IOMMU and PCIe ACS (nvidia-smi topo -p2p r shows more), or mention it with the times"
        yield warning("p2p", f"{what}: {fix}")
    elif torch.num_devices > 1:
        yield good("p2p", "all GPUs can access each other's memory")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for NCCL."""
    fix = "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    if len(_used(facts)) < 2:
        yield good("/dev/shm", "is needed only with several GPUs")
    elif facts.shm_bytes is None:
        yield error("/dev/shm", f"does not exist, and NCCL needs it between GPUs: {fix}")
    elif facts.shm_bytes < SHM_BYTES:
        what = f"has {facts.shm_bytes / 2**20:.3g} MiB, too little for NCCL between GPUs"
        level = Level.ERROR if facts.shm_bytes <= SHM_LEAST_BYTES else Level.WARNING
        yield Finding(level, "/dev/shm", f"{what}: {fix}")
    else:
        yield good("/dev/shm", f"has {facts.shm_bytes / 2**30:.3g} GiB")


def alone(facts: Facts) -> Iterator[Finding]:
    """Whether nobody else computes on the GPUs, and none is split."""
    used = _used(facts)
    busy = [card for card in used if card.num_processes]
    for card in busy:
        who = "1 other process computes" if card.num_processes == 1 else f"{card.num_processes} other processes compute"
        fix = "end it (nvidia-smi lists it), or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield warning("gpu", f"{who} on {card.uuid}, so times are not comparable: {fix}")
    for card in (card for card in used if card.mig):
        what = f"{card.uuid} is split into MIG instances, so power, clocks and processes are those of the whole GPU"
        yield warning("gpu", f"{what}: nvidia-smi -i {card.uuid} -mig 0")
    if any(card.num_processes is None for card in used):
        yield warning("gpu", "the processes on the GPUs cannot be listed: run as a user who may query the driver")
    elif used and not busy:
        yield good("gpu", "no other process computes on the GPUs")


GPU_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (driver, build, nccl, peers, shared_memory, alone)
"""In the order of their output."""
USABLE = (driver, build, nccl)
"""The checks without which every trial on a GPU crashes."""
