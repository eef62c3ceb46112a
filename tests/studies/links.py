"""``nox -s results -- links``: step times against the rate of the link, measured and predicted, and a page on them.

Runs tests/studies/links.toml on two hosts of the rig at each rate, into results/links/<rate>, unless that run is
finished. Needs root and Debian's slurm-wlm, munge and iproute2, as ``nox -s hosts`` does; but with all runs finished it
only draws. Further arguments go to ``run``.

A prediction has the link that the run measured before its first trial, and the compute that a cell has on the link
without a limit: what its predicted communication leaves of its step there.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.errors import BAD, GOOD, INTERRUPTED
from bench.forecast.from_run import Predicted, measured_link, predicted_communication
from bench.forecast.prediction import Bounds, Link
from bench.formatting import rate
from bench.judge.loading import Run, load
from bench.judge.samples import step_times
from bench.judge.statistics import ratio
from bench.plan.cell import Cell, Status
from bench.report import canvas, style
from bench.report.canvas import Drawing, FigureWords
from bench.report.formats import write_frame
from bench.run.journal import MANIFEST, read_manifest
from tests.conftest import ROOT
from tests.hosts.rig import rig
from tests.studies.markdown import table

MATRIX = Path(__file__).with_suffix(".toml")
RESULTS, PLOTS = ROOT / "results" / "links", ROOT / "plots" / "links"
UNLIMITED = "unlimited"
RATES = {UNLIMITED: "", "1gbit": "1gbit", "200mbit": "200mbit"}
"""The runs, each with what limits the link, as tc names it."""
GOAL = 0.15
"""How far predictions may be off where communication takes longer than compute."""
SAVED = 0.05
"""Share of a step from which on deferring counts as faster here."""
SWEEP = 200
"""Rates of a curve."""
LINES = {"eager": "--", "deferred-all-reduce": ":", "deferred": "-"}
STEM = "step_time_by_link"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write plot and page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.links", description=str(__doc__).partition("\n\n")[2]
    )
    for name, folder in (("out", RESULTS), ("plots", PLOTS)):
        parser.add_argument(f"--{name}", type=Path, default=folder, metavar="DIR", help="(default: %(default)s)")
    arguments, options = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # the rig is removed on the way out
    measure(arguments.out, options)
    study = Study([load(arguments.out / name) for name in RATES])
    arguments.plots.mkdir(parents=True, exist_ok=True)
    drawing = draw(study)
    picture = canvas.save(drawing.figure, arguments.plots / STEM, drawing.words)
    write_frame(drawing.data, arguments.plots / f"{STEM}.csv")
    path = arguments.out / "links.md"
    path.write_text("\n".join(page(study, os.path.relpath(picture, arguments.out))), encoding="utf-8")
    print(f"written: {picture}", f"written: {path}", sep="\n")
    return GOOD


def measure(folder: Path, options: Sequence[str]) -> None:
    """Run the matrix at each rate whose run is not finished."""
    missing = [name for name in RATES if not _is_finished(folder / name)]
    if not missing:
        return
    with rig(2) as made:
        environment = {**os.environ, **made.environment, "OMP_NUM_THREADS": "1"}
        for name in missing:
            made.limit(RATES[name])
            # Relative: the run stores its command, which is repeated elsewhere.
            matrix, path = (os.path.relpath(one, ROOT) for one in (MATRIX, folder / name))
            begun = (folder / name / MANIFEST).exists()
            how = ["--resume", path] if begun else ["--matrix", matrix, *options, "--out", path]
            command = made.srun(2, sys.executable, "-m", "bench", "run", *how)
            status = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
            if status not in (GOOD, BAD):
                raise SystemExit(status)


def _is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and "finished" in read_manifest(folder)


class Study:
    """The runs, the one without a limit first, and predictions for the cells that all of them have."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.names = runs, [run.name for run in runs]
        self.trials = pd.concat([run.tables.trials for run in runs])
        self.times = [_times(run) for run in runs]
        self.cells = [cell for cell in self.times[0] if all(cell in own for own in self.times)]
        links = [measured_link(run.manifest, self.cells[0]) for run in runs]
        self.links = [link for link in links if link is not None]
        self.rates = [link.bytes_per_s * link.node_size for link in self.links]
        """Bytes per second between the hosts, by run."""
        self.sweep = list(np.geomspace(min(self.rates) / 2, max(self.rates) * 2, SWEEP))
        """Rates from below the slowest to above the fastest."""

    def predict(self, cell: Cell, link: Link, measured: float = math.nan) -> Predicted:
        """The prediction with this link, beside a measured step if there is one."""
        sent, alone = (predicted_communication(cell, one) for one in (link, self.links[0]))
        assert sent is not None and alone is not None, "these backends have formulas"
        compute = max(0.0, self.times[0][cell] - alone.upper)
        return Predicted(cell=cell, measured=measured, compute=compute, communication=sent)

    def of_run(self, number: int) -> dict[Cell, Predicted]:
        """Every cell of a run; of the first one the predictions are the measured steps."""
        own, link = self.times[number], self.links[number]
        return {cell: self.predict(cell, link, own[cell]) for cell in self.cells}

    def curve(self, cell: Cell) -> list[Bounds]:
        """Bounds at the rates of the sweep; latency and the rate within a host are between those of the runs."""
        order = np.argsort(self.rates)

        def between(speed: float, values: Sequence[float]) -> float:
            return float(np.interp(math.log(speed), np.log(self.rates)[order], np.array(values)[order]))

        latencies, within = ([getattr(one, name) for one in self.links] for name in ("latency_s", "intra_bytes_per_s"))
        size = self.links[0].node_size
        links = [
            Link(
                bytes_per_s=speed / size,
                latency_s=between(speed, latencies),
                intra_bytes_per_s=between(speed, within),
                node_size=size,
            )
            for speed in self.sweep
        ]
        return [self.predict(cell, link).bounds for link in links]

    def frame(self) -> pd.DataFrame:
        """One row per run and cell."""
        return pd.DataFrame(
            {
                "run": name,
                "link_bytes_per_s": self.rates[number],
                "backend": cell.backend,
                "accumulate": cell.accumulate,
                "step_time_s": one.measured,
                "compute_s": one.compute,
                "communication_s": one.communication.upper,
                "lower_s": one.bounds.lower,
                "upper_s": one.bounds.upper,
            }
            for number, name in enumerate(self.names)
            for cell, one in self.of_run(number).items()
        )


