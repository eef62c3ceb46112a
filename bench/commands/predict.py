"""``predict``: memory, collectives and step times of every backend, by arithmetic alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.commands.options import (
    CommandParsers,
    add_backend,
    add_device,
    chosen_backends,
    flag,
    integer_to,
    named,
    quantity,
    share,
)
from bench.errors import GOOD, InputError, listed, suggest
from bench.forecast.lora import DEFAULT_TARGETS, HEAD, MATRICES, LoRA
from bench.plan.cell import Cell, Device, Precision
from bench.plan.gpu_kinds import GPUS, LINKED, NCCL_LATENCY_S, kind_of, peak_flops
from bench.plan.matrix import OPTIMIZERS
from bench.plan.models import HUGGING_FACE, SHAPES, SIZES, shape_of, suggest_model
from bench.run.journal import MANIFEST, read_manifest

if TYPE_CHECKING:
    from bench.forecast.backend_forecast import BackendForecast
    from bench.forecast.choice import Question
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
NEEDS = {
    "latency": "link",
    "node_size": "link",
    "reserve": "memory",
    "mfu": "peak",
    "plot": "batch",
    "lora_targets": "lora_rank",
    "lora_dropout": "lora_rank",
    "lora_parameters": "lora_rank",
}
"""Options that say more about another one."""
SEARCHED = (
    "accumulate",
    "micro_batch",
    "activation_checkpointing",
    "selective_checkpointing",
)
"""What --batch searches."""
PICTURE = ".png"
DESCRIPTION = (
    "By arithmetic: a rank's memory at its peak by category, the collectives of an optimizer "
    "step, and with --link and a time of compute two estimates of a step's time: with "
    "communication hidden as far as it can be, and with none hidden. It begins with a "
    "recommendation: the backend that is the best by both estimates, or what leads while that is "
    "undecided. With --batch it searches micro-batch, N, backend and checkpointing for one global "
    "batch, and shows the front of time against memory. Nothing is run, but for --exact."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict memory, collectives and step times without running",
        description=DESCRIPTION,
    )
    _add_training(parser)
    _add_machine(parser)
    _add_output(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    """What is trained."""
    option = parser.add_argument
    words = (
        f"a shipped model ({', '.join(SIZES)}), another one ({', '.join(SHAPES)}), or hf:CONFIG, a "
        "config.json of transformers or the folder that has it"
    )
    option("--model", required=True, metavar="NAME", help=words)
    option("--world-size", type=INTEGER, required=True, metavar="W", help="ranks")
    words = "micro-batches per optimizer step on a rank"
    option("--accumulate", type=INTEGER, metavar="N", help=words)
    words = "samples per micro-batch on a rank (default: 1)"
    option("--micro-batch", type=INTEGER, metavar="M", help=words)
    words = (
        "instead of both: samples per optimizer step over all ranks; micro-batch, N, backend and "
        "checkpointing are searched (needs a link and a time of compute)"
    )
    option("--batch", type=INTEGER, metavar="B", help=words)
    option("--sequence", type=INTEGER, required=True, metavar="S", help="tokens per sample")
    words = "dtype of forward and backward"
    option("--precision", choices=list(map(str, Precision)), required=True, help=words)
    words = "dtype of parameters, gradients and moments (default: fp32); bf16: without fp32 masters"
    option("--parameters", choices=["fp32", "bf16"], default="fp32", help=words)
    words = "the model's weights are frozen, and LoRA's of this rank are trained"
    option("--lora-rank", type=INTEGER, metavar="R", help=words)
    words = f"matrices that have LoRA's beside them (default: {','.join(DEFAULT_TARGETS)})"
    option("--lora-targets", metavar="NAMES", help=words)
    words = "share of what they read that is dropped; the memory is the same for each above 0"
    option("--lora-dropout", type=share, metavar="P", help=words)
    words = (
        "dtype of LoRA's weights, gradients and moments (default: as --parameters; peft's default: "
        "fp32)"
    )
    option("--lora-parameters", choices=["fp32", "bf16"], help=words)
    words = "(default: adamw-foreach)"
    option("--optimizer", choices=OPTIMIZERS, default="adamw-foreach", help=words)
    add_device(parser, Device.CUDA)
    add_backend(parser)
    words = "blocks keep their input alone, and are recomputed"
    option("--activation-checkpointing", action="store_true", help=words)
    words = (
        "the same, but blocks also keep the results of attention and of every second product, as "
        "in torchtitan"
    )
    option("--selective-checkpointing", action="store_true", help=words)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """On what: memory, links and compute."""
    option = parser.add_argument
    words = "memory of a device, such as 80GiB"
    option("--memory", type=_amount(BYTES, "80GiB"), metavar="SIZE", help=words)
    words = (
        "of that, kept free for what is not predicted (default on a GPU: CUDA context, NCCL, and "
        "what is published of memory that the allocator reserves beyond the peak)"
    )
    option("--reserve", type=_amount(BYTES, "4GiB", zero=True), metavar="SIZE", help=words)
    links = parser.add_mutually_exclusive_group()
    words = (
        f"rates of a kind of machine by its datasheets ({', '.join(LINKED)}), or the rate at which "
        "a rank can send, such as 50GB/s or 400Gbit/s (400Gbps); with --node-size one rate within "
        "a node, and one to others, which is its share of the node's network cards: "
        f"{TWO_LEVELS}"
    )
    links.add_argument("--link", type=_rates, metavar="GPU|RATE", help=words)
    words = (
        "instead of --link: the rates and the latency that this run measured before its first trial"
    )
    links.add_argument("--from-run", type=named, metavar="RUN", help=words)
    option("--node-size", type=INTEGER, metavar="G", help="consecutive ranks that are a node")
    words = (
        "replicas of HSDP backends, each sharded over W / R consecutive ranks (default: as many "
        "as nodes)"
    )
    option("--replicate", type=INTEGER, metavar="R", help=words)
    words = (
        "latency of a collective call, such as 20us (default: 32us on GPUs, a ring of 8 by NCCL's "
        "cost model; 0 on CPUs)"
    )
    option("--latency", type=_amount(TIMES, "20us", zero=True), metavar="TIME", help=words)
    compute = parser.add_mutually_exclusive_group()
    words = "compute time of one optimizer step, recomputation included, such as 1.9s"
    compute.add_argument("--compute-time", type=_amount(TIMES, "1.9s"), metavar="TIME", help=words)
    words = f"instead of --compute-time: {', '.join(GPUS)}, or such as 989TFLOP/s"
    compute.add_argument("--peak", metavar="GPU|RATE", help=words)
    words = "share of the peak that is reached (default: 35%%)"
    option("--mfu", type=share, metavar="P", help=words)


def _add_output(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    words = "with --batch: draw time against memory into this file, a PNG"
    option("--plot", type=named, metavar="FILE", help=words)
    words = "also show the rows of wrappers that equal another backend"
    option("--all", action="store_true", help=words)
    words = (
        "also measure the peak of the backend of --backend, by a trial on fake tensors (a minute "
        "for 8b)"
    )
    option("--exact", action="store_true", help=words)
    words = (
        "print a JSON list; its keys: see bench/forecast/backend_forecast.py, with --batch "
        "bench/forecast/search.py"
    )
    option("--json", action="store_true", help=words)


def _amount(
    units: Mapping[str, float], example: str, *, zero: bool = False
) -> Callable[[str], float]:
    numbers = "a number above 0"
    if zero:
        numbers = "a number from 0 on"
    what = f"{numbers} with its unit ({', '.join(units)}), such as {example}"
    return quantity(units, what, zero=zero)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenLink:
    """The value of ``--link``; rates in bytes/s."""

    inter: float
    intra: float | None = None
    node_size: int | None = None
    """Ranks of a node of this kind of machine."""
    source: str = ""


def _rates(text: str) -> GivenLink:
    """The rate to other nodes and, of a link of two levels, that within a node."""
    kind = kind_of(text)
    if kind in LINKED:
        preset = LINKED[kind]
        return GivenLink(
            inter=preset.inter_bytes_per_s,
            intra=preset.intra_bytes_per_s,
            node_size=preset.node_size,
            source=preset.source,
        )
    example = f"50GB/s, or two of them: {TWO_LEVELS}, or one of {', '.join(LINKED)}"
    if "=" not in text:
        return GivenLink(inter=_amount(RATES, example)(text))
    parts = [part.partition("=") for part in text.split(",")]
    rates = {level: rate for level, _, rate in parts}
    if sorted(level for level, _, _ in parts) != ["inter", "intra"]:
        wrong = f"'{text}' does not name intra and inter, such as {TWO_LEVELS}"
        raise argparse.ArgumentTypeError(wrong)
    read = _amount(RATES, "50GB/s")
    return GivenLink(inter=read(rates["inter"]), intra=read(rates["intra"]))


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast.backend_forecast import answer, forecast_json
    from bench.forecast.prediction_text import printed_lines

    _check_needs(arguments)
    question = _question(arguments)
    chosen = _chosen_with_formulas(arguments, question.cell)
    if arguments.batch is not None:
        return _search(arguments, question, chosen)
    is_grouped = not arguments.all and not arguments.backend
    rows, choices = answer(question, chosen, grouped=is_grouped)
    if arguments.exact:
        rows = [_with_exact_peak(arguments, question.cell, rows)]
    if arguments.json:
        print(json.dumps([forecast_json(question, row) for row in rows], allow_nan=False))
    else:
        print("\n".join(printed_lines(question, rows, choices)))
    return GOOD


def _question(arguments: argparse.Namespace) -> Question:
    """What is asked, of all options but those of the output."""
    from bench.forecast.choice import Question

    if shape_of(arguments.model) is None:
        known = suggest_model(arguments.model, [*SIZES, *SHAPES, f"{HUGGING_FACE}CONFIG"])
        raise InputError(f"--model: '{arguments.model}' is unknown; {known}")
    memory, reserve = _memory(arguments)
    link = _link(arguments)
    node_size = 1
    if link is not None:
        node_size = link.node_size
    cell = _cell_of_options(arguments, node_size)
    shape = shape_of(cell.model)
    lora = _lora(arguments, tied=shape is not None and shape.tied)
    compute = _compute_time(arguments, cell, lora)
    return Question(
        cell=cell,
        link=link,
        compute_s=compute.seconds,
        compute_from=compute.source,
        peak_flops=compute.peak_flops,
        memory_bytes=memory,
        reserve_bytes=reserve,
        bf16_parameters=arguments.parameters == "bf16",
        lora=lora,
    )


def _memory(arguments: argparse.Namespace) -> tuple[int | None, int | None]:
    """The bytes of ``--memory`` and of ``--reserve``; None for what is not given.

    Raises InputError for a reserve that leaves nothing. One without ``--memory`` was refused before.
    """
    if arguments.memory is None:
        return None, None
    memory = int(arguments.memory)
    if arguments.reserve is None:
        return memory, None
    if arguments.reserve >= memory:
        left = f"leaves nothing of the {memory / 2**30:.4g} GiB of --memory; give less"
        raise InputError(f"--reserve: {left}")
    return memory, int(arguments.reserve)


def _lora(arguments: argparse.Namespace, *, tied: bool) -> LoRA | None:
    """What is trained beside frozen weights. Raises InputError for targets that are unknown.

    ``tied``: whether the head is the embedding.
    """
    rank = arguments.lora_rank
    targets: tuple[str, ...] = DEFAULT_TARGETS
    if rank is None:
        return None
    if arguments.lora_targets is not None:
        targets = tuple(dict.fromkeys(arguments.lora_targets.split(",")))
    for name in targets:
        if name not in MATRICES:
            raise InputError(f"--lora-targets: '{name}' is unknown; {suggest(name, MATRICES)}")
    if HEAD in targets and tied:
        raise InputError(f"--lora-targets: {HEAD} of this model is its embedding; leave it out")
    if targets == (HEAD,):
        raise InputError(f"--lora-targets: name a matrix of the blocks beside {HEAD}")
    if arguments.lora_dropout is not None and arguments.lora_dropout >= 1:
        raise InputError("--lora-dropout: drops everything; give less than 100 %")
    dtype = arguments.lora_parameters
    if dtype is None:
        dtype = arguments.parameters
    if dtype == "bf16" and arguments.parameters != "bf16":
        raise InputError("--lora-parameters: bf16 needs --parameters bf16")
    fp32 = dtype != arguments.parameters
    return LoRA(rank, targets, dropout=bool(arguments.lora_dropout), fp32=fp32)


def _with_exact_peak(
    arguments: argparse.Namespace, cell: Cell, rows: Sequence[BackendForecast]
) -> BackendForecast:
    """The only row, with its peak on fake tensors. Raises InputError for what cannot be measured."""
    from bench.forecast.fit import exact_peak

    if len(rows) != 1:
        raise InputError("--exact: measures one backend; name it with --backend")
    if arguments.model not in SIZES:
        raise InputError(f"--exact: measures shipped models alone: {', '.join(SIZES)}")
    if arguments.lora_rank is not None:
        raise InputError("--exact: no backend freezes weights; leave out --lora-rank")
    if arguments.parameters != "fp32":
        raise InputError("--exact: no backend trains without fp32 masters; leave out --parameters")
    (row,) = rows
    return dataclasses.replace(row, exact_peak_bytes=exact_peak(cell, row.name))


def _search(arguments: argparse.Namespace, question: Question, chosen: Sequence[str]) -> int:
    """``--batch``: the front of time against memory."""
    from bench.backends.base import registry
    from bench.forecast.search import search
    from bench.forecast.search_text import search_lines

    if not arguments.backend and not arguments.all:
        known = registry(chosen)
        chosen = [name for name in chosen if known[name].is_mechanism]
    found = search(question, arguments.batch, chosen)
    if arguments.plot is not None:
        from bench.forecast.search_plot import draw

        draw(question, found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json(question), allow_nan=False))
    else:
        print("\n".join(search_lines(question, found)))
    return GOOD


def _check_needs(arguments: argparse.Namespace) -> None:
    """Raises InputError for an option without one that it needs, or beside one that excludes it."""
    for name, other in NEEDS.items():
        if getattr(arguments, name) is None or getattr(arguments, other) is not None:
            continue
        remedy = "so give that too"
        if arguments.from_run and other == "link":
            remedy = "which --from-run replaces; leave it out"
        raise InputError(f"{flag(name)}: says more about {flag(other)}, {remedy}")
    if arguments.batch is not None:
        _check_batch(arguments)
    elif arguments.accumulate is None:
        raise InputError("--accumulate: is missing; give N, or --batch to search it")


def _check_batch(arguments: argparse.Namespace) -> None:
    """Raises InputError for what --batch lacks or cannot be beside."""
    for name in SEARCHED:
        if getattr(arguments, name) not in (None, False):
            raise InputError(f"{flag(name)}: --batch searches it; leave it out")
    if arguments.exact:
        raise InputError("--exact: measures one cell, not those of --batch; leave out one")
    if arguments.link is None and arguments.from_run is None:
        raise InputError("--batch: compares times; give --link or --from-run too")
    if arguments.peak is None and arguments.compute_time is None:
        raise InputError("--batch: compares times; give --peak or --compute-time too")
    if arguments.plot is not None and arguments.plot.suffix != PICTURE:
        raise InputError(f"--plot {arguments.plot}: must end in {PICTURE}")


def _link(arguments: argparse.Namespace) -> Link | None:
    if arguments.from_run:
        return _link_of_run(arguments)
    return _link_of_options(arguments)


def _link_of_options(arguments: argparse.Namespace) -> Link | None:
    from bench.forecast.prediction import Link

    given: GivenLink | None = arguments.link
    if given is None:
        return None
    ranks = arguments.world_size
    node_size: int | None = arguments.node_size
    if node_size is None:
        node_size = given.node_size
    latency_s, latency_from = arguments.latency, ""
    if latency_s is None:
        latency_s = 0.0
        if arguments.device == Device.CUDA:
            latency_s, latency_from = NCCL_LATENCY_S, "latency by NCCL's cost model"
    source = "; ".join(filter(None, (given.source, latency_from)))
    if (given.intra is None) != (node_size is None):
        example = f"an example is --link {TWO_LEVELS}"
        raise InputError(f"--node-size: and a --link of two rates need each other; {example}")
    if given.intra is None:
        return Link(bytes_per_s=given.inter, latency_s=latency_s, source=source)
    assert node_size is not None
    is_part_of_node = arguments.node_size is None and ranks < node_size
    if ranks % node_size and not is_part_of_node:
        named = "--node-size:"
        if arguments.node_size is None:
            named = "--link: a node has 8 GPUs, and"
        wrong = f"{node_size} does not divide the {ranks} ranks of --world-size; change one"
        raise InputError(f"{named} {wrong}")
    return Link(
        bytes_per_s=given.inter,
        latency_s=latency_s,
        intra_bytes_per_s=given.intra,
        node_size=node_size,
        source=source,
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
    """The cell of the options, without a backend; HSDP has as many replicas as there are nodes.

    With --batch its micro-batches have one sample.
    """
    ranks, batch = arguments.world_size, arguments.batch
    micro_batch, accumulate = arguments.micro_batch, arguments.accumulate
    if micro_batch is None:
        micro_batch = 1
    if batch is not None:
        if batch % ranks:
            wrong = (
                f"{batch} samples do not divide by the {ranks} ranks of --world-size; change one"
            )
            raise InputError(f"--batch: {wrong}")
        accumulate = batch // ranks
    checkpoints = arguments.activation_checkpointing or arguments.selective_checkpointing
    return Cell(
        backend="",
        model=arguments.model,
        accumulate=accumulate,
        world_size=ranks,
        global_batch_size=micro_batch * accumulate * ranks,
        sequence_length=arguments.sequence,
        precision=Precision(arguments.precision),
        optimizer=arguments.optimizer,
        device=Device(arguments.device),
        activation_checkpointing=checkpoints,
        selective_checkpointing=arguments.selective_checkpointing,
        replicate=_replicas(arguments, node_size),
    )


def _replicas(arguments: argparse.Namespace, node_size: int) -> int:
    """Replicas of HSDP backends: those of --replicate, or one per node; 0 if not several."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTime:
    """What is known of the compute of an optimizer step on a rank."""

    seconds: float | None
    """None if nothing says so."""
    source: str = "as given"
    peak_flops: float | None = None
    """FLOP/s of a rank's device; None if unknown."""


def _compute_time(arguments: argparse.Namespace, cell: Cell, lora: LoRA | None) -> ComputeTime:
    from bench.forecast.estimate import GPU_EFFICIENCY
    from bench.forecast.prediction import compute_seconds

    name = arguments.peak
    if name is None:
        return ComputeTime(seconds=arguments.compute_time)
    if name[:1].isdecimal():
        try:
            peak: float | None = _amount(FLOPS, "989TFLOP/s")(name)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"--peak: {error}") from error
    elif kind_of(name) is None:
        known = f"{listed(GPUS)}, or a rate such as 989TFLOP/s"
        raise InputError(f"--peak: '{name}' is unknown; {known}")
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
    seconds, flops = compute_seconds(cell, peak * mfu, lora)
    source = f"{flops} at {100 * mfu:g} % of {peak / 1e12:g} TFLOP/s"
    return ComputeTime(seconds=seconds, source=source, peak_flops=peak)
