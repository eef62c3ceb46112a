"""The page of a run: one file that says what the verdicts say, whatever the run and its names are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.judge.loading import hashed, load
from bench.judge.standing import standings
from bench.judge.verdicts import Verdict
from bench.report import page as pages
from bench.report.citation import cite
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


def rendered(folder: Path) -> str:
    """The page once more, with the plots that are there."""
    run = hashed(load(folder), folder)
    return pages.render(folder, run, standings(run), by_cell(run.tables), sorted((folder / "plots").iterdir()))


def test_it_is_the_same_every_time(folder: Path, page: Element) -> None:
    assert rendered(folder) == (folder / "report.html").read_text(encoding="utf-8")


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


@pytest.mark.slow
def test_500_cells(tmp_path: Path) -> None:
    folder = write_large_run(tmp_path / "many")
    report(folder)
    page = read(folder / "report.html")
    (table,) = page.find("table", id="overview")
    assert sum("data-id" in row.attributes for row in table.find("tr")) > 500
    assert (folder / "report.html").stat().st_size < 5e6
    assert len((folder / "report.md").read_text(encoding="utf-8")) < 65_536
    assert_cut_short(folder, page)


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
