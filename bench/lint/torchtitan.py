"""Rules for torchtitan's TOML, as read by v0.2.2: later versions are configured in Python."""

from __future__ import annotations

from collections.abc import Iterator

from bench.lint import proof, rounding
from bench.lint.findings import Finding, Severity
from bench.lint.options import Options
from bench.lint.section import Section

DEFAULT_LOCAL_BATCH = 8
OTHER_DEGREES = ("context_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")


def check(section: Section, options: Options) -> Iterator[Finding]:
    """Findings in a torchtitan config. Raises InputError for a wrong value."""
    training, parallelism = section.at("training").mapping(), section.at("parallelism").mapping()
    local = training.at("local_batch_size").integer() or DEFAULT_LOCAL_BATCH
    global_place = training.at("global_batch_size")
    global_batch = global_place.integer(least=-1)
    if global_batch == 0:
        global_place.refuse("a positive integer, or -1 for one micro-batch per step")
    replicate = parallelism.at("data_parallel_replicate_degree").integer() or 1
    shard_place = parallelism.at("data_parallel_shard_degree")
    shard = shard_place.integer(least=-1)
    if shard == 0:
        shard_place.refuse("a positive integer, or -1 for the ranks that are left")
    others = [parallelism.at(name).integer() or 1 for name in OTHER_DEGREES]
    fixed = replicate * others[0] * others[1] * others[2]
    world_size = options.world_size
    if shard is None or shard < 0:
        shard = None if world_size is None else world_size // fixed
        if world_size is not None and world_size % fixed:
            yield _degrees(shard_place, f"{fixed} ranks of the other degrees do not divide", world_size)
            return
    elif world_size is not None and shard * fixed != world_size:
        yield _degrees(shard_place, f"the degrees multiply to {shard * fixed}, not", world_size)
        return
    if others[2] > 1:
        yield from _pipeline(parallelism, local)
    if global_batch is None or global_batch < 0:
        return
    degree = replicate if shard is None else replicate * shard
    if global_batch % (local * degree):
        yield _global(global_place, global_batch, local, degree, is_known=shard is not None)
    elif shard is None:
        options.wanted.add("--world-size")
    elif global_batch > local * degree:
        yield from _dtypes(training, global_batch // (local * degree))


def _degrees(place: Section, what: str, world_size: int) -> Finding:
    return place.finding(
        "BAT05",
        Severity.ERROR,
        f"{what} the {world_size} ranks; torchtitan refuses it",
        "make replicate x shard x context x tensor x pipeline equal to the ranks, or leave shard at -1",
        proof.stops("torchtitan/distributed/parallel_dims.py _validate"),
    )


def _pipeline(parallelism: Section, local: int) -> Iterator[Finding]:
    micro = parallelism.at("pipeline_parallel_microbatch_size").integer() or 1
    if local % micro:
        yield parallelism.at("pipeline_parallel_microbatch_size").finding(
            "BAT06",
            Severity.ERROR,
            f"training.local_batch_size {local} does not divide by {micro}; torchtitan refuses it",
            f"make training.local_batch_size a multiple of {micro}",
            proof.stops("torchtitan/distributed/pipeline_parallel.py build_pipeline_schedule"),
        )


def _global(place: Section, global_batch: int, local: int, degree: int, *, is_known: bool) -> Finding:
    product = local * degree
    near = [product * n for n in (global_batch // product, global_batch // product + 1) if n]
    ranks = "data-parallel ranks" if is_known else "data_parallel_replicate_degree"
    return place.finding(
        "BAT04",
        Severity.ERROR,
        f"global_batch_size {global_batch} does not divide by local_batch_size {local} x {ranks} {degree} = {product}; "
        "torchtitan refuses it",
        f"the nearest that divide: {' or '.join(map(str, near))}",
        proof.stops("torchtitan/train.py Trainer.__init__"),
    )


def _dtypes(training: Section, accumulate: int) -> Iterator[Finding]:
    if training.at("dtype").word() == "bfloat16":
        yield training.at("dtype").finding(
            "ACC01",
            Severity.WARNING,
            f"sharded gradients have the parameters' dtype, and torchtitan reduces after every micro-batch: each of "
            f"the {accumulate} micro-batches of a step is added in bf16, which keeps 8 significant bits: "
            f"{rounding.effect(accumulate)}",
            'set training.dtype = "float32"; mixed_precision_param keeps the computation in bf16',
            proof.BF16_SUM,
        )
    reduce = training.at("mixed_precision_reduce")
    if reduce.word() not in {None, "float32"}:
        yield reduce.finding(
            "ACC03",
            Severity.WARNING,
            f"torchtitan v0.2.2 knows only float32 here; where {reduce.value} is taken, each of the {accumulate} "
            "reductions of a step rounds to it before the sum",
            'set training.mixed_precision_reduce = "float32"',
            proof.BF16_SUM,
        )
