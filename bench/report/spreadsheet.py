"""CSV files that a spreadsheet shows and does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20\t\r\n")
"""Beginnings of a cell that spreadsheets read as a formula, in wide forms too, or skip to find one: OWASP, "CSV
Injection"."""


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a table without its index. A text that a spreadsheet would run gets an apostrophe before it."""
    named = frame.rename(columns=guarded)
    for place, column in enumerate(frame.columns):
        if not pd.api.types.is_numeric_dtype(frame[column].dtype):
            named.isetitem(place, [guarded(value) for value in frame[column]])
    named.to_csv(path, index=False)


def guarded(value: Any) -> Any:
    """The same value, but for a text that begins as a formula does."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
