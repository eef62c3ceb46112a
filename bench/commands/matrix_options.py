"""The options of ``run`` and ``plan``, which name a matrix and override its keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.backends.base import Backend, installed_backends, registry
from bench.commands.options import backend_names, duration, flag, list_of, share, split_names
from bench.errors import InputError
from bench.launch import gpus as launch_gpus
from bench.launch.nodes import Nodes
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device, Precision
from bench.plan.expand import expand, single_trial_ids
from bench.plan.matrix import Matrix

USAGES = {
    ("axes.backend", "backend", "B"): "only these backends, or all but those of installed packages (see 'backends'); "
    "module:Class for your own",
    ("axes.accumulate", "accumulate", "N"): "micro-batches per optimizer step on a rank",
    ("axes.micro_batch_size", "micro_batch", "M"): "samples per micro-batch on a rank; with --accumulate the global "
    "batch follows, else it is held and N follows; in a virtual world N is held",
    ("axes.world_size", "world_size", "W"): "numbers of ranks, or 'all' for one per GPU",
    ("share_gpu", "share_gpu", ""): "let the ranks of --world-size share the GPUs: values, counts and "
    "memory, but no times; one trial per cell unless --repeats is given",
    ("virtual.world_size", "virtual_world", "W"): "one process acts as rank 0 of W: shapes, memory, counts and bytes, "
    "but no values; without --world-size, nothing else runs",
    ("virtual.fake_tensors", "fake_tensors", ""): "in a virtual world: compute and allocate nothing, which leaves no "
    "time to measure",
    ("axes.precision", "precision", "P"): f"dtypes of forward and backward: {', '.join(Precision)}",
    ("axes.optimizer", "optimizer", "O"): f"{', '.join(matrix_file.OPTIMIZERS)}",
    ("axes.clip_norm", "clip_norm", "C"): "limits of the gradient's norm; 0 for no clipping",
    ("axes.activation_checkpointing", "activation_checkpointing", "on|off"): "blocks keep their input alone, and are "
    "recomputed in the backward",
    ("axes.selective_checkpointing", "selective_checkpointing", "on|off"): "checkpointed blocks also keep attention "
    "and every second matrix product",
    ("axes.compiled", "compiled", "on|off"): "compile each block with torch.compile",
    ("axes.ranks_per_node", "ranks_per_node", "R"): "ranks on each of several nodes; by default the GPUs of a node "
    "are filled before those of the next",
    ("axes.replicate", "replicate", "R"): "numbers of replicas of HSDP backends, each sharded over W / R ranks "
    "(default: 2)",
    ("repeats", "repeats", "R"): "trials per cell; more only if --max-repeats allows",
    ("max_repeats", "max_repeats", "R"): "most trials per cell, while its interval is wider than --interval-width",
    ("precision", "interval_width", "P"): "width of the intervals at which repeats end, such as 2%%",
    ("budget_s", "budget", "TIME"): "start no block of trials that would exceed this time: 90s, 20m, 1h",
    ("baseline", "baseline", "B"): "the backend to compare with, which is also compared with itself (A/A)",
    ("training.seed", "seed", "S"): "seed of weights, tokens and order",
    ("axes.seed", "seeds", "S"): "seeds of weights and tokens, as an axis",
    ("workload.global_batch_size", "batch", "B"): "global batch: samples per optimizer step over all ranks",
    ("workload.sequence_length", "sequence", "S"): "tokens per sample",
    ("workload.model", "model", "SIZE"): "size of the model",
    ("workload.workload", "workload", "MODULE:FACTORY"): "a model of your own, instead of llama",
    ("workload.corpus", "corpus", "FILE"): "a text file whose bytes are the tokens",
    ("device", "device", "|".join(Device)): "what the ranks run on",
    ("timeout_s", "timeout", "SECONDS"): "limit of a whole trial",
    ("inactivity_s", "inactivity", "SECONDS"): "limit of the time without progress on any rank; 0 for none",
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


LISTS = {bool: _switches, int: _integers, float: list_of(float, "numbers such as 0,1.5")}
"""How a list is read, by the type of its items; others are names."""
BY_DEVICE = {"auto": ("cpu", "gpu"), "quick": ("quick", "quick-gpu")}
"""Names of --matrix that stand for one matrix on CPUs and another on GPUs."""

READ: dict[str, Any] = {
    "axes.backend": backend_names,
    "axes.world_size": lambda text: ["all"] if text.strip() == "all" else _integers(text),
    "budget_s": duration,
    "precision": share,
}
"""How the values of some keys are read that a type does not tell."""


def add_matrix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a list is given with commas or by repeating the option."""
    names = ", ".join(matrix_file.names())
    words = f"auto (gpu or cpu, as the machine is), {names}, or a TOML file; quick is quick-gpu on GPUs"
    parser.add_argument("--matrix", default="auto", metavar="NAME|FILE", help=words)
    for (key, name, metavar), words in USAGES.items():
        option, (kind, is_list) = flag(name), matrix_file.type_of(key)
        if is_list:
            read = READ.get(key) or LISTS.get(kind, split_names)
            parser.add_argument(option, action="extend", type=read, metavar=f"{metavar}[,{metavar}]", help=words)
        elif kind is bool:
            parser.add_argument(option, action="store_true", default=None, help=words)
        else:
            read = READ.get(key) or (kind if kind in LISTS else str)
            parser.add_argument(option, type=read, metavar=metavar, help=words)
    words = "on GPUs: also run cells that are predicted not to fit into memory"
    parser.add_argument("--try-all", action="store_true", help=words)


