"""Trials of two commits of the bench in one run.

Those of the other commit start from a launcher's process of its code.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from bench.errors import InputError
from bench.files import ROOT
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import Device
from bench.plan.task import Spec, Task

FOLDER = "against"
"""Where the other commit's package is, in the run's folder."""


def commit_of(name: str) -> str:
    """The full hash of a commit of the checkout. Raises InputError if there is no such commit."""
    found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not found:
        raise InputError(
            f"--against '{name}': is no commit of {ROOT}; name one that 'git log' there shows"
        )
    return found.decode().strip()


def unpack(commit: str, folder: Path) -> Path:
    """The package as it was at a commit, below the run's folder.

    Raises InputError if the checkout lacks the commit.
    """
    place = folder / FOLDER
    if not place.is_dir():
        content = _git("archive", "--format=tar", commit, "bench")
        if not content:
            raise InputError(
                f"--against {commit}: is not in {ROOT}, or has no package there; fetch it"
            )
        draft = folder / f"{FOLDER}.draft"
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(draft, filter="data")
        draft.rename(place)
    return place


def _git(*arguments: str) -> bytes:
    """What git prints in the checkout of the bench; nothing if it fails."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


class TwoCodes:
    """A launcher that runs the trials of the other commit with its code. Use as ``Launcher``."""

    def __init__(self, launcher: Launcher, device: Device, code: Path, *, cold: bool) -> None:
        self._ours, self._theirs = launcher, Launcher(device, cold=cold, code=code)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for launcher in (self._ours, self._theirs):
                stack.enter_context(launcher)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    def run(self, task: Task, timeout_s: float, inactivity_s: float = 0.0) -> Outcome:
        """As ``Launcher.run``."""
        launcher = self._ours
        if isinstance(task, Spec) and task.cell.other_commit:
            launcher = self._theirs
        return launcher.run(task, timeout_s, inactivity_s)

    def prepare(self, backends: Iterable[str]) -> None:
        """As ``Launcher.prepare``, of both."""
        names = list(backends)
        self._ours.prepare(names)
        self._theirs.prepare(names)

    def close(self) -> None:
        """As ``Launcher.close``, of both."""
        self._ours.close()
        self._theirs.close()
