"""A matrix becomes cells: the product of its axes, that of each group, the references and the A/A twin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.errors import InputError, suggest
from bench.plan.cell import LATER, REFERENCE, REFERENCES, SHARDED_REFERENCE, Cell, Device, Precision
from bench.plan.matrix import KEYS, METHODS, Matrix
from bench.plan.models import SIZES, describe_file, find_factory
from bench.plan.world import Candidate

TWIN = "again"
"""Label of the second half of the A/A pair."""


def expand(matrix: Matrix, backends: Mapping[str, Candidate], num_gpus: int, offered: Iterable[str] = ()) -> list[Cell]:
    """The cells of a matrix and of its groups, each once; the reference of each comes along, before all others.

    Then come those in virtual worlds, which have no reference; alone if ``virtual.alone``. Last comes the A/A twin: the
    baseline's cell with the most ranks and the largest N once more, under another label; of the groups only if what is
    before them has none.

    ``offered`` are names of further backends, to be told of where one is misspelt.

    Raises InputError for an unknown backend, model or workload, an optimizer without a learning rate, a batch that does
    not divide by N x W or by micro-batch x W, a corpus that cannot be used, more ranks than GPUs unless they share
    them, no GPU to share, or a backend that cannot be virtual.
    """
    parts = [_part(part, backends, num_gpus, offered) for part in matrix.parts]
    found = list(itertools.chain(*parts))
    checked = [cell for cell in found if cell.world.has_values]
    cells = dict.fromkeys(cell.reference() for cell in checked)
    cells |= dict.fromkeys(cell for cell in [*checked, *found] if cell.backend != REFERENCE)
    if not cells:
        raise InputError(f"{matrix.place('axes.backend')}: {SHARDED_REFERENCE} alone needs a world of 2 ranks or more")
    base = baseline(matrix, backends)
    for part in parts:
        own = [cell for cell in part if cell.backend == base and cell.world.is_timed and not cell.is_reference]
        if own:
            largest = max(own, key=lambda cell: (cell.world.has_all_ranks, cell.world_size, cell.accumulate))
            return [*cells, dataclasses.replace(largest, twin=TWIN)]
    return list(cells)


def once(matrix: Matrix, backends: Mapping[str, Candidate], num_gpus: int) -> list[str]:
    """Ids of the cells that are to have one trial: those of groups that say so alone, and references on CUDA.

    A reference is there to be compared with, and does the same in every trial; on a GPU it may take longer than all
    else.
    """
    found: dict[Cell, bool] = {}
    for part in matrix.parts:
        for cell in _part(part, backends, num_gpus, ()):
            found[cell] = found.get(cell, True) and part["once"]
    for cell in list(found):
        if cell.device is Device.CUDA and cell.world.has_values:
            found |= dict.fromkeys([cell.reference(), *[cell] * cell.is_reference], True)
    return [cell.cell_id for cell, alone in found.items() if alone]


def _part(matrix: Matrix, backends: Mapping[str, Candidate], num_gpus: int, offered: Iterable[str]) -> list[Cell]:
    """The cells of a matrix without its groups; those in virtual worlds last. Raises as ``expand``."""
    chosen = _chosen(matrix, backends)
    for name in chosen:
        if name not in backends:
            known = list(dict.fromkeys([*backends, *offered]))
            raise InputError(f"{matrix.place('axes.backend')}: '{name}' is unknown; {suggest(name, known)}")
    _check_workload(matrix)
    alone = matrix["virtual.alone"] and matrix["virtual.world_size"]
    world_sizes = [] if alone else _world_sizes(matrix, num_gpus)
    corpus = matrix["workload.corpus"]
    if corpus != "markov":
        corpus = describe_file(Path(corpus), matrix["workload.sequence_length"] + 1, matrix.place("workload.corpus"))
    real = _cells(matrix, chosen, corpus, world_sizes, virtual=False)
    virtual = _cells(matrix, chosen, corpus, matrix["virtual.world_size"], virtual=True)
    if matrix["axes.backend"] != "all":
        for cell in virtual:
            if reason := cell.world.refusal(backends[cell.backend]):
                raise InputError(f"{matrix.place('virtual.world_size')}: {reason}; leave it out")
    return real + virtual


def _chosen(matrix: Matrix, backends: Mapping[str, Candidate]) -> list[str]:
    """The names of backends, each once; a sharded reference is run where a cell needs it, or where it is named."""
    named = matrix["axes.backend"]
    return [name for name in backends if name != SHARDED_REFERENCE] if named == "all" else list(dict.fromkeys(named))


def _cells(
    matrix: Matrix, backends: Sequence[str], corpus: str, world_sizes: Sequence[int], *, virtual: bool
) -> list[Cell]:
    """The product of the axes over worlds that exist, or that are virtual; each cell once."""
    rates = _learning_rates(matrix)
    seeds = matrix["axes.seed"] or [matrix["training.seed"]]
    more = [name for name in LATER if f"axes.{name}" in KEYS]
    ways = itertools.product(*(matrix[f"axes.{name}"] for name in more))
    sizes = [(size, *window) for size in world_sizes for window in _windows(matrix, size, virtual=virtual)]
    cells: dict[Cell, None] = {}
    for optimizer, way, seed, precision, (world_size, accumulate, batch), name in itertools.product(
        rates, ways, seeds, matrix["axes.precision"], sizes, backends
    ):
        if (virtual and name in REFERENCES) or (world_size == 1 and name == SHARDED_REFERENCE):
            continue
        cell = Cell(
            backend=name,
            accumulate=accumulate,
            world_size=world_size,
            global_batch_size=batch,
            sequence_length=matrix["workload.sequence_length"],
            workload=matrix["workload.workload"],
            model=matrix["workload.model"],
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
            **{field: type(LATER[field])(value) for field, value in zip(more, way, strict=True)},
        )
        cells.setdefault(cell.reference(sharded=True) if name == SHARDED_REFERENCE else cell)
    return list(cells)


def baseline(matrix: Matrix, backends: Mapping[str, Candidate]) -> str:
    """The backend that the others are compared with: the one that is named, else the first of the matrix that can run.

    One with a known defect is taken only where there is no other. Raises InputError if the one named is not among
    those of the matrix.
    """
    chosen = _chosen(matrix, backends)
    named = matrix["baseline"]
    if named != "auto":
        if named not in chosen:
            raise InputError(f"{matrix.place('baseline')}: '{named}' is not run here; {suggest(named, chosen)}")
        return str(named)
    device = Device(matrix["device"])
    others = [name for name in chosen if name not in REFERENCES]
    ranked = sorted(others, key=lambda name: (bool(backends[name].missing(device)), bool(backends[name].defect)))
    return ranked[0] if ranked else REFERENCE


def _check_workload(matrix: Matrix) -> None:
    """Refuse an unknown model size or a factory that cannot be found."""
    if matrix["workload.workload"] == "llama":
        model = matrix["workload.model"]
        if model not in SIZES:
            raise InputError(f"{matrix.place('workload.model')}: '{model}' is unknown; {suggest(model, list(SIZES))}")
        return
    try:
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
            raise InputError(f"{matrix.place('device')} is 'cuda', and no GPU is visible here; use --matrix cpu")
        if asked != "all" and max(asked) > num_gpus:
            raise InputError(f"{place}: {max(asked)} ranks need as many GPUs; {num_gpus} are visible here")
    elif asked == "all":
        raise InputError(f"{place} is 'all', which means GPUs; on the CPU it must be a list of integers")
    return [num_gpus] if asked == "all" else list(asked)


def _check_sharing(matrix: Matrix, num_gpus: int) -> None:
    """Refuse ranks that are to share a GPU where there is none, or where it is not said how many they are."""
    place = matrix.place("share_gpu")
    on_cuda = matrix["device"] == Device.CUDA
    if num_gpus == 0 or not on_cuda:
        here = "none is visible here" if on_cuda else f"{matrix.place('device')} is '{matrix['device']}'"
        raise InputError(f"{place}: needs a GPU, and {here}; leave it out, or use --matrix gpu on a machine with one")
    if matrix["axes.world_size"] == "all":
        raise InputError(
            f"{matrix.place('axes.world_size')} is 'all', one rank per GPU; beside {place} it must be a list of "
            "integers, such as --world-size 2,4"
        )


def _windows(matrix: Matrix, world_size: int, *, virtual: bool) -> list[tuple[int, int]]:
    """N and the samples per optimizer step over all ranks, for each cell of a world.

    The batch is held, and the micro-batch follows; or N does, if it is 'auto'. With both N and the micro-batch given,
    as always in a virtual world, the batch follows. Raises InputError for a batch that does not divide.
    """
    factors, micro_batches = matrix["axes.accumulate"], matrix["axes.micro_batch_size"]
    if factors == "auto" and not micro_batches:
        place = matrix.place("axes.accumulate")
        raise InputError(f"{place} is 'auto', which needs axes.micro_batch_size; give that, or a list of integers")
    if virtual and not micro_batches:
        micro_batches = [matrix["virtual.micro_batch_size"]]
    if factors != "auto" and micro_batches:
        return [(n, size * n * world_size) for n in factors for size in micro_batches]
    batch: int = matrix["workload.global_batch_size"] * (world_size if matrix["workload.for_each_rank"] else 1)
    if factors == "auto":
        _check_batch(matrix, world_size, "micro-batch", micro_batches)
        return [(batch // (size * world_size), batch) for size in micro_batches]
    _check_batch(matrix, world_size, "N", factors)
    return [(n, batch) for n in factors]


def _learning_rates(matrix: Matrix) -> dict[str, float]:
    """The learning rate of each optimizer that is asked for."""
    optimizers = matrix["axes.optimizer"] or [matrix["training.optimizer"]]
    rates, place = matrix["training.learning_rate"], matrix.place("training.learning_rate")
    methods = {name: name.partition("-")[0] for name in optimizers}
    if not isinstance(rates, dict):
        if len(set(methods.values())) > 1:
            raise InputError(
                f"{place} is {rates!r} for {' and '.join(methods)}, which need different ones; "
                f"give a table such as {{adamw = 1e-3, sgd = 0.05}}"
            )
        rates = dict.fromkeys(METHODS, rates)
    for name, method in methods.items():
        if method not in rates:
            raise InputError(f"{place} has none for {name}; add {method} = ... to the table")
    return {name: float(rates[method]) for name, method in methods.items()}


def _check_batch(matrix: Matrix, world_size: int, what: str, factors: Sequence[int]) -> None:
    """Refuse a batch that does not divide by each of these times W, and name the nearest that do."""
    batch, of_rank = matrix["workload.global_batch_size"], matrix["workload.for_each_rank"]
    place = matrix.place("workload.global_batch_size")
    for factor in factors:
        product = factor * (1 if of_rank else world_size)
        if of_rank and batch % product:
            raise InputError(
                f"{place} is {batch} for each rank, which does not divide by {what} = {factor}; use a multiple of it"
            )
        if batch % product:
            near = [product * n for n in (batch // product, batch // product + 1) if n]
            raise InputError(
                f"{place} is {batch}, which does not divide by {what} x world size = {factor} x {world_size} = "
                f"{product}; the nearest that do: {' and '.join(map(str, near))}"
            )
