"""``nox -s results -- links``: where deferring pays, by the rate of the link and N, and how good ``predict`` is.

Runs studies/links.toml on two hosts of the rig at each rate, into results/links/<rate>, unless that run is
finished. Needs root and Debian's slurm-wlm, munge and iproute2, as ``nox -s hosts`` does; but with all runs finished it
only draws. Further arguments go to ``run``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from bench.errors import BAD, GOOD, INTERRUPTED
from bench.forecast.from_run import Groups, beside, fitted_links, measured_link
from bench.forecast.prediction import predicted_communication
from bench.forecast.prediction_text import ACCURACY, EstimateAccuracy
from bench.formatting import rate, some
from bench.judge.analysis import Analysis, CellRow
from bench.judge.caveats import GLOO_SCATTERS
from bench.judge.expected import settings_of
from bench.judge.loading import Run, load
from bench.judge.pairs import record
from bench.judge.tables import rows_of
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell, Sync
from bench.report import canvas, style
from bench.report.canvas import Drawing, FigureWords
from bench.report.descriptions import eager_and_deferred
from bench.report.figure_data import FigureData
from bench.report.formats import write_frame
from bench.run.journal import MANIFEST, read_manifest
from bench.tabular import markdown_table
from studies import ROOT
from tests.hosts.rig import rig

MATRIX = Path(__file__).with_suffix(".toml")
RESULTS, PLOTS = ROOT / "results" / "links", ROOT / "plots" / "links"
RATES = {"unlimited": "", "1gbit": "1gbit", "200mbit": "200mbit"}
"""The runs, each with what limits the link, as tc names it; the fastest link first."""
OTHERS = ("cpu", "popular")
"""Runs on one machine whose steps are held against their estimates too."""
STEM = "deferring_by_link"
STEP = 0.09
"""Distance of two backends in a panel."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write plot and page."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.links", description=str(__doc__).partition("\n\n")[2]
    )
    for name, folder in (("out", RESULTS), ("plots", PLOTS)):
        parser.add_argument(
            f"--{name}", type=Path, default=folder, metavar="DIR", help="(default: %(default)s)"
        )
    words = "what predict says of its estimates (default: %(default)s)"
    parser.add_argument("--accuracy", type=Path, default=ACCURACY, metavar="FILE", help=words)
    arguments, options = parser.parse_known_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED)
    )  # the rig is removed on the way out
    measure(arguments.out, options)
    study = Study(
        [load(arguments.out / name) for name in RATES],
        [load(ROOT / "results" / name) for name in OTHERS],
    )
    arguments.plots.mkdir(parents=True, exist_ok=True)
    drawing = draw(study)
    picture = canvas.save(drawing.figure, arguments.plots / STEM, drawing.words)
    write_frame(drawing.data, arguments.plots / f"{STEM}.csv")
    path = arguments.out / "links.md"
    path.write_text(
        "\n".join(page(study, os.path.relpath(picture, arguments.out))), encoding="utf-8"
    )
    stored = stored_accuracy(study)
    arguments.accuracy.write_text(
        f"{json.dumps(dataclasses.asdict(stored), indent=2)}\n", encoding="utf-8"
    )
    print(f"written: {picture}", f"written: {path}", f"written: {arguments.accuracy}", sep="\n")
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
            matrix, path = (os.path.relpath(target, ROOT) for target in (MATRIX, folder / name))
            begun = (folder / name / MANIFEST).exists()
            how = ["--resume", path] if begun else ["--matrix", matrix, *options, "--out", path]
            command = made.srun(2, sys.executable, "-m", "bench", "run", *how)
            status = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
            shutil.rmtree(folder / name / "plots", ignore_errors=True)  # one figure shows all runs
            if status not in (GOOD, BAD):
                raise SystemExit(status)


def _is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and read_manifest(folder).finished is not None


