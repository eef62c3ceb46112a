"""The checks of ``doctor``: what this machine can run, what it cannot, why, and how to fix it.

An error prevents a run or makes results wrong; a warning degrades measurements or excludes some of the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from bench.judge.cards import GPU_CHECKS
from bench.judge.evidence import IDLE_SHARE
from bench.judge.integrity import Finding, Level, error, good, warning
from bench.plan.cell import Device
from bench.run.surroundings import Facts

PYTHON = ((3, 11), (3, 13))
"""Oldest and newest tested version."""
GIB = 2**30
DISK_BYTES, DISK_LEAST_BYTES = 10 * GIB, GIB // 4
"""Free space recommended for models of 1e9 parameters (the reference's update is kept, in fp32), and the minimum."""
MEMORY_BYTES = 4 * GIB
"""Generous bound of the memory of two ranks of the tiny model with every framework imported."""
PACKAGES = {
    "torch": (">=2.11", "<2.16"),
    "lightning": (">=2.6", "<2.7"),
    "deepspeed": (">=0.19.8", "<0.20"),
    "transformers": (">=5", "<6"),
    "accelerate": (">=1.15", "<2"),
    "torchtitan": (">=0.3", "<0.4"),
}
"""Required versions (pyproject.toml), and the first versions that were not tested."""
OPTIONAL = ("accelerate", "torchtitan")
"""Packages without which some backends are left out, which ``backends`` says."""


@dataclass(frozen=True, slots=True)
class Defect:
    """Versions of a package with wrong results or wrong errors; measured in docs/versions.md."""

    package: str
    versions: str
    text: str
    fix: str


DEFECTS = (
    Defect(
        "deepspeed",
        ">=0.17.6,<0.18.3",
        "ZeRO-2 keeps only the last micro-batch's gradient of a window",
        "pip install 'deepspeed>=0.19.8'",
    ),
    Defect(
        "deepspeed",
        "<0.19.8",
        "ZeRO-2 sums bf16 gradients in bf16, whatever grad_accum_dtype says",
        "pip install 'deepspeed>=0.19.8'",
    ),
    Defect(
        "lightning",
        "<2.2.1",
        "ThroughputMonitor raises unless log_every_n_steps is divisible by N",
        "pip install 'lightning>=2.6'",
    ),
)


def python(facts: Facts) -> Iterator[Finding]:
    """Whether this version of Python is tested."""
    number, version = ".".join(map(str, facts.python)), facts.python[:2]
    oldest, newest = (".".join(map(str, one)) for one in PYTHON)
    if version < PYTHON[0]:
        yield error("python", f"{number} is too old: install Python {oldest} to {newest}")
    elif version > PYTHON[1]:
        yield warning("python", f"{number} is newer than what is tested: Python {oldest} to {newest}")
    else:
        yield good("python", number)


def packages(facts: Facts) -> Iterator[Finding]:
    """Whether packages are installed in tested versions without known defects."""
    for name, (least, tested) in PACKAGES.items():
        installed = facts.packages.get(name)
        if installed is None and name in OPTIONAL:
            continue
        if installed is None:
            level = Level.ERROR if name == "torch" else Level.WARNING
            yield Finding(level, name, f"is not installed: pip install '{name}{least}'")
            continue
        try:
            version = Version(installed)
        except InvalidVersion:
            yield warning(name, f"{installed} is not a version that can be compared; needed is {least}")
            continue
        known = [one for one in DEFECTS if one.package == name and _in(version, one.versions)]
        for one in known:
            yield error(name, f"{installed}: {one.text} (docs/versions.md): {one.fix}")
        if not _in(version, least):
            yield error(name, f"{installed} is too old: pip install '{name}{least}'")
        elif not _in(version, tested):
            yield warning(name, f"{installed} is newer than what was tested ({least},{tested})")
        elif not known:
            yield good(name, installed)


def _in(version: Version, versions: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def torch(facts: Facts) -> Iterator[Finding]:
    """Whether torch can be imported and all-reduces over gloo."""
    if "torch" not in facts.packages:
        return  # reported by packages
    if facts.torch is None:
        again = "pip install --force-reinstall torch"
        yield error("torch", f"cannot be used: {facts.torch_error}: look at python -c 'import torch', or {again}")
    elif facts.torch.gloo_error:
        fix = "export GLOO_SOCKET_IFNAME=lo, and see that the host's own name resolves (/etc/hosts)"
        yield error("gloo", f"two processes cannot all-reduce: {facts.torch.gloo_error}: {fix}")
    else:
        yield good("gloo", "two processes all-reduce over the loopback device")


def loopback(facts: Facts) -> Iterator[Finding]:
    """Whether ranks on this machine can connect to each other."""
    if facts.loopback_error:
        fix = "ip link set lo up (in a container: give it a network namespace with a loopback device)"
        yield error("loopback", f"127.0.0.1 does not work: {facts.loopback_error}: {fix}")
    else:
        yield good("loopback", "127.0.0.1 works")


def disk(facts: Facts) -> Iterator[Finding]:
    """Whether there is enough disk space for runs."""
    free = f"{facts.disk_bytes / GIB:.3g} GiB are free where runs go"
    fix = "free some, or name another folder with --out"
    if facts.disk_bytes < DISK_LEAST_BYTES:
        yield error("disk", f"{free}: {fix}")
    elif facts.disk_bytes < DISK_BYTES:
        yield warning("disk", f"{free}: enough for small models; the reference's update takes 4 B a parameter: {fix}")
    else:
        yield good("disk", free)


def memory(facts: Facts) -> Iterator[Finding]:
    """Whether there is enough memory for two ranks."""
    if facts.memory_bytes < MEMORY_BYTES:
        what = f"{facts.memory_bytes / GIB:.3g} GiB are available, {MEMORY_BYTES / GIB:g} are wanted"
        yield warning("memory", f"{what}: end other programs, or run fewer ranks with --world-size 1")
    else:
        yield good("memory", f"{facts.memory_bytes / GIB:.3g} GiB are available")


def cores(facts: Facts) -> Iterator[Finding]:
    """Whether two ranks have a core each."""
    if facts.num_cores < 2:
        fix = "run with --world-size 1, or allow more (taskset, the container's CPU quota)"
        yield warning("cores", f"there is only 1, so two ranks take turns and times mean little: {fix}")
    else:
        yield good("cores", f"{facts.num_cores}")
    if facts.governor not in {None, "performance", "schedutil"}:
        fix = "cpupower frequency-set -g performance"
        yield warning("cores", f"the governor is '{facts.governor}', so the clock rises late: {fix}")


def idle(facts: Facts) -> Iterator[Finding]:
    """Whether times measured now would be comparable."""
    if facts.foreign_cores is None or facts.stolen_cores is None:
        yield warning("idle", "the load from other programs is unknown: /proc/stat does not say")
        return
    share = (facts.foreign_cores + facts.stolen_cores) / facts.num_cores
    if share > IDLE_SHARE:
        by = f"{facts.foreign_cores:.2g} cores by other programs, {facts.stolen_cores:.2g} by the hypervisor"
        limit = f"times are not comparable above {100 * IDLE_SHARE:g} %"
        what = f"{100 * share:.0f} % of the CPUs are taken ({by}), and {limit}"
        yield warning("idle", f"{what}: wait, or end other programs (see top)")
    else:
        yield good("idle", f"{100 * share:.0f} % of the CPUs are taken by others")


def backends(facts: Facts) -> Iterator[Finding]:
    """Which backends can run on which device."""
    for device in (Device.CPU, *([Device.CUDA] if facts.cards else [])):
        reasons: dict[str, list[str]] = {}
        for name, reason in facts.missing.get(device, {}).items():
            reasons.setdefault(reason, []).append(name)
        able = reasons.pop("", [])
        if able:
            yield good("backends", f"{device} can run {', '.join(able)}")
        for reason, names in reasons.items():
            level = Level.WARNING if able else Level.ERROR
            yield Finding(level, "backends", f"{device} cannot run {', '.join(names)}: {reason}")


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    python,
    packages,
    torch,
    *GPU_CHECKS,
    loopback,
    cores,
    memory,
    disk,
    idle,
    backends,
)
"""All checks, in the order of their output."""


def examine(facts: Facts) -> list[Finding]:
    """The findings of all checks."""
    return [finding for check in CHECKS for finding in check(facts)]
