"""The options of ``run`` and ``plan``, which name a matrix and override its keys."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.backends.base import Backend, installed_backends, registry
from bench.backends.deepspeed import DeepSpeedZero2Eager, ZeroBackend
from bench.backends.fsdp2 import FSDP2Backend, FSDP2Eager
from bench.commands.options import backend_names, duration, flag, list_of, share, split_names
from bench.errors import InputError
from bench.launch import gpus as launch_gpus
from bench.launch.nodes import Nodes
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device, Precision, Sharding
from bench.plan.expand import expand
from bench.plan.matrix import Matrix
from bench.run.start import Planned
from bench.workload import preflight
from bench.workload.preflight import Examined


class MatrixOption(NamedTuple):
    """The option of a key."""

    key: str
    name: str
    """As argparse stores it."""
    metavar: str
    words: str
    """Its help."""


MATRIX_OPTIONS = (
    MatrixOption(
        "axes.backend",
        "backend",
        "B",
        "only these backends, or all but those of installed packages (see 'backends'); "
        "module:Class for your own",
    ),
    MatrixOption(
        "axes.accumulate", "accumulate", "N", "micro-batches per optimizer step on a rank"
    ),
    MatrixOption(
        "axes.micro_batch_size",
        "micro_batch",
        "M",
        "samples per micro-batch on a rank; with --accumulate the global batch follows, else it is "
        "held and N follows; in a virtual world N is held",
    ),
    MatrixOption(
        "axes.world_size", "world_size", "W", "numbers of ranks, or 'all' for one per GPU"
    ),
    MatrixOption(
        "share_gpu",
        "share_gpu",
        "",
        "let the ranks of --world-size share the GPUs: values, counts and memory, but no times; "
        "one trial per cell unless --repeats is given",
    ),
    MatrixOption(
        "virtual.world_size",
        "virtual_world",
        "W",
        "one process acts as rank 0 of W: shapes, memory, counts and bytes, but no values; without "
        "--world-size, nothing else runs",
    ),
    MatrixOption(
        "virtual.fake_tensors",
        "fake_tensors",
        "",
        "in a virtual world: compute and allocate nothing, which leaves no time to measure",
    ),
    MatrixOption(
        "axes.precision",
        "precision",
        "P",
        f"dtypes of forward and backward: {', '.join(Precision)}",
    ),
    MatrixOption("axes.optimizer", "optimizer", "O", ", ".join(matrix_file.OPTIMIZERS)),
    MatrixOption(
        "axes.clip_norm", "clip_norm", "C", "limits of the gradient's norm; 0 for no clipping"
    ),
    MatrixOption(
        "axes.activation_checkpointing",
        "activation_checkpointing",
        "on|off",
        "blocks keep their input alone, and are recomputed in the backward",
    ),
    MatrixOption(
        "axes.selective_checkpointing",
        "selective_checkpointing",
        "on|off",
        "checkpointed blocks also keep attention and every second matrix product",
    ),
    MatrixOption("axes.compiled", "compiled", "on|off", "compile each block with torch.compile"),
    MatrixOption(
        "axes.ranks_per_node",
        "ranks_per_node",
        "R",
        "ranks on each of several nodes; by default the GPUs of a node are filled before those of "
        "the next",
    ),
    MatrixOption(
        "axes.replicate",
        "replicate",
        "R",
        "numbers of replicas of HSDP backends, each sharded over W / R ranks (default: 2)",
    ),
    MatrixOption("repeats", "repeats", "R", "trials per cell; more only if --max-repeats allows"),
    MatrixOption(
        "max_repeats",
        "max_repeats",
        "R",
        "most trials per cell, while its interval is wider than --interval-width",
    ),
    MatrixOption(
        "precision",
        "interval_width",
        "P",
        "width of the intervals at which repeats end, such as 2%%",
    ),
    MatrixOption(
        "budget_s",
        "budget",
        "TIME",
        "start no block of trials that would exceed this time: 90s, 20m, 1h",
    ),
    MatrixOption(
        "baseline",
        "baseline",
        "B",
        "the backend to compare with, which is also compared with itself (A/A)",
    ),
    MatrixOption("training.seed", "seed", "S", "seed of weights and tokens"),
    MatrixOption("axes.seed", "seeds", "S", "seeds of weights and tokens, as an axis"),
    MatrixOption(
        "workload.global_batch_size",
        "batch",
        "B",
        "global batch: samples per optimizer step over all ranks",
    ),
    MatrixOption("workload.sequence_length", "sequence", "S", "tokens per sample"),
    MatrixOption("workload.model", "model", "SIZE", "size of the model"),
    MatrixOption(
        "workload.workload",
        "workload",
        "MODULE:FACTORY|hf:CONFIG",
        "a model of your own, or of a config.json of transformers, instead of llama",
    ),
    MatrixOption("workload.corpus", "corpus", "FILE", "a text file whose bytes are the tokens"),
    MatrixOption("device", "device", "|".join(Device), "what the ranks run on"),
    MatrixOption("timeout_s", "timeout", "SECONDS", "limit of a whole trial"),
    MatrixOption(
        "inactivity_s",
        "inactivity",
        "SECONDS",
        "limit of the time without progress on any rank; 0 for none",
    ),
)
OPTIONS = {option.name: option.key for option in MATRIX_OPTIONS}
"""The keys by options."""


def _switches(text: str) -> list[bool]:
    words = split_names(text)
    if not set(words) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"'{text}' is not on, off, or both with a comma")
    return [word == "on" for word in words]


_integers = list_of(int, "integers such as 1,4,8")


def _world_sizes(text: str) -> list[int] | list[str]:
    if text.strip() == "all":
        return ["all"]
    return _integers(text)


ReadOption = Callable[[str], object]
"""Reads the value of an option."""


LISTS: dict[type, ReadOption] = {
    bool: _switches,
    int: _integers,
    float: list_of(float, "numbers such as 0,1.5"),
}
"""How a list is read, by the type of its items; others are names."""
BY_DEVICE = {"auto": ("cpu", "gpu"), "quick": ("quick", "quick-gpu")}
"""Names of --matrix that stand for one matrix on CPUs and another on GPUs."""

READ: dict[str, ReadOption] = {
    "axes.backend": backend_names,
    "axes.world_size": _world_sizes,
    "budget_s": duration,
    "precision": share,
}
"""How the values of some keys are read that a type does not tell."""


def add_matrix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a list is given with commas or by repeating the option."""
    names = ", ".join(matrix_file.names())
    words = (
        f"auto (gpu or cpu, as the machine is), {names}, or a TOML file; quick is quick-gpu on GPUs"
    )
    parser.add_argument("--matrix", default="auto", metavar="NAME|FILE", help=words)
    for option in MATRIX_OPTIONS:
        name, words = flag(option.name), option.words
        kind, is_list = matrix_file.type_of(option.key)
        if is_list:
            read = READ.get(option.key, LISTS.get(kind, split_names))
            metavar = f"{option.metavar}[,{option.metavar}]"
            parser.add_argument(name, action="extend", type=read, metavar=metavar, help=words)
        elif kind is bool:
            parser.add_argument(name, action="store_true", default=None, help=words)
        else:
            usual: ReadOption = str
            if kind in LISTS:
                usual = kind
            read = READ.get(option.key, usual)
            parser.add_argument(name, type=read, metavar=option.metavar, help=words)
    words = "on GPUs: also run cells that are predicted not to fit into memory"
    parser.add_argument("--try-all", action="store_true", help=words)


