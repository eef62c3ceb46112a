"""The tensors that ZeRO stages 2 and 3 make and free, line by line as deepspeed/runtime/zero does it (0.19.8)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from bench.backends.base import Backend
from bench.forecast.live import Live
from bench.forecast.replay_frameworks import Framework, new_gradient, whole_gradient
from bench.judge import zero
from bench.judge.gathers import Coordinator
from bench.judge.zero import ZeroSettings, ceil_to
from bench.plan.cell import Cell, Sync
from bench.workload.layout import ROOT, Layout

DOUBLE = 8
"""Bytes per element of the dtype in which norms are taken (zero/utils.py:get_norm_dtype)."""


class Zero(Framework):
    """What both stages do: gradients are collected in a bucket, which is reduced when it is full.

    A parameter that is larger than a bucket is reduced alone, from its own gradient. Deferred sync fills the buckets
    after the window's last backward, in the order of the parameters (engine.py:coalesce_grad_reduction).
    """

    def __init__(
        self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int, settings: ZeroSettings
    ) -> None:
        super().__init__(live, cell, layout, backend, state)
        self.settings = settings
        self.bucket: list[int] = []

    def gradient(self, parameter: int) -> None:
        if self.backend.sync is Sync.DEFERRED:
            self.add(parameter, "gradients")
        else:
            self.live.rename(new_gradient(parameter), whole_gradient(parameter), "gradients_transient")
            self._fill(parameter)

    def finish(self, unit: int) -> None:
        if unit == ROOT and self.backend.sync is Sync.EAGER:
            self._epilogue()

    def end(self) -> None:
        if self.backend.sync is Sync.DEFERRED:
            for parameter in range(len(self.layout.parameters)):
                self._fill(parameter)
            self._epilogue()

    def _fill(self, parameter: int) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``: the gradient becomes a view of the bucket."""
        self._open()
        size = self.settings.reduce_bucket
        if self.bucket and sum(map(self.numel, self.bucket)) + self.numel(parameter) > size:
            self._reduce()
        if self.numel(parameter) <= size:
            self.live.drop(whole_gradient(parameter))
        self.bucket.append(parameter)

    def _open(self) -> None:
        """Allocate the buckets, if they do not live for good."""

    def _reduce(self) -> None:
        """Reduce the bucket, and empty it."""
        raise NotImplementedError

    def _epilogue(self) -> None:
        """Reduce the last bucket."""
        self._reduce()