class Study:
    """The runs at each rate, the fastest link first, and others that are held against their estimates."""

    def __init__(self, runs: Sequence[Run], others: Sequence[Run] = ()) -> None:
        self.data, self.others = (
            [Analysis(run=run) for run in runs],
            [Analysis(run=run) for run in others],
        )
        self.times = [_times(data) for data in self.data]
        self.settings = settings_of(runs[0].records)
        self.links = fitted_links([run.manifest for run in runs], next(iter(self.times[0])))
        self.rates = [link.bytes_per_s * link.node_size for link in self.links]
        """Bytes per second between the hosts, by run."""
        if not self.rates or self.rates != sorted(self.rates, reverse=True):
            raise SystemExit(
                f"the rates that fit the runs do not fall as the limits do: {self.rates}"
            )

    def predicted(self, cell: Cell, number: int) -> float:
        """The serial step in a run, with the compute that communication leaves of the step on the fastest link."""
        sent, alone = (
            predicted_communication(cell, self.links[run], self.settings[cell.cell_id])
            for run in (number, 0)
        )
        assert sent is not None and alone is not None, "these backends have formulas"
        return max(0.0, self.times[0][cell] - alone.serial) + sent.serial

    def groups(self) -> Iterator[tuple[str, Groups]]:
        """All steps beside their estimates, by run; those of this study by the links that fit all its runs."""
        for data, times, link in zip(self.data, self.times, self.links, strict=True):
            yield (
                data.run.name,
                beside(times, dict.fromkeys(times, link).get, settings_of(data.run.records)),
            )
        for data in self.others:
            link_of = partial(measured_link, data.run.manifest)
            yield data.run.name, beside(_times(data), link_of, settings_of(data.run.records))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Deferred against eager: one row per run, N and pair of backends, as the runs' reports compare them."""
        rows = []
        for number, data in enumerate(self.data):
            for n in sorted({row.cell.accumulate for row in data.rows.values()}):
                by_name = {
                    row.backend: row for row in data.rows.values() if row.cell.accumulate == n
                }
                syncs = (Sync.DEFERRED_ALL_REDUCE, Sync.DEFERRED)
                for eager, deferred in (pair for sync in syncs for pair in _pairs(by_name, sync)):
                    compared = data.compared(by_name[deferred].cell_id, by_name[eager].cell_id)
                    assert compared is not None, "they differ in the backend alone"
                    found = record(compared)
                    steps = [self.predicted(cell, number) for cell in (compared.b, compared.a)]
                    rows.append(
                        {
                            "run": data.run.name,
                            "link_bytes_per_s": self.rates[number],
                            "accumulate": n,
                        }
                        | {"deferred": deferred, "eager": eager}
                        | {
                            name: found[name]
                            for name in ("ratio", "low", "high", "num_trials", "verdict")
                        }
                        | {"predicted_ratio": steps[0] / steps[1] if number else None}
                    )
        return pd.DataFrame(rows)


def _pairs(rows: Mapping[str, CellRow], sync: Sync) -> list[tuple[str, str]]:
    """Eager and deferred backends among these rows."""
    return eager_and_deferred({name: row.values for name, row in rows.items()}, sync)


def _times(data: Analysis) -> dict[Cell, float]:
    """Seconds per step of each cell, as the report has them."""
    rows = [row for row in data.rows.values() if not row.cell.is_reference]
    return {row.cell: row.step_time_s for row in rows if row.step_time_s is not None}


