"""CSV files that a spreadsheet shows and does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of a cell that spreadsheets read as a formula, or skip to find one."""


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a table without its index. A text that a spreadsheet would run gets an apostrophe before it."""
    named = frame.rename(columns=_harmless)
    for place, column in enumerate(frame.columns):
        if not pd.api.types.is_numeric_dtype(frame[column].dtype):
            named.isetitem(place, [_harmless(value) for value in frame[column]])
    named.to_csv(path, index=False)


def _harmless(value: Any) -> Any:
    """The same value, but for a text that begins as a formula does."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