@dataclass(frozen=True)
class Planned:
    """What a run would train: the matrix with all options applied, and what follows from it on these GPUs."""

    matrix: Matrix
    backends: dict[str, type[Backend]]
    gpus: Sequence[Mapping[str, Any]]
    """Those that the cells run on, as ``bench.launch.gpus`` has them; none on the CPU."""
    cells: list[Cell]
    """Without the references that are too large for the GPUs."""
    too_large: dict[str, str]
    """Why cells do not fit into a GPU, by id."""
    once: list[str]
    """Ids of the cells with a single trial."""


def planned(
    arguments: argparse.Namespace, pretended: Sequence[Mapping[str, Any]] = (), others: Nodes | None = None
) -> Planned:
    """The matrix of the options and its cells, on this machine or on ``pretended`` GPUs. Raises InputError.

    ``others`` are the other nodes of a job of several.
    """
    from bench.forecast import fit

    matrix = _matrix(arguments, on_gpus=bool(pretended or launch_gpus.gpus()))
    if pretended and matrix["device"] != Device.CUDA:
        place = matrix.place("device")
        raise InputError(f"--on: is for GPUs, and {place} is 'cpu'; give --device cuda, or leave it out")
    named = [part["axes.backend"] for part in matrix.parts]
    backends = registry([name for names in named for name in ([names] if isinstance(names, str) else names)])
    gpus = pretended or (launch_gpus.gpus() if matrix["device"] == Device.CUDA else [])
    num_nodes = 1 + len(others.nodes) if others else 1
    if gpus and others:
        gpus = [*gpus, *(gpu for node in others.nodes for gpu in node.about["gpus"])]
    if arguments.device == Device.CUDA and gpus and not (arguments.world_size or matrix["share_gpu"]):
        matrix = matrix.up_to(len(gpus), "--device")  # it was perhaps written for a CPU, with more ranks than GPUs
    cells = expand(matrix, backends, len(gpus), installed_backends(), num_nodes)
    memory = [int(gpu["memory_bytes"]) for gpu in gpus if not arguments.try_all]
    too_large = fit.too_large(cells, min(memory), len(gpus) // num_nodes) if memory else {}
    cells = [cell for cell in cells if not cell.is_reference or cell.cell_id not in too_large]
    return Planned(matrix, backends, gpus, cells, too_large, single_trial_ids(matrix, backends, len(gpus), num_nodes))


def _matrix(arguments: argparse.Namespace, *, on_gpus: bool) -> Matrix:
    """The matrix of ``--matrix``, with the keys that other options override. Raises InputError."""
    name = arguments.matrix
    chosen = matrix_file.load(BY_DEVICE.get(name, (name, name))[on_gpus])
    alone = bool(arguments.virtual_world and not arguments.world_size)
    given = dict(vars(arguments))
    if alone:
        chosen = chosen.override("virtual.alone", True, "--virtual-world")
    if arguments.fake_tensors and not (arguments.virtual_world or chosen["virtual.world_size"]):
        raise InputError("--fake-tensors: is for a virtual world; give --virtual-world too")
    if arguments.micro_batch and arguments.accumulate and arguments.batch:
        raise InputError("--batch: follows from --micro-batch and --accumulate; leave out one of the three")
    if arguments.micro_batch and not arguments.accumulate and not alone:
        given["accumulate"] = "auto"
    if arguments.share_gpu and alone:
        raise InputError("--share-gpu: is for ranks that exist; give --world-size too, or leave it out")
    given |= _repeats(arguments, chosen)
    if arguments.backend and not arguments.baseline:
        given["baseline"] = "auto"  # the matrix' own may not be among those
    for option, key in OPTIONS.items():
        value = given[option]
        if value is None:
            continue
        chosen = chosen.override(key, "all" if value == ["all"] else value, flag(option))
    return chosen


def _repeats(arguments: argparse.Namespace, chosen: Matrix) -> dict[str, Any]:
    """``repeats`` and ``max_repeats``, of which either option may set both."""
    repeats, most = arguments.repeats, arguments.max_repeats
    if repeats is not None and most is not None and repeats > most:
        raise InputError(f"--max-repeats is {most}; it must be at least --repeats, {repeats}")
    if arguments.share_gpu and repeats is None and most is None:
        return {"repeats": 1, "max_repeats": 1}
    if repeats is None and most is not None:
        repeats = min(chosen["repeats"], most)
    return {"repeats": repeats, "max_repeats": repeats if most is None else most}
