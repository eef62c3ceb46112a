"""A config of Lightning: what it says of the Trainer, its strategy, callbacks and data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from bench.audit.lint import deepspeed_config
from bench.audit.lint.class_reference import arguments, class_name, is_class
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig, deepspeed_part
from bench.audit.lint.lint_options import LintOptions, batches_per_epoch, windows_of
from bench.audit.stepcount import StepRule, Steps, calculate
from bench.audit.training_plan import LARGEST_ACCUMULATE, TrainingPlan
from bench.plan.cell import Stepping

DEFAULT_EPOCHS = 1000
"""With neither max_epochs nor max_steps nor a Timer: lightning/pytorch/loops/utilities.py
_parse_loop_limits."""
DEFAULT_LOG_EVERY = 50
DEFAULT_WINDOW = 100
"""Micro-batches: lightning/fabric/utilities/throughput.py Throughput."""
DEFAULT_STAGE = 2
"""ZeRO stage of DeepSpeedStrategy."""
BATCH_SIZES = ("batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size")
NOT_TRAINED = ("val", "test", "predict", "eval")
"""Prefixes of the parts of the data's config that are not about training."""


class LightningConfig:
    """What a config says that rules need. Raises InputError naming the key of a wrong value."""

    def __init__(self, root: ConfigPart, options: LintOptions) -> None:
        self.options, self.trainer = options, root.at("trainer").mapping()
        trainer = self.trainer
        self.is_fsdp = _strategy_name(trainer.at("strategy")).startswith("fsdp")
        """FSDPStrategy steps as Lightning itself does under one device, DDP and FSDP2, but clips
        differently."""
        self.engine = _engine(trainer.at("strategy"))
        """What DeepSpeed is told; None with another strategy."""
        self.accumulate = trainer.at("accumulate_grad_batches").integer(
            most=LARGEST_ACCUMULATE, default=1
        )
        self._read_epoch(root)
        self._read_limits(trainer)
        self._read_clipping(trainer)
        precision = trainer.at("precision")
        if isinstance(precision.value, bool) or not isinstance(precision.value, str | int | None):
            precision.refuse("a precision such as bf16-mixed")
        self.precision = ""
        """Empty if it is not given."""
        if precision.given:
            self.precision = str(precision.value)
        self._read_callbacks(trainer)
        if self.num_batches is None and (self.accumulate > 1 or self.max_steps or self.monitor):
            options.want(self.samples, self.world_size, self.batch_size)

    def _read_epoch(self, root: ConfigPart) -> None:
        """NB, and the numbers from which it follows; the options go before the config."""
        options, trainer = self.options, self.trainer
        data = [
            part for part in (root.at("data"), root.at("model")) if isinstance(part.value, dict)
        ]
        self.world_size = options.world_size
        if self.world_size is None:
            self.world_size = _world_size(trainer)
        self.batch_size = options.batch_size
        if self.batch_size is None:
            self.batch_size = _first_integer(data, BATCH_SIZES)
        self.samples = options.samples  # a key such as num_samples may be of another set
        self.drop_last = any(value is True for _, value in _named(data, ("drop_last",)))
        self.limit = trainer.at("limit_train_batches")
        """What limits NB."""
        if trainer.at("overfit_batches").value:
            self.limit = trainer.at("overfit_batches")
        self.num_batches = _num_batches(
            self.limit, self.samples, self.batch_size, self.world_size, drop_last=self.drop_last
        )
        """NB; None if it is unknown, or if it is 0."""

    def _read_limits(self, trainer: ConfigPart) -> None:
        """What ends the training, and what is logged of it."""
        self.dev_run = 0
        """Micro-batches of ``fast_dev_run``, which trains these and logs nothing; 0 if it is
        off."""
        # Lightning does not let it limit overfit_batches (trainer/setup.py).
        if self.limit.name != "overfit_batches":
            self.dev_run = _dev_run(trainer.at("fast_dev_run"))
        place = trainer.at("log_every_n_steps")
        self.log_every = place.integer(least=0, default=DEFAULT_LOG_EVERY)
        """0 if nothing is logged, or it is unknown how often."""
        if place.unknown:
            self.log_every = 0
        self.max_steps = trainer.at("max_steps").integer(least=-1)
        if self.max_steps == -1:
            self.max_steps = None
        ends = ("max_epochs", "max_steps", "max_time")
        self.knows_end = not any(trainer.at(name).unknown for name in ends)
        """Whether the config itself says what ends the training."""
        self.knows_accumulate = not trainer.at("accumulate_grad_batches").unknown

    def _read_clipping(self, trainer: ConfigPart) -> None:
        self.clip = trainer.at("gradient_clip_val").number()
        algorithm = trainer.at("gradient_clip_algorithm")
        if algorithm.string() not in {None, "norm", "value"}:
            algorithm.refuse("norm or value")
        self.clip_by_value = algorithm.value == "value"

    def _read_callbacks(self, trainer: ConfigPart) -> None:
        place = trainer.under("callbacks+")  # what LightningCLI adds; it wins in the same file
        if not place.given:
            place = trainer.at("callbacks")
        callbacks = _callbacks(place)
        self.schedule = callbacks.get("GradientAccumulationScheduler")
        self.monitor = callbacks.get("ThroughputMonitor")
        self.window: int | None = DEFAULT_WINDOW
        """Of the ThroughputMonitor, in micro-batches; None if it is unknown."""
        if self.monitor is not None and window_place(self.monitor).given:
            self.window = window_place(self.monitor).integer()
        has_timer = "Timer" in callbacks or trainer.at("max_time").given
        self.max_epochs = _max_epochs(trainer, self.max_steps, has_timer=has_timer)
        """Infinite if only max_steps, or nothing, ends the training."""

    @property
    def backend(self) -> str:
        """The backend of this project that shows the same."""
        if self.engine is not None:
            # ZeRO-1 and plain data parallelism lose the same micro-batches as ZeRO-3.
            if self.engine.stage == 2:
                return "lightning-deepspeed-zero2"
            return "lightning-deepspeed-zero3"
        if self.is_fsdp:
            return "lightning-fsdp2"
        return "lightning-ddp"

    @property
    def trains(self) -> bool:
        """Whether whole epochs are trained."""
        return bool(self.max_epochs) and self.max_steps != 0 and not self.dev_run

    @property
    def windows(self) -> TrainingPlan | None:
        """The windows of an epoch.

        None if NB is unknown, N changes, or nothing is trained but a ``fast_dev_run``.
        """
        if (
            self.num_batches is None
            or self.schedule is not None
            or self.dev_run
            or not self.knows_accumulate
        ):
            return None
        return windows_of(self.num_batches, self.accumulate)

    @cached_property
    def end(self) -> Steps | None:
        """How the training ends; None if that is not known, or if nothing is given that ends it."""
        epochs = None
        if math.isfinite(self.max_epochs):
            epochs = int(self.max_epochs)
        if self.windows is None or not self.trains or not self.knows_end:
            return None
        if epochs is None and self.max_steps is None:
            return None
        return calculate(
            dataclasses.replace(self.windows, epochs=epochs, max_steps=self.max_steps), self.rule
        )

    @property
    def rule(self) -> StepRule:
        """When the parameters are updated, and when ``trainer.global_step`` grows."""
        if self.engine is None:
            return StepRule(stepping=Stepping.FLUSH)
        return StepRule(stepping=Stepping.SPLIT, clears=True, twice=True)