class Stage2(Zero):
    """Whole flat parameters, a partition of the fp32 masters, and the gradients of that partition.

    In fp32 the gradients are those of all parameters that lie in the partition at least in part, whole: a backward
    copies its own to a new buffer, which is added at its end (stage_1_and_2.py:copy_grads_in_partition,
    independent_gradient_partition_epilogue). In bf16 they are added to a buffer of the partition at once
    (_build_compact_grad_partition_buffer).
    """

    def __init__(
        self,
        live: Live,
        cell: Cell,
        layout: Layout,
        backend: type[Backend],
        state: int,
        settings: ZeroSettings,
        rank: int,
    ) -> None:
        super().__init__(live, cell, layout, backend, state, settings)
        world_size = cell.world_size
        self._rank = rank
        self._partition = zero.flat(layout, world_size) // world_size
        self._slices = _slices(layout, world_size)
        self._inside = zero.overlapping(layout, world_size, rank)
        whole = self._partition * world_size
        live.make("parameters", "parameters", self.element * whole + 4 * self._partition)

    @property
    def _compact(self) -> bool:
        return self.element < 4

    def _open(self) -> None:
        """``setup_buckets``: one, or two if communication overlaps; freed when the backward is over."""
        if "buckets" not in self.live:
            num_buckets = 2 if self.settings.overlap else 1
            self.live.make("buckets", "communication", self.element * self.settings.reduce_bucket * num_buckets)

    def _reduce(self) -> None:
        """``average_tensor``, then ``copy_grads_in_partition`` for each parameter.

        Neighbours that belong to one rank are one slice, except this rank's own in bf16. Slices that are sent together
        are made flat, which copies them unless there is only one, and cast to fp32 (allreduce_bucket).
        """
        for numel, num_slices in self._pieces():
            self.live.make("flat", "communication", self.element * numel * (num_slices > 1))
            self.live.make("cast", "communication", 4 * numel * self._compact)
            own = any(rank == self._rank for p in self.bucket for rank, _ in self._slices[p])
            if self._compact and own and "partition" not in self.live:
                self.live.make("partition", "gradients", 4 * self._partition)
            self.live.drop("flat", "cast")
        for p in self.bucket:
            inside = any(rank == self._rank for rank, _ in self._slices[p])
            if inside and not self._compact and "in partition" not in self.live:
                self.live.make("in partition", "gradients_transient", 4 * self._inside)
            self.live.forget(whole_gradient(p))
        self.bucket = []

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """The elements and the number of slices of each all-reduce of the bucket (allreduce_and_scatter)."""
        slices: list[list[int]] = []  # rank, elements
        for p in self.bucket:
            for rank, numel in self._slices[p]:
                if slices and slices[-1][0] == rank and not (self._compact and rank == self._rank):
                    slices[-1][1] += numel
                else:
                    slices.append([rank, numel])
        numel = num_slices = 0
        for _, more in slices:
            numel, num_slices = numel + more, num_slices + 1
            if numel > self.settings.reduce_bucket:
                yield numel, num_slices
                numel = num_slices = 0
        if numel:
            yield numel, num_slices

    def _epilogue(self) -> None:
        super()._epilogue()
        if "in partition" in self.live:
            if "summed" in self.live:
                self.live.drop("in partition")
            else:
                self.live.rename("in partition", "summed", "gradients")
        self.live.drop("buckets")

    def step(self) -> None:
        """Norms in fp64, slice by slice; then, in fp32, the gradient copied into one flat tensor."""
        own = [numel for slices in self._slices for rank, numel in slices if rank == self._rank]
        self.live.make("double", "temporaries", DOUBLE * max(own, default=0))
        self.live.drop("double")
        if not self._compact:
            self.live.make("flat gradient", "gradients", 4 * self._partition)
            self.live.drop("summed")
        super().step()


@functools.cache
def _slices(layout: Layout, world_size: int) -> list[list[tuple[int, int]]]:
    """For each parameter, the ranks in whose partitions it lies, each with its number of elements."""
    return [zero.ranks_of(layout, p, world_size) for p in range(len(layout.parameters))]


