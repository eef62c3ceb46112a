"""Whether a figure can be read: every text is within it, none lies on another, and no leader runs through one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from bench.report import style


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
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
    for text in found:
        if text.get_visible() and text.get_text().strip():
            yield text.get_text(), Text.get_window_extent(text)


def leaders(figure: Figure) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """The text of every label with a leader, and points along the leader in pixels."""
    for axes in figure.axes:
        for label in axes.texts:
            if isinstance(label, Annotation) and label.arrow_patch is not None and label.get_text().strip():
                line = label.arrow_patch
                (x0, y0), (x1, y1) = line.get_transform().transform(line.get_path().vertices)[[0, -1]]
                yield label.get_text(), [(x0 + (x1 - x0) * i / 200, y0 + (y1 - y0) * i / 200) for i in range(201)]


def words(figure: Figure) -> list[str]:
    """The texts without their boxes."""
    figure.draw_without_rendering()
    return [text for text, _ in texts(figure)]


def assert_legible(figure: Figure, most_height: float) -> None:
    """Fails for a text that leaves the figure, lies on another or is struck through, and for a figure that is too high.

    ``most_height`` is in inches. At the resolution of the file, where glyphs may be wider than at the figure's own.
    """
    figure.set_dpi(style.DPI)
    figure.draw_without_rendering()
    page = figure.bbox
    assert page.height / figure.dpi <= most_height + 0.01
    boxes = list(texts(figure))
    for text, box in boxes:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
        assert inside, text
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        tall = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert wide < 1 or tall < 1, (one, other)
    for whose, points in leaders(figure):
        for text, box in boxes:
            inner = Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1)
            assert text == whose or not any(inner.contains(x, y) for x, y in points), f"{whose}'s leader is on {text}"
