"""What an optimizer step takes on a backend, by prediction: memory, collectives, and its time.

Memory comes from ``bench.forecast.footprint``, collectives from ``bench.judge.formulas``. The rest,
with two estimates of the time, is arithmetic:

- wire bytes are those of ring algorithms, derived and not measured
  (``bench.judge.formulas.wire_bytes``), and 0 at W = 1. A rank sends a share of them within its
  node and the rest to other nodes (``Traffic``);
- a collective takes latency + the longer of (bytes within the node / intra, bytes to other nodes /
  inter);
- an overlapped step takes max(compute, busiest level), as if every collective could run beside
  every kernel and beside those of the other level; a serial step takes compute + the sum over all
  collectives.

Compute takes the same time on every backend. What the host does between collectives (hooks, copies
of tensors), its cores that gloo's threads take from compute, and waiting for slower ranks are in
neither estimate, so a step can take longer than a serial one. results/links/links.md says how often
steps do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from bench.backends.base import Backend, Offloading
from bench.forecast.footprint import (
    Footprint,
    HostFootprint,
    declined,
    footprint,
    host_footprint,
    model_of,
)
from bench.forecast.lora import LoRA
from bench.formatting import rate
from bench.judge.formula_terms import NO_SETTINGS, Settings
from bench.judge.formulas import BUILT_IN, Collective, Expectation, expect, layout_of, wire_bytes
from bench.plan.cell import REFERENCES, Cell, Device, Precision, RankGroup, Sharding, Sync
from bench.workload.layout import Layout

EQUAL = 0.02
"""Relative difference of memory and bytes up to which a wrapper equals what it wraps."""
GATHER = "all_gather"
COUNTED_N = 8
"""Collectives are counted up to this N; from N = 4 on, each further micro-batch adds the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects the ranks: one link for all, or a faster one within nodes.

    Every rank has links of its own. Ranks that share a network card (NIC) have a part of its rate
    each.
    """

    bytes_per_s: float
    """What a rank can send to other nodes, while it receives as much."""
    latency_s: float = 0.0
    """Seconds per collective call, whatever its size."""
    intra_bytes_per_s: float = math.inf
    """What a rank can send within its node."""
    node_size: int = 1
    """Ranks of a node. With 1 there is only one level: every rank is a node."""
    source: str = ""
    """What measured it; empty if it was given."""

    def __str__(self) -> str:
        between = rate(self.bytes_per_s)
        if self.node_size == 1:
            return between
        within = rate(self.intra_bytes_per_s)
        return f"{within} within nodes of {self.node_size} and {between} between them"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one optimizer step, to the ranks of one kind of group.

    NCCL splits a payload over several rings, so that each network card of a node is used: a ring
    enters and leaves a node once, by another rank in each of m rings, where m ranks of the group
    are in the node. So a rank sends 1/m of its bytes to another node, and the rest within its own
    (NCCL's maintainers: github.com/NVIDIA/nccl-tests/issues/277,
    github.com/NVIDIA/nccl/issues/412). With trees, which NCCL may prefer on two nodes, it can send
    less.
    """

    calls: float
    wire_bytes: float
    """Derived for ring algorithms."""
    ranks: int
    """Ranks of a group."""
    stride: int = 1
    """Distance between neighbouring ranks of a group."""

    def levels(self, node_size: int) -> tuple[float, float]:
        """Bytes sent within a node, and to other nodes."""
        inside = min(self.ranks, max(1, node_size // self.stride))
        inter = 0.0
        if inside < self.ranks:
            inter = self.wire_bytes / inside
        return self.wire_bytes - inter, inter

    def seconds(self, link: Link) -> tuple[float, float]:
        """Seconds on the link within a node, and on the one between nodes, with its latency."""
        intra, inter = self.levels(link.node_size)
        within_node = self._on_level(intra, link.intra_bytes_per_s, link)
        between_nodes = self._on_level(inter, link.bytes_per_s, link)
        return within_node, between_nodes

    def _on_level(self, num_bytes: float, bytes_per_s: float, link: Link) -> float:
        """Seconds of so many bytes at this rate; 0 for none, since nothing is called there."""
        if not num_bytes:
            return 0.0
        return self.calls * link.latency_s + num_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Estimates of a time, in seconds."""

    overlapped: float
    """If all that can run at once does."""
    serial: float
    """If nothing does."""

    def beside(self, compute_s: float) -> TimeEstimate:
        """The time of a step with this communication and so much compute."""
        return TimeEstimate(max(compute_s, self.overlapped), compute_s + self.serial)


def communication(traffic: Sequence[Traffic], link: Link) -> TimeEstimate:
    """The communication alone: as long as the busiest level, or all groups in turn."""
    within_nodes = between_nodes = serial = 0.0
    for part in traffic:
        intra, inter = part.seconds(link)
        within_nodes += intra
        between_nodes += inter
        serial += max(intra, inter)
    return TimeEstimate(overlapped=max(within_nodes, between_nodes), serial=serial)


_expect = cache(expect)


@dataclass(frozen=True)
class Prediction:
    """One backend in one cell."""

    cell: Cell
    backend: type[Backend]
    layout: Layout
    settings: Settings = field(default_factory=dict, hash=False)
    bf16_parameters: bool = False
    """Whether there are no fp32 masters: parameters, gradients and moments are bf16."""
    lora: LoRA | None = None
    """What is trained, if the weights of ``layout`` are frozen."""

    @property
    def name(self) -> str:
        return self.backend.name

    def scaled(self, accumulate: int, world_size: int | None = None) -> Prediction:
        """The same at another N and W, with micro-batch and shards of HSDP as large as before."""
        cell = self.cell
        if world_size is None:
            world_size = cell.world_size
        batch = accumulate * cell.micro_batch_size * world_size
        replicas = 0
        if cell.replicate:
            replicas = world_size // cell.group_size(RankGroup.SHARD)
        cell = dataclasses.replace(
            cell,
            accumulate=accumulate,
            world_size=world_size,
            global_batch_size=batch,
            replicate=replicas,
        )
        return dataclasses.replace(self, cell=cell)

    def shards_fit(self, world_size: int) -> bool:
        """Whether HSDP can have several replicas of its shards on so many ranks, or need not."""
        if not self.cell.replicate:
            return True
        shards = self.cell.group_size(RankGroup.SHARD)
        return world_size % shards == 0 and world_size > shards

    @property
    def refusal(self) -> str:
        """Why the backend does not run this cell; empty if it does."""
        if self.cell.precision is Precision.BF16:
            return self.backend.refuses.bf16
        return ""

    @property
    def not_predicted(self) -> str:
        """Why there is no prediction although the backend runs this cell; empty if there is one."""
        if self.refusal:
            return ""
        return declined(
            self.cell, self.backend, bf16_parameters=self.bf16_parameters, lora=self.lora
        )

    @property
    def is_missing(self) -> bool:
        """Whether nothing is predicted, for either reason."""
        return self.refusal != "" or self.not_predicted != ""

    @property
    def defect(self) -> str:
        """What is known to be wrong with the backend's updates; empty if nothing is."""
        if self.cell.accumulate > 1:
            return self.backend.defect
        return ""

    @cached_property
    def expectation(self) -> Expectation:
        if self.lora is None:
            return self._expectation_of(self.layout)
        trained = self._expectation_of(self.lora.trained(self.layout), fp32=self.lora.fp32)
        whole = self._expectation_of(self.lora.whole(self.layout))
        if self.lora.fp32:
            wider = whole.held["parameters"] + trained.held["parameters"] // 2
            whole = dataclasses.replace(whole, held=whole.held | {"parameters": wider})
        return beside_frozen(trained, whole)

    def _expectation_of(self, layout: Layout, *, fp32: bool = False) -> Expectation:
        """``fp32``: of parameters in fp32 although others are not."""
        if self.bf16_parameters:
            found = _expect(dataclasses.replace(self.cell, precision=Precision.FP32), layout)
        elif self.settings:
            found = expect(self.cell, layout, settings=self.settings)
        else:
            found = _expect(self.cell, layout)
        assert found is not None, "callers ask for none that is missing"
        if self.bf16_parameters and not fp32:
            return in_half_size(found)
        return found

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """What a rank sends, by kind of group."""
        if self.cell.accumulate > COUNTED_N:
            return self._extrapolated_traffic()
        if self.cell.world_size == 1:
            return ()
        traffic: dict[str, Traffic] = {}
        for row in sorted(self.expectation.collectives, key=lambda row: row.group):
            traffic[row.group] = self._with(traffic.get(row.group), row)
        return tuple(traffic.values())

    def _extrapolated_traffic(self) -> tuple[Traffic, ...]:
        """The traffic at a large N, from what further micro-batches add to it."""
        fewer, most = self.scaled(COUNTED_N // 2).traffic, self.scaled(COUNTED_N).traffic
        further = (self.cell.accumulate - COUNTED_N) / (COUNTED_N // 2)
        found = []
        for less, more in zip(fewer, most, strict=True):
            calls = more.calls + further * (more.calls - less.calls)
            wire_bytes = more.wire_bytes + further * (more.wire_bytes - less.wire_bytes)
            found.append(dataclasses.replace(more, calls=calls, wire_bytes=wire_bytes))
        return tuple(found)

    def _with(self, traffic: Traffic | None, row: Collective) -> Traffic:
        """The traffic of a kind of group so far, None if there is none, and of a collective."""
        ranks, stride = self.cell.group_size(row.group), 1
        if row.group == RankGroup.REPLICATE:  # which has the ranks with the same shard
            stride = self.cell.group_size(RankGroup.SHARD)
        if traffic is None:
            traffic = Traffic(0, 0.0, ranks, stride)
        wire_bytes = sent_bytes(row.op, row.payload_bytes, ranks, self.cell.device)
        return dataclasses.replace(
            traffic, calls=traffic.calls + row.calls, wire_bytes=traffic.wire_bytes + wire_bytes
        )

    @property
    def wire_bytes(self) -> float:
        """All bytes that a rank sends."""
        return sum(part.wire_bytes for part in self.traffic)

    @cached_property
    def memory(self) -> Footprint:
        """A rank's memory at its peak, which is the same for all N from 2 on."""
        held = self.scaled(min(self.cell.accumulate, COUNTED_N // 2)).expectation.held
        return footprint(
            self.cell,
            self.layout,
            self.backend,
            held,
            bf16_parameters=self.bf16_parameters,
            lora=self.lora,
        )

    @property
    def offloads(self) -> bool:
        """Whether the backend rests on the host in part."""
        return issubclass(self.backend, Offloading)

    @cached_property
    def host(self) -> HostFootprint | None:
        """A rank's memory of the host, and what is copied; None where nothing is offloaded."""
        return host_footprint(self.cell, self.layout, self.backend, self.expectation.beside)

    def equals(self, other: Prediction) -> bool:
        """Whether both shard and reduce alike, and hold and send the same but for EQUAL."""
        if self._kind != other._kind:
            return False
        if self.is_missing:
            return True
        peaks_are_equal = math.isclose(self.memory.peak, other.memory.peak, rel_tol=EQUAL)
        return peaks_are_equal and math.isclose(self.wire_bytes, other.wire_bytes, rel_tol=EQUAL)

    @property
    def _kind(self) -> tuple[Sharding, Sync, bool, str, str]:
        """What must be the same of two predictions that are equal."""
        backend = self.backend
        kind = backend.sharding, backend.sync, self.offloads
        return *kind, self.refusal, self.not_predicted


def beside_frozen(trained: Expectation, whole: Expectation) -> Expectation:
    """What is held and sent if some of all parameters are trained; the others are gathered too."""
    rows = [row for row in trained.collectives if row.op != GATHER]
    rows += [row for row in whole.collectives if row.op == GATHER]
    held = trained.held | {"parameters": whole.held["parameters"]}
    return Expectation(collectives=tuple(sorted(rows, key=lambda row: row.op)), held=held)


def in_half_size(expectation: Expectation) -> Expectation:
    """What is held and sent if parameters and gradients are bf16, not fp32; buffers stay."""
    rows = []
    for row in expectation.collectives:
        if row.dtype != "float32" or row.op == "broadcast":
            rows.append(row)
            continue
        half = row.payload_bytes // 2
        rows.append(dataclasses.replace(row, dtype="bfloat16", payload_bytes=half))
    held = {name: num_bytes // 2 for name, num_bytes in expectation.held.items()}
    return Expectation(collectives=tuple(rows), held=held)


def sent_bytes(op: str, payload_bytes: int, ranks: int, device: Device) -> float:
    """Bytes that a rank of a group sends, by ring algorithms.

    On the CPU that is gloo, whose reduce-scatter is an all-reduce of which each rank keeps its part
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:reduce_scatter_tensor_coalesced).
    """
    if op == "reduce_scatter" and device is Device.CPU:
        op = "all_reduce"
    return wire_bytes(op, payload_bytes, ranks)


def predict(
    cell: Cell,
    backends: Sequence[str],
    *,
    bf16_parameters: bool = False,
    lora: LoRA | None = None,
) -> list[Prediction]:
    """One prediction per backend, without references, and without HSDP if there are no replicas."""
    layout = layout_of(cell)
    assert layout is not None, "the command checks the model's name"
    found = []
    for name in backends:
        backend = BUILT_IN.get(name)
        if backend is None or name in REFERENCES:
            continue
        if backend.replicate and not cell.replicate:
            continue
        replicas = 0
        if backend.replicate:
            replicas = cell.replicate
        trained = dataclasses.replace(cell, backend=backend.name, replicate=replicas)
        found.append(
            Prediction(trained, backend, layout, bf16_parameters=bf16_parameters, lora=lora)
        )
    return found


def predicted_communication(
    cell: Cell, link: Link, settings: Settings = NO_SETTINGS
) -> TimeEstimate | None:
    """How long a cell communicates per step, as its trials were set; None if it does not.

    None also if it has no formula.
    """
    backend, layout = BUILT_IN.get(cell.backend), layout_of(cell)
    if cell.is_reference or backend is None or layout is None:
        return None
    if expect(cell, layout, settings=settings) is None:
        return None
    traffic = Prediction(cell, backend, layout, settings).traffic
    if traffic:
        return communication(traffic, link)
    return None


def grouped_with(predictions: Sequence[Prediction]) -> dict[str, str]:
    """For each wrapper that equals a mechanism of PyTorch or DeepSpeed: the name of that."""
    mechanisms = [prediction for prediction in predictions if prediction.backend.is_mechanism]
    found: dict[str, str] = {}
    for prediction in predictions:
        if prediction in mechanisms:
            continue
        for mechanism in mechanisms:
            if prediction.equals(mechanism):
                found.setdefault(prediction.name, mechanism.name)
    return found


def model_flops(cell: Cell, lora: LoRA | None = None) -> float:
    """Model FLOP of an optimizer step on a rank, without recomputation.

    A frozen weight has no gradient, so a third of its products is left out.
    """
    tokens = cell.accumulate * cell.micro_batch_size * cell.sequence_length
    size = model_of(cell)
    per_token = size.flops_per_token(cell.sequence_length)
    if lora is not None:
        frozen = size.num_layers * size.num_active_parameters + size.vocab_size * size.hidden_size
        per_token += 6 * lora.num_parameters(size) - 2 * frozen
    return per_token * tokens


def tokens_per_s(cell: Cell, seconds: float) -> float:
    """Tokens per second of a rank whose optimizer steps take so long."""
    return cell.accumulate * cell.micro_batch_size * cell.sequence_length / seconds


def compute_seconds(cell: Cell, flops_per_s: float, lora: LoRA | None = None) -> tuple[float, str]:
    """Seconds of an optimizer step's compute on a rank at this rate, and its FLOP in words."""
    size, flops = model_of(cell), model_flops(cell, lora)
    tokens = cell.accumulate * cell.micro_batch_size * cell.sequence_length
    if not cell.activation_checkpointing:
        return flops / flops_per_s, f"{flops:.3g} FLOP"
    again_per_token = size.recomputed_flops_per_token(
        cell.sequence_length, selective=cell.selective_checkpointing
    )
    again = again_per_token * tokens
    return (flops + again) / flops_per_s, f"{flops:.3g} FLOP and {again:.3g} recomputed"
