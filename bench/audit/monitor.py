"""How right Lightning's ThroughputMonitor is under accumulation, measured against a tap.

The workload takes known times per micro-batch and per optimizer step, on a virtual clock that the
monitor and the tap share, and that only the workload advances: this is exact and takes no time.
Time in validation counts as none.

On several ranks the monitor's ``samples_per_sec``, of all ranks, is compared, otherwise
``device/samples_per_sec``.

Needs torch and any Lightning from 2.2.0 on.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import logging
import statistics
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.audit.monitor_grid import VALIDATION_S, Epoch, Point, RateVerdict, Strategy
from bench.measure.taps import EventKind, Taps, updates

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

TOLERANCE = 0.01
"""How far from 1 a right ratio may be."""

MONITOR_MODULES = (
    "lightning.pytorch.callbacks.throughput_monitor",
    "lightning.fabric.utilities.throughput",
)


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate that the monitor logged, and the true rate for the same time."""

    update: int
    """Optimizer steps made so far, counted by the tap."""
    reported: float
    """Samples per second that the monitor logged."""
    true: float
    """Samples per second measured by the tap, over the fewest whole windows that cover the
    monitor's."""

    @property
    def ratio(self) -> float:
        return self.reported / self.true


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured at one point."""

    point: Point
    error: str
    """Type and message of the error that the monitor raised, if any."""
    num_updates: int
    true_samples_per_s: float | None
    """From the first update to the last."""
    log_updates: tuple[int, ...]
    """Optimizer steps made at each log of the monitor."""
    rates: tuple[Rate, ...]
    """The rates that can be judged: their window begins after the first update."""
    num_rates_logged: int = 0
    """All logged rates, judged or not."""

    @property
    def ratios(self) -> list[float]:
        """Those of the rates that can be judged."""
        return [rate.ratio for rate in self.rates]

    @property
    def verdict(self) -> RateVerdict:
        if self.error:
            return RateVerdict.RAISED
        if not self.log_updates:
            return RateVerdict.SILENT
        return judge(self.ratios)

    def to_row(self) -> dict[str, object]:
        """The measurement as one flat row, in SI units."""
        per_epoch, epochs = self.point.lengths
        row = dataclasses.asdict(self.point)
        del row["micro_batches"], row["num_epochs"], row["samples"]
        row |= {
            "strategy": str(self.point.strategy),
            "epoch": self.point.epoch_name,
            "num_micro_batches_per_epoch": per_epoch,
            "num_epochs": epochs,
            "num_updates": self.num_updates,
            "num_logs": len(self.log_updates),
            "log_updates": ",".join(map(str, self.log_updates)),
            "num_rates_logged": self.num_rates_logged,
            "num_rates": len(self.rates),
            "true_samples_per_s": self.true_samples_per_s,
            "reported_samples_per_s": None,
            "ratio_min": None,
            "ratio_median": None,
            "ratio_max": None,
            "verdict": str(self.verdict),
            "tolerance": TOLERANCE,
            "error": self.error,
        }
        if self.rates:
            ratios = self.ratios
            row["reported_samples_per_s"] = statistics.median(rate.reported for rate in self.rates)
            row["ratio_min"] = min(ratios)
            row["ratio_median"] = statistics.median(ratios)
            row["ratio_max"] = max(ratios)
        return row


def judge(ratios: Sequence[float]) -> RateVerdict:
    """The verdict on logged rates, from their ratios to the truth."""
    if not ratios:
        return RateVerdict.UNRATED
    if max(abs(ratio - 1) for ratio in ratios) <= TOLERANCE:
        return RateVerdict.RIGHT
    if max(ratios) - min(ratios) <= TOLERANCE:
        return RateVerdict.BIASED
    return RateVerdict.UNSTEADY


def grid(
    accumulate: Sequence[int],
    log_every: Sequence[int],
    window_sizes: Sequence[int],
    epochs: Sequence[Epoch],
    **workload: Any,
) -> list[Point]:
    """All combinations; with N = 1 there are no partial and no short epochs."""
    points = []
    for epoch, n in itertools.product(epochs, accumulate):
        if n == 1 and epoch is not Epoch.WHOLE:
            continue
        for size, every in itertools.product(window_sizes, log_every):
            points.append(Point(n, every, size, epoch, **workload))
    return points


class VirtualClock:
    """A clock that only the workload advances.

    It stands in for the module ``time`` where the monitor looks for it.
    """

    def __init__(self) -> None:
        self.now = self.in_validation = 0.0
        self.num_reads = 0  # by the monitor

    def perf_counter(self) -> float:
        self.num_reads += 1
        return self.now


def measure(point: Point, *, number: int = 0) -> Measurement:
    """Train at one point of the grid on the CPU, in this process, as rank ``number``.

    An error of the monitor is a result; any other error is raised.
    """
    clock = VirtualClock()
    taps = Taps(mark=lambda: clock.now - clock.in_validation)
    logged: list[Log] = []
    error = ""
    try:
        _train(point, clock, taps, logged)
    except Exception as exception:
        if not _is_of_monitor(exception):
            raise
        error = " ".join(f"{type(exception).__name__}: {exception}".split())
    if not clock.num_reads and not error and number == 0:
        raise RuntimeError("this ThroughputMonitor did not read the virtual clock")
    return _measurement(point, taps, logged, error)


def _is_of_monitor(error: Exception) -> bool:
    """Whether the error was raised in the monitor, or in what it called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in MONITOR_MODULES:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Log:
    """One log of the monitor."""

    num_batches: int
    """Micro-batches so far."""
    rate: float | None
    """Samples per second, if there is a rate yet."""


