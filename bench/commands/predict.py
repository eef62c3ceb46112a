"""``predict``: memory, collectives and bounds of a step's time of every backend, by arithmetic alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands.options import add_backend, add_device, chosen_backends, integer_to, quantity, share, writable
from bench.errors import GOOD, InputError, suggest

if TYPE_CHECKING:
    from bench.forecast.prediction import Link, Prediction
    from bench.plan.cell import Cell

TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES = {"B": 1.0, **{f"{p}B": 1e3 ** (i + 1) for i, p in enumerate("kMGT")}}
BYTES |= {f"{p}iB": 1024.0 ** (i + 1) for i, p in enumerate("KMGT")}
RATES = {f"{unit}/s": size for unit, size in BYTES.items()}
RATES |= {f"{p}{unit}": 1e3 ** (i + 1) / 8 for unit in ("bit/s", "b/s", "bps") for i, p in enumerate("kMGT")}
FLOPS = {"TFLOP/s": 1e12, "PFLOP/s": 1e15}
TWO_LEVELS = "intra=450GB/s,inter=50GB/s"
INTEGER = integer_to(2**24)
"""Beyond it a step would be longer than any training."""
DESCRIPTION = (
    "By arithmetic, nothing is run: a rank's memory at its peak by category, the collectives of an optimizer step, and "
    "with --link and a time of compute the bounds of a step's time: max(compute, communication) and their sum. It ends "
    "in a recommendation: the backend that is the best whatever communication is hidden, or what leads while that is "
    "undecided."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    from bench.plan.cell import Device, Precision
    from bench.plan.matrix import OPTIMIZERS

    parser = commands.add_parser(
        "predict", help="predict memory, collectives and step times without running", description=DESCRIPTION
    )
    option = parser.add_argument

    def amount(name: str, units: Mapping[str, float], example: str, metavar: str, words: str, **more: Any) -> None:
        option(name, type=_amount(units, example, **more), metavar=metavar, help=words)

    option("--model", required=True, metavar="M", help="a shipped model: tiny, 135m, 1b, 3b or 8b")
    option("--world-size", type=INTEGER, required=True, metavar="W", help="ranks")
    option("--accumulate", type=INTEGER, required=True, metavar="N", help="micro-batches per optimizer step on a rank")
    option("--micro-batch", type=INTEGER, default=1, metavar="M", help="samples per micro-batch on a rank (default: 1)")
    option("--sequence", type=INTEGER, required=True, metavar="S", help="tokens per sample")
    option("--precision", choices=[str(p) for p in Precision], required=True, help="dtype of forward and backward")
    option("--optimizer", choices=OPTIMIZERS, default="adamw-foreach", help="(default: adamw-foreach)")
    add_device(parser, Device.CUDA)
    add_backend(parser)
    option("--activation-checkpointing", action="store_true", help="blocks keep their input alone, and are recomputed")
    amount("--memory", BYTES, "80GiB", "SIZE", "memory of a device, such as 80GiB")
    words = "of that, kept free for what is not predicted (default: CUDA context, NCCL, the allocator's fragments)"
    amount("--reserve", BYTES, "4GiB", "SIZE", words, zero=True)
    amount("--activations", BYTES, "20GiB", "SIZE", "activation memory of one micro-batch, if known")
    words = "rate at which a rank can send, such as 50GB/s or 400Gbit/s (400Gbps); with --node-size one rate within a "
    words += f"node, and one to others, which is its share of the node's network cards: {TWO_LEVELS}"
    option("--link", type=_link, metavar="RATE", help=words)
    words = "instead of --link: the rates and the latency that this run measured before its first trial"
    option("--from-run", type=Path, metavar="RUN", help=words)
    option("--node-size", type=INTEGER, metavar="G", help="consecutive ranks that are a node")
    words = "replicas of HSDP backends, each sharded over W / R consecutive ranks (default: as many as nodes)"
    option("--replicate", type=INTEGER, metavar="R", help=words)
    amount("--latency", TIMES, "20us", "TIME", "latency of a collective call, such as 20us (default: 0)")
    words = "compute time of one optimizer step, recomputation included, such as 1.9s"
    amount("--compute-time", TIMES, "1.9s", "TIME", words)
    option("--peak", metavar="GPU|RATE", help="instead of --compute-time: H100, H200, A100, or such as 989TFLOP/s")
    option("--mfu", type=_mfu, metavar="P", help="share of the peak that is reached (default: 35%%)")
    option("--margin", type=share, metavar="P", help="times this near to each other are the same (default: 2%%)")
    option("--json", action="store_true", help="print a JSON list; its keys: see bench/forecast/choice.py")
    option("--all", action="store_true", help="also show the rows of wrappers that equal another backend")
    words = "also measure the peak of the backend of --backend, by a trial on fake tensors (a minute for 8b)"
    option("--exact", action="store_true", help=words)
    option("--out", type=Path, metavar="DIR", help="also write this as predict.md there")
    parser.set_defaults(command=run)


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


def _mfu(text: str) -> float:
    number = share(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not above 0% and at most 100%")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Predict and show."""
    from bench.forecast import prediction_text
    from bench.forecast.choice import MARGIN, Answer, Question, records
    from bench.forecast.prediction import predict, wrapped

    link, link_from = _measured(arguments) if arguments.from_run else (_levels(arguments), "")
    cell = _cell(arguments, link)
    if arguments.activations is not None and arguments.activation_checkpointing:
        raise InputError(
            "--activations: are those kept without --activation-checkpointing, which is counted; leave out one of them"
        )
    activations = None if arguments.activations is None else int(arguments.activations)
    limit = None if arguments.memory is None else int(arguments.memory)
    compute_s, compute_from = _compute(arguments, cell)
    question = Question(
        cell=cell,
        link=link,
        compute_s=compute_s,
        memory_bytes=None if limit is None else limit - _reserve(arguments, cell, limit),
        margin=MARGIN if arguments.margin is None else arguments.margin,
    )
    predictions = predict(cell, _backends(arguments, cell), activations)
    equal = {} if arguments.all or arguments.backend else wrapped(predictions)
    distinct = [one for one in predictions if one.name not in equal]
    answer = Answer(question.choose(distinct), question.table(distinct)) if question.is_timed else None
    rows = records(question, predictions, equal, answer)
    if arguments.exact:
        _measure_peak(predictions, rows)
    asked = prediction_text.Prognosis(
        question=question,
        link_from=link_from,
        latency_known=bool(link_from) or arguments.latency is not None,
        compute_from=compute_from,
        device_bytes=limit,
        reserve_given=arguments.reserve is not None,
        activations_given=activations is not None,
        rows=[row for row in rows if not row["equals"]],
        wrappers={name: [one for one, other in equal.items() if other == name] for name in equal.values()},
        answer=answer,
    )
    print(json.dumps(rows, allow_nan=False) if arguments.json else "\n".join(prediction_text.lines(asked)))
    if arguments.out:
        writable(arguments.out)
        (arguments.out / "predict.md").write_text(prediction_text.markdown(asked), encoding="utf-8")
    return GOOD


