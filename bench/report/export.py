"""A run's frames as files for other programs: CSV that a spreadsheet cannot take for formulas, and parquet."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bench.analysis.columns import COLUMNS, FRAMES
from bench.report.escape import plain
from bench.report.spreadsheet import guarded

COLUMNS_FILE = "columns.csv"
"""Beside the frames: of every column its dtype, unit and meaning."""


def write_csv(frames: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """One file per frame, UTF-8 with a header, and COLUMNS_FILE; empty values are empty. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in FRAMES:
        paths.append(folder / f"{name}.csv")
        harmless(frames[name]).to_csv(paths[-1], index=False, lineterminator="\n")
    paths.append(folder / COLUMNS_FILE)
    with paths[-1].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("frame", "column", "dtype", "unit", "meaning"))
        for name, columns in COLUMNS.items():
            writer.writerows((name, key, about.dtype, about.unit, about.meaning) for key, about in columns.items())
    return paths


def harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with text in one line, and with an apostrophe before what would be a formula; numbers as they are."""
    texts = [name for name in frame.columns if pd.api.types.is_string_dtype(frame[name].dtype)]
    return frame.assign(
        **{
            name: frame[name].map(lambda text: guarded(plain(text)), na_action="ignore").astype("string")
            for name in texts
        }
    )


def write_parquet(frames: Mapping[str, pd.DataFrame], folder: Path, run_id: str) -> list[Path]:
    """One file per frame; each field's metadata has its ``unit`` and ``meaning``. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, about in FRAMES.items():
        table = pa.Table.from_pandas(frames[name], preserve_index=False)
        fields = [
            field.with_metadata({"unit": COLUMNS[name][field.name].unit, "meaning": COLUMNS[name][field.name].meaning})
            for field in table.schema
        ]
        notes = {**(table.schema.metadata or {}), b"run_id": run_id.encode(), b"rows": about.encode()}
        paths.append(folder / f"{name}.parquet")
        parquet.write_table(table.cast(pa.schema(fields, metadata=notes)), paths[-1])
    return paths
