"""``plan``: what ``run`` would do, on this machine or on GPUs that it does not have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.backends import blocks
from bench.commands.matrix_options import add_matrix_options, planned
from bench.errors import GOOD
from bench.formatting import plural, size
from bench.judge.columns import differing, phrases
from bench.plan.cell import summarize
from bench.plan.expand import baseline
from bench.plan.schedule import Cost
from bench.run.start import Planned
from bench.tabular import Table

GPUS = re.compile(
    r"(?:(?P<count>[0-9]{1,4})\s*x\s*)?(?P<name>\S.*?)\s+(?P<size>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>GiB|GB)"
)
UNITS = {"GiB": 2**30, "GB": 10**9}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="show what run would do, without starting anything: cells, skips, time, memory"
    )
    add_matrix_options(parser)
    parser.add_argument(
        "--on",
        type=_gpus,
        metavar="GPUS",
        help="as if on these GPUs, with everything installed, such as '1 x H100 80GiB'",
    )


def _gpus(text: str) -> list[dict[str, Any]]:
    """The GPUs of ``8 x H200 141GB``, as ``bench.launch.gpus`` describes them."""
    match = GPUS.fullmatch(text.strip())
    count = int(match["count"] or 1) if match else 0
    memory = int(float(match["size"]) * UNITS[match["unit"]]) if match else 0
    if match is None or not count or not memory:
        raise argparse.ArgumentTypeError(f"'{text}' does not name GPUs, such as '1 x H100 80GiB' or 'A100 40GB'")
    return [{"name": match["name"], "memory_bytes": memory}] * count


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast import estimate

    plan = planned(arguments, arguments.on or ())
    cells, backends = plan.cells, plan.backends
    if arguments.on:
        refused = {cell.cell_id: blocks.refusal(cell, backends[cell.backend]) for cell in cells}
        skipped = {cell_id: reason for cell_id, reason in refused.items() if reason} | plan.too_large
    else:
        skipped = blocks.skipped(cells, backends) | plan.too_large
    guesses = estimate.costs(cells, plan.gpus, skipped)
    print(_cells(plan, skipped, guesses))
    print("\n".join(_totals(plan, skipped, guesses)))
    return GOOD


def _cells(plan: Planned, skipped: Mapping[str, str], guesses: Mapping[str, Cost]) -> str:
    """The table of cells; mappings are by cell id."""
    several = differing(plan.cells)
    header = ("cell", "backend", "N", "W", "micro-batch", "dtype", "time", "memory", "")
    rows = []
    for cell in plan.cells:
        guess = guesses[cell.cell_id]
        remarks = [", ".join(phrases(cell, several)), cell.world.label, "A/A twin" * bool(cell.twin)]
        remarks += [f"skipped: {skipped[cell.cell_id]}"] if cell.cell_id in skipped else []
        rows.append(
            (
                cell.cell_id,
                cell.backend,
                str(cell.accumulate),
                str(cell.world_size),
                str(cell.micro_batch_size),
                str(cell.precision),
                "unknown" if guess.seconds is None else f"{guess.seconds:.1f} s",
                "unknown" if guess.memory_bytes is None else size(guess.memory_bytes),
                "  ".join(filter(None, remarks)),
            )
        )
    return Table.from_rows(header, rows, (2, 3, 4, 6, 7)).text()


def _totals(plan: Planned, skipped: Mapping[str, str], guesses: Mapping[str, Cost]) -> Iterator[str]:
    """How many cells and trials, and how long they take."""
    from bench.forecast import estimate

    matrix, cells = plan.matrix, plan.cells
    repeats, budget_s = matrix["repeats"], matrix["budget_s"]
    trials, total_s, first_s = 0, 0.0, 0.0
    for cell in cells:
        count = 1 if cell.cell_id in plan.once or not cell.world.computes else repeats
        trials += count
        if cell.cell_id not in skipped:
            total_s += guesses[cell.cell_id].total(count)
            first_s += guesses[cell.cell_id].total(1)
    begins_s = estimate.start_s(cells)
    first_s += begins_s
    total_s += begins_s + estimate.renewals_s(cells, repeats, total_s)
    left_out = sum(cell.cell_id in skipped for cell in cells)
    names = ": ".join(filter(None, (f"matrix {matrix.name}", matrix["description"])))
    yield f"{names}: {summarize(cells, baseline(matrix, plan.backends))}; {plural(left_out, 'cell')} skipped"
    if matrix["axes.micro_batch_size"]:
        yield (
            "the global batch B is held: N = B / (micro-batch x W)"
            if matrix["axes.accumulate"] == "auto"
            else "the global batch follows: B = micro-batch x N x W"
        )
    up_to = "up to " * (trials < repeats * len(cells))
    time = f"about {total_s / 60:.0f} min"
    others_s = (total_s - first_s) / max(1, repeats - 1)
    if repeats > 1 and first_s >= 1.1 * others_s:
        time += f": {first_s / 60:.0f} for the first repeat, with all checks, and {others_s / 60:.0f} for each other"
    yield f"{plural(trials, 'trial')}, {up_to}{plural(repeats, 'repeat')} of each cell: {time}"
    if matrix["max_repeats"] > repeats:
        narrow = f"{100 * matrix['precision']:g} %"
        yield f"then up to {matrix['max_repeats']} repeats of the cells whose intervals are wider than {narrow}"
    if budget_s:
        fits = ", into which all of them fit" * (total_s <= budget_s)
        yield f"the run ends before a repeat that would exceed its budget of {budget_s / 60:g} min{fits}"
    if any(cell.world.shares_gpus for cell in cells):
        yield "ranks that share a GPU use NCCL if a trial of it succeeds when the run starts, otherwise gloo"
    yield "time: per trial, as measured in earlier runs here, otherwise a rough guess"
    not_compiled = ", as if no block were compiled" * any(cell.compiled for cell in cells)
    yield f"memory: predicted peak of a rank{not_compiled}"
