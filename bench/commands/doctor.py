"""``doctor``: reports what this machine can run, what it cannot, why, and how to fix it.

An error prevents a run or makes results wrong; a warning degrades measurements or excludes some of
the backends. With ``--json`` one object: ``findings``, each with ``level`` (error, warning, note,
good), ``topic`` and ``text``; ``errors`` and ``warnings``, their numbers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bench.audit.advisories import PAGE, KnownBad, facts_of, matching
from bench.backends.base import registry
from bench.commands.options import CommandParsers, named
from bench.files import RESULTS, existing
from bench.findings import Finding, Level, error, good, note, warning
from bench.formatting import plural
from bench.grouping import grouped
from bench.launch import gpu_checks, surroundings
from bench.launch.torch_facts import GLOO, TorchFacts, ask_torch
from bench.measure.host import IDLE_SHARE, HostLoad, merge
from bench.plan.cell import REFERENCES, Device
from bench.run import machine

DESCRIPTION = (
    "Looks at Python, packages and their known defects, torch, the GPUs and their driver, NCCL, "
    "what is between the GPUs, /dev/shm, the loopback device, cores, memory, disk, and other "
    "processes; takes some seconds. Exit status 1 if something cannot run or would compute "
    "something else, 0 with warnings alone."
)


LOAD_S = 1.0
"""How long the load of the machine is observed."""
GIB = 2**30
DISK_BYTES, DISK_LEAST_BYTES = 10 * GIB, GIB // 4
"""Free space recommended for models of 1e9 parameters (the reference's update is kept, in fp32),
and the minimum."""
MEMORY_BYTES = 4 * GIB
"""Generous bound of the memory of two ranks of the tiny model with every framework imported."""
PROJECT = "accumulation-bench"
"""The distribution whose metadata has the bounds."""
FRAMEWORKS, TESTED = "frameworks", "tested"
"""Its extra of what training needs, and the one that has the first versions that were not
tested."""
OWN_TRAININGS = (
    facts_of(
        {
            "deepspeed": {
                "zero_optimization": {"stage": 2},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "gradient_clipping": 0.0,
            }
        },
        framework="deepspeed",
        accumulate=4,
    ),
    facts_of(None, framework="lightning", accumulate=4, **{"loop.throughput_monitor": True}),
)
"""What backends of the bench set, and the ThroughputMonitor that it measures: a defect that meets
these is an error."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine can run, and how to fix what it cannot",
        description=DESCRIPTION,
    )
    option = parser.add_argument
    option(
        "--out",
        type=named,
        default=RESULTS,
        metavar="DIR",
        help="where runs will go (default: results)",
    )
    option(
        "--json",
        action="store_true",
        help="one JSON object; its keys: see bench/commands/doctor.py",
    )


def run(arguments: argparse.Namespace) -> int:
    from bench.report.terminal import report_findings

    missing: dict[str, dict[str, str]] = {}
    for device in Device:
        of_device = missing.setdefault(str(device), {})
        for name, backend in registry().items():
            if name not in REFERENCES:
                of_device[name] = backend.missing(device)
    verdicts = ("fix the errors first", "runs are possible; mind the warnings", "all is well")
    return report_findings(examine(arguments.out, missing), verdicts, as_json=arguments.json)


