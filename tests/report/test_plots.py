"""Figures of synthetic runs: all drawn, true to the tables, and legible."""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from bench.judge.tables import NAMES as TABLES
from bench.judge.tables import Tables, frame_of
from bench.plan.columns import COLUMNS
from bench.report import figures as report_figures
from bench.report import panels, style

STEMS = ["step_time", "peak_memory", "memory_vs_time", "loss_curves", "optimizer_steps", "speed_up"]
Backend = tuple[str, str, str, str]
Way = tuple[str, float, float]
WAYS: tuple[Way, ...] = (
    ("adamw-foreach", 1e-3, 0.0),
    ("adamw-foreach", 1e-3, 1.5),
    ("sgd", 0.05, 0.0),
    ("sgd", 0.05, 1.5),
)
"""Optimizer, learning rate and clip norm."""
REFERENCE: Backend = ("reference", "torch", "none", "none")
BACKENDS: list[Backend] = [
    REFERENCE,
    ("ddp-eager", "torch DDP", "none", "eager"),
    ("ddp-deferred", "torch DDP", "none", "deferred"),
    ("fsdp2-eager", "FSDP2", "params", "eager"),
    ("fsdp2-deferred", "FSDP2", "params", "deferred"),
    ("fsdp2-zero2-eager", "FSDP2", "grads", "eager"),
    ("fsdp2-zero2-deferred", "FSDP2", "grads", "deferred"),
    ("deepspeed-zero2-eager", "DeepSpeed", "grads", "eager"),
    ("deepspeed-zero2-deferred", "DeepSpeed", "grads", "deferred"),
    ("lightning-deepspeed-zero2", "Lightning DeepSpeed", "grads", "eager"),
]
DEFECT = "update error 0.{n}5 > 0.01: every update is 1/{n} of the right one; costs $1 and $2, see A_B^C"
NUM_STEPS, SIZE = 15, 3_411_200


def manifest(backends: list[Backend], **more: Any) -> dict[str, Any]:
    described = {n: {"framework": f, "sharding": sh, "sync": sy, "defect": ""} for n, f, sh, sy in backends}
    machine = {"cpu": "AMD EPYC 9354 32-Core Processor", "cores": 16, "gpus": []}
    about = {"run_id": "run-20250101-ab12", "schema_version": 1, "machine": machine, "packages": {"torch": "2.9.0"}}
    return about | {"backends": described} | more


