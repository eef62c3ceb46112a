"""Gates: each fires alone and says why, none fires for a sound trial, and tolerances are what they say."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.findings import Level
from bench.judge import gates
from bench.judge.expected import COMPARED_STEPS, LONG_STEPS
from bench.judge.formulas import expect
from bench.judge.gates import TOLERANCES, Failure, Gate, judge
from bench.judge.integrity import check
from bench.judge.loading import load
from bench.judge.tables import Tables
from bench.judge.trial_columns import TrialRow
from bench.judge.update_causes import Cause
from bench.plan.cell import Cell, Device, Precision, Status
from bench.plan.models import SIZES
from bench.run.journal import JOURNAL, encode, write_document
from bench.workload.layout import llama_layout
from tests.factories import (
    judged_run,
    make_cell,
    make_collectives,
    make_failure,
    make_manifest,
    make_record,
    make_tables,
    manifest_of,
)

CELL = make_cell(accumulate=8)
TRUTH = CELL.reference()
LOSSES = [5.0, 4.5, 4.0, 3.5, 3.0]
UNCHECKED = "losses could not be checked"


def record(
    cell: Cell = CELL, repeat: int = 0, update: dict[str, float] | None = None, **time: Any
) -> dict[str, Any]:
    sound = {"error": 1e-7, "scale": 1.0, "residual": 1e-7}
    return make_record(cell, repeat, time={"losses": LOSSES} | time, update=sound | (update or {}))


def judged(*records: dict[str, Any], truth: bool = True) -> Tables:
    return judge(make_tables([*([record(TRUTH)] if truth else []), *records], make_manifest()))


def verdict(*records: dict[str, Any], truth: bool = True) -> TrialRow:
    """The last trial; all others must be good."""
    *others, last = judged(*records, truth=truth).trial_rows
    assert all(row.status is Status.OK for row in others)
    return last


def check_sound(row: TrialRow) -> None:
    assert (row.status, row.reason, row.failed_gates) == (Status.OK, "", None)


def check_caught(row: TrialRow, gate: Gate, *words: str, causes: Sequence[Cause] = ()) -> None:
    """This gate alone has fired, for these causes; people are told all of the words."""
    assert (row.status, row.failed_gates) == (Status.INVALID, gate)
    assert (row.update_causes or "") == ",".join(causes)
    for word in words:
        assert word in row.reason


def test_a_sound_trial_passes_and_its_deviation_is_filled_in() -> None:
    check_sound(verdict(record()))
    losses = [*LOSSES[:3], 3.5 - 5e-4, 3.0 + 2e-4]
    trials = judged(record(losses=losses)).trials
    assert trials["status"].tolist() == ["ok", "ok"]
    assert trials["max_loss_deviation"].tolist() == pytest.approx([0.0, 5e-4])


@pytest.mark.parametrize(
    ("steps", "off_at", "status"),
    [
        (LONG_STEPS, COMPARED_STEPS - 1, "invalid"),
        (LONG_STEPS, COMPARED_STEPS, "ok"),
        (LONG_STEPS - 1, COMPARED_STEPS, "invalid"),
    ],
)
def test_of_a_long_run_only_the_first_losses_are_compared(
    steps: int, off_at: int, status: str
) -> None:
    cell = make_cell(timed_windows=steps - 2)
    right = [5.0] * steps
    records = [record(cell.reference(), losses=right), record(cell, losses=right)]
    records[1]["time"]["losses"] = [
        loss + (0.004 if step >= off_at else 0.0) for step, loss in enumerate(right)
    ]
    trials = judge(make_tables(records, make_manifest())).trials
    assert trials["status"].tolist() == ["ok", status]


@pytest.mark.parametrize(
    ("time", "gate", "words"),
    [
        ({"num_updates": 4}, Gate.STEPS, "4 optimizer steps were taken, 5"),
        ({"num_micro_batches": 39}, Gate.STEPS, "39 micro-batches were used, 40"),
        ({"ranks_agree": False}, Gate.STEPS, "ranks took different numbers"),
        ({"losses": [*LOSSES[:4], 3.25]}, Gate.LOSS, "by 0.25 (limit 0.001 in fp32)"),
        ({"losses": [4.75, *LOSSES[1:]]}, Gate.LOSS, "by 0.25 (limit 1e-05 in fp32)"),
        ({"losses": [*LOSSES[:4], math.nan]}, Gate.LOSS, "not finite (limit 0.001"),
        ({"losses": [-math.inf, *LOSSES[1:]]}, Gate.LOSS, "not finite (limit 0.001"),
        ({"losses": LOSSES[:4]}, Gate.LOSS, UNCHECKED),
    ],
)
def test_each_gate_of_the_time_pass_fires_alone(
    time: dict[str, Any], gate: Gate, words: str
) -> None:
    tables = judged(record(**time))
    check_caught(tables.trial_rows[1], gate, words)
    assert [len(found) for found in tables.failures.values()] == [1]


OTHER_WORK = "aten.mm.default ran 9 times, 8 were due"


@pytest.mark.parametrize("told", [{}, {"other_work": ""}, {"other_work": OTHER_WORK}])
def test_other_work_than_the_plain_models(told: dict[str, str]) -> None:
    """Records of older versions do not tell; the pass ran once, and all trials of the cell are judged by it."""
    first, second = record(), record(repeat=1)
    first["dispatch"] |= told
    del second["dispatch"]
    rows = judged(first, second).trial_rows[1:]
    for row in rows:
        if told.get("other_work"):
            check_caught(row, Gate.WORK, OTHER_WORK)
        else:
            check_sound(row)


def test_a_missing_reference() -> None:
    check_caught(verdict(record(), truth=False), Gate.LOSS, UNCHECKED)
    made = judged(make_failure(TRUTH), record(), truth=False)
    assert made.trials["status"].tolist() == ["oom", "invalid"]
    assert made.trials["max_loss_deviation"].isna().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"global_batch_size": 32},
        {"model": "135m"},
        {"optimizer": "sgd"},
        {"clip_norm": 0.5},
    ],
)
def test_a_reference_that_trained_something_else_is_none(changes: dict[str, Any]) -> None:
    other = make_cell(accumulate=8, **changes)
    row = verdict(record(other, num_updates=other.windows, num_micro_batches=8 * other.windows))
    assert row.max_loss_deviation is None and UNCHECKED in row.reason


def test_a_sharded_reference_is_the_truth_only_where_no_single_process_can_be() -> None:
    values = {"device": Device.CUDA, "sequence_length": 8, "global_batch_size": 16, "accumulate": 8}
    large, small = make_cell(model="8b", **values), make_cell(model="tiny", **values)
    off = [*LOSSES[:4], 9.0]
    check_sound(verdict(record(large.reference()), record(large)))
    check_caught(verdict(record(large.reference()), record(large, losses=off)), Gate.LOSS)
    checked = record(small.reference(sharded=True), losses=off)
    made = judged(record(small.reference()), checked, record(small), truth=False).trials
    assert made["status"].tolist() == ["ok", "invalid", "ok"], (
        "it is held against the single process, and is no truth"
    )


@pytest.mark.parametrize(
    ("scale", "causes", "words"),
    [
        (1 / 8, [Cause.DIVIDED_TWICE], "8 times too small"),
        (8.0, [Cause.NOT_DIVIDED], "8 times too large"),
        (1 / 2, [Cause.AVERAGED_TWICE], "2 times too small"),
        (2.0, [Cause.SUMMED], "2 times too large"),
        (0.7, [], "0.7 times the right one, in the same direction"),
        (-1.0, [], "-1 times the right one, in the opposite"),
        (1 / 8 * 1.049, [Cause.DIVIDED_TWICE], "8 times too small"),
        (1 / 8 * 1.051, [], "0.131 times the right one"),
    ],
)
def test_a_wrong_update_is_explained_by_its_scale(
    scale: float, causes: list[Cause], words: str
) -> None:
    error = abs(scale - 1)
    row = verdict(record(update={"error": error, "scale": scale, "residual": 1e-7}))
    off = f"the update is off by {error:.2g} (limit"
    check_caught(row, Gate.UPDATE, off, words, causes=causes)


NORM = 4.0
"""Of the right gradient in the tests of clipping."""


def clipped(factor: float, clip_norm: float, optimizer: str = "sgd", **changes: Any) -> TrialRow:
    """The trial of a backend whose gradient is ``factor`` times the right one and clipped as it should be."""
    cell = make_cell(accumulate=8, clip_norm=clip_norm, optimizer=optimizer)
    scale = min(factor * NORM, clip_norm) / min(NORM, clip_norm)
    update = {"error": abs(scale - 1) + 1e-7, "scale": scale, "gradient_norm": factor * NORM}
    update |= {"unclipped_error": abs(factor - 1) + 1e-7, "unclipped_scale": factor}
    update |= {
        name: changes.pop(name) for name in ("error", "scale", "residual") if name in changes
    }
    return verdict(record(cell.reference()), record(cell, update=update, **changes), truth=False)


def test_a_clipped_update_that_is_right() -> None:
    check_sound(clipped(1.0, 0.5))
    check_sound(clipped(1.0, 5.0))


@pytest.mark.parametrize(
    ("factor", "clip_norm", "cause", "words"),
    [
        (
            1 / 8,
            1.0,
            Cause.DIVIDED_TWICE,
            ("off by 0.5 ", "before clipping 8 times", "after, 0.5 times (too short to"),
        ),
        (1 / 8, 0.25, Cause.DIVIDED_TWICE, ("off by 0.88 ", "both were clipped to norm 0.25:")),
        (
            8.0,
            6.0,
            Cause.NOT_DIVIDED,
            ("off by 0.5 ", "before clipping 8 times", "after, 1.5 times (clipped to 6)"),
        ),
    ],
)
def test_a_wrong_gradient_is_told_from_what_clipping_made_of_it(
    factor: float, clip_norm: float, cause: Cause, words: tuple[str, ...]
) -> None:
    row = clipped(factor, clip_norm)
    check_caught(row, Gate.UPDATE, *words, causes=[cause])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": 7.0, "scale": 8.0}, "is not clipped to norm 0.5"),
        ({"error": 1.0, "scale": 2.0}, "clipped to norm 1, not to 0.5"),
        ({"error": 0.4, "scale": 1.2, "residual": 0.3}, "parts are clipped one by one"),
    ],
)
def test_wrong_clipping_of_a_right_gradient(changes: dict[str, float], words: str) -> None:
    row = clipped(1.0, 0.5, **changes)
    check_caught(row, Gate.UPDATE, words)


OFF = [*LOSSES[:4], 3.25]


def test_losses_that_must_follow_from_a_wrong_scale_are_no_finding_of_their_own() -> None:
    update, cause = {"error": 0.875, "scale": 0.125}, [Cause.DIVIDED_TWICE]
    follows = "; so losses deviate from the reference by 0.25"
    sgd = make_cell(accumulate=8, optimizer="sgd")
    rows = judged(
        record(sgd.reference()), record(sgd, update=update, losses=OFF), truth=False
    ).trial_rows
    check_caught(rows[1], Gate.UPDATE, follows, causes=cause)
    adamw = verdict(record(update=update, losses=OFF))
    assert adamw.failed_gates == f"{Gate.LOSS},{Gate.UPDATE}", "it would hide the scale"
    assert adamw.update_causes == Cause.DIVIDED_TWICE
    for optimizer in ("sgd", "adamw-foreach"):
        for clip_norm in (0.25, 1.0):
            row = clipped(1 / 8, clip_norm, optimizer, losses=OFF)
            check_caught(row, Gate.UPDATE, follows, causes=cause)


def test_a_residual_means_lost_or_repeated_samples() -> None:
    row = verdict(record(update={"error": 0.4, "scale": 0.5, "residual": 0.25}))
    check_caught(row, Gate.UPDATE, "0.5 times", "25% of it", "samples were lost")


@pytest.mark.torch
def test_an_update_that_is_not_finite_is_called_that(tmp_path: Path) -> None:
    import torch

    from bench.measure import update

    path = tmp_path / "reference.safetensors"
    update.save({"weight": torch.tensor([1.0, 2.0])}, path)
    found = update.compare([("weight", torch.tensor([1.0, math.nan]))], path, torch.device("cpu"))
    check_caught(verdict(record(update=found)), Gate.UPDATE, "not finite")


@pytest.mark.parametrize("precision", Precision)
def test_tolerances_hold_up_to_their_edge(precision: Precision) -> None:
    tolerance = TOLERANCES[precision]
    cell = make_cell(accumulate=8, precision=precision)

    def status(deviation: float, error: float) -> str:
        losses = [*LOSSES[:4], LOSSES[4] + deviation]
        return verdict(record(cell, losses=losses, update={"error": error})).status

    inside, outside = 1 - 1e-9, 1 + 1e-9
    largest = tolerance.loss_deviation * max(LOSSES)
    assert status(largest * inside, tolerance.update_error) == "ok"
    assert status(largest * outside, 0.0) == "invalid"
    assert status(0.0, tolerance.update_error * outside) == "invalid"


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_limits_on_losses_follow_the_size_of_the_loss(factor: float) -> None:
    """A mean squared error times 1e-3 hides nothing, and the rounding of a loss times 1e3 is no finding."""
    losses = [factor * loss for loss in LOSSES]
    truth = record(TRUTH, losses=losses)
    sound = [loss * (1 + 1e-6) for loss in losses]
    assert verdict(truth, record(losses=sound), truth=False).status == "ok"
    off = [*losses[:4], losses[4] * (1 + 1e-3)]
    assert verdict(truth, record(losses=off), truth=False).status == "invalid"


def test_a_constant_in_the_loss_does_not_widen_the_limit() -> None:
    losses = [1e3 + 1e-3 * loss for loss in LOSSES]
    truth = record(TRUTH, losses=losses)
    assert verdict(truth, record(losses=losses), truth=False).status == "ok"
    off = [*losses[:4], losses[4] + 0.1]
    assert verdict(truth, record(losses=off), truth=False).status == "invalid"


TENSOR = "layers.0.norm.weight"
END = {
    "errors": {},
    "num_tensors": 9,
    "settings": [],
    "steps": 5,
    "rounded": [],
    "unchecked": "",
}
"""What a sound training leaves."""


@pytest.mark.parametrize(
    ("left", "gate", "words"),
    [
        ({}, None, ""),
        ({"unchecked": "the reference trains 2 of 5 windows"}, None, ""),
        ({"settings": ["eps is 1e-06, 1e-08 was due"]}, Gate.STATE, "other settings: eps is"),
        ({"steps": 10}, Gate.STATE, "counts 10 steps, 5 were due"),
        ({"rounded": ["exp_avg of a"]}, Gate.STATE, "bf16 has not: exp_avg of a"),
        (
            {"errors": {"exp_avg": {"error": 0.3, "tensor": TENSOR}}},
            Gate.STATE,
            f"exp_avg of {TENSOR} is off by 0.3",
        ),
        (
            {"errors": {"trained parameters": {"error": math.inf, "tensor": TENSOR}}},
            Gate.STATE,
            f"{TENSOR} is off by inf",
        ),
        (
            {"ranks": {"error": 1e-3, "tensor": TENSOR, "rank": 1, "num_tensors": 9}},
            Gate.RANKS,
            f"{TENSOR} on rank 1 after the last window",
        ),
        (
            {"ranks": {"error": 0.0, "tensor": TENSOR, "rank": 1, "num_tensors": 9}},
            None,
            "",
        ),
    ],
)
def test_what_a_training_leaves(left: dict[str, Any], gate: Gate | None, words: str) -> None:
    row = verdict(record(end=END | left))
    if gate is None:
        check_sound(row)
    else:
        check_caught(row, gate, words)


def test_a_wrong_update_explains_what_it_leaves() -> None:
    """Else a documented defect would be more than that."""
    left = END | {"errors": {"exp_avg": {"error": 0.875, "tensor": TENSOR}}}
    row = verdict(record(DEFECTIVE, update=TWICE, end=left))
    words = "so after the last window exp_avg"
    check_caught(row, Gate.UPDATE, words, causes=[Cause.DIVIDED_TWICE])


@pytest.mark.parametrize(
    ("update", "gate", "words"),
    [
        ({"tensor_error": 0.6, "tensor": TENSOR}, Gate.UPDATE, [f"{TENSOR} is off by 0.6"]),
        (
            {"fp32_error": 1e-7, "fp32_tensor_error": 1.0, "fp32_tensor": TENSOR},
            Gate.UPDATE,
            ["computed in fp32", f"{TENSOR} is off by 1 "],
        ),
        (
            {"fp32_error": 0.01, "fp32_tensor_error": 1.0, "fp32_tensor": TENSOR},
            Gate.UPDATE,
            [
                "computed in fp32",
                "off by 0.01 (limit 1e-05)",
                f"most in {TENSOR}, which is off by 1",
            ],
        ),
        (
            {"ranks": {"error": 999.0, "tensor": TENSOR, "rank": 3, "num_tensors": 9}},
            Gate.RANKS,
            [f"{TENSOR} on rank 3 after the update"],
        ),
    ],
)
def test_a_tensor_that_all_together_hide(
    update: dict[str, Any], gate: Gate, words: list[str]
) -> None:
    cell = make_cell(accumulate=8, precision=Precision.BF16)
    check_caught(verdict(record(cell, update=update)), gate, *words)


@pytest.mark.parametrize(
    ("model", "error", "wrong"),
    [("tiny", 0.008, False), ("tiny", 1 / 32, True), ("8b", 0.072, False), ("8b", 32**-0.5, True)],
)
def test_bf16_rounds_more_in_wide_and_deep_models(model: str, error: float, wrong: bool) -> None:
    """What was measured, or follows from it, is right; one sample of 32 lost is wrong, if they agree in nothing."""
    cell = make_cell(accumulate=8, precision=Precision.BF16, model=model)
    row = verdict(record(cell, update={"error": error, "residual": error}))
    assert (Gate.UPDATE in (row.failed_gates or "")) == wrong


def test_collectives_that_are_not_the_expected_ones_are_a_finding() -> None:
    eager = make_collectives(make_cell(backend="ddp-eager", accumulate=8))
    row = verdict(record() | {"collectives": eager})
    counts = [
        next(row["calls"] for row in rows if row["op"] == "all_reduce")
        for rows in (eager, make_collectives(CELL))
    ]
    assert counts[0] == 8 * counts[1]
    words = f"all_reduce of float32: {counts[0]} calls", f"not {counts[1]} and"
    check_caught(row, Gate.BYTES, *words)


@pytest.mark.parametrize(
    ("device_error", "device_loss_deviation", "status"),
    [
        (1e-4, 1e-3, "ok"),
        (5e-4, 1e-5, "invalid"),
        (1e-7, 2e-3, "invalid"),
        (math.inf, math.inf, "invalid"),
    ],
)
def test_a_device_that_computes_otherwise_than_the_cpu_makes_every_trial_invalid(
    device_error: float, device_loss_deviation: float, status: str
) -> None:
    checked = {"device_error": device_error, "device_loss_deviation": device_loss_deviation}
    trials = judge(make_tables([record(TRUTH, update=checked), record()], make_manifest())).trials
    assert trials["status"].tolist() == [status] * 2
    if status == "invalid":
        assert set(trials["failed_gates"]) == {Gate.DEVICE}
        assert trials["reason"].str.startswith("cpu computes otherwise than the CPU").all()


def test_gradients_summed_in_another_dtype_are_a_finding() -> None:
    row = verdict(record() | {"accumulation": {"dtype": "bf16"}})
    check_caught(row, Gate.ACCUMULATION, "summed in bf16, fp32")
    check_sound(verdict(record() | {"accumulation": {"dtype": "not measured"}}))


def test_a_virtual_world_has_no_values_to_check() -> None:
    cell = make_cell(virtual=True, world_size=64, global_batch_size=256)
    trial = record(cell, losses=[]) | {"update": None}
    check_sound(verdict(trial, truth=False))
    few = record(cell, losses=[], num_micro_batches=19) | {"update": None}
    check_caught(verdict(few, truth=False), Gate.STEPS, "19 micro-batches were used, 20")


DEFECTIVE = make_cell(backend="lightning-deepspeed-zero2", accumulate=8)
TWICE = {"error": 0.875, "scale": 0.125}
"""The update where the loss is divided by N = 8 twice."""
RUNS: dict[str, list[dict[str, Any]]] = {
    "sound": [record()],
    "defect": [record(DEFECTIVE, update=TWICE)],
    "defect and steps": [record(DEFECTIVE, update=TWICE, num_updates=4)],
    "defect and bytes": [record(DEFECTIVE, update=TWICE) | {"collectives": make_collectives(CELL)}],
    "another cause": [record(DEFECTIVE, update={"error": 7.0, "scale": 8.0})],
    "another backend": [record(update=TWICE)],
    "failed": [
        make_failure(CELL, 0, "crashed", "the update is off: the loss is divided by N = 8 twice")
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_of_a_failure_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every reason is reworded; exit statuses and known defects stay."""
    cells = [record["cell"] for record in RUNS[name]]
    twin = Cell.from_dict(cells[0])

    def outcomes(folder: Path, reason: str) -> tuple[int, list[str]]:
        records = [record(twin.reference()), *RUNS[name]]
        if reason:
            records = [trial | {"reason": reason if trial["reason"] else ""} for trial in records]
        manifest = make_manifest([twin.reference(), twin])
        folder.mkdir()
        write_document(folder, manifest)
        (folder / JOURNAL).write_bytes(b"".join(map(encode, records)))
        judged = load(folder).tables.trial_rows
        assert all((row.reason or reason).startswith(reason) for row in judged)
        defects = [gates.defect_of_trial(manifest_of(manifest), row) for row in judged]
        return cli.main(["report", str(folder), "--rebuild"]), defects

    before = outcomes(tmp_path / "before", "")
    assert before[0] == (0 if name in {"sound", "defect"} else 1)
    assert any(before[1]) == (name == "defect")
    monkeypatch.setattr(
        gates, "Failure", lambda gate, text, causes=(): Failure(gate, "(reworded; twice.", causes)
    )
    assert outcomes(tmp_path / "after", "(reworded; twice.") == before
    tables = [finding for finding in check(tmp_path / "before") if finding.topic == "tables"]
    assert all(finding.level is not Level.ERROR for finding in tables), tables


