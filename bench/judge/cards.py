"""The doctor's checks of GPUs: driver, torch's build, NCCL, what is between the cards and who else is on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.judge.integrity import Finding, Level
from bench.run.surroundings import Card, Facts, Torch

SHM_BYTES, SHM_LEAST_BYTES = 2**30, 64 * 2**20
"""Of /dev/shm: what NCCL may want for eight GPUs that do not reach each other, and what containers have by default."""
INDEX = "https://download.pytorch.org/whl"
BUILDS = ((12, 6), (13, 0))
"""Versions of CUDA for which all of the torch versions that are tested have a build; others have some of them."""
OFF = frozenset({"1", "true", "yes", "on"})
"""Values of NCCL_P2P_DISABLE and NCCL_SHM_DISABLE that switch something off."""


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
        yield Finding(Level.GOOD, "gpu", f"{what}; driver {facts.driver}{cuda}")
    elif facts.device_nodes and "nvidia-ml-py" not in facts.packages:
        what = f"{facts.device_nodes} GPU(s), but nvidia-ml-py is missing, so the bench cannot see them"
        yield Finding(Level.ERROR, "gpu", f"{what}: pip install nvidia-ml-py")
    elif facts.device_nodes:
        fix = "see nvidia-smi; reboot after a driver update; in a container, pass the GPUs in (--gpus all)"
        yield Finding(
            Level.ERROR, "gpu", f"{facts.device_nodes} GPU(s) whose driver does not answer ({facts.nvml_error}): {fix}"
        )
    else:
        yield Finding(Level.GOOD, "gpu", "none: runs use the CPU, over gloo")
    hidden = [card for card in facts.cards if not card.visible]
    if hidden:
        setting = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        level = Level.ERROR if len(hidden) == len(facts.cards) else Level.WARNING
        yield Finding(
            level,
            "gpu",
            f"CUDA_VISIBLE_DEVICES='{setting}' hides {len(hidden)} of {len(facts.cards)}: unset CUDA_VISIBLE_DEVICES",
        )


def _used(facts: Facts) -> list[Card]:
    return [card for card in facts.cards if card.visible]


def _asked(facts: Facts) -> Torch | None:
    """Torch, where it answered and there is a GPU for it."""
    return facts.torch if _used(facts) else None


def build(facts: Facts) -> Iterator[Finding]:
    """Whether torch is built for this driver and these cards."""
    torch = _asked(facts)
    if torch is None:
        return
    topic = "cuda"
    if torch.built_for is None:
        yield Finding(
            Level.ERROR, topic, f"torch {torch.version} is built for the CPU alone: {_build_for(facts.driver_cuda)}"
        )
        return
    built = tuple(int(part) for part in torch.built_for.split(".")[:2])
    if facts.driver_cuda is not None and built[0] > facts.driver_cuda[0]:
        what = f"torch {torch.version} is built for CUDA {torch.built_for}"
        what += f", and driver {facts.driver} supports at most {_version(facts.driver_cuda)}"
        yield Finding(Level.ERROR, topic, f"{what}: update the driver, or {_build_for(facts.driver_cuda)}")
    elif torch.cuda_error or not torch.num_devices:
        said = torch.cuda_error or "it finds no device"
        fix = "see nvidia-smi, then restart the programs that hold the driver, or reboot"
        yield Finding(Level.ERROR, topic, f"torch cannot use the GPUs that the driver reports: {said}: {fix}")
    else:
        yield Finding(
            Level.GOOD, topic, f"torch {torch.version} uses {torch.num_devices}, built for CUDA {torch.built_for}"
        )
    for capability in sorted({tuple(pair) for pair in torch.capabilities}):
        if not runs(capability, torch.architectures):
            has = ", ".join(torch.architectures)
            what = f"torch {torch.version} has no kernels for compute capability {_version(capability)} (it has {has})"
            yield Finding(
                Level.ERROR,
                topic,
                f"{what}: install a torch that is {'newer' if _is_new(capability, torch) else 'older'}",
            )


def runs(capability: Sequence[int], architectures: Sequence[str]) -> bool:
    """Whether kernels for some of these run on a card: binaries of its major version and no later minor one, or PTX."""
    for one in architectures:
        kind, _, digits = one.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        if not number or not digits[-1].isdigit():  # sm_90a: for that very card
            if number and (int(number[:-1]), int(number[-1])) == tuple(capability):
                return True
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= tuple(capability):
            return True
    return False


def _is_new(capability: Sequence[int], torch: Torch) -> bool:
    numbers = [int("".join(c for c in one if c.isdigit()) or 0) for one in torch.architectures]
    return capability[0] * 10 + capability[1] > max(numbers, default=0)


def nccl(facts: Facts) -> Iterator[Finding]:
    """Whether GPUs can talk to each other."""
    torch = _asked(facts)
    if torch is None or torch.built_for is None:
        return
    if torch.nccl:
        yield Finding(Level.GOOD, "nccl", "included in torch")
    else:
        yield Finding(
            Level.ERROR,
            "nccl",
            f"torch {torch.version} is built without it, so no rank starts on a GPU: {_build_for(facts.driver_cuda)}",
        )


def peers(facts: Facts) -> Iterator[Finding]:
    """Whether GPUs read each other's memory, or go through the host's."""
    torch = _asked(facts)
    if torch is None or len(_used(facts)) < 2:
        return
    if facts.environment.get("NCCL_P2P_DISABLE", "").lower() in OFF:
        yield Finding(
            Level.WARNING,
            "p2p",
            "NCCL_P2P_DISABLE is set, so all traffic goes through host memory: unset NCCL_P2P_DISABLE",
        )
    pairs = sorted({tuple(sorted(pair)) for pair in torch.no_peers})
    if pairs:
        some = ", ".join(f"{a}-{b}" for a, b in pairs[:4]) + (" ..." if len(pairs) > 4 else "")
        fix = "turn off the IOMMU and PCIe ACS (nvidia-smi topo -p2p r shows more), or mention it with the times"
        yield Finding(
            Level.WARNING,
            "p2p",
            f"GPUs {some} cannot access each other's memory, so their traffic goes through host memory: {fix}",
        )
    elif torch.num_devices > 1:
        yield Finding(Level.GOOD, "p2p", "all GPUs can access each other's memory")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for NCCL."""
    if len(_used(facts)) < 2:
        yield Finding(Level.GOOD, "/dev/shm", "is needed only with several GPUs")
        return
    fix = "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g /dev/shm"
    if facts.shm_bytes is None:
        yield Finding(Level.ERROR, "/dev/shm", f"does not exist, and NCCL needs it between GPUs: {fix}")
    elif facts.shm_bytes < SHM_BYTES:
        level = Level.ERROR if facts.shm_bytes <= SHM_LEAST_BYTES else Level.WARNING
        yield Finding(
            level, "/dev/shm", f"has {facts.shm_bytes / 2**20:.3g} MiB, too little for NCCL between GPUs: {fix}"
        )
    else:
        yield Finding(Level.GOOD, "/dev/shm", f"has {facts.shm_bytes / 2**30:.3g} GiB")


