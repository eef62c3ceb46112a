"""``python -m studies.site [FOLDER]``: README, docs/ and the reports of committed runs as pages that can be searched.

The pages lie in the site as the files lie in the checkout, so that their relative links hold. mkdocs-material renders
them; it is in the dependency group ``site``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from studies import ROOT

HOME = "index.md"
"""What README is called in the site."""
AROUND = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "Containerfile",
    "CITATION.cff",
)
"""Pages and files of the checkout's root that pages link to."""
LANDING = {
    "Home": HOME,
    "Audit your training": "docs/audit.md",
    "Known-bad versions": "docs/known-bad.md",
    "Claims": "docs/claims.md",
}
"""The first tabs: what visitors come for."""
GUIDE = ("commands", "ci", "lint", "matrix", "results", "gpu", "hosts", "offline", "architecture")
"""Pages of docs/ on how to use it; all others are on what was found and how."""
BUILT = {"pages", "html", "mkdocs.yml"}
"""What the folder of a site holds: pages as they are staged, the site, and its configuration."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
ADDRESS = re.compile(r"[a-z]+:", re.IGNORECASE)
STYLE = """[data-md-color-scheme="slate"] .md-content img { background: #fff; padding: .4rem; border-radius: .2rem }
.md-typeset table:not([class]) { font-size: .6rem }
.md-typeset__table { min-width: 100% }
"""
"""Figures are drawn on white: a dark page shows them on a card. Tables are wide."""


def main(argv: Sequence[str] | None = None) -> int:
    """Stage the pages and build the site; the exit status is mkdocs's."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.site", description="Build the site from the committed pages."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=ROOT / ".nox" / "site",
        help="a new folder, or one with a site, which is emptied (default: %(default)s)",
    )
    out = parser.parse_args(argv).folder.resolve()
    if out.exists() and not _is_site(out):
        raise SystemExit(f"{out}: is no folder with a site, and is not emptied; name a new one")
    config = stage(out)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # of the theme, on its successor
    status = subprocess.run(command, check=False, env=os.environ | quiet).returncode
    if status == 0:
        html = out / "html"
        print(
            f"written: {html}; to read and search it: python -m http.server -d {html} -b 127.0.0.1"
        )
    return status


def _is_site(folder: Path) -> bool:
    """Whether it is empty, or holds nothing but what is built here."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= BUILT


def stage(out: Path) -> Path:
    """Copy all pages, and what they link to, into a folder that is emptied first; where its configuration is."""
    pages = out / "pages"
    shutil.rmtree(out, ignore_errors=True)
    pages.mkdir(parents=True)
    runs = list(reports())
    for page in (Path("README.md"), *documents(), *map(Path, AROUND)):
        _copy(page, pages)
    for report in runs:
        text = (ROOT / report).read_text(encoding="utf-8") + figures(report.parent)
        title, _, body = text.partition("\n")
        _write(pages / report, f"# {title.lstrip('# ')}\n{body}")
    while missing := {linked for linked in links(pages) if not (pages / linked).exists()}:
        for linked in sorted(missing):
            _copy(linked, pages)
    linked_pages = {page.relative_to(pages) for page in (pages / "results").rglob("*.md")}
    _write(pages / "site.css", STYLE)
    config = out / "mkdocs.yml"
    _write(
        config, yaml.safe_dump(configuration(runs, sorted(linked_pages - {*runs})), sort_keys=False)
    )
    return config


def documents() -> list[Path]:
    """All pages of docs/."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))


def reports() -> Iterator[Path]:
    """The reports of the committed runs, in Markdown."""
    for path in sorted((ROOT / "results").rglob("report.md")):
        report = path.relative_to(ROOT)
        if (ROOT / "plots" / report.parent.relative_to("results")).is_dir() or _is_kept(report):
            yield report


def _is_kept(report: Path) -> bool:
    """Whether a run without committed plots is one of the project's, not a reader's own."""
    return report.parts[1].startswith(("h100", "links"))


def name_of(run: Path) -> str:
    return "/".join(run.parts[1:])


def figures(run: Path) -> str:
    """A section with the plots of a run, each with its data, in Markdown; empty if none are committed."""
    folder = ROOT / "plots" / run.relative_to("results")
    lines: list[str] = []
    up = "../" * len(run.parts)
    for picture in sorted(folder.glob("*.png")):
        place = f"{up}{picture.relative_to(ROOT)}"
        title = picture.stem.replace("_", " ")
        lines += ["", f"![{title}]({place})", ""]
        data = picture.with_suffix(".csv")
        if data.exists():
            lines.append(f"{title}: [its data]({up}{data.relative_to(ROOT)})")
    if not lines:
        return ""
    return "\n".join(["", "## Figures", *lines, ""])


def links(pages: Path) -> set[Path]:
    """All files that staged pages link to, relative to the checkout. Raises SystemExit if one is not there."""
    found: set[Path] = set()
    for page in sorted(pages.rglob("*.md")):
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            if ADDRESS.match(link):
                continue
            target = (ROOT / page.relative_to(pages).parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                found.add(target.relative_to(ROOT))
            elif not (page.parent / link).exists():
                raise SystemExit(f"{page.relative_to(pages)}: links to {link}, which is no file")
    return found


def configuration(runs: Sequence[Path], tables: Sequence[Path]) -> dict[str, object]:
    """mkdocs.yml: search, light and dark, and no request to another host."""
    used = [*(f"docs/{name}.md" for name in GUIDE), *LANDING.values()]
    other = [str(page) for page in documents() if str(page) not in used]
    found = [page for page in other if "/upstream/" not in page]
    upstream = [page for page in other if "/upstream/" in page]
    nav: list[dict[str, object]] = [{name: page} for name, page in LANDING.items()]
    nav += [
        {
            "Runs": [
                *({name_of(report.parent): str(report)} for report in runs),
                *({table.stem: str(table)} for table in tables),
            ]
        },
        {"Guide": [f"docs/{name}.md" for name in GUIDE]},
        {"Findings and method": [*found, {"Reports to file upstream": upstream}]},
        {"Project": ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]},
    ]
    palette = [
        {
            "media": f"(prefers-color-scheme: {scheme})",
            "scheme": colours,
            "toggle": {"icon": "material/brightness-6", "name": f"Switch to {other_scheme} mode"},
        }
        for scheme, colours, other_scheme in (
            ("light", "default", "dark"),
            ("dark", "slate", "light"),
        )
    ]
    return {
        "site_name": "accumulation-bench",
        "docs_dir": "pages",
        "site_dir": "html",
        "use_directory_urls": False,
        "exclude_docs": "!.github/\n",
        "theme": {
            "name": "material",
            "font": False,
            "palette": palette,
            "features": ["navigation.tabs", "navigation.top", "search.highlight", "toc.follow"],
        },
        "plugins": ["search"],
        "extra_css": ["site.css"],
        "markdown_extensions": [
            "tables",
            "admonition",
            "pymdownx.superfences",
            {"toc": {"permalink": True}},
        ],
        "validation": {"nav": {"omitted_files": "info"}, "links": {"anchors": "warn"}},
        "nav": nav,
    }


def _copy(path: Path, pages: Path) -> None:
    """Copy a file of the checkout to its place; README becomes the home page, and links to it follow."""
    if path.suffix != ".md":
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, pages / path)
        return
    text = (ROOT / path).read_text(encoding="utf-8")
    for up in ("", "../"):
        text = text.replace(f"]({up}README.md", f"]({up}{HOME}")
    _write(pages / (HOME if path == Path("README.md") else path), text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
