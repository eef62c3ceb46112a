"""What ``audit`` says of events that are made here; nothing trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.audit.command import audited_command
from bench.audit.command.training_audit import TrainingAudit

UPDATES, COORDINATES = 4, 40
Gradient = Callable[[Any, int, int], Any]
"""The gradient that a rank uses in an update, of the micro-gradients [rank, update, micro-batch, coordinate]."""


def mean(micro: Any, _: int, update: int) -> Any:
    return micro[:, update].sum(axis=1).mean(axis=0)


def alone(micro: Any, rank: int, update: int) -> Any:
    return micro[rank, update].sum(axis=0)


def uncleared(micro: Any, rank: int, update: int) -> Any:
    return micro[:, : update + 1].sum(axis=(1, 2)).mean(axis=0)


def without_first(micro: Any, _: int, update: int) -> Any:
    return micro[:, update, 1:].sum(axis=1).mean(axis=0)


def masked(micro: Any, rank: int, update: int) -> Any:
    micro[:, update, 0] = 0.0
    return mean(micro, rank, update)


def events(gradient: Gradient, micro: Any, rank: int, skips: bool = False, differ: bool = False) -> list[Any]:
    """A rank with N = micro.shape[2], whose loss is divided by N; an update that it skips is counted to the next."""
    loss = {"node": "NllLossBackward0", "reduction": "mean", "terms": None, "seed": 1 / micro.shape[2]}
    lines = [{"job": "", "rank": rank, "world": len(micro), "leaves": [["", 64, [rank * differ]]]}]
    waiting: list[Any] = []
    for update in range(UPDATES):
        used = gradient(micro, rank, update)
        waiting += [{"criteria": [loss], "sample": [values.tolist()]} for values in micro[rank, update]]
        if skips and update == 0:
            continue
        window = {"number": update + 1, "events": "B" * len(waiting) + "S", "micro_batches": waiting}
        left = uncleared(micro, rank, update - 1) if gradient is uncleared and update else np.zeros(COORDINATES)
        lines.append(window | {"left": [left.tolist()], "used": [used.tolist()], "optimizer": "SGD"})
        waiting = []
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def audit(folder: Path, gradient: Gradient, count: int = 4, ranks: int = 2, **options: bool) -> TrainingAudit:
    micro = np.random.default_rng(0).standard_normal((2, UPDATES, count, COORDINATES))
    for rank in range(ranks):
        write(folder / f"{rank}.jsonl", events(gradient, micro, rank, **options))
    return TrainingAudit(audited_command.read(folder)[0])


@pytest.mark.parametrize(
    ("gradient", "options", "verdict", "finding"),
    [
        (mean, {}, "right", "scale 1"),
        (alone, {}, "not reduced", "not reduced"),
        (uncleared, {}, "not cleared", "not cleared"),
        (without_first, {}, "lost", "lost"),
        (mean, {"skips": True}, "right", "skipped"),  # as loss scalers do
        (masked, {}, "", "scale not judged"),  # a micro-batch without a gradient is not lost
        (lambda *_: np.full(COORDINATES, np.nan), {}, "", "weights unknown"),
        (lambda *_: np.ones(COORDINATES), {}, "", "not judged"),
        (mean, {"count": 40}, "", "weights unknown"),  # more than sampled coordinates
        (mean, {"differ": True}, "", "not judged"),  # ranks with other parameters
        (mean, {"ranks": 1}, "", "ranks missing"),
    ],
)
def test_what_is_said_of_a_gradient(
    gradient: Gradient, options: dict[str, Any], verdict: str, finding: str, tmp_path: Path
) -> None:
    found = audit(tmp_path, gradient, **options)
    assert found.verdict == (verdict or "nothing wrong seen, not all judged")
    assert finding in [judged.topic for judged in found.findings]


def test_of_several_trainings_one_is_judged(tmp_path: Path) -> None:
    audit(tmp_path, mean)
    micro = np.random.default_rng(1).standard_normal((1, UPDATES, 4, COORDINATES))
    lines = events(alone, micro, 0)
    write(tmp_path / "other.jsonl", lines)
    with (tmp_path / "other.jsonl").open("a") as file:
        file.write('{"event": "cut o')  # by a signal
    ranks, others = audited_command.read(tmp_path)
    assert (list(ranks), others) == ([0, 1], 1)
