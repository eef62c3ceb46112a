"""Figures of synthetic runs: all drawn, true to the tables, and legible."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from bench.judge.baseline import against_baseline
from bench.judge.expected import cell_of
from bench.judge.loading import Run, load
from bench.judge.next_steps import times_unavailable
from bench.judge.tables import NAMES as TABLES
from bench.judge.tables import Tables, frame_of, rows_of
from bench.plan.columns import COLUMNS
from bench.report import figures as report_figures
from bench.report import style
from bench.report.report_data import ReportData
from tests import legible
from tests.conftest import first
from tests.pages import write_run

STEMS = {"step_time", "memory_vs_time", "memory_categories", "loss_curves"}
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
FACTORS = {"made-eager": 1.0, "made-deferred": 0.7}


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


def material(tables: Tables, about: dict[str, Any]) -> ReportData:
    """A run with these tables, under the ids that its cells have, with steps of which a trial's time is the median."""
    first = rows_of(tables.trials.drop_duplicates("cell_id"))
    cells = {row["cell_id"]: cell_of(row) for row in first}
    ids = {name: cell.cell_id for name, cell in cells.items()}
    trials, losses = (frame.assign(cell_id=frame["cell_id"].map(ids)) for frame in (tables.trials, tables.losses))
    timed = trials[trials["step_time_s"].notna()]
    steps = [
        {"cell_id": row["cell_id"], "repeat": row["repeat"], "step": step, "seconds": row["step_time_s"], "kept": True}
        for row in rows_of(timed)
        for step in range(3, NUM_STEPS)
    ]
    made = dataclasses.replace(tables, trials=trials, losses=losses, steps=frame_of("steps", steps))
    known = {cell.cell_id: cell for cell in cells.values()}
    return ReportData(run=Run(name=about["run_id"], tables=made, cells=known, manifest=about))


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
    return report_figures.figures(material(*RUNS[name]))


@pytest.fixture(scope="module", params=first(["realistic"], RUNS))
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, report_figures.draw(material(*RUNS[request.param]), folder)


def test_all_figures_are_written(drawn: tuple[str, Path, list[Path]]) -> None:
    name, folder, paths = drawn
    assert sorted(paths) == sorted(folder.iterdir())
    stems = {path.stem for path in paths}
    assert (
        STEMS - ({"step_time"} if name in {"minimal", "two ways"} else set())
        <= stems
        <= {*STEMS, "noise", "step_time_ratio"}
    )
    for stem in {path.with_suffix("") for path in paths}:
        assert all(stem.with_suffix(suffix) in paths for suffix in (".png", ".svg", ".csv")), (name, stem)
        content = stem.with_suffix(".svg").read_text()
        ElementTree.fromstring(content)
        if stem.name == "step_time_ratio":
            continue
        for words in ("run-20250101-ab12", "model tiny (3.41 M parameters)", "B = 64 samples of 128 tokens"):
            assert words in content, (stem, words)


@pytest.mark.parametrize("name", first(["realistic", "two ways"], RUNS))
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    for drawing in figures(name):
        with matplotlib.style.context(list(style.BASE)):
            legible.assert_legible(drawing.figure, style.MAX_HEIGHT)
        assert all(axes.patches or axes.lines for axes in drawing.figure.axes)


def by_stem(name: str) -> dict[str, report_figures.Drawing]:
    return {drawing.stem: drawing for drawing in figures(name)}


def test_titles_are_findings_and_wrong_backends_are_named() -> None:
    drawn = by_stem("realistic")
    cells = drawn["memory_vs_time"].data.query("accumulate == 8 and status == 'ok'").set_index("backend")
    leanest, fastest = (cells[name].astype(float).idxmin() for name in ("peak_memory_bytes", "step_time_s"))
    title = drawn["memory_vs_time"].words.title
    assert title.startswith(f"At N = 8, {fastest} is fastest") and leanest in title
    assert drawn["loss_curves"].words.title.startswith("lightning-deepspeed-zero2 leaves the reference's loss")
    assert "lightning-deepspeed-zero2 (invalid)" in legible.words(drawn["memory_vs_time"].figure)
    assert not any(DEFECT.format(n=8) in note for drawing in drawn.values() for note in drawing.words.notes)


@pytest.mark.parametrize("name", ["realistic", "wide"])
def test_every_point_of_memory_against_time_is_named(name: str) -> None:
    drawing = by_stem(name)["memory_vs_time"]
    cells = drawing.data[drawing.data["accumulate"] == drawing.data["accumulate"].max()]
    words = "".join("".join(legible.words(drawing.figure)).split())
    assert [one for one in cells["backend"][cells["status"] == "ok"] if one not in words] == []