def _train(point: Point, clock: VirtualClock, taps: Taps, logged: list[Log]) -> None:
    """Train, and append each log of the monitor to ``logged``."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import throughput_monitor
    from lightning.pytorch.loggers.logger import Logger

    def slow_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        clock.now += point.micro_batch_s
        return batch.mean() * model.weight.sum()  # type: ignore[no-any-return]

    def slow_step(*_: object) -> None:
        clock.now += point.optimizer_s

    loss = taps.loss(slow_loss)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return loss(self, batch)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            clock.now += VALIDATION_S
            clock.in_validation += VALIDATION_S

        def configure_optimizers(self) -> Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            optimizer.register_step_pre_hook(slow_step)
            return taps.optimizer(optimizer)

    name_of_rate = _name_of_rate(point)

    class MonitorLogger(Logger):
        name = version = "audit"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "train/batches" in metrics:
                logged.append(Log(taps.count(EventKind.LOSS), metrics.get(name_of_rate)))

        def log_hyperparams(self, *arguments: object, **options: object) -> None:
            pass

    per_epoch, epochs = point.lengths
    with _quiet(), mock.patch.object(throughput_monitor, "time", clock):
        monitor = throughput_monitor.ThroughputMonitor(
            batch_size_fn=len,
            window_size=point.window_size,
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=point.world_size,
            strategy=_strategy(point),
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            val_check_interval=point.validate_every,
            check_val_every_n_epoch=_epochs_per_validation(point),
            max_epochs=epochs,
            accumulate_grad_batches=point.accumulate,
            log_every_n_steps=point.log_every_n_steps,
            logger=MonitorLogger(),
            callbacks=[monitor],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        sizes = itertools.islice(itertools.cycle(point.samples), per_epoch)
        batches = taps.loader(list(map(torch.ones, sizes)))
        trainer.fit(Model(), batches, _validation_loader(point))


def _name_of_rate(point: Point) -> str:
    """The monitor's metric of all ranks."""
    if point.world_size == 1:
        return "train/device/samples_per_sec"
    return "train/samples_per_sec"


def _epochs_per_validation(point: Point) -> int | None:
    """Lightning's default; None where validations are counted in micro-batches alone."""
    if point.validate_every is None:
        return 1
    return None


def _validation_loader(point: Point) -> DataLoader[int] | None:
    """One sample; None without validations."""
    if point.validate_every is None:
        return None
    from torch.utils.data import DataLoader

    return DataLoader(range(1))  # type: ignore[arg-type]


def _strategy(point: Point) -> Any:
    """What the Trainer is given as ``strategy``."""
    if point.is_alone:
        return "auto"
    from lightning.pytorch.strategies import DDPStrategy

    if point.strategy is Strategy.DDP:
        return DDPStrategy(process_group_backend="gloo")
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from bench.backends import deepspeed, lightning

    deepspeed.prepare()
    config = {
        "train_micro_batch_size_per_gpu": point.samples[0],
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    return lightning.on_cpu(DeepSpeedStrategy)(config=config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's hints (no GPU used, few workers, no FLOPs given)."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _measurement(point: Point, taps: Taps, logged: Sequence[Log], error: str) -> Measurement:
    """Compare the logged rates with the tap's updates."""
    made = updates(taps.events)
    batches = [0]  # micro-batches at the start and at the end of each update; it never decreases
    for update in made:
        batches.append(batches[-1] + update.num_micro_batches)

    per_epoch, epochs = point.lengths
    in_epoch = itertools.islice(itertools.cycle(point.samples), per_epoch)
    samples = [0, *itertools.accumulate([*in_epoch] * epochs)]

    def true(first: int, last: int) -> float:
        count = point.world_size * (samples[batches[last]] - samples[batches[first]])
        return float(count / (made[last - 1].mark - made[first - 1].mark))

    rates, log_updates = [], []
    num_rates_logged = 0
    for log in logged:
        last = bisect.bisect_right(batches, log.num_batches) - 1
        log_updates.append(last)
        if log.rate is None:
            continue
        num_rates_logged += 1
        begin = log.num_batches - (point.window_size - 1)
        first = bisect.bisect_right(batches, begin) - 1
        if 0 < first < last and batches[first] > 0:
            rates.append(Rate(last, log.rate, true(first, last)))
    true_rate = None
    if len(made) > 1:
        true_rate = true(1, len(made))
    return Measurement(
        point=point,
        error=error,
        num_updates=len(made),
        true_samples_per_s=true_rate,
        log_updates=tuple(log_updates),
        rates=tuple(rates),
        num_rates_logged=num_rates_logged,
    )