def test_a_missing_update() -> None:
    trial = record()
    trial["update"] = None
    check_caught(verdict(trial), Gate.UPDATE, "no update to check")


def test_a_step_faster_than_its_products_is_impossible() -> None:
    seconds = statistics.median(record()["time"]["step_seconds"])
    for share, wrong in ((1.4, False), (1.6, True)):
        rates = {"fp32": [0.5 * record()["flops_per_step"] / seconds / share] * 2}
        busy = {"fp32": [rates["fp32"][0] / 2] * 2}  # when others took half of the CPUs
        for measured in ({"flops_per_s": rates}, {"flops_per_s": busy, "capacity": rates}):
            manifest = make_manifest(matmul=[{"world_size": 2, **measured}])
            row = judge(make_tables([record(TRUTH), record()], manifest)).trial_rows[-1]
            if wrong:
                check_caught(row, Gate.TIME, "would run at 160 %")
            else:
                check_sound(row)


def test_a_model_of_unknown_flops_is_held_against_its_matrix_products() -> None:
    rates = [{"world_size": 2, "flops_per_s": {"fp32": [1e9, 1e9]}}]
    found = record() | {"flops_per_step": None}
    found["dispatch"] = found["dispatch"] | {"product_flops": 1e12}
    tables = judge(make_tables([record(TRUTH), found], make_manifest(matmul=rates)))
    check_caught(tables.trial_rows[-1], Gate.TIME, "matrix products alone (2e+12 FLOP")


