"""What ``audit`` says of events that are made here; nothing trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.audit.command import audited_command
from bench.audit.command.inside.records import (
    NOT_SCALAR,
    Backward,
    Clipping,
    RateSchedule,
    Step,
)
from bench.audit.command.recorded_events import RecordedRank
from bench.audit.command.training_audit import IN_PART, NOT_JUDGED, PLUGIN, RIGHT, TrainingAudit
from bench.findings import Level

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


def divided_again(micro: Any, _: int, update: int) -> Any:
    weights = 4.0 ** np.arange(-3, 1)
    return np.einsum("rjc,j->c", micro[:, update], weights) / 2


def events(
    gradient: Gradient, micro: Any, rank: int, skips: bool = False, differ: bool = False
) -> list[Any]:
    """A rank with N = micro.shape[2], whose loss is divided by N; an update that it skips is counted to the next."""
    loss = {
        "node": "NllLossBackward0",
        "reduction": "mean",
        "is_named": True,
        "seed": 1 / micro.shape[2],
    }
    leaf = {"name": "weight", "shape": [COORDINATES], "start": [rank * differ]}
    ends = [[0.0]] if gradient is not alone else [[float(rank)]]
    lines: list[Any] = [
        {"rank": {"job": "", "rank": rank, "world": len(micro), "leaves": [leaf], "num_leaves": 1}}
    ]
    number = 0
    for update in range(UPDATES):
        used = gradient(micro, rank, update)
        for place, values in enumerate(micro[rank, update]):
            left = None
            if not place:
                left = np.zeros(COORDINATES)
                if gradient is uncleared and update:
                    left = uncleared(micro, rank, update - 1)
                left = left.tolist()
            data = [[float(rank), float(update), float(place)]]
            fields = {
                "number": number,
                "place": "train.py:9",
                "criteria": [loss],
                "injected": [],
                "data": data,
            }
            lines.append({"backward": fields | {"added": [values.tolist()], "left": [left]}})
            number += 1
        if skips and update == 0:
            continue
        step = {
            "optimizer": 0,
            "name": "SGD",
            "owned": [0],
            "used": [used.tolist()],
            "backwards": micro.shape[2],
        }
        lines.append({"step": step})
    return [*lines, {"end": {"end": ends, "updates": [UPDATES - skips]}}]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def audit(
    folder: Path, gradient: Gradient, count: int = 4, ranks: int = 2, **options: bool
) -> TrainingAudit:
    micro = np.random.default_rng(0).standard_normal((2, UPDATES, count, COORDINATES))
    for rank in range(ranks):
        write(folder / f"{rank}.jsonl", events(gradient, micro, rank, **options))
    return TrainingAudit(audited_command.read(folder)[0])


@pytest.mark.parametrize(
    ("gradient", "options", "verdict", "finding"),
    [
        (mean, {}, RIGHT, "scale 1"),
        (alone, {}, IN_PART, "not reduced"),  # right before parameters are averaged
        (uncleared, {}, "not cleared", "not cleared"),
        (without_first, {}, "lost", "lost"),
        (divided_again, {}, "divided again", "divided again"),
        (mean, {"skips": True}, RIGHT, "skipped"),  # as loss scalers do
        (masked, {}, IN_PART, "scale not judged"),  # a micro-batch without a gradient is not lost
        (lambda *_: np.full(COORDINATES, np.nan), {}, NOT_JUDGED, "weights unknown"),
        (lambda *_: np.ones(COORDINATES), {}, NOT_JUDGED, "not judged"),
        (mean, {"count": 40}, NOT_JUDGED, "weights unknown"),  # more than sampled coordinates
        (mean, {"differ": True}, NOT_JUDGED, "not judged"),  # ranks with other parameters
        (mean, {"ranks": 1}, NOT_JUDGED, "ranks missing"),
    ],
)
def test_what_is_said_of_a_gradient(
    gradient: Gradient, options: dict[str, Any], verdict: str, finding: str, tmp_path: Path
) -> None:
    found = audit(tmp_path, gradient, **options)
    assert (found.verdict, finding) == (verdict, finding), found.findings
    assert finding in [judged.topic for judged in found.findings]


def of_level(found: TrainingAudit, topic: str) -> list[Level]:
    return [each.level for each in found.findings if each.topic == topic]


def same_data(rank: RecordedRank) -> None:
    for number, backward in enumerate(rank.backwards):
        backward.data = [np.array([float(number)])]


def own_leaf(rank: RecordedRank) -> None:
    rank.leaves[0].is_own = True


def in_stages(rank: RecordedRank) -> None:
    rank.backwards[0].doubts.append(NOT_SCALAR)


def unseen_end(rank: RecordedRank) -> None:
    assert rank.end is not None
    rank.end.end = [None]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, ""),
        (same_data, "the same data"),
        (own_leaf, "models of their own"),
        (in_stages, "parts of a model"),
        (unseen_end, "not visible"),
    ],
)
def test_ranks_may_differ_for_a_reason(
    change: Callable[[RecordedRank], None] | None, why: str, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, alone).ranks
    for rank in ranks.values():
        rank.facts = {"DistributedDataParallel": ""}
        if change is not None:
            change(rank)
    (found,) = (each for each in TrainingAudit(ranks).findings if each.topic == "not reduced")
    expected = Level.ERROR
    if why:
        expected = Level.WARNING
    assert found.level is expected and why in found.text


@pytest.mark.parametrize(
    "change", [{"place": "attack.py:3"}, {"untrained": 1}, {"data": []}, {"data": None}]
)
def test_what_may_be_no_micro_batch_is_not_lost(change: dict[str, Any], tmp_path: Path) -> None:
    """It is called elsewhere, attacks an input, or has the data of one that counts."""
    ranks = audit(tmp_path, without_first).ranks
    assert of_level(TrainingAudit(ranks), "lost") == [Level.ERROR]
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            if number % 4 == 0:
                vars(backward).update(change)
                if backward.data is None:
                    backward.data = rank.backwards[number + 1].data
    assert not of_level(TrainingAudit(ranks), "lost")
    assert of_level(TrainingAudit(ranks), "discarded") == [Level.WARNING]


@pytest.mark.parametrize("put_away", ["", "cleared", "zeroed"])
def test_what_is_put_away_after_clipping_is_not_clipped_too_early(
    put_away: str, tmp_path: Path
) -> None:
    """As DP-SGD does with the gradient of each sample."""
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        events: list[Any] = []
        total = np.zeros(COORDINATES)
        for event in rank.events:
            events.append(event)
            if not isinstance(event, Backward):
                total = np.zeros(COORDINATES)
                continue
            total = total + event.added[0]
            before = total
            if put_away == "zeroed":
                before = event.added[0]
            events.append(Clipping([2.0], "train.py:9", before=before))
            if put_away == "cleared":
                event.cleared = [0]
        rank.events = events
    expected = [Level.ERROR]
    if put_away:
        expected = []
    assert of_level(TrainingAudit(ranks), "clips too early") == expected


@pytest.mark.parametrize(
    ("world", "kind", "level"),
    [
        (2, "distributed_type MULTI_GPU", Level.ERROR),
        (2, "distributed_type NO", Level.NOTE),
        (1, "distributed_type FSDP", Level.NOTE),
    ],
)
def test_a_plugin_that_shards_nothing_is_wrong_on_several_ranks(
    world: int, kind: str, level: Level, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        rank.facts, rank.world = {PLUGIN: "", "Accelerator": kind}, world
    assert of_level(TrainingAudit(ranks), "not sharded") == [level]


def test_an_optimizer_that_begins_after_sampling_is_named(tmp_path: Path) -> None:
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        rank.events.append(Step(1, "Adam", backwards=4, update=1, is_sampled=False))
        assert rank.end is not None
        rank.end.updates.append(9)
    judged = TrainingAudit(ranks)
    (found,) = (each for each in judged.findings if each.topic == "not judged")
    assert judged.verdict == IN_PART and "a further Adam made 9 updates" in found.text


@pytest.mark.parametrize(
    ("count", "leaf", "levels"), [(4, 0, [Level.ERROR]), (2, 0, [Level.WARNING]), (4, 1, [])]
)
def test_sums_in_16_bits(count: int, leaf: int, levels: list[Level], tmp_path: Path) -> None:
    """Of few they are doubtful; those of another optimizer's parameter are not its own."""
    ranks = audit(tmp_path, mean, count).ranks
    for rank in ranks.values():
        for backward in rank.backwards:
            backward.held = {"bfloat16": [leaf]}
    assert of_level(TrainingAudit(ranks), "low precision") == levels
    for rank in ranks.values():
        rank.is_zero = True  # which has sums of its own
    assert not of_level(TrainingAudit(ranks), "low precision")