def planned(
    arguments: argparse.Namespace,
    pretended: Sequence[Mapping[str, Any]] = (),
    others: Nodes | None = None,
) -> Planned:
    """The matrix of the options and its cells, on this machine or on ``pretended`` GPUs.

    ``others`` are the other nodes of a job of several. Raises InputError.
    """
    matrix = _matrix(arguments, on_gpus=bool(pretended) or bool(launch_gpus.gpus()))
    if pretended and matrix["device"] != Device.CUDA:
        place = matrix.place("device")
        raise InputError(
            f"--on: is for GPUs, and {place} is 'cpu'; give --device cuda, or leave it out"
        )
    backends = registry(_named_backends(matrix))
    gpus = _gpus(matrix, pretended, others)
    num_nodes = 1
    if others is not None:
        num_nodes += len(others.nodes)
    has_ranks = bool(arguments.world_size) or matrix["share_gpu"]
    if arguments.device == Device.CUDA and gpus and not has_ranks:
        # It was perhaps written for a CPU, with more ranks than GPUs.
        matrix = matrix.up_to(len(gpus), "--device")
    expansion = expand(matrix, backends, len(gpus), installed_backends(), num_nodes)
    plan = Planned(matrix, backends, expansion.cells, expansion.once, gpus)
    if arguments.try_all:
        return plan
    return _without_large_references(plan, num_nodes)


def check_workloads(plan: Planned) -> Planned:
    """Check the workloads that are not shipped, each once in a process.

    Returns the plan, in which cells are skipped whose backend cannot train such a model. Raises
    InputError for an unfit one, or if no backend can.
    """
    by_size = sorted(plan.cells, key=lambda cell: cell.micro_batch_size, reverse=True)
    cells = {cell.workload: cell for cell in by_size}  # the smallest is what is left
    corpus = plan.matrix["workload.corpus"]
    path = None
    if corpus != "markov":
        path = Path(corpus).resolve()
    shards = any(plan.backends[cell.backend].sharding is Sharding.PARAMS for cell in plan.cells)
    in_bf16 = any(cell.precision is Precision.BF16 for cell in plan.cells)
    found = preflight.require(cells, path, shards=shards, in_bf16=in_bf16)
    refused: dict[str, str] = {}
    compared = [cell for cell in plan.cells if not cell.is_reference]
    for cell in compared:
        if cell.workload in found:
            reason = _refused(cell, plan.backends[cell.backend], found[cell.workload])
            if reason:
                refused[cell.cell_id] = reason
    if compared and len(refused) == len(compared):
        raise InputError(f"workload '{compared[0].workload}': {refused[compared[0].cell_id]}")
    return replace(plan, skipped=plan.skipped | refused)


