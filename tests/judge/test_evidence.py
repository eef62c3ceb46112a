"""From tables to sides: what of the machine forbids a comparison, and step times in clock cycles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.judge import tables
from bench.judge.evidence import CellEvidence, EvidenceByCell
from bench.judge.gates import judge
from bench.judge.verdicts import Reason, Verdict, compare, judge_all
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import Cell, Device, Status
from tests.factories import make_cell, make_gpu, make_manifest, make_record, make_tables

HOST = make_cell()
CUDA = make_cell(device=Device.CUDA)


def built(cell: Cell, *changes: dict[str, Any]) -> tables.Tables:
    records = [make_record(cell.reference(), 0)]
    records += [make_record(cell, repeat, **change) for repeat, change in enumerate(changes)]
    return judge(make_tables(records, make_manifest()))


def load(foreign: float, stolen: float = 0.0) -> dict[str, Any]:
    return {"time": {"host": {"num_cpus": 4, "foreign_cores": foreign, "stolen_cores": stolen}}}


def sides(cell: Cell, *changes: dict[str, Any]) -> CellEvidence:
    return EvidenceByCell(built(cell, *changes)).of(cell)


@pytest.mark.parametrize(("foreign", "stolen"), [(0.5, 0.0), (0.0, 0.5), (0.3, 0.2)])
def test_a_busy_machine_makes_a_cell_not_comparable(foreign: float, stolen: float) -> None:
    found = sides(HOST, *[load(foreign, stolen)] * 3, *[load(0.0)] * 2)
    (text,) = found.disturbed
    assert f"12 % of its CPUs (limit {100 * IDLE_SHARE:g} %)" in text
    assert found.failed_gates == ()
    (judgement,) = judge_all([compare({"": (found, found)}, None)])
    assert (judgement.verdict, judgement.reason) == (Verdict.NOT_COMPARABLE, Reason.DISTURBED)


def test_gpu_columns_by_hand() -> None:
    made = built(
        CUDA,
        {
            "gpus": {
                "gpus": [make_gpu(), make_gpu(uuid="GPU-2", sm_clock_mhz=1200.0, energy_j=60.0)],
                "notes": [],
            }
        },
    )
    row = made.trials.iloc[1]
    assert (row["sm_clock_mhz"], row["power_w"], row["temperature_c"]) == (1200.0, 800.0, 60.0)
    assert row["energy_j_per_step"] == 150.0 / CUDA.timed_windows
    assert row["energy_j_per_token"] == pytest.approx(row["energy_j_per_step"] / (16 * 32))
    assert row["clock_slowdowns"] == "SwPowerCap", (
        "what was seen in less than a tenth of the samples is none"
    )
    assert row["foreign_gpu_processes"] == 0
    unknown = built(
        CUDA, {"gpus": {"gpus": [make_gpu(sm_clock_mhz=None, energy_j=None)], "notes": []}}
    ).trials.iloc[1]
    assert unknown[["sm_clock_mhz", "energy_j_per_step"]].isna().all()


def on_gpu(*changes: dict[str, Any]) -> CellEvidence:
    return sides(
        CUDA, *({"gpus": {"gpus": [make_gpu(**change)], "notes": []}} for change in changes)
    )


def test_a_power_cap_alone_is_no_obstacle_and_heat_is() -> None:
    assert on_gpu({}, {}, {}).disturbed == ()
    hot = {"throttle": {"HwThermalSlowdown": 0.5}, "slowdowns": ["HwThermalSlowdown"]}
    assert on_gpu(hot, hot, {}).disturbed == ("the GPU's clocks were held down: HwThermalSlowdown",)


def test_another_process_on_the_gpu_is_an_obstacle() -> None:
    busy = {"other_processes": 1}
    assert on_gpu(busy, busy, {}).disturbed == ("another process was on the GPU in 2 of 3 trials",)


def test_a_faster_clock_cannot_fake_a_speed_up() -> None:
    """One side is 10 % faster because its clock was: in cycles there is no difference."""
    slow, fast = make_cell(device=Device.CUDA), make_cell(device=Device.CUDA, backend="ddp-eager")
    records = [make_record(slow.reference(), 0)]
    for repeat in range(8):
        wobble = 1 + 0.001 * (repeat % 3)
        for cell, seconds, clock in ((slow, 1.1, 1000.0), (fast, 1.0, 1100.0)):
            facts = {"gpus": {"gpus": [make_gpu(sm_clock_mhz=clock)], "notes": []}}
            records.append(
                make_record(cell, repeat, time={"step_seconds": [seconds * wobble] * 3}, **facts)
            )
    made = judge(make_tables(records, make_manifest()))
    a, b = map(EvidenceByCell(made).of, (fast, slow))
    floor = compare({"": (a, a)}, None).time
    (judgement,) = judge_all([compare({"": (a, b)}, floor)])
    assert (judgement.verdict, judgement.reason) == (Verdict.AMBIGUOUS, Reason.CLOCKS)


def test_micro_batches_are_no_steps() -> None:  # mutant 3
    tables = built(HOST, {}, {})
    micro = [row for row in tables.step_rows for _ in range(HOST.accumulate)]
    found = EvidenceByCell(dataclasses.replace(tables, step_rows=micro)).of(HOST)
    assert found.failed_gates == (("12 steps were timed, 3 were expected",),)
    (judgement,) = judge_all([compare({"": (found, found)}, None)])
    assert (judgement.verdict, judgement.reason) == (Verdict.NOT_COMPARABLE, Reason.GATE)


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ("ok ok", "ok"),
        ("oom oom", "oom"),
        ("ok hang ok", "hang, 2 of 3 ok"),
        ("ok crashed invalid", "invalid, 1 of 3 ok"),
        ("invalid invalid", "invalid"),
    ],
)
def test_the_outcome_of_a_cell_is_its_failure_and_its_number_of_ok_trials(
    ends: str, outcome: str
) -> None:
    tables = built(HOST, *[{}] * len(ends.split()))
    statuses = map(Status, ["ok", *ends.split()])  # the reference's first
    rows = [
        dataclasses.replace(row, status=end)
        for row, end in zip(tables.trial_rows, statuses, strict=True)
    ]
    found = EvidenceByCell(dataclasses.replace(tables, trial_rows=rows)).of(HOST)
    assert found.outcome == outcome
