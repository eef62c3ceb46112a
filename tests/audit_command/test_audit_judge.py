"""What ``audit`` says of events that are made here; nothing trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.audit.command import audit_text, audited_command
from bench.audit.command.training_audit import TrainingAudit

UPDATES, COORDINATES = 3, 40
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


def events(gradient: Gradient, micro: Any, rank: int, **of_probes: Any) -> list[dict[str, Any]]:
    """A rank with N = micro.shape[2], whose loss is divided by N."""
    count = micro.shape[2]
    loss = {"node": "NllLossBackward0", "reduction": "mean", "seed": 1 / count}
    probes = {"facts": {}, "leaves": [["", 64]], "parameters": [[0.0]], "coordinates": COORDINATES} | of_probes
    found = [{"event": "probes", **probes}]
    for update in range(UPDATES):
        used = gradient(micro, rank, update)
        backward = {"event": "backward", "losses": [loss], "keeps_graph": False, "scalar": True, "dtypes": ["float32"]}
        found += [backward | {"samples": [values.tolist()]} for values in micro[rank, update]]
        step = {"event": "step", "optimizer": "SGD", "id": 1, "inside": 0, "midway": False, "asked": 1, "scale": None}
        found.append(step | {"used": [[list(range(COORDINATES)), used.tolist()]]})
    place = {"job": "", "rank": rank, "world": len(micro), "traffic": []}
    # Without its group a process takes itself for the only one.
    return [*(place | event for event in found), place | {"event": "end", "rank": 0, "world": 1}]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def audit(folder: Path, gradient: Gradient, count: int = 4, ranks: int = 2, **of_probes: Any) -> TrainingAudit:
    micro = np.random.default_rng(0).standard_normal((2, UPDATES, count, COORDINATES))
    for rank in range(ranks):
        if "leaves" in of_probes:
            of_probes["leaves"] = [["", rank]]
        write(folder / f"{rank}.jsonl", events(gradient, micro, rank, **of_probes))
    return TrainingAudit(audited_command.read(folder)[0])


ENGINE = {"DeepSpeedEngine": {"N": 4, "stage": 2, "fp16": True}}


@pytest.mark.parametrize(
    ("gradient", "options", "verdict", "finding"),
    [
        (mean, {}, "right", "scale 1"),
        (alone, {}, "not reduced", "not reduced"),
        (uncleared, {}, "not cleared", "not cleared"),
        (without_first, {}, "lost", "lost"),
        (without_first, {"facts": ENGINE}, "", "not judged"),  # its loss scaler may have skipped an update
        (masked, {}, "", "scale not judged"),  # a micro-batch without a gradient is not lost
        (lambda *_: np.full(COORDINATES, np.nan), {}, "", "weights unknown"),
        (lambda *_: np.ones(COORDINATES), {}, "", "not judged"),
        (mean, {"count": 40}, "", "weights unknown"),  # more than sampled coordinates
        (alone, {"facts": {"LocalSGD": True}}, "", "not judged"),
        (mean, {"leaves": None}, "", "not judged"),  # ranks with other parameters
        (mean, {"ranks": 1}, "", "ranks missing"),
    ],
)
def test_what_is_said_of_a_gradient(
    gradient: Gradient, options: dict[str, Any], verdict: str, finding: str, tmp_path: Path
) -> None:
    found = audit(tmp_path, gradient, **options)
    assert audit_text.lines(found)[0].split()[1:] == audit_text.verdict(found).split()
    assert audit_text.verdict(found) == (verdict or "nothing wrong seen, not all judged")
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