@pytest.mark.parametrize(
    ("told", "seen", "words"),
    [
        (6.1, 6.15, []),
        (6.1, None, []),
        (0.61, 6.1, ["took 6.100 s", "0.6100 s by that of the rank"]),
        (2.0, 2.0, ["not times of steps"]),
    ],
)
def test_a_clock_that_the_kernel_contradicts_is_none(
    told: float, seen: float | None, words: list[str]
) -> None:
    row = verdict(record(span_s=told, observed_span_s=seen))
    if words:
        check_caught(row, Gate.TIME, *words)
    else:
        check_sound(row)


def test_ranks_that_begin_one_after_the_other_have_steps_of_their_own() -> None:
    """The slowest rank of each step makes a sum that none of them had."""
    late = {"rank_step_seconds": [[0.1, 2.0], [2.0, 0.1]], "step_seconds": [2.0, 2.0]}
    check_sound(verdict(record(**late, warmup_seconds=[], span_s=2.2, observed_span_s=2.2)))


def test_a_value_beyond_a_limit_is_never_told_as_the_limit() -> None:
    row = verdict(record(update={"error": 1.0000042e-05, "scale": 1.00001}))
    check_caught(row, Gate.UPDATE, "off by 1.000004e-05 (limit 1e-05 in fp32)")