def run(
    backends: list[Backend],
    ns: list[int],
    *,
    worlds: tuple[int, ...] = (2,),
    ways: tuple[Way, ...] = (("adamw-foreach", 1e-3, 0.0),),
    repeats: int = 3,
    device: str = "cpu",
    status: Callable[[str, int, int], tuple[str, str]] = lambda *_: ("ok", ""),
    source: str = "tracked tensors",
) -> Tables:
    """A run in which every number has a plausible size; ``status`` says how a backend at N and repeat ended."""
    random = np.random.default_rng(0)
    trials, losses = [], []
    for i, (name, framework, sharding, sync) in enumerate(backends):
        sizes = [(1, 1)] if name == "reference" else list(itertools.product(ns, worlds))
        for (n, w), (optimizer, rate, clip) in itertools.product(sizes, ways):
            way = f"-{optimizer}-{clip}" if len(ways) > 1 else ""
            base = 0.3 + 0.02 * n + 0.03 * (i % 5) + (0.04 * n if sync == "eager" else 0)
            for repeat in range(repeats):
                ended, reason = status(name, n, repeat)
                row: dict[str, Any] = dict.fromkeys(COLUMNS["trials"])
                row |= {
                    "run_id": "run-20250101-ab12",
                    "cell_id": f"{name}-{n}-{w}{way}",
                    "repeat": repeat,
                    "backend": name,
                    "framework": framework,
                    "sharding": sharding,
                    "sync": sync,
                    "accumulate": n,
                    "world_size": w,
                    "micro_batch_size": 64 // (n * w),
                    "global_batch_size": 64,
                    "sequence_length": 128,
                    "workload": "llama",
                    "model": "tiny",
                    "num_parameters": SIZE,
                    "precision": "fp32",
                    "accumulation_dtype": "fp32",
                    "corpus": "markov",
                    "optimizer": optimizer,
                    "learning_rate": rate,
                    "clip_norm": clip,
                    "seed": 0,
                    "device": device,
                    "status": ended,
                    "reason": reason or None,
                    "optimizer_steps_expected": NUM_STEPS,
                    "entropy_floor": 2.345,
                }
                if ended in ("ok", "invalid"):
                    seconds = base * (1 + 0.02 * random.standard_normal()) * (1.8 if w == 1 else 1)
                    memory = {"none": 62, "params": 34, "grads": 46, "optimizer": 55}[sharding] + 10 / n + i % 3
                    row |= {
                        "step_time_s": seconds,
                        "tokens_per_s": 64 * 128 / seconds,
                        "peak_memory_bytes": int(memory * 2**20),
                        "peak_memory_source": source,
                        "optimizer_steps_observed": NUM_STEPS,
                        "optimizer_steps_reported": NUM_STEPS * (n if ended == "invalid" else 1)
                        if "speed" in name
                        else None,
                    }
                    loss = 2.345 + 3.2 * np.exp(-np.arange(NUM_STEPS) / 6) + 0.02 * np.sin(np.arange(NUM_STEPS))
                    away = 0.1 if ended == "invalid" else 0 if name in ("reference", "ddp-eager") else 1e-6
                    loss = loss + WAYS.index((optimizer, rate, clip)) + away * np.arange(NUM_STEPS) * (1 + 0.1 * i)
                    key = {"cell_id": row["cell_id"], "repeat": repeat}
                    losses += [key | {"step": step, "loss": value} for step, value in enumerate(loss)]
                trials.append(row)
    rows = {"trials": trials, "losses": losses}
    return Tables(*(frame_of(name, rows.get(name, [])) for name in TABLES))


def ended(name: str, n: int, repeat: int) -> tuple[str, str]:
    """A realistic run: a defect, an oom, a crash without numbers, and a trial of three that hung."""
    if name == "lightning-deepspeed-zero2" and n > 1:
        return "invalid", DEFECT.format(n=n)
    if name == "fsdp2-zero2-deferred" and n == 8:
        return "oom", "CUDA out of memory: tried to allocate 2.00 GiB; use a smaller micro-batch"
    if name == "fsdp2-eager" and n == 4:
        return "crashed", "RuntimeError: \x1b[31mconnection\x00 reset\nby <peer> & rank 1; see journal"
    if name == "ddp-deferred" and n == 4 and repeat == 2:
        return "hang", "no event for 60 s"
    return "ok", ""


def long_names(num: int = 20) -> list[Backend]:
    kinds = list(itertools.product(("params", "grads", "none", "optimizer"), ("eager", "deferred")))
    named = [(f"users-framework-{i:02d}-backend-of-forty-chars"[:40].ljust(40, "x"), f"mylib {i % 4}", *kinds[i % 8])
             for i in range(num)]  # fmt: skip
    return [REFERENCE, *named]


def troubled(name: str, n: int, repeat: int) -> tuple[str, str]:
    number = int(name.split("-")[2]) if name != "reference" else 0
    if number % 3 == 2 and n >= 8:
        return "oom", f"needs {n} GiB more"
    if number % 5 == 4 and n == 4:
        return "crashed", f"exit code {number}: " + "a_long_word_without_any_spaces/" * 9
    if number == 7:
        return "invalid", "loss deviates from the reference's by 0.5"
    return "ok", ""


