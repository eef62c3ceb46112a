"""What one version of Lightning's ThroughputMonitor does under accumulation; for versions from 2.2.0 on."""

from __future__ import annotations

from collections.abc import Iterator

from bench.audit.monitor import Measurement, measure
from bench.audit.monitor_grid import Epoch, Point, RateVerdict
from studies.versions.versions_page import VersionFact

LOG_EVERY = (1, 2, 3, 4, 5, 8, 50)
"""Values of ``log_every_n_steps``: divisors and multiples of N = 4, others, and Lightning's default."""
RATES = {
    "rates, N = 8, window_size 9 = N + 1": Point(8, 1, 9),
    "rates, N = 8, window_size 10 = N + 2": Point(8, 1, 10),
    "rates, N = 8, window_size 100, the default": Point(8, 1, 100),
    "rates, N = 4, NB = 10 (a partial last window), window_size 5": Point(4, 1, 5, Epoch.PARTIAL),
    "rates, N = 4, NB = 2 (NB < N), window_size 5": Point(4, 1, 5, Epoch.SHORT),
    "rates, N = 4, window_size 5, batches of 1, 3 and 5 samples": Point(4, 1, 5, samples=(1, 3, 5)),
}


def findings() -> Iterator[VersionFact]:
    """Which settings the monitor accepts, and how right its rates are."""
    yield accepted(4, [measure(Point(4, every, 5)) for every in LOG_EVERY])
    for name, point in RATES.items():
        yield rates(name, measure(point))


def accepted(accumulate: int, measurements: list[Measurement]) -> VersionFact:
    """The verdict at each value of ``log_every_n_steps``."""
    parts, errors = [], []
    for verdict in RateVerdict:
        points = [m for m in measurements if m.verdict is verdict]
        if points:
            parts.append(
                f"{verdict} at {', '.join(str(m.point.log_every_n_steps) for m in points)}"
            )
            errors += [m.error for m in points if m.error][:1]
    name = f"log_every_n_steps at N = {accumulate}, window_size {measurements[0].point.window_size}"
    good = all(m.verdict is RateVerdict.RIGHT for m in measurements)
    return VersionFact(name, "; ".join(parts) + "".join(f": {error}" for error in errors), good)


def rates(name: str, measurement: Measurement) -> VersionFact:
    """The verdict on the logged rates, with their ratios to the measured ones."""
    verdict = measurement.verdict
    if measurement.error:
        return VersionFact(name, f"{verdict}: {measurement.error}", False)
    ratios, words = [rate.ratio for rate in measurement.rates], ""
    if ratios:
        low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
        words = f": ratio {low}" if low == high else f": ratio {low} to {high}"
    return VersionFact(name, f"{verdict}{words}", verdict is RateVerdict.RIGHT)
