"""Plots as parts of a page: safe, with ids of their own, and legible on dark paper."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.style
import pytest
from matplotlib.figure import Figure

from bench.report import sheet, style
from bench.report.inline import DARK_PAPER, SVG, contrast, in_the_dark, picture, variable
from bench.report.sheet import FigureWords
from bench.report.style import FRAMEWORK_COLOURS, FURTHER_COLOURS

HOSTILE = "</desc><script>alert(1)</script> $x$ --> & <img>"


@pytest.fixture(scope="module")
def svg(tmp_path_factory: pytest.TempPathFactory) -> str:
    with matplotlib.style.context(list(style.BASE)):
        figure = Figure(figsize=(3, 2))
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="#882255", marker="o")
        axes.barh([0.5], [0.7], hatch="///", facecolor="#F2A65A", edgecolor="#855b31")
        axes.set_title(style.safe(HOSTILE))
        stem = tmp_path_factory.mktemp("svg") / "plot"
        sheet.save(figure, stem, FigureWords(HOSTILE, "below", "at the foot"))
    return stem.with_suffix(".svg").read_text(encoding="utf-8")


def test_only_pictures_are_left(svg: str) -> None:
    root = ElementTree.fromstring(picture(svg, "a").markup)
    allowed = {"svg", "title", "desc", "defs", "g", "path", "use", "clipPath", "rect", "pattern"}
    assert {element.tag.removeprefix(f"{{{SVG}}}") for element in root.iter()} <= allowed
    assert not re.search(r"<!--|<\?|DOCTYPE|metadata|<script|<img", picture(svg, "a").markup)


def test_it_says_what_it_shows(svg: str) -> None:
    root = ElementTree.fromstring(picture(svg, "a").markup)
    label, details = (root.attrib["aria-labelledby"]).split()
    words = {element.attrib["id"]: element.text for element in root if "id" in element.attrib}
    assert words[label] == picture(svg, "a").title == style.clean(HOSTILE)
    assert words[details] == "below at the foot"


def test_two_plots_share_no_id(svg: str) -> None:
    found = [set(re.findall(r' id="([^"]+)"', picture(svg, stem).markup)) for stem in ("a", "b")]
    assert found[0] and not found[0] & found[1]
    for stem, ids in zip(("a", "b"), found, strict=True):
        pointed = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', picture(svg, stem).markup)
        assert pointed and {one or other for one, other in pointed} <= ids


def test_every_colour_is_a_property(svg: str) -> None:
    found = picture(svg, "a")
    assert not re.search(r"#[0-9a-fA-F]{6}\b", found.markup)
    assert {"#882255", "#f2a65a", "#ffffff", "#000000"} <= found.colours
    used = set(re.findall(r"var\((--c[0-9a-f]{6})\)", found.markup))
    assert used == {variable(colour) for colour in found.colours}


def test_coordinates_are_shorter_and_the_same(svg: str) -> None:
    found = picture(svg, "a").markup
    assert len(found) < 0.9 * len(svg)
    numbers = [
        [float(n) for n in re.findall(r"-?\d+\.?\d*", re.search(r'<path d="(M [^"]+)"[^>]*c882255', text)[1])]  # type: ignore[index]
        for text in (found, svg.replace("\n", " ").replace("#882255", "c882255"))
    ]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.006)


@pytest.mark.parametrize("colour", [*FRAMEWORK_COLOURS.values(), *FURTHER_COLOURS, style.GREY, "#000000"])
def test_ink_can_be_read_in_the_dark(colour: str) -> None:
    assert contrast(in_the_dark(colour.lower()), DARK_PAPER) >= 4.5


@pytest.mark.parametrize("colour", ["#e4e4e4", "#f3dfb4", "#d9e8f2", "#f0f0f0"])
def test_areas_stay_behind_the_ink(colour: str) -> None:
    assert in_the_dark("#ffffff") == DARK_PAPER
    assert 1.05 < contrast(in_the_dark(colour), DARK_PAPER) < 3
    assert contrast(in_the_dark("#000000"), in_the_dark(colour)) > 4.5


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_committed_plots_can_be_put_into_a_page() -> None:
    for path in sorted((Path(__file__).parents[2] / "plots" / "cpu-reference").glob("*.svg")):
        found = picture(path.read_text(encoding="utf-8"), path.stem)
        ElementTree.fromstring(found.markup)
        assert found.title and len(found.markup) < path.stat().st_size
