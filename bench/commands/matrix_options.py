"""The options of ``run`` and ``plan``, which name a matrix and override its keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.backends.base import installed_backends, registry
from bench.commands.options import backend_names, duration, flag, list_of, share, split_names
from bench.errors import InputError
from bench.launch import gpus as launch_gpus
from bench.launch.nodes import Nodes
from bench.plan import matrix as matrix_file
from bench.plan.cell import Device, Precision, Sharding
from bench.plan.expand import expand
from bench.plan.matrix import Matrix
from bench.run.start import Planned
from bench.workload import preflight

USAGES = {
    (
        "axes.backend",
        "backend",
        "B",
    ): "only these backends, or all but those of installed packages (see 'backends'); "
    "module:Class for your own",
    ("axes.accumulate", "accumulate", "N"): "micro-batches per optimizer step on a rank",
    (
        "axes.micro_batch_size",
        "micro_batch",
        "M",
    ): "samples per micro-batch on a rank; with --accumulate the global "
    "batch follows, else it is held and N follows; in a virtual world N is held",
    ("axes.world_size", "world_size", "W"): "numbers of ranks, or 'all' for one per GPU",
    (
        "share_gpu",
        "share_gpu",
        "",
    ): "let the ranks of --world-size share the GPUs: values, counts and "
    "memory, but no times; one trial per cell unless --repeats is given",
    (
        "virtual.world_size",
        "virtual_world",
        "W",
    ): "one process acts as rank 0 of W: shapes, memory, counts and bytes, "
    "but no values; without --world-size, nothing else runs",
    (
        "virtual.fake_tensors",
        "fake_tensors",
        "",
    ): "in a virtual world: compute and allocate nothing, which leaves no time to measure",
    ("axes.precision", "precision", "P"): f"dtypes of forward and backward: {', '.join(Precision)}",
    ("axes.optimizer", "optimizer", "O"): f"{', '.join(matrix_file.OPTIMIZERS)}",
    ("axes.clip_norm", "clip_norm", "C"): "limits of the gradient's norm; 0 for no clipping",
    (
        "axes.activation_checkpointing",
        "activation_checkpointing",
        "on|off",
    ): "blocks keep their input alone, and are recomputed in the backward",
    (
        "axes.selective_checkpointing",
        "selective_checkpointing",
        "on|off",
    ): "checkpointed blocks also keep attention and every second matrix product",
    ("axes.compiled", "compiled", "on|off"): "compile each block with torch.compile",
    (
        "axes.ranks_per_node",
        "ranks_per_node",
        "R",
    ): "ranks on each of several nodes; by default the GPUs of a node "
    "are filled before those of the next",
    (
        "axes.replicate",
        "replicate",
        "R",
    ): "numbers of replicas of HSDP backends, each sharded over W / R ranks (default: 2)",
    ("repeats", "repeats", "R"): "trials per cell; more only if --max-repeats allows",
    (
        "max_repeats",
        "max_repeats",
        "R",
    ): "most trials per cell, while its interval is wider than --interval-width",
    (
        "precision",
        "interval_width",
        "P",
    ): "width of the intervals at which repeats end, such as 2%%",
    (
        "budget_s",
        "budget",
        "TIME",
    ): "start no block of trials that would exceed this time: 90s, 20m, 1h",
    (
        "baseline",
        "baseline",
        "B",
    ): "the backend to compare with, which is also compared with itself (A/A)",
    ("training.seed", "seed", "S"): "seed of weights, tokens and order",
    ("axes.seed", "seeds", "S"): "seeds of weights and tokens, as an axis",
    (
        "workload.global_batch_size",
        "batch",
        "B",
    ): "global batch: samples per optimizer step over all ranks",
    ("workload.sequence_length", "sequence", "S"): "tokens per sample",
    ("workload.model", "model", "SIZE"): "size of the model",
    (
        "workload.workload",
        "workload",
        "MODULE:FACTORY|hf:CONFIG",
    ): "a model of your own, or of a config.json of transformers, instead of llama",
    ("workload.corpus", "corpus", "FILE"): "a text file whose bytes are the tokens",
    ("device", "device", "|".join(Device)): "what the ranks run on",
    ("timeout_s", "timeout", "SECONDS"): "limit of a whole trial",
    (
        "inactivity_s",
        "inactivity",
        "SECONDS",
    ): "limit of the time without progress on any rank; 0 for none",
}
"""The help of each key's option, by the key, the name that argparse gives to the option, and its metavar."""
OPTIONS = {option: key for key, option, _ in USAGES}
"""The keys by options."""


