"""In which dtype gradients are summed: every backend, FSDP2's policies, loops with known faults, and the table."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from bench import cli
from bench.audit import dtypes
from bench.audit.dtypes import AccumulationTask
from bench.backends.base import registry
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.measure import accumulation_dtype
from bench.plan.cell import REFERENCE, REFERENCES, Precision, Status
from tests.conftest import Command, asked, first
from tests.sum_dtypes import FSDP2_POLICIES, LOOPS, NS, SumDtypes

BACKENDS = [name for name in registry() if name not in REFERENCES]
CHOSEN = (
    REFERENCE,
    "ddp-deferred",
    "fsdp2-eager",
    "deepspeed-zero2-deferred",
    "lightning-deepspeed-zero2",
)
REFUSED_IN_BF16 = {name for name, backend in registry().items() if backend.refuses.bf16}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, launcher: Launcher) -> dict[str, Any]:
    """What two ranks found out; both say the same."""
    names = tuple(asked(request, CHOSEN, registry()))
    outcome = launcher.run(SumDtypes(names=names, world_size=2), 300)
    assert outcome.status is Status.OK, f"{outcome.reason}\n{outcome.traceback}"
    first, second = (rank["found"] for rank in outcome.ranks)
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", first(CHOSEN[1:], BACKENDS))
def test_every_backend_sums_in_fp32(found: dict[str, Any], name: str, precision: Precision) -> None:
    if precision is Precision.BF16 and name in REFUSED_IN_BF16:
        assert "unsupported" in found[f"{name} {precision}"]
        return
    divided_twice = registry()[name].defect != ""
    assert found[f"{name} {precision}"] == {
        "dtype": "fp32",
        "significand_bits": 24,
        "sum": 1.0,
        "scale": 0.25 if divided_twice else 1.0,
        "num_updates": 1,
        "result_dtype": "fp32",
    }


@pytest.mark.parametrize("policy", FSDP2_POLICIES, ids=str)
def test_what_fsdp2_sums_in_follows_from_its_policy(found: dict[str, Any], policy: Any) -> None:
    both = [found[f"{policy} {sync}"] for sync in ("eager", "deferred")]
    assert tuple(probe["dtype"] for probe in both) == FSDP2_POLICIES[policy]
    assert tuple(probe["sum"] for probe in both) == tuple(
        float(dtype == "fp32") for dtype in FSDP2_POLICIES[policy]
    )
    assert all(probe["scale"] == 1.0 for probe in both)


@pytest.mark.parametrize("name", ["silent", "coalescing"])
def test_deepspeed_sums_in_bf16_unless_told_and_where_it_is_refused(
    found: dict[str, Any], name: str
) -> None:
    assert (found[name]["dtype"], found[name]["sum"]) == ("bf16", 0.0)


@pytest.mark.parametrize(
    ("loop", "dtype", "bits", "scale"),
    [
        ("Loop", "fp32", 24, 1.0),
        ("FP16Loop", "fp16", 11, 1.0),
        ("FP64Loop", "fp64", 32, 1.0),
        ("SumLoop", "fp32", 24, 4.0),
        ("LastOnly", "other: 1 bits", 1, -0.5),
        ("StepsTooOften", "other: 4 updates", 24, 1.0),
        ("NoStepLoop", "other: no update", None, 0.0),
    ],
)
def test_loops_whose_sum_is_known(
    found: dict[str, Any], loop: str, dtype: str, bits: int | None, scale: float
) -> None:
    assert loop in LOOPS
    assert (found[loop]["dtype"], found[loop].get("significand_bits"), found[loop]["scale"]) == (
        dtype,
        bits,
        scale,
    )


def test_where_nothing_is_accumulated_nothing_is_claimed(found: dict[str, Any]) -> None:
    for name in (f"{REFERENCE} fp32", f"{REFERENCE} bf16", "virtual"):
        assert found[name] == {"dtype": accumulation_dtype.NOT_MEASURED}
    assert found["errors reference"] == [None] * len(NS)


def test_a_cell_that_clips_is_probed_without(found: dict[str, Any]) -> None:
    assert found["clipped"]["dtype"] == "fp32" and found["clipped"]["scale"] == 1.0


@pytest.mark.parametrize(
    "name", ["ddp-eager", "fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager", "twice"]
)
def test_the_error_of_a_sum_in_fp32_stays_small(found: dict[str, Any], name: str) -> None:
    curve = found[f"errors {name}"]
    assert [point["accumulate"] for point in curve] == list(NS)
    assert all(point["error"] < 1e-7 and point["num_updates"] == 1 for point in curve)
    assert [point["factor"] for point in curve] == [1 / n if name == "twice" else 1.0 for n in NS]
    assert [point["scale"] for point in curve] == pytest.approx(
        [point["factor"] for point in curve], rel=1e-6
    )


def test_the_error_of_a_sum_in_bf16_grows_with_n(found: dict[str, Any]) -> None:
    errors = [point["error"] for point in found["errors bf16"]]
    assert errors[0] < 1e-2 < errors[-1]
    assert errors == sorted(errors)
    assert all(point["factor"] == 1.0 for point in found["errors bf16"])


def test_the_table_is_made_by_real_process_groups(here: Command) -> None:
    done = here("accumulation", "--backend", "deepspeed-zero2-deferred", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["backend"], row["precision"], row["dtype"]) for row in rows] == [
        ("deepspeed-zero2-deferred", "fp32", "fp32"),
        ("deepspeed-zero2-deferred", "bf16", "unsupported"),
    ]
    assert "coalesce" in rows[1]["reason"]


class FakeLauncher(contextlib.nullcontext[Any]):
    """Ends every task as ``outcome`` says."""

    outcome: Outcome
    tasks: list[AccumulationTask]

    def __init__(self, device: Any) -> None:
        super().__init__(self)
        FakeLauncher.tasks = []

    def run(self, task: AccumulationTask, timeout_s: float) -> Outcome:
        self.tasks.append(task)
        return self.outcome


def test_a_group_that_failed_has_rows_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dtypes, "Launcher", FakeLauncher)
    FakeLauncher.outcome = Outcome(status=Status.CRASHED, reason="rank 1: no", ranks=[], wall_s=1.0)
    assert (
        cli.main(["accumulation", "--backend", "ddp-eager", "--errors", "--world-size", "4"]) == 1
    )
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ddp-eager", precision, "crashed", "rank", "1:", "no"] for precision in ("fp32", "bf16")
    ]
    assert FakeLauncher.tasks[0].windows == dtypes.WINDOWS and FakeLauncher.tasks[0].world_size == 4


@pytest.mark.parametrize(
    ("dtype", "status"), [("fp32", 0), ("unsupported", 0), ("bf16", 1), ("other: 3 bits", 1)]
)
def test_the_exit_status_says_whether_all_sum_in_fp32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, status: int
) -> None:
    monkeypatch.setattr(dtypes, "Launcher", FakeLauncher)
    row = {
        "backend": "x",
        "precision": "fp32",
        "dtype": dtype,
        "significand_bits": 8,
        "sum": 0.0,
        "scale": 1.0,
    }
    row["errors"] = [{"accumulate": 4, "error": 0.0123}, None]
    rows = [row, {"backend": "y", "precision": "fp32", "dtype": "fp32"}]
    FakeLauncher.outcome = Outcome(
        status=Status.OK, reason="", ranks=[{"rows": rows}, {"rows": []}], wall_s=1.0
    )
    assert cli.main(["accumulation", "--backend", "ddp-eager", "--json"]) == status
    assert [json.loads(line)["dtype"] for line in capsys.readouterr().out.splitlines()] == [
        dtype,
        "fp32",
    ]
    assert (
        cli.main(["accumulation"]) == status
        and [task.backend for task in FakeLauncher.tasks] == BACKENDS
    )
    words = f"x fp32 {dtype} 8 bits sum 0 scale 1 N=4: 0.012"
    assert capsys.readouterr().out.splitlines()[0].split() == words.split()
