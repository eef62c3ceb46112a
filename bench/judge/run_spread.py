"""What runs of different days differ by, on the classes of machines of which several runs are kept.

``python -m studies`` writes it from results/pool beside docs/statistics.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scipy import special

from bench.formatting import plural
from bench.judge.statistics import LEVEL
from bench.run.manifest import Manifest

STORED = Path(__file__).with_name("run_spread.json")


@dataclass(frozen=True, kw_only=True)
class RunSpread:
    """Standard deviations over runs, of logarithms; the mean over cells, as root mean square."""

    cpu: str | None
    cores: int | None
    gpus: tuple[str, ...]
    runs: int
    """How many runs they are from."""
    freedom: int
    """Degrees of freedom: the runs of each matrix less one."""
    of_ratios: float
    """Of the ratio of two cells of a run."""
    of_times: float
    """Of the step time of a cell."""

    @property
    def reach(self) -> float:
        """How far apart the log ratios of two runs are in 95 of 100 cases."""
        return float(special.stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.of_ratios * math.sqrt(2)

    @property
    def sentence(self) -> str:
        """What a ratio of a single run may be on another day, without the full stop."""
        larger = 100 * math.expm1(self.reach)
        smaller = -100 * math.expm1(-self.reach)
        return (
            f"on another day a ratio may be {larger:.0f} % larger or {smaller:.0f} % smaller "
            f"(95 %, from {plural(self.runs, 'run')} on such machines)"
        )


@cache
def _stored() -> tuple[RunSpread, ...]:
    found: list[RunSpread] = []
    for row in json.loads(STORED.read_text(encoding="utf-8")):
        row["gpus"] = tuple(row["gpus"])
        found.append(RunSpread(**row))
    return tuple(found)


def spread_of(manifest: Manifest) -> RunSpread | None:
    """Of the class of machines on which a run was; None if it is not known."""
    machine = manifest.machine
    gpus = tuple(gpu.name for gpu in machine.gpus)
    for spread in _stored():
        if (spread.cpu, spread.cores, spread.gpus) == (machine.cpu, machine.cores, gpus):
            return spread
    return None