def examine(folder: Path, missing: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """The findings of all checks, with runs under ``folder``.

    It takes some seconds, mostly to import torch. ``missing``, by device and backend: why the
    backend cannot run on it; empty if it can.
    """
    installed, metadata = machine.distributions(), _metadata()
    torch, torch_error = ask_torch(GLOO)
    facts = gpu_checks.gather(torch)
    with HostLoad() as load:
        time.sleep(LOAD_S)
    num_cores = machine.num_cores()
    found = [*python(sys.version_info[:3], metadata), *packages(installed, metadata)]
    if "torch" in installed:
        found += gloo(torch, torch_error)
    for check in gpu_checks.CHECKS:
        found += check(facts)
    found += loopback(surroundings.loopback_error())
    for broken in surroundings.broken():
        if broken.topic != "loopback":
            found.append(broken)
    found += cores(num_cores, machine.governor())
    found += memory(psutil.virtual_memory().available)
    found += disk(shutil.disk_usage(existing(folder)).free)
    found += idle(merge([load.result]), num_cores)
    found += backends(missing, has_gpu=bool(facts.gpus))
    return found


Metadata = Mapping[str, Sequence[str]]
"""Requires-Dist, Requires-Python and Classifier of the installed project; empty if it is not
installed."""


def _metadata() -> Metadata:
    try:
        found = importlib.metadata.metadata(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = ("Requires-Dist", "Requires-Python", "Classifier")
    return {name: found.get_all(name, []) for name in names}


def python(numbers: Sequence[int], metadata: Metadata) -> Iterator[Finding]:
    """Whether this version of Python is tested."""
    number = ".".join(map(str, numbers))
    version = Version(number)
    needed = SpecifierSet(",".join(metadata.get("Requires-Python", ())))
    if version not in needed:
        yield error("python", f"{number} is not supported: install Python {needed}")
    else:
        yield good("python", number)


def packages(versions: Mapping[str, str], metadata: Metadata) -> Iterator[Finding]:
    """Whether required packages are installed in tested versions, and what is known of these."""
    installed = {str(canonicalize_name(name)): version for name, version in versions.items()}
    required, tested = _bounds(metadata)
    met: list[KnownBad] = []
    for facts in OWN_TRAININGS:
        for found in matching(installed, facts):
            if found.is_certain:
                met.append(found)
    if not required:
        yield warning(
            "packages",
            f"{PROJECT} is not installed, so its requirements are unknown: pip install -e .",
        )
    for name, bound in required.items():
        defects = [found for found in met if found.advisory.package == name]
        yield from _package(name, installed.get(name), bound, tested.get(name), defects)
    named = {found.advisory.id for found in met}
    yield from known_bad([found for found in matching(installed) if found.advisory.id not in named])


def _package(
    name: str,
    text: str | None,
    bound: Bound,
    tested: SpecifierSet | None,
    defects: Sequence[KnownBad],
) -> Iterator[Finding]:
    """The findings on one package; ``text`` is its version, None if it is not installed."""
    least = bound.versions
    fix = f"pip install '{name}{least}'"
    if text is None:
        level = Level.WARNING
        if name == "torch":
            level = Level.ERROR
        if not bound.is_optional:  # else some backends are left out, as ``backends`` reports
            yield Finding(level, name, f"is not installed: {fix}")
        return
    try:
        version = Version(text)
    except InvalidVersion:
        yield warning(name, f"{text} is not a version that can be compared; needed is {least}")
        return
    for found in defects:
        yield error(name, f"{found.sentence}: {fix}")
    if not _within(version, least):
        yield error(name, f"{text} is too old: {fix}")
    elif tested is not None and not _within(version, tested):
        yield warning(name, f"{text} is newer than what was tested ({least},{tested})")
    elif not defects:
        yield good(name, text)


def known_bad(matches: Sequence[KnownBad]) -> Iterator[Finding]:
    """What installed versions do under settings that are unknown here, a line for each package."""
    ids = grouped(((found.advisory.package, found.version), found.advisory.id) for found in matches)
    for (name, version), found in ids.items():
        defects = plural(len(found), "known defect")
        where = f"under some settings ({PAGE})"
        yield note(name, f"{version} has {defects} {where}: {', '.join(found)}")


class Bound(NamedTuple):
    """What of a package is required."""

    versions: SpecifierSet
    is_optional: bool


def _bounds(metadata: Metadata) -> tuple[dict[str, Bound], dict[str, SpecifierSet]]:
    """By package: what is required, and the versions that were tested."""
    required: dict[str, Bound] = {}
    tested: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, metadata.get("Requires-Dist", ())):
        name = canonicalize_name(requirement.name)
        if _is_of(requirement, TESTED):
            tested[name] = requirement.specifier
        elif requirement.specifier:
            is_optional = requirement.marker is not None and not _is_of(requirement, FRAMEWORKS)
            required[name] = Bound(requirement.specifier, is_optional)
    return required, tested


def _is_of(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def _within(version: Version, versions: SpecifierSet) -> bool:
    return versions.contains(version, prereleases=True)


def gloo(torch: TorchFacts | None, torch_error: str) -> Iterator[Finding]:
    """Whether torch can be imported and all-reduces over gloo."""
    if torch is None:
        again = "pip install --force-reinstall torch"
        yield error(
            "torch", f"cannot be used: {torch_error}: look at python -c 'import torch', or {again}"
        )
    elif torch.gloo_error:
        fix = "export GLOO_SOCKET_IFNAME=lo, and see that the host's own name resolves (/etc/hosts)"
        yield error("gloo", f"two processes cannot all-reduce: {torch.gloo_error}: {fix}")
    else:
        yield good("gloo", "two processes all-reduce over the loopback device")


def loopback(problem: str) -> Iterator[Finding]:
    """Whether ranks on this machine can connect to each other."""
    if problem:
        fix = (
            "ip link set lo up (in a container: give it a network namespace with a loopback device)"
        )
        yield error("loopback", f"127.0.0.1 does not work: {problem}: {fix}")
    else:
        yield good("loopback", "127.0.0.1 works")


def cores(num_cores: int, governor: str | None) -> Iterator[Finding]:
    """Whether two ranks have a core each."""
    if num_cores < 2:
        fix = "run with --world-size 1, or allow more (taskset, the container's CPU quota)"
        yield warning(
            "cores", f"there is only 1, so two ranks take turns and times mean little: {fix}"
        )
    else:
        yield good("cores", f"{num_cores}")
    if governor not in {None, "performance", "schedutil"}:
        fix = "cpupower frequency-set -g performance"
        yield warning("cores", f"the governor is '{governor}', so the clock rises late: {fix}")


def memory(num_bytes: int) -> Iterator[Finding]:
    """Whether there is enough memory for two ranks."""
    available = f"{num_bytes / GIB:.3g} GiB are available"
    if num_bytes < MEMORY_BYTES:
        fix = "end other programs, or run fewer ranks with --world-size 1"
        yield warning("memory", f"{available}, {MEMORY_BYTES / GIB:g} are wanted: {fix}")
    else:
        yield good("memory", available)


def disk(num_bytes: int) -> Iterator[Finding]:
    """Whether there is enough disk space for runs."""
    free = f"{num_bytes / GIB:.3g} GiB are free where runs go"
    fix = "free some, or name another folder with --out"
    if num_bytes < DISK_LEAST_BYTES:
        yield error("disk", f"{free}: {fix}")
    elif num_bytes < DISK_BYTES:
        yield warning(
            "disk",
            f"{free}: enough for small models; the reference's update takes 4 B a parameter: {fix}",
        )
    else:
        yield good("disk", free)


def idle(load: Mapping[str, float] | None, num_cores: int) -> Iterator[Finding]:
    """Whether times measured now would be comparable."""
    if load is None:
        yield warning("idle", "the load from other programs is unknown: /proc/stat does not say")
        return
    foreign, stolen = load["foreign_cores"], load["stolen_cores"]
    share = (foreign + stolen) / num_cores
    if share > IDLE_SHARE:
        by = f"{foreign:.2g} cores by other programs, {stolen:.2g} by the hypervisor"
        limit = f"times are not comparable above {100 * IDLE_SHARE:g} %"
        what = f"{100 * share:.0f} % of the CPUs are taken ({by}), and {limit}"
        yield warning("idle", f"{what}: wait, or end other programs (see top)")
    else:
        yield good("idle", f"{100 * share:.0f} % of the CPUs are taken by others")


def backends(missing: Mapping[str, Mapping[str, str]], *, has_gpu: bool) -> Iterator[Finding]:
    """Which backends can run on which device."""
    devices = [Device.CPU]
    if has_gpu:
        devices.append(Device.CUDA)
    for device in devices:
        reasons = grouped((reason, name) for name, reason in missing.get(device, {}).items())
        able = reasons.pop("", [])
        level = Level.ERROR
        if able:
            level = Level.WARNING
            yield good("backends", f"{device} can run {', '.join(able)}")
        for reason, names in reasons.items():
            yield Finding(level, "backends", f"{device} cannot run {', '.join(names)}: {reason}")