def _strategy_name(place: ConfigPart) -> str:
    """The name of the strategy or its class, in lower case; empty if it is not known here."""
    if isinstance(place.value, dict) and not is_class(place):
        place.refuse("a name such as deepspeed_stage_2, or class_path and init_args")
    return class_name(place).lower()


def _engine(place: ConfigPart) -> DeepSpeedConfig | None:
    """What a strategy tells DeepSpeed; None if it is another strategy."""
    name, given = _strategy_name(place), arguments(place).mapping()
    if not name.startswith("deepspeed"):
        return None
    part = deepspeed_part(given.at("config"))
    if part is not None:
        return deepspeed_config.read(part)
    stage = given.at("stage").zero_stage(default=DEFAULT_STAGE)
    if name.startswith("deepspeed_stage_"):
        digit = name[len("deepspeed_stage_") :][:1]
        stage = {"1": 1, "2": 2, "3": 3}.get(digit, DEFAULT_STAGE)
    if not given.at("zero_optimization").flag(default=True):
        stage = 0
    offload = "offload" in name or given.at("offload_optimizer").flag(default=False)
    # A file that is not here may say anything.
    is_known = not given.at("config").given
    return DeepSpeedConfig(part=given.at("config"), stage=stage, offload=offload, is_known=is_known)


