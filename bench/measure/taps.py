"""The three taps, loader, loss and optimizer, which record events.

Every framework must fetch micro-batches, compute a loss and apply updates, whoever owns the
training loop. Everything is measured at these three places, never by asking the framework. The tap
is on the innermost torch optimizer, where an update cannot be reported without being applied. A
clock marks each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from time import monotonic, perf_counter  # by name: a backend may replace those of the module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bench.backends.training_job import EndOfPassError, MicroBatches
from bench.measure import heartbeat
from bench.plan.task import SETTLED_WINDOWS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer


class EventKind(StrEnum):
    """The tap that an event came from."""

    FETCH = "fetch"
    """A micro-batch left the loader."""
    FORWARD = "forward"
    """The loss of a micro-batch is about to be computed. Not recorded: only ``on_event`` is
    called."""
    LOSS = "loss"
    """The loss of a micro-batch was computed."""
    STEP = "step"
    """The inner optimizer's ``step`` returned."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event on this rank, in program order."""

    kind: EventKind
    mark: object = None
    """For a step, the clock's mark: seconds on the host, or an event of the device."""


@dataclass(slots=True)
class Update:
    """One parameter update: one or more inner steps with no micro-batch in between.

    ZeRO steps its inner optimizer once per group or sub-group, so an inner step is not an update.
    """

    num_micro_batches: int
    """Micro-batches whose loss was computed since the previous update."""
    mark: Any
    """The clock's mark at the last inner step."""
    num_inner_steps: int = 1


def updates(events: Iterable[Event]) -> list[Update]:
    """The updates in a stream of events. Consecutive inner steps belong to the same update."""
    found: list[Update] = []
    losses = 0
    since_step = True
    for event in events:
        if event.kind is not EventKind.STEP:
            losses += event.kind is EventKind.LOSS
            since_step = True
        elif since_step:
            found.append(Update(num_micro_batches=losses, mark=event.mark))
            losses, since_step = 0, False
        else:
            found[-1].mark = event.mark
            found[-1].num_inner_steps += 1
    return found


@dataclass
class Taps:
    """Records the events of one rank during one pass."""

    mark: Callable[[], object]
    """Reads the clock at every inner step; must not synchronize a device."""
    events: list[Event] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """The detached loss of every micro-batch, on its device."""
    on_event: Callable[[EventKind], None] | None = None
    """Called after each event, in passes that are not timed."""
    in_loss: bool = False
    """Whether the forward is running."""
    ends_after: int = 0
    """Losses after whose update the training ends; 0 for none."""
    num_due: int = 0
    """Losses of the whole pass, if the kernel's clock is to mark its first fetch and its last
    step."""
    optimizers: list[Optimizer] = field(default_factory=list)
    """Those that are tapped."""

    _num_losses: int = 0
    _is_over: bool = False
    _marking: dict[heartbeat.MarkedMoment, float] = field(default_factory=dict)
    _first_fetch: float | None = None
    _last_step: float | None = None

    @property
    def training_seconds(self) -> float:
        """Host seconds from the first fetch to the last inner step; 0 if there was none."""
        if self._first_fetch is None or self._last_step is None:
            return 0.0
        return self._last_step - self._first_fetch

    @property
    def marking_seconds(self) -> float:
        """By how much the kernel's clock may tell more than ``training_seconds``."""
        return sum(self._marking.values())

    def finish(self) -> None:
        """Set the end of training to now, for devices that still work when the host returns."""
        self._last_step = perf_counter()
        if self.num_due:
            self._mark(heartbeat.MarkedMoment.LAST_STEP, self._last_step)

    def loader(self, loader: MicroBatches) -> TappedLoader:
        return TappedLoader(loader, self)

    def loss(
        self, function: Callable[[nn.Module, Tensor], Tensor]
    ) -> Callable[[nn.Module, Tensor], Tensor]:

        def tapped(model: nn.Module, batch: Tensor) -> Tensor:
            if self.ends_after and self._num_losses >= self.ends_after:
                raise EndOfPassError
            self.in_loss = True
            if self.on_event is not None:
                self.on_event(EventKind.FORWARD)
            loss = function(model, batch)
            self.in_loss = False
            self.losses.append(loss.detach())
            self._num_losses += 1
            self.record(EventKind.LOSS)
            return loss

        return tapped

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, with a hook after each step."""
        optimizer.register_step_post_hook(lambda *_: self.record(EventKind.STEP, self.mark()))
        self.optimizers.append(optimizer)
        return optimizer

    def record(self, kind: EventKind, mark: object = None) -> None:
        if kind is EventKind.STEP:
            self._last_step = perf_counter()
            self._is_over = 0 < self.ends_after <= self._num_losses
            if self.num_due and len(self.losses) == self.num_due:
                self._mark(heartbeat.MarkedMoment.LAST_STEP, self._last_step)
        elif self._first_fetch is None:
            self._first_fetch = perf_counter()
            if self.num_due:
                moment = heartbeat.MarkedMoment.FIRST_FETCH
                self._first_fetch = self._mark(moment, self._first_fetch)
        self.events.append(Event(kind, mark))
        heartbeat.beat()
        if self.on_event is not None:
            self.on_event(kind)

    def _mark(self, moment: heartbeat.MarkedMoment, began: float) -> float:
        """Mark a moment by the kernel's clock, between ``began`` and the time that is returned."""
        heartbeat.mark(moment)
        ended = perf_counter()
        self._marking[moment] = ended - began
        return ended

    def check_end(self) -> None:
        """Raise EndOfPassError where a micro-batch is fetched after the last update of the pass."""
        if self._is_over:
            raise EndOfPassError

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events)


