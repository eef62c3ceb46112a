"""Plots as parts of a page: SVG without a prolog, with ids of its own and alternative text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
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
    for element in root.iter():
        _rename(element, names)
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
    }
    for place, (tag, identity, words) in enumerate((("title", label, title), ("desc", details, about))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": identity})
        element.text = words
        root.insert(place, element)
    return Picture(stem, title, ElementTree.tostring(root, encoding="unicode"))


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
