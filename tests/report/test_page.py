"""The page of a run: one file that says what the verdicts say, whatever the run and its names are."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import bench
import tests.pages as made
from bench.cli import main
from bench.judge.loading import hashed, load
from bench.judge.pairs import judge_pairs, pairs_of_backends
from bench.judge.standing import baseline_of, standings
from bench.judge.verdicts import Verdict
from bench.report import finish
from bench.report import page as pages
from bench.report.citation import cite, cite_plot, number
from bench.report.clipboard import packed
from bench.report.figures import KINDS, kind_of
from bench.report.panels import MOST_PAGES
from bench.report.terminal import by_cell
from tests.pages import HOSTILE, Element, copied_ratio, data_of, read, report, write_large_run, write_run

FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75, "beta": 1.2, "gamma": 1.001}
SECTIONS = ["speed", "memory", "correctness", "communication", "semantics", "noise"]


def wrong_update(cell: Any, repeat: int) -> tuple[str, str] | None:
    return ("oom", "rank 0: out of memory; use a smaller --micro-batch") if cell.backend == "beta" else None


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


def answer_of(page: Element) -> list[str]:
    (found,) = page.find("ul", class_="answer")
    return [item.text.strip() for item in found.find("li")]


def lines_of(page: Element) -> dict[tuple[str, str], dict[str, str]]:
    """The table of cells: by backend and N, the text of each column."""
    (table,) = page.find("table", id="overview")
    found = {}
    for row in table.find("tr"):
        fields = {
            one.attributes["data-key"]: one.text.strip() for one in row.find("td", "th") if "data-key" in one.attributes
        }
        if row.attributes.get("data-id"):
            found[fields["backend"], fields["accumulate"]] = fields
    return found


def test_the_path_is_printed_last(folder: Path, printed: str) -> None:
    assert printed.splitlines()[-1].startswith(f"report: {folder / 'report.html'}")
    assert (folder / "report.md").is_file()


def assert_alone(page: Element, text: str) -> None:
    """Fails if a page asks for anything outside itself, or if two of its elements have one id."""
    assert not page.find("link", "iframe", "object", "embed", "img", "image", "audio", "video", "base")
    for element in page.walk():
        for name, value in element.attributes.items():
            assert not name.startswith("on"), (element.tag, name)
            if name in {"src", "srcset", "data", "poster", "action", "background"}:
                pytest.fail(f"{element.tag} {name}={value}")
            if name in {"href", "xlink:href"}:
                assert element.tag in {"a", "use"}, element.tag
                assert value and not re.match(r"[a-z]+:|//", value), value
    assert len(page.find("script")) == 2
    outside = re.findall(r"url\((?!#)[^)]*\)|@import|https?://[^\s\"'<)]+", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}, set(outside)
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


def test_it_is_one_file(folder: Path, page: Element) -> None:
    assert_alone(page, (folder / "report.html").read_text(encoding="utf-8"))


def test_every_section_is_there_in_order(page: Element) -> None:
    titles = [one.attributes["id"] for one in page.find("h2")]
    assert titles == ["answer", "cells", *SECTIONS, "failed", "methods", "machine", "raw", "manual-title"]
    assert [one.tag for one in page.find("h1", "h2", "h3")][:2] == ["h1", "h2"]
    for plot in page.find("svg"):
        assert plot.attributes["role"] == "img"
        label, details = (plot.attributes["aria-labelledby"] or "").split()
        assert plot.find("title", id=label)[0].text and plot.find("desc", id=details)[0].text
        assert not plot.find("metadata", "style", "script")
    plots = {one.find("figcaption")[0].find("span")[0].text for one in page.find("figure")}
    assert {"memory_vs_time", "step_time_ratio", "memory_categories", "loss_curves", "communication"} <= plots
    assert {"optimizer_steps", "noise"} <= plots


def test_the_answer_is_that_of_the_verdicts(folder: Path, page: Element) -> None:
    run = load(folder)
    found = standings(run)
    row = next(
        r for r in found["alpha-eager"].rows if r.pair.b.backend == "alpha-deferred" and r.pair.b.accumulate == 4
    )
    assert row.judgement.verdict is Verdict.FASTER and row.time is not None
    back = row.time.inverse()
    sentence = (
        f"alpha-deferred is {back.ratio:.2f}x (95 % {back.low:.2f}-{back.high:.2f}) faster than alpha-eager at N=4 W=2 "
        "and takes "
    )
    said = answer_of(page)
    assert said[0].startswith(sentence) and said[0].endswith("less memory.")
    assert any(line.startswith("Slower than alpha-eager at N=4 W=2: beta takes 1.2") for line in said)
    assert "As fast as alpha-eager at N=4 W=2, the same within 2 %: gamma." in said
    assert said[-1].startswith("Noise floor: 0.") and "alpha-eager N=4 W=2 fp32 against itself" in said[-1]


def test_every_cell_has_a_row_and_twins_have_none(folder: Path, page: Element) -> None:
    run = load(folder)
    (table,) = page.find("table", id="overview")
    ids = [row.attributes["data-id"] for row in table.find("tr") if row.attributes.get("data-id")]
    assert sorted(map(str, ids)) == sorted(cell_id for cell_id, cell in run.cells.items() if not cell.twin)
    for cell_id in ids:
        (row,) = page.find("tr", id=f"cell-{cell_id}")
        assert any(str(cell_id) in one.text for one in row.find("a"))


def test_the_table_shows_the_ratios_to_the_baseline(folder: Path, page: Element) -> None:
    run = load(folder)
    rows = {
        (row.pair.b.backend, str(row.pair.b.accumulate)): row
        for row in standings(run)["alpha-eager"].rows
        if not row.pair.b.twin
    }
    lines = lines_of(page)
    assert lines["alpha-eager", "4"]["verdict"] == "baseline" and lines["reference", "1"]["ratio"] == "-"
    for key, row in rows.items():
        assert row.time is not None and row.time.low is not None and row.time.high is not None
        assert lines[key]["ratio"] == f"{row.time.ratio:.3f}"
        assert lines[key]["interval"] == f"{row.time.low:.3f} - {row.time.high:.3f}"
        assert lines[key]["verdict"].split(":")[0] == str(row.judgement.verdict)


def test_ratios_to_any_baseline_are_those_of_a_report_of_their_own(folder: Path, page: Element) -> None:
    run, data = load(folder), data_of(page)
    floor = standings(run)["alpha-eager"].floor
    assert data["baselines"] == list(FACTORS) and baseline_of(run.manifest) == "alpha-eager"
    for place, baseline in enumerate(data["baselines"]):
        pairs = [p for name in FACTORS if name != baseline for p in pairs_of_backends(run, baseline, name)]
        for row in judge_pairs(run, run, pairs, floor=floor.interval if floor else None):
            (found,) = [one for one in data["ratios"][row.pair.b.cell_id] if one[0] == place]
            assert row.time is not None
            assert found[1:4] == pytest.approx([row.time.ratio, row.time.low, row.time.high], abs=6e-4)
            assert data["verdicts"][found[4]] == row.judgement.verdict
            assert data["reasons"][found[5]] == row.judgement.reason


def test_citations_are_in_the_page(folder: Path, page: Element) -> None:
    run, data = hashed(load(folder), folder), data_of(page)["citations"]
    cell = next(c for c in run.cells.values() if c.backend == "beta" and c.accumulate == 4)
    cited = {("cell", cell.cell_id): cite(run, cell.cell_id), ("plot", "noise"): cite_plot(run, "noise")}
    for (kind, key), citation in cited.items():
        for form in ("text", "markdown", "bibtex"):
            assert data[kind][form]["of"][key] + data[kind][form]["end"] == getattr(citation, form)


def assert_ratios_are_cited(folder: Path) -> int:
    """Fails if a ratio to any baseline is not copied from the page as ``cite`` prints it; how many there are."""
    run, data = hashed(load(folder), folder), data_of(read(folder / "report.html"))
    compared = 0
    for place, (name, standing) in enumerate(standings(run).items()):
        assert data["baselines"][place] == name
        for row in standing.rows:
            cell_id, other_id = row.pair.b.cell_id, row.pair.a.cell_id
            for form in () if row.pair.b.twin else ("text", "markdown", "bibtex"):
                assert copied_ratio(data, form, cell_id, place) == getattr(cite(run, cell_id, other_id), form)
                compared += 1
        assert copied_ratio(data, "text", next(iter(run.cells)), place) is None  # the reference is no contestant
    return compared


def test_a_ratio_to_any_baseline_can_be_cited(folder: Path, printed: str) -> None:
    assert assert_ratios_are_cited(folder) == 3 * len(FACTORS) * (len(FACTORS) - 1) * 2


def test_one_step_time_everywhere(folder: Path, page: Element, printed: str) -> None:
    """Page, its sections, report.md, summary, plots, frames and citations give one number for a cell."""
    run, frames = hashed(load(folder), folder), bench.load(folder)
    cells = by_cell(run.tables).set_index("cell_id")
    drawn = pd.read_csv(folder / "plots" / "step_time.csv").drop_duplicates("cell_id").set_index("cell_id")
    short = (folder / "report.md").read_text(encoding="utf-8")
    (speed,) = [one for one in page.find("table") if one.find("caption", id="speed-caption")]
    in_speed = {row.find("th")[0].text: [one.text for one in row.find("td")] for row in speed.find("tr")[1:]}
    for cell in frames.cells[frames.cells.twin.fillna("") == ""].itertuples():
        seconds, ends = cell.step_time_s, (cell.step_time_low_s, cell.step_time_high_s)
        row = cells.loc[cell.cell_id]
        assert (row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"]) == pytest.approx((seconds, *ends))
        assert row["tokens_per_s"] == pytest.approx(cell.tokens_per_s)
        assert row["peak_memory_bytes"] == cell.peak_memory_bytes
        assert drawn.loc[cell.cell_id, ["step_time_s_cell", "step_time_s_low", "step_time_s_high"]].tolist() == (
            pytest.approx([seconds, *ends])
        )
        words = f"{number(seconds)} s per optimizer step (95 % interval {number(ends[0])} - {number(ends[1])}, n = 10"
        assert words in cite(run, cell.cell_id).text
        (line,) = page.find("tr", id=f"cell-{cell.cell_id}")
        (field,) = [one for one in line.find("td") if one.attributes.get("data-key") == "seconds"]
        assert float(field.text) == pytest.approx(seconds, rel=1e-3)
        assert in_speed[cell.label][1:3] == [field.text, f"{ends[0]:.4g} - {ends[1]:.4g}"]
        assert f" {field.text} " in short and f" {seconds:.4f} (" in printed


def test_raw_data_is_linked_where_it_is(folder: Path, page: Element) -> None:
    links = [str(one.attributes["href"]) for one in page.find("a") if not str(one.attributes["href"]).startswith("#")]
    assert "trials.jsonl" in links and "ratios.parquet" in links
    assert all((folder / link).exists() for link in links)


def rendered(folder: Path) -> str:
    """The page once more, with the plots that are there."""
    run = hashed(load(folder), folder)
    return pages.render(folder, run, standings(run), by_cell(run.tables), sorted((folder / "plots").iterdir()))


def test_it_is_the_same_every_time(folder: Path, page: Element) -> None:
    assert rendered(folder) == (folder / "report.html").read_text(encoding="utf-8")


def test_what_all_texts_end_with_is_stored_once() -> None:
    class Citation:
        def __init__(self, text: str) -> None:
            self.text = self.markdown = self.bibtex = text

    cited: dict[str, Any] = {"a": Citation("one: same end"), "b": Citation("two: same end")}
    assert packed(cited)["text"] == {"end": ": same end", "of": {"a": "one", "b": "two"}}
    assert packed({})["text"] == {"end": "", "of": {}}
    equal: dict[str, Any] = {"a": Citation("x"), "b": Citation("x")}
    assert packed(equal)["text"] == {"end": "x", "of": {"a": "", "b": ""}}


@pytest.mark.parametrize("there_is_one", [True, False])
def test_open(
    folder: Path,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there_is_one: bool,
) -> None:
    opened: list[str] = []

    def take(uri: str) -> bool:
        opened.append(uri)
        return there_is_one

    monkeypatch.setattr(webbrowser, "open", take)
    monkeypatch.setattr(finish, "finish", lambda *_, **__: 0)
    assert main(["report", str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    said = capsys.readouterr().err
    assert said == ("" if there_is_one else f"bench: --open: there is no browser here; open {opened[0][7:]} in one\n")


class TestOddRuns:
    def test_hostile_names(self, tmp_path: Path) -> None:
        folder = write_run(
            tmp_path / "a <b>&amp; 'c'", {name: 1.0 + i / 10 for i, name in enumerate(HOSTILE)}, accumulate=(2,)
        )
        report(folder)
        page = read(folder / "report.html")
        assert_alone(page, (folder / "report.html").read_text(encoding="utf-8"))
        assert {backend for backend, _ in lines_of(page)} == {*HOSTILE, "reference"}
        assert data_of(page)["baselines"] == list(HOSTILE)
        assert assert_ratios_are_cited(folder) == 3 * len(HOSTILE) * (len(HOSTILE) - 1)
        assert "49" not in "".join(answer_of(page)).split()
        short = (folder / "report.md").read_text(encoding="utf-8")
        assert not re.search(r"(?<!\\)<", short.split("```sh")[0])
        (header, *_) = [line for line in short.splitlines() if line.startswith("| ")]
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in short.splitlines() if line.startswith("| ")}
        assert len(widths) == 1, header

    def test_one_cell(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "one", {"alpha": 1.0}, accumulate=(2,), repeats=1, twin=False)
        report(folder)
        page = read(folder / "report.html")
        assert len(lines_of(page)) == 2
        assert answer_of(page)[0] == "Nothing was compared: no two cells of the run differ in the backend alone."
        assert answer_of(page)[-1].startswith("Noise floor: unknown.")

    def test_failed_cells_only(self, tmp_path: Path) -> None:
        folder = write_run(
            tmp_path / "failed",
            FACTORS,
            fate=lambda cell, repeat: ("crashed", f"rank 1: ValueError: {cell.backend} <b>no</b>"),
        )
        status, _ = report(folder)
        assert status == 1
        page = read(folder / "report.html")
        assert_alone(page, (folder / "report.html").read_text(encoding="utf-8"))
        (table,) = [one for one in page.find("table") if one.find("caption", id="failures-caption")]
        reasons = [row.find("td")[-1].text for row in table.find("tr") if row.find("td")]
        assert len(reasons) == 9 and all("ValueError" in reason and "<b>no</b>" in reason for reason in reasons)
        assert any("failed (9 crashed)" in line for line in answer_of(page))
        assert "crashed" in (folder / "report.md").read_text(encoding="utf-8")

    def test_some_failed(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "some", FACTORS, fate=wrong_update)
        report(folder, drawn=False)
        page = read(folder / "report.html")
        assert lines_of(page)["beta", "4"]["status"] == "oom 10/10"
        assert any("2 of 9 cells failed (2 oom)" in line for line in answer_of(page))
        short = (folder / "report.md").read_text(encoding="utf-8")
        assert (
            "- oom: beta N=1 W=2 fp32, beta N=4 W=2 fp32: rank 0: out of memory; use a smaller --micro-batch" in short
        )

    def test_without_an_aa_pair_nothing_is_called_faster(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "old", FACTORS, repeats=3, twin=False)
        report(folder, drawn=False)
        said = answer_of(read(folder / "report.html"))
        assert said[0].startswith("No cell is called faster or slower than alpha-eager's, or the same: few trials.")
        assert not any(" faster than " in line and "No cell" not in line and "Whether" not in line for line in said)
        assert said[-1].startswith("Noise floor: unknown. The run has no A/A pair")

    def test_peaks_that_are_not_compared_have_their_reason(self, tmp_path: Path) -> None:
        busy = {"num_cpus": 4, "foreign_cores": 2.0, "stolen_cores": 0.0}
        folder = write_run(tmp_path / "busy", FACTORS, accumulate=(2,), repeats=1, host=busy)
        report(folder, drawn=False)
        text = read(folder / "report.html").text
        assert f"Not compared with alpha-eager's: {len(FACTORS) - 1} peaks: machine disturbed" in text
        assert "peaks are" not in text
        half = write_run(
            tmp_path / "half",
            FACTORS,
            accumulate=(2,),
            fate=lambda c, _: ("oom", "full") if c.backend == "beta" else None,
        )
        report(half, drawn=False)
        text = read(half / "report.html").text
        assert "Bytes have no noise: against alpha-eager's, peaks are" in text
        assert "Not compared with alpha-eager's: 1 peak: no trials (1)." in text

    def test_a_run_without_gpus_lacks_their_columns(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "cpu", {"alpha": 1.0, "beta": 1.1}, accumulate=(2,))
        report(folder, drawn=False)
        page = read(folder / "report.html")
        (table,) = [one for one in page.find("table") if one.find("caption", id="speed-caption")]
        heads = [one.text for one in table.find("thead")[0].find("th")]
        assert heads[:7] == ["cell", "good trials", "s/step", "95 % interval", "fastest", "slowest", "tokens/s"]
        assert not {"MFU", "J/step", "J/token", "launches/micro-batch"} & set(heads)

    def test_two_precisions_are_told_apart(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "two", {"alpha": 1.0, "beta": 1.1}, accumulate=(2,), precision=("fp32", "bf16"))
        report(folder, drawn=False)
        page = read(folder / "report.html")
        (table,) = page.find("table", id="overview")
        heads = [one.attributes["data-key"] for one in table.find("th", scope="col") if "data-key" in one.attributes]
        assert heads[:4] == ["backend", "accumulate", "world_size", "precision"]


def test_of_many_plots_those_without_room_are_linked(
    folder: Path, page: Element, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PLOTS_BYTES", 1)
    reader = made.Reader()
    reader.feed(rendered(folder))
    small = reader.root
    assert len(small.find("svg")) == 7 < len(page.find("svg"))
    links = [str(one.attributes["href"]) for one in small.find("a") if "plots/" in str(one.attributes["href"])]
    assert links and all((folder / link).is_file() for link in links)


@pytest.mark.slow
def test_500_cells(tmp_path: Path) -> None:
    import time

    folder = write_large_run(tmp_path / "many")
    began = time.process_time()  # what other programs do at the same time is not counted
    report(folder)
    seconds = time.process_time() - began
    page = read(folder / "report.html")
    (table,) = page.find("table", id="overview")
    assert sum("data-id" in row.attributes for row in table.find("tr")) > 500
    assert (folder / "report.html").stat().st_size < 5e6
    assert len((folder / "report.md").read_text(encoding="utf-8")) < 65_536
    assert_cut_short(folder, page)
    assert seconds < 20, seconds


def assert_cut_short(folder: Path, page: Element) -> None:
    """Fails if a kind of plot has too many figures, does not say what they lack, or has a CSV that lacks it too."""
    run = load(folder)
    cells = sum(not cell.twin for cell in run.cells.values())
    kinds: dict[str, list[Path]] = {}
    for path in (folder / "plots").glob("*.svg"):
        kinds.setdefault(kind_of(path.stem), []).append(path)
    assert set(kinds) == set(KINDS) and all(len(pages) <= MOST_PAGES for pages in kinds.values())
    for name in (
        "memory_vs_time",
        "memory_categories",
        "step_time_ratio",
    ):  # not all have room in it
        said = page.find("desc", id=f"{min(kinds[name]).stem}-description")
        words = [
            re.search(r"(\d+) of (\d+) (cells|comparisons) are left out of this picture", one.text) for one in said
        ]
        assert words and words[0] is not None, name
        left_out, every = int(words[0][1]), int(words[0][2])
        assert 0 < left_out < every <= cells
    assert pd.read_csv(max(kinds["speed_up"]).with_suffix(".csv"))["cell_id"].nunique() == cells
    assert len(pd.read_csv(folder / "plots" / "step_time_ratio-1.csv")) == len(standings(run)["backend-0-eager"].rows)


def test_helpers_read_what_they_should() -> None:
    reader = made.Reader()
    reader.feed("<p>a<b>c</b></p><br>")
    assert [one.tag for one in reader.root.walk()] == ["page", "p", "b", "br"]
    with pytest.raises(AssertionError, match="closes"):
        made.Reader().feed("<p><b></p>")