class TappedLoader:
    """A sized iterable that records a fetch for each micro-batch."""

    def __init__(self, loader: MicroBatches, taps: Taps) -> None:
        self._loader = loader
        self._taps = taps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            self._taps.check_end()
            self._taps.record(EventKind.FETCH)
            yield batch


class Instrument(Protocol):
    """What measures one window."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class SettledWindows:
    """Gives each instrument one window, in order, after SETTLED_WINDOWS.

    Call ``on_event`` after every event.
    """

    def __init__(self, accumulate: int, *instruments: Instrument) -> None:
        self._accumulate = accumulate
        self._instruments = instruments
        self._num_losses = self._num_windows = 0
        self._running: Instrument | None = None

    @property
    def num_trained(self) -> int:
        """Windows to train, so that every instrument has one."""
        return SETTLED_WINDOWS + len(self._instruments)

    def on_event(self, kind: EventKind) -> None:
        """Handle one event; a window ends with the first inner step after its last loss."""
        self._num_losses += kind is EventKind.LOSS
        windows = self._num_losses // self._accumulate
        if kind is not EventKind.STEP or windows == self._num_windows:
            return
        self._num_windows = windows
        self.close()
        if 0 <= (number := windows - SETTLED_WINDOWS) < len(self._instruments):
            self._running = self._instruments[number]
            self._running.start()

    def close(self) -> None:
        """Stop the instrument that runs, if any."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """The clock of a device."""

    def mark(self) -> Mark:
        """Mark the current time without synchronizing the device."""

    def intervals(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between consecutive marks. May synchronize: call it after the pass."""

    def moments(self, marks: Sequence[Mark]) -> list[float]:
        """The ``time.monotonic()`` of each mark. May synchronize: call it after the pass."""


class HostClock:
    """``time.perf_counter``, for devices whose calls return when the work is done, as the CPU's."""

    def mark(self) -> float:
        return perf_counter()

    def intervals(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def moments(self, marks: Sequence[float]) -> list[float]:
        since = monotonic() - perf_counter()  # on Linux both are one clock
        return [mark + since for mark in marks]


class AcceleratorClock:
    """Events on the accelerator's current stream: device time, however far ahead the host runs."""

    def mark(self) -> torch.Event:
        import torch

        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def intervals(self, marks: Sequence[torch.Event]) -> list[float]:
        import torch

        torch.accelerator.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def moments(self, marks: Sequence[torch.Event]) -> list[float]:
        import torch

        end = self.mark()
        torch.accelerator.synchronize()
        now = monotonic()
        return [now - mark.elapsed_time(end) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> Clock[Any]:
    """The clock for a device, whose marks are for itself alone."""
    if device.type == "cpu":
        return HostClock()
    return AcceleratorClock()
