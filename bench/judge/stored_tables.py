"""Reads the tables beside a journal: they may be cut off, no tables, or made to fill the memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bench.errors import InputError
from bench.files import open_regular
from bench.formatting import plain, plural, size

TABLE_BYTES = 256 * 2**20
"""Largest table that is read: the file, its columns without their compression, and each column as
texts."""


def read_table(path: Path, expected: pd.DataFrame) -> pd.DataFrame:
    """The columns of a parquet file that a table should have, if it has as many rows as the table.

    Nothing is unpacked before its size is known, and texts that stand in a file once are not
    repeated for each row. Raises InputError that names the file, without its folder.
    """
    try:
        with open_regular(path, TABLE_BYTES) as opened, parquet.ParquetFile(opened) as file:
            num_rows = file.metadata.num_rows
            if num_rows != len(expected):
                words = f"{plural(num_rows, 'row')}, {len(expected)} follow from the journal"
                raise InputError(f"{path.name}: {words}")
            _require_small(path, file)
            names = [name for name in expected.columns if name in file.schema_arrow.names]
            for name in names:
                if pa.types.is_nested(file.schema_arrow.field(name).type):
                    raise InputError(f"{path.name}: {name} has several values in a row")
            texts = [name for name in names if _is_text(file.schema_arrow.field(name).type)]
        with open_regular(path, TABLE_BYTES) as opened:
            table = parquet.read_table(
                opened, columns=names, read_dictionary=texts, use_threads=False
            )
        for name in texts:
            _require_short(path, name, table.column(name))
        frame: pd.DataFrame = table.to_pandas(use_threads=False)
        return frame
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        pa.ArrowException,
        MemoryError,
    ) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path.name}: cannot be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """What the system, else the error itself says; its kind if it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = plain(error)[:200]
    if text:
        return text
    return type(error).__name__


def _is_text(kind: pa.DataType) -> bool:
    is_string: bool = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_string or bool(pa.types.is_dictionary(kind))


def _require_small(path: Path, file: parquet.ParquetFile) -> None:
    whole = 0
    for number in range(file.metadata.num_row_groups):
        whole += max(0, file.metadata.row_group(number).total_byte_size)
    if whole > TABLE_BYTES:
        raise InputError(f"{path.name}: has {size(whole)} of columns, more than a run can have")


def _require_short(path: Path, name: str, column: pa.ChunkedArray) -> None:
    """A text that stands in the file once may stand in every row."""
    longest = 0
    for chunk in column.chunks:
        values = chunk
        if isinstance(chunk, pa.DictionaryArray):
            values = chunk.dictionary
        for text in values:
            longest = max(longest, len(str(text)))
    if longest * max(1, len(column)) > TABLE_BYTES:
        raise InputError(
            f"{path.name}: {name} has texts of {size(longest)}, more than a run can have"
        )