def _refused(cell: Cell, backend: type[Backend], found: Examined) -> str:
    """Why a backend cannot train a model in a cell; empty if nothing is known against it.

    Wrappers may run the model under autocast in bf16, where it raises nothing.
    """
    of_copies = ""
    if issubclass(backend, FSDP2Backend) and found.mixed_unit:
        return f"FSDP2 needs one dtype of trained parameters in a unit: {found.mixed_unit}"
    if issubclass(backend, ZeroBackend) and found.mixed:
        return f"DeepSpeed needs one dtype of trained parameters: {found.mixed}"
    if issubclass(backend, FSDP2Eager):
        of_copies = found.on_copies_and_inputs
    elif issubclass(backend, DeepSpeedZero2Eager):
        of_copies = found.on_copies
    if cell.precision is Precision.BF16 and of_copies:
        return f"{of_copies}; cast its inputs to the dtype of its weight, or give --precision fp32"
    return ""


def _named_backends(matrix: Matrix) -> list[str]:
    """The backends of the matrix and its groups, ``all`` among them."""
    names: list[str] = []
    for part in matrix.parts:
        named = part["axes.backend"]
        if isinstance(named, str):
            names.append(named)
        else:
            names += named
    return names


def _gpus(
    matrix: Matrix, pretended: Sequence[Mapping[str, Any]], others: Nodes | None
) -> Sequence[Mapping[str, Any]]:
    """The GPUs of all nodes that the cells run on; none on the CPU."""
    if pretended:
        return pretended
    if matrix["device"] != Device.CUDA:
        return []
    found: list[Mapping[str, Any]] = list(launch_gpus.gpus())
    if found and others is not None:
        for node in others.nodes:
            found += node.about["gpus"]
    return found


def _without_large_references(plan: Planned, num_nodes: int) -> Planned:
    """The plan with what is too large for the smallest GPU, without such references."""
    from bench.forecast import fit

    if not plan.gpus:
        return plan
    smallest = min(int(gpu["memory_bytes"]) for gpu in plan.gpus)
    too_large = fit.too_large(plan.cells, smallest, len(plan.gpus) // num_nodes)
    cells = []
    for cell in plan.cells:
        if not (cell.is_reference and cell.cell_id in too_large):
            cells.append(cell)
    return replace(plan, cells=cells, skipped=too_large)


def _matrix(arguments: argparse.Namespace, *, on_gpus: bool) -> Matrix:
    """The matrix of ``--matrix``, with the keys that other options override. Raises InputError."""
    name = arguments.matrix
    if name in BY_DEVICE:
        of_cpus, of_gpus = BY_DEVICE[name]
        name = of_cpus
        if on_gpus:
            name = of_gpus
    chosen = matrix_file.load(name)
    is_virtual_alone = bool(arguments.virtual_world and not arguments.world_size)
    _refuse_contradictions(arguments, chosen, is_virtual_alone=is_virtual_alone)
    given = dict(vars(arguments))
    if is_virtual_alone:
        chosen = chosen.override("virtual.alone", True, "--virtual-world")
    elif arguments.micro_batch and not arguments.accumulate:
        given["accumulate"] = "auto"
    given |= _repeats(arguments, chosen)
    if arguments.backend and not arguments.baseline:
        given["baseline"] = "auto"  # the matrix' own may not be among those
    for option, key in OPTIONS.items():
        value = given[option]
        if value == ["all"]:
            value = "all"
        if value is not None:
            chosen = chosen.override(key, value, flag(option))
    return chosen


def _refuse_contradictions(
    arguments: argparse.Namespace, chosen: Matrix, *, is_virtual_alone: bool
) -> None:
    """Raise InputError for options that cannot be given together, or not without another."""
    if arguments.fake_tensors and not (arguments.virtual_world or chosen["virtual.world_size"]):
        raise InputError("--fake-tensors: is for a virtual world; give --virtual-world too")
    if arguments.micro_batch and arguments.accumulate and arguments.batch:
        raise InputError(
            "--batch: follows from --micro-batch and --accumulate; leave out one of the three"
        )
    if arguments.share_gpu and is_virtual_alone:
        raise InputError(
            "--share-gpu: is for ranks that exist; give --world-size too, or leave it out"
        )


def _repeats(arguments: argparse.Namespace, chosen: Matrix) -> dict[str, int | None]:
    """``repeats`` and ``max_repeats``, of which either option may set both."""
    repeats, most = arguments.repeats, arguments.max_repeats
    if repeats is not None and most is not None and repeats > most:
        raise InputError(f"--max-repeats is {most}; it must be at least --repeats, {repeats}")
    if arguments.share_gpu and repeats is None and most is None:
        return {"repeats": 1, "max_repeats": 1}
    if most is None:
        return {"repeats": repeats, "max_repeats": repeats}
    if repeats is None:
        repeats = min(chosen["repeats"], most)
    return {"repeats": repeats, "max_repeats": most}
