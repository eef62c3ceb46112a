"""Loss curves, and how far each lies from the reference."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.cell import REFERENCE, Status
from bench.report import style
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    LOSS_FLOOR,
    REFERENCE_KEY,
    REFERENCE_KEYS,
    Drawing,
    Panel,
    Run,
    paged,
)
from bench.report.style import GREY, REFERENCE_COLOUR, TINY, safe


def draw_loss_curves(run: Run) -> list[Drawing]:
    """Loss against step, and how far it is from the reference's."""
    keyed = run.trials.merge(run.losses.sort_values("step"), on=["cell_id", "repeat"])
    if keyed.empty:
        return []
    keyed = keyed[keyed["repeat"] == keyed.groupby("cell_id")["repeat"].transform("min")]
    groups = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"]
    keyed = keyed[keyed["accumulate"] == groups.transform("max")]
    truth = keyed[keyed["backend"] == REFERENCE].drop_duplicates([*REFERENCE_KEYS, "step"])
    truth = truth[[*REFERENCE_KEYS, "step", "loss"]].rename(columns={"loss": "reference_loss"})
    keyed = keyed.merge(truth, on=[*REFERENCE_KEYS, "step"], how="left")
    keyed["deviation"] = (keyed["loss"] - keyed["reference_loss"]).abs()
    largest = sorted(keyed[keyed["backend"] != REFERENCE]["accumulate"].unique())
    title = "Loss of every backend at its largest N" + (f" (N = {', '.join(map(str, largest))})" if largest else "")
    drawings = []
    for stem, panels in paged("loss_curves", run.panels(keyed, CONTEXT, ["loss"]), 3):
        shown = run.shown(panels)
        keys = []
        for name in shown:
            ns = keyed[keyed["backend"] == name]["accumulate"].sort_values().unique()
            label = f"{name}, N = {', '.join(map(str, ns))}" if len(largest) > 1 else name
            keys.append(style.backend_key(name, run.looks[name], line=True, label=label))
        keys += [REFERENCE_KEY] * any(len(p.reference) for p in panels)
        known = any(p.trials["reference_loss"].notna().any() and len(p.reference) for p in panels)
        words = run.words(title)
        if not known:
            words.notes.append("the reference has no losses, so no deviation from it is drawn")
        figure = style.sheet(words, [keys, run.signs(keyed)], 4.6 if known else 3.2, 3.2 if known else 2.0)
        grid = figure.subplots(1 + known, len(panels), squeeze=False, sharex=True, sharey="row")
        for i, panel in enumerate(panels):
            grid[0, i].set_title(safe(panel.title))
            grid[-1, i].set_xlabel("optimizer step")
            grid[-1, i].xaxis.set_major_locator(MaxNLocator(6, integer=True))
            _curves(run, grid[0, i], panel, "loss")
            for floor in panel.trials["entropy_floor"].dropna()[:1]:
                grid[0, i].axhline(floor, color=GREY, linestyle=":")
                across = grid[0, i].get_yaxis_transform()
                text = f"entropy floor {floor:.3f}"
                grid[0, i].annotate(text, (0.02, floor), (0, -2), xycoords=across, textcoords="offset points", va="top",
                                    size=TINY, color=GREY)  # fmt: skip
                grid[0, i].margins(y=0.12)
            if known:
                grid[1, i].set_yscale("log")
                _curves(run, grid[1, i], panel, "deviation")
        grid[0, 0].set_ylabel("loss (nats/token)")
        if known:
            grid[1, 0].set_ylabel(f"|loss - reference loss|\n(nats/token; 0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})")
        plotted = ["step", "loss", "reference_loss", "deviation", "entropy_floor", "max_loss_deviation"]
        data = keyed[[*CSV_COLUMNS, *plotted]]
        drawings.append(Drawing(stem, figure, data, words))
    return drawings


def _curves(run: Run, axes: Axes, panel: Panel, value: str) -> None:
    if value == "loss" and len(panel.reference):
        steps, losses = (panel.reference[column].astype(float) for column in ("step", "loss"))
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle="--")
    for i, ((backend, _), rows) in enumerate(panel.trials.groupby(["backend", "cell_id"], sort=False)):
        look, valid = run.looks[str(backend)], bool((rows["status"] == Status.OK).all())
        x, y = rows["step"].astype(float), rows[value].astype(float)
        y = y.clip(lower=LOSS_FLOOR) if value == "deviation" else y
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), panel.trials["backend"].nunique()))
        style.mark(axes, x, y, look, valid=valid, size=4.5, markevery=(i % every, every))