RUNS: dict[str, tuple[Tables, dict[str, Any]]] = {
    "realistic": (run(BACKENDS, [2, 4, 8], status=ended), manifest(BACKENDS)),
    "minimal": (run(BACKENDS[1:2], [4], repeats=1), manifest(BACKENDS[1:2], machine={})),
    "wide": (run(long_names(), [1, 2, 4, 8, 16, 32], status=troubled), manifest(long_names())),
    "worlds": (run(BACKENDS, [2, 4, 8], worlds=(1, 2, 4), status=ended), manifest(BACKENDS)),
    "ways": (run(BACKENDS, [2, 4], ways=WAYS, status=ended), manifest(BACKENDS)),
    "two ways": (run(BACKENDS[:3], [2], ways=WAYS[2:]), manifest(BACKENDS[:3])),
    "gpu": (
        run(BACKENDS, [1, 2, 4, 8], worlds=(1,), device="cuda", source="CUDA allocator, allocated"),
        manifest(BACKENDS, machine={"cpu": "x", "gpus": [{"name": "NVIDIA H200"}]}),
    ),
}


@functools.cache
def figures(name: str) -> list[report_figures.Drawing]:
    return report_figures.figures(*RUNS[name])


@pytest.fixture(scope="module", params=list(RUNS))
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, report_figures.draw(*RUNS[request.param], folder)


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("realistic") / "new" / "folder"
    report_figures.draw(*RUNS["realistic"], folder)
    return folder


