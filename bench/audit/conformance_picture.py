"""The conformance table as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from bench.audit.conformance import KEY, BackendGroup, Observation, by_backend, groups, parts, scenarios, summary
from bench.report import style
from bench.report.canvas import FigureWords, new_figure
from bench.report.style import Key

BORDER: dict[str, Any] = {"edgecolor": "#888888", "linewidth": 0.5}
COLOURS = {"detail": "#ffffff", "note": "#c6dbef", "wrong": "#f4a582"}
"""By level; they differ in brightness too, and black text can be read on each."""
LEVELS = {
    "detail": "right",
    "note": "note: right for some batch, perhaps not the one that was meant",
    "wrong": "wrong (bold)",
}
CELL_SIZES = (6.5, 6.0, 5.5, 5.0, 4.5, 4.0)
"""Font sizes of the cells in points: the largest at which no word is cut and the table fits, or else the last."""
TABLE_HEIGHT = 6.9
MAX_GROUPS = 18
"""Columns; further groups are named in the notes."""


@dataclass
class TextCell:
    """A text of the table; its level is ``title`` above a part, and empty for headings and for what was not run."""

    text: str
    level: str = ""

    @property
    def weight(self) -> str:
        """Bold if it is wrong, so that the level is not told by colour alone."""
        return "bold" if self.level in {"wrong", "title"} else "normal"

    def lines(self, width: float, size: float) -> list[str]:
        """The text in lines of that width in inches; a line may end after a hyphen."""
        broken = style.wrap(self.text.replace("-", "- "), width, size, self.weight)
        return [line.replace("- ", "-") for line in broken]

    def is_cut(self, width: float, size: float) -> bool:
        """Whether a word is wider than that."""
        words = self.text.replace("-", "- ").split()
        return any(style.text_width(word, size, self.weight) > width for word in words)


def conformance_figure(
    observations: Sequence[Observation], family: str, *, footer: str = ""
) -> tuple[Figure, FigureWords]:
    """Scenarios by groups of backends of one family, with the words around them."""
    every = groups(observations)
    found = every[:MAX_GROUPS]
    notes = [f"{group.name}: {', '.join(group.backends)}" for group in found if len(group.backends) > 1]
    notes += [f"not drawn: {', '.join(group.backends)}" for group in every[MAX_GROUPS:]]
    title = f"What each backend does in each scenario: {family}"
    words = FigureWords(style.clean(title), _counts(observations), footer, [*notes, KEY])
    with matplotlib.style.context(list(style.BASE)):
        rows = _rows(observations, found)
        first = min(1.3, max(style.text_width(row[0].text, CELL_SIZES[0]) for row in rows if len(row) > 1) + 0.08)
        other = (style.WIDTH - 2 * style.MARGIN - 0.1 - first) / len(found)
        widths = [first, *[other] * len(found)]
        size = next((size for size in CELL_SIZES if _fits(rows, widths, size)), CELL_SIZES[-1])
        levels = {seen["level"] for seen in observations}
        keys: list[Key] = [(Patch(facecolor=COLOURS[x], **BORDER), LEVELS[x]) for x in LEVELS if x in levels]
        inches = sum(_heights(rows, widths, size))
        figure = new_figure(words, keys, inches)
        _draw(figure.add_subplot(), rows, widths, size)
    return figure, words


def _counts(observations: Sequence[Observation]) -> str:
    levels, names = [by_backend(seen)["level"] for seen in observations], ("right", "notes", "wrong")
    counted = ", ".join(f"{levels.count(level)} {name}" for level, name in zip(LEVELS, names, strict=True))
    backends = len({seen["backend"] for seen in observations})
    return f"{len(scenarios(observations))} scenarios x {backends} backends: {counted}"


def _rows(observations: Sequence[Observation], found: Sequence[BackendGroup]) -> list[list[TextCell]]:
    """The heading of groups, then each part of the table: its title, alone in its row, and a row per scenario."""
    rows = [[TextCell(""), *(TextCell(style.clean(group.name)) for group in found)]]
    for title, part in parts(observations, found):
        rows.append([TextCell(style.clean(title), "title")])
        for name, row in part.items():
            told = [TextCell(style.clean(" ".join(summary(o, 0))), o["level"]) if o else TextCell("") for o in row]
            rows.append([TextCell(style.clean(name)), *told])
    return rows


def _cells(row: Sequence[TextCell], widths: Sequence[float]) -> list[tuple[TextCell, float]]:
    """The cells of a row with their widths; the title of a part has the whole row."""
    return list(zip(row, widths if len(row) > 1 else [sum(widths)], strict=True))


def _heights(rows: Sequence[Sequence[TextCell]], widths: Sequence[float], size: float) -> list[float]:
    return [
        max(len(cell.lines(width - 0.07, size)) for cell, width in _cells(row, widths)) * size * 1.2 / 72 + 0.08
        for row in rows
    ]


def _fits(rows: Sequence[Sequence[TextCell]], widths: Sequence[float], size: float) -> bool:
    cut = any(cell.is_cut(width - 0.07, size) for row in rows for cell, width in _cells(row, widths))
    return not cut and sum(_heights(rows, widths, size)) <= TABLE_HEIGHT


def _draw(axes: Axes, rows: Sequence[Sequence[TextCell]], widths: Sequence[float], size: float) -> None:
    heights = _heights(rows, widths, size)
    axes.set(xlim=(0, sum(widths) + 0.01), ylim=(sum(heights) + 0.01, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    for row, (cells, height) in enumerate(zip(rows, heights, strict=True)):
        top = sum(heights[:row])
        for column, (cell, width) in enumerate(_cells(cells, widths)):
            left = sum(widths[:column])
            if cell.level in COLOURS:
                axes.add_patch(Rectangle((left, top), width, height, facecolor=COLOURS[cell.level], **BORDER))
            axes.text(
                left + width / 2 if column else left,
                top + height / 2,
                "\n".join(line.replace("$", r"\$") for line in cell.lines(width - 0.07, size)),
                size=size,
                weight=cell.weight,
                ha="center" if column else "left",
                va="center",
                linespacing=1.05,
            )
