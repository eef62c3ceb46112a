"""What a recorder says of an error of its own, which ends the recording and not the training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def tell(command: str, folder: Path, method: Callable[..., None], error: Exception) -> str:
    """The error in words, for the record of a command of ours; stderr says if there can be none."""
    if isinstance(error, OSError):
        text = f"{command}: cannot record in {folder} (TMPDIR): {error.strerror}"
        print(text, file=sys.stderr)
    return f"the recorder failed: {method.__name__}: {type(error).__name__}: {error}"