def test_two_branches_do_not_make_a_sum_of_two_a_mean(tmp_path: Path) -> None:
    """N = 2 with a backward in each branch, undivided; two losses of one batch have its data."""
    ranks = audit(tmp_path, mean, 2).ranks
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            backward.criteria[0].seed, backward.place = 1.0, f"train.py:{number % 2}"
    judged = TrainingAudit(ranks)
    assert judged.verdict == IN_PART and of_level(judged, "scale") == [Level.WARNING]
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            backward.data = [np.array([float(number // 2)])]
    assert TrainingAudit(ranks).verdict == RIGHT


def test_rows_of_micro_batches_differ_and_terms_are_not_counted(tmp_path: Path) -> None:
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            backward.rows = 2 + number % 4
    assert of_level(TrainingAudit(ranks), "mean of means") == [Level.WARNING]


@pytest.mark.parametrize(
    ("version", "device", "is_known_bad"),
    [("0.18.9", "cpu", True), ("0.18.9", "none", False), ("0.19.8", "cpu", False)],
)
def test_an_advisory_is_told_where_it_certainly_applies(
    version: str, device: str, is_known_bad: bool, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, mean).ranks
    config = {
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
    }
    for rank in ranks.values():
        rank.facts = {"DeepSpeedEngine": "gradient_accumulation_steps 4"}
        rank.versions, rank.deepspeed = {"deepspeed": version}, json.dumps(config)
        for step in rank.steps:
            step.asked = 4
    told = [found for found in TrainingAudit(ranks).findings if found.topic == "known bad"]
    if not is_known_bad:
        assert not told
        return
    assert [found.level for found in told] == [Level.WARNING]
    assert told[0].text.startswith(f"your deepspeed {version} with offload_optimizer: ZeRO-2")


@pytest.mark.parametrize(("every", "verdict"), [(1, IN_PART), (2, IN_PART), (4, "not divided")])
def test_a_few_rows_whose_classes_count_up_are_not_taken_for_contrasted(
    every: int, verdict: str, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            (criterion,) = backward.criteria
            criterion.seed, criterion.in_batch = 1.0, number % every == 0
    assert TrainingAudit(ranks).verdict == verdict


@pytest.mark.parametrize(
    ("end", "schedule", "is_told"),
    [
        ({}, {}, True),
        ({"is_end_of_data": False}, {}, False),  # the training was cut short
        ({}, {"length": UPDATES}, False),
        ({}, {"length": UPDATES + 1}, False),
        ({}, {"length": 8 * UPDATES}, False),  # the rest of the training is another one
        ({}, {"position": 2}, False),  # it steps once per epoch
        ({}, {"position": 4 * UPDATES}, False),  # it steps at each micro-batch
    ],
)
def test_a_schedule_that_counts_micro_batches_is_told_where_the_data_end(
    end: dict[str, Any], schedule: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, mean).ranks
    found = RateSchedule("OneCycleLR", "total_steps", 4 * UPDATES, UPDATES)
    for rank in ranks.values():
        assert rank.end is not None
        rank.end.all_backwards, rank.end.is_end_of_data = 4 * UPDATES, True
        rank.end.schedules = [replace(found, **schedule)]
        vars(rank.end).update(end)
    judged = TrainingAudit(ranks)
    levels = [found.level for found in judged.findings if found.topic == "schedule"]
    assert levels == [Level.WARNING] * is_told
    assert judged.verdict == RIGHT


@pytest.mark.parametrize(
    ("backwards_per_batch", "sent", "topic", "once"),
    [
        (1, [8, 8, 8, 8], "eager", "8"),
        (1, [0, 0, 0, 8], "deferred", ""),
        (1, [0, 8, 0, 8], "deferred", ""),  # of two micro-batches one is not reduced
        (2, [0, 8, 0, 8], "eager", "8"),  # each micro-batch has two backwards
        (2, [2, 6, 2, 6], "eager", "6"),
        (2, [0, 0, 0, 8], "deferred", ""),
        (4, [0, 0, 0, 8], "deferred", ""),  # one micro-batch, which does not accumulate
    ],
)
def test_what_each_micro_batch_reduces_is_eager(
    backwards_per_batch: int, sent: list[int], topic: str, once: str, tmp_path: Path
) -> None:
    ranks = audit(tmp_path, mean).ranks
    for rank in ranks.values():
        for number, backward in enumerate(rank.backwards):
            backward.fetched = 1 + number // backwards_per_batch
            backward.reduced = {}
            if sent[number % 4]:
                backward.reduced = {"all_reduce": sent[number % 4]}
    (found,) = (
        found for found in TrainingAudit(ranks).findings if found.topic in ("eager", "deferred")
    )
    assert found.topic == topic
    assert not once or f"once would be {once}" in found.text


def test_an_accusation_names_file_and_line(tmp_path: Path) -> None:
    accused = [
        found for found in audit(tmp_path, without_first).findings if found.level is Level.ERROR
    ]
    assert accused
    assert all(found.text.endswith(", at train.py:9") for found in accused)


def test_of_several_trainings_one_is_judged(tmp_path: Path) -> None:
    audit(tmp_path, mean)
    micro = np.random.default_rng(1).standard_normal((1, UPDATES, 4, COORDINATES))
    write(tmp_path / "other.jsonl", events(alone, micro, 0))
    ranks, others = audited_command.read(tmp_path)
    assert (list(ranks), others) == ([0, 1], 1)


@pytest.mark.parametrize(("size", "read"), [(-3, [0, 1]), (-2, [0, 1]), (-40, [0, 1]), (60, [])])
def test_a_record_that_is_cut_is_read_as_far_as_it_goes(
    size: int, read: list[int], tmp_path: Path
) -> None:
    """With its first line cut too, a record is of no rank."""
    audit(tmp_path, mean)
    for path in tmp_path.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:size])
    ranks, _ = audited_command.read(tmp_path)
    assert list(ranks) == read
    assert all(rank.is_cut for rank in ranks.values())
    if read:
        assert "record cut" in [found.topic for found in TrainingAudit(ranks).findings]
