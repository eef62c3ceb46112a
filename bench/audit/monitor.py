"""How right Lightning's ThroughputMonitor is under accumulation, measured: a Trainer runs, and a tap has the truth.

The workload takes known times per micro-batch and per optimizer step, on a virtual clock that the monitor and the tap
share, and that only the workload advances: this is exact and takes no time. Time in validation counts as none.

On several ranks the monitor's ``samples_per_sec``, of all ranks, is compared, otherwise ``device/samples_per_sec``.

Needs torch and any Lightning from 2.2.0 on.
"""

from __future__ import annotations

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

TOLERANCE = 0.01
"""How far from 1 a right ratio may be."""

MONITOR_MODULES = ("lightning.pytorch.callbacks.throughput_monitor", "lightning.fabric.utilities.throughput")


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate that the monitor logged, and the true rate for the same time."""

    update: int
    """Optimizer steps made so far, counted by the tap."""
    reported: float
    """Samples per second that the monitor logged."""
    true: float
    """Samples per second measured by the tap, over the fewest whole windows that cover the monitor's window."""

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
    def verdict(self) -> RateVerdict:
        if self.error:
            return RateVerdict.RAISED
        if not self.log_updates:
            return RateVerdict.SILENT
        return judge([rate.ratio for rate in self.rates])

    def to_row(self) -> dict[str, Any]:
        """The measurement as one flat row, in SI units."""
        per_epoch, epochs = self.point.lengths
        ratios = [rate.ratio for rate in self.rates]
        reported = [rate.reported for rate in self.rates]
        row = dataclasses.asdict(self.point)
        given = row.pop("micro_batches")
        del row["num_epochs"], row["samples"]
        row |= {
            "strategy": str(self.point.strategy),
            "epoch": f"NB = {given}" if given else str(self.point.epoch),
            "num_micro_batches_per_epoch": per_epoch,
            "num_epochs": epochs,
            "num_updates": self.num_updates,
            "num_logs": len(self.log_updates),
            "log_updates": ",".join(map(str, self.log_updates)),
            "num_rates_logged": self.num_rates_logged,
            "num_rates": len(ratios),
            "true_samples_per_s": self.true_samples_per_s,
            "reported_samples_per_s": statistics.median(reported) if reported else None,
        }
        for name, of in (("min", min), ("median", statistics.median), ("max", max)):
            row[f"ratio_{name}"] = of(ratios) if ratios else None
        return row | {"verdict": str(self.verdict), "tolerance": TOLERANCE, "error": self.error}


def judge(ratios: Sequence[float]) -> RateVerdict:
    """The verdict on logged rates, from their ratios to the truth."""
    if not ratios:
        return RateVerdict.UNRATED
    if max(abs(ratio - 1) for ratio in ratios) <= TOLERANCE:
        return RateVerdict.RIGHT
    return RateVerdict.BIASED if max(ratios) - min(ratios) <= TOLERANCE else RateVerdict.UNSTEADY


def grid(
    accumulate: Sequence[int],
    log_every: Sequence[int],
    window_sizes: Sequence[int],
    epochs: Sequence[Epoch],
    **workload: Any,
) -> list[Point]:
    """All combinations; with N = 1 there are no partial and no short epochs."""
    return [
        Point(n, every, size, epoch, **workload)
        for epoch in epochs
        for n in accumulate
        for size in window_sizes
        for every in log_every
        if n > 1 or epoch is Epoch.WHOLE
    ]


class VirtualClock:
    """A clock that only the workload advances; it stands in for the module ``time`` where the monitor looks for it."""

    def __init__(self) -> None:
        self.now = self.in_validation = 0.0
        self.num_reads = 0  # by the monitor

    def perf_counter(self) -> float:
        self.num_reads += 1
        return self.now