def test_peaks_that_differ_by_bytes_tie() -> None:
    tables, about = RUNS["realistic"]
    trials = tables.trials.copy()
    for backend, peak in (("ddp-eager", 10 * 2**20), ("fsdp2-deferred", 10 * 2**20 + 4)):
        trials.loc[(trials["backend"] == backend) & (trials["status"] == "ok"), "peak_memory_bytes"] = peak
    tables = dataclasses.replace(tables, trials=trials, memory=tables.memory[:0])
    titles = {one.stem: one.words.title for one in report_figures.figures(material(tables, about))}
    assert titles["memory_vs_time"].endswith("ddp-eager, fsdp2-deferred need the least memory (10.0 MiB)")
    assert "x the memory of ddp-eager, fsdp2-deferred" in titles["memory_categories"]


def test_the_title_on_memory_compares_cells_of_one_panel() -> None:
    tables, about = RUNS["realistic"]
    trials = tables.trials.copy()
    trials.loc[trials["backend"] == "ddp-eager", ["optimizer", "peak_memory_bytes"]] = "sgd", 2**20
    tables = dataclasses.replace(tables, trials=trials, memory=tables.memory[:0])
    titles = {one.stem: one.words.title for one in report_figures.figures(material(tables, about))}
    assert "adamw" in titles["memory_categories"] and "ddp-eager" not in titles["memory_categories"]


def test_optimizer_steps_are_drawn_only_if_some_are_wrong() -> None:
    tables, about = RUNS["realistic"]
    assert "optimizer_steps" not in by_stem("realistic")
    trials = tables.trials.assign(optimizer_steps_reported=tables.trials["optimizer_steps_observed"])
    trials.loc[trials["cell_id"] == "fsdp2-eager-8-2", "optimizer_steps_reported"] = 99
    drawn = report_figures.figures(material(dataclasses.replace(tables, trials=trials), about))
    (drawing,) = (one for one in drawn if one.stem == "optimizer_steps")
    assert drawing.data[["backend", "accumulate"]].to_numpy().tolist() == [["fsdp2-eager", 8]]
    assert drawing.words.title == "fsdp2-eager counts its optimizer steps wrong"


def test_a_virtual_world_has_no_times() -> None:
    tables, about = RUNS["realistic"]
    trials = tables.trials[tables.trials["backend"] != "reference"].assign(virtual_world_size=64)
    drawn = report_figures.figures(material(dataclasses.replace(tables, trials=trials), about))
    assert not {"memory_vs_time", "step_time", "noise"} & {one.stem for one in drawn}
    assert all("(virtual world)" in one.words.title for one in drawn)


def test_times_that_cannot_be_compared_are_grey_and_hollow(tmp_path: Path) -> None:
    sound, alone = (
        load(write_run(tmp_path / str(repeats), FACTORS, accumulate=(1, 8), repeats=repeats)) for repeats in (10, 1)
    )
    drawn = {one.stem: one for one in report_figures.figures(ReportData(run=sound))}
    assert {"step_time", "step_time_ratio", "noise"} <= set(drawn) and not drawn["memory_vs_time"].words.banner
    assert arrows(drawn["memory_vs_time"].figure)
    assert drawn["step_time"].words.title == "At N = 8, deferring the sync saves 30 % of a step with made"
    assert drawn["step_time_ratio"].words.title == "At N = 8, made-deferred is faster than made-eager"
    few = times_unavailable(alone, against_baseline(alone), tmp_path)
    assert few is not None
    drawn = {one.stem: one for one in report_figures.figures(ReportData(run=alone), few.reason)}
    assert not {"step_time", "step_time_ratio"} & set(drawn)
    one = drawn["memory_vs_time"]
    assert one.words.banner == f"Times cannot be compared: {few.reason}"
    assert one.words.banner in legible.words(one.figure) and not arrows(one.figure)
    points = [line for axes in one.figure.axes for line in axes.lines if line.get_marker() != "None"]
    assert points and {(line.get_color(), line.get_markerfacecolor()) for line in points} == {(style.GREY, "none")}


def arrows(figure: Figure) -> int:
    found = [text for axes in figure.axes for text in axes.texts if isinstance(text, Annotation)]
    return sum(text.arrow_patch is not None and not text.get_text() for text in found)


@pytest.mark.slow
def test_same_tables_give_the_same_bytes(tmp_path: Path) -> None:
    tables = run(BACKENDS[:3], [2])
    first, second = (report_figures.draw(material(tables, manifest(BACKENDS)), tmp_path / name) for name in "ab")
    assert first and [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