@pytest.mark.parametrize(
    ("backend", "overhang", "more", "status"),
    [
        ("ddp-deferred", 4096, 0, "ok"),
        ("ddp-deferred", 4096, 4096, "ok"),
        ("ddp-deferred", 4096, 4100, "invalid"),
        ("ddp-deferred", 4096, 2**26, "invalid"),
        ("ddp-deferred", 4096, -4, "invalid"),
        ("ddp-deferred", -64, -64, "ok"),
        ("ddp-deferred", -64, -68, "invalid"),
        ("ddp-deferred", 0, 4, "invalid"),
        ("fsdp2-deferred", 4096, 4096, "ok"),
        ("fsdp2-eager", 4096, 4096, "invalid"),
    ],
)
def test_held_gradients_may_be_the_storages_that_autograd_keeps_in_the_plain_model(
    backend: str, overhang: int, more: int, status: str
) -> None:
    """Only where gradients are held in full: shards are no views of them."""
    layout = dataclasses.replace(llama_layout(SIZES["tiny"]), gradient_overhang=overhang)
    cell = make_cell(backend=backend)
    expectation = expect(cell, layout)
    assert expectation
    held = {"held_gradients_unsharded": expectation.held["gradients"] + more}
    told = record(cell) | {"memory": held, "layout": layout.to_json()}
    rows = judged_run([record(cell.reference()), told], make_manifest()).tables.trial_rows
    found, reason = rows[-1].status, rows[-1].reason
    assert found == status, reason
    assert ("gradients held between micro-batches" in reason) == (status == "invalid")
