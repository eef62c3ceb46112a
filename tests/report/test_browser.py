"""The page in a real browser: opened from disk, used, printed, and read by those who cannot see it.

Run by ``nox -s browser``, which installs what it needs; skipped without ``--browser``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.judge.analysis import Analysis
from bench.judge.loading import load
from bench.judge.pool import Pool
from bench.report.citation import cite, cite_plot
from bench.report.style import SMALL, WIDTH
from tests.pages import HOSTILE, data_of, read, report, write_run

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75, "beta": 1.2, "gamma": 1.001}
A4_POINTS = (595, 842)
PRINTABLE = 703
"""Pixels of A4's width between the margins, 186 mm."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: nox -s browser installs it"
    )
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(
            f"no browser is installed: none of {', '.join(NAMES)} is on the path (Debian: apt install chromium)"
        )
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def changes(cell: Any, repeat: int) -> dict[str, str]:
        failed = cell.backend == "beta" and cell.accumulate == 8
        return {"status": "oom", "reason": "rank 0: out of memory"} if failed else {}

    made = write_run(
        tmp_path_factory.mktemp("browser") / "run",
        FACTORS,
        accumulate=(1, 2, 8),
        world_size=(1, 2),
        changes=changes,
    )
    report(made)
    return made


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_run(
        tmp_path_factory.mktemp("hostile") / "<i>run",
        {name: 1 + i / 10 for i, name in enumerate(HOSTILE)},
        accumulate=(2,),
    )
    report(made)
    return made


