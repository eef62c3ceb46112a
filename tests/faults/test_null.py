"""What the bench itself costs: memory of the runner over many trials, and seconds of each beside the training."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bench.errors import BAD, GOOD
from tests.faults import scripted
from tests.faults.form import FORM
from tests.faults.harness import MATRIX_RUN, Place, place

OVERHEAD_S = 0.2
"""The most that the runner may add to a trial."""
GROWTH_BYTES = 4 * 2**20
"""The most that the runner's memory may grow by, from a tenth of the trials on."""


@dataclass
class Samples:
    """Trials in the journal and memory of the runner, over time."""

    trials: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def since(self, trials: int) -> int:
        """The number of the first sample with so many trials."""
        return next(index for index, number in enumerate(self.trials) if number >= trials)

    @property
    def growth(self) -> int:
        """Bytes by which the memory has grown since a tenth of the trials was done."""
        begin = self.since(max(1, self.trials[-1] // 10))
        return max(self.bytes[begin:]) - self.bytes[begin]

    @property
    def memory(self) -> tuple[str, str]:
        """Growth and peak, as the page has them."""
        return f"{self.growth / 2**20:.1f} MiB", f"{max(self.bytes) / 2**20:.0f} MiB"

    @property
    def timed(self) -> slice:
        """The trials that ended between the first sample with a trial and the first with all that were seen."""
        return slice(self.trials[self.since(1)], self.trials[-1])

    @property
    def seconds_per_trial(self) -> float:
        """The mean of the timed trials."""
        first, last = self.since(self.timed.start), self.since(self.timed.stop)
        return (self.seconds[last] - self.seconds[first]) / (self.timed.stop - self.timed.start)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def watched(here: Place) -> Samples:
    """Run the matrix of the place; what was seen of its process until the run was finished."""
    process = here.start(*MATRIX_RUN)
    samples, runner = Samples(), psutil.Process(process.pid)
    while process.poll() is None and not here.is_finished:
        with contextlib.suppress(psutil.Error):
            samples.bytes.append(runner.memory_info().rss)
            samples.trials.append(here.journal.count(b"\n"))
            samples.seconds.append(time.monotonic())
        time.sleep(0.02)
    assert process.wait() in {GOOD, BAD}, here.output("err")
    return samples


@pytest.mark.timeout(3600)
def test_the_runner_costs_little_and_does_not_grow(tmp_path: Path) -> None:
    """1,000 trials that take no time, in the full form: all that is measured is the runner's own."""
    with place(tmp_path / "place") as here:
        here.program = ("-m", "tests.faults.scripted")
        here.write("f-null", repeats=FORM.choose(50, 500), accumulate=1, world_size=1)
        samples = watched(here)
        trials = len(here.records)
    overhead = samples.seconds_per_trial - scripted.TRIAL_S
    what = "the runner alone: trials are answered at once, and all else is real"
    FORM.note("null", "scripted", what, f"{trials:,}", _ms(overhead), "no trial", *samples.memory)
    assert trials == FORM.choose(100, 1000)
    assert overhead < OVERHEAD_S
    assert samples.growth < GROWTH_BYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_a_real_trial_costs_beside_its_training(tmp_path: Path) -> None:
    """A process group for each: what is not training is its start, its end and its checks."""
    with place(tmp_path / "place") as here:
        here.write("f-null", repeats=50, accumulate=1, world_size=1)
        samples = watched(here)
        records = here.records
    inside = statistics.median(record["wall_s"] - record["training_s"] for record in records)
    outside = samples.seconds_per_trial - statistics.fmean(
        record["wall_s"] for record in records[samples.timed]
    )
    what = "real trials of one process that trains next to nothing"
    FORM.note("null", "real", what, f"{len(records):,}", _ms(outside), _ms(inside), *samples.memory)
    assert {record["status"] for record in records} == {"ok"}
    assert outside < OVERHEAD_S
    assert samples.growth < GROWTH_BYTES
