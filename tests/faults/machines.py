"""Small machines for one run: a disk of a few bytes, and a limit of memory. Neither can hurt what is outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Disk:
    """A small file system over a folder, in a mount namespace of its own: other programs do not see it."""

    folder: Path
    holder: int
    """The process that keeps the namespace."""

    @property
    def before(self) -> Sequence[str]:
        """The command that starts a program in the namespace, beside the folder."""
        enter = (
            "nsenter",
            "--target",
            str(self.holder),
            "--user",
            "--mount",
            "--preserve-credentials",
            "--",
        )
        return (*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder.parent))

    @property
    def seen(self) -> Path:
        return Path(f"/proc/{self.holder}/root{self.folder}")


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """A tmpfs of so many bytes over the folder; skips the test where the kernel does not let a user mount."""
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("no unshare and nsenter here, so no small disk")
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo ready && exec sleep 3600'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        str(size),
        str(folder),
    ]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip(
                f"no file system can be mounted here, so no small disk: {holder.stderr.read().strip()}"
            )
        yield Disk(folder, holder.pid)
    finally:
        holder.kill()
        holder.wait()


def _memory_group() -> tuple[Path, str] | None:
    """This process's cgroup with a controller of memory, and the file of its limit; None if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return CGROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        group = CGROUPS / path.lstrip("/")
        control = group / "cgroup.subtree_control"
        if not controllers and control.exists() and "memory" in control.read_text().split():
            return group, "memory.max"
    return None


@contextlib.contextmanager
def little_memory(size: int) -> Iterator[Sequence[str]]:
    """The command that starts a program in a cgroup with so many bytes; skips the test where none can be made."""
    found = _memory_group()
    if found is None:
        pytest.skip("no cgroup with a controller of memory here")
    parent, limit = found
    group = parent / f"faults-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(size))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        yield ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
    finally:
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.1)
