"""What each backend did in each scenario, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from bench.audit.conformance import (
    CELL_SIZES,
    COLOURS,
    KEY,
    LEVELS,
    MAX_GROUPS,
    TABLE_HEIGHT,
    Group,
    Observation,
    groups,
    scenarios,
    table,
    telling,
)
from bench.report import sheet, style
from bench.report.panels import Drawing
from bench.report.sheet import FigureWords
from bench.report.style import Key, Ruler


def draw(observations: Sequence[Observation], folder: Path, *, footer: str = "") -> Path | None:
    """Write ``conformance`` as PNG and SVG into the folder; returns the PNG's path, None if there is nothing."""
    drawing = picture(observations, footer=footer)
    if drawing is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(list(style.BASE)):
        return sheet.save(drawing.figure, folder / drawing.stem, drawing.words)[0]


def picture(observations: Sequence[Observation], *, footer: str = "") -> Drawing | None:
    """The figure of ``draw``, not yet saved."""
    if not observations:
        return None
    every = groups(observations)
    found, names = every[:MAX_GROUPS], list(scenarios(observations))
    notes = [f"{group.name}: {', '.join(group.backends)}" for group in found if len(group.backends) > 1]
    notes += [f"not drawn: {', '.join(group.backends)}" for group in every[MAX_GROUPS:]]
    notes.append(KEY)
    words = FigureWords("What each backend does in each scenario", _counts(observations), footer, notes)
    with matplotlib.style.context(list(style.BASE)):
        grid = _layout(names, found)
        keys: list[Key] = [
            (Patch(facecolor=COLOURS[level], edgecolor="#888888", linewidth=0.5), label)
            for level, label in LEVELS.items()
            if any(seen["level"] == level for seen in observations)
        ]
        inches = sum(grid.heights)
        figure = sheet.sheet(words, [keys], inches, inches)
        _draw_cells(figure.add_subplot(), grid)
    return Drawing("conformance", figure, table(observations), words)


def _counts(observations: Sequence[Observation]) -> str:
    """How many of all observations have which level."""
    levels, names = [seen["level"] for seen in observations], ("right", "notes", "wrong")
    counted = ", ".join(f"{levels.count(level)} {word}" for level, word in zip(LEVELS, names, strict=True))
    backends = len({seen["backend"] for seen in observations})
    return f"{len(scenarios(observations))} scenarios x {backends} backends: {counted}"


@dataclass
class _Grid:
    """A table in lines of text that fit: the first row are the groups, the first column the scenarios."""

    cells: list[list[tuple[list[str], str]]]
    """Lines and level; an empty level for headers and for what was not run."""
    size: float
    widths: list[float]
    heights: list[float]


def _layout(names: Sequence[str], found: Sequence[Group]) -> _Grid:
    """The table at the largest font at which no word is cut and all rows fit; at the smallest if there is none."""
    rows = [[("", ""), *((style.clean(group.name), "") for group in found)]]
    for name in names:
        seen = [group.cells.get(name) for group in found]
        texts = [("", "") if one is None else (style.clean(" ".join(telling(one, 0))), one["level"]) for one in seen]
        rows.append([(style.clean(name), ""), *texts])
    grids = (_at_size(rows, size) for size in CELL_SIZES)
    return next((grid for grid, fits in grids if fits), _at_size(rows, CELL_SIZES[-1])[0])


def _at_size(rows: Sequence[Sequence[tuple[str, str]]], size: float) -> tuple[_Grid, bool]:
    """Texts and levels laid out at this font size, and whether that fits."""
    ruler = Ruler(FigureCanvasAgg(Figure(figsize=(1, 1))))
    full = style.WIDTH - 2 * style.MARGIN - 0.1
    first = min(1.3, max(ruler.width(row[0][0], size) for row in rows) + 0.08)
    widths = [first, *[(full - first) / (len(rows[0]) - 1)] * (len(rows[0]) - 1)]
    cells: list[list[tuple[list[str], str]]] = []
    longest = 0.0
    for row in rows:
        cells.append([])
        for (text, level), width in zip(row, widths, strict=True):
            weight = "bold" if level == "wrong" else "normal"
            words = _breakable(text)
            cells[-1].append((ruler.wrap(words, width - 0.07, size, weight), level))
            longest = max([longest, *(ruler.width(word, size, weight) - width + 0.07 for word in words.split())])
    heights = [max(len(lines) for lines, _ in row) * size * 1.2 / 72 + 0.08 for row in cells]
    return _Grid(cells, size, widths, heights), longest <= 0 and sum(heights) <= TABLE_HEIGHT


def _breakable(text: str) -> str:
    """A hyphen may end a line."""
    return text.replace("-", "- ")


def _draw_cells(axes: Axes, grid: _Grid) -> None:
    axes.set_xlim(0, sum(grid.widths) + 0.01)
    axes.set_ylim(sum(grid.heights) + 0.01, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    top = 0.0
    for row, height in zip(grid.cells, grid.heights, strict=True):
        left = 0.0
        for (lines, level), width in zip(row, grid.widths, strict=True):
            if level:
                box = Rectangle(
                    (left, top), width, height, facecolor=COLOURS[level], edgecolor="#888888", linewidth=0.5
                )
                axes.add_patch(box)
            heading = left == 0
            axes.text(
                left + (0 if heading else width / 2),
                top + height / 2,
                "\n".join(line.replace("- ", "-").replace("$", r"\$") for line in lines),
                size=grid.size,
                weight="bold" if level == "wrong" else "normal",
                ha="left" if heading else "center",
                va="center",
                linespacing=1.05,
            )
            left += width
        top += height
