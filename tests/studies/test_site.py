"""The site: every page is there, every link leads somewhere, and a browser can search it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from studies import site
from tests.conftest import ROOT
from tests.report.test_browser import browser  # noqa: F401 - a fixture


def test_all_pages_are_staged_with_what_they_link_to(tmp_path: Path) -> None:
    """A link that leads nowhere is refused."""
    config = site.stage(tmp_path / "site")
    pages = tmp_path / "site" / "pages"
    staged = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= staged
    assert {"index.md", "results/cpu/report.md", "results/h100/report.md"} <= staged
    cpu = (pages / "results" / "cpu" / "report.md").read_text(encoding="utf-8")
    assert "(../../plots/cpu/step_time.png)" in cpu and "(../../plots/cpu/step_time.csv)" in cpu
    assert (pages / "plots" / "cpu" / "step_time.csv").exists()
    named = str(yaml.safe_load(config.read_text(encoding="utf-8"))["nav"])
    assert not [page for page in staged if page not in named]


def test_a_folder_that_holds_something_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is no folder with a site"):
        site.main([str(tmp_path)])
    assert (tmp_path / "mine.txt").read_text() == "mine"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: nox -s browser installs it")
    out = tmp_path_factory.mktemp("site") / "site"
    subprocess.run([sys.executable, "-m", "studies.site", str(out)], cwd=ROOT, check=True)
    handler = partial(Quiet, directory=str(out / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_searches_and_reads_it(
    browser: Any,  # noqa: F811
    address: str,
    width: int,
    scheme: str,
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    failed: list[str] = []
    asked: list[str] = []
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(f"{address}/index.html", wait_until="networkidle")
    colours = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert colours == ("slate" if scheme == "dark" else "default")
    if width < 960:
        page.click("label[for=__search] >> nth=0")
    else:
        page.click("input.md-search__input")
    page.keyboard.type("reset_iter_state", delay=20)
    page.wait_for_selector(".md-search-result__link", timeout=90_000)
    assert "reset_iter_state" in page.text_content(".md-search-result__list")
    for place in ("docs/known-bad.html", "docs/claims.html", "results/cpu/report.html"):
        page.goto(f"{address}/{place}")
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"{place} is wider than {width} pixels by {overflow}"
        pictures = page.evaluate(
            "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        )
        assert not pictures
    assert not failed
    assert all(url.startswith(address) for url in asked)
    page.close()