def _measure_peak(predictions: Sequence[Prediction], rows: list[dict[str, Any]]) -> None:
    """Add the measured peak to the row of the only backend."""
    from bench.forecast.exact import exact_peak

    if len(predictions) != 1:
        raise InputError("--exact: measures one backend; name it with --backend")
    rows[0]["exact_peak_bytes"] = exact_peak(predictions[0].cell, predictions[0].backend)


def _levels(arguments: argparse.Namespace) -> Link | None:
    """The link between the ranks, of one level or two."""
    from bench.forecast.prediction import Link

    if arguments.link is None:
        for name, value in (("--latency", arguments.latency), ("--node-size", arguments.node_size)):
            if value is not None:
                raise InputError(f"{name}: belongs to a link; give --link too, such as --link {TWO_LEVELS}")
        return None
    (inter, intra), node_size, latency_s = arguments.link, arguments.node_size, arguments.latency or 0.0
    if intra is None and node_size is None:
        return Link(bytes_per_s=inter, latency_s=latency_s)
    if intra is None:
        raise InputError(f"--node-size: belongs to a link of two rates, such as --link {TWO_LEVELS}")
    if node_size is None:
        raise InputError("--link: has one rate within nodes; give their size too, such as --node-size 8")
    if arguments.world_size % node_size:
        ranks = arguments.world_size
        raise InputError(f"--node-size: {node_size} does not divide the {ranks} ranks of --world-size; change one")
    return Link(bytes_per_s=inter, latency_s=latency_s, intra_bytes_per_s=intra, node_size=node_size)


def _measured(arguments: argparse.Namespace) -> tuple[Link, str]:
    """The link that a run measured, and where it comes from."""
    from bench.forecast.from_run import measured_link
    from bench.run.journal import MANIFEST, read_manifest

    run, ranks = arguments.from_run, arguments.world_size
    for name, value in (("link", arguments.link), ("latency", arguments.latency), ("node-size", arguments.node_size)):
        if value is not None:
            raise InputError(f"--{name}: cannot be combined with --from-run, which measured it; leave out one of them")
    manifest = read_manifest(run)
    found = measured_link(manifest)
    if found is None:
        raise InputError(
            f"--from-run {run}: {MANIFEST} holds no rates of collectives; name a run of several ranks by this "
            "version, or give --link"
        )
    if found.device != arguments.device:
        raise InputError(f"--from-run {run}: its ranks ran on {found.device}; add --device {found.device}")
    if ranks % found.link.node_size:
        raise InputError(
            f"--world-size: {ranks} ranks do not fill nodes of {found.link.node_size}, as in --from-run; change it"
        )
    return found.link, found.source