def read(folder: Path, stem: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{stem}.csv").set_index(["cell_id", "repeat"]).sort_index()


def numbers(values: Any) -> list[float]:
    return [float(value) for value in np.atleast_1d(np.asarray(values, dtype=float))]


def texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Every text that is drawn, and its box; of an annotation without its arrow."""
    found = list(figure.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
    for text in found:
        if text.get_visible() and text.get_text().strip():
            yield text.get_text(), Text.get_window_extent(text)


def test_all_figures_are_written(drawn: tuple[str, Path, list[Path]]) -> None:
    name, folder, paths = drawn
    assert sorted(paths) == sorted(folder.iterdir())
    stems = {path.name.split(".")[0].rsplit("-", 1)[0] for path in paths}
    assert set(STEMS) <= stems <= {*STEMS, "noise"}
    for stem in {path.with_suffix("") for path in paths}:
        assert all(stem.with_suffix(suffix) in paths for suffix in (".png", ".svg", ".csv")), (name, stem)


def test_pictures_are_not_blank_and_fit_on_a_page(drawn: tuple[str, Path, list[Path]]) -> None:
    for path in drawn[2]:
        if path.suffix == ".png":
            picture = matplotlib.image.imread(path)
            height, width = picture.shape[:2]
            assert width == round(style.WIDTH * style.DPI) and height <= style.MAX_HEIGHT * style.DPI + 1, path
            inked = (picture[..., :3] < 0.95).any(axis=-1)
            assert 0.01 < inked.mean() < 0.5, path
            assert len(np.unique(picture[::3, ::3, :3].reshape(-1, 3), axis=0)) > 50, path


def test_svg_is_well_formed_and_names_run_and_model(drawn: tuple[str, Path, list[Path]]) -> None:
    for path in drawn[2]:
        if path.suffix == ".svg":
            ElementTree.parse(path)
            content = path.read_text()
            for words in ("run-20250101-ab12", "model tiny (3.41 M parameters)", "B = 64 samples of 128 tokens"):
                assert words in content, (path, words)


@pytest.mark.parametrize("name", RUNS)
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    for drawing in figures(name):
        drawing.figure.draw_without_rendering()
        boxes = list(texts(drawing.figure))
        assert len(boxes) > 8, drawing.stem
        page = drawing.figure.bbox
        for text, box in boxes:
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
            assert inside, (drawing.stem, text)
        for (one, first), (other, second) in itertools.combinations(boxes, 2):
            wide = min(first.x1, second.x1) - max(first.x0, second.x0)
            tall = min(first.y1, second.y1) - max(first.y0, second.y0)
            assert wide < 1 or tall < 1, (drawing.stem, one, other)


@pytest.mark.parametrize("name", RUNS)
def test_no_axes_is_empty_and_none_is_squeezed(name: str) -> None:
    for drawing in figures(name):
        drawing.figure.draw_without_rendering()
        for axes in drawing.figure.axes:
            points = [line for line in axes.lines if np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()]
            assert points, drawing.stem
            box, least = axes.get_window_extent(), 0.18 if name in ("minimal", "two ways") else 0.72
            assert min(box.width, box.height) / drawing.figure.dpi > least, drawing.stem


@pytest.mark.parametrize(
    ("stem", "value"),
    [("step_time", "step_time_s"), ("peak_memory", "peak_memory_bytes"), ("speed_up", "tokens_per_s"),
     ("memory_vs_time", "step_time_s"), ("optimizer_steps", "optimizer_steps_reported")],
)  # fmt: skip
def test_csv_holds_every_trial_and_the_tables_values(realistic: Path, stem: str, value: str) -> None:
    trials = RUNS["realistic"][0].trials.set_index(["cell_id", "repeat"]).sort_index()
    found = read(realistic, stem)
    assert list(found.index) == list(trials.index)
    for column in ("backend", "framework", "sync", "accumulate", "world_size", "precision", "status"):
        assert (found[column].astype(str) == trials[column].astype(str).to_numpy()).all(), column
    np.testing.assert_allclose(found[value], trials[value].to_numpy(dtype=float, na_value=np.nan), rtol=1e-12)
    assert {"invalid", "oom", "crashed", "hang", "ok"} == set(found["status"])
    assert set(found["reason"].xs("lightning-deepspeed-zero2-4-2")) == {DEFECT.format(n=4)}


def test_lines_go_through_the_trimmed_means_of_ok_trials(realistic: Path) -> None:
    trials = RUNS["realistic"][0].trials
    found = read(realistic, "step_time")["step_time_s_cell"]
    for cell_id in ("ddp-eager-8-2", "ddp-deferred-4-2"):
        own = trials[(trials["cell_id"] == cell_id) & (trials["status"] == "ok")]["step_time_s"]
        assert found[cell_id].unique() == pytest.approx([np.exp(np.log(own.astype(float)).mean())])  # of 3, none is cut
    assert found["fsdp2-eager-4-2"].isna().all()
    axes = figures("realistic")[0].figure.axes[0]
    drawn_values = {round(y, 9) for line in axes.lines for y in numbers(line.get_ydata())}
    assert {round(float(y), 9) for y in found.dropna()} <= drawn_values


def test_losses_and_their_deviation(realistic: Path) -> None:
    tables = RUNS["realistic"][0]
    found = read(realistic, "loss_curves").set_index("step", append=True)
    losses = tables.losses.set_index(["cell_id", "repeat", "step"])["loss"].astype(float).sort_index()
    np.testing.assert_allclose(found["loss"], losses.loc[found.index], rtol=1e-12)
    reference = losses.xs(("reference-1-1", 0))
    for cell_id in ("lightning-deepspeed-zero2-8-2", "ddp-eager-8-2"):
        expected = (losses.xs((cell_id, 0)) - reference).abs()
        np.testing.assert_allclose(found["deviation"].xs((cell_id, 0)), expected, atol=1e-12)
    largest = {"reference": 1, "fsdp2-zero2-deferred": 4, "fsdp2-eager": 8}
    assert {b: set(found[found["backend"] == b]["accumulate"]) for b in largest} == {b: {n} for b, n in largest.items()}
    assert set(found.index.get_level_values("repeat")) == {0}


def test_speed_up_is_the_ratio_to_the_reference(realistic: Path) -> None:
    trials = RUNS["realistic"][0].trials
    logs = np.log(trials[trials["status"] == "ok"].set_index("cell_id")["tokens_per_s"].astype(float))
    mean = np.exp(logs.groupby("cell_id").mean())
    found = read(realistic, "speed_up")
    ratio = mean["ddp-eager-4-2"] / mean["reference-1-1"]
    assert found["speed_up"]["ddp-eager-4-2"].unique() == pytest.approx([ratio])
    words = [text for text, _ in texts(figures("realistic")[-1].figure)]
    assert f"{ratio:.2f}x" in words and words.count("invalid") == 3


@pytest.mark.parametrize("busy", ["reference-1-1", "ddp-eager-2-2"])
def test_no_speed_up_is_said_of_what_a_busy_machine_measured(busy: str) -> None:
    tables = run(BACKENDS[:3], [2])
    there = tables.trials["cell_id"] == busy
    tables.trials.loc[there, ["num_cpus", "foreign_cores", "stolen_cores"]] = [4, 2.0, 0.0]
    drawn = report_figures.figures(tables, manifest(BACKENDS))[-1]
    said = drawn.data.groupby("backend")["speed_up"].count() > 0
    every = busy.startswith("reference")
    assert dict(said) == {"reference": not every, "ddp-eager": False, "ddp-deferred": not every}
    assert drawn.data["tokens_per_s"].notna().all(), "it is drawn all the same"
    why = f"no speed-up of {'2 cells' if every else '1 cell'}: machine disturbed there or at the reference"
    assert why in drawn.words.subtitle
    quoted = [text for text, _ in texts(drawn.figure) if re.fullmatch(r"\d+\.\d\dx", text)]
    assert len(quoted) == (0 if every else 2)
    assert "no speed-up" not in report_figures.figures(run(BACKENDS[:3], [2]), manifest(BACKENDS))[-1].words.subtitle


def test_a_number_of_an_invalid_reference_is_no_base() -> None:
    tables = run(BACKENDS, [2], status=lambda name, *_: ("invalid", "bad") if name == "reference" else ("ok", ""))
    speed_up = report_figures.figures(tables, manifest(BACKENDS))[-1]
    assert speed_up.data["speed_up"].isna().all() and speed_up.data["tokens_per_s"].notna().all()


def test_failures_are_noted_in_every_figure(realistic: Path) -> None:
    for stem in STEMS:
        content = html.unescape((realistic / f"{stem}.svg").read_text())
        for note in (
            "oom: fsdp2-zero2-deferred N=8: CUDA out of memory",
            "crashed: fsdp2-eager N=4: RuntimeError: connection reset by <peer> & rank 1; see journal",
            "hang: ddp-deferred N=4 (1 of 3 trials): no event for 60 s",
            "invalid: lightning-deepspeed-zero2 N=2, 4, 8: update error 0.25 > 0.01",
            "costs $1 and $2, see A_B^C",
        ):
            assert note in content, (stem, note)


def test_invalid_cells_are_hollow_and_crossed() -> None:
    axes = figures("realistic")[0].figure.axes[0]
    wine = style.FRAMEWORK_COLOURS["Lightning DeepSpeed"]
    ours = [line for line in axes.lines if line.get_color() == wine and numbers(line.get_xdata())]
    markers = [line for line in ours if line.get_marker() != "None"]
    assert {line.get_marker() for line in markers} == {"s", "x"}
    assert {line.get_markerfacecolor() for line in markers if line.get_marker() == "s"} == {"white"}
    assert "1 oom" in [text for text, _ in texts(figures("realistic")[0].figure)]


def test_a_step_count_that_is_missing_is_not_zero() -> None:
    steps = figures("realistic")[4]
    assert steps.stem == "optimizer_steps"
    words = [text for text, _ in texts(steps.figure)]
    counts = steps.data
    unreported = counts[counts["optimizer_steps_reported"].isna() & counts["optimizer_steps_observed"].notna()]
    ours = unreported[unreported["backend"] != "reference"]["cell_id"].nunique()
    assert words.count("none") == ours + len(steps.figure.axes)
    for axes in steps.figure.axes:
        assert 0 not in [x for line in axes.lines for x in numbers(line.get_xdata())]
        assert axes.get_xlim()[1] > NUM_STEPS * 8


def test_one_look_per_framework_and_sync_in_every_run() -> None:
    trials = RUNS["realistic"][0].trials
    some = trials[trials["backend"].isin(["fsdp2-zero2-eager", "deepspeed-zero2-deferred"])]
    everything, few = style.looks(trials), style.looks(some)
    assert all(everything[name] == few[name] for name in few)
    for name, framework, _, sync in BACKENDS:
        assert everything[name].colour == style.FRAMEWORK_COLOURS[framework]
        assert everything[name].marker == style.SYNC_MARKERS[sync]
    assert everything["fsdp2-eager"].line != everything["fsdp2-zero2-eager"].line


def test_looks_of_backends_and_colours_of_frameworks_are_distinct() -> None:
    wide = style.looks(RUNS["wide"][0].trials)
    assert len({(look.colour, look.marker, str(look.line)) for look in wide.values()}) == 21
    many = [f"framework {i}" for i in range(20)]
    assert len(set(style.colours(many).values())) == 20 + len(style.FRAMEWORK_COLOURS)
    assert style.colours(many) == style.colours(reversed(many))


def test_arrows_join_eager_and_deferred_twins() -> None:
    drawing = figures("realistic")[2]
    arrows = [sum(isinstance(t, Annotation) and not t.get_text() for t in a.texts) for a in drawing.figure.axes]
    # N = 4 lacks fsdp2-eager, N = 8 lacks fsdp2-zero2-deferred.
    assert drawing.stem == "memory_vs_time" and arrows == [4, 3, 3]


def test_points_are_named_where_names_fit_and_numbered_elsewhere() -> None:
    names = [name for name, *_ in BACKENDS]
    for run_name, named in (("realistic", True), ("gpu", False), ("wide", False)):
        drawing = figures(run_name)[2]
        found = [text for text, _ in texts(drawing.figure)]
        assert drawing.stem.startswith("memory_vs_time")
        for backend in names if run_name != "wide" else ():
            beside = sum(backend in {t.get_text() for t in axes.texts} for axes in drawing.figure.axes)
            assert (beside >= 2) is named, (run_name, backend)
            assert any(re.fullmatch(rf"\d+ +{backend}", text.strip()) for text in found) is not named
        if not named:
            assert all({t.get_text() for t in axes.texts} & {"1", "2"} for axes in drawing.figure.axes)


def test_memory_and_time_show_trials_and_intervals() -> None:
    tables = run(BACKENDS, [4], repeats=8)
    drawing = report_figures.figures(tables, manifest(BACKENDS))[2]
    (axes,) = drawing.figure.axes
    trials = tables.trials
    for backend in ("ddp-eager", "fsdp2-deferred"):
        own = trials[trials["backend"] == backend]
        found = drawing.data[drawing.data["backend"] == backend].iloc[0]
        low, middle, high = (float(found[f"step_time_s_{end}"]) for end in ("low", "cell", "high"))
        assert own["step_time_s"].min() < low < middle < high < own["step_time_s"].max()
        drawn = [numbers(line.get_xdata()) for line in axes.lines]
        assert [low, high] in drawn and [middle] in drawn
        assert any(sorted(own["step_time_s"]) == pytest.approx(sorted(xs)) for xs in drawn if len(xs) == len(own))


def pages_of(count: int, size: int) -> list[panels.Page]:
    frame = RUNS["realistic"][0].trials
    cells = frame.drop_duplicates("cell_id")
    items = [panels.Panel(str(i), cells.iloc[[i]], frame.iloc[:0]) for i in range(count)]
    return list(panels.paged("made", items, size))


def test_of_many_panels_the_largest_are_drawn_and_the_others_counted() -> None:
    assert [(page.stem, page.left_out) for page in pages_of(3, 4)] == [("made", [])]
    assert [page.stem for page in pages_of(8, 4)] == ["made-1", "made-2"]
    (alone,) = pages_of(17, 4)
    assert (alone.stem, len(alone.panels)) == ("made", 4), "two figures would not hold half of them"
    assert alone.left_out[0].startswith("13 of 17 cells are left out of this picture")
    first, second = pages_of(16, 4)
    assert first.left_out == second.left_out and first.left_out[0].startswith("8 of 16 cells are left out of this pict")
    shown = [page.panels for page in (first, second)]
    assert [len(part) for part in shown] == [4, 4]
    order = [int(panel.title) for part in shown for panel in part]
    assert order == sorted(order)
    sizes = [int(panel.trials["accumulate"].max()) for part in shown for panel in part]
    every = sorted(RUNS["realistic"][0].trials.drop_duplicates("cell_id")["accumulate"].iloc[:16], reverse=True)
    assert sorted(sizes, reverse=True) == every[:8]


def test_world_sizes_are_never_in_one_panel() -> None:
    for drawing in figures("worlds"):
        titles = [axes.get_title() for axes in drawing.figure.axes]
        assert all(any(f"W = {w}" in title for title in titles) for w in (1, 2, 4)) or "-" in drawing.stem, titles


def titles(drawing: report_figures.Drawing) -> list[str]:
    return [" ".join(axes.get_title().split()) for axes in drawing.figure.axes if axes.get_title()]


NAMES = ["adamw-foreach, not clipped", "adamw-foreach, clipped to 1.5", "sgd, not clipped", "sgd, clipped to 1.5"]


def test_optimizers_and_clips_are_never_in_one_panel() -> None:
    for drawing in figures("ways"):
        found = titles(drawing)
        assert {name for name in NAMES for title in found if title.startswith(name)} == set(NAMES), drawing.stem
        assert all(sum(title.startswith(name) for name in NAMES) == 1 for title in found), found
        assert "adamw-foreach (lr 0.001), sgd (lr 0.05); gradients not clipped, clipped to 1.5" in (
            drawing.words.subtitle
        )
        notes = [note for note in drawing.words.notes if note.startswith("crashed")]
        assert all(f"fsdp2-eager {name.replace(',', '')} N=4" in notes[0] for name in NAMES), notes


def test_a_run_of_one_way_names_it_only_if_it_is_not_the_usual_one() -> None:
    for drawing in figures("realistic"):
        assert not any("adamw" in text or "clipped" in text for text, _ in texts(drawing.figure)), drawing.stem
    alone = report_figures.figures(run(BACKENDS[:3], [2], ways=(WAYS[3],)), manifest(BACKENDS[:3]))
    for drawing in alone:
        assert drawing.words.subtitle.endswith("; sgd (lr 0.05); gradients clipped to 1.5")
        assert not any("sgd" in title for title in titles(drawing))


def test_loss_curves_of_four_ways_share_a_page_each_with_its_own_reference() -> None:
    (drawing,) = (drawing for drawing in figures("ways") if drawing.stem.startswith("loss_curves"))
    grid = [axes for axes in drawing.figure.axes if axes.get_title()]
    assert titles(drawing) == NAMES
    starts = []
    for axes in grid:
        (black,) = (line for line in axes.lines if line.get_color() == style.REFERENCE_COLOUR)
        starts.append(numbers(black.get_ydata())[0])
        others = [line for line in axes.lines if line.get_marker() == "None" and len(numbers(line.get_xdata())) > 2]
        assert len(others) == len(BACKENDS)
        assert {numbers(line.get_ydata())[0] for line in others} == {starts[-1]}
    assert starts == pytest.approx([starts[0] + i for i in range(4)])
    data = drawing.data[drawing.data["backend"] == "ddp-eager"]
    assert data.groupby(["optimizer", "clip_norm"]).size().tolist() == [NUM_STEPS] * 4
    assert data["deviation"].max() < 1e-9


def test_loss_curves_are_those_of_the_cells_with_many_steps() -> None:
    """As on GPUs, where a run has cells that are timed and others that are trained for their curves."""
    tables, about = RUNS["ways"]
    short = tables.trials[tables.trials["optimizer"] == "sgd"]["cell_id"]
    losses = tables.losses[(tables.losses["step"] < 2) | ~tables.losses["cell_id"].isin(short)]
    (drawing,) = (
        one for one in report_figures.figures(replace(tables, losses=losses), about) if one.stem == "loss_curves"
    )
    assert titles(drawing) == NAMES[:2]
    (note,) = (note for note in drawing.words.notes if note.startswith("The curves of "))
    assert f"less than 25 % of the {NUM_STEPS} steps of the longest. All are in the CSV" in note
    assert set(drawing.data["optimizer"]) == {"adamw-foreach", "sgd"}


def test_one_gpu_is_said_in_every_title() -> None:
    for name, expected in (("gpu", True), ("realistic", False)):
        for drawing in figures(name):
            assert (panels.ONE_GPU in drawing.words.title) is expected
            assert ("NVIDIA H200" in drawing.words.footer) is expected


def test_one_process_is_said_in_every_title_of_the_cpu() -> None:
    for drawing in report_figures.figures(run(BACKENDS[:3], [2, 4], worlds=(1,)), manifest(BACKENDS[:3])):
        assert panels.ONE_PROCESS in drawing.words.title and panels.ONE_GPU not in drawing.words.title


def test_worlds_that_are_pretended_on_one_gpu_do_not_make_it_several() -> None:
    tables = run(BACKENDS[:3], [2, 4], worlds=(1, 8), device="cuda")
    tables.trials.loc[tables.trials["world_size"] == 8, "virtual_world_size"] = 8
    for drawing in report_figures.figures(tables, manifest(BACKENDS[:3])):
        assert panels.ONE_GPU in drawing.words.title
    tables.trials["virtual_world_size"] = 8
    for drawing in report_figures.figures(tables, manifest(BACKENDS[:3])):
        assert panels.NOT_COMMUNICATION not in drawing.words.title, "their counts are what they would send"


def test_what_is_done_to_blocks_has_panels_of_its_own() -> None:
    tables = run(BACKENDS[:3], [2, 4])
    half = tables.trials["repeat"] == 1
    tables.trials["activation_checkpointing"] = half
    tables.trials["compiled"] = False
    tables.trials.loc[half, "cell_id"] += "-checkpointed"
    (drawing,) = (
        drawing for drawing in report_figures.figures(tables, manifest(BACKENDS[:3])) if drawing.stem == "step_time"
    )
    assert set(titles(drawing)) == {"activations kept", "activations checkpointed"}
    assert "activations kept and activations checkpointed" in drawing.words.subtitle
    assert "compiled" not in drawing.words.subtitle


def test_the_label_of_memory_names_its_source_and_unit() -> None:
    for name, source in (("gpu", "CUDA allocator, allocated"), ("realistic", "tracked tensors")):
        label = figures(name)[1].figure.axes[0].get_ylabel()
        assert source in label and "MiB" in label
    large = run(BACKENDS, [2])
    large.trials["peak_memory_bytes"] *= 2**10
    assert "GiB" in report_figures.figures(large, manifest(BACKENDS))[1].figure.axes[0].get_ylabel()


def test_figures_without_data_are_not_drawn(tmp_path: Path) -> None:
    nothing = run(BACKENDS[:2], [2], status=lambda *_: ("crashed", "no"))
    assert report_figures.draw(nothing, manifest(BACKENDS), tmp_path) == [] and list(tmp_path.iterdir()) == []
    no_memory = run(BACKENDS[:3], [2])
    no_memory.trials["peak_memory_bytes"] = pd.array([pd.NA] * len(no_memory.trials), dtype="Int64")
    stems = [drawing.stem for drawing in report_figures.figures(no_memory, manifest(BACKENDS))]
    assert stems == ["step_time", "loss_curves", "optimizer_steps", "speed_up"]
    empty = Tables(*(getattr(nothing, name).iloc[:0] for name in TABLES))
    assert report_figures.figures(empty, manifest(BACKENDS)) == []


def test_same_tables_give_the_same_bytes(tmp_path: Path) -> None:
    tables = run(BACKENDS[:3], [2])
    first, second = (report_figures.draw(tables, manifest(BACKENDS), tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len(first) == 21


def test_odd_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    odd: list[Backend] = [("_hidden $x^2$ <b>&\u4f60", "o$d$d", "none", "eager"), ("$", "o$d$d", "params", "eager")]
    tables = run(odd, [2])
    report_figures.draw(tables, manifest(odd, run_id="run $a_1$"), tmp_path)
    content = html.unescape((tmp_path / "step_time.svg").read_text())
    ElementTree.parse(tmp_path / "step_time.svg")
    assert "run $a_1$" in content
    words = [text.strip() for text, _ in texts(report_figures.figures(tables, manifest(odd))[0].figure)]
    assert r"_hidden \$x^2\$ <b>&?" in words and r"\$" in words
