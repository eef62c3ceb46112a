"""The training that an audited command ran, from the files of its processes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from bench.audit.command.inside.records import MicroBatch, Rank, Update


def read(folder: Path) -> tuple[dict[int, Rank], int]:
    """The ranks of the training with the most updates, and how many processes trained apart from it.

    A command may train several times, and a launcher may restart its ranks: the last of equals is taken.
    """
    trainings: dict[tuple[str, int], dict[int, Rank]] = defaultdict(dict)
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for rank in map(_rank, paths):
        ranks = trainings[rank.job, rank.world]
        if rank.rank not in ranks or len(rank.updates) >= len(ranks[rank.rank].updates):
            ranks[rank.rank] = rank
    latest = reversed(trainings.values())
    chosen = max(latest, key=lambda ranks: sum(len(rank.updates) for rank in ranks.values()), default={})
    return dict(sorted(chosen.items())), len(paths) - len(chosen)


def _rank(path: Path) -> Rank:
    # A process that was killed may have cut off its last line.
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    updates = {line["number"]: line for line in lines if "number" in line}  # each step writes its update again
    for line in updates.values():
        line["micro_batches"] = [MicroBatch(**found) for found in line["micro_batches"]]
    rank = Rank(**[line for line in lines if "rank" in line][-1])
    rank.updates = [Update(**line) for line in updates.values()]
    return rank
