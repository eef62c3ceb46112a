"""Figures of committed and made runs: all drawn, true to the tables, and legible."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from PIL import Image

from bench.formatting import at_most
from bench.judge.analysis import Analysis
from bench.judge.loading import Run, load
from bench.judge.verdicts import DIFFERENT, Verdict
from bench.plan.cell import Cell
from bench.report import bars, figures, style
from bench.report.canvas import Drawing
from bench.report.figure_data import sync_pairs
from bench.report.scatter import SHAPES
from tests import legible
from tests.conftest import first
from tests.pages import HOSTILE, MIB, write_run

RESULTS = Path(__file__).parents[2] / "results"
TWO = {"made-eager": 1.0, "made-deferred": 0.7}
SYNCS = ("eager", "deferred")
TEN = {f"made-{i}-{sync}": 1 + i / 10 for i in range(5) for sync in SYNCS}
TWENTY = {f"framework-{i:02d}-of-twenty-{sync}": 1 + i / 9 for i in range(10) for sync in SYNCS}


def troubled(cell: Cell, repeat: int) -> dict[str, str]:
    number = int(cell.backend.split("-")[1]) if cell.backend in TWENTY else 0
    if number % 3 == 2 and cell.accumulate >= 8:
        return {"status": "oom", "reason": "needs more"}
    if number % 5 == 4 and cell.accumulate == 4:
        reason = f"\x1b[31mexit code\x00 {number}: " + "a_long_word_without_any_spaces/" * 9
        return {"status": "crashed", "reason": reason}
    return {"status": "hang", "reason": "no event for 60 s"} if number == 1 and repeat == 2 else {}


MADE: dict[str, dict[str, Any]] = {
    "made": {"backends": TEN, "accumulate": (1, 2, 8), "world_size": (1, 2)},
    "two": {"backends": TWO, "accumulate": (1, 8)},
    "minimal": {"backends": {"made-eager": 1.0}, "accumulate": (4,), "repeats": 1, "twin": False},
    "wide": {
        "backends": TWENTY,
        "accumulate": (1, 2, 4, 8, 16, 32),
        "repeats": 3,
        "changes": troubled,
    },
    "worlds": {
        "backends": TEN,
        "accumulate": (2, 4),
        "world_size": (1, 2, 4),
        "precision": ("fp32", "bf16"),
    },
    "hostile": {"backends": dict.fromkeys(HOSTILE, 1.0)},
}
LINK = "links/200mbit"
COMMITTED = ("cpu", "popular", "curves", "bytes-8b", LINK)


@functools.cache
def run(name: str) -> Run:
    if name in COMMITTED:
        return load(RESULTS / name)
    with tempfile.TemporaryDirectory() as folder:
        return load(write_run(Path(folder) / name, **MADE[name]))


def drawings(found: Run) -> dict[str, Drawing]:
    return {figure.stem: figure for figure in figures.figures(Analysis(run=found))}


@functools.cache
def drawings_of(name: str) -> dict[str, Drawing]:
    return drawings(run(name))


def with_peaks(name: str, peak_of: Callable[[Cell], int | None]) -> Run:
    """The run with other peaks of memory, where there are such, and without a table of memory."""
    tables = run(name).tables
    trials = []
    for row in tables.trial_rows:
        peak = peak_of(row.cell)
        trials.append(row if peak is None else dataclasses.replace(row, peak_memory_bytes=peak))
    changed = dataclasses.replace(tables, trial_rows=trials, memory_rows=())
    return dataclasses.replace(run(name), tables=changed)


def titles(found: Run) -> dict[str, str]:
    return {stem: drawing.words.title for stem, drawing in drawings(found).items()}


def test_a_figure_is_one_picture_with_its_words_and_its_data(tmp_path: Path) -> None:
    paths = figures.draw(Analysis(run=run("cpu")), tmp_path)
    stems = figures.KINDS
    assert sorted(paths) == sorted(
        tmp_path / f"{stem}{suffix}" for stem in stems for suffix in (".png", ".csv")
    )
    assert sorted(paths) == sorted(tmp_path.iterdir())
    for stem in stems:
        with Image.open(tmp_path / f"{stem}.png") as image:
            assert image.width == round(style.WIDTH * style.DPI) and len(image.info["Title"]) > 20
            assert image.info["Source"] == "cpu"
            assert all(
                words in image.info["Description"]
                for words in ("run cpu", "model tiny", "B = 16 samples")
            )


@pytest.mark.parametrize("name", first(["cpu", "two"], [*COMMITTED, *MADE]))
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    assert drawings_of(name)
    for drawing in drawings_of(name).values():
        legible.assert_legible(drawing.figure)
        assert all(axes.patches or axes.lines for axes in drawing.figure.axes)


def test_titles_are_findings_and_wrong_backends_are_named() -> None:
    found = {stem: drawing.words.title for stem, drawing in drawings_of("cpu").items()}
    cells = (
        drawings_of("cpu")["memory_vs_time"]
        .data.query("accumulate == 8 and status == 'ok'")
        .set_index("backend")
    )
    leanest, fastest = (
        cells[name].astype(float).idxmin() for name in ("peak_memory_bytes", "step_time_s")
    )
    shortest = f"At N = 8, {fastest} (?:is fastest|has the shortest step time) \\("
    assert re.match(shortest, found["memory_vs_time"])
    assert leanest in found["memory_vs_time"]
    deviating = drawings_of("curves")["loss_curves"].words.title
    assert deviating.startswith("lightning-deepspeed-zero2 and lightning-deepspeed-zero3 ")
    assert deviating.endswith("up to 0.8 nats/token (sgd, not clipped)")
    verdicts = {
        pair: Analysis(run=run("cpu")).compared(*pair).verdict  # type: ignore[union-attr]
        for pair in sync_pairs_of("cpu", 8)
    }
    faster = sum(verdict is Verdict.FASTER for verdict in verdicts.values())
    assert f"faster in {faster} of {len(verdicts)} pairs (" in found["step_time"]
    assert re.fullmatch("At N = 8, deferring .* in this run", found["step_time"])
    alike = drawings_of("popular")["loss_curves"]
    title = alike.words.title
    assert title.startswith("All 24 backends stay within 2e-05 nats/token ")
    assert title.endswith(", but 2 are invalid")
    assert alike.words.notes[0].startswith("Rings: invalid;")
    shown = legible.words(alike.figure)
    assert {"the reference", "22 backends within 8e-07 nats/token of it"} <= set(shown)
    assert "lightning-deepspeed-zero2 (invalid)" in shown


def sync_pairs_of(name: str, n: int) -> list[tuple[str, str]]:
    """The ids of each deferred cell at an N with its eager one."""
    cells = Analysis(run=run(name)).contestants
    good = cells[(cells["accumulate"] == n) & (cells["status"] == "ok")]
    return [(deferred, eager) for eager, deferred in sync_pairs(good)]


def test_curves_that_coincide_are_told_apart_by_how_far_they_are_from_the_reference() -> None:
    drawing = drawings_of("curves")["loss_curves"]
    losses, distances = drawing.figure.axes[:4], drawing.figure.axes[4:]
    assert len(distances) == 4 and all(axes.get_yscale() == "log" for axes in distances)
    purple = style.FRAMEWORK_COLOURS["Lightning DeepSpeed"]
    first_of_two, second = (
        next(line for line in losses[0].lines if line.get_color() == colour)
        for colour in (style.mixed(purple, 0), style.mixed(purple, style.PALER))
    )
    assert first_of_two.get_linewidth() > second.get_linewidth()
    worst = drawing.data["deviation"].max()
    assert distances[0].get_ylim()[1] >= worst
    drawn = max(float(np.nanmax(line.get_ydata())) for axes in distances for line in axes.lines)
    assert drawn == pytest.approx(worst)


def test_ratios_show_the_whole_band_of_the_control_and_name_what_has_no_time() -> None:
    drawing = drawings_of("popular")["step_time_ratio"]
    (axes,) = drawing.figure.axes
    assert all(axes.get_xlim()[0] < band.get_x() for band in axes.patches)  # type: ignore[attr-defined]
    assert not any("N = 4:" in text for text in legible.words(drawing.figure))
    legend, untimed, *_ = drawing.words.notes
    assert legend == "Below 1 is faster." and "lightning-deepspeed-zero2 (invalid)" in untimed
    title = drawing.words.title
    assert re.match("At N = 4, no backend .* ddp-deferred; ", title)


def test_a_title_on_memory_names_one_cause_only_if_it_is_more_than_half() -> None:
    found = [drawings_of(name)["memory_categories"].words.title for name in ("cpu", "curves")]
    popular = drawings_of("popular")["memory_categories"].words.title
    assert "hf-trainer-ddp needs 1.7x" in popular
    assert popular.endswith("; deepspeed-zero3-defaults-eager is beyond the axis")
    two, one = found
    assert two.startswith("At N = 8, ddp-deferred and lightning-ddp need 1.7x ")
    assert "21.1 MiB more for unsharded gradients and 11.8 MiB more for optimizer" in two
    assert "lightning-ddp needs 1.3x the memory of lightning-deepspeed-zero3-corrected" in one
    assert one.endswith(", mostly for unsharded gradients")
    tables = run("cpu").tables
    least = tables.trials[tables.trials["backend"] == "fsdp2-eager"]["cell_id"]
    split = [row for row in tables.memory_rows if row.cell_id not in set(least)]
    tables = dataclasses.replace(tables, memory_rows=split)
    unsplit = titles(dataclasses.replace(run("cpu"), tables=tables))["memory_categories"]
    assert unsplit.endswith("1.7x the memory of fsdp2-eager"), "whose categories are not known"
    tied = titles(load(RESULTS / "h100-1b"))["memory_categories"]
    assert tied.endswith("of fsdp2-deferred and fsdp2-eager"), "which lack not the same"


def test_cells_without_a_bar_or_a_point_are_explained() -> None:
    found = drawings_of("cpu")
    for stem in ("communication", "memory_categories"):
        assert legible.words(found[stem].figure).count("not run") == 2
        assert "and how the cell failed." in " ".join(found[stem].words.notes)
    assert "53.0" in legible.words(found["memory_categories"].figure)
    assert legible.words(found["memory_categories"].figure).count("invalid") == 2
    for stem in ("memory_vs_time", "step_time"):
        note = "Not timed: lightning-deepspeed-zero2 (invalid) and lightning-deepspeed-zero3 (invalid)."
        assert note in found[stem].words.notes


def test_figures_of_times_that_reduce_scatter_over_gloo_say_so() -> None:
    told = {
        stem: note.partition(": ")[0]
        for stem, drawing in drawings_of("cpu").items()
        for note in drawing.words.notes
        if "a cost of gloo's own" in note
    }
    whose = "deepspeed-zero3 and fsdp2"  # ZeRO-2 all-reduces
    assert told == {"memory_vs_time": whose, "step_time": whose}
    on_a_gpu = drawings(load(RESULTS / "h100-1b")).values()
    assert not any("gloo" in " ".join(drawing.words.notes) for drawing in on_a_gpu)


def test_points_at_one_place_can_be_told_apart() -> None:
    axes = drawings_of("cpu")["memory_vs_time"].figure.axes[1]
    fsdp2 = [
        line
        for line in axes.lines
        if line.get_color() == "#D55E00" and line.get_linestyle() == "None"
    ]
    assert [line.get_marker() for line in fsdp2] == ["^", "s"]
    assert fsdp2[1].get_markerfacecolor() == "none", "what is below it is seen"
    inks = {text.get_text(): str(text.get_color()) for text in axes.texts}
    assert inks["fsdp2-eager"] == inks["fsdp2-deferred"] != inks["lightning-ddp"]


def test_a_run_over_two_nodes_has_its_machine_its_arrows_and_its_names() -> None:
    found = drawings_of(LINK)
    figure, words = found["memory_vs_time"].figure, found["memory_vs_time"].words
    assert words.footer.startswith(
        "run 200mbit; machine: 2 nodes of AMD EPYC, 1 core, no GPU each; torch "
    )
    assert all(shape in words.notes[0] for shape in SHAPES.values())
    data = Analysis(run=run(LINK))
    decided = [
        data.compared(*pair).verdict in DIFFERENT  # type: ignore[union-attr]
        for n in (1, 4, 16)
        for pair in sync_pairs_of(LINK, n)
    ]
    assert arrows(figure) == sum(decided) + 2, "two lead to hsdp-deferred-all-reduce"
    assert legible.words(figure).count("hsdp-deferred-all-reduce") == 3
    assert "-." in {line.get_linestyle() for line in found["step_time"].figure.axes[0].lines}
    bars_of = {
        stem: legible.words(found[stem].figure) for stem in ("communication", "memory_categories")
    }
    assert "all-reduce" in bars_of["communication"] and "other" not in bars_of["memory_categories"]
    for stem in bars_of:
        legible.assert_legible(found[stem].figure)
        assert "how the cell failed" not in " ".join(found[stem].words.notes)
    assert "below 0.5 % of the axis" in found["memory_categories"].words.notes[0]


def test_the_means_of_blocks_are_those_of_the_dots() -> None:
    drawing = drawings_of("popular")["noise"]
    logs = np.log1p(drawing.data.set_index("repeat")["deviation_percent"] / 100)
    bars = [bar.get_segments()[0][0][1] for bar in drawing.figure.axes[0].collections]  # type: ignore[attr-defined]
    assert bars == pytest.approx([*100 * np.expm1(logs.groupby("repeat").mean())])


def test_every_dot_of_the_noise_is_in_the_row_of_its_cell() -> None:
    drawing = drawings_of("cpu")["noise"]
    above, below = drawing.figure.axes
    names = [label.get_text() for label in below.get_yticklabels()]
    cells = drawing.data.groupby(["backend", "accumulate"]).size()
    assert sorted(names) == sorted(f"{backend} N = {n}" for backend, n in cells.index)
    rows = [line for line in below.lines if line.get_marker() == "o"]
    for name, line in zip(names, rows, strict=True):
        of_cell = drawing.data[drawing.data["place"].isin(line.get_xdata())]
        assert {
            f"{b} N = {n}" for b, n in of_cell[["backend", "accumulate"]].itertuples(index=False)
        } == {name}
    assert above.get_xlim() == below.get_xlim()


def test_the_legend_shows_the_markers_of_the_curves() -> None:
    figure = drawings_of("cpu")["loss_curves"].figure
    sets = (figure.legends[0].legend_handles, figure.axes[0].lines)
    keys, curves = (
        {(line.get_marker(), line.get_markerfacecolor()) for line in lines} for lines in sets
    )
    assert ("o", "none") in keys and keys <= curves


def test_the_legend_of_step_times_has_their_lines(tmp_path: Path) -> None:
    """A backend that fails in the last panel has no name there, but an entry in the legend."""

    def fails(cell: Cell, repeat: int) -> dict[str, str]:
        failed = cell.backend == "made-eager" and cell.world_size == 2
        return {"status": "oom", "reason": "needs more"} if failed else {}

    made = load(
        write_run(tmp_path / "run", TWO, accumulate=(1, 8), world_size=(1, 2), changes=fails)
    )
    figure = drawings(made)["step_time"].figure
    (key,) = figure.legends[0].legend_handles
    (dashed,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    dashes = [vars(line)["_unscaled_dash_pattern"] for line in (key, dashed)]
    assert dashes[0] == dashes[1] and key.get_marker() == "s"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", first(["cpu"], ["cpu", "popular", "wide"]))
def test_every_point_and_every_line_is_named(name: str) -> None:
    for stem in {"memory_vs_time", "step_time"} & set(drawings_of(name)):
        cells = drawings_of(name)[stem].data
        if stem == "memory_vs_time":
            cells = cells[
                (cells["accumulate"] == cells["accumulate"].max()) & cells["step_time_s"].notna()
            ]
        words = " ".join(legible.words(drawings_of(name)[stem].figure))
        assert [backend for backend in cells["backend"] if backend not in words] == [], stem


@pytest.mark.parametrize(
    ("value", "words"), [(1.4e-6, "2e-06"), (1e-6, "1e-06"), (0.00016, "0.0002"), (0.0, "0")]
)
def test_a_bound_is_rounded_up(value: float, words: str) -> None:
    assert at_most(value) == words


def test_peaks_that_differ_by_bytes_tie() -> None:
    peaks = {"ddp-deferred": 10 * MIB, "fsdp2-deferred": 10 * MIB + 4}
    found = titles(with_peaks("cpu", lambda cell: peaks.get(cell.backend)))
    assert found["memory_vs_time"].endswith(
        "ddp-deferred and fsdp2-deferred need the least memory (10.0 MiB)"
    )
    assert "x the memory of ddp-deferred and fsdp2-deferred" in found["memory_categories"]


def test_the_title_on_memory_compares_cells_of_one_panel() -> None:
    changed = ("lightning-ddp", "sgd")
    found = titles(
        with_peaks(
            "curves", lambda cell: MIB if (cell.backend, cell.optimizer) == changed else None
        )
    )
    assert "adamw" in found["memory_categories"] and "1.0 MiB" not in found["memory_categories"]


def test_a_peak_far_beyond_all_others_leaves_them_the_axis() -> None:
    for stem, axis in (("memory_vs_time", "y"), ("memory_categories", "x")):
        figure = drawings_of("popular")[stem].figure
        assert getattr(figure.axes[0], f"get_{axis}lim")()[1] < 100
        assert [
            word
            for word in legible.words(figure)
            if re.search(r"[\N{UPWARDS ARROW}\N{RIGHTWARDS ARROW}] 1,96", word)
        ]


def test_panels_with_the_same_bars_are_one_and_no_figure_has_times_that_cannot_be_compared() -> (
    None
):
    (axes,) = drawings_of("curves")["communication"].figure.axes
    panels = " ".join(axes.get_title().split()).split("; ")
    clips = ("not clipped", "clipped to 1.5")
    assert panels == [f"{name}, {clip}" for name in ("adamw-foreach", "sgd") for clip in clips]
    curves = drawings_of("curves")
    assert len(curves["memory_categories"].figure.axes) == 2 and "memory_vs_time" not in curves


def test_a_virtual_world_has_no_times() -> None:
    assert drawings_of("bytes-8b") and not {"memory_vs_time", "step_time", "noise"} & set(
        drawings_of("bytes-8b")
    )
    assert all(
        "(virtual world)" in drawing.words.title for drawing in drawings_of("bytes-8b").values()
    )


def test_times_that_cannot_be_compared_are_not_drawn(tmp_path: Path) -> None:
    assert {"memory_vs_time", "step_time", "step_time_ratio", "noise"} <= set(drawings_of("two"))
    assert arrows(drawings_of("two")["memory_vs_time"].figure)
    for stem in ("step_time", "step_time_ratio"):
        title = drawings_of("two")[stem].words.title
        assert "made-deferred is faster than made-eager in this run" in title
    busy = {"time": {"host": {"num_cpus": 4, "foreign_cores": 1.6, "stolen_cores": 0.0}}}
    for name, more in {"few": {"repeats": 1}, "busy": {"changes": lambda *_: busy}}.items():
        found = drawings(load(write_run(tmp_path / name, TWO, accumulate=(1, 8), **more)))
        assert found and not {"memory_vs_time", "step_time", "step_time_ratio"} & set(found), name
        assert not any(
            "step_time_s" in drawing.data for stem, drawing in found.items() if stem != "noise"
        ), name


def arrows(figure: Figure) -> int:
    return sum(
        isinstance(text, Annotation) and not text.get_text()
        for axes in figure.axes
        for text in axes.texts
    )


def ends_of_bars(drawing: Drawing) -> list[float]:
    found = [bar for axes in drawing.figure.axes for bar in axes.patches]
    return [bar.get_x() + bar.get_width() for bar in found]  # type: ignore[attr-defined]


def test_bars_are_the_payload_by_operation() -> None:
    drawing = drawings_of("made")["communication"]
    data = drawing.data.set_index(["backend", "world_size", "accumulate"])
    assert data.loc[("made-0-eager", 2, 8), "all_reduce"] == 8 * 12 * MIB
    assert data.loc[("made-0-eager", 2, 8), "broadcast"] == MIB
    assert data.loc[("made-0-eager", 2, 8), bars.TOTAL] == 97 * MIB
    panels = [axes.get_title() for axes in drawing.figure.axes]
    assert len(panels) == 3 and not any(
        "W = 1" in panel for panel in panels
    )  # alone, a rank sends nothing
    assert max(ends_of_bars(drawing)) == pytest.approx(97)


@pytest.mark.slow
def test_the_same_bytes_are_drawn_again_and_figures_without_cells_are_removed(
    tmp_path: Path,
) -> None:
    made = run("made")
    drawn = {path: path.read_bytes() for path in figures.draw(Analysis(run=made), tmp_path)}
    few = dataclasses.replace(made, tables=dataclasses.replace(made.tables, collective_rows=()))
    (tmp_path / "notes.txt").write_text("a user's")
    after = figures.draw(Analysis(run=few), tmp_path)
    assert {path.stem for path in {*drawn} - {*after}} == {"communication"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"notes.txt", *(path.name for path in after)}
    )
    assert (tmp_path / "notes.txt").read_text() == "a user's"
    assert {path: path.read_bytes() for path in figures.draw(Analysis(run=made), tmp_path)} == drawn
