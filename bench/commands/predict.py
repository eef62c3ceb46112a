"""``predict``: memory, collectives and step times of every backend, by arithmetic alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bench.commands.options import (
    add_backend,
    add_device,
    chosen_backends,
    flag,
    integer_to,
    named,
    quantity,
    share,
)
from bench.errors import GOOD, InputError, suggest
from bench.plan.cell import Cell, Device, Precision
from bench.plan.matrix import OPTIMIZERS
from bench.plan.models import SIZES
from bench.run.journal import MANIFEST, read_manifest
from bench.run.machine import BF16_PEAK_FLOPS, peak_flops

if TYPE_CHECKING:
    from bench.forecast.prediction import Link

TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BYTES = {
    "B": 1.0,
    **{f"{prefix}B": factor for prefix, factor in PREFIXES.items()},
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
RATES = {f"{unit}/s": size for unit, size in BYTES.items()}
for _unit in ("bit/s", "b/s", "bps"):
    RATES |= {f"{prefix}{_unit}": factor / 8 for prefix, factor in PREFIXES.items()}
FLOPS = {"TFLOP/s": 1e12, "PFLOP/s": 1e15}
TWO_LEVELS = "intra=450GB/s,inter=50GB/s"
INTEGER = integer_to(2**24)
"""Beyond it a step would be longer than any training."""
NEEDS = {"latency": "link", "node_size": "link", "reserve": "memory", "mfu": "peak"}
"""Options that say more about another one."""
DESCRIPTION = (
    "By arithmetic: a rank's memory at its peak by category, the collectives of an optimizer step, "
    "and with --link and a time of compute two estimates of a step's time: with communication "
    "hidden as far as it can be, and with none hidden. It begins with a recommendation: the "
    "backend that is the best by both estimates, or what leads while that is undecided. Nothing is "
    "run, but for --exact."
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict memory, collectives and step times without running",
        description=DESCRIPTION,
    )
    option = parser.add_argument
    option("--model", choices=[*SIZES], required=True, help="a shipped model")
    option("--world-size", type=INTEGER, required=True, metavar="W", help="ranks")
    words = "micro-batches per optimizer step on a rank"
    option("--accumulate", type=INTEGER, required=True, metavar="N", help=words)
    words = "samples per micro-batch on a rank (default: 1)"
    option("--micro-batch", type=INTEGER, default=1, metavar="M", help=words)
    option("--sequence", type=INTEGER, required=True, metavar="S", help="tokens per sample")
    words = "dtype of forward and backward"
    option("--precision", choices=list(map(str, Precision)), required=True, help=words)
    words = "(default: adamw-foreach)"
    option("--optimizer", choices=OPTIMIZERS, default="adamw-foreach", help=words)
    add_device(parser, Device.CUDA)
    add_backend(parser)
    words = "blocks keep their input alone, and are recomputed"
    option("--activation-checkpointing", action="store_true", help=words)
    words = "memory of a device, such as 80GiB"
    option("--memory", type=_amount(BYTES, "80GiB"), metavar="SIZE", help=words)
    words = "of that, kept free for what is not predicted (default: CUDA context, NCCL, the allocator's fragments)"
    option("--reserve", type=_amount(BYTES, "4GiB", zero=True), metavar="SIZE", help=words)
    links = parser.add_mutually_exclusive_group()
    words = "rate at which a rank can send, such as 50GB/s or 400Gbit/s (400Gbps); with --node-size one "
    words += (
        "rate within a node, and one to others, which is its share of the node's network cards: "
    )
    words += TWO_LEVELS
    links.add_argument("--link", type=_rates, metavar="RATE", help=words)
    words = (
        "instead of --link: the rates and the latency that this run measured before its first trial"
    )
    links.add_argument("--from-run", type=named, metavar="RUN", help=words)
    option("--node-size", type=INTEGER, metavar="G", help="consecutive ranks that are a node")
    words = "replicas of HSDP backends, each sharded over W / R consecutive ranks (default: as many as nodes)"
    option("--replicate", type=INTEGER, metavar="R", help=words)
    words = "latency of a collective call, such as 20us (default: 0)"
    option("--latency", type=_amount(TIMES, "20us"), metavar="TIME", help=words)
    compute = parser.add_mutually_exclusive_group()
    words = "compute time of one optimizer step, recomputation included, such as 1.9s"
    compute.add_argument("--compute-time", type=_amount(TIMES, "1.9s"), metavar="TIME", help=words)
    words = "instead of --compute-time: H100, H200, A100, or such as 989TFLOP/s"
    compute.add_argument("--peak", metavar="GPU|RATE", help=words)
    words = "share of the peak that is reached (default: 35%%)"
    option("--mfu", type=share, metavar="P", help=words)
    words = "also show the rows of wrappers that equal another backend"
    option("--all", action="store_true", help=words)
    words = "also measure the peak of the backend of --backend, by a trial on fake tensors (a minute for 8b)"
    option("--exact", action="store_true", help=words)
    words = "print a JSON list; its keys: see bench/forecast/choice.py"
    option("--json", action="store_true", help=words)


def _amount(
    units: Mapping[str, float], example: str, *, zero: bool = False
) -> Callable[[str], float]:
    numbers = "a number above 0"
    if zero:
        numbers = "a number from 0 on"
    what = f"{numbers} with its unit ({', '.join(units)}), such as {example}"
    return quantity(units, what, zero=zero)


def _rates(text: str) -> tuple[float, float | None]:
    """The rate to other nodes and, of a link of two levels, that within a node, in bytes/s."""
    if "=" not in text:
        return _amount(RATES, f"50GB/s, or two of them: {TWO_LEVELS}")(text), None
    rates = {}
    for part in text.split(","):
        level, sign, rate = part.partition("=")
        if sign:
            rates[level] = rate
    if sorted(rates) != ["inter", "intra"]:
        wrong = f"'{text}' does not name intra and inter, such as {TWO_LEVELS}"
        raise argparse.ArgumentTypeError(wrong)
    read = _amount(RATES, "50GB/s")
    return read(rates["inter"]), read(rates["intra"])


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast.choice import Question, answer
    from bench.forecast.fit import exact_peak, reserve_bytes
    from bench.forecast.prediction_text import printed_lines

    _check_needs(arguments)
    memory, reserve = int(arguments.memory or 0), arguments.reserve
    if reserve is not None and reserve >= memory:
        left = f"leaves nothing of the {memory / 2**30:.4g} GiB of --memory; give less"
        raise InputError(f"--reserve: {left}")
    link = _link(arguments)
    node_size = 1
    if link is not None:
        node_size = link.node_size
    cell = _cell_of_options(arguments, node_size)
    if reserve is None:
        reserve = 0
        if memory and cell.device is Device.CUDA:
            reserve = reserve_bytes(memory, nccl=cell.world_size > 1)
    compute_s, compute_from = _compute_time(arguments, cell)
    question = Question(
        cell=cell,
        link=link,
        compute_s=compute_s,
        compute_from=compute_from,
        memory_bytes=memory or None,
        reserve_bytes=int(reserve),
    )
    chosen = _chosen_with_formulas(arguments, cell)
    shows_all = bool(arguments.all or arguments.backend)
    rows, choices = answer(question, chosen, grouped=not shows_all)
    if arguments.exact:
        if len(rows) != 1:
            raise InputError("--exact: measures one backend; name it with --backend")
        rows[0]["exact_peak_bytes"] = exact_peak(cell, rows[0]["backend"])
    if arguments.json:
        print(json.dumps(rows, allow_nan=False))
    else:
        print("\n".join(printed_lines(question, rows, choices)))
    return GOOD


def _check_needs(arguments: argparse.Namespace) -> None:
    """Raises InputError for an option that says more about one that is not given."""
    for name, other in NEEDS.items():
        if getattr(arguments, name) is None or getattr(arguments, other) is not None:
            continue
        remedy = "so give that too"
        if arguments.from_run:
            remedy = "which --from-run replaces; leave it out"
        raise InputError(f"{flag(name)}: says more about --{other}, {remedy}")


def _link(arguments: argparse.Namespace) -> Link | None:
    if arguments.from_run:
        return _link_of_run(arguments)
    return _link_of_options(arguments)


def _link_of_options(arguments: argparse.Namespace) -> Link | None:
    from bench.forecast.prediction import Link

    if arguments.link is None:
        return None
    inter, intra = arguments.link
    node_size, ranks = arguments.node_size, arguments.world_size
    latency_s = arguments.latency or 0.0
    if (intra is None) != (node_size is None):
        example = f"an example is --link {TWO_LEVELS}"
        raise InputError(f"--node-size: and a --link of two rates need each other; {example}")
    if intra is None:
        return Link(bytes_per_s=inter, latency_s=latency_s)
    if ranks % node_size:
        wrong = f"{node_size} does not divide the {ranks} ranks of --world-size; change one"
        raise InputError(f"--node-size: {wrong}")
    return Link(
        bytes_per_s=inter,
        latency_s=latency_s,
        intra_bytes_per_s=intra,
        node_size=node_size,
    )


def _link_of_run(arguments: argparse.Namespace) -> Link:
    from bench.forecast.from_run import measured_link

    place, ranks = f"--from-run {arguments.from_run}", arguments.world_size
    manifest = read_manifest(arguments.from_run)
    link = measured_link(manifest)
    if link is None:
        lacks = "holds no collectives that a link fits; name another run, or --link"
        raise InputError(f"{place}: {MANIFEST} {lacks}")
    device = manifest.cells[0].device
    if device != arguments.device:
        raise InputError(f"{place}: its ranks ran on {device}; add --device {device}")
    if ranks % link.node_size:
        nodes = f"nodes of {link.node_size}, as in --from-run"
        raise InputError(f"--world-size: {ranks} ranks do not fill {nodes}")
    return link


def _cell_of_options(arguments: argparse.Namespace, node_size: int) -> Cell:
    """The cell of the options, without a backend; HSDP has as many replicas as there are nodes."""
    ranks = arguments.world_size
    return Cell(
        backend="",
        model=arguments.model,
        accumulate=arguments.accumulate,
        world_size=ranks,
        global_batch_size=arguments.micro_batch * arguments.accumulate * ranks,
        sequence_length=arguments.sequence,
        precision=Precision(arguments.precision),
        optimizer=arguments.optimizer,
        device=Device(arguments.device),
        activation_checkpointing=arguments.activation_checkpointing,
        replicate=_replicas(arguments, node_size),
    )


def _replicas(arguments: argparse.Namespace, node_size: int) -> int:
    """Replicas of HSDP backends: those of --replicate, or one per node; 0 where there are not several."""
    ranks, replicas = arguments.world_size, arguments.replicate
    if replicas is None:
        if 1 < node_size < ranks:
            return int(ranks // node_size)
        return 0
    if ranks % replicas or not 1 < replicas < ranks:
        split = f"{ranks} ranks do not split into {replicas} replicas of two or more"
        raise InputError(f"--replicate: {split}; change one")
    shards = ranks // replicas
    if shards % node_size and node_size % shards:
        filled = f"groups of {shards} ranks do not fill nodes of {node_size}"
        raise InputError(f"--replicate: {filled}; change one")
    return int(replicas)


def _chosen_with_formulas(arguments: argparse.Namespace, cell: Cell) -> list[str]:
    from bench.judge.formulas import BUILT_IN

    chosen = chosen_backends(arguments.backend)
    if arguments.backend:
        for name in chosen:
            if name not in BUILT_IN:
                why = "has no formulas, so nothing is predicted; leave it out"
                raise InputError(f"--backend: '{name}' {why}")
    if not cell.replicate and chosen and all(backend.replicate for backend in chosen.values()):
        name = next(iter(chosen))
        raise InputError(f"--backend: '{name}' trains replicas; say how many with --replicate")
    return list(chosen)


def _compute_time(arguments: argparse.Namespace, cell: Cell) -> tuple[float | None, str]:
    """Seconds of compute per optimizer step on a rank, and where they are from; None if nothing says so."""
    from bench.forecast.estimate import GPU_EFFICIENCY
    from bench.forecast.prediction import compute_seconds

    name = arguments.peak
    if name is None:
        return arguments.compute_time, "as given"
    if name[:1].isdecimal():
        try:
            peak: float | None = _amount(FLOPS, "989TFLOP/s")(name)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"--peak: {error}") from error
    elif name not in BF16_PEAK_FLOPS:
        remedy = suggest(name, [*BF16_PEAK_FLOPS, "a rate: 989TFLOP/s"])
        raise InputError(f"--peak: '{name}' is unknown; {remedy}")
    else:
        peak = peak_flops(name, cell.precision)
    mfu = arguments.mfu
    if mfu is None:
        mfu = GPU_EFFICIENCY
    if peak is None:
        remedy = "give --compute-time, or a rate"
        raise InputError(f"--peak: no {cell.precision} peak of {name} is known; {remedy}")
    if not 0 < mfu <= 1:
        raise InputError(f"--mfu: {100 * mfu:g} % is not above 0 % and at most 100 %")
    seconds, flops = compute_seconds(cell, peak * mfu)
    return seconds, f"{flops} at {100 * mfu:g} % of {peak / 1e12:g} TFLOP/s"
