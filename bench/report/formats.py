"""A run's frames as files for other programs: CSV, parquet, and JSON of pytest-benchmark.

No cell of a CSV file can be taken for a formula by a spreadsheet. In pytest-benchmark's JSON a
round is a trial: statistics are over the medians of trials, since steps of one trial are no
replicates. What is not comparable, has no good trial or is of a virtual world is no benchmark,
since readers of that file show a number without its caveats; it is listed under ``left_out``, which
they ignore.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bench.backends.base import Lossy
from bench.errors import InputError
from bench.files import replacing
from bench.formatting import plain
from bench.judge.analysis import CellRow, Frames
from bench.judge.columns import COLUMNS, FRAMES
from bench.judge.gates import allowed
from bench.plan.cell import Status
from bench.run.manifest import Manifest

FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20\t\r\n")
"""What spreadsheets read as the beginning of a formula, in wide forms too, or skip to find one:
OWASP, "CSV Injection"."""


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a table without its index."""
    with replacing(path) as draft:
        harmless(frame).to_csv(draft, index=False, lineterminator="\n")


def harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with text in one line, and with an apostrophe before what would be a formula.

    Numbers stay as they are.
    """
    found = frame.copy()
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name].dtype):
            texts = frame[name].astype("string")
            found[name] = texts.map(lambda text: guarded(plain(text)), na_action="ignore")
    return found


def guarded(text: str) -> str:
    """The same text, with an apostrophe before it if it begins as a formula does."""
    if text.startswith(FORMULA):
        return f"'{text}"
    return text


COLUMNS_FILE = "columns.csv"
"""Beside the frames: of every column its dtype, unit and meaning."""


def write_csv(frames: Frames, folder: Path) -> list[Path]:
    """One file per frame, UTF-8 with a header, and COLUMNS_FILE; empty values are empty.

    Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / f"{name}.csv": frame for name, frame in frames.items()}
    written[folder / COLUMNS_FILE] = _documented_columns()
    for path, frame in written.items():
        write_frame(frame, path)
    return list(written)


def _documented_columns() -> pd.DataFrame:
    """What stands in COLUMNS_FILE."""
    rows = []
    for frame, columns in COLUMNS.items():
        for name, column in columns.items():
            about = {"frame": frame, "column": name, "dtype": column.dtype, "unit": column.unit}
            rows.append({**about, "meaning": column.meaning})
    return pd.DataFrame(rows)


def write_parquet(frames: Frames, folder: Path) -> list[Path]:
    """One file per frame; each field's metadata has its ``unit`` and ``meaning``.

    Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, about in FRAMES.items():
        table = pa.Table.from_pandas(frames[name], preserve_index=False)
        fields = []
        for field in table.schema:
            column = COLUMNS[name][field.name]
            words = {"unit": column.unit, "meaning": column.meaning}
            fields.append(field.with_metadata(words))
        notes: dict[bytes, bytes] = {}
        if table.schema.metadata is not None:
            notes |= table.schema.metadata
        notes |= {b"run_id": frames.run_id.encode(), b"rows": about.encode()}
        path = folder / f"{name}.parquet"
        with replacing(path) as draft:
            parquet.write_table(table.cast(pa.schema(fields, metadata=notes)), draft)
        paths.append(path)
    return paths


ELSEWHERE = {"cell_id", "label", "reason"}
BESIDE = {name for name, column in COLUMNS["cells"].items() if not column.axis} - ELSEWHERE
"""Columns of the cells that stand beside the statistics."""


class Document(TypedDict):
    """The JSON document of pytest-benchmark, and what is no benchmark."""

    machine_info: dict[str, object]
    commit_info: dict[str, object]
    benchmarks: list[dict[str, object]]
    datetime: str
    version: str
    left_out: list[dict[str, str]]


def document(frames: Frames) -> Document:
    """The JSON document of pytest-benchmark. Raises InputError if it is not installed."""
    try:
        from pytest_benchmark import __version__
    except ImportError as error:
        text = "--format pytest-benchmark: needs that package; pip install pytest-benchmark"
        raise InputError(text) from error
    manifest = frames.run.manifest
    trials = {}
    for cell_id, rows in frames.trials.groupby("cell_id", sort=False):
        trials[str(cell_id)] = rows.sort_values("repeat")
    benchmarks, left_out = [], []
    for row in frames.rows:
        # The same for equal cells of all runs and machines, so that they have one history.
        named = {"name": row.label, "fullname": f"accumulation-bench/{row.cell_id}::{row.label}"}
        if row.step_time_s is None or not row.cell.world.times_communication:
            why = {"status": row.status, "why": row.caveats, "citation": row.citation}
            left_out.append(named | why)
        else:
            lossy = manifest.lossy.get(row.cell_id)
            benchmarks.append(named | _benchmark(row, trials[row.cell_id], lossy))
    commit, is_dirty = "unversioned", False
    if manifest.git.commit:
        commit, is_dirty = manifest.git.commit, not manifest.git.clean
    ended = manifest.finished
    if not ended:  # the run has not ended
        ended = manifest.started
    return {
        "machine_info": _machine(manifest),
        "commit_info": {
            "id": commit,
            "dirty": is_dirty,
            "time": None,
            "author_time": None,
            "project": "accumulation-bench",
            "branch": "",
        },
        "benchmarks": benchmarks,
        "datetime": ended,
        "version": __version__,
        "left_out": left_out,
    }


def _benchmark(row: CellRow, trials: pd.DataFrame, lossy: Lossy | None) -> dict[str, object]:
    from pytest_benchmark.stats import Stats

    cell = row.cell
    stats = Stats()
    for seconds in trials.loc[trials["status"] == Status.OK, "step_time_s"]:
        stats.update(float(seconds))
    limits = allowed(cell, lossy)
    return {
        "group": f"N={cell.accumulate} W={cell.world_size} {cell.precision}",
        "params": cell.to_dict(),
        "param": row.label,
        "extra_info": {
            "unit": "seconds per optimizer step",
            "round": "one trial: the median of its steps after warm-up, the maximum over ranks",
            **{name: row.values[name] for name in COLUMNS["cells"] if name in BESIDE},
            "limits": {
                "update_error": limits.update_error,
                "loss_deviation_of_size": limits.loss_deviation,
            },
        },
        "options": {
            "disable_gc": False,
            "timer": "bench.measure.taps",
            "min_rounds": stats.rounds,
            "max_time": None,
            "min_time": None,
            "warmup": cell.warmup_windows > 0,
        },
        "stats": stats.as_dict() | {"data": stats.data, "iterations": 1},
    }


def _machine(manifest: Manifest) -> dict[str, object]:
    """What a run stores of it: neither host name nor compiler."""
    machine = manifest.machine
    system, _, rest = _empty_if_unknown(machine.system).partition(" ")
    release, _, architecture = rest.rpartition(" ")
    python = _empty_if_unknown(machine.python)
    gpus = []
    for gpu in machine.gpus:
        about = {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "driver": gpu.driver}
        gpus.append(about)
    return {
        "node": "",
        "python_compiler": "",
        "python_implementation": "",
        "processor": architecture,
        "machine": architecture,
        "python_implementation_version": python,
        "python_version": python,
        "python_build": ["", ""],
        "release": release,
        "system": system,
        "cpu": {
            "brand_raw": _empty_if_unknown(machine.cpu),
            "count": machine.cores,
            "arch_string_raw": architecture,
        },
        "gpus": gpus,
        "packages": dict(manifest.packages),
    }


def _empty_if_unknown(fact: str | None) -> str:
    """A fact as pytest-benchmark writes it."""
    if fact is None:
        return ""
    return fact