def _times(run: Run) -> dict[Cell, float]:
    """Seconds per step of each cell, as the report has them over its good trials, in order of N and backend."""
    good = run.tables.trials[run.tables.trials["status"] == Status.OK]
    times = {run.cells[cell_id]: found.seconds for cell_id, found in step_times(good).items()}
    own = (cell for cell in times if not cell.twin and not cell.is_reference)
    return {cell: times[cell] for cell in sorted(own, key=lambda cell: (cell.accumulate, cell.backend))}


def family(cell: Cell) -> str:
    """The backend without its sync."""
    return re.split("-eager|-deferred", cell.backend)[0]


def sync(cell: Cell) -> str:
    """The sync, as the backend's name has it."""
    return cell.backend.removeprefix(f"{family(cell)}-")


def draw(study: Study) -> Drawing:
    """Step time against the rate: a row of panels for each N, a column for each family."""
    columns = sorted(set(map(family, study.cells)))
    rows = sorted({cell.accumulate for cell in study.cells})
    looks, data = style.looks(study.trials), study.frame()
    words = FigureWords(
        "Step time against the rate of the link between two hosts",
        f"{_setting(study.cells[0])}; the hosts are network namespaces of one machine",
        "Lines are predicted: compute + communication, nothing hidden. Bands reach down to max(compute, "
        "communication). Compute is what communication leaves of the step at the highest rate, so predictions meet "
        "measurements there. Rates are those that the runs measured.",
    )
    grey = {"color": style.GREY, "markersize": 5}
    keys: list[style.Key] = [
        (Line2D([], [], linestyle=line, marker=style.SYNC_MARKERS[name], **grey), name)
        for name, line in LINES.items()
        if name in map(sync, study.cells)
    ]
    keys.append((Patch(color=style.GREY, alpha=0.2, linewidth=0), "what may be hidden"))
    with matplotlib.style.context(list(style.BASE)):
        figure = canvas.new_figure(words, keys, 1.9 * len(rows) + 0.4)
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
        for cell in study.cells:
            axes = grid[rows.index(cell.accumulate), columns.index(family(cell))]
            _curve(axes, study, cell, looks[cell.backend])
        for axes, name in zip(grid[0], columns, strict=True):
            axes.set_title(name)
        for axes, n in zip(grid[:, 0], rows, strict=True):
            axes.set_ylabel(f"s/step at N = {n}")
            canvas.set_scale(axes, "y", data[data["accumulate"] == n]["step_time_s"])
        for axes in grid[-1]:
            axes.set_xscale("log")
            axes.set_xticks(study.rates, [f"{speed / 1e6:.3g}" for speed in study.rates])
            axes.minorticks_off()
        grid[-1, len(columns) // 2].set_xlabel("rate between the hosts (MB/s)")
    return Drawing(STEM, figure, data, words)


def _curve(axes: Axes, study: Study, cell: Cell, look: style.Appearance) -> None:
    """A cell: its prediction over the rate, and what was measured."""
    bounds = study.curve(cell)
    lower, upper = [one.lower for one in bounds], [one.upper for one in bounds]
    axes.fill_between(study.sweep, lower, upper, color=look.colour, alpha=0.15, linewidth=0)
    axes.plot(study.sweep, upper, color=look.colour, linestyle=LINES[sync(cell)])
    style.mark(axes, study.rates, [own[cell] for own in study.times], look, size=4.5)


def _setting(cell: Cell) -> str:
    batch = f"B = {cell.global_batch_size} samples of {cell.sequence_length} tokens"
    return f"model {cell.model}, {cell.world_size} ranks, {cell.ranks_per_node} on each host, {batch}, over gloo"


def page(study: Study, picture: str) -> Iterator[str]:
    """The lines of the page, in Markdown."""
    yield "# Step time against the rate of the link"
    yield from ("", "Written by `nox -s results -- links`. Nothing here is edited by hand.", "")
    yield from (f"![Step time against the rate of the link]({picture})", "")
    yield f"The {_setting(study.cells[0])}, on the [rig](../../docs/hosts.md). Each run measured its link first:"
    yield ""
    rows = [
        (name, rate(speed), rate(link.intra_bytes_per_s), f"{1e6 * link.latency_s:.0f} us")
        for name, speed, link in zip(study.names, study.rates, study.links, strict=True)
    ]
    yield from table(("run", "between the hosts", "within a host", "latency of a call"), rows)
    yield "`tc tbf` lets 256 kB pass at once. Small collectives gain from it, so the fitted rates are above the limits"
    yield "of 125 and 25 MB/s, and the latencies are uncertain. Four ranks share two cores, which makes steps noisy."
    yield ""
    yield from _crossover(study)
    yield from _accuracy(study)


def _crossover(study: Study) -> Iterator[str]:
    """Where deferred backends are faster than the eager one of their family."""
    yield from ("## When deferring pays", "")
    yield "The step over that of the eager backend: measured with its 95 % interval, then predicted. The last column is"
    yield f"the highest rate at which deferring is predicted to save {100 * SAVED:g} % of a step."
    yield ""
    eager = {(family(cell), cell.accumulate): cell for cell in study.cells if sync(cell) == "eager"}
    predicted, rows = [study.of_run(number) for number in range(len(study.names))], []
    certain: Counter[str] = Counter()
    for cell in study.cells:
        other = eager.get((family(cell), cell.accumulate), cell)
        if cell == other or cell.accumulate == 1:
            continue
        ratios = []
        for run, own in zip(study.runs, predicted, strict=True):
            found = ratio(run.evidence.of(cell).sample, run.evidence.of(other).sample)
            low, high = (math.nan if end is None else end for end in (found.low, found.high))
            certain["faster"] += high < 1
            certain["slower"] += low > 1
            expected = own[cell].bounds.upper / own[other].bounds.upper
            certain["predicted"] += run is not study.runs[0] and low <= expected <= high
            ratios.append(f"{found.ratio:.2f} ({low:.2f} - {high:.2f}); {expected:.2f}")
        curves = zip(study.sweep, study.curve(cell), study.curve(other), strict=True)
        paying = [speed for speed, a, b in curves if a.upper <= (1 - SAVED) * b.upper]
        most = "-" if not paying else "any" if paying[-1] == study.sweep[-1] else rate(paying[-1])
        rows.append((cell.backend, str(cell.accumulate), *ratios, most))
    yield from table(("backend", "N", *study.names, "pays up to"), rows)
    limited = len(rows) * (len(study.runs) - 1)
    yield f"Of {limited + len(rows)} measured ratios, {certain['faster']} are below 1 with their whole interval, and"
    yield f"{certain['slower']} above. With a limit, {certain['predicted']} of {limited} predicted ratios are within"
    yield "the interval; without one they are the measured ones by construction."
    yield ""


def _accuracy(study: Study) -> Iterator[str]:
    """How far predictions are from the steps that communication bounds."""
    found = [
        (name, one)
        for number, name in enumerate(study.names)
        for one in study.of_run(number).values()
        if number and one.is_bound
    ]
    off = sorted(abs(one.deviation) for _, one in found)
    yield from ("## How far predictions are off", "")
    yield f"In {len(off)} cells of the runs with a limit, communication should take longer than compute."
    if off:
        yield f"Their steps are off compute + communication by {100 * median(off):.0f} % in the median and by"
        yield f"{100 * off[-1]:.0f} % at most. {sum(one <= GOAL for one in off)} reach the goal of {100 * GOAL:.0f} %."
    for name in study.names:
        if own := [one.deviation for run, one in found if run == name]:
            yield f"In the run {name} they are off by {100 * median(own):+z.0f} % in the median."
    yield ""
    rows = [
        (
            one.cell.backend,
            str(one.cell.accumulate),
            name,
            *(f"{seconds:.3g}" for seconds in (one.measured, one.compute, one.communication.upper)),
            f"{100 * one.deviation:+z.0f} %",
        )
        for name, one in found
    ]
    yield from table(("backend", "N", "run", "s/step", "compute", "communication", "off"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
