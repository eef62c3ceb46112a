from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from bench.audit import monitor_ranks
from bench.audit.monitor import judge, measure
from bench.audit.monitor_grid import Epoch, Point, RateVerdict, Strategy
from bench.audit.monitor_ranks import measure_all
from bench.cli import main
from bench.launch.launcher import Launcher
from tests.conftest import lend


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([], RateVerdict.UNRATED),
        ([1.0, 1.009, 0.991], RateVerdict.RIGHT),
        ([0.98, 0.985], RateVerdict.BIASED),
        ([1.02], RateVerdict.BIASED),
        ([1.0, 1.0, 0.8], RateVerdict.UNSTEADY),
        ([0.7, 0.9], RateVerdict.UNSTEADY),
    ],
)
def test_verdict_on_ratios(ratios: list[float], verdict: RateVerdict) -> None:
    assert judge(ratios) is verdict


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_window_of_whole_windows_and_one_is_right(accumulate: int) -> None:
    for whole in (1, 3):
        if accumulate * whole + 1 >= 2:
            found = measure(Point(accumulate, 1, accumulate * whole + 1))
            assert max(abs(rate.ratio - 1) for rate in found.rates) < 1e-9
            assert found.true_samples_per_s == pytest.approx(
                2 * accumulate / (accumulate * 0.01 + 0.08)
            )


def test_window_one_longer_is_biased_by_one_more_optimizer_step() -> None:
    found = measure(Point(8, 1, 10))
    assert found.verdict is RateVerdict.BIASED
    # 9 micro-batches with 2 optimizer steps among them, where 9/8 steps would be their share.
    assert {round(rate.reported, 6) for rate in found.rates} == {
        round(9 * 2 / (9 * 0.01 + 2 * 0.08), 6)
    }
    assert (
        measure(Point(8, 1, 10, optimizer_s=1e-5)).verdict is RateVerdict.RIGHT
    )  # nothing to be biased by


def test_partial_last_window_makes_rates_unsteady() -> None:
    found = measure(Point(4, 1, 5, Epoch.PARTIAL))
    assert found.verdict is RateVerdict.UNSTEADY
    assert found.num_updates == 3 * found.point.lengths[1]
    # Wrong at the epoch's last update only, whose span begins inside a window.
    assert {rate.update % 3 == 0 for rate in found.rates if abs(rate.ratio - 1) > 1e-9} == {True}
    # Looked at only there, it is steadily wrong.
    assert measure(Point(4, 3, 5, Epoch.PARTIAL)).verdict is RateVerdict.BIASED


@pytest.mark.parametrize(
    ("point", "lengths", "num_updates", "logs", "num_rates_logged", "verdict"),
    [
        # 2 x 2 steps, none a multiple of 5; with one more epoch the fifth is logged, but its window is not full.
        (Point(4, 5, 30, micro_batches=8, num_epochs=2), (8, 2), 4, (), 0, RateVerdict.SILENT),
        (Point(4, 5, 30, micro_batches=8, num_epochs=3), (8, 3), 6, (5,), 0, RateVerdict.UNRATED),
        # The window is full at the last log, but begins before the first update.
        (Point(4, 2, 8, micro_batches=8, num_epochs=1), (8, 1), 2, (2,), 1, RateVerdict.UNRATED),
        (
            Point(4, 1, 11, micro_batches=10, num_epochs=3),
            (10, 3),
            9,
            tuple(range(1, 10)),
            6,
            RateVerdict.RIGHT,
        ),
    ],
)
def test_trainings_of_a_given_length(
    point: Point,
    lengths: tuple[int, int],
    num_updates: int,
    logs: tuple[int, ...],
    num_rates_logged: int,
    verdict: RateVerdict,
) -> None:
    found = measure(point)
    assert (point.lengths, found.num_updates, found.log_updates) == (lengths, num_updates, logs)
    assert (found.num_rates_logged, found.verdict) == (num_rates_logged, verdict)
    row = found.to_row()
    assert (
        row["epoch"] == f"NB = {lengths[0]}"
        and (row["num_micro_batches_per_epoch"], row["num_epochs"]) == lengths
    )


def test_validation_does_not_count() -> None:
    """Every 3 micro-batches of 36 there is one; without the bench's clock it would be 0.05 s of 0.36 + 0.72 each."""
    found = measure(Point(4, 1, 5, validate_every=3))
    assert max(abs(rate.ratio - 1) for rate in found.rates) < 1e-9
    assert found.true_samples_per_s == pytest.approx(2 * 4 / (4 * 0.01 + 0.08))


@pytest.mark.parametrize(
    "strategy", [Strategy.DDP, pytest.param(Strategy.DEEPSPEED, marks=pytest.mark.slow)]
)
def test_two_ranks(strategy: Strategy, launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    lend(launcher, monkeypatch, monitor_ranks)
    kinds = {"strategy": strategy, "world_size": 2}
    points = [
        Point(4, 1, 5, **kinds),
        Point(4, 1, 5, Epoch.PARTIAL, **kinds),
        Point(4, 1, 5, Epoch.SHORT, **kinds),
    ]
    rows = list(measure_all(points))
    rate = 2 * 2 * 4 / (4 * 0.01 + 0.08)  # of both ranks
    assert rows[0]["true_samples_per_s"] == pytest.approx(rate)
    assert rows[0]["reported_samples_per_s"] == pytest.approx(rate)
    # DeepSpeed steps after every fourth micro-batch, whatever the epochs, and the Trainer counts none in short ones.
    wanted = (
        ["right", "right", "silent"]
        if strategy is Strategy.DEEPSPEED
        else ["right", "unsteady", "right"]
    )
    assert [row["verdict"] for row in rows] == wanted


def test_command_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--accumulate", "4", "--log-every", "1,5", "--epoch", "whole"]
    assert main(["throughput", *options, "--window-size", "5", "--json"]) == 0
    assert [point["verdict"] for point in json.loads(capsys.readouterr().out)["points"]] == [
        "right",
        "right",
    ]
    out = tmp_path / "out"
    assert main(["throughput", *options, "--window-size", "5,6", "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "biased" in shown and "log_every_n_steps changed no verdict" in shown
    assert {path.suffix for path in out.iterdir()} == {".parquet", ".md"}
    table = pd.read_parquet(out / "throughput.parquet")
    assert list(table["verdict"]) == ["right", "right", "biased", "biased"] and set(
        table["clock"]
    ) == {"virtual"}
    page = (out / "throughput.md").read_text()
    assert "| whole | 4 | 6 | 1, 5 |" in page and str(tmp_path) not in page
    assert "whole (NB is a multiple of N). reported/s:" in page
    assert "right: within 1 % of 1." in page
