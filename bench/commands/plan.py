"""``plan``: what ``run`` would do, before it does it."""

from __future__ import annotations

import argparse
from typing import Any

from bench import plan
from bench.commands.matrix_options import add_matrix_options, backends_of, cells_of, chosen_matrix, estimates
from bench.errors import GOOD


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("plan", help="show what run would do: cells, skips, estimates; starts nothing")
    add_matrix_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the plan."""
    chosen = chosen_matrix(arguments)
    backends = backends_of(chosen)
    cells = cells_of(chosen, backends)
    skipped = plan.skipped(cells, backends)
    guesses = estimates(cells, backends)
    width = max(len(cell.backend) for cell in cells)
    several = len({(cell.optimizer, cell.clip_norm) for cell in cells}) > 1
    lines = [
        f"{'cell':12}  {'backend':{width}}  {'N':>4} {'W':>4} {'micro-batch':>11}  dtype  {'time':>9} {'memory':>12}"
    ]
    for cell in cells:
        guess = guesses[cell.cell_id]
        seconds = "unknown" if guess.seconds is None else f"{guess.seconds:.1f} s"
        memory = "unknown" if guess.memory_bytes is None else f"{guess.memory_bytes / 2**20:,.0f} MiB"
        lines.append(
            f"{cell.cell_id}  {cell.backend:{width}}  {cell.accumulate:4d} {cell.world_size:4d} "
            f"{cell.micro_batch_size:11d}  {cell.precision}   {seconds:>9} {memory:>12}"
            + (f"  {cell.optimizer}, clip {cell.clip_norm:g}" if several else "")
            + "  virtual" * cell.virtual
            + "  shares GPU" * cell.shared_gpu
            + "  A/A twin" * bool(cell.twin)
            + (f"  skipped: {skipped[cell.backend]}" if cell.backend in skipped else "")
        )
    runnable = [cell for cell in cells if cell.backend not in skipped]
    repeats, most = chosen["repeats"], max(chosen["repeats"], chosen["max_repeats"])
    total = sum(guesses[cell.cell_id].seconds or 0.0 for cell in runnable) * repeats
    lines.append(
        f"matrix {chosen.name}: {chosen['description']}: {len(cells)} cells x {repeats} repeats = "
        f"{len(cells) * repeats} trials, {len(cells) - len(runnable)} cells skipped, "
        f"about {total / 60:.0f} min (time per trial: as measured in earlier runs here, or a rough guess; memory per "
        "rank: a rough guess)"
    )
    if most > repeats:
        limit = f", as far as {chosen['budget_s'] / 60:g} min reach" if chosen["budget_s"] else ""
        narrow = f"{100 * chosen['precision']:g} %"
        lines.append(f"then up to {most} repeats of the cells whose intervals are wider than {narrow}{limit}")
    print("\n".join(lines))
    return GOOD