def draw(study: Study) -> Drawing:
    """The ratios with their intervals against the link, a panel for each N."""
    frame, looks = study.frame, style.looks(study.data[0].cells)
    backends = [name for name in looks if name in set(frame["deferred"])]
    rates, footer = sorted(study.rates), FigureData(study.data[0]).footer
    words = FigureWords(
        title(frame),
        f"{_setting(next(iter(study.times[0])))}; the hosts are network namespaces of one machine",
        f"runs {some([data.run.name for data in study.data])}; {footer.partition('; ')[2]}",
        [
            "Vertical lines are 95 % intervals over trials. Filled: shown to be faster than the eager backend of the "
            "same sharding, by the verdict; hollow: no such verdict. At N = 1 there is nothing to defer. Rates are not "
            "to scale, and the backends at a rate stand side by side.",
            f"Of FSDP2 and HSDP: {GLOO_SCATTERS}.",
        ],
    )
    keys: list[style.Key] = [
        style.line_key(name, looks[name], looks[name].sync_line) for name in backends
    ]
    with matplotlib.style.context(list(style.BASE)):
        figure = canvas.new_figure(words, keys, 3.4)
        panels = list(frame.groupby("accumulate"))
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        ends = pd.concat([frame["low"], frame["high"]])
        canvas.set_scale(grid[0], "y", ends, "step time, deferred / eager")
        for axes, (n, rows) in zip(grid, panels, strict=True):
            axes.set_title(f"N = {n}")
            axes.set_xticks(range(len(rates)), [f"{speed / 1e6:.3g}" for speed in rates])
            axes.set_xlim(-0.5, len(rates) - 0.5)
            axes.grid(axis="x", visible=False)
            axes.axhline(1, color=style.REFERENCE_COLOUR, linewidth=0.9, zorder=1.5)
            for place, name in enumerate(backends):
                shift = STEP * (place - (len(backends) - 1) / 2)
                _ratios(axes, rows[rows["deferred"] == name], rates, shift, looks[name])
        grid[len(panels) // 2].set_xlabel("rate between the hosts (MB/s)")
    return Drawing(STEM, figure, frame, words)


def _ratios(
    axes: Axes, rows: pd.DataFrame, rates: Sequence[float], shift: float, look: style.Appearance
) -> None:
    """The ratios of a backend, in order of the rates."""
    rows = rows.sort_values("link_bytes_per_s")
    x, y = (
        np.array([rates.index(speed) for speed in rows["link_bytes_per_s"]]) + shift,
        rows["ratio"].to_numpy(),
    )
    axes.plot(x, y, color=look.colour, linestyle=look.sync_line, linewidth=0.8, alpha=0.5)
    axes.vlines(
        x,
        rows["low"].to_numpy(float),
        rows["high"].to_numpy(float),
        color=look.colour,
        linewidth=1.4,
    )
    faster = (rows["verdict"] == Verdict.FASTER).to_numpy()
    style.mark(axes, x[faster], y[faster], look, size=5)
    axes.plot(x[~faster], y[~faster], look.marker, color=look.colour, ms=5, mfc="white", mew=1.1)


def title(frame: pd.DataFrame) -> str:
    """At which rates deferring is faster, by the verdicts."""
    several = frame[frame["accumulate"] > 1]
    found = []
    for speed in sorted(set(several["link_bytes_per_s"])):
        verdicts = list(several[several["link_bytes_per_s"] == speed]["verdict"])
        slower = f" and slower in {count}" if (count := verdicts.count(Verdict.SLOWER)) else ""
        found.append(
            f"{verdicts.count(Verdict.FASTER)} of {len(verdicts)} pairs at {rate(speed)}{slower}"
        )
    return f"With N > 1, deferring the sync is shown to be faster in {', '.join(found[:-1])} and {found[-1]}"


def _setting(cell: Cell) -> str:
    batch = f"B = {cell.global_batch_size} samples of {cell.sequence_length} tokens"
    return f"model {cell.model}, {cell.world_size} ranks, {cell.ranks_per_node} on each host, {batch}, over gloo"


def page(study: Study, picture: str) -> Iterator[str]:
    """The lines of the page, in Markdown."""
    yield "# When deferring pays, by the rate of the link"
    yield from ("", "Written by `nox -s results -- links`. Nothing here is edited by hand.", "")
    yield from (f"![{title(study.frame)}]({picture})", "")
    link = study.links[0]
    latency, within = f"{1e6 * link.latency_s:.0f} µs", rate(link.intra_bytes_per_s)
    yield f"The {_setting(next(iter(study.times[0])))}, on the [rig](../../docs/hosts.md)."
    yield "Four ranks share two cores, which makes steps noisy. Each run timed collectives before its first trial. One"
    yield f"latency per call, {latency}, and one rate within a host, {within},"
    yield "fit those of all runs, with one rate between the hosts for each run:"
    yield ""
    rows = [
        (data.run.name, RATES[data.run.name] or "none", rate(speed))
        for data, speed in zip(study.data, study.rates, strict=True)
    ]
    yield from markdown_table(("run", "limit per second", "between the hosts"), rows)
    yield from _ratios_page(study.frame)
    yield from _accuracy(study)


def _ratios_page(frame: pd.DataFrame) -> Iterator[str]:
    yield from ("## Deferred against eager", "")
    yield "Step time over that of the eager backend with the same sharding, its 95 % interval, and the verdict of the"
    yield "run's own report, which corrects for all comparisons; then, after a semicolon, the predicted ratio of serial"
    yield "steps. For it the compute of a cell is what its communication leaves of its step without a limit."
    yield f"Under FSDP2, HSDP and ZeRO-3 {GLOO_SCATTERS} ([how much](../../docs/settings.md#fsdp2))."
    yield ""
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows_of(frame.sort_values(["accumulate", "deferred"], kind="stable")):
        expected = "" if row["predicted_ratio"] is None else f"; {row['predicted_ratio']:.2f}"
        words = (
            f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}) {row['verdict']}{expected}"
        )
        found.setdefault((row["deferred"], row["accumulate"]), []).append(words)
    rows = [(name, str(n), *words) for (name, n), words in found.items()]
    yield from markdown_table(("backend", "N", *dict.fromkeys(frame["run"])), rows)
    predicted = frame[frame["predicted_ratio"].notna() & (frame["accumulate"] > 1)]
    within = predicted["predicted_ratio"].between(predicted["low"], predicted["high"]).sum()
    yield f"Of {len(predicted)} predicted ratios with N > 1, {within} are within the measured interval."
    yield ""


