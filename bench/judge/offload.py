"""Formulas of backends that offload: bytes held on device and host, pinned, and copied.

On the CPU the device is the host: nothing is copied between them, nothing is pinned, and what both
would hold adds up. Valid for the versions in constraints.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.judge import gathers
from bench.judge.formula_terms import ELEMENT_BYTES, ceil_to, num_reductions
from bench.judge.gathers import ZeroOptions
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST, HELD, ON_HOST, PINNED
from bench.plan.cell import SGD, Cell, Device, Precision, Sync
from bench.workload.layout import Layout, Parameter

USES = ("parameters", "gradients", "optimizer_state", "communication")
"""What bytes are held for, as in ``Expectation.held``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Bytes of one rank; what is held, between two micro-batches of a window."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    """Both by use; missing ones are 0."""
    pinned: int
    """Of those of the host, in pinned memory."""
    to_device: int
    to_host: int
    """Copied in a window."""

    def held(self, cell: Cell) -> dict[str, int]:
        """What a formula returns: by use, and on CUDA also ``host_<use>`` and the three others."""
        found: dict[str, int] = {}
        if cell.device is Device.CPU:
            for use in USES:
                found[use] = self.device.get(use, 0) + self.host.get(use, 0)
            return found
        for use in USES:
            found[use] = self.device.get(use, 0)
        for use in USES:
            found[f"{ON_HOST}_{HELD}_{use}"] = self.host.get(use, 0)
        return found | {
            PINNED: self.pinned,
            COPIED_TO_DEVICE: self.to_device,
            COPIED_TO_HOST: self.to_host,
        }


def state(cell: Cell, numel: int, num_tensors: int) -> int:
    """Bytes of the optimizer's state for fp32 tensors of the host, with one step counter each.

    So it is for a fused one too.
    """
    if cell.optimizer == SGD:
        return 0
    return 8 * numel + 4 * num_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero2Parts:
    """Elements of stage 2 on a rank."""

    partition: int
    """Of the flat parameters, with padding."""
    unpadded: int
    """Without."""
    overlapping: int
    """Of all parameters that overlap the partition, whole."""


def zero2(sync: Sync, cell: Cell, layout: Layout, parts: Zero2Parts) -> Offloaded:
    """Stage 2 with ``offload_optimizer``: parameters stay on the device, masters rest on the host.

    In fp32 every micro-batch fetches the sum of each parameter that overlaps the partition, whole,
    adds to it on the device and writes it back (stage_1_and_2.py:
    async_accumulate_grad_in_cpu_via_gpu); in bf16 a partition of fp32 sums stays on the device
    (_get_compact_grad_partition_buffer). At the end of a window the partition's part of each goes
    to the masters' gradient (async_inplace_copy_grad_to_fp32_buffer_from_gpu), and after the update
    the new partition to the device, through a buffer of its own
    (param_buffer_of_bit16_for_cpu_offload_groups). On either side there is a buffer as large as the
    largest parameter (temp_grad_buffer_for_cpu_offload, _for_gpu_offload). All but the optimizer's
    state is pinned. Under deferred sync gradients are summed whole on the device.
    """
    element, is_bf16 = ELEMENT_BYTES[cell.precision], cell.precision is Precision.BF16
    sums_on_host = sync is Sync.EAGER and not is_bf16 and cell.accumulate > 1
    gradients = 0
    if sync is Sync.DEFERRED:
        gradients = 4 * layout.num_parameters
    elif is_bf16:
        gradients = 4 * parts.partition
    sums = 4 * parts.overlapping if sums_on_host else 0
    largest = element * max(p.numel for p in layout.parameters)
    host = {
        "parameters": (4 + element) * parts.partition,
        "gradients": 4 * parts.partition + sums,
        "communication": largest,
    }
    return Offloaded(
        device={
            "parameters": element * parts.partition * cell.world_size,
            "gradients": gradients,
            "communication": largest,
        },
        host=host | {"optimizer_state": state(cell, parts.partition, 1)},
        pinned=sum(host.values()),
        to_device=max(0, cell.accumulate - 1) * sums + element * parts.partition,
        to_host=cell.accumulate * sums + 4 * parts.unpadded,
    )


def zero3(
    sync: Sync, cell: Cell, layout: Layout, rank: int, options: ZeroOptions, num_groups: int
) -> Offloaded:
    """Stage 3 with ``offload_optimizer`` and ``offload_param``: shards of all rest on the host.

    There are shards in the compute dtype, masters, the masters' gradient, and fp32 sums (stage3.py:
    _create_param_groups_fp16_flat_cpu_memory, initialize_optimizer_states,
    _setup_for_real_optimizer); masters and the optimizer's state are not pinned. A gather copies
    shards to the device first, on one rank whole parameters (partition_parameters.py:
    _all_gather_dtype, NoGatherHandle). A reduction adds on the device: its sums are fetched and
    written back, in the first micro-batch written and fetched; at the end of the window they are
    copied once more (stage3.py: partition_grads, _offload_grad_partition_at_boundary). The update
    copies nothing.
    """
    element, ranks = ELEMENT_BYTES[cell.precision], cell.world_size
    shards: list[int] = []
    unpadded = 0
    for p in layout.parameters:
        shard = ceil_to(p.numel, ranks) // ranks
        shards.append(shard)
        unpadded += max(0, min(shard, p.numel - rank * shard))
    numel = sum(shards)
    gathered = 0
    for together in gathers.of_window(layout, cell.accumulate, options):
        gathered += sum(shards[p] for p in together)
    reductions = num_reductions(sync, cell)
    gradients = 0
    if sync is Sync.DEFERRED:
        gradients = 4 * layout.num_parameters
    return Offloaded(
        device={"gradients": gradients, "communication": 4 * options.reduce_bucket_size},
        host={
            "parameters": (element + 4) * numel,
            "gradients": 8 * numel,
            "optimizer_state": state(cell, numel, num_groups),
        },
        pinned=(element + 8) * numel,
        to_device=element * gathered + reductions * 4 * unpadded,
        to_host=(reductions + 1) * 4 * unpadded,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedUnit:
    """Elements of a rank's shards of a unit of FSDP2, and how often they are copied in a window."""

    padded: int
    unpadded: int
    num_gathers: int
    num_reductions: int


