"""The figures of communication and noise, of made runs: true to the tables, and legible."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib.style
import pytest

from bench.judge.loading import load
from bench.judge.standing import noise_floor, standing
from bench.judge.tables import Tables
from bench.judge.verdicts import band
from bench.report import bars as report_bars
from bench.report import figures, rows, style
from bench.report.figure_data import FigureData
from bench.report.figures import kind_of
from bench.report.panels import Drawing
from tests import legible
from tests.pages import MIB, write_run

FACTORS = {f"made-{i}-{sync}": 1 + i / 10 for i in range(5) for sync in ("eager", "deferred")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("plots") / "run", FACTORS, accumulate=(1, 2, 8), world_size=(1, 2))


def drawn(folder: Path) -> tuple[list[Drawing], list[Drawing]]:
    run = load(folder)
    found = FigureData(run.tables, dict(run.manifest))
    floor = noise_floor(run)
    with matplotlib.style.context(list(style.BASE)):
        sent = report_bars.draw_traffic(found, run.tables.collectives)
        return sent, rows.draw_noise(found, None if floor is None else floor.interval)


def test_they_can_be_read(folder: Path) -> None:
    for drawings in drawn(folder):
        assert drawings
        for drawing in drawings:
            with matplotlib.style.context(list(style.BASE)):
                legible.assert_legible(drawing.figure, style.MAX_HEIGHT)
            assert all(axes.patches or axes.lines for axes in drawing.figure.axes)


def test_bars_are_the_payload_by_operation(folder: Path) -> None:
    (drawing,) = drawn(folder)[0]
    data = drawing.data.set_index(["backend", "world_size", "accumulate"])
    assert data.loc[("made-0-eager", 2, 8), "all_reduce"] == 8 * 12 * MIB
    assert data.loc[("made-0-eager", 2, 8), "broadcast"] == MIB
    assert data.loc[("made-0-eager", 2, 8), report_bars.TOTAL] == 97 * MIB
    titles = [axes.get_title() for axes in drawing.figure.axes]
    assert len(titles) == 3 and not any("W = 1" in title for title in titles)  # alone, a rank sends nothing
    bars = [bar for axes in drawing.figure.axes for bar in axes.patches]
    ends = [bar.get_x() + bar.get_width() for bar in bars]  # type: ignore[attr-defined]
    assert max(ends) == pytest.approx(97)


def test_without_collectives_there_is_no_figure(folder: Path) -> None:
    run = load(folder)
    found = FigureData(run.tables, dict(run.manifest))
    assert report_bars.draw_traffic(found, run.tables.collectives.iloc[:0]) == []


def test_points_are_deviations_in_the_order_in_which_trials_ran(folder: Path) -> None:
    run = load(folder)
    ((drawing,), floor) = drawn(folder)[1], noise_floor(run)
    data = drawing.data
    assert data["place"].tolist() == list(range(1, len(data) + 1)) and "reference" not in set(data["backend"])
    trials = run.tables.trials.set_index(["cell_id", "repeat"])
    slots = [trials.loc[(row.cell_id, row.repeat), "slot"] for row in data.itertuples()]
    assert slots == sorted(slots)
    assert abs(data.groupby("cell_id")[rows.DEVIATION].median()).max() < 1e-9
    assert floor is not None and floor.interval is not None
    words = legible.words(drawing.figure)
    assert f"noise floor, {100 * (band(floor.interval) - 1):.2g} %" in words


def test_trials_far_away_are_told_and_do_not_hide_the_others(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "far", {"alpha": 1.0, "beta": 1.1}, accumulate=(2,), repeats=30)
    run = load(folder)
    trials = run.tables.trials
    far = trials.index[trials["backend"] == "alpha"][0]
    trials.loc[far, "step_time_s"] = 10.0
    with matplotlib.style.context(list(style.BASE)):
        (drawing,) = rows.draw_noise(FigureData(run.tables, dict(run.manifest)), None)
    assert drawing.figure.axes[0].get_ylim()[1] < 5
    notes = " ".join(drawing.words.notes)
    assert "trials farther away, up to 9.8" in notes.replace("9.86e+03", "9.8") or "farther away" in notes
    assert "The noise floor is unknown" in notes


def test_one_trial_of_each_cell_has_no_spread(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "one", {"alpha": 1.0}, repeats=1))
    assert rows.draw_noise(FigureData(run.tables, dict(run.manifest)), None) == []


def some_of(folder: Path, names: set[str]) -> Tables:
    """The tables of a run, of these backends alone."""
    tables = load(folder).tables
    return dataclasses.replace(tables, trials=tables.trials[tables.trials["backend"].isin(names)])


def test_figures_of_an_earlier_report_are_removed(folder: Path, tmp_path: Path) -> None:
    run = load(folder)
    manifest = dict(run.manifest)
    before = figures.draw(run.tables, manifest, tmp_path, standing(run))
    stems = {path.stem for path in before}
    assert {"step_time_ratio-1", "step_time_ratio-2", "step_time"} <= stems
    assert {kind_of(stem) for stem in stems} == set(figures.KINDS)
    own = {
        "notes.txt": "a user's",
        "noise-9.png": "no picture",  # without the files beside it
        "other-1.csv": "run_id,cell_id\nrun,1\n",
        "speed_up-9.csv": "run_id,cell_id\nanother,1\n",
        "loss_curves-7.csv": "run_id\n" + "x" * 200_000 + "\n",
    }
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    for stem in ("other-1", "speed_up-9", "loss_curves-7"):  # of another kind, of another run, not readable
        for suffix in (".png", ".svg"):
            (tmp_path / stem).with_suffix(suffix).write_text("a user's")
    own |= {path.name: path.read_text() for path in tmp_path.iterdir() if path not in before}

    few = some_of(folder, {"made-0-eager", "made-0-deferred"})
    after = figures.draw(few, manifest, tmp_path)
    assert "step_time_ratio" not in {kind_of(path.stem) for path in after}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*own, *(path.name for path in after)})
    assert all((tmp_path / name).read_text() == text for name, text in own.items())
    assert figures.draw(few, manifest, tmp_path) == after


def test_no_leader_of_the_reference_run_strikes_a_label_through() -> None:
    """Where many lines end close to each other."""
    run = load(Path(__file__).parents[2] / "results/cpu-new")
    with matplotlib.style.context(list(style.BASE)):
        found = {drawing.stem: drawing for drawing in figures.figures(run.tables, run.manifest)}
        for stem in ("peak_memory", "held_gradients", "step_time"):
            legible.assert_legible(found[stem].figure, 12)
