"""Plots as parts of a page: safe, and with the words that they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib.style
import pytest
from matplotlib.figure import Figure

from bench.report import sheet, style
from bench.report.inline import SVG, picture
from bench.report.sheet import FigureWords

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
