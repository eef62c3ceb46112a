"""Shared memory of NCCL that ended ranks have left: files of random names in /dev/shm, which nobody else would remove.

NCCL unlinks a segment when its last peer has attached, so one is left where ranks are killed before. Whose it is can
only be told while a process has it mapped; so what ranks have mapped is noted before they are ended. A segment belongs
to one communicator, and all communicators of a trial's ranks lie within the trial, so nobody else waits for it. Those
that only a rank had which ended by itself are not known, and stay.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BEGINNING = "/dev/shm/nccl-"


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that was mapped; a name may be another file's by now."""

    path: str
    inode: int


def mapped(pids: Iterable[int]) -> set[Segment]:
    """The segments that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(BEGINNING) and not fields[5].endswith(" (deleted)"):
                    found.add(Segment(fields[5], int(fields[4])))
    return found


def remove(segments: Iterable[Segment]) -> None:
    """Remove those of the segments that are still there, are this user's, and are mapped by no process any more."""
    left = [one for one in segments if _is_there(one)]
    if not left:
        return
    used = mapped(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    for one in left:
        if one not in used:
            with contextlib.suppress(OSError):
                Path(one.path).unlink()


def _is_there(segment: Segment) -> bool:
    try:
        found = os.lstat(segment.path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_ino == segment.inode and found.st_uid == os.getuid()
