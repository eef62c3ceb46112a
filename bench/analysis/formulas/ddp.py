"""DistributedDataParallel: buckets of gradients, broadcast of buffers."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.formulas.core import BYTES, Tally
from bench.cell import Sync
from bench.workload.shapes import Layout

FIRST_BUCKET_BYTES = 2**20
"""torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes."""
BUCKET_BYTES = 25 * 2**20
"""torch/nn/parallel/distributed.py: bucket_cap_mb's default."""
BROADCAST_BYTES = 250 * 2**20
"""torch/nn/parallel/distributed.py: DistributedDataParallel.broadcast_bucket_size."""


def buckets(sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Sizes in bytes of the buckets that tensors of one dtype and these sizes fall into, in order.

    A bucket is closed by the tensor that fills it to its limit, so it may be larger; the last limit serves all further
    buckets (torch/csrc/distributed/c10d/reducer.cpp:compute_bucket_assignment_by_size).
    """
    found: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(found), len(limits) - 1)]:
            found.append(filled)
            filled = 0
    return [*found, filled] if filled else found


def collectives(layout: Layout, accumulate: int, sync: Sync) -> Tally:
    """All-reduces of the gradient's buckets and broadcasts of the buffers; at W = 1 too, where DDP does the same.

    Buckets are in the order in which the first backward finished the gradients (reducer.cpp:rebuild_buckets), fp32
    also under autocast. Buffers are broadcast before a forward, unless the forward before it was under ``no_sync``
    (distributed.py:_check_sync_bufs_pre_fwd and _post_forward): so the deferred window broadcasts them once. Research
    sheet of FSDP2, 1.4, has the all-reduces and leaves out the broadcasts.
    """
    tally = Tally()
    times = accumulate if sync is Sync.EAGER else 1
    sizes = [4 * layout.parameters[i].numel for i in layout.gradients]
    found = buckets(sizes, (FIRST_BUCKET_BYTES, BUCKET_BYTES))
    tally.add("all_reduce", "float32", [size // 4 for size in found], times)
    for dtype in {dtype for dtype, _ in layout.buffers}:
        of_dtype = [size for other, size in layout.buffers if other == dtype]
        tally.add("broadcast", dtype, [size // BYTES[dtype] for size in buckets(of_dtype, [BROADCAST_BYTES])], times)
    return tally


def held(layout: Layout) -> dict[str, int]:
    """fp32 parameters and gradients, whole; and the reducer's buckets, a second copy of all gradients.

    ``gradient_as_bucket_view`` is off by default, so gradients are copied into buckets
    (reducer.cpp:initialize_buckets). The model's buffers are not counted: a broadcast copies them, unless a dtype has
    only one, which then is sent as it is.
    """
    whole = 4 * layout.num_parameters
    return {"parameters": whole, "gradients": whole, "communication": whole}
