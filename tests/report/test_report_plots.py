"""The figures of memory, communication and noise, of made runs: true to the tables, and legible."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib.style
import pytest

from bench.judge.loading import load
from bench.plan.categories import Category
from bench.report import bars as report_bars
from bench.report import deviations, figures, style
from bench.report.figure_data import FigureData
from bench.report.report_data import ReportData
from bench.report.sheet import Drawing
from tests import legible
from tests.pages import MIB, write_run

FACTORS = {f"made-{i}-{sync}": 1 + i / 10 for i in range(5) for sync in ("eager", "deferred")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("plots") / "run", FACTORS, accumulate=(1, 2, 8), world_size=(1, 2))


def drawn(folder: Path) -> list[list[Drawing]]:
    found = FigureData(ReportData(run=load(folder)))
    with matplotlib.style.context(list(style.BASE)):
        return [
            report_bars.draw_traffic(found),
            report_bars.draw_memory_categories(found),
            deviations.draw_noise(found),
        ]


def test_they_can_be_read(folder: Path) -> None:
    for drawings in drawn(folder):
        assert drawings
        for drawing in drawings:
            with matplotlib.style.context(list(style.BASE)):
                legible.assert_legible(drawing.figure, style.MAX_HEIGHT)
            assert all(axes.patches or axes.lines for axes in drawing.figure.axes)


def test_bars_are_the_bytes_sent_by_operation(folder: Path) -> None:
    (drawing,) = drawn(folder)[0]
    data = drawing.data.set_index(["backend", "world_size", "accumulate"])
    assert data.loc[("made-0-eager", 2, 8), "all_reduce"] == 8 * 12 * MIB  # 2 (W - 1) / W of the payload
    assert data.loc[("made-0-eager", 2, 8), "broadcast"] == MIB
    assert data.loc[("made-0-eager", 2, 8), report_bars.SENT] == 97 * MIB
    titles = [axes.get_title() for axes in drawing.figure.axes]
    assert len(titles) == 3 and not any("W = 1" in title for title in titles)  # alone, a rank sends nothing
    bars = [bar for axes in drawing.figure.axes for bar in axes.patches]
    ends = [bar.get_x() + bar.get_width() for bar in bars]  # type: ignore[attr-defined]
    assert max(ends) == pytest.approx(97)


def test_a_bar_is_as_long_as_the_peak_and_has_every_category(folder: Path) -> None:
    (drawing,) = drawn(folder)[1]
    bars = [bar for axes in drawing.figure.axes for bar in axes.patches]
    ends = [bar.get_x() + bar.get_width() for bar in bars]  # type: ignore[attr-defined]
    cells = drawing.data.drop_duplicates("cell_id")
    parts = cells[[str(category) for category in Category]].sum(axis=1)
    assert len(Category) == 9 and (parts == cells["live_bytes"]).all()
    assert max(ends) == pytest.approx(float(cells["peak_memory_bytes"].max()) / MIB)


@pytest.mark.slow
def test_figures_of_an_earlier_report_are_removed(folder: Path, tmp_path: Path) -> None:
    run = load(folder)
    before = figures.draw(ReportData(run=run), tmp_path)
    stems = {path.stem for path in before}
    assert stems == set(figures.KINDS) - {"optimizer_steps", "held_gradients"}
    own = {
        "notes.txt": "a user's",
        "noise-9.png": "no picture",  # without the files beside it
        "other-1.csv": "run_id,cell_id\nrun,1\n",
        "noise-8.csv": "run_id,cell_id\nanother,1\n",
        "loss_curves-7.csv": "run_id\n" + "x" * 200_000 + "\n",
    }
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    for stem in ("other-1", "noise-8", "loss_curves-7"):  # of another kind, of another run, not readable
        for suffix in (".png", ".svg"):
            (tmp_path / stem).with_suffix(suffix).write_text("a user's")
    own |= {path.name: path.read_text() for path in tmp_path.iterdir() if path not in before}

    trials, sent = run.tables.trials, run.tables.collectives
    trials = trials[trials["backend"].str.startswith("made-0-")]
    tables = dataclasses.replace(run.tables, trials=trials, collectives=sent[sent["cell_id"].isin(trials["cell_id"])])
    cells = {cell_id: cell for cell_id, cell in run.cells.items() if cell_id in set(trials["cell_id"])}
    few = ReportData(run=dataclasses.replace(run, tables=tables, cells=cells))
    after = figures.draw(few, tmp_path, "few trials")
    assert "step_time_ratio" not in {path.stem for path in after}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*own, *(path.name for path in after)})
    assert all((tmp_path / name).read_text() == text for name, text in own.items())
    assert figures.draw(few, tmp_path, "few trials") == after