def _accuracy(study: Study) -> Iterator[str]:
    """How far the estimates of ``predict`` are from measured steps."""
    yield from ("## How good the estimates of `predict` are", "")
    yield "An overlapped step takes max(compute, communication), a serial one compute + communication. Compute is the"
    yield "step of the cell that communicates least, of those with equal work, less its communication. What the host"
    yield "does between collectives, the cores that gloo's threads take from compute, and waiting for slower ranks are"
    yield "in neither, so both are estimates, not bounds. *In order*: pairs of cells with equal work of which one's"
    yield "serial step is shorter than the other's overlapped one, and how many were measured in that order."
    yield ""
    rows, every = [], []
    for name, groups in study.groups():
        every += groups
        rows.append((name, *_row(accuracy(groups))))
    header = (
        "run",
        "steps",
        "below overlapped",
        "above serial",
        "from serial: median (least to most)",
        "in order",
    )
    yield from markdown_table(header, [*rows, ("all", *_row(accuracy(every)))])
    off = sorted(
        seconds / study.predicted(cell, number) - 1
        for number, times in enumerate(study.times)
        for cell, seconds in times.items()
        if number
    )
    low, middle, high = (f"{100 * share:+z.0f} %" for share in (off[0], median(off), off[-1]))
    yield "With the compute that a cell has on the fastest link, which includes what its host does, all"
    yield f"{len(off)} steps on the slower links differ from serial by {middle} in the median, {low} to {high};"
    yield f"{sum(share > 0 for share in off)} take longer."
    yield ""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How well estimates agree with measured steps, without those from which compute was taken."""

    deviations: Sequence[float]
    """From serial steps, as shares, sorted."""
    num_below: int
    """Steps faster than overlapped."""
    num_above: int
    """Steps slower than serial."""
    in_order: Sequence[bool]
    """For each pair of which one's serial step is shorter than the other's overlapped one: whether it was faster."""


def accuracy(groups: Groups) -> Accuracy:
    others = [step for group in groups for step in group[1:]]
    pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
    return Accuracy(
        deviations=sorted(step.deviation for step in others),
        num_below=sum(step.measured < step.step.overlapped for step in others),
        num_above=sum(step.measured > step.step.serial for step in others),
        in_order=[a.measured < b.measured for a, b in pairs if a.step.serial < b.step.overlapped],
    )


def stored_accuracy(study: Study) -> EstimateAccuracy:
    """What ``predict`` says of its estimates: of all runs together, as in the last row of the page's table."""
    found = accuracy([group for _, groups in study.groups() for group in groups])
    return EstimateAccuracy(
        num_steps=len(found.deviations),
        num_below_overlapped=found.num_below,
        num_above_serial=found.num_above,
        longest=round(1 + found.deviations[-1], 3),
        num_pairs=len(found.in_order),
        num_in_order=sum(found.in_order),
    )


def _row(found: Accuracy) -> tuple[str, ...]:
    off = found.deviations
    middle, low, high = (f"{100 * share:+z.0f} %" for share in (median(off), off[0], off[-1]))
    order = f"{sum(found.in_order)} of {len(found.in_order)}"
    return (
        str(len(off)),
        str(found.num_below),
        str(found.num_above),
        f"{middle} ({low} to {high})",
        order,
    )


if __name__ == "__main__":
    raise SystemExit(main())
