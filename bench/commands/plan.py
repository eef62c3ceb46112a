"""``plan``: what ``run`` would do, on this machine or on GPUs that it does not have."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping

from bench.backends import blocks
from bench.commands.matrix_options import add_matrix_options, check_workloads, planned
from bench.commands.options import CommandParsers
from bench.errors import GOOD
from bench.formatting import plural, size
from bench.judge.columns import differing, phrases
from bench.plan.cell import summarize
from bench.plan.expand import baseline
from bench.plan.schedule import Cost
from bench.run.start import Planned
from bench.tabular import Table

GPUS = re.compile(
    r"(?:(?P<count>[0-9]{1,4})\s*x\s*)?(?P<name>\S.*?)"
    r"\s+(?P<size>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>GiB|GB)"
)
UNITS = {"GiB": 2**30, "GB": 10**9}


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "plan", help="show what run would do, without starting anything: cells, skips, time, memory"
    )
    add_matrix_options(parser)
    parser.add_argument(
        "--on",
        type=_gpus,
        default=(),
        metavar="GPUS",
        help="as if on these GPUs, with everything installed, such as '1 x H100 80GiB'",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "also check a workload of your own, as run does before its first trial: that it "
            "draws no random numbers, its loss is a finite mean over samples, and its blocks are "
            "called"
        ),
    )


def _gpus(text: str) -> list[dict[str, object]]:
    """The GPUs of ``8 x H200 141GB``, as ``bench.launch.gpus`` describes them."""
    wrong = f"'{text}' does not name GPUs, such as '1 x H100 80GiB' or 'A100 40GB'"
    match = GPUS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(wrong)
    count = 1
    if match["count"] is not None:
        count = int(match["count"])
    memory = float(match["size"]) * UNITS[match["unit"]]
    if not count or not 1 <= memory < math.inf:
        raise argparse.ArgumentTypeError(wrong)
    return [{"name": match["name"], "memory_bytes": int(memory)}] * count


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast import estimate

    plan = planned(arguments, arguments.on)
    if arguments.check:
        plan = check_workloads(plan)
    skipped = _skipped(plan, has_everything=bool(arguments.on))
    guesses = estimate.costs(plan.cells, plan.gpus, skipped)
    print(_cells(plan, skipped, guesses))
    print("\n".join(_totals(plan, skipped, guesses)))
    return GOOD


def _skipped(plan: Planned, *, has_everything: bool) -> dict[str, str]:
    """Why cells are not run, by cell id: on this machine, or on one with everything installed."""
    if not has_everything:
        return blocks.skipped(plan.cells, plan.backends) | plan.skipped
    found = {}
    for cell in plan.cells:
        reason = blocks.refusal(cell, plan.backends[cell.backend])
        if reason:
            found[cell.cell_id] = reason
    return found | plan.skipped


def _cells(plan: Planned, skipped: Mapping[str, str], guesses: Mapping[str, Cost]) -> str:
    """The table of cells; mappings are by cell id."""
    several = differing(plan.cells)
    header = ("cell", "backend", "N", "W", "micro-batch", "dtype", "time", "memory", "")
    rows = []
    for cell in plan.cells:
        guess = guesses[cell.cell_id]
        time, memory = "unknown", "unknown"
        if guess.seconds is not None:
            time = f"{guess.seconds:.1f} s"
        if guess.memory_bytes is not None:
            memory = size(guess.memory_bytes)
        remarks = [", ".join(phrases(cell, several)), cell.world.label]
        if cell.twin:
            remarks.append("A/A twin")
        if cell.cell_id in skipped:
            remarks.append(f"skipped: {skipped[cell.cell_id]}")
        rows.append(
            (
                cell.cell_id,
                cell.backend,
                str(cell.accumulate),
                str(cell.world_size),
                str(cell.micro_batch_size),
                str(cell.precision),
                time,
                memory,
                "  ".join(filter(None, remarks)),
            )
        )
    return Table.from_rows(header, rows, (2, 3, 4, 6, 7)).text()


def _totals(
    plan: Planned, skipped: Mapping[str, str], guesses: Mapping[str, Cost]
) -> Iterator[str]:
    """How many cells and trials, and how long they take."""
    matrix, cells = plan.matrix, plan.cells
    left_out = sum(cell.cell_id in skipped for cell in cells)
    name = f"matrix {matrix.name}"
    if matrix["description"]:
        name += f": {matrix['description']}"
    what = summarize(cells, baseline(matrix, plan.backends))
    yield f"{name}: {what}; {plural(left_out, 'cell')} skipped"
    if matrix["axes.micro_batch_size"]:
        if matrix["axes.accumulate"] == "auto":
            yield "the global batch B is held: N = B / (micro-batch x W)"
        else:
            yield "the global batch follows: B = micro-batch x N x W"
    yield from _duration(plan, skipped, guesses)
    if any(cell.world.shares_gpus for cell in cells):
        yield (
            "ranks that share a GPU use NCCL if a trial of it succeeds when the run starts, "
            "otherwise gloo"
        )
    yield "time: per trial, as measured in earlier runs on such a machine, otherwise a rough guess"
    memory = "memory: predicted peak of a rank"
    if any(cell.compiled for cell in cells):
        memory += ", as if no block were compiled"
    yield memory


def _duration(
    plan: Planned, skipped: Mapping[str, str], guesses: Mapping[str, Cost]
) -> Iterator[str]:
    """How many trials there are, how long they take, and when the run ends."""
    from bench.forecast import estimate

    matrix, cells = plan.matrix, plan.cells
    repeats, max_repeats, budget_s = matrix["repeats"], matrix["max_repeats"], matrix["budget_s"]
    trials, total_s, first_s = 0, 0.0, 0.0
    are_known = []
    for cell in cells:
        count = repeats
        if cell.cell_id in plan.once or not cell.world.computes:
            count = 1
        trials += count
        if cell.cell_id not in skipped:
            are_known.append(guesses[cell.cell_id].seconds is not None)
            total_s += guesses[cell.cell_id].total(count)
            first_s += guesses[cell.cell_id].total(1)
    begins_s = estimate.start_s(cells)
    first_s += begins_s
    total_s += begins_s + estimate.renewals_s(cells, repeats, total_s)
    of_each = plural(repeats, "repeat")
    if trials < repeats * len(cells):
        of_each = f"up to {of_each}"
    time = f"about {total_s / 60:.0f} min"
    if not all(are_known):
        time = "of unknown length"
    others_s = (total_s - first_s) / max(1, repeats - 1)
    if all(are_known) and repeats > 1 and first_s >= 1.1 * others_s:
        time += f": {first_s / 60:.0f} for the first repeat, with all checks, "
        time += f"and {others_s / 60:.0f} for each other"
    yield f"{plural(trials, 'trial')}, {of_each} of each cell: {time}"
    if max_repeats > repeats:
        narrow = f"{100 * matrix['precision']:g} %"
        yield (
            f"then up to {max_repeats} repeats of the cells whose intervals are wider than {narrow}"
        )
    if budget_s:
        budget = f"{budget_s / 60:g} min"
        if all(are_known) and total_s <= budget_s:
            budget += ", into which all of them fit"
        yield f"the run ends before a repeat that would exceed its budget of {budget}"
