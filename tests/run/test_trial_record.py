"""From ranks to one record: maxima of times and memory, means of losses, and whether the ranks agree."""

from __future__ import annotations

import math

import pytest

from bench.run.trial_record import merge_ranks, wrong
from tests.factories import ALL_PASSES, make_cell, make_rank, make_time

CELL = make_cell()


def test_slowest_rank_and_largest_memory_count() -> None:
    first = make_rank(CELL, training_s=3.0, memory={"peak": 10, "held": 7})
    second = make_rank(CELL, rank=1, training_s=4.0, memory={"peak": 9, "held": 8})
    first["time"] = make_time(CELL, step_seconds=[1.0, 5.0, 3.0], losses=[1.0, 2.0, 3.0, 4.0, 5.0])
    second["time"] = make_time(CELL, step_seconds=[2.0, 4.0, 3.0], losses=[2.0, 4.0, 3.0, 4.0, 6.0])
    first["time"]["cuda_memory"] = {"allocated": 5, "reserved": 10}
    second["time"]["cuda_memory"] = {"allocated": 6, "reserved": 9}
    merged = merge_ranks([first, second])
    assert merged["time"]["cuda_memory"] == {"allocated": 6, "reserved": 10}
    assert merged["time"]["step_seconds"] == [2.0, 5.0, 3.0]
    assert merged["time"]["losses"] == [1.5, 3.0, 3.0, 4.0, 5.5]
    assert merged["time"]["ranks_agree"] is True
    assert merged["training_s"] == 4.0
    assert merged["memory"] == {"peak": 10, "held": 8}
    assert merged["update"] == first["update"], "rank 0 compares"
    assert merged["collectives"] == first["collectives"]


@pytest.mark.parametrize(
    ("table", "key", "value", "words"),
    [
        (None, "time", 0, "time is missing"),
        (None, "time", [], "time is []; it must be a table"),
        (None, "num_parameters", True, "num_parameters is True; it must be an integer"),
        (None, "training_s", math.nan, "training_s is nan; it must be"),
        (None, "device_name", 0, "device_name is missing"),
        (None, "update", {"error": 1.0}, "update.scale is missing"),
        (None, "collectives", [{"op": "all_reduce"}], "collectives[0].group is missing"),
        (None, "memory", {"peak": -1}, "memory is {'peak': -1}; it must be"),
        (None, "memory", {"peak_allocator_untracked": -1.5}, "memory is {"),
        (None, "memory", {"peak_allocator_rounding": -1}, "memory is {"),
        (None, "accumulation", {}, "accumulation.dtype is missing"),
        (
            None,
            "dispatch",
            {"cpu_s": -1.0, "num_operators": 1, "num_launches": 1},
            "dispatch.cpu_s is -1.0",
        ),
        ("time", "step_seconds", [0.1, -0.1], "time.step_seconds[1] is -0.1; it must be seconds"),
        ("time", "step_seconds", 0, "time.step_seconds is missing"),
        ("time", "losses", ["1"], "time.losses[0] is '1'; it must be a number"),
        (
            "time",
            "reported",
            {"global_step": "five"},
            "time.reported.global_step is 'five'; it must be an integer",
        ),
    ],
)
def test_what_no_sound_rank_hands_back_is_named(
    table: str | None, key: str, value: object, words: str
) -> None:
    cell = make_cell()
    ranks = [make_rank(cell, ALL_PASSES, rank) for rank in range(2)]
    place = ranks[1][table] if table else ranks[1]
    if words.endswith(f"{key} is missing"):
        del place[key]
    else:
        place[key] = value
    found = wrong(ranks, ALL_PASSES)
    assert found.startswith(f"rank 1: its result is damaged: {words}") and "\n" not in found
