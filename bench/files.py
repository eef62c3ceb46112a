"""Files and folders that a user names, and the locks that guard them.

A lock is a file on which the kernel's advisory lock (flock) is held. A file that is there while nobody holds that lock
is stale, whatever it says, and is taken over. The file says who holds it, for whoever is refused.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.errors import InputError


def read(path: Path, place: str, advice: str) -> bytes:
    """The file's bytes. Raises InputError that begins with ``place`` if it cannot be read, or is no file that ends."""
    content = b""
    try:
        special = path.exists() and not (path.is_file() or path.is_dir())
        if not special:
            content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{place}: cannot be read ({reason}); {advice}") from error
    if special:
        raise InputError(f"{place}: is a device or pipe; {advice}")
    return content


RESULTS, PLOTS = Path("results"), Path("plots")


def plots_folder(folder: Path) -> Path:
    """Where the plots of a run are drawn: those of results/<run> in plots/<run>, others inside the run's folder."""
    return PLOTS / folder.name if folder.resolve().parent == RESULTS.resolve() else folder / "plots"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists. A name that no file could have is of none that does."""
    path = folder.resolve()
    return next(one for one in (path, *path.parents) if os.path.exists(one))  # noqa: PTH110 - Path's raises then


def new_folder(name: str) -> Path:
    """A folder that does not exist yet."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{stamp}-{name}"


def private(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, that this user alone can write. Raises OSError if it is not there."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


FILE = "run.lock"
"""In a run's folder, while a bench works in it."""
READING_S = 0.5
"""How long a lock is waited for: its holder may be about to leave, or not have written yet who it is."""


class BusyError(InputError):
    """Somebody else holds the lock."""


@contextlib.contextmanager
def run_folder(folder: Path, place: str) -> Iterator[None]:
    """Hold the folder of a run, which is made if it is not there.

    Raises BusyError naming the holder, or InputError if the folder cannot be used; both begin with ``place``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be written ({error.strerror}); name a folder that can") from error
    with held(folder / FILE, place, "wait for it, or name another folder"):
        yield


@contextlib.contextmanager
def held(path: Path, place: str, advice: str) -> Iterator[None]:
    """Hold the lock of that file, and remove it afterwards. Programs that this one starts do not get it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=READING_S, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyError(f"{place}: is in use by {_holder(path)}; {advice}") from error
    except OSError as error:
        raise InputError(
            f"{place}: {path.name} cannot be locked ({error.strerror}); use a folder that can be written, on a file "
            "system that has locks"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _sign(number: int) -> None:
    """Write who holds the lock. A full disk takes nothing from the lock itself."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps({"pid": os.getpid(), "host": _host(), "started": started}).encode(), 0)


def _holder(path: Path) -> str:
    """Who holds a lock, in words."""
    found = _read(path)
    if not found:
        return "another process"
    there = "" if found.get("host") == _host() else f" (another host: this one is {_host()})"
    return f"process {found.get('pid')} on {found.get('host')}{there} since {found.get('started')}"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _host() -> str:
    return socket.gethostname()
