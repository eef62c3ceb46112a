"""Expand a matrix into cells: the product of its axes, of each group's, references and a twin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.errors import InputError, suggest
from bench.plan.cell import (
    ADDED_FIELDS,
    REFERENCE,
    REFERENCES,
    SHARDED_REFERENCE,
    SMALLEST_SHARDS,
    Cell,
    Device,
    Precision,
)
from bench.plan.matrix import KEYS, METHODS, MOST_CELLS, Matrix
from bench.plan.models import (
    HUGGING_FACE,
    LLAMA,
    SIZES,
    describe_file,
    display_name,
    find_factory,
    name_config,
    read_config,
    suggest_model,
)
from bench.plan.world import Candidate

TWIN = "again"
"""Label of the A/A twin."""
MORE_AXES = tuple(name for name in ADDED_FIELDS if f"axes.{name}" in KEYS)
"""Fields of a cell that were added as axes."""


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """What a matrix becomes."""

    cells: list[Cell]
    """Without duplicates: references first, the A/A twin last."""
    once: list[str]
    """Ids of the cells that run only one trial: those of groups with ``once``, and references on
    CUDA.

    A reference does the same in every trial, and on a GPU it may take longer than everything else.
    """


def expand(
    matrix: Matrix,
    backends: Mapping[str, Candidate],
    num_gpus: int,
    offered: Iterable[str] = (),
    num_nodes: int = 1,
) -> Expansion:
    """The cells of a matrix and its groups.

    Cells in virtual worlds have no reference and come after the real ones; with ``virtual.alone``
    there are no real ones. The A/A twin is a copy of the baseline's cell with the most ranks and
    the largest N, taken from the matrix itself if it has one, otherwise from the first group that
    has one.

    ``num_gpus`` are those of all nodes, which have the same number. ``offered`` are names of
    further backends, for suggestions in errors.

    Raises InputError naming the key whose value cannot be, here or together with others.
    """
    _require_few(matrix, backends)
    corpus = _corpus(matrix)
    parts = []
    found: list[Cell] = []
    for part in matrix.parts:
        of_part = _part_cells(part, corpus, backends, num_gpus, offered, num_nodes)
        parts.append(ExpandedPart(part, of_part))
        found += of_part
    used = max((cell.num_nodes for cell in found), default=num_nodes)
    if used < num_nodes:
        place = matrix.place("axes.ranks_per_node")
        raise InputError(
            f"{place}: no cell uses more than {used} of the {num_nodes} nodes; give fewer ranks "
            "per node"
        )
    cells = _with_references(found)
    if not cells:
        raise InputError(
            f"{matrix.place('axes.backend')}: nothing is left to run; {SHARDED_REFERENCE} needs 2 "
            "ranks or more, and HSDP twice as many as replicas"
        )
    original = _original_of_twin(parts, baseline(matrix, backends))
    if original is not None:
        cells.append(dataclasses.replace(original, twin=TWIN))
    return Expansion(cells=cells, once=_single_trial_ids(parts))


def _require_few(matrix: Matrix, backends: Mapping[str, Candidate]) -> None:
    """Raise InputError if the axes have too many values to make cells of, before any is made."""
    total = 0
    for part in matrix.parts:
        combinations = 1
        for key, value in part.values.items():
            if key.startswith(("axes.", "virtual.")) and isinstance(value, list):
                combinations *= max(1, len(value))
        if part["axes.backend"] == "all":
            combinations *= len(backends)
        total += combinations
    if total > MOST_CELLS:
        raise InputError(
            f"{matrix.source}: its axes have {total:,} combinations; it must have at most "
            f"{MOST_CELLS:,}, so leave out values"
        )


class ExpandedPart(NamedTuple):
    """The matrix without its groups, or one of these, with its cells."""

    matrix: Matrix
    cells: Sequence[Cell]


def _with_references(found: Sequence[Cell]) -> list[Cell]:
    """The references of the cells that are checked, these cells, and the others; each cell once."""
    checked = []
    cells: dict[Cell, None] = {}
    for cell in found:
        if cell.world.has_values:
            checked.append(cell)
            cells.setdefault(cell.reference())
    for cell in (*checked, *found):
        if cell.backend != REFERENCE:
            cells.setdefault(cell)
    return list(cells)


def _original_of_twin(parts: Sequence[ExpandedPart], base: str) -> Cell | None:
    """The cell of the baseline that the run has twice; None if no part has a timed one."""

    def extent(cell: Cell) -> tuple[bool, int, int]:
        return cell.world.has_all_ranks, cell.world_size, cell.accumulate

    for part in parts:
        timed = []
        for cell in part.cells:
            if cell.backend == base and cell.world.is_timed and not cell.is_reference:
                timed.append(cell)
        if timed:
            return max(timed, key=extent)
    return None


def _single_trial_ids(parts: Sequence[ExpandedPart]) -> list[str]:
    alone: dict[Cell, bool] = {}
    for part in parts:
        for cell in part.cells:
            if not part.matrix["once"]:
                alone[cell] = False
            alone.setdefault(cell, True)
    for cell in list(alone):
        if cell.device is Device.CUDA and cell.world.has_values:
            alone[cell.reference()] = True
            if cell.is_reference:
                alone[cell] = True
    return [cell.cell_id for cell, is_alone in alone.items() if is_alone]


def _corpus(matrix: Matrix) -> str:
    """The name of the corpus in cells.

    Raises InputError if the file cannot be read, or is too short for the longest sample.
    """
    named: str = matrix["workload.corpus"]
    if named == "markov":
        return named
    longest = max(part["workload.sequence_length"] for part in matrix.parts)
    return describe_file(Path(named), longest + 1, matrix.place("workload.corpus"))


def _part_cells(
    matrix: Matrix,
    corpus: str,
    backends: Mapping[str, Candidate],
    num_gpus: int,
    offered: Iterable[str],
    num_nodes: int,
) -> list[Cell]:
    """The cells of a matrix without its groups, virtual worlds last. Raises as ``expand``."""
    chosen = _chosen(matrix, backends)
    for name in chosen:
        if name not in backends:
            known = list(dict.fromkeys([*backends, *offered]))
            raise InputError(
                f"{matrix.place('axes.backend')}: '{name}' is unknown; {suggest(name, known)}"
            )
    _check_workload(matrix)
    world_sizes: Sequence[int] = []
    if not (matrix["virtual.alone"] and matrix["virtual.world_size"]):
        world_sizes = _world_sizes(matrix, num_gpus)
    meshes = _meshes(matrix, chosen, backends)
    real = []
    for cell in _cells(matrix, meshes, corpus, world_sizes, virtual=False):
        ranks_per_node = _ranks_per_node(matrix, cell, num_gpus, num_nodes)
        real.append(dataclasses.replace(cell, ranks_per_node=ranks_per_node))
    virtual = _cells(matrix, meshes, corpus, matrix["virtual.world_size"], virtual=True)
    if matrix["axes.backend"] != "all":
        for cell in virtual:
            if reason := cell.world.refusal(backends[cell.backend]):
                raise InputError(f"{matrix.place('virtual.world_size')}: {reason}; leave it out")
    return real + virtual


class Mesh(NamedTuple):
    """A backend with its number of replicas: an axis of HSDP alone, and 0 for all others."""

    backend: str
    replicas: int


def _meshes(matrix: Matrix, chosen: Sequence[str], backends: Mapping[str, Candidate]) -> list[Mesh]:
    """The chosen backends, each with its numbers of replicas."""
    given: list[int] = matrix["axes.replicate"]
    found = []
    for name in chosen:
        replicas = [backends[name].replicate]
        if backends[name].replicate and given:
            replicas = given
        for count in replicas:
            found.append(Mesh(name, count))
    return found


def _chosen(matrix: Matrix, backends: Mapping[str, Candidate]) -> list[str]:
    """The distinct backend names; of ``all`` without the sharded reference, which cells may add."""
    named = matrix["axes.backend"]
    if named == "all":
        return [name for name in backends if name != SHARDED_REFERENCE]
    return list(dict.fromkeys(named))


def _cells(
    matrix: Matrix,
    meshes: Sequence[Mesh],
    corpus: str,
    world_sizes: Sequence[int],
    *,
    virtual: bool,
) -> list[Cell]:
    """The product of the axes over real or virtual worlds, without duplicates."""
    rates = _learning_rates(matrix)
    seeds: list[int] = matrix["axes.seed"]
    if not seeds:
        seeds = [matrix["training.seed"]]
    batches: list[Batch] = []
    for world_size in world_sizes:
        batches += _batches(matrix, world_size, virtual=virtual)
    cells: dict[Cell, None] = {}
    for optimizer, way, seed, precision, batch, mesh in itertools.product(
        rates, _ways(matrix), seeds, matrix["axes.precision"], batches, meshes
    ):
        is_sharded_reference = mesh.backend == SHARDED_REFERENCE
        if virtual and mesh.backend in REFERENCES:
            continue
        if is_sharded_reference and batch.world_size == 1:
            continue
        cell = Cell(
            backend=mesh.backend,
            accumulate=batch.accumulate,
            world_size=batch.world_size,
            global_batch_size=batch.global_batch_size,
            sequence_length=matrix["workload.sequence_length"],
            workload=_workload(matrix),
            model=_model(matrix),
            corpus=corpus,
            precision=Precision(precision),
            optimizer=optimizer,
            learning_rate=rates[optimizer],
            warmup_windows=matrix["training.warmup_windows"],
            timed_windows=matrix["training.timed_windows"],
            seed=seed,
            device=Device(matrix["device"]),
            virtual=virtual,
            fake_tensors=virtual and matrix["virtual.fake_tensors"],
            shared_gpu=matrix["share_gpu"] and not virtual,
            replicate=mesh.replicas,
            **way,
        )
        if virtual:
            cell = dataclasses.replace(cell, ranks_per_node=0)
        if not cell.fits_mesh:
            _check_mesh(matrix, cell)
            continue
        if is_sharded_reference:
            cell = cell.reference(sharded=True)
        cells.setdefault(cell)
    return list(cells)


def _ways(matrix: Matrix) -> list[dict[str, Any]]:
    """The combinations of MORE_AXES but ``replicate``, as fields of a cell."""
    names = [name for name in MORE_AXES if name != "replicate"]
    found = []
    for values in itertools.product(*(matrix[f"axes.{name}"] for name in names)):
        way = {}
        for name, value in zip(names, values, strict=True):
            way[name] = type(ADDED_FIELDS[name])(value)
        found.append(way)
    return found


def _check_mesh(matrix: Matrix, cell: Cell) -> None:
    """Raise InputError for an HSDP mesh that was asked for and does not fit the ranks.

    It is left out if it follows from 'all' backends, from 'all' ranks, or from an option beside a
    file's backends.
    """
    key = "axes.world_size"
    if cell.virtual:
        key = "virtual.world_size"
    place, named = matrix.place(key), matrix.place("axes.backend")
    is_beside_file = place.startswith("--") and not named.startswith("--")
    if is_beside_file or "all" in (matrix["axes.backend"], matrix[key]):
        return
    raise InputError(
        f"{place} is {cell.world_size}: {cell.backend} needs a multiple of its {cell.replicate} "
        f"replicas, at least {SMALLEST_SHARDS * cell.replicate} ranks; change it or "
        f"{matrix.place('axes.replicate')}"
    )


def baseline(matrix: Matrix, backends: Mapping[str, Candidate]) -> str:
    """The baseline: the backend that is named, otherwise the first of the matrix that can run.

    A backend with a known defect is chosen only if there is no other. Raises InputError if the
    named backend is not part of the matrix.
    """
    chosen = _chosen(matrix, backends)
    named = matrix["baseline"]
    if named != "auto":
        if named not in chosen:
            raise InputError(
                f"{matrix.place('baseline')}: '{named}' is not a backend of this matrix; "
                f"{suggest(named, chosen)}"
            )
        return str(named)
    device = Device(matrix["device"])
    others = [name for name in chosen if name not in REFERENCES]

    def unfitness(name: str) -> tuple[bool, bool]:
        return bool(backends[name].missing(device)), bool(backends[name].defect)

    return min(others, key=unfitness, default=REFERENCE)


def _model(matrix: Matrix) -> str:
    """The size of the model; of a workload that an option names without a size, its own name."""
    workload: str = matrix["workload.workload"]
    is_named = matrix.place("workload.workload").startswith("--")
    has_size = matrix.place("workload.model").startswith("--")
    if is_named and not has_size and workload != LLAMA:
        return display_name(workload)  # the size in a file is of another workload
    return str(matrix["workload.model"])


def _workload(matrix: Matrix) -> str:
    """The workload in cells: of a config of transformers its name and content, not its path."""
    name = str(matrix["workload.workload"])
    if name.startswith(HUGGING_FACE):
        return name_config(name)
    return name


def _check_workload(matrix: Matrix) -> None:
    """Raise InputError for an unknown model size or a factory that cannot be found."""
    if matrix["workload.workload"] == "llama":
        model = matrix["workload.model"]
        if model not in SIZES:
            raise InputError(
                f"{matrix.place('workload.model')}: '{model}' is unknown; "
                f"{suggest_model(model, list(SIZES))}"
            )
        return
    try:
        if matrix["workload.workload"].startswith(HUGGING_FACE):
            read_config(matrix["workload.workload"])
        else:
            find_factory(matrix["workload.workload"])
    except InputError as error:
        raise InputError(f"{matrix.place('workload.workload')}: {error}") from error


def _world_sizes(matrix: Matrix, num_gpus: int) -> list[int]:
    asked, place = matrix["axes.world_size"], matrix.place("axes.world_size")
    if matrix["share_gpu"]:
        _check_sharing(matrix, num_gpus)
        return list(asked)
    if matrix["device"] == Device.CUDA:
        if num_gpus == 0:
            raise InputError(
                f"{matrix.place('device')} is 'cuda', and no GPU is visible here; use --matrix cpu"
            )
        if asked != "all" and max(asked) > num_gpus:
            raise InputError(
                f"{place}: {max(asked)} ranks need as many GPUs; {num_gpus} are visible here"
            )
        if asked == "all":
            return [num_gpus]
    elif asked == "all":
        raise InputError(
            f"{place} is 'all', which means GPUs; on the CPU it must be a list of integers"
        )
    return list(asked)


def _check_sharing(matrix: Matrix, num_gpus: int) -> None:
    """Raise InputError if ranks cannot share a GPU: none is here, or their number is not given."""
    place = matrix.place("share_gpu")
    on_cuda = matrix["device"] == Device.CUDA
    if num_gpus == 0 or not on_cuda:
        here = "none is visible here"
        if not on_cuda:
            here = f"{matrix.place('device')} is '{matrix['device']}'"
        raise InputError(
            f"{place}: needs a GPU, and {here}; leave it out, or use --matrix gpu on a machine "
            "with one"
        )
    if matrix["axes.world_size"] == "all":
        raise InputError(
            f"{matrix.place('axes.world_size')} is 'all', one rank per GPU; with {place} it must "
            "be a list of integers, such as --world-size 2,4"
        )


def _ranks_per_node(matrix: Matrix, cell: Cell, num_gpus: int, num_nodes: int) -> int:
    """Ranks on each node of a real cell; 0 if all are on one. InputError if they do not fit."""
    place, gpus = matrix.place("axes.ranks_per_node"), num_gpus // num_nodes
    fills = cell.device is Device.CUDA and not cell.shared_gpu
    found = cell.world_size
    if cell.ranks_per_node:
        found = min(found, cell.ranks_per_node)
    elif fills:
        found = min(found, gpus)
    needed, rest = divmod(cell.world_size, found)
    if rest:
        raise InputError(
            f"{place}: {cell.world_size} ranks are not divisible by {found} on each node"
        )
    if needed > num_nodes:
        here = f"this job has {num_nodes}"
        raise InputError(
            f"{place}: {cell.world_size} ranks, {found} on each node, need {needed} nodes, and "
            f"{here}"
        )
    if fills and found > gpus:
        raise InputError(f"{place}: {found} ranks on a node need as many GPUs; each has {gpus}")
    if needed == 1:
        return 0
    return found


class Batch(NamedTuple):
    """How a global batch is split."""

    world_size: int
    accumulate: int
    global_batch_size: int


def _batches(matrix: Matrix, world_size: int, *, virtual: bool) -> list[Batch]:
    """N and global batch size of each cell of a world.

    The batch is fixed, and the micro-batch size follows; with N 'auto', N follows from the
    micro-batch size. If both N and the micro-batch size are given, as always in a virtual world,
    the batch follows. Raises InputError if the batch is not divisible.
    """
    factors, micro_batches = matrix["axes.accumulate"], matrix["axes.micro_batch_size"]
    if factors == "auto" and not micro_batches:
        place = matrix.place("axes.accumulate")
        raise InputError(
            f"{place} is 'auto', which needs axes.micro_batch_size; give that, or a list of "
            "integers"
        )
    if virtual and not micro_batches:
        micro_batches = [matrix["virtual.micro_batch_size"]]
    found = []
    if factors != "auto" and micro_batches:
        for n in factors:
            for size in micro_batches:
                found.append(Batch(world_size, n, size * n * world_size))
        return found
    batch: int = matrix["workload.global_batch_size"]
    if matrix["workload.for_each_rank"]:
        batch *= world_size
    if factors != "auto":
        _check_batch(matrix, world_size, "N", factors)
        return [Batch(world_size, n, batch) for n in factors]
    _check_batch(matrix, world_size, "micro-batch", micro_batches)
    for size in micro_batches:
        found.append(Batch(world_size, batch // (size * world_size), batch))
    return found


def _learning_rates(matrix: Matrix) -> dict[str, float]:
    optimizers: list[str] = matrix["axes.optimizer"]
    if not optimizers:
        optimizers = [matrix["training.optimizer"]]
    rates, place = matrix["training.learning_rate"], matrix.place("training.learning_rate")
    methods = {name: name.partition("-")[0] for name in optimizers}
    if not isinstance(rates, dict):
        if len(set(methods.values())) > 1:
            raise InputError(
                f"{place} is {rates!r} for {' and '.join(methods)}, which need different rates; "
                f"give a table such as {{adamw = 1e-3, sgd = 0.05}}"
            )
        rates = dict.fromkeys(METHODS, rates)
    for name, method in methods.items():
        if method not in rates:
            raise InputError(f"{place} has none for {name}; add {method} = ... to the table")
    return {name: float(rates[method]) for name, method in methods.items()}


def _check_batch(matrix: Matrix, world_size: int, what: str, factors: Sequence[int]) -> None:
    """Raise InputError if the batch is not divisible by a factor times W, naming what would be."""
    batch, of_rank = matrix["workload.global_batch_size"], matrix["workload.for_each_rank"]
    place = matrix.place("workload.global_batch_size")
    for factor in factors:
        if of_rank:
            if batch % factor:
                raise InputError(
                    f"{place} is {batch} for each rank, which is not divisible by {what} = "
                    f"{factor}; use a multiple of it"
                )
            continue
        product = factor * world_size
        if batch % product:
            whole = batch // product
            near = [str(product * n) for n in (whole, whole + 1) if n]
            raise InputError(
                f"{place} is {batch}, which is not divisible by {what} x world size = {factor} x "
                f"{world_size} = {product}; the nearest that are: {' and '.join(near)}"
            )