def _world_size(trainer: ConfigPart) -> int | None:
    """Ranks, if the config says how many."""
    place = trainer.at("devices")
    value = place.value
    if isinstance(place.value, str):
        value = place.value.strip()
    devices: int | None
    nodes_place = trainer.at("num_nodes")
    if value in (None, "auto", "-1", -1, "max") or place.unknown or nodes_place.unknown:
        return None
    if isinstance(value, list) and value:
        devices = len(value)
    elif isinstance(value, str):
        numbers = value.replace(",", " ").split()
        if not numbers or not all(map(str.isdecimal, numbers)):
            place.refuse("a number of devices, a list of them, or auto")
        devices = len(numbers)
        if "," not in value:
            devices = int(numbers[0][:9])
    else:
        devices = place.integer()
    nodes = nodes_place.integer(default=1)
    if devices:
        return devices * nodes
    return None


def _named(
    parts: list[ConfigPart], names: tuple[str, ...], depth: int = 4
) -> Iterator[tuple[ConfigPart, Any]]:
    """Values with these names under the parts, the shallowest first, if about training."""
    for name in names:
        for part in parts:
            value = part.value.get(name)
            if value is not None:
                yield part.at(name), value
    below: list[ConfigPart] = []
    for part in parts:
        for key, value in part.value.items():
            if isinstance(value, dict) and "." not in key and not key.startswith(NOT_TRAINED):
                below.append(part.at(key))
    if below and depth:
        yield from _named(below, names, depth - 1)


def _first_integer(parts: list[ConfigPart], names: tuple[str, ...]) -> int | None:
    """The first of the named values; strings, mappings and lists mean something else."""
    for place, value in _named(parts, names):
        if not isinstance(value, str | dict | list):
            return place.integer()
    return None


def _num_batches(
    place: ConfigPart,
    samples: int | None,
    batch_size: int | None,
    world_size: int | None,
    *,
    drop_last: bool,
) -> int | None:
    """NB, limited as ``place`` says; None if it is unknown, or if it is 0."""
    num_batches = None
    if samples and batch_size and world_size:
        num_batches = batches_per_epoch(samples, batch_size, world_size, drop_last=drop_last)
    limit = place.value
    if place.unknown:
        return None
    if isinstance(limit, float) and not (limit > 1 and limit.is_integer()):
        if not 0 <= limit <= 1:
            place.refuse("an integer of at least 0, or a share from 0.0 to 1.0")
        if num_batches is not None:
            num_batches = int(num_batches * limit)
    else:
        limits = [number for number in (num_batches, place.integer(least=0)) if number is not None]
        num_batches = min(limits, default=None)
    if num_batches == 0:
        return None
    return num_batches


def _dev_run(place: ConfigPart) -> int:
    value = place.value
    if isinstance(value, bool):
        return int(value)
    return place.integer(least=0, default=0)


def _max_epochs(trainer: ConfigPart, max_steps: int | None, *, has_timer: bool) -> float:
    epochs = trainer.at("max_epochs").integer(least=-1)
    if epochs is None:
        if max_steps is None and (not has_timer):
            return DEFAULT_EPOCHS
        return math.inf
    if epochs == -1:
        return math.inf
    return epochs


def _callbacks(place: ConfigPart) -> dict[str, ConfigPart]:
    """The callbacks by their class; those of a config group, by name, count too."""
    found: dict[str, ConfigPart] = {}
    if isinstance(place.value, dict) and not is_class(place):
        callbacks = [place.at(key) for key in place.names_here if "." not in key]
    else:
        callbacks = place.items()
    for callback in callbacks:
        if isinstance(callback.value, dict):
            arguments(callback).mapping()
            callback.at("dict_kwargs").mapping()
        elif not isinstance(callback.value, str | None):
            callback.refuse("a class_path, with init_args")
        found.setdefault(class_name(callback), callback)
    return found


def window_place(monitor: ConfigPart) -> ConfigPart:
    """Where a ThroughputMonitor's window_size is set, or could be."""
    other = monitor.at("dict_kwargs.window_size")
    if other.given:
        return other
    return arguments(monitor).at("window_size")