def alone(facts: Facts) -> Iterator[Finding]:
    """Whether nobody else computes on the cards, and they are whole."""
    used = _used(facts)
    busy = [card for card in used if card.num_processes]
    for card in busy:
        who = "1 other process computes" if card.num_processes == 1 else f"{card.num_processes} other processes compute"
        yield Finding(
            Level.WARNING,
            "gpu",
            f"{who} on {card.uuid}, so times are not comparable: end it (nvidia-smi lists it), or choose "
            "another GPU with CUDA_VISIBLE_DEVICES",
        )
    for card in (card for card in used if card.mig):
        yield Finding(
            Level.WARNING,
            "gpu",
            f"{card.uuid} is split into MIG instances, so power, clocks and processes are those of the whole GPU: "
            f"nvidia-smi -i {card.uuid} -mig 0",
        )
    if any(card.num_processes is None for card in used):
        yield Finding(
            Level.WARNING, "gpu", "the processes on the GPUs cannot be listed: run as a user who may query the driver"
        )
    elif used and not busy:
        yield Finding(Level.GOOD, "gpu", "no other process computes on the GPUs")


GPU_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (driver, build, nccl, peers, shared_memory, alone)
"""In the order in which they are told."""
USABLE = (driver, build, nccl)
"""Those without which every trial on a GPU crashes."""
