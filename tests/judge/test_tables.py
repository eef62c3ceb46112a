"""Tables: exact columns and dtypes, numbers by hand, failed trials kept, the way to parquet and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args, get_type_hints

import pandas as pd
import pytest

from bench.judge import columns
from bench.judge.columns import AXES, COLUMNS
from bench.judge.tables import NAMES, Tables
from bench.judge.trial_columns import TrialRow
from bench.plan.cell import Cell
from bench.plan.matrix import KEYS
from tests.factories import (
    PEAK_BYTES,
    make_cell,
    make_failure,
    make_manifest,
    make_record,
    make_tables,
)

CELL = make_cell()


def build(*records: dict[str, Any]) -> Tables:
    return make_tables(records)


def dtypes(frame: pd.DataFrame) -> dict[str, str]:
    return {str(name): str(dtype) for name, dtype in frame.dtypes.items()}


EMPTY = build()
SOUND = build(
    make_record(CELL),
    make_failure(CELL, 1),
    make_record(make_cell(backend="reference").reference()),
)
FAILED = build(make_failure(CELL))


def test_every_axis_of_the_matrix_is_a_field_of_a_cell_and_a_column() -> None:
    axes = {key.removeprefix("axes.") for key in KEYS if key.startswith("axes.")}
    axes.remove("micro_batch_size")  # which follows from B, N and W
    assert axes <= AXES.keys() <= {field.name for field in dataclasses.fields(Cell)}
    assert AXES.keys() <= COLUMNS["cells"].keys()


@pytest.mark.parametrize("made", [EMPTY, SOUND, FAILED], ids=["empty", "sound", "failed"])
def test_exact_columns_and_dtypes(made: Tables) -> None:
    for name in NAMES:
        assert list(dtypes(getattr(made, name)).items()) == list(columns.dtypes(name).items())


def test_a_sound_trial_by_hand() -> None:
    row = build(make_record(CELL, 2)).trials.iloc[0]
    expected: dict[str, Any] = {
        name: value for name, value in CELL.to_dict().items() if name in COLUMNS["trials"]
    } | {
        "run_id": "made-run",
        "cell_id": CELL.cell_id,
        "label": CELL.label,
        "repeat": 2,
        "framework": "torch DDP",
        "sharding": "none",
        "sync": "deferred",
        "micro_batch_size": 2,
        "num_parameters": 3_411_200,
        "device_name": "cpu",
        "status": "ok",
        "reason": "",
        "step_time_s": 0.51,
        "tokens_per_s": 16 * 32 / 0.51,
        "peak_memory_bytes": PEAK_BYTES,
        "peak_memory_source": "tracked tensors",
        "num_micro_batches": 20,
        "optimizer_steps_expected": 5,
        "optimizer_steps_observed": 5,
        "ranks_agree": True,
        "micro_batches_per_update": "4",
        "final_loss": 4.6,
        "update_error": 1e-7,
        "update_scale": 1.0,
        "update_residual": 1e-7,
        "entropy_floor": 1.25,
        "wall_s": 4.25,
        "training_s": 3.0,
        "overhead_s": 1.25,
        "num_passes": 6,
        "cpu_s_per_micro_batch": 0.125,
        "num_operators_per_micro_batch": 500,
        "num_warmup_steps": 2,
        "accumulated_in": "fp32",
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    others = row[[name for name in COLUMNS["trials"] if name not in expected]]
    assert others.dropna().to_dict() == {}, "a column that a sound trial fills has its value above"


def test_children_by_hand() -> None:
    counted = {
        "op": "all_reduce",
        "group": "world",
        "dtype": "float32",
        "calls": 1,
        "payload_bytes": 13_644_800,
    }
    made = build(
        make_record(
            CELL, 1, time={"losses": [3.0, 2.0], "step_seconds": [0.5, 0.25]}, collectives=[counted]
        )
    )
    key = {"cell_id": CELL.cell_id, "repeat": 1}
    # Two windows of warm-up come before the first timed one, and steps count from 0 at the first update.
    assert made.steps.to_dict("records") == [
        key | {"step": 2, "seconds": 0.5},
        key | {"step": 3, "seconds": 0.25},
    ]
    assert made.losses.to_dict("records") == [
        key | {"step": 0, "loss": 3.0},
        key | {"step": 1, "loss": 2.0},
    ]
    assert made.collectives.drop(columns=["expected_calls", "expected_payload_bytes"]).to_dict(
        "records"
    ) == [key | counted]
    assert dict(zip(made.memory["category"], made.memory["bytes"], strict=True)) == {
        "tracked_peak": PEAK_BYTES,
        "tracked_held": 2**20,
    }
    assert (made.memory["repeat"] == 1).all()


def test_the_last_record_of_a_trial_counts() -> None:
    made = build(
        make_failure(CELL, 0, "interrupted"),
        make_record(CELL, 1, time={"losses": [1.0]}),
        make_record(CELL, 0, wall_s=7.0),
    )
    assert list(
        zip(made.trials["repeat"], made.trials["status"], made.trials["wall_s"], strict=True)
    ) == [
        (0, "ok", 7.0),
        (1, "ok", 4.25),
    ]
    assert made.losses.groupby("repeat").size().to_dict() == {0: 5, 1: 1}
    made = build(make_record(CELL, 0), make_failure(CELL, 0))
    assert made.trials["status"].tolist() == ["oom"]
    assert made.steps.empty


def test_what_is_measured_once_stands_on_every_trial_of_its_cell_only() -> None:
    later = make_record(CELL, 1)
    del later["update"], later["memory"], later["collectives"]
    other = make_cell(accumulate=2)
    alone = make_record(other)
    del alone["update"], alone["memory"]
    trials = build(later, make_record(CELL, 0), make_failure(CELL, 2), alone).trials
    mine = trials[trials["cell_id"] == CELL.cell_id]
    good = mine[mine["status"] == "ok"]
    assert good["update_error"].tolist() == [1e-7] * 2
    assert good["peak_memory_bytes"].tolist() == [PEAK_BYTES] * 2
    failed = mine[mine["status"] != "ok"]
    assert failed[["update_error", "peak_memory_bytes"]].isna().all(axis=None), (
        "a failed trial has no numbers"
    )
    assert (
        trials[trials["cell_id"] == other.cell_id][["update_error", "peak_memory_bytes"]]
        .isna()
        .all(axis=None)
    )
    assert build(later, make_record(CELL, 0)).memory["repeat"].unique().tolist() == [0]


def test_the_link_is_that_between_as_many_ranks_on_as_many_nodes() -> None:
    """All-reduces of 4 MB between 2 ranks, 20 ms each: 4 MB over 20 ms, times 2 * 1/2."""
    links = [
        {"op": "all_reduce", "bytes": 4_000_000, "seconds": 0.02},
        {"op": "all_gather", "bytes": 1, "seconds": 1.0},
    ]
    here = {
        "world_size": 2,
        "num_nodes": 1,
        "threads": 1,
        "flops_per_s": {},
        "reason": "",
        "links": links,
    }
    between = {**here, "num_nodes": 2, "links": [{**links[0], "seconds": 0.4}]}
    manifest = make_manifest(matmul=[between, here])
    two_nodes = make_cell(ranks_per_node=1)
    found = make_tables([make_record(CELL), make_record(two_nodes)], manifest).trials[
        "link_bytes_per_s"
    ]
    assert found.tolist() == pytest.approx([2e8, 1e7])


def test_mfu_against_the_matmul_rate_of_the_run() -> None:
    entries = [
        {"world_size": 1, "threads": 2, "flops_per_s": {"fp32": [3e11]}, "reason": ""},
        {
            "world_size": 2,
            "threads": 1,
            "flops_per_s": {"fp32": [1.5e12, 2.5e12], "bf16": [1e13, 1e13]},
            "reason": "",
        },
    ]
    # 1e12 FLOP in 0.51 s, by two ranks that can do 4e12 a second in that precision.
    found = make_tables([make_record(CELL)], make_manifest(matmul=entries)).trials.iloc[0]
    assert found["mfu_of_matmul"] == pytest.approx(1e12 / 0.51 / 4e12)
    assert pd.isna(found["mfu"]), "a CPU has no datasheet here"
    unmeasured = [{**entries[1], "flops_per_s": {}, "reason": "oom"}]
    for record, known in (
        (make_record(make_cell(virtual=True)), entries),
        (make_record(CELL, flops_per_step=None), entries),
        *((make_record(CELL), some) for some in (entries[:1], unmeasured, [])),
    ):
        assert pd.isna(
            make_tables([record], make_manifest(matmul=known)).trials.iloc[0]["mfu_of_matmul"]
        )


def test_a_row_has_the_columns_of_its_table_and_their_types() -> None:
    """Every column is a field of the row or of its cell, and every field is a column, which may be missing or not."""
    kinds = {"string": str, "Int64": int, "Float64": float, "boolean": bool}
    hints = get_type_hints(TrialRow)
    own = {name: hint for name, hint in hints.items() if name not in {"cell", "facts"}}
    assert own.keys() <= COLUMNS["trials"].keys()
    for name, column in COLUMNS["trials"].items():
        if name in own:
            kind = next(
                part for part in (*get_args(own[name]), own[name]) if part is not type(None)
            )
            assert issubclass(kind, kinds[column.dtype]), name
        else:
            assert hasattr(TrialRow, name) or hasattr(CELL, name), name


def test_what_is_nan_is_missing_in_a_row() -> None:
    update = {"error": math.nan, "scale": 1, "residual": 0}
    made = build(make_record(CELL, time={"losses": [3.0, math.nan]}, update=update))
    (row,) = made.trial_rows
    assert (row.final_loss, row.update_error, row.update_scale) == (None, None, 1)
