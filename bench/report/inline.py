"""Plots as parts of a page: SVG without a prolog, with ids of its own, alternative text, and colours for dark pages."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from xml.etree import ElementTree

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
PAPER, INK = "#ffffff", "#000000"
DARK_PAPER = "#15171c"
"""Of a page that is dark; what is white on paper has this colour there."""
PALE = 0.8
"""Lightness from which a colour is that of an area behind something, such as a band or a grid, and no ink."""
CONTRAST = 4.5
"""Of ink on dark paper, at least: WCAG 2.2, success criterion 1.4.3."""
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
NUMBER = re.compile(r"-?\d+\.\d{3,}")
REFERENCE = re.compile(r"url\(#([^)]+)\)")
DECIMALS = 2
"""Of coordinates, in points: finer than any printer."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot, ready to be put into a page."""

    stem: str
    title: str
    markup: str
    """An ``svg`` element that is safe: all that came from outside is escaped."""
    colours: frozenset[str]
    """All that it is drawn with, as ``#rrggbb``: the page must define ``variable`` for each."""


def variable(colour: str) -> str:
    """The name of the custom property that stands for a colour."""
    return f"--c{colour.removeprefix('#')}"


def picture(svg: str, stem: str) -> Picture:
    """The plot in an SVG file of ``sheet.save``; ids begin with its stem, so that no two of a page are equal."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(svg)  # comments, which hold the words of the plot, and the DOCTYPE go
    title, about = (_text(root, name) for name in ("title", "description"))
    for name in ("metadata", "title"):
        for element in root.findall(f"{{{SVG}}}{name}"):
            root.remove(element)
    for parent in list(root.iter()):
        for sheet in parent.findall(f"{{{SVG}}}style"):
            parent.remove(sheet)  # it would be the whole page's
    names = {name: f"{stem}-{i}" for i, name in enumerate(dict.fromkeys(_references(root)))}
    colours: set[str] = {INK}
    for element in root.iter():
        _rename(element, names)
        _recolour(element, colours)
        _shorten(element)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    label, details = f"{stem}-title", f"{stem}-description"
    root.attrib |= {
        "class": "plot",
        "role": "img",
        "aria-labelledby": f"{label} {details}",
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "style": f"fill: var({variable(INK)})",
    }
    for place, (tag, identity, words) in enumerate((("title", label, title), ("desc", details, about))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": identity})
        element.text = words
        root.insert(place, element)
    return Picture(stem, title, ElementTree.tostring(root, encoding="unicode"), frozenset(colours))


def _text(root: ElementTree.Element, name: str) -> str:
    found = root.find(f".//{DUBLIN_CORE}{name}")
    return "" if found is None or found.text is None else found.text


def _references(root: ElementTree.Element) -> list[str]:
    """The ids that something in the plot points at."""
    found = []
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == f"{{{XLINK}}}href":
                found.append(value.removeprefix("#"))
            else:
                found += REFERENCE.findall(value)
    return found


def _rename(element: ElementTree.Element, names: Mapping[str, str]) -> None:
    """Ids that are pointed at get their new names, the others go; ``xlink:href`` becomes ``href``."""
    identity = element.attrib.pop("id", None)
    if identity is not None and identity in names:
        element.attrib["id"] = names[identity]
    target = element.attrib.pop(f"{{{XLINK}}}href", None)
    if target is not None:
        element.attrib["href"] = f"#{names[target.removeprefix('#')]}"
    for name, value in element.attrib.items():
        if "url(#" in value:
            element.attrib[name] = REFERENCE.sub(lambda found: f"url(#{names[found[1]]})", value)


def _recolour(element: ElementTree.Element, colours: set[str]) -> None:
    """Each colour becomes a custom property, which only ``style`` may hold."""
    for name in ("fill", "stroke"):
        value = element.attrib.get(name, "")
        if COLOUR.fullmatch(value):
            del element.attrib[name]
            before = element.attrib.get("style", "")
            element.attrib["style"] = f"{name}: {value}" + (f"; {before}" if before else "")
    before = element.attrib.get("style", "")
    if "#" in before:
        colours |= {found.lower() for found in COLOUR.findall(before)}
        element.attrib["style"] = COLOUR.sub(lambda found: f"var({variable(found[0].lower())})", before)


def _shorten(element: ElementTree.Element) -> None:
    """No digits that nobody sees, and no white space."""
    element.text, element.tail = (text if text and text.strip() else None for text in (element.text, element.tail))
    for name in ("d", "transform", "x", "y", "points"):
        value = element.attrib.get(name)
        # Of a scale, digits matter: glyphs are drawn in units of a font and scaled down.
        if value is not None and "scale(" not in value:
            element.attrib[name] = " ".join(NUMBER.sub(_shorter, value).split())


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.{DECIMALS}f}".rstrip("0").rstrip(".")


@cache
def in_the_dark(colour: str) -> str:
    """The colour that stands for one on a dark page: pale areas become dark ones, and ink light enough to be read."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*_channels(colour))
    paper = colorsys.rgb_to_hls(*_channels(DARK_PAPER))[1]
    if colour == PAPER:
        return DARK_PAPER
    if lightness > PALE:
        return _hex(hue, paper + 1.1 * (1 - lightness), 0.75 * saturation)
    if saturation < 0.1:
        lightness = min(0.9, 1 - lightness)
    while contrast(_hex(hue, lightness, saturation), DARK_PAPER) < CONTRAST and lightness < 0.98:
        lightness += 0.01
    return _hex(hue, lightness, saturation)


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21, as WCAG defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _channels(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))
