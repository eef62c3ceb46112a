"""The answer: a few statements and one table, the same on the page, in report.md and in the terminal."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from bench.errors import InputError
from bench.findings import Finding, Level
from bench.judge.analysis import Analysis
from bench.judge.caveats import TRANSFER, link_words
from bench.judge.columns import labels
from bench.judge.integrity import check
from bench.judge.loading import Run, load
from bench.judge.next_steps import VIRTUAL
from bench.judge.statistics import MIN_TRIALS
from bench.plan.cell import Cell, Status, Sync, summarize
from bench.report.answer import Answer, answer
from bench.report.citation import cite
from bench.report.descriptions import eager_and_deferred
from bench.report.terminal import show
from bench.run.journal import JOURNAL, read_document, write_document
from tests.factories import make_cell, make_matrix, make_record
from tests.pages import kind, read, records_of, report, write, write_run

FASTEST, LEAST, SYNC = "Fastest correct backend", "Least memory", "Deferred against eager"
FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75, "beta": 1.2, "gamma": 0.7525}
BUSY = {"num_cpus": 4, "foreign_cores": 1.6, "stolen_cores": 0.0}


def fails(cell: Cell, repeat: int) -> dict[str, str]:
    """One backend is wrong at N = 4, one runs out of memory everywhere."""
    if cell.backend == "wrong" and cell.accumulate == 4:
        return {"status": "invalid", "reason": f"the loss is off by 0.{repeat + 1}"}
    return {"status": "oom", "reason": "rank 0: out of memory"} if cell.backend == "large" else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backends = {**FACTORS, "wrong": 0.5, "large": 1.0}
    return write_run(tmp_path_factory.mktemp("answer") / "run", backends, changes=fails)


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    return report(folder, drawn=False)[1]


def written(folder: Path, cells: list[Cell], baseline: str = "ddp-deferred") -> Path:
    """A run of one trial of each of these cells."""
    return write(
        folder,
        [make_record(cell) | {"slot": slot} for slot, cell in enumerate(cells)],
        baseline=baseline,
    )


def run_and_answer(folder: Path) -> tuple[Run, Answer]:
    run = load(folder)
    return run, answer(Analysis(folder=folder, run=run))


def on_topic(found: Answer, topic: str) -> list[Finding]:
    return [finding for finding in found.all if finding.topic == topic]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_same_is_said_in_all_three_places(folder: Path, printed: str) -> None:
    _, found = run_and_answer(folder)
    short = (folder / "report.md").read_text(encoding="utf-8").replace("\\", "")
    page = one_line(read(folder / "report.html").text)
    terminal = one_line(printed)
    assert [finding.topic for finding in found.all] == [
        FASTEST,
        LEAST,
        SYNC,
        "Do not use",
        "Failed",
        "Other days",
        "Scope",
    ]
    for finding in found.all:
        assert finding.sentence in short
        assert one_line(f"{finding.subject} {finding.text}") in page
    words = one_line(" ".join(finding.text for finding in found.all)).split()
    assert set(words) <= set(terminal.split())
    assert printed.splitlines()[-1].startswith("report: ")
    for row in found.groups[0].rows:
        line = next(
            line.split() for line in printed.splitlines() if line.split()[:1] == [row.backend]
        )
        texts = found.groups[0].texts(row)
        assert {texts["seconds"], texts["ratio"], texts["ratio_ends"], texts["correct"]} <= set(
            line
        )


def test_the_fastest_correct_backend_and_those_not_told_from_it(folder: Path) -> None:
    run, found = run_and_answer(folder)
    (fastest,), (least,) = on_topic(found, FASTEST), on_topic(found, LEAST)
    assert found.groups[0].n == 4 and [group.n for group in found.groups] == [4, 1]
    order = [row.backend for row in found.groups[0].rows]
    assert order == ["alpha-deferred", "gamma", "alpha-eager", "beta", "large", "wrong"]
    assert (
        fastest.subject == "alpha-deferred" and ". Not shown to be slower: gamma, " in fastest.text
    )
    assert "Holm" not in fastest.text
    assert least.subject == "alpha-deferred" and least.text.endswith(", at N=4, W=2.")
    (row,) = [row for row in found.groups[0].rows if row.backend == "beta"]
    assert (row.num_ok, row.correct, row.verdict) == (10, "yes", "slower")
    assert not on_topic(found, "Undecided") and run.labels[row.cell_id] == "beta N=4 W=2 fp32"


@pytest.mark.parametrize(
    ("sharded", "first"), [(("beta", "gamma"), "beta"), (("gamma",), "gamma"), ((), "alpha")]
)
def test_the_first_pair_that_shards_parameters_has_a_statement_and_all_others_share_one(
    tmp_path: Path, sharded: tuple[str, ...], first: str
) -> None:
    factors = {
        f"{name}-{sync}": 1.0
        for name in ("alpha", "beta", "gamma")
        for sync in ("eager", "deferred")
    }
    factors["wrong"] = 0.5
    kinds = {name: kind(name) for name in ("reference", *factors)}
    kinds |= {
        name: kind(name) | {"sharding": "params"} for name in factors if name.startswith(sharded)
    }
    folder = write_run(
        tmp_path / "run",
        factors,
        accumulate=(4,),
        repeats=1,
        changes=lambda cell, _: (
            {"status": "invalid", "reason": "the loss is off"} if cell.backend == "wrong" else {}
        ),
    )
    write_document(folder, read_document(folder) | {"backends": kinds})
    found = run_and_answer(folder)[1]
    (statement,), (others,) = on_topic(found, SYNC), on_topic(found, "Other families")
    assert statement.subject == f"{first}-deferred / {first}-eager" and statement.text.endswith(
        ", at N=4, W=2."
    )
    left = "; ".join(
        f"{name}-deferred 1.000" for name in ("alpha", "beta", "gamma") if name != first
    )
    assert others.text == f"memory at N=4, W=2, deferred / eager: {left}."
    assert (
        found.alarm is not None and "the loss is off" not in found.alarm.text
    )  # it is said of the cell
    assert f"needs {MIN_TRIALS} blocks" in found.alarm.text and "there is 1" in found.alarm.text


def test_what_must_not_be_used_is_said_once_with_its_reason(folder: Path, printed: str) -> None:
    _, found = run_and_answer(folder)
    (wrong,), (failed,) = on_topic(found, "Do not use"), on_topic(found, "Failed")
    assert (wrong.subject, wrong.text) == ("wrong (N = 4)", "the loss is off by 0.1.")
    assert (failed.subject, failed.text) == ("large", "oom: rank 0: out of memory.")
    assert printed.count("the loss is off by") == 1 and printed.count("rank 0: out of memory") == 1


def test_the_scope_has_counts_and_the_width_that_check_has(folder: Path) -> None:
    _, found = run_and_answer(folder)
    text = found.scope.text
    good = {row.cell for row in load(folder).tables.trial_rows if row.status is Status.OK}
    assert len(good) == 11 and f"{summarize(good, 'alpha-eager')}; 3 more without" in text
    assert "n = 10 good trials per cell; A/A pair " in text and text.endswith(f"{TRANSFER}.")
    write_document(folder, read_document(folder) | {"ended_by": "budget"})
    (width,) = [
        finding.text.rpartition("interval is ")[2]
        for finding in check(folder)
        if "widest interval" in finding.text
    ]
    assert f"widest interval of a ratio {width};" in text


def test_one_repeat_on_a_busy_machine_asks_for_both_in_one_command(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", FACTORS, repeats=1, changes=lambda *_: {"time": {"host": BUSY}}
    )
    status, printed = report(folder)
    _, found = run_and_answer(folder)
    assert status == 0 and found.alarm is not None and found.alarm.level is Level.WARNING
    assert (
        found.alarm.command
        == "python -m bench doctor && python -m bench run --matrix made --repeats 10"
    )
    assert "40 % of its CPUs" in found.alarm.text
    assert "1 repeat" in found.alarm.text and f"needs {MIN_TRIALS}" in found.alarm.text
    assert f"  {found.alarm.command}\n" in printed
    assert (
        not any(group.is_timed for group in found.groups)
        and not on_topic(found, FASTEST)
        and on_topic(found, LEAST)
    )
    assert "Still valid" in printed and "memory, bytes, step counts, updates and losses" in printed
    assert "at most 10 % of its CPUs" in printed and "which took 1 minute" in printed
    page = read(folder / "report.html")
    (alarm,) = page.find("div", class_="alarm warning")
    assert found.alarm.command in alarm.text
    plots = {figure.find("figcaption")[0].find("span")[0].text for figure in page.find("figure")}
    assert plots and not plots & {"memory_vs_time", "step_time", "step_time_ratio", "noise"}
    assert "s/step" not in printed and "s/step" not in (folder / "report.md").read_text(
        encoding="utf-8"
    )
    assert all(row.peak_memory_bytes for row in found.groups[0].rows)


def test_what_stays_open_has_a_command_too(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", {"alpha": 1.0, "beta": 1.0}, accumulate=(2,), noise=0.2, twin=False
    )
    (found,) = on_topic(run_and_answer(folder)[1], "Undecided")
    assert (
        found.subject == "beta at N=2, W=2"
        and found.command == "python -m bench run --matrix made --repeats 20"
    )


def test_more_repeats_get_the_time_that_they_need_on_every_node(tmp_path: Path) -> None:
    """20 blocks of three trials of 30 s take 30 minutes."""
    about = {"matrix": make_matrix({"budget_s": 1200}).to_dict(), "nodes": [{}]}
    cells = {make_cell(backend=name): 0.1 for name in ("alpha", "beta")}
    records = records_of(cells, changes=lambda *_: {"wall_s": 30.0})
    folder = write(tmp_path / "run", records, baseline="alpha", **about)
    (found,) = on_topic(run_and_answer(folder)[1], "Undecided")
    nodes = " # on each of 2 nodes: docs/hosts.md"
    assert found.command == f"python -m bench run --matrix made --repeats 20 --budget 40m{nodes}"
    report(folder, drawn=False)
    assert f"--out run{nodes}" in (folder / "report.md").read_text(encoding="utf-8")


def test_an_interval_without_1_may_decide_nothing_and_a_wide_one_asks_for_nothing(
    tmp_path: Path,
) -> None:
    factors = {"alpha": 1.0, "beta": 1.0, "gamma": 1.03, "delta": 1.04, "epsilon": 1.05}
    found = run_and_answer(write_run(tmp_path / "run", factors, accumulate=(2,), noise=0.03))[1]
    (fastest,), (wide,) = on_topic(found, FASTEST), on_topic(found, "Undecided")
    assert "gamma, 1.037 (95 % 1.004-1.071). " in fastest.text
    assert "Alone, gamma looks slower; among 4 comparisons" in fastest.text
    assert "the interval contains 1" in wide.text and not wide.command


def test_of_an_unfinished_run_no_memory_is_the_least_and_no_width_has_an_exponent(
    tmp_path: Path,
) -> None:
    found = run_and_answer(
        write_run(tmp_path / "run", FACTORS, accumulate=(2,), noise=0.8, finished=None)
    )[1]
    assert not on_topic(found, LEAST) and "widest interval of a ratio " in found.scope.text
    assert "e+" not in found.scope.text
    assert link_words([make_cell(world_size=1, device="cuda")]) == "one GPU, so no bytes move"


def test_a_cell_that_runs_once_beside_others_has_no_time_to_compare(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"alpha": 1.0, "beta": 1.2}, accumulate=(1, 2), twin=False)
    records = {
        line: json.loads(line) for line in (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    }
    single = {record["cell_id"] for record in records.values() if record["cell"]["accumulate"] == 2}
    kept = [
        line
        for line, record in records.items()
        if record["repeat"] == 0 or record["cell_id"] not in single
    ]
    (folder / JOURNAL).write_bytes(b"".join(kept))
    first, *_ = on_topic(run_and_answer(folder)[1], "Undecided")
    assert first.subject == "beta at N=2, W=2" and "too few trials" in first.text
    write_document(folder, read_document(folder) | {"once": sorted(single)})
    _, found = run_and_answer(folder)
    assert all("N=1" in finding.subject for finding in on_topic(found, "Undecided"))
    assert [(group.n, group.is_timed) for group in found.groups] == [(1, True), (2, False)]
    report(folder)
    assert set(pd.read_csv(folder / "plots" / "memory_vs_time.csv")["accumulate"]) == {1}
    assert list(pd.read_csv(folder / "plots" / "step_time_ratio.csv")["cell"]) == [
        "beta N=1 W=2 fp32"
    ]


def test_what_has_nothing_to_be_compared_with_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"alpha": 1.0, "beta": 1.0}, accumulate=(2,))
    cells = {
        line: json.loads(line)["cell"]
        for line in (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    }
    kept = (line for line, cell in cells.items() if cell["backend"] == "beta" or cell["twin"])
    (folder / JOURNAL).write_bytes(b"".join(kept))
    alarm = run_and_answer(folder)[1].alarm
    assert alarm is not None and alarm.text == "The baseline, alpha, has no trial."
    write_document(folder, read_document(folder) | {"baseline": "reference"})
    alarm = run_and_answer(folder)[1].alarm
    assert alarm is not None and alarm.text.startswith("No two cells")
    alarm = run_and_answer(write_run(tmp_path / "one", {"alpha": 1.0}, accumulate=(2,)))[1].alarm
    assert (
        alarm is not None
        and alarm.command == "python -m bench run --matrix made --backend alpha,ddp-deferred"
    )


def test_a_virtual_world_has_no_time_and_says_so(tmp_path: Path) -> None:
    cells = [
        make_cell(backend=name, world_size=64, global_batch_size=256, virtual=True)
        for name in ("alpha", "beta")
    ]
    folder = written(tmp_path / "virtual", cells, baseline="alpha")
    _, printed = report(folder, drawn=False)
    found = run_and_answer(folder)[1]
    assert (
        found.alarm is not None
        and found.alarm.level is Level.NOTE
        and found.alarm.text == f"{VIRTUAL}."
    )
    page = read(folder / "report.html").text
    for text in (
        printed,
        page,
        (folder / "report.md").read_text(encoding="utf-8").replace("\\", ""),
    ):
        assert "N = 4, W = 64 (virtual)" in text and "s/step" not in text and "not checked" in text


def test_cells_that_differ_in_the_batch_alone_have_labels_of_their_own(tmp_path: Path) -> None:
    cells = [make_cell(global_batch_size=size) for size in (16, 32)] + [
        make_cell(backend="ddp-eager")
    ]
    named = labels(cells)
    assert [named[cell] for cell in cells[:2]] == [
        "ddp-deferred N=4 W=2 fp32 B = 16",
        "ddp-deferred N=4 W=2 fp32 B = 32",
    ]
    assert named[cells[2]] == "ddp-eager N=4 W=2 fp32"
    run = load(written(tmp_path / "run", cells))
    assert run.find(named[cells[1]]) == cells[1]
    assert named[cells[1]] in cite(Analysis(run=run), cells[1].cell_id).text
    with pytest.raises(InputError, match=r"2 cells have this label; .*B = 16\), .*B = 32\)"):
        run.find("ddp-deferred N=4 W=2 fp32")
    assert [group.title for group in run_and_answer(tmp_path / "run")[1].groups] == [
        "N = 4, W = 2, B = 16, micro-batch 2",
        "N = 4, W = 2, B = 32, micro-batch 4",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_fits_the_terminal(folder: Path, width: int) -> None:
    _, found = run_and_answer(folder)
    text = io.StringIO()
    show(Console(file=text, width=width), dataclasses.replace(found, statements=(), remarks=()))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    (head,) = [line.split() for line in lines if line.split()[:1] == ["backend"]]
    assert {"backend", "s/step", "ratio", "memory", "n", "correct?"} <= set(head)
    assert ("verdict" in head) == (width > 100) and (head.count("%") > 0) == (width > 60)
    assert "\u2026" not in text.getvalue()


def test_eager_and_deferred_are_paired_by_name_where_a_framework_has_several() -> None:
    kind = {"framework": "FSDP2", "sharding": "params"}
    eager, deferred = kind | {"sync": "eager"}, kind | {"sync": "deferred"}
    several = {"fsdp2-mine": eager, "fsdp2-eager": eager, "fsdp2-deferred": deferred}
    assert eager_and_deferred(several) == [("fsdp2-eager", "fsdp2-deferred")]
    assert eager_and_deferred({"mine": eager, "other": deferred}) == [("mine", "other")]
    partly = {
        "hsdp-eager": eager,
        "hsdp-deferred-all-reduce": kind | {"sync": "deferred-all-reduce"},
    }
    assert eager_and_deferred(partly) == []
    assert eager_and_deferred(partly, Sync.DEFERRED_ALL_REDUCE) == [
        ("hsdp-eager", "hsdp-deferred-all-reduce")
    ]


def test_on_gpus_the_table_has_rates_and_what_is_reserved(tmp_path: Path) -> None:
    """1e12 FLOP in half a second by two H100 of 989 TFLOP/s, and half a second for all tokens."""
    peaks = {
        "allocated": 2**33,
        "active": 2**33,
        "reserved": 9 * 2**30,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    records = []
    for slot, backend in enumerate(("alpha", "beta") * 6):
        cell = make_cell(backend=backend, device="cuda", precision="bf16")
        record = make_record(cell, slot // 2, device_name="NVIDIA H100 80GB HBM3")
        record["time"]["cuda_memory"] = peaks
        record["flops_per_step"] = 1e14
        records.append(record | {"slot": slot})
    records.append(make_record(cell.reference()) | {"slot": len(records)})
    folder = write(tmp_path / "gpus", records, baseline="alpha")
    run, found = run_and_answer(folder)
    (group,) = found.groups
    (row,) = (row for row in group.rows if row.backend == "beta")
    texts = group.texts(row)
    assert row.step_time_s is not None
    cell = run.cells[row.cell_id]
    tokens = cell.global_batch_size * cell.sequence_length / cell.world_size / row.step_time_s
    assert texts["tokens"] == f"{tokens:,.0f}"
    assert texts["mfu"] == f"{100 * 1e14 / row.step_time_s / (2 * 989e12):.1f} %"
    assert (texts["memory"], texts["reserved"]) == ("8.00 GiB", "9.00 GiB")
    titles = [column.title for column in group.table.columns]
    assert {"tokens/s per GPU", "MFU", "reserved"} <= set(titles)


def test_on_cpus_the_table_has_no_rates_of_gpus(folder: Path) -> None:
    _, found = run_and_answer(folder)
    titles = [column.title for group in found.groups for column in group.table.columns]
    assert "s/step" in titles and not {"tokens/s per GPU", "MFU", "reserved"} & set(titles)
