"""Where runs and their plots go if nothing else is said, and which folders are this user's alone."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

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
