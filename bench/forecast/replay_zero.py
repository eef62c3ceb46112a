"""What DeepSpeed's ZeRO stages 2 and 3 make and free; line by line as deepspeed/runtime/zero does it (0.19.8)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from bench.backends.base import Backend
from bench.forecast.live import Live
from bench.forecast.replay_frameworks import Framework, new_gradient, whole_gradient
from bench.judge import zero
from bench.judge.gathers import Coordinator
from bench.judge.tally import ceil_to
from bench.judge.zero import ZeroSettings
from bench.plan.cell import Cell, Sync
from bench.workload.layout import ROOT, Layout

DOUBLE = 8
"""Bytes of an element of what norms are taken of (zero/utils.py:get_norm_dtype)."""


class Zero(Framework):
    """What both stages do: gradients go into a bucket, and the bucket away when it is full.

    A parameter that does not fit into an empty bucket goes alone, from its own gradient. Deferred sync fills the
    buckets after the window's last backward, in the order of the parameters (engine.py:coalesce_grad_reduction).
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
        """``reduce_independent_p_g_buckets_and_remove_grads``: its gradient then is a view of the bucket."""
        self._open()
        size = self.settings.reduce_bucket
        if self.bucket and sum(map(self.numel, self.bucket)) + self.numel(parameter) > size:
            self._reduce()
        if self.numel(parameter) <= size:
            self.live.drop(whole_gradient(parameter))
        self.bucket.append(parameter)

    def _open(self) -> None:
        """Make the buckets, if they do not stay."""

    def _reduce(self) -> None:
        """Reduce what is in the bucket, and empty it."""
        raise NotImplementedError

    def _epilogue(self) -> None:
        """The last bucket goes."""
        self._reduce()


class Stage2(Zero):
    """Flat parameters whole, a partition of the fp32 masters; gradients of the partition are kept.

    In fp32 they are summed as whole parameters that lie in the partition, at least in part: a backward's own are copied
    to a new buffer and added at its end (stage_1_and_2.py:copy_grads_in_partition, independent_gradient_partition_
    epilogue). In bf16 they are added at once to a buffer of the partition (_build_compact_grad_partition_buffer).
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
        """``setup_buckets``: one, or two if communication overlaps; released when the backward is over."""
        if "buckets" not in self.live:
            num_buckets = 2 if self.settings.overlap else 1
            self.live.make("buckets", "communication", self.element * self.settings.reduce_bucket * num_buckets)

    def _reduce(self) -> None:
        """``average_tensor``, then ``copy_grads_in_partition`` for each.

        Neighbours for one rank are one slice, but for the own ones where they are added at once; slices that go
        together are made flat, which copies unless there is only one, and cast to fp32 (allreduce_bucket).
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
            self.live.forget([whole_gradient(p)])
        self.bucket = []

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Elements and slices of each all-reduce of the bucket (allreduce_and_scatter)."""
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
        """Norms in fp64, slice by slice; then the gradient as one flat tensor, in fp32 a copy of the sum."""
        own = [numel for slices in self._slices for rank, numel in slices if rank == self._rank]
        self.live.make("double", "temporaries", DOUBLE * max(own, default=0))
        self.live.drop("double")
        if not self._compact:
            self.live.make("flat gradient", "gradients", 4 * self._partition)
            self.live.drop("summed")
        super().step()


@functools.cache
def _slices(layout: Layout, world_size: int) -> list[list[tuple[int, int]]]:
    """Of each parameter: the ranks in whose partition it lies, and how many elements of it."""
    return [zero.ranks_of(layout, p, world_size) for p in range(len(layout.parameters))]


class Stage3(Zero):
    """Partitions of parameters, masters and gradients, and a bucket, all for good; parameters gathered by module."""

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
        """Elements of a rank's part of a parameter, padded."""
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
        """Entries and exits of modules from where we are to the next entry of one with parameters, or to right before.

        What autograd does for a module's input comes after its weight's gradient is added, and before what is next.
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
        """``__avg_scatter_grads``: tensors are put behind each other, rank by rank and padded.

        Not if there is only one that needs no padding (coalesced_collectives.py:reduce_scatter_coalesced). One that was
        too large for the bucket is cast first.
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
        self.live.forget([whole_gradient(p) for p in self.bucket])
        self.bucket = []

    def step(self) -> None:
        """Norms in fp64, and the gradients once more as one flat tensor (_prepare_fp32_grad_for_sub_group)."""
        self._gathers.release_all()
        self.live.make("double", "temporaries", DOUBLE * max(map(self._shard, range(len(self.layout.parameters)))))
        self.live.drop("double")
        self.live.make("flat gradient", "gradients", 4 * self._shards)
        super().step()


class _Gathers(Coordinator):
    """The coordinator, with what it makes and frees.

    A gather of several parameters has an output from which each is copied when the first of them is waited for; the
    output stays until the last of them was (AllGatherCoalescedHandle in the registry of what is in flight). A gather of
    one is the parameter itself (_all_gather_sequential). At W = 1 parameters are their shards (NoGatherHandle).
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
        self._stage.live.forget([f"gather {parameters}"])

    def released(self, parameter: int) -> None:
        self._stage.live.forget([f"gathered {parameter}"])
