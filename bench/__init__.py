"""A neutral benchmark of gradient accumulation: what each backend costs, and really does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.judge.analysis import Frames

__all__ = ["__version__", "load"]
__version__ = "1.2.0"


def load(run: str | Path) -> Frames:
    """Read a run folder into frames: cells, trials, steps, losses, collectives, memory and ratios.

    A frame is an attribute and an item of the result. ``python -m bench export RUN`` lists the
    columns with dtypes and units. Raises bench.errors.InputError if the folder holds no run.
    """
    from bench.judge.analysis import read

    return read(run)