def measure(point: Point, *, number: int = 0) -> Measurement:
    """Train at one point of the grid with the installed Lightning, on the CPU, in this process, as rank ``number``.

    An error of the monitor is a result; any other error is raised.
    """
    clock = VirtualClock()
    taps = Taps(mark=lambda: clock.now - clock.in_validation)
    logged: list[tuple[int, float | None]] = []
    error = ""
    try:
        _train(point, clock, taps, logged)
    except Exception as exception:
        frames = traceback.walk_tb(exception.__traceback__)
        if not any(frame.f_globals.get("__name__") in MONITOR_MODULES for frame, _ in frames):
            raise
        error = " ".join(f"{type(exception).__name__}: {exception}".split())
    if not clock.num_reads and not error and number == 0:
        raise RuntimeError("this ThroughputMonitor did not read the virtual clock")
    return _measurement(point, taps, logged, error)


def _train(point: Point, clock: VirtualClock, taps: Taps, logged: list[tuple[int, float | None]]) -> None:
    """Train; at each log of the monitor, append the micro-batches so far and the rate, if any, to ``logged``."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import throughput_monitor
    from lightning.pytorch.loggers.logger import Logger

    def slow_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        clock.now += point.micro_batch_s
        return batch.mean() * model.weight.sum()  # type: ignore[no-any-return]

    def slow_step(*_: Any) -> None:
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

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            optimizer.register_step_pre_hook(slow_step)
            return taps.optimizer(optimizer)

    class Log(Logger):
        name = version = "audit"

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "train/batches" in metrics:
                of = "train/device/samples_per_sec" if point.world_size == 1 else "train/samples_per_sec"
                logged.append((taps.count(EventKind.LOSS), metrics.get(of)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    validates = point.validate_every is not None
    per_epoch, epochs = point.lengths
    with _quiet(), mock.patch.object(throughput_monitor, "time", clock):
        monitor = throughput_monitor.ThroughputMonitor(batch_size_fn=len, window_size=point.window_size)
        trainer = Trainer(
            accelerator="cpu",
            devices=point.world_size,
            strategy="auto" if point.is_alone else _strategy(point),
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            val_check_interval=point.validate_every,
            check_val_every_n_epoch=None if validates else 1,
            max_epochs=epochs,
            accumulate_grad_batches=point.accumulate,
            log_every_n_steps=point.log_every_n_steps,
            logger=Log(),
            callbacks=[monitor],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        sizes = itertools.islice(itertools.cycle(point.samples), per_epoch)
        batches = taps.loader([torch.ones(size) for size in sizes])
        sample: Any = range(1)
        trainer.fit(Model(), batches, torch.utils.data.DataLoader(sample) if validates else None)


def _strategy(point: Point) -> Any:
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


def _measurement(point: Point, taps: Taps, logged: Sequence[tuple[int, float | None]], error: str) -> Measurement:
    """Compare the logged rates with the tap's updates."""
    made = updates(taps.events)
    batches = [0]  # micro-batches at the start and at the end of each update
    for update in made:
        batches.append(batches[-1] + update.num_micro_batches)

    per_epoch, epochs = point.lengths
    in_epoch = itertools.islice(itertools.cycle(point.samples), per_epoch)
    samples = [0, *itertools.accumulate([*in_epoch] * epochs)]

    def true(first: int, last: int) -> float:
        count = point.world_size * (samples[batches[last]] - samples[batches[first]])
        return float(count / (made[last - 1].mark - made[first - 1].mark))

    rates = []
    for num_batches, reported in logged:
        last = max(k for k, count in enumerate(batches) if count <= num_batches)
        begin = num_batches - (point.window_size - 1)
        first = max((k for k, count in enumerate(batches) if 0 < count <= begin), default=0)
        if reported is not None and 0 < first < last:
            rates.append(Rate(last, reported, true(first, last)))
    return Measurement(
        point=point,
        error=error,
        num_updates=len(made),
        true_samples_per_s=true(1, len(made)) if len(made) > 1 else None,
        log_updates=tuple(max(k for k, n in enumerate(batches) if n <= count) for count, _ in logged),
        rates=tuple(rates),
        num_rates_logged=sum(reported is not None for _, reported in logged),
    )