class Visit:
    """A page that is open, and what happened on it."""

    def __init__(self, browser: Any, folder: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.url = (folder / "report.html").resolve().as_uri()
        self.page.goto(self.url)

    def column(self, key: str) -> list[str]:
        """The texts of a column, of the rows that are shown, in order."""
        script = f"""[...document.querySelectorAll('#overview tr[data-id]')].filter(r => r.checkVisibility())
                     .map(r => r.querySelector('[data-key="{key}"]').innerText.split("\\n")[0].trim())"""
        return list(self.page.evaluate(script))

    def show(self, n: str, place: int | None = None) -> None:
        """Switch to another N, or to all; and to another world."""
        self.page.locator(f'#by-n input[value="{n}"]').check(force=True)
        if place is not None:
            self.page.select_option("#by-place", str(place) if place >= 0 else "")


@pytest.fixture
def visit(browser: Any, folder: Path) -> Iterator[Visit]:
    opened = Visit(browser, folder)
    yield opened
    assert opened.errors == []
    opened.context.close()


def test_it_asks_for_nothing(visit: Visit) -> None:
    assert visit.requests == [visit.url]
    assert visit.page.title() == "run: gradient accumulation, measured"
    assert visit.page.locator("#controls").is_visible()


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_is_no_wider_than_the_screen(browser: Any, folder: Path, width: int) -> None:
    opened = Visit(browser, folder)
    opened.page.set_viewport_size({"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    opened.context.close()


def test_a_phone_shows_verdict_and_memory_and_plots_that_can_be_read(
    browser: Any, folder: Path
) -> None:
    opened = Visit(browser, folder, viewport={"width": 390, "height": 844})
    page = opened.page
    shown = """[...document.querySelectorAll('#overview tr[data-id]')].filter(r => r.checkVisibility())
               .map(r => Object.fromEntries([...r.querySelectorAll('[data-key]')].map(one => {
                 const box = one.getBoundingClientRect();
                 return [one.dataset.key, box.width > 0 && box.left >= 0 && box.right <= innerWidth];
               })))"""
    rows = page.evaluate(shown)
    assert len(rows) == 4
    for row in rows:
        names = ("backend", "seconds", "ratio", "verdict", "memory", "correct")
        assert [name for name in names if not row[name]] == []
    for plot in page.locator("img.plot:visible").all():
        pixels_per_inch = plot.bounding_box()["width"] / WIDTH
        assert SMALL / 72 * pixels_per_inch >= 9, "its smallest words"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.errors == []
    opened.context.close()


def test_all_plots_are_drawn_without_scrolling(visit: Visit) -> None:
    visit.page.wait_for_load_state("load")
    undrawn = """[...document.querySelectorAll('img.plot')].filter(
                 one => !(one.complete && one.naturalWidth)).length"""
    visit.page.wait_for_function(f"{undrawn} === 0", timeout=5000)
    assert visit.page.evaluate("scrollY") == 0


def test_hostile_names_do_nothing(browser: Any, hostile: Path) -> None:
    opened = Visit(browser, hostile)
    opened.page.wait_for_timeout(200)
    assert opened.requests == [opened.url] and opened.errors == []
    assert opened.page.locator("#overview tr[data-id]").count() == len(HOSTILE)
    for place in range(len(HOSTILE)):
        opened.page.select_option("#baseline", str(place))
        assert opened.column("verdict").count("baseline") == 1
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.context.close()


def test_the_largest_n_is_shown_first_and_others_are_a_switch_away(visit: Visit) -> None:
    assert visit.page.locator("tr.group:visible").all_inner_texts() == [
        "N = 8, W = 2, micro-batch 2"
    ]
    assert visit.column("backend")[-1] == "beta" and len(visit.column("backend")) == 4
    visit.show("2")
    assert visit.page.locator("tr.group:visible").all_inner_texts() == [
        "N = 2, W = 2, micro-batch 8"
    ]
    visit.show("", -1)
    assert len(visit.column("backend")) == 24
    visit.page.select_option("#by-backend", label="gamma")
    assert visit.column("backend") == ["gamma"] * 6


def test_sorting(visit: Visit) -> None:
    assert visit.column("seconds")[:3] == sorted(visit.column("seconds")[:3])
    head = visit.page.locator('#overview th[data-key="seconds"]')
    for direction in ("ascending", "descending"):
        head.get_by_role("button").click()
        known = [float(text) for text in visit.column("seconds")[:3]]
        assert head.get_attribute("aria-sort") == direction
        assert (
            known == sorted(known, reverse=direction == "descending")
            and visit.column("seconds")[3] == "-"
        )
    visit.page.locator('#overview th[data-key="backend"] button').press("Enter")
    assert visit.column("backend") == sorted(visit.column("backend"))
    assert head.get_attribute("aria-sort") is None


def test_another_baseline(visit: Visit, folder: Path) -> None:
    data = data_of(read(folder / "report.html"))
    visit.show("", -1)
    texts = [visit.column(key) for key in ("ratio", "verdict")]
    place = data["baselines"].index("alpha-deferred")
    visit.page.select_option("#baseline", label="alpha-deferred")
    ids = visit.page.evaluate(
        "[...document.querySelectorAll('#overview tr[data-id]')].map(r => r.dataset.id)"
    )
    ends = visit.page.locator('#overview tr[data-id] [data-part="ends"]').all_text_contents()
    shown = zip(
        ids, *(visit.column(key) for key in ("backend", "ratio", "verdict")), ends, strict=True
    )
    compared = 0
    for cell_id, backend, ratio, verdict, interval in shown:
        found = [ratio for ratio in data["ratios"].get(cell_id, []) if ratio[0] == place]
        if backend == "alpha-deferred":
            assert (ratio, interval, verdict) == ("1", "", "baseline")
        elif not found or found[0][1] is None:
            assert (ratio, interval) == ("-", "")
        else:
            compared += 1
            _, middle, below, word, *_ = found[0]
            assert below and (ratio, interval) == (middle, below)
            assert verdict.split(":")[0].split(",")[0] == data["verdicts"][word]
    assert compared == 16
    assert visit.page.locator("#against").inner_text() == "alpha-deferred"
    of_memory = visit.page.locator('#overview [data-part="memory"]')
    assert of_memory.count() and not of_memory.first.is_visible(), "they are to the run's own"
    visit.page.select_option("#baseline", label="alpha-eager")
    assert [visit.column(key) for key in ("ratio", "verdict")] == texts


def test_a_citation_is_copied(browser: Any, folder: Path) -> None:
    run = load(folder)
    opened = Visit(browser, folder, permissions=["clipboard-read", "clipboard-write"])
    page = opened.page
    (cell,) = [
        c for c in run.cells.values() if (c.backend, c.accumulate, c.world_size) == ("gamma", 8, 2)
    ]
    for baseline in data_of(read(folder / "report.html"))["baselines"]:
        page.select_option("#baseline", label=baseline)
        for form in ("text", "markdown", "bibtex"):
            page.select_option("#format", form)
            page.locator(f'button[data-cell="{cell.cell_id}"]').click()
            wanted = getattr(cite(Analysis(run=run), cell.cell_id), form)
            (base,) = [
                cell.cell_id
                for cell in run.cells.values()
                if (cell.backend, cell.accumulate, cell.world_size, cell.twin)
                == (baseline, 8, 2, "")
            ]
            if baseline == "gamma":
                page.get_by_text("Copied the citation of the cell.", exact=True).wait_for()
            elif baseline == "alpha-eager":
                page.get_by_text(
                    f"Copied the citation of the cell and of its ratio to {baseline}."
                ).wait_for()
                wanted += f"\n\n{getattr(cite(Analysis(run=run), cell.cell_id, base), form)}"
            else:
                page.get_by_text(f"the command that cites its ratio to {baseline}.").wait_for()
                wanted += f"\n\npython -m bench cite results/run {cell.cell_id} {base}"
            assert page.evaluate("navigator.clipboard.readText()") == wanted
    page.locator('button[data-plot="memory_vs_time"]').click()
    page.get_by_text("Copied the citation of the plot.").wait_for()
    assert (
        page.evaluate("navigator.clipboard.readText()")
        == cite_plot(Pool(runs=(run,)), "memory_vs_time").bibtex
    )
    assert opened.errors == []
    opened.context.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["folder", "hostile"])
def test_accessibility(
    browser: Any, which: str, dark: bool, request: pytest.FixtureRequest
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="nox -s browser installs axe-core"
    )
    opened = Visit(
        browser, request.getfixturevalue(which), color_scheme="dark" if dark else "light"
    )
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    opened.page.wait_for_function(
        "document.querySelector('details table') && !document.querySelector('details > noscript')"
    )
    found = axe.Axe().run(opened.page)
    assert found.violations_count == 0, found.generate_report()
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 28)" if dark else "rgb(255, 255, 255)")
    card = opened.page.evaluate(
        "(({backgroundColor, filter}) => [backgroundColor, filter])"
        "(getComputedStyle(document.querySelector('.card')))"
    )
    assert card == ["rgb(255, 255, 255)", "brightness(0.88)" if dark else "none"]
    opened.context.close()


@pytest.mark.parametrize("which", ["folder", "hostile"])
def test_no_table_is_cut_on_a4(browser: Any, which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    opened = Visit(
        browser, folder, color_scheme="dark", viewport={"width": PRINTABLE, "height": 1000}
    )
    opened.page.emulate_media(media="print", color_scheme="dark")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    wide = opened.page.evaluate(
        """[...document.querySelectorAll('table, img, dl, td, th')].filter(one => {
             const box = one.getBoundingClientRect();
             const spills = one.tagName !== "IMG" && one.scrollWidth > one.clientWidth + 1;
             return box.width && (box.right > innerWidth + 1 || spills);
           }).map(one => one.outerHTML.slice(0, 200))"""
    )
    assert wide == []
    assert (
        opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert opened.page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    opened.context.close()


def test_the_pdf(browser: Any, folder: Path, tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf", reason="nox -s browser installs pypdf")
    opened = Visit(browser, folder)
    figures = opened.page.locator("figure").count()
    assert opened.page.locator("img").count() == figures
    assert opened.page.locator("details table").count() == 0  # tables wait until they are opened
    opened.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True, print_background=True)
    drawn = opened.page.evaluate(
        "[...document.images].filter(one => one.complete && one.naturalWidth).length"
    )
    assert drawn == figures
    opened.context.close()
    pdf = pypdf.PdfReader(tmp_path / "report.pdf")
    for sheet in pdf.pages:
        assert (
            round(float(sheet.mediabox.width)),
            round(float(sheet.mediabox.height)),
        ) == A4_POINTS
    texts = ["".join(sheet.extract_text().split()) for sheet in pdf.pages]
    whole = "".join(texts)
    page = read(folder / "report.html")
    for table in page.find("table"):
        for row in table.find("tr"):
            assert "".join((row.find("th", "td")[0].text).split()) in whole
    ids = [
        str(row.attributes["data-id"]) for row in page.find("tr") if row.attributes.get("data-id")
    ]
    assert all(cell_id in whole for cell_id in ids)
    (folded,) = [
        table for table in page.find("table") if table.find("caption", id="speed-table-caption")
    ]
    assert (
        len(folded.find("tr")) > 20 and "fastest" in whole
    )  # its details are closed on the screen
    on = [number for number, text in enumerate(texts) if any(cell_id in text for cell_id in ids)]
    assert all("correct?" in texts[number] for number in on), "the header is repeated"
