"""What the bench costs: trials beside bare loops, and the page on it (studies/overhead)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.backends.base import registry
from bench.launch.launcher import Launcher
from studies.overhead.bare import LOOPS, RANKS, N
from studies.overhead.in_turn import on_cpu, seconds, steps, train
from studies.overhead.page import page
from tests.conftest import ROOT, first
from tests.factories import make_cell


@pytest.mark.parametrize("backend", first(["fsdp2-deferred"], LOOPS))
def test_a_trial_and_a_bare_loop_train_the_same_windows_in_turn(
    backend: str, launcher: Launcher, tmp_path: Path
) -> None:
    found = steps(launcher, on_cpu(backend, 3), backend, tmp_path, is_bench_first=False)
    assert [len(seconds) for seconds in found.values()] == [3] * 6
    assert all(0 < second < 60 for seconds in found.values() for second in seconds)


@pytest.mark.slow
def test_two_cells_take_turns_too(launcher: Launcher, tmp_path: Path) -> None:
    changes = {
        "accumulate": N,
        "world_size": RANKS,
        "global_batch_size": 8,
        "warmup_windows": 2,
        "timed_windows": 3,
    }
    cell, other = (make_cell(backend=name, **changes) for name in ("fsdp2-eager", "ddp-deferred"))
    found = train(launcher, cell, tmp_path, "", other, is_bench_first=True)
    assert {name: len(seconds(side, 3)) for name, side in found.items()} == dict.fromkeys(found, 3)
    assert len(found) == 4 and all(
        len({str(rank["losses"]) for rank in side}) == RANKS for side in found.values()
    )
    assert {rank["num_updates"] for side in found.values() for rank in side} == {5}


def test_both_fork_from_a_process_that_has_loaded_what_the_backend_names(tmp_path: Path) -> None:
    """A function too, as torchtitan's backend has one."""
    (tmp_path / "loaded.py").write_text(
        f"def mark():\n    open({str(tmp_path / 'mark')!r}, 'x').close()\n"
    )
    paths = f"{tmp_path}:{ROOT}"
    names = ("no_such_package", "loaded:mark")
    environment = os.environ | {"BENCH_PRELOAD": ",".join(names), "PYTHONPATH": paths}
    for code in (
        "import studies.overhead.preload",
        f"from bench.launch import preload; preload.load_all(*{names})",
    ):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        (tmp_path / "mark").unlink()
    assert registry()["torchtitan-eager"].preloaded() == ("bench.backends.torchtitan:load",)


@pytest.mark.slow
def test_another_sum_of_the_gradients_is_not_the_same_training(
    launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="did not train the same"):
        steps(launcher, on_cpu("ddp-eager", 3), "fsdp2-deferred", tmp_path)


@pytest.fixture
def measured() -> dict[str, Any]:
    """Eight groups of two backends; one costs 0.5 % more than its bare loop, the other 3 %. Trials' processes, 2 %."""
    bare = [0.1 + 0.01 * group for group in range(8)]
    costs = {"ddp-deferred": 1.005, "lightning-ddp": 1.03}
    return {
        "date": "2025-01-02T00:00:00+00:00",
        "git": {"commit": "0123456789abcdef", "clean": True},
        "machine": {
            "cpu": "made",
            "cores": 2,
            "memory_bytes": 2**34,
            "system": "Linux",
            "python": "3.11.7",
        },
        "packages": {"torch": "2.13.0"},
        "busy": 0.02,
        "minutes": 20.0,
        "loops": {
            name: {
                f"{loop}, {processes}": [seconds * part * whole for seconds in bare]
                for loop, part in (("bench", cost), ("bare", 1), ("step", cost**2))
                for processes, whole in (("trial", 1.02), ("torchrun", 1))
            }
            | {"watching": [0.001] * 8}
            for name, cost in costs.items()
        },
        "times": {
            "smoke run": {"seconds": 100.0, "runs": 1},
            "one append": {"seconds": 5e-5, "runs": 900},
        },
    }


def test_the_page_says_what_is_within_one_per_cent_and_what_changed(
    measured: dict[str, Any],
) -> None:
    last = {"times": {"smoke run": {"seconds": 80.0, "runs": 1}}}
    written = page(measured, measured | last)
    assert (
        "| ddp-deferred | 135 ms | 1.0050 | 1.0050 to 1.0050 | yes | 1.0200 | 1.0200 to 1.0200 | 8 |"
        in written
    )
    assert (
        "| lightning-ddp | 135 ms | 1.0300 | 1.0300 to 1.0300 | **no** | 1.0200 | 1.0200 to 1.0200 | 8 |"
        in written
    )
    assert "from 1.0050 (ddp-deferred) to 1.0300 (lightning-ddp) of the window" in written
    assert "| smoke run | 100 s | 1 | 1.250 |" in written
    assert "| one append | 50 µs | 900 | - |" in written
    assert "not idle" not in written
    again = {name: measured[name] for name in ("git", "machine", "packages", "minutes")}
    written = page(measured | {"fixed": again | {"date": "2025-03-04", "busy": 0.5}}, measured)
    assert written.index("- 2025-01-02, commit") < written.index("## Everything else")
    assert (
        written.index("## Everything else")
        < written.index("- 2025-03-04, commit")
        < written.index("not idle")
    )


def test_a_page_from_a_busy_machine_says_so_and_few_groups_have_no_interval(
    measured: dict[str, Any],
) -> None:
    few = {
        name: {side: values[:2] for side, values in sides.items()}
        for name, sides in measured["loops"].items()
    }
    written = page(measured | {"busy": 0.5, "loops": few}, {})
    assert written.index("others took 50.0 % of the CPUs") < written.index("| bare loop")
    assert written.count("| - | unknown | 1.0200 | - | 2 |") == 2