def _switches(text: str) -> list[bool]:
    words = split_names(text)
    if not set(words) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"'{text}' is not on, off, or both with a comma")
    return [word == "on" for word in words]


_integers = list_of(int, "integers such as 1,4,8")


def _world_sizes(text: str) -> list[int] | list[str]:
    return ["all"] if text.strip() == "all" else _integers(text)


LISTS = {bool: _switches, int: _integers, float: list_of(float, "numbers such as 0,1.5")}
"""How a list is read, by the type of its items; others are names."""
BY_DEVICE = {"auto": ("cpu", "gpu"), "quick": ("quick", "quick-gpu")}
"""Names of --matrix that stand for one matrix on CPUs and another on GPUs."""

READ: dict[str, Any] = {
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
    for (key, name, metavar), words in USAGES.items():
        option, (kind, is_list) = flag(name), matrix_file.type_of(key)
        if is_list:
            read = READ.get(key, LISTS.get(kind, split_names))
            parser.add_argument(
                option, action="extend", type=read, metavar=f"{metavar}[,{metavar}]", help=words
            )
        elif kind is bool:
            parser.add_argument(option, action="store_true", default=None, help=words)
        else:
            read = READ.get(key, kind if kind in LISTS else str)
            parser.add_argument(option, type=read, metavar=metavar, help=words)
    words = "on GPUs: also run cells that are predicted not to fit into memory"
    parser.add_argument("--try-all", action="store_true", help=words)


def planned(
    arguments: argparse.Namespace,
    pretended: Sequence[Mapping[str, Any]] = (),
    others: Nodes | None = None,
) -> Planned:
    """The matrix of the options and its cells, on this machine or on ``pretended`` GPUs. Raises InputError.

    ``others`` are the other nodes of a job of several.
    """
    matrix = _matrix(arguments, on_gpus=bool(pretended or launch_gpus.gpus()))
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
    if (
        arguments.device == Device.CUDA
        and gpus
        and not (arguments.world_size or matrix["share_gpu"])
    ):
        matrix = matrix.up_to(
            len(gpus), "--device"
        )  # it was perhaps written for a CPU, with more ranks than GPUs
    expansion = expand(matrix, backends, len(gpus), installed_backends(), num_nodes)
    plan = Planned(matrix, backends, expansion.cells, expansion.once, gpus)
    return plan if arguments.try_all else _without_large_references(plan, num_nodes)


def check_workloads(plan: Planned) -> None:
    """Check the workloads that are not shipped, each once in a process. Raises InputError for an unfit one."""
    cells = {cell.workload: cell for cell in plan.cells}
    corpus = plan.matrix["workload.corpus"]
    path = None
    if corpus != "markov":
        path = Path(corpus).resolve()
    shards = any(plan.backends[cell.backend].sharding is Sharding.PARAMS for cell in plan.cells)
    preflight.require(cells, path, shards=shards)


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
    """The plan with what does not fit into the smallest GPU, of which it leaves the references out."""
    from bench.forecast import fit

    if not plan.gpus:
        return plan
    smallest = min(int(gpu["memory_bytes"]) for gpu in plan.gpus)
    too_large = fit.too_large(plan.cells, smallest, len(plan.gpus) // num_nodes)
    references = [cell for cell in plan.cells if cell.is_reference]
    left_out = {cell for cell in references if cell.cell_id in too_large}
    cells = [cell for cell in plan.cells if cell not in left_out]
    return replace(plan, cells=cells, too_large=too_large)


def _matrix(arguments: argparse.Namespace, *, on_gpus: bool) -> Matrix:
    """The matrix of ``--matrix``, with the keys that other options override. Raises InputError."""
    name = arguments.matrix
    if name in BY_DEVICE:
        on_cpus, on_gpus_name = BY_DEVICE[name]
        name = on_gpus_name if on_gpus else on_cpus
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


def _repeats(arguments: argparse.Namespace, chosen: Matrix) -> dict[str, Any]:
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
