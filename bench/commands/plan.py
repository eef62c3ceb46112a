"""``plan``: what ``run`` would do, on this machine or on GPUs that it does not have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bench.backends import blocks
from bench.backends.base import installed_backends
from bench.commands.matrix_options import (
    add_matrix_options,
    backends_of,
    chosen_matrix,
    costs,
    on_gpus,
    too_large,
    visible_gpus,
    without_reference,
)
from bench.errors import GOOD, InputError
from bench.plan import estimates
from bench.plan.cell import Cell, Device
from bench.plan.columns import differing, phrases
from bench.plan.expand import expand, single_trial_ids
from bench.plan.matrix import Matrix
from bench.words import plural

GPUS = re.compile(
    r"(?:(?P<count>[0-9]{1,4})\s*x\s*)?(?P<name>\S.*?)\s+(?P<size>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>GiB|GB)"
)
UNITS = {"GiB": 2**30, "GB": 10**9}


def add(commands: Any) -> None:
    """Add the command's parser."""
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
    parser.set_defaults(command=run)


def _gpus(text: str) -> list[dict[str, Any]]:
    """The GPUs of ``8 x H200 141GB``, as ``bench.launch.gpus`` describes them."""
    match = GPUS.fullmatch(text.strip())
    count = int(match["count"] or 1) if match else 0
    memory = int(float(match["size"]) * UNITS[match["unit"]]) if match else 0
    if match is None or not count or not memory:
        raise argparse.ArgumentTypeError(f"'{text}' does not name GPUs, such as '1 x H100 80GiB' or 'A100 40GB'")
    return [{"name": match["name"], "memory_bytes": memory}] * count


def run(arguments: argparse.Namespace) -> int:
    """Show the plan."""
    chosen = chosen_matrix(arguments)
    backends = backends_of(chosen)
    if arguments.on and chosen["device"] != Device.CUDA:
        raise InputError(
            f"--on: is for GPUs, and {chosen.place('device')} is 'cpu'; give --device cuda, or leave it out"
        )
    gpus = arguments.on or visible_gpus(chosen)
    chosen = on_gpus(chosen, arguments, len(gpus))
    cells = expand(chosen, backends, len(gpus), installed_backends())
    if arguments.on:
        refused = {cell.cell_id: blocks.refusal(cell, backends[cell.backend]) for cell in cells}
        skipped = {cell_id: reason for cell_id, reason in refused.items() if reason}
    else:
        skipped = blocks.skipped(cells, backends)
    large = too_large(cells, gpus, try_all=arguments.try_all)
    cells = without_reference(cells, large)
    skipped |= large
    trained_once = single_trial_ids(chosen, backends, len(gpus))
    print("\n".join(lines(chosen, cells, skipped, trained_once, costs(cells, backends, gpus, skipped))))
    return GOOD


def lines(
    chosen: Matrix,
    cells: Sequence[Cell],
    skipped: Mapping[str, str],
    once: Collection[str],
    guesses: Mapping[str, estimates.Cost],
) -> list[str]:
    """The plan: a line per cell, then how many trials and how long. Mappings are by cell id; ``once`` has ids."""
    width = max(len(cell.backend) for cell in cells)
    several = differing(cells)
    found = [
        f"{'cell':12}  {'backend':{width}}  {'N':>4} {'W':>4} {'micro-batch':>11}  dtype  {'time':>9} {'memory':>12}"
    ]
    trials, total, last = 0, 0.0, 0.0
    for cell in cells:
        guess = guesses[cell.cell_id]
        seconds = "unknown" if guess.seconds is None else f"{guess.seconds:.1f} s"
        memory = "unknown" if guess.memory_bytes is None else f"{guess.memory_bytes / 2**20:,.0f} MiB"
        found.append(
            f"{cell.cell_id}  {cell.backend:{width}}  {cell.accumulate:4d} {cell.world_size:4d} "
            f"{cell.micro_batch_size:11d}  {cell.precision}   {seconds:>9} {memory:>12}"
            + (f"  {', '.join(phrases(cell, several))}" if several else "")
            + f"  {cell.world.label}" * bool(cell.world.label)
            + "  A/A twin" * bool(cell.twin)
            + (f"  skipped: {skipped[cell.cell_id]}" if cell.cell_id in skipped else "")
        )
        repeats = 1 if cell.cell_id in once or not cell.world.computes else chosen["repeats"]
        trials += repeats
        if cell.cell_id not in skipped:
            total, last = total + guess.total(repeats), last + guess.total(1)
    if chosen["axes.micro_batch_size"]:
        held = chosen["axes.accumulate"] == "auto"
        found.append(
            "the global batch B is held: N = B / (micro-batch x W)"
            if held
            else "the global batch follows: B = micro-batch x N x W"
        )
    repeats, longest = chosen["repeats"], max(chosen["repeats"], chosen["max_repeats"])
    number = f"{plural(len(cells), 'cell')} x {plural(repeats, 'repeat')} = {plural(trials, 'trial')}"
    if trials < repeats * len(cells):
        number = f"{plural(len(cells), 'cell')}, up to {plural(repeats, 'repeat')} of each = {plural(trials, 'trial')}"
    found.append(
        f"{': '.join(filter(None, (f'matrix {chosen.name}', chosen['description'], number)))}, "
        f"{plural(sum(cell.cell_id in skipped for cell in cells), 'cell')} skipped, "
        f"about {total / 60:.0f} min{_last(repeats, total, last)} (time per trial: as measured in earlier runs here, "
        f"or a rough guess; memory per rank: {'by prediction' if chosen['device'] == Device.CUDA else 'a rough guess'})"
        + _cut(chosen, total)
    )
    if longest > repeats:
        limit = f", as far as {chosen['budget_s'] / 60:g} min reach" if chosen["budget_s"] else ""
        narrow = f"{100 * chosen['precision']:g} %"
        found.append(f"then up to {longest} repeats of the cells whose intervals are wider than {narrow}{limit}")
    return found


def _last(repeats: int, total_s: float, last_s: float) -> str:
    """How much longer than the others the last repeat is, if it is."""
    others = (total_s - last_s) / max(1, repeats - 1)
    if repeats == 1 or last_s < 1.1 * others:
        return ""
    return f", {others / 60:.0f} for each repeat and {last_s / 60:.0f} for the last, which has all that is done once"


def _cut(chosen: Matrix, total_s: float) -> str:
    """Where the budget ends before the repeats that are asked for, if it does."""
    if not chosen["budget_s"] or total_s <= chosen["budget_s"]:
        return ""
    return f"; after {chosen['budget_s'] / 60:g} min no repeat begins but the last"
