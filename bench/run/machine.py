"""Describes the machine and its software, stored with every run, and compares two machines.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.backends.base import Backend, built_in
from bench.errors import InputError
from bench.launch import gpus, job_nodes
from bench.launch.nvml import Nvml, NvmlUnavailableError
from bench.run import trial_code
from bench.run.manifest import CONNECTION, FINGERPRINT, Manifest


def _required() -> list[str]:
    """Packages that built-in backends require, each once."""
    found: dict[str, None] = {}
    for backend in built_in().values():
        for name in backend.requires:
            found[name.replace("_", "-")] = None
    return list(found)


FRAMEWORKS = ("torch", *_required())
"""Packages that backends train with."""
PACKAGES = (*FRAMEWORKS, "numpy", "pandas", "scipy", "matplotlib", "pyarrow", "safetensors")
"""Packages that can change a result; their versions are stored."""
ENVIRONMENT_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "CUDA_VISIBLE_DEVICES",
    "DS_",
)
"""Prefixes of the environment variables that are stored; an allowlist, to keep secrets out."""
SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASS|CREDENTIAL|PRIVATE|COOKIE|AUTH|SIGNATURE|(^|_)KEY(_|$)", re.IGNORECASE
)
"""Names of variables that are not stored, whatever their prefix."""
SECRET_VALUES = re.compile(
    r"://[^/\s@]*@"  # a user, and perhaps a password, in an address
    # Prefixes of well-known tokens.
    r"|\b(gh[opsur]_|github_pat_|glpat-|hf_|sk-|xox[abps]-|AKIA|eyJ)[\w-]{12}"
    r"|-----BEGIN |\b(bearer|basic) \S{8}",
    re.IGNORECASE,
)
"""Values that are not stored, whatever the name of the variable."""


def num_cores() -> int:
    """Cores that this process may use, by its affinity and its control group (version 2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores


def threads_per_rank(num_ranks: int, asked: int = 0) -> int:
    """Threads per rank: ``asked``, or each rank's share of the cores if that is 0."""
    if asked > 0:
        return asked
    return max(1, num_cores() // num_ranks)


def peak_memory_bytes() -> int | None:
    """Peak resident memory of this process; None if the system does not report it.

    Not from getrusage, whose maximum includes the parent process before the exec.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def gpu_settings() -> list[dict[str, object]]:
    """Static settings of each visible GPU that affect its speed; none without NVML.

    As from ``NvmlGpu.settings``.
    """
    try:
        with Nvml() as nvml:
            every = nvml.gpus
            visible = [every[gpu["index"]] for gpu in gpus.gpus()]
            return [gpu.settings(visible) for gpu in visible]
    except NvmlUnavailableError:
        return []


def machine() -> dict[str, object]:
    """The hardware and the operating system: static facts, without host name or paths."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "governor": governor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus.gpus(),
        "gpu_settings": gpu_settings(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        if platform.processor():
            return platform.processor()
        return "unknown"
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def governor() -> str | None:
    """The frequency governor of the first core; None if unknown, as on most virtual machines."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def torch_build() -> dict[str, str | None]:
    """``cuda``, ``hip`` and ``git_version`` of the torch build, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = (Path(spec.origin).parent / "version.py").read_text()
    found: dict[str, str | None] = {}
    for name in ("cuda", "hip", "git_version"):
        match = re.search(rf"^{name}\b[^=\n]*= ['\"](.+?)['\"]$", text, re.MULTILINE)
        found[name] = None
        if match is not None:
            found[name] = match[1]
    return found


def distributions() -> dict[str, str]:
    """Versions of all installed packages by name, including NCCL's."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # The first one found is what gets imported: it shadows packages of the same name in a base
        # environment.
        found.setdefault(str(distribution.metadata["Name"]).lower(), distribution.version)
    return dict(sorted(found.items()))


def packages() -> dict[str, str]:
    """Versions of the installed packages in PACKAGES."""
    found = distributions()
    return {name: found[name] for name in PACKAGES if name in found}


def _is_stored(name: str, value: str) -> bool:
    """Whether a variable of the environment can change a result and holds no secret."""
    if not name.startswith(ENVIRONMENT_PREFIXES):
        return False
    return SECRET_NAMES.search(name) is None and SECRET_VALUES.search(value) is None


def environment() -> dict[str, str]:
    """The environment variables that can change a result, without those that may hold a secret."""
    return {name: value for name, value in sorted(os.environ.items()) if _is_stored(name, value)}


def code(
    backends: Mapping[str, type[Backend]], workloads: Mapping[str, Sequence[Path]]
) -> dict[str, str]:
    """SHA-256 of the code that is run, by name: the bench's ``trial_code``, and external code.

    An external backend counts with its file, an external workload with its whole package or single
    module, without what those import from elsewhere.
    """
    root = trial_code.PACKAGE
    every = hashlib.sha256()
    for path in trial_code.modules(root):
        every.update(
            f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest()
        )
    found = {"bench": every.hexdigest()}
    for name, backend in sorted(backends.items()):
        file = getattr(sys.modules.get(backend.__module__), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(root):
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for name, files in workloads.items():
        if files:
            content = b""
            for path in files:
                content += hashlib.sha256(path.read_bytes()).digest()
            found[f"workload {name}"] = hashlib.sha256(content).hexdigest()
    return found


def git_state() -> dict[str, Any]:
    """Commit of the bench's checkout and whether it is clean.

    Both are None if git does not track this package: an installed one may lie in an environment
    inside the checkout of something else.
    """
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=30
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    if git("ls-files", "--error-unmatch", "--", __file__) is None:
        return {"commit": None, "clean": None}
    status = git("status", "--porcelain", "--", str(folder))
    clean = None
    if status is not None:
        clean = not status
    return {"commit": git("rev-parse", "HEAD"), "clean": clean}


MOST_SHOWN = 3
"""Most differences of a node that are named."""


def fingerprint() -> dict[str, object]:
    """The parts in FINGERPRINT, of this machine."""
    parts = (machine(), packages(), torch_build(), environment())
    return dict(zip(FINGERPRINT, parts, strict=True))


def connection(head: str) -> dict[str, object]:
    """The part CONNECTION: what else nodes of a job should have in common.

    NUMA nodes; nominal Mbit/s (0 if unknown, as of virtual links) and MTU of the interface towards
    the address ``head``; and the rates of the ports of InfiniBand or RoCE.
    """
    online = Path("/sys/devices/system/node/online")
    ports = Path("/sys/class/infiniband").glob("*/ports/*/rate")
    found: dict[str, object] = {"numa_nodes": None}
    if online.exists():
        found["numa_nodes"] = online.read_text().strip()
    found["infiniband"] = sorted(port.read_text().strip() for port in ports)
    with contextlib.suppress(OSError, InputError):
        family = socket.AF_INET
        if ":" in head:
            family = socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((head, 9))  # sends nothing
            link = psutil.net_if_stats()[job_nodes.interface_of(str(probe.getsockname()[0]))]
        found |= {"mbit_per_s": link.speed, "mtu": link.mtu}
    return found


NOT_STORED, STORED = "(not stored)", "(stored)"
"""Stand for values of a fingerprint that are not shown themselves."""
MEMORY = "machine.memory_bytes"
OF_A_BOOT = 1e-3
"""The share of the memory by which two starts of one machine may differ."""
OF_ONE = re.compile(r"\.(uuid|mig|index|topology(\.\d+)?)$")
"""Keys of the fingerprint that differ between any two machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A key of the fingerprint that differs between two runs."""

    key: str
    a: object
    b: object

    @property
    def is_of_the_boot(self) -> bool:
        """Whether it is memory that the kernel kept for itself when it started."""
        if self.key != MEMORY or not isinstance(self.a, int) or not isinstance(self.b, int):
            return False
        return math.isclose(self.a, self.b, rel_tol=OF_A_BOOT)


def differences(
    a: Mapping[str, object], b: Mapping[str, object], parts: Sequence[str] = FINGERPRINT
) -> list[Changed]:
    """The keys of the parts that differ; a part that one of both lacks counts as one key.

    Memory that differs by no more than between two starts of one machine counts as equal.
    """
    found = []
    for part in parts:
        if part not in a or part not in b:
            if part in a:
                found.append(Changed(key=part, a=STORED, b=NOT_STORED))
            elif part in b:
                found.append(Changed(key=part, a=NOT_STORED, b=STORED))
            continue
        ours, theirs = _flat(a[part], part), _flat(b[part], part)
        for key in sorted(ours.keys() | theirs.keys()):
            change = Changed(key=key, a=ours.get(key, NOT_STORED), b=theirs.get(key, NOT_STORED))
            if change.a != change.b and not change.is_of_the_boot:
                found.append(change)
    return found


def unlike_nodes(manifest: Manifest) -> Iterator[str]:
    """Each node whose fingerprint differs from that of node 0, and how they differ."""
    for number, node in enumerate(manifest.nodes, start=1):
        words: list[str] = []
        num_others = 0
        fingerprints = (manifest.node.fingerprint, node.fingerprint)
        for change in differences(*fingerprints, (*FINGERPRINT, CONNECTION)):
            if OF_ONE.search(change.key):
                continue
            if len(words) < MOST_SHOWN:
                words.append(f"{change.key} is {change.b!r}, and {change.a!r} on node 0")
            else:
                num_others += 1
        if num_others:
            words.append(f"{num_others} more")
        if words:
            yield f"node {number}: {'; '.join(words)}"


def _flat(value: object, key: str) -> dict[str, object]:
    """Flatten nested objects and lists, with dots between the keys.

    An empty one has no keys, but counts as stored.
    """
    items: Iterable[tuple[object, object]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {key: value}
    found: dict[str, object] = {}
    for inner, item in items:
        found |= _flat(item, f"{key}.{inner}")
    return found
