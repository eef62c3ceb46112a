"""The page of a run: one file that says what the verdicts say, whatever the run and its names are."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pandas as pd
import pytest

from bench import validation
from bench.audit.semantics_files import load as load_suite
from bench.files import RESULTS
from bench.formatting import digits
from bench.judge.analysis import Analysis
from bench.judge.loading import load
from bench.plain_stream import harmless
from bench.report import page as pages
from bench.report.answer import answer
from bench.report.citation import cite
from bench.report.figures import KINDS
from bench.report.sections import EpochEnd, epoch_end, nodes, published
from bench.run.journal import Journal
from studies.semantics import at_epoch_end
from tests.factories import judged_run, make_cell, make_manifest, make_record
from tests.pages import HOSTILE, Element, data_of, read, report, write_large_run, write_run

FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75, "beta": 1.2, "gamma": 1.001}
SECTIONS = ["speed", "memory", "communication", "correctness", "semantics"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("page") / "run", FACTORS)


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    status, text = report(folder)
    assert status == 0
    return text


@pytest.fixture(scope="module")
def page(folder: Path, printed: str) -> Element:
    return read(folder / "report.html")


def lines_of(page: Element) -> dict[tuple[str, str], dict[str, str]]:
    """The table: by backend and N, the text of each column."""
    (table,) = page.find("table", id="overview")
    found = {}
    for body in table.find("tbody"):
        for row in body.find("tr"):
            if row.attributes.get("data-id"):
                fields = {
                    str(cell.attributes["data-key"]): cell.text.strip()
                    for cell in row.find("td", "th")
                    if "data-key" in cell.attributes
                }
                found[fields["backend"], str(body.attributes["data-n"])] = fields
    return found


def assert_alone(page: Element, text: str) -> None:
    """Fails if a page asks for anything outside itself, or if two of its elements have one id."""
    assert not page.find(
        "link", "iframe", "object", "embed", "svg", "image", "audio", "video", "base"
    )
    for element in page.walk():
        for name, value in element.attributes.items():
            assert not name.startswith("on"), (element.tag, name)
            if element.tag == "img" and name == "src":
                assert value and re.fullmatch(r"data:image/png;base64,[\w+/=]+", value)
            elif name in {"src", "srcset", "data", "poster", "action", "background"}:
                pytest.fail(f"{element.tag} {name}={value}")
            if name in {"href", "xlink:href"}:
                assert element.tag in {"a", "use"}, element.tag
                assert value and value.startswith("#"), "a page is sent by itself"
    assert len(page.find("script")) == 2
    assert not re.findall(r"url\((?!#)[^)]*\)|@import|https?://[^\s\"'<)]+", text)
    ids = [element.attributes["id"] for element in page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    known = set(ids)
    for element in page.walk():
        for name in ("aria-labelledby", "for"):
            assert set((element.attributes.get(name) or "").split()) <= known
        target = element.attributes.get("href") or ""
        if target.startswith("#"):
            assert target[1:] in known
    defined = set(re.findall(r"(--[\w-]+): ?[^;]", text))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= defined


def test_a_number_has_four_digits_once_it_is_rounded() -> None:
    assert [digits(value) for value in (0.99998, 9.9996, 0.12344)] == ["1.000", "10.00", "0.1234"]


def test_it_is_one_file(folder: Path, page: Element) -> None:
    assert_alone(page, (folder / "report.html").read_text(encoding="utf-8"))


def test_every_section_is_there_in_order(page: Element) -> None:
    titles = [heading.attributes["id"] for heading in page.find("h2")]
    assert titles == [
        "answer",
        "cells",
        *SECTIONS,
        "failed",
        "methods",
        "machine",
        "raw",
        "manual-title",
    ]
    assert [heading.tag for heading in page.find("h1", "h2", "h3")][:2] == ["h1", "h2"]
    for plot in page.find("img"):
        assert base64.b64decode(str(plot.attributes["src"]).partition(",")[2]).startswith(
            b"\x89PNG"
        )
        (about,) = page.find("p", id=str(plot.attributes["aria-describedby"]))
        assert plot.attributes["alt"] and len(about.text) > 20
    plots = {figure.find("figcaption")[0].find("span")[0].text for figure in page.find("figure")}
    assert {
        "memory_vs_time",
        "step_time_ratio",
        "memory_categories",
        "loss_curves",
        "communication",
    } <= plots
    assert "noise" in plots and "optimizer_steps" not in plots


def test_the_table_has_every_cell_sorted_by_time_and_the_largest_n_first(
    folder: Path, page: Element
) -> None:
    run, lines = load(folder), lines_of(page)
    assert list(lines)[:4] == [
        (name, "4") for name in ("alpha-deferred", "alpha-eager", "gamma", "beta")
    ] or (
        list(lines)[:4]
        == [(name, "4") for name in ("alpha-deferred", "gamma", "alpha-eager", "beta")]
    )
    assert len(lines) == sum(not cell.twin and not cell.is_reference for cell in run.cells.values())
    for row in Analysis(run=run).verdicts:
        if not row.b.twin:
            fields = lines[row.b.backend, str(row.b.accumulate)]
            assert row.time is not None and row.time.low is not None and row.time.high is not None
            assert (
                fields["ratio"]
                == f"{digits(row.time.ratio)}{digits(row.time.low)}-{digits(row.time.high)}"
            )
            assert fields["verdict"].split(":")[0] == str(row.verdict)
            assert fields["correct"] == "yes" and fields["trials"] == "10"


def test_steps_of_whole_windows_do_not_pass_for_those_at_an_epochs_end(tmp_path: Path) -> None:
    backends = {"lightning-deepspeed-zero2-corrected": 1.0, "ddp-deferred": 1.1, "own": 1.2}
    folder = write_run(
        tmp_path / "run",
        backends,
        accumulate=(2,),
        packages={"lightning": "2.6.6", "deepspeed": "0.1"},
    )
    report(folder, drawn=False)
    page = read(folder / "report.html")
    (section,) = page.find("section", aria_labelledby="semantics")
    text = " ".join(section.text.split())
    assert "A timed trial trains whole windows only" in text
    rows = [
        [cell.text for cell in row.find("th", "td")] for row in section.find("tbody")[0].find("tr")
    ]
    assert [row[0] for row in rows] == ["lightning-deepspeed-zero2-corrected", "ddp-deferred"]
    assert rows[0][2:] == ["6", "5", "4"] and "global_step = 4" in rows[0][1]
    assert rows[1][2:] == ["6", "6", "-"]
    assert "deepspeed 0.19.8; this run has deepspeed 0.1, which may differ" in text
    assert not section.find("a") and "docs/semantics.md" in text


def test_the_bundled_findings_are_those_of_the_committed_suite() -> None:
    found = at_epoch_end(*load_suite(RESULTS / "semantics" / "observations.json"))
    assert validation.read(EpochEnd, found) == epoch_end()


def assert_citations(folder: Path) -> int:
    """Fails if a citation in the page is not what ``cite`` prints; how many ratios are cited."""
    data, cited = Analysis(run=load(folder)), data_of(read(folder / "report.html"))["citations"]
    rows = data.pairs
    assert set(cited["ratio"]["text"]["of"]) == set(rows)
    for form in ("text", "markdown", "bibtex"):
        cells, ratios = cited["cell"][form], cited["ratio"][form]
        for cell_id, text in cells["of"].items():
            assert text + cells["end"] == getattr(cite(data, cell_id), form)
        for cell_id, text in ratios["of"].items():
            assert text + ratios["end"] == getattr(
                cite(data, cell_id, rows[cell_id].a.cell_id), form
            )
    return len(rows)


def test_cells_and_their_ratios_to_the_baseline_can_be_cited(folder: Path, printed: str) -> None:
    assert assert_citations(folder) == (len(FACTORS) - 1) * 2


def test_it_is_the_same_every_time(folder: Path, page: Element) -> None:
    run = load(folder)
    data = Analysis(folder=folder, run=run)
    again = pages.render(data, answer(data), sorted((folder / "plots").iterdir()))
    assert again == (folder / "report.html").read_text(encoding="utf-8")


def test_it_says_how_nodes_differ_and_which_has_the_slowest_rank(tmp_path: Path) -> None:
    cell = make_cell(ranks_per_node=1)
    manifest = make_manifest([cell])
    other = {**manifest, "machine": manifest["machine"] | {"cpu": "another"}}
    steps = ([[0.5], [0.6]], [[0.6], [0.5]], [[0.5], [0.6]])
    records = [
        make_record(cell, repeat, time={"rank_step_seconds": seconds})
        for repeat, seconds in enumerate(steps)
    ]
    for record in records:
        Journal(tmp_path).append(record)
    run = judged_run(records, manifest | {"nodes": [other]})
    other_cpu, slowest = nodes(Analysis(folder=tmp_path, run=run))
    assert other_cpu.startswith("Node 1: machine.cpu is 'another', and 'made'")
    assert "on node 1 in 2 of 3 trials" in slowest


class TestOddRuns:
    def test_hostile_names(self, tmp_path: Path) -> None:
        folder = write_run(
            tmp_path / "a <b>&amp; 'c'",
            {name: 1.0 + i / 10 for i, name in enumerate(HOSTILE)},
            accumulate=(2,),
        )
        report(folder)
        page = read(folder / "report.html")
        assert_alone(page, (folder / "report.html").read_text(encoding="utf-8"))
        assert {backend for backend, _ in lines_of(page)} == {harmless(name) for name in HOSTILE}
        assert data_of(page)["baselines"] == list(map(harmless, HOSTILE))
        assert assert_citations(folder) == len(HOSTILE) - 1
        (answered,) = page.find("dl", class_="answer")
        assert "49" not in answered.text.split()
        short = (folder / "report.md").read_text(encoding="utf-8")
        assert not re.search(r"(?<!\\)<", short.split("```sh")[0])
        header = next(line for line in short.splitlines() if line.startswith("| "))
        widths = {
            len(re.findall(r"(?<!\\)\|", line))
            for line in short.splitlines()
            if line.startswith("| ")
        }
        assert len(widths) == 1, header


@pytest.mark.slow
def test_500_cells(tmp_path: Path) -> None:
    folder = write_large_run(tmp_path / "many")
    report(folder)
    page = read(folder / "report.html")
    (table,) = page.find("table", id="overview")
    assert sum("data-id" in row.attributes for row in table.find("tr")) == 504
    assert (folder / "report.html").stat().st_size < 5e6
    assert len((folder / "report.md").read_text(encoding="utf-8")) < 65_536
    run = load(folder)
    cells = sum(not cell.twin for cell in run.cells.values())
    plots = {path.stem: path for path in (folder / "plots").glob("*.png")}
    assert set(plots) == set(KINDS)
    for name in (
        "memory_vs_time",
        "memory_categories",
        "step_time_ratio",
    ):  # not all have room in it
        (about,) = page.find("p", id=f"about-{name}")
        words = re.search(r"(\d+) of (\d+) (cells|comparisons) are left out", about.text)
        assert words is not None and 0 < int(words[1]) < int(words[2]) <= cells, name
    assert (
        pd.read_csv(plots["step_time"].with_suffix(".csv"))["cell_id"].nunique() >= cells - 4
    )  # references
    ratios = pd.read_csv(plots["step_time_ratio"].with_suffix(".csv"))
    assert len(ratios) == len(Analysis(run=run).verdicts)


def test_published_figures_stand_above_the_measured_ones() -> None:
    cell = make_cell(backend="fsdp2-eager")
    manifest, records = (
        make_manifest([cell.reference(), cell]),
        [make_record(c) for c in (cell.reference(), cell)],
    )
    assert published(Analysis(run=judged_run(records, manifest))) is None
    figure = {
        "what": "theirs",
        "conditions": "8 x H100",
        "tokens_per_s_per_gpu": 5762,
        "memory_gib": 82.4,
    }
    figure["source"] = "example.org (torch 1963fc8; December 2024)"
    manifest["matrix"]["values"]["published"] = [figure]
    section = published(Analysis(run=judged_run(records, manifest)))
    assert (
        section is not None and "example.org (torch 1963fc8; December 2024)" in section.sentences[0]
    )
    first, second = ([*row.texts.values()] for row in section.table.rows)
    assert first == ["published: theirs", "8 x H100", "5,762", "82.40 GiB"]
    assert second[0] == cell.label and float(second[2].replace(",", "")) > 0
