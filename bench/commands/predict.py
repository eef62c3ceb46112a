"""``predict``: memory, collectives and step times of every backend, by arithmetic alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands.options import add_backend, add_device, chosen_backends, flag, integer_to, quantity, share
from bench.errors import GOOD, InputError, suggest
from bench.plan.cell import Cell, Device, Precision
from bench.plan.matrix import OPTIMIZERS
from bench.plan.models import SIZES
from bench.run.journal import MANIFEST, read_manifest
from bench.run.machine import BF16_PEAK_FLOPS, peak_flops

if TYPE_CHECKING:
    from bench.forecast.prediction import Link

TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES = {"B": 1.0, **{f"{p}B": 1e3 ** (i + 1) for i, p in enumerate("kMGT")}}
BYTES |= {f"{p}iB": 1024.0 ** (i + 1) for i, p in enumerate("KMGT")}
RATES = {f"{unit}/s": size for unit, size in BYTES.items()}
RATES |= {f"{p}{unit}": 1e3 ** (i + 1) / 8 for unit in ("bit/s", "b/s", "bps") for i, p in enumerate("kMGT")}
FLOPS = {"TFLOP/s": 1e12, "PFLOP/s": 1e15}
TWO_LEVELS = "intra=450GB/s,inter=50GB/s"
INTEGER = integer_to(2**24)
"""Beyond it a step would be longer than any training."""
NEEDS = {"latency": "link", "node_size": "link", "reserve": "memory", "mfu": "peak"}
"""Options that say more about another one."""
DESCRIPTION = (
    "By arithmetic: a rank's memory at its peak by category, the collectives of an optimizer step, and with --link and "
    "a time of compute two estimates of a step's time: with communication hidden as far as it can be, and with none "
    "hidden. It begins with a recommendation: the backend that is the best by both estimates, or what leads while that "
    "is undecided. Nothing is run, but for --exact."
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "predict", help="predict memory, collectives and step times without running", description=DESCRIPTION
    )
    option = parser.add_argument
    option("--model", choices=[*SIZES], required=True, help="a shipped model")
    option("--world-size", type=INTEGER, required=True, metavar="W", help="ranks")
    option("--accumulate", type=INTEGER, required=True, metavar="N", help="micro-batches per optimizer step on a rank")
    option("--micro-batch", type=INTEGER, default=1, metavar="M", help="samples per micro-batch on a rank (default: 1)")
    option("--sequence", type=INTEGER, required=True, metavar="S", help="tokens per sample")
    option("--precision", choices=[str(p) for p in Precision], required=True, help="dtype of forward and backward")
    option("--optimizer", choices=OPTIMIZERS, default="adamw-foreach", help="(default: adamw-foreach)")
    add_device(parser, Device.CUDA)
    add_backend(parser)
    option("--activation-checkpointing", action="store_true", help="blocks keep their input alone, and are recomputed")
    option("--memory", type=_amount(BYTES, "80GiB"), metavar="SIZE", help="memory of a device, such as 80GiB")
    words = "of that, kept free for what is not predicted (default: CUDA context, NCCL, the allocator's fragments)"
    option("--reserve", type=_amount(BYTES, "4GiB", zero=True), metavar="SIZE", help=words)
    links = parser.add_mutually_exclusive_group()
    words = "rate at which a rank can send, such as 50GB/s or 400Gbit/s (400Gbps); with --node-size one rate within a "
    words += f"node, and one to others, which is its share of the node's network cards: {TWO_LEVELS}"
    links.add_argument("--link", type=_link, metavar="RATE", help=words)
    words = "instead of --link: the rates and the latency that this run measured before its first trial"
    links.add_argument("--from-run", type=Path, metavar="RUN", help=words)
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
    option("--mfu", type=share, metavar="P", help="share of the peak that is reached (default: 35%%)")
    option("--all", action="store_true", help="also show the rows of wrappers that equal another backend")
    words = "also measure the peak of the backend of --backend, by a trial on fake tensors (a minute for 8b)"
    option("--exact", action="store_true", help=words)
    option("--json", action="store_true", help="print a JSON list; its keys: see bench/forecast/choice.py")


def _amount(units: Mapping[str, float], example: str, *, zero: bool = False) -> Callable[[str], float]:
    what = f"a number {'from 0 on' if zero else 'above 0'} with its unit ({', '.join(units)}), such as {example}"
    return quantity(units, what, zero=zero)


def _link(text: str) -> tuple[float, float | None]:
    """The rate to other nodes and, of a link of two levels, that within a node, in bytes/s."""
    if "=" not in text:
        return _amount(RATES, f"50GB/s, or two of them: {TWO_LEVELS}")(text), None
    rates = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if sorted(rates) != ["inter", "intra"]:
        raise argparse.ArgumentTypeError(f"'{text}' does not name intra and inter, such as {TWO_LEVELS}")
    read = _amount(RATES, "50GB/s")
    return read(rates["inter"]), read(rates["intra"])


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast.choice import Question, answer
    from bench.forecast.fit import exact_peak, reserve_bytes
    from bench.forecast.prediction_text import printed_lines

    for name, other in NEEDS.items():
        if getattr(arguments, name) is not None and getattr(arguments, other) is None:
            remedy = "which --from-run replaces; leave it out" if arguments.from_run else "so give that too"
            raise InputError(f"{flag(name)}: says more about --{other}, {remedy}")
    memory, reserve = int(arguments.memory or 0), arguments.reserve
    if reserve is not None and reserve >= memory:
        raise InputError(f"--reserve: leaves nothing of the {memory / 2**30:.4g} GiB of --memory; give less")
    link = _link_of_run(arguments) if arguments.from_run else _link_of_options(arguments)
    cell = _cell_of_options(arguments, link.node_size if link else 1)
    if reserve is None:
        reserve = reserve_bytes(memory, nccl=cell.world_size > 1) if memory and cell.device is Device.CUDA else 0
    compute_s, compute_from = _compute_time(arguments, cell)
    question = Question(
        cell=cell,
        link=link,
        compute_s=compute_s,
        compute_from=compute_from,
        memory_bytes=memory or None,
        reserve_bytes=int(reserve),
    )
    rows, choices = answer(
        question, _chosen_with_formulas(arguments, cell), grouped=not (arguments.all or arguments.backend)
    )
    if arguments.exact:
        if len(rows) != 1:
            raise InputError("--exact: measures one backend; name it with --backend")
        rows[0]["exact_peak_bytes"] = exact_peak(cell, rows[0]["backend"])
    print(json.dumps(rows, allow_nan=False) if arguments.json else "\n".join(printed_lines(question, rows, choices)))
    return GOOD


def _link_of_options(arguments: argparse.Namespace) -> Link | None:
    from bench.forecast.prediction import Link

    if arguments.link is None:
        return None
    (inter, intra), node_size, ranks = arguments.link, arguments.node_size, arguments.world_size
    if (intra is None) != (node_size is None):
        raise InputError(f"--node-size: and a --link of two rates need each other; an example is --link {TWO_LEVELS}")
    if intra is None:
        return Link(bytes_per_s=inter, latency_s=arguments.latency or 0.0)
    if ranks % node_size:
        raise InputError(f"--node-size: {node_size} does not divide the {ranks} ranks of --world-size; change one")
    return Link(bytes_per_s=inter, latency_s=arguments.latency or 0.0, intra_bytes_per_s=intra, node_size=node_size)


def _link_of_run(arguments: argparse.Namespace) -> Link:
    from bench.forecast.from_run import measured_link

    place, ranks = f"--from-run {arguments.from_run}", arguments.world_size
    manifest = read_manifest(arguments.from_run)
    if (link := measured_link(manifest)) is None:
        raise InputError(f"{place}: {MANIFEST} holds no collectives that a link fits; name another run, or --link")
    if (device := manifest.cells[0].device) != arguments.device:
        raise InputError(f"{place}: its ranks ran on {device}; add --device {device}")
    if ranks % link.node_size:
        raise InputError(f"--world-size: {ranks} ranks do not fill nodes of {link.node_size}, as in --from-run")
    return link


def _cell_of_options(arguments: argparse.Namespace, node_size: int) -> Cell:
    """The cell of the options, without a backend; HSDP has as many replicas as there are nodes."""
    ranks, replicas = arguments.world_size, arguments.replicate
    if replicas is None:
        replicas = ranks // node_size if 1 < node_size < ranks else 0
    elif ranks % replicas or not 1 < replicas < ranks:
        raise InputError(f"--replicate: {ranks} ranks do not split into {replicas} replicas of two or more; change one")
    elif (shards := ranks // replicas) % node_size and node_size % shards:
        raise InputError(f"--replicate: groups of {shards} ranks do not fill nodes of {node_size}; change one")
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
        replicate=replicas,
    )


def _chosen_with_formulas(arguments: argparse.Namespace, cell: Cell) -> list[str]:
    from bench.judge.formulas import BUILT_IN

    chosen = chosen_backends(arguments.backend)
    if arguments.backend and (without := [name for name in chosen if name not in BUILT_IN]):
        raise InputError(f"--backend: '{without[0]}' has no formulas, so nothing is predicted; leave it out")
    if not cell.replicate and chosen and all(backend.replicate for backend in chosen.values()):
        raise InputError(f"--backend: '{next(iter(chosen))}' trains replicas; say how many with --replicate")
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
        raise InputError(f"--peak: '{name}' is unknown; {suggest(name, [*BF16_PEAK_FLOPS, 'a rate: 989TFLOP/s'])}")
    else:
        peak = peak_flops(name, cell.precision)
    mfu = GPU_EFFICIENCY if arguments.mfu is None else arguments.mfu
    if peak is None:
        raise InputError(f"--peak: no {cell.precision} peak of {name} is known; give --compute-time, or a rate")
    if not 0 < mfu <= 1:
        raise InputError(f"--mfu: {100 * mfu:g} % is not above 0 % and at most 100 %")
    seconds, flops = compute_seconds(cell, peak * mfu)
    return seconds, f"{flops} at {100 * mfu:g} % of {peak / 1e12:g} TFLOP/s"
