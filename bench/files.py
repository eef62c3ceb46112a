"""Files and folders that a user names, and the locks that guard them.

A lock is a file with the kernel's advisory lock (flock) on it. A lock file that no process has
locked is stale and is taken over. The file names its holder, for the error message of whoever is
refused.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import socket
import stat
import sys
import sysconfig
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import cast

from bench.errors import InputError, reason_of
from bench.formatting import size

ROOT = Path(__file__).resolve().parents[1]
"""The folder from which ``bench`` is imported: a checkout, or that of all installed packages."""


INPUT_BYTES = 2**30
"""Largest file that is read whole, if nothing else limits it: a corpus."""


def open_regular(path: Path, max_bytes: int, flags: int = os.O_RDONLY) -> BufferedReader:
    """Open a file that is neither device nor pipe, nor larger than this, without waiting.

    Raises OSError.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is a device or pipe", str(path))
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"is larger than {size(max_bytes)}", str(path))
        mode = "rb"
        if flags & os.O_RDWR:
            mode = "r+b"
        return cast("BufferedReader", os.fdopen(number, mode))
    except BaseException:
        os.close(number)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of such a file. Raises OSError."""
    with open_regular(path, max_bytes) as file:
        return file.read(max_bytes)


def read(path: Path, place: str, advice: str, max_bytes: int = INPUT_BYTES) -> bytes:
    """The content of a file.

    Raises InputError, beginning with ``place``, if it is unreadable, a device or a pipe, or too
    large.
    """
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise InputError(f"{place}: {error.strerror}; {advice}") from error
        raise InputError(f"{place}: cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{place}: cannot be read ({error}); {advice}") from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A draft that takes the place of a file at the end of the block.

    ``durable``: once it is on disk. Neither the draft nor the file is followed if it is a link, so
    nothing is written outside of their folder. Raises IsADirectoryError for
    a path without a name, such as ``.``.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    draft = path.with_name(f"{path.name}.tmp")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        if durable:
            sync(draft)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def subfolder(folder: Path, name: str) -> Path:
    """A folder below another one, created if it is missing.

    Raises OSError if it is a link, which would lead out.
    """
    path = folder / name
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "is not a folder of its own but a link or a file", str(path)
        )
    return path


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path


def end_of(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file, which may not fit into memory as a whole."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def python_path(first: Path) -> str:
    """PYTHONPATH for a child process that imports from this folder before all others."""
    others = os.environ.get("PYTHONPATH", "")
    if not others:
        return str(first)
    return f"{first}{os.pathsep}{others}"


def portable(text: str) -> str:
    """The text with paths relative to where Python imports from: ``bench/cli.py``.

    So what a run keeps of a crash does not say where its machine has a checkout or an environment:
    ``site-packages/torch/nn``.
    """
    installed = set(sysconfig.get_paths().values())
    folders = filter(os.path.isabs, {str(ROOT), *sys.path})
    for folder in sorted(folders, key=len, reverse=True):
        kept = ""
        if folder in installed:
            kept = f"{Path(folder).name}/"
        text = re.sub(rf"(?<![\w.-]){re.escape(folder)}/", kept, text)
    return text


RESULTS, PLOTS = Path("results"), Path("plots")


def plots_folder(folder: Path) -> Path:
    """The folder for the plots of a run: plots/<run> for results/<run>, else ``plots`` in it."""
    if folder.resolve().parent == RESULTS.resolve():
        return PLOTS / folder.name
    return folder / "plots"


def existing(folder: Path) -> Path:
    """The folder itself, or its nearest ancestor that exists."""
    path = folder.resolve()
    while not os.path.exists(path):  # noqa: PTH110 - Path.exists raises if the name is too long
        path = path.parent
    return path


def new_folder(name: str) -> Path:
    """The path of a new folder under results/, with the time (UTC) in its name."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{stamp}-{name}"


def private(folder: Path) -> bool:
    """Whether this is a real folder, not a link, that only this user can write to.

    Raises OSError if it is missing.
    """
    found = folder.lstat()
    is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    others_can_write = bool(found.st_mode & 0o022)
    return is_mine and not others_can_write


FILE = "run.lock"
"""Lock file in a run's folder while a bench works in it."""
READING_S = 0.5
"""How long to wait for a lock: its holder may be about to release it, or may not have written its
name yet."""


class BusyError(InputError):
    """Another process holds the lock."""


@contextlib.contextmanager
def writing(place: str, advice: str = "name a folder that can") -> Iterator[None]:
    """Raise InputError, beginning with ``place``, if something cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{place}: cannot be written ({reason_of(error)}); {advice}") from error


@contextlib.contextmanager
def run_folder(folder: Path, place: str) -> Iterator[None]:
    """Lock the folder of a run, and create it if it is missing.

    Raises BusyError naming the holder, or InputError if the folder cannot be used; both begin with
    ``place``.
    """
    with writing(place):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder / FILE, place, "wait for it, or name another folder"):
        yield


@contextlib.contextmanager
def held(path: Path, place: str, advice: str) -> Iterator[None]:
    """Hold a lock file and remove it afterwards. Child processes do not inherit the lock."""
    from filelock import FileLock, Timeout

    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise InputError(
                f"{place}: {path.name} is a link or no file, which is not followed; remove it"
            )
    lock = FileLock(path, timeout=READING_S, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyError(f"{place}: is in use by {_holder(path)}; {advice}") from error
    except OSError as error:
        raise InputError(
            f"{place}: {path.name} cannot be locked ({error.strerror}); use a folder that can be "
            "written, on a file system that has locks"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _sign(number: int) -> None:
    """Write this process into the lock file. The lock holds even if the disk is full."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    with contextlib.suppress(OSError):
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    found = _read(path)
    if not found:
        return "another process"
    where = str(found.get("host"))
    if found.get("host") != socket.gethostname():
        where += f" (another host: this one is {socket.gethostname()})"
    return f"process {found.get('pid')} on {where} since {found.get('started')}"


def _read(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return value
