"""Whether a figure can be read: every text is within it, none lies on another, and no leader runs through one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from bench.report.canvas import LEADER
from bench.report.style import BASE, DPI, MAX_HEIGHT


def texts(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Every text that is drawn, and its box."""
    found = list(figure.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        found += [child for child in axes.get_children() if isinstance(child, Text)]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [axis.label]
            found += [
                t.label1
                for t in axis.get_major_ticks()
                if low <= t.get_loc() <= high and t.label1.get_visible()
            ]
    for text in found:
        if text.get_visible() and text.get_text().strip():
            yield text.get_text(), Text.get_window_extent(text)


def leaders(figure: Figure) -> Iterator[np.ndarray]:
    """Points in pixels along each line that leads from a name to its point."""
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_linewidth() == LEADER:
                tail, head = axes.transData.transform(line.get_xydata())
                yield tail + np.linspace(0, 1, 201)[:, None] * (head - tail)


def words(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    return [text for text, _ in texts(figure)]


def assert_legible(figure: Figure) -> None:
    """Fails for a text that leaves the figure, lies on another or is struck through, and for a figure that is too high.

    At the resolution of the file, where glyphs may be wider than at the figure's own.
    """
    figure.set_dpi(DPI)
    with matplotlib.style.context(list(BASE)):
        figure.draw_without_rendering()
    page = figure.bbox
    assert page.height / DPI <= MAX_HEIGHT + 0.01
    boxes = list(texts(figure))
    for text, box in boxes:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
        assert inside, text
    for (text, first), (other_text, second) in itertools.combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        tall = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert wide < 1 or tall < 1, (text, other_text)
    for points in leaders(figure):
        for text, box in boxes:
            inside = (points > box.p0 + 1) & (points < box.p1 - 1)
            assert not inside.all(axis=1).any(), f"a leader is on {text}"