def _reserve(arguments: argparse.Namespace, cell: Cell, limit: int | None) -> int:
    """Bytes of a device's memory that are kept free."""
    from bench.forecast.fit import reserve_bytes
    from bench.plan.cell import Device

    if arguments.reserve is None:
        on_gpu = limit is not None and cell.device is Device.CUDA
        return reserve_bytes(limit, nccl=cell.world_size > 1) if on_gpu and limit is not None else 0
    if limit is None:
        raise InputError("--reserve: is kept free of a device's memory; give --memory too, such as --memory 80GiB")
    if arguments.reserve >= limit:
        raise InputError(f"--reserve: leaves nothing of the {limit / 2**30:.4g} GiB of --memory; give less")
    return int(arguments.reserve)


def _replicas(arguments: argparse.Namespace, link: Link | None) -> int:
    """R of the HSDP backends, by default the number of nodes; 0 for none, and so no HSDP."""
    ranks, node_size = arguments.world_size, 1 if link is None else link.node_size
    if arguments.replicate is None:
        return ranks // node_size if node_size > 1 and ranks > node_size else 0
    shards, left = divmod(ranks, arguments.replicate)
    if left or shards == 1 or arguments.replicate == 1:
        raise InputError(
            f"--replicate is {arguments.replicate}: {ranks} ranks do not split into so many replicas of HSDP; both R "
            "and W / R must be integers of at least 2"
        )
    if shards % node_size and node_size % shards:
        raise InputError(
            f"--replicate: leaves shard groups of {shards} ranks, which do not fill nodes of {node_size}; choose R so "
            "that one divides the other"
        )
    return int(arguments.replicate)


def _cell(arguments: argparse.Namespace, link: Link | None) -> Cell:
    """What is asked, as a cell; its backend is filled in later."""
    from bench.plan.cell import Cell, Device, Precision
    from bench.plan.models import SIZES

    if arguments.model not in SIZES:
        raise InputError(f"--model: '{arguments.model}' is unknown; {suggest(arguments.model, SIZES)}")
    return Cell(
        backend="",
        model=arguments.model,
        accumulate=arguments.accumulate,
        world_size=arguments.world_size,
        global_batch_size=arguments.micro_batch * arguments.accumulate * arguments.world_size,
        sequence_length=arguments.sequence,
        precision=Precision(arguments.precision),
        optimizer=arguments.optimizer,
        device=Device(arguments.device),
        activation_checkpointing=arguments.activation_checkpointing,
        replicate=_replicas(arguments, link),
    )


def _backends(arguments: argparse.Namespace, cell: Cell) -> list[str]:
    """The chosen backends that have formulas."""
    from bench.judge.formulas import BUILT_IN

    chosen = chosen_backends(arguments.backend)
    if arguments.backend and (without := [name for name in chosen if name not in BUILT_IN]):
        raise InputError(f"--backend: '{without[0]}' has no formulas, so nothing is predicted; leave it out")
    if not cell.replicate and chosen and all(backend.replicate for backend in chosen.values()):
        raise InputError(f"--backend: '{next(iter(chosen))}' trains replicas; say how many with --replicate")
    return list(chosen)


def _compute(arguments: argparse.Namespace, cell: Cell) -> tuple[float | None, str]:
    """Seconds of compute per optimizer step on a rank, and where they are from; None if nothing says so."""
    from bench.forecast.estimate import GPU_EFFICIENCY
    from bench.forecast.prediction import compute_seconds
    from bench.run.machine import BF16_PEAK_FLOPS, peak_flops

    if arguments.peak is None:
        if arguments.mfu is not None:
            raise InputError("--mfu: is a share of a peak; give --peak too, such as --peak H100")
        return arguments.compute_time, "" if arguments.compute_time is None else "as given"
    if arguments.compute_time is not None:
        raise InputError("--peak: cannot be combined with --compute-time; leave out one of them")
    if arguments.peak[:1].isdecimal():
        try:
            peak: float | None = _amount(FLOPS, "989TFLOP/s")(arguments.peak)
        except argparse.ArgumentTypeError as error:
            raise InputError(f"--peak: {error}") from error
    elif arguments.peak not in BF16_PEAK_FLOPS:
        hint = suggest(arguments.peak, [*BF16_PEAK_FLOPS, "a rate: 989TFLOP/s"])
        raise InputError(f"--peak: '{arguments.peak}' is unknown; {hint}")
    else:
        peak = peak_flops(arguments.peak, cell.precision)
    if peak is None:
        raise InputError(
            f"--peak: no {cell.precision} peak of {arguments.peak} is known; give --compute-time, or a rate"
        )
    mfu = GPU_EFFICIENCY if arguments.mfu is None else arguments.mfu
    seconds, flops = compute_seconds(cell, peak * mfu)
    return seconds, f"{flops} at {100 * mfu:g} % of {peak / 1e12:g} TFLOP/s"