class Stage3(Zero):
    """Partitions of parameters, masters and gradients, and one bucket, all held for good; modules are gathered."""

    def __init__(
        self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int, settings: ZeroSettings
    ) -> None:
        super().__init__(live, cell, layout, backend, state, settings)
        self._shards = sum(map(self._shard, range(len(layout.parameters))))
        live.make("parameters", "parameters", (self.element + 4) * self._shards)
        live.make("partitions", "gradients", 4 * self._shards)
        live.make("bucket", "communication", 4 * settings.reduce_bucket)
        self._gathers = _Gathers(self)
        self._modules = {p: m for m, own in enumerate(layout.modules) for p in own}
        self._position = 0

    def _shard(self, parameter: int) -> int:
        """Elements of a rank's partition of a parameter, padded."""
        return ceil_to(self.numel(parameter), self.cell.world_size) // self.cell.world_size

    def start(self, *, first: bool, last: bool) -> None:
        super().start(first=first, last=last)
        self._gathers.begin()
        self._position = 0

    def use(self, parameter: int) -> None:
        self._advance(self.layout.forward, self._gathers.forward)

    def used(self, parameter: int) -> None:
        self._advance(self.layout.forward, self._gathers.forward, enter=False)

    def leave(self, unit: int) -> None:
        if unit == ROOT:
            assert self._position == len(self.layout.forward), "every module was left"
            self._position = 0

    def use_again(self, parameter: int) -> None:
        self._advance(self.layout.backward, self._gathers.backward)

    def used_again(self, parameter: int) -> None:
        self._advance(self.layout.backward, self._gathers.backward, enter=False)

    def finish(self, unit: int) -> None:
        if unit == ROOT:
            assert self._position == len(self.layout.backward), "every module was finished"
            self._gathers.end()
        super().finish(unit)

    def _advance(self, events: tuple[int, ...], see: Callable[[int], None], *, enter: bool = True) -> None:
        """Enter and leave modules up to the next one with parameters, and ``enter`` it or stop right before.

        Autograd makes the gradient of a module's input after it has added that of the weight, before it goes on.
        """
        while self._position < len(events):
            event = events[self._position]
            has_parameters = event >= 0 and bool(self.layout.modules[event])
            if has_parameters and not enter:
                return
            self._position += 1
            see(event)
            if has_parameters:
                return

    def _reduce(self) -> None:
        """``__avg_scatter_grads``: tensors are copied into one, rank by rank and padded, unless one needs no padding.

        coalesced_collectives.py:reduce_scatter_coalesced. A gradient that is too large for the bucket is cast first.
        """
        if not self.bucket:
            return
        world_size = self.cell.world_size
        alone = len(self.bucket) == 1
        cast = sum(4 * self.numel(p) for p in self.bucket if whole_gradient(p) in self.live) * (self.element < 4)
        self.live.make("cast", "communication", cast)
        padded = 4 * world_size * sum(map(self._shard, self.bucket))
        in_place = alone and self.numel(self.bucket[0]) % world_size == 0
        self.live.make("reduce", "communication", 0 if in_place else padded)
        self.live.drop("reduce", "cast")
        self.live.forget(*map(whole_gradient, self.bucket))
        self.bucket = []

    def step(self) -> None:
        """Norms in fp64, and the gradients copied into one flat tensor (_prepare_fp32_grad_for_sub_group)."""
        self._gathers.release_all()
        self.live.make("double", "temporaries", DOUBLE * max(map(self._shard, range(len(self.layout.parameters)))))
        self.live.drop("double")
        self.live.make("flat gradient", "gradients", 4 * self._shards)
        super().step()


class _Gathers(Coordinator):
    """The coordinator, with the tensors that it makes and frees.

    An all-gather of several parameters has an output, from which all are copied when the first of them is waited for;
    it lives until the last of them is (AllGatherCoalescedHandle in the registry of gathers in flight). An all-gather of
    one parameter is the parameter itself (_all_gather_sequential). At W = 1 parameters are their shards
    (NoGatherHandle).
    """

    def __init__(self, stage: Stage3) -> None:
        super().__init__(stage.layout, prefetch=stage.settings.prefetch, max_live=stage.settings.max_live)
        self._stage = stage
        self._outputs: dict[tuple[int, ...], int] = {}

    def gathered(self, parameters: tuple[int, ...]) -> None:
        stage = self._stage
        if (world_size := stage.cell.world_size) == 1:
            return
        padded = stage.element * world_size * sum(map(stage._shard, parameters))
        if len(parameters) == 1:
            stage.live.make(f"gathered {parameters[0]}", "parameters_transient", padded)
        else:
            stage.live.make(f"gather {parameters}", "communication", padded)

    def arrived(self, parameters: tuple[int, ...]) -> None:
        stage = self._stage
        if stage.cell.world_size > 1 and len(parameters) > 1:
            for p in parameters:
                stage.live.make(f"gathered {p}", "parameters_transient", stage.element * stage.numel(p))

    def forgotten(self, parameters: tuple[int, ...]) -> None:
        self._stage.live.forget(f"gather {parameters}")

    def released(self, parameter: int) -> None:
        self._stage.live.forget(f"gathered {parameter}")
