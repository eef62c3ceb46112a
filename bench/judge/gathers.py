"""Replays ZeRO-3's gathers of parameters, module by module, as DeepSpeed's coordinator issues them.

There is no closed form: how parameters fall into all-gathers depends on how far prefetching has
come. The replay follows deepspeed/runtime/zero/partitioned_param_coordinator.py (0.19.8) without
its tensors.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from bench.grouping import grouped
from bench.validation import Natural
from bench.workload.layout import ROOT, Layout


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The options of ZeRO that decide what is sent and held; sizes in elements.

    ``bench.backends.zero_options`` sets them.
    """

    stage: Natural
    overlap_comm: bool
    reduce_bucket_size: Natural
    stage3_param_persistence_threshold: Natural
    stage3_max_reuse_distance: Natural
    stage3_max_live_parameters: Natural
    stage3_prefetch_bucket_size: Natural
    leaf_module: Mapping[str, object] | None = None
    """None unless blocks are gathered as one."""
    offload_optimizer: Mapping[str, object] | None = None
    """None unless masters rest on the host; so do shards of parameters in stage 3."""


class GatherState(Enum):
    """State of a parameter's full value on this rank (ZeroParamStatus)."""

    ABSENT = 0
    INFLIGHT = 1
    PRESENT = 2


NOT_YET = -(10**10)
"""The step for which a parameter was fetched that was not: before all others."""


class Coordinator:
    """Replays micro-batches after the first, which recorded the trace of modules."""

    def __init__(self, layout: Layout, options: ZeroOptions) -> None:
        self._layout = layout
        self._numel = [p.numel for p in layout.parameters]
        self._prefetch = options.stage3_prefetch_bucket_size
        self._max_live = options.stage3_max_live_parameters
        self._reuse = options.stage3_max_reuse_distance
        self._order = [m for m in chain(layout.forward, layout.backward) if m >= 0]
        self._trace: list[tuple[int, int]] = []
        """Each use of a parameter, with its step."""
        for step, module in enumerate(self._order):
            self._trace += [(p, step) for p in layout.modules[module]]
        self._persistent = persistent(layout, options)
        self._status = [GatherState.ABSENT] * len(self._numel)
        for p in self._persistent:  # gathered after every step
            self._status[p] = GatherState.PRESENT
        self._users: list[set[int]] = [set() for _ in self._numel]
        self._released: dict[tuple[int, int], frozenset[int]] = {}
        self._registry: dict[int, tuple[int, ...]] = {}
        """The all-gather of each parameter that was not waited for since."""
        self.gathers: list[tuple[int, ...]] = []
        """The parameters of each all-gather in the last replayed micro-batch."""

    def micro_batch(self) -> None:
        """Replay forward and backward (DeepSpeedZeRoOffload's hooks on modules)."""
        self._begin()
        for event in self._layout.forward:
            if event >= 0:
                self._fetch(event)
            else:
                self._leave(~event)
        unfinished: dict[int, None] = {}
        for event in self._layout.backward:
            if event >= 0:
                unfinished[event] = None
                self._fetch(event)
            else:
                unfinished.pop(~event, None)
                self._leave(~event)
        # Their inputs need no gradient (release_backward_leftovers).
        for module in reversed(unfinished):
            for p in self._layout.modules[module]:
                self._users[p].discard(module)
                if p not in self._persistent:
                    self._release(p)

    def state(self) -> tuple[GatherState, ...]:
        """The states that carry over to the next micro-batch."""
        carried = []
        for state in self._status:
            if state is GatherState.INFLIGHT:
                carried.append(GatherState.PRESENT)
            else:
                carried.append(state)
        return tuple(carried)

    def _begin(self) -> None:
        """Forward begins: release what is in flight and restart the prefetch queue (reset_step)."""
        for p in list(self._registry):
            self._wait(p)
            self._release(p)
        self._queue = deque(self._trace)
        self._fetched_for: dict[int, int] = defaultdict(lambda: NOT_YET)
        self._step = 0
        self._live = 0
        self.gathers = []

    def _gather(self, parameters: list[int]) -> None:
        """Issue one collective for all absent parameters (__all_gather_params_)."""
        absent = tuple(p for p in parameters if self._status[p] is GatherState.ABSENT)
        if not absent:
            return
        self.gathers.append(absent)
        for p in absent:
            self._live += self._numel[p]
            self._status[p] = GatherState.INFLIGHT
            self._registry[p] = absent

    def _wait(self, p: int) -> None:
        """Wait for a parameter in flight, which completes its whole collective."""
        gathered = self._registry.pop(p, ())
        for other in gathered:
            if other == p or self._registry.get(other) is gathered:
                self._status[other] = GatherState.PRESENT

    def _fetch(self, module: int) -> None:
        """Gather what the module needs, then prefetch along the trace (_fetch_sub_module_impl)."""
        needed = self._layout.modules[module]
        self._gather(list(needed))
        for p in needed:
            self._users[p].add(module)
            self._wait(p)
        self._drop_from_queue(needed)
        self._gather(self._ahead())
        self._step += 1

    def _drop_from_queue(self, needed: Sequence[int]) -> None:
        """Take from the queue as many parameters as were fetched now, and not ahead."""
        fetched_now = {p for p in needed if self._fetched_for[p] < self._step}
        dropped: set[int] = set()
        while self._queue and len(dropped) < len(fetched_now):
            p, step = self._queue.popleft()
            self._fetched_for[p] = step
            dropped.add(p)

    def _ahead(self) -> list[int]:
        """The next absent parameters of the queue, as many as there is room for."""
        room = min(self._max_live - self._live, self._prefetch)
        ahead: list[int] = []
        numel = 0
        while self._queue and numel < room:
            p, step = self._queue.popleft()
            self._fetched_for[p] = max(self._fetched_for[p], step)
            if self._status[p] is GatherState.ABSENT and p not in ahead:
                ahead.append(p)
                numel += self._numel[p]
        return ahead

    def _leave(self, module: int) -> None:
        """Release a module's parameters (release_sub_module).

        Those that prefetching skipped, as they were present, stay.
        """
        key = (module, self._step)
        if key not in self._released:
            self._released[key] = self._to_release(module)
        for p in self._layout.modules[module]:
            self._users[p].discard(module)
            if p in self._released[key]:
                self._release(p)

    def _to_release(self, module: int) -> frozenset[int]:
        """Its parameters that are not used again soon (__params_to_release caches its results)."""
        found: set[int] = set()
        for p in self._layout.modules[module]:
            if p not in self._persistent and self._fetched_for[p] <= self._step:
                found.add(p)
        traversed = 0
        for later in self._order[self._step :]:
            if traversed >= self._reuse:
                break
            for p in self._layout.modules[later]:
                found.discard(p)
                traversed += self._numel[p]
        return frozenset(found)

    def _release(self, p: int) -> None:
        if self._status[p] is GatherState.PRESENT and not self._users[p]:
            self._status[p] = GatherState.ABSENT
            self._live -= self._numel[p]


