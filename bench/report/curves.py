"""Loss curves, and how far each lies from the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.cell import REFERENCES, Status
from bench.report import style
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    LOSS_FLOOR,
    REFERENCE_KEYS,
    Drawing,
    Panel,
    Run,
    paged,
    reference_keys,
    title_lines,
    varying_columns,
)
from bench.report.style import GREY, REFERENCE_COLOUR, TINY, Key
from bench.words import plural

SHORT = 0.25
"""Share of the longest curve's steps below which a curve is not drawn beside it: timed cells have few."""


def draw_loss_curves(run: Run) -> list[Drawing]:
    """Loss against step, and how far it is from the reference's."""
    own = run.trials[[*CSV_COLUMNS, "entropy_floor", "max_loss_deviation"]]
    keyed = own.merge(run.losses.sort_values("step"), on=["cell_id", "repeat"])
    if keyed.empty:
        return []
    keyed = keyed[keyed["repeat"] == keyed.groupby("cell_id")["repeat"].transform("min")]
    groups = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"]
    keyed = keyed[keyed["accumulate"] == groups.transform("max")]
    truth = keyed[keyed["backend"].isin(REFERENCES)].sort_values("backend", kind="stable")  # single processes first
    truth = truth.drop_duplicates([*REFERENCE_KEYS, "step"])
    truth = truth[[*REFERENCE_KEYS, "step", "loss"]].rename(columns={"loss": "reference_loss"})
    keyed = keyed.merge(truth, on=[*REFERENCE_KEYS, "step"], how="left")
    keyed["deviation"] = (keyed["loss"] - keyed["reference_loss"]).abs()
    panels, left_out = _longest(run.panels(keyed, CONTEXT, ["loss"]))
    largest = sorted({n for panel in panels for n in panel.trials["accumulate"]})
    title = "Loss of every backend at its largest N" + (f" (N = {', '.join(map(str, largest))})" if largest else "")
    drawings = []
    # Ways to train (optimizer, clipping) are to be compared at a glance: four of them share a page, two in a row.
    ways = varying_columns(run.others, ["optimizer", "clip_norm"])
    plotted = ["step", "loss", "reference_loss", "deviation", "entropy_floor", "max_loss_deviation"]
    data = keyed[[*CSV_COLUMNS, *plotted]]
    for page in paged("loss_curves", panels, 4 if ways else 3):
        panels = page.panels
        shown = run.shown(panels)
        keys = _keys(run, keyed, shown, several=len(largest) > 1)
        keys += reference_keys(panels, "loss")
        known = any(p.trials["reference_loss"].notna().any() and len(p.reference) for p in panels)
        words = run.words(title)
        unknown = [] if known else ["the reference has no losses, so no deviation from it is drawn"]
        words.notes[:] = [*page.left_out, *left_out, *words.notes, *unknown]
        columns = 2 if len(panels) == 4 else len(panels)
        lines = math.ceil(len(panels) / columns)
        height = (4.6 if lines == 1 else 3.2 * lines) if known else 3.2 * lines
        least = (3.2 if lines == 1 else 2.9 * lines) if known else 2.0 * lines
        figure = style.sheet(words, [keys, run.signs(keyed)], height, least)
        grid = figure.subplots((1 + known) * lines, columns, squeeze=False, sharex=True)
        for i, panel in enumerate(panels):
            line, column = (1 + known) * (i // columns), i % columns
            above, below = grid[line, column], grid[line + known, column]
            above.sharey(grid[0, 0])
            above.set_title(title_lines(panel.title, (style.WIDTH - 0.9) / columns))
            _losses(run, above, panel, reference_on_top=bool(ways))
            if known:
                below.sharey(grid[1, 0])
                below.set_yscale("log")
                _curves(run, below, panel, "deviation")
            if i + columns >= len(panels):
                below.set_xlabel("optimizer step")
                below.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if column == 0:
                above.set_ylabel("loss (nats/token)")
                if known:
                    below.set_ylabel(_deviation_label(narrow=lines > 1))
        drawings.append(Drawing(page.stem, figure, data, words))
    return drawings


def _longest(panels: list[Panel]) -> tuple[list[Panel], list[str]]:
    """The panels whose curves are not much shorter than the longest, and what a figure says of the others."""
    steps = [int(panel.trials["step"].max()) + 1 for panel in panels]
    most = max(steps, default=0)
    kept = [panel for panel, length in zip(panels, steps, strict=True) if length >= SHORT * most]
    others = sum(panel.trials["cell_id"].nunique() for panel in panels if panel not in kept)
    if not others:
        return kept, []
    return kept, [
        f"The curves of {plural(others, 'cell')} are left out of this picture: they have less than {100 * SHORT:.0f} % "
        f"of the {plural(most, 'step')} of the longest. All are in the CSV beside it."
    ]


def _keys(run: Run, keyed: pd.DataFrame, shown: Sequence[str], *, several: bool) -> list[Key]:
    """The legend's entries of backends, with the N of each if there are several."""
    keys = []
    for name in shown:
        ns = keyed[keyed["backend"] == name]["accumulate"].sort_values().unique()
        label = f"{name}, N = {', '.join(map(str, ns))}" if several else name
        keys.append(style.backend_key(name, run.looks[name], line=True, label=label))
    return keys


def _deviation_label(*, narrow: bool) -> str:
    unit, least = "(nats/token;", f"0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})"
    return f"|loss - reference's|\n{unit}\n{least}" if narrow else f"|loss - reference loss|\n{unit} {least}"


def _losses(run: Run, axes: Axes, panel: Panel, *, reference_on_top: bool) -> None:
    """The losses of a panel, their reference and their floor."""
    longest = panel.reference.drop_duplicates("step").sort_values("step")
    steps, losses = (longest[column].astype(float) for column in ("step", "loss"))
    if len(panel.reference) and not reference_on_top:
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle="--")
    _curves(run, axes, panel, "loss")
    if len(panel.reference) and reference_on_top:
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle=(0, (2, 6)))
    for floor in panel.trials["entropy_floor"].dropna()[:1]:
        axes.axhline(floor, color=GREY, linestyle=":")
        across = axes.get_yaxis_transform()
        text = f"entropy floor {floor:.3f}"
        axes.annotate(text, (0.02, floor), (0, -2), xycoords=across, textcoords="offset points", va="top", size=TINY,
                      color=GREY)  # fmt: skip
        axes.margins(y=0.12)


def _curves(run: Run, axes: Axes, panel: Panel, value: str) -> None:
    """A line per cell."""
    for i, ((backend, _), rows) in enumerate(panel.trials.groupby(["backend", "cell_id"], sort=False)):
        look, valid = run.looks[str(backend)], bool((rows["status"] == Status.OK).all())
        x, y = rows["step"].astype(float), rows[value].astype(float)
        y = y.clip(lower=LOSS_FLOOR) if value == "deviation" else y
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), panel.trials["backend"].nunique()))
        style.mark(axes, x, y, look, valid=valid, size=4.5, markevery=(i % every, every))