def fsdp2(
    sync: Sync, cell: Cell, parameters: Iterable[Parameter], units: Iterable[OffloadedUnit]
) -> Offloaded:
    """FSDP2 with ``CPUOffloadPolicy``: shards, gradients and the optimizer are on the host.

    Every gather copies fp32 shards, with padding, which are cast on the device (_fsdp_param.py:
    all_gather_inputs); every reduction copies the shards of gradients, without
    (_fsdp_collectives.py: foreach_reduce). Those of the first micro-batch come in pinned memory, to
    which the others are added. On the CPU, where ``to`` copies nothing, they are views of the
    padded output of the reduction. Under deferred sync gradients are summed whole on the device.
    """
    padded = unpadded = to_device = to_host = 0
    for unit in units:
        padded += unit.padded
        unpadded += unit.unpadded
        to_device += 4 * unit.num_gathers * unit.padded
        to_host += 4 * unit.num_reductions * unit.unpadded
    parameters = list(parameters)
    on_device, on_host = 0, 4 * unpadded
    if cell.device is Device.CPU:
        on_host = 4 * padded
    if sync is Sync.DEFERRED:
        on_device, on_host = 4 * sum(p.numel for p in parameters), 0
    return Offloaded(
        device={"gradients": on_device},
        host={
            "parameters": 4 * padded,
            "gradients": on_host,
            "optimizer_state": state(cell, unpadded, len(parameters)),
        },
        pinned=4 * padded + on_host,
        to_device=to_device,
        to_host=to_host,
    )