def persistent(layout: Layout, options: ZeroOptions) -> frozenset[int]:
    """The parameters that stay gathered: the update gathers each again (stage3.py:_post_step)."""
    most = options.stage3_param_persistence_threshold
    return frozenset(p for p, parameter in enumerate(layout.parameters) if parameter.numel <= most)


def leaves(layout: Layout) -> Layout:
    """The layout as ZeRO-3 sees it if every block is a leaf, whose parameters are gathered as one.

    There are no hooks within a block, and its gradients are reduced when its whole backward is
    done, in the order of its parameters
    (deepspeed/runtime/zero/stage3.py:create_reduce_and_remove_grad_hooks).
    """
    unit_of = [parameter.unit for parameter in layout.parameters]
    parameters_of = grouped((unit, p) for p, unit in enumerate(unit_of))
    callers = _callers(layout)
    units: dict[int, set[int]] = defaultdict(set)
    for module, outer in callers.items():
        for each in (module, *outer):
            units[each].update(unit_of[p] for p in layout.modules[module])
    in_block: set[int] = set()
    for module, found in units.items():
        if len(found) == 1 and ROOT not in found:
            in_block.add(module)
    inner: set[int] = set()
    for module, outer in callers.items():
        if in_block.intersection(outer):
            inner.add(module)
    modules = list(layout.modules)
    for module in in_block | inner:
        modules[module] = ()
        if module not in inner:
            modules[module] = tuple(parameters_of[min(units[module])])
    return dataclasses.replace(
        layout,
        gradients=_block_by_block(layout.gradients, unit_of, parameters_of),
        modules=tuple(modules),
        forward=_without(layout.forward, inner),
        backward=_without(layout.backward, inner),
    )


def _block_by_block(
    gradients: Sequence[int], unit_of: Sequence[int], parameters_of: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """The order of gradients, if those of a block come together where its last one was."""
    last = {unit_of[p]: p for p in gradients}
    found: list[int] = []
    for p in gradients:
        if unit_of[p] == ROOT:
            found.append(p)
        elif p == last[unit_of[p]]:
            found += parameters_of[unit_of[p]]
    return tuple(found)


def _callers(layout: Layout) -> dict[int, tuple[int, ...]]:
    """The modules in whose forward each module is called."""
    found: dict[int, tuple[int, ...]] = {}
    running: list[int] = []
    for event in layout.forward:
        if event >= 0:
            found[event] = tuple(running)
            running.append(event)
        else:
            running.remove(~event)
    return found


def _without(events: Sequence[int], modules: Collection[int]) -> tuple[int, ...]:
    """The beginnings and ends of all other modules."""
    return tuple(event for event in events if max(event, ~event) not in modules)


def of_window(layout: Layout, accumulate: int, options: ZeroOptions) -> list[tuple[int, ...]]:
    """The parameters of each all-gather in a window of N micro-batches.

    The update before it released everything.
    """
    coordinator = Coordinator(layout, options)
    found: list[tuple[int, ...]] = [(p,) for p in persistent(layout, options)]
    seen: dict[tuple[GatherState, ...], list[tuple[int, ...]]] = {}
    for _ in range(accumulate):
        before = coordinator.state()
        if before in seen:  # N may be large: from here on all micro-batches are alike
            found += seen[before] * (accumulate - len(seen))
            break
        coordinator.micro_batch()
        seen[before] = coordinator.gathers
        found += coordinator.gathers
    return found
