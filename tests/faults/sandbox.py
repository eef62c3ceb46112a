"""A folder for one call of the command line, in which it is seen whether anything is written elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from bench.cli import main
from bench.errors import INTERRUPTED

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "shutil.rmtree": 1,
}
"""Audit events of changes to files, and how many of their first arguments are paths."""


FOLLOWING = {"open", "os.chmod", "os.chown", "os.truncate"}
"""Those that change the target of a link; the others change the folder that the link is in."""
HARMLESS = {os.devnull, "/dev/tty"}
"""Opened to write, but no file: the terminal is handed to a command that is audited."""


class ReachedError(BaseException):
    """The arguments were good, and work would begin that is not what is looked at here."""


_watch = SimpleNamespace(root="", outside=[])
"""The folder that is watched now, and what was changed outside of it."""


def _place(path: str, *, follows: bool) -> str:
    """Where a change is made: the target of a link, or the link itself if the change is not through it."""
    if follows:
        return os.path.realpath(path)
    return str(Path(path).parent.resolve() / Path(path).name)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what is changed outside of the folder that is watched."""
    if not _watch.root:
        return
    paths: tuple[Any, ...] = ()
    if event == "open":
        flags = arguments[2]
        paths = arguments[:1] if isinstance(flags, int) and flags & WRITING else ()
    elif event in CHANGES:
        paths = arguments[: CHANGES[event]]
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            real = _place(os.fsdecode(path), follows=event in FOLLOWING)
            if real not in HARMLESS and not f"{real}/".startswith(f"{_watch.root}/"):
                _watch.outside.append(f"{event} {real}")


sys.addaudithook(_audit)


@dataclass(frozen=True)
class Call:
    """How a call of the command line ended."""

    status: int | None
    """None if its arguments were good and work began."""
    out: str
    err: str
    outside: list[str]
    """What it changed outside of its folder."""


def call(
    arguments: Sequence[str],
    folder: Path,
    template: Path,
    files: Mapping[str, bytes] = MappingProxyType({}),
    change: Callable[[Path], object] = lambda _: None,
) -> Call:
    """Call the command line in a new copy of the template, as Python does for a terminal that takes UTF-8.

    ``files`` are other contents of some files; ``change`` changes the folder further.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    change(folder)
    (folder / "tmp").mkdir()
    before = Path.cwd()
    # Other than a terminal's, these refuse what is no text; standard error says it with backslashes.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    status: int | None
    os.chdir(folder)
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder / "tmp")
    _watch.root, _watch.outside = os.path.realpath(folder), []
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except ReachedError:
        status = None
    finally:
        _watch.root = ""
        tempfile.tempdir = temporary
        os.chdir(before)
    if status == INTERRUPTED:  # by Ctrl-C at the tests: no command of theirs is interrupted
        raise KeyboardInterrupt
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Call(status, *texts, _watch.outside)
