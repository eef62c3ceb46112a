"""Matrix files: what they become, and what is said of everything that can be wrong in one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.backends.base import registry
from bench.errors import InputError
from bench.judge.analysis import Analysis
from bench.judge.statistics import MIN_TRIALS
from bench.plan import matrix as matrix_file
from bench.plan.cell import REFERENCE, REFERENCES, SHARDED_REFERENCE, Cell, Device
from bench.plan.expand import baseline, expand
from bench.plan.models import describe_file
from bench.plan.schedule import Ended
from bench.plan.world import Refusals
from tests.conftest import HSDP, first
from tests.factories import make_backend, make_document, make_matrix
from tests.pages import simulate

BACKENDS = registry()


def parse(document: dict[str, Any]) -> matrix_file.Matrix:
    return matrix_file.parse(document, name="mine", source="mine.toml")


def changed(key: str, value: Any) -> dict[str, Any]:
    """The good document with one key set, by table.key; a value of None takes it out."""
    document = copy.deepcopy(make_document())
    *tables, last = key.split(".")
    place = document
    for table in tables:
        place = place.setdefault(table, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


WRONG = [
    ("device", "tpu", "one of cpu, cuda"),
    ("description", 3, "a string"),
    ("repeats", 0, "an integer of at least 1"),
    ("repeats", 2.0, "an integer of at least 1"),
    ("share_gpu", 1, "true or false"),
    ("timeout_s", 0, "a positive number of seconds"),
    ("workload.workload", "", "package.module:factory"),
    ("workload.model", 1, "a model size: micro, mini, tiny, 135m"),
    ("workload.corpus", ["a"], "'markov' or the path of a text file"),
    ("training.optimizer", "adam", "one of adamw-foreach, adamw-fused"),
    ("training.learning_rate", 0, "a positive number"),
    ("training.learning_rate", {"adamw": 1e-3, "sgd": 0}, "each of adamw and sgd"),
    ("training.learning_rate", {"adamw-fused": 1e-3}, "each of adamw and sgd"),
    ("training.seed", -1, "an integer of at least 0"),
    ("axes.backend", [1], "'all' or a list of backend names"),
    ("axes.accumulate", [], "a list of integers of at least 1"),
    ("axes.world_size", [0], "a list of integers of at least 1"),
    ("axes.precision", ["fp16"], "a list of fp32, bf16"),
    ("axes.optimizer", ["adam"], "a list of adamw-foreach, adamw-fused, sgd"),
    ("axes.clip_norm", [-1.0], "a list of positive numbers, or 0"),
    ("axes.activation_checkpointing", True, "a list of true and false"),
    ("axes.replicate", [1], "a list of integers of at least 2"),
    ("groups", {}, "a list of tables, [[groups]]"),
    ("groups", [{}], "a list of tables, [[groups]]"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_wrong_values_are_named_with_what_would_be_right(
    key: str, value: Any, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse(changed(key, value))
    assert str(caught.value).startswith(f"mine.toml: {key} is {value!r}; it must be ")
    assert expected in str(caught.value)
    with pytest.raises(
        InputError,
        match=f"^--option is {re.escape(repr(value))}; it must be .*{re.escape(expected)}",
    ):
        make_matrix().override(key, value, "--option")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("repeat", "did you mean repeats?"),
        ("workload.batch_size_global", "did you mean workload.global_batch_size?"),
        ("xyzzy", "use one of description, device,"),
        ("colours.red", "colours is unknown"),
    ],
)
def test_unknown_keys(key: str, expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)) as caught:
        parse(changed(key, 1))
    assert str(caught.value).startswith(
        f"mine.toml: {key.partition('.')[0] if 'colours' in key else key} is unknown; "
    )


@pytest.mark.parametrize("name", matrix_file.names())
def test_shipped_matrices(name: str) -> None:
    loaded = matrix_file.load(name)
    cells = expand(loaded, BACKENDS, 2 if loaded["device"] == Device.CUDA else 0).cells
    assert loaded.name == name
    assert json.loads(json.dumps(loaded.to_dict()))["values"] == dict(loaded.values)
    assert cells[0].is_reference or loaded["virtual.alone"], (
        "virtual worlds have no values to compare"
    )
    assert len(cells) > 1
    assert "quick" not in name or loaded["budget_s"] == 0, (
        "a budget may end before the blocks that an interval needs"
    )


@given(
    chosen=st.lists(
        st.sampled_from([name for name in sorted(BACKENDS) if name not in HSDP]),
        min_size=1,
        max_size=5,
    ),
    accumulate=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    world_size=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    precision=st.lists(st.sampled_from(["fp32", "bf16"]), min_size=1, max_size=3),
    seed=st.integers(0, 3),
)
def test_expansion(
    chosen: list[str], accumulate: list[int], world_size: list[int], precision: list[str], seed: int
) -> None:
    made = make_matrix(
        {"workload.global_batch_size": 720, "training.seed": seed},
        backend=chosen,
        accumulate=accumulate,
        world_size=world_size,
        precision=precision,
    )
    if set(chosen) == {SHARDED_REFERENCE} and set(world_size) == {1}:
        with pytest.raises(InputError, match=r"nothing is left to run; .* 2 ranks"):
            expand(made, BACKENDS, 0)
        return
    cells = expand(made, BACKENDS, 0).cells
    points = {
        (
            cell.backend,
            1 if cell.is_reference else cell.accumulate,
            cell.world_size,
            str(cell.precision),
        )
        for cell in cells
    }
    others = set(
        itertools.product(set(chosen) - set(REFERENCES), accumulate, world_size, precision)
    )
    sharded = {
        (SHARDED_REFERENCE, 1, size, "fp32")
        for size in world_size
        if SHARDED_REFERENCE in chosen and size > 1
    }
    assert points == others | sharded | {(REFERENCE, 1, 1, "fp32")}
    single = [cell for cell in cells if not cell.twin]
    assert len(single) == len(points), "each cell once"
    twins = [cell for cell in cells if cell.twin]
    assert len(twins) == (not set(chosen) <= set(REFERENCES)) and cells[len(single) :] == twins
    assert all(dataclasses.replace(twin, twin="") in single for twin in twins)
    assert cells[0].backend == REFERENCE
    assert {cell.reference() for cell in cells} == {cells[0]}
    for cell in cells:
        assert cell.micro_batch_size * cell.accumulate * cell.world_size == 720
        assert cell.seed == seed


def meshes(matrix: matrix_file.Matrix, num_gpus: int = 0) -> set[tuple[str, int, int]]:
    """Backend, W and R of each cell that is no reference."""
    cells = expand(matrix, BACKENDS, num_gpus).cells
    return {
        (cell.backend, cell.world_size, cell.replicate) for cell in cells if not cell.is_reference
    }


def test_replicas_are_an_axis_of_hsdp_alone_and_meshes_that_do_not_fit_are_left_out_or_refused() -> (
    None
):
    made = make_matrix(
        {"workload.global_batch_size": 48}, backend=["fsdp2-eager", "hsdp-eager"], accumulate=[2]
    )
    assert meshes(made.override("axes.world_size", [4, 8], "")) == {
        *(("fsdp2-eager", size, 0) for size in (4, 8)),
        *(("hsdp-eager", size, 2) for size in (4, 8)),
    }
    several = made.override("axes.replicate", [2, 4], "--replicate")
    assert meshes(several.override("axes.world_size", [8], "")) == {
        ("fsdp2-eager", 8, 0),
        *(("hsdp-eager", 8, replicas) for replicas in (2, 4)),
    }
    named = several.override("axes.backend", ["hsdp-eager"], "--backend")
    for size in (4, 6):
        with pytest.raises(InputError) as caught:
            meshes(named.override("axes.world_size", [size], "--world-size"))
        text = str(caught.value)
        assert text.startswith(f"--world-size is {size}: hsdp-eager ") and "--replicate" in text
        assert "its 4 replicas" in text and "at least 8 ranks" in text
    with pytest.raises(InputError, match=r"^made.toml: axes.world_size is 2: hsdp-eager .* its 2"):
        meshes(made)
    assert meshes(made.override("axes.world_size", [2], "--world-size")) == {("fsdp2-eager", 2, 0)}
    whole = made.override("axes.backend", "all", "").override("axes.world_size", [2, 4], "")
    assert {(size, replicas) for name, size, replicas in meshes(whole) if name in HSDP} == {(4, 2)}
    on_gpus = made.override("device", "cuda", "").override("axes.world_size", "all", "")
    assert [("hsdp-eager", n, 2) in meshes(on_gpus, n) for n in (1, 2, 3, 4)] == [
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(InputError, match=r"^--backend: nothing is left to run; .* HSDP"):
        meshes(on_gpus.override("axes.backend", ["hsdp-eager"], "--backend"), 2)


def test_optimizers_and_clips_are_axes_with_a_reference_for_each() -> None:
    made = make_matrix(
        {"axes.clip_norm": [0, 1], "training.learning_rate": {"adamw": 1, "sgd": 0.5}},
        backend=["ddp-eager"],
        accumulate=[2],
        optimizer=["adamw-foreach", "adamw-fused", "sgd", "sgd"],
    )
    cells = [cell for cell in expand(made, BACKENDS, 0).cells if not cell.twin]
    rates = {"adamw-foreach": 1.0, "adamw-fused": 1.0, "sgd": 0.5}
    ways = [(name, rate, clip) for name, rate in rates.items() for clip in (0.0, 1.0)]
    assert [(cell.optimizer, cell.learning_rate, cell.clip_norm) for cell in cells] == ways * 2
    assert [cell.backend for cell in cells] == [REFERENCE] * 6 + ["ddp-eager"] * 6
    assert [cell.reference() for cell in cells[6:]] == cells[:6]
    assert len({cell.cell_id for cell in cells}) == 12
    assert all(isinstance(cell.clip_norm, float) for cell in cells), "1 and 1.0 must have one id"


@given(batch=st.integers(1, 500), accumulate=st.integers(1, 20), world_size=st.integers(1, 8))
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(
    batch: int, accumulate: int, world_size: int
) -> None:
    made = make_matrix(
        {"workload.global_batch_size": batch}, accumulate=[accumulate], world_size=[world_size]
    )
    product = accumulate * world_size
    if batch % product == 0:
        assert expand(made, BACKENDS, 0).cells[-1].micro_batch_size == batch // product
        return
    with pytest.raises(InputError) as caught:
        expand(made, BACKENDS, 0)
    message = str(caught.value)
    assert message.startswith(f"workload.global_batch_size is {batch}, ")
    near = [
        int(number) for number in re.findall(r"\d+", message.rpartition("nearest that are:")[2])
    ]
    assert near == [
        n for n in range(max(1, batch - product + 1), batch + product) if n % product == 0
    ]


def test_gpus() -> None:
    everything = make_matrix({"device": "cuda"}, world_size="all", accumulate=[1])
    assert {cell.world_size for cell in expand(everything, BACKENDS, 4).cells} == {1, 4}
    with pytest.raises(InputError, match=r"axes.world_size: 2 ranks .*; 1 are visible"):
        expand(make_matrix({"device": "cuda"}), BACKENDS, 1)
    with pytest.raises(InputError, match=r"axes.world_size is 'all', which means GPUs"):
        expand(make_matrix(world_size="all"), BACKENDS, 4)


def twin_of(**overrides: Any) -> Cell:
    axes = {
        name: overrides.pop(name)
        for name in ("backend", "accumulate", "world_size")
        if name in overrides
    }
    cells = expand(make_matrix(overrides, **axes), BACKENDS, 0).cells
    (twin,) = [cell for cell in cells if cell.twin]
    return twin


def test_the_twin_is_the_largest_cell_of_the_baseline() -> None:
    twin = twin_of(backend=["ddp-eager", "fsdp2-eager"], accumulate=[1, 4, 2], world_size=[1, 2])
    assert (twin.backend, twin.accumulate, twin.world_size) == ("ddp-eager", 4, 2)
    assert (
        twin_of(backend=["ddp-eager", "fsdp2-eager"], baseline="fsdp2-eager").backend
        == "fsdp2-eager"
    )


def test_the_corpus_is_read_once_and_must_hold_the_longest_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "corpus.txt"
    text.write_bytes(b"a" * 65)
    read: list[int] = []

    def describe(path: Path, length: int, place: str) -> str:
        read.append(length)
        return describe_file(path, length, place)

    monkeypatch.setattr("bench.plan.expand.describe_file", describe)
    document = make_document() | {"groups": [{"workload": {"sequence_length": 64}, "once": True}]}
    document["workload"] |= {"corpus": str(text)}
    found = expand(matrix_file.parse(document, name="made", source="made.toml"), BACKENDS, 0)
    assert read == [65] and {cell.sequence_length for cell in found.cells} == {32, 64}
    assert len({cell.corpus for cell in found.cells}) == 1
    document["groups"][0]["workload"] = {"sequence_length": 65}
    with pytest.raises(InputError, match=r"has 65 bytes; .* = 66 bytes"):
        expand(matrix_file.parse(document, name="made", source="made.toml"), BACKENDS, 0)


def test_the_baseline_is_the_first_that_can_run_and_has_no_known_defect() -> None:
    made = make_matrix(backend=["absent", "wrong", "sound", "sound2"])
    backends = {
        name: make_backend(name, "" if name != "absent" else "needs x")
        for name in made["axes.backend"]
    }
    backends["wrong"].defect = "divides twice"
    assert baseline(made, backends) == "sound"
    only = make_matrix(backend=["wrong"])
    assert baseline(only, backends) == "wrong"


def test_virtual_cells_have_the_same_micro_batch_in_every_world_and_no_reference() -> None:
    overrides = {"virtual.world_size": [8, 64], "virtual.micro_batch_size": 3}
    cells = expand(make_matrix(overrides, backend=["ddp-eager"], accumulate=[2]), BACKENDS, 0).cells
    virtual = [cell for cell in cells if not cell.world.has_all_ranks]
    assert [
        (cell.world_size, cell.global_batch_size, cell.micro_batch_size) for cell in virtual
    ] == [
        (8, 48, 3),
        (64, 384, 3),
    ]
    assert [cell.backend for cell in cells if cell.world.has_all_ranks] == [
        REFERENCE,
        "ddp-eager",
        "ddp-eager",
    ]
    assert cells[-1].world.has_all_ranks, "the A/A pair is of real ranks"
    alone = expand(
        make_matrix(overrides | {"virtual.alone": True}, backend=["ddp-eager"]), BACKENDS, 0
    ).cells
    assert all(not cell.world.has_all_ranks for cell in alone) and alone[-1].twin
    fake = {"virtual.alone": True, "virtual.fake_tensors": True}
    shapes = expand(make_matrix(overrides | fake, backend=["fsdp2-eager"]), BACKENDS, 0).cells
    assert all(not cell.world.computes and not cell.twin for cell in shapes), (
        "shapes have no times to compare"
    )


def test_a_backend_that_cannot_be_virtual_is_refused() -> None:
    backends = dict(BACKENDS)
    backends["made"] = make_backend("made")
    backends["made"].refuses = Refusals(virtual="it phones home")
    with pytest.raises(InputError, match=r"virtual.world_size: made .*: it phones home"):
        expand(make_matrix({"virtual.world_size": [8]}, backend=["made"]), backends, 0)


def grouped(*groups: dict[str, Any], **axes: Any) -> matrix_file.Matrix:
    return parse(make_document(**axes) | {"groups": list(groups)})


def test_groups_are_cells_of_their_own_after_those_of_the_matrix() -> None:
    larger = {"workload": {"model": "135m", "global_batch_size": 8}, "axes": {"accumulate": [4]}}
    made = grouped(
        larger,
        {"once": True, "axes": {"backend": ["fsdp2-eager"]}},
        backend=["ddp-eager"],
        accumulate=[2],
    )
    cells = expand(made, BACKENDS, 0).cells
    assert [
        (cell.backend, cell.model, cell.accumulate, cell.global_batch_size) for cell in cells
    ] == [
        (REFERENCE, "tiny", 1, 16),
        (REFERENCE, "135m", 1, 8),
        ("ddp-eager", "tiny", 2, 16),
        ("ddp-eager", "135m", 4, 8),
        ("fsdp2-eager", "tiny", 2, 16),
        ("ddp-eager", "tiny", 2, 16),
    ]
    assert cells[-1].twin and not any(cell.twin for cell in cells[:-1]), (
        "one A/A pair, of what stands before the groups"
    )
    assert expand(made, BACKENDS, 0).once == [cells[4].cell_id]
    assert json.loads(json.dumps(made.to_dict()))["values"]["groups"][1] == {
        "once": True,
        "axes.backend": ["fsdp2-eager"],
    }


def test_cells_of_several_groups_are_there_once_and_have_one_trial_if_all_say_so() -> None:
    lone, often = {"once": True, "axes": {"accumulate": [1, 2, 4]}}, {"axes": {"accumulate": [2]}}
    made = grouped(lone, often, backend=["ddp-eager"], accumulate=[1])
    cells = [
        cell
        for cell in expand(made, BACKENDS, 0).cells
        if cell.backend != REFERENCE and not cell.twin
    ]
    assert [cell.accumulate for cell in cells] == [1, 2, 4]
    assert expand(made, BACKENDS, 0).once == [cells[2].cell_id]
    more = made.override("repeats", 7, "--repeats")
    assert expand(more, BACKENDS, 0).once == [cells[2].cell_id], "whatever repeats are"


def test_a_cell_of_one_trial_is_not_waited_for(tmp_path: Path) -> None:
    """One trial never has an interval: waiting for one would last until max_repeats. It is shown without."""
    run = simulate(
        tmp_path / "run",
        {"b0": 1.0, "b1": 1.3, "b2": 1.1},
        once=("b2", REFERENCE),
        repeats=MIN_TRIALS,
        max_repeats=400,
    )
    counts = run.tables.trials["backend"].value_counts()
    assert counts["b2"] == counts[REFERENCE] == 1 and MIN_TRIALS <= counts["b1"] < 40
    assert run.manifest.ended_by == Ended.PRECISION
    rows = {row.b.backend: row.time for row in Analysis(run=run).verdicts if not row.b.twin}
    assert rows["b1"] and rows["b1"].low is not None and rows["b2"] and rows["b2"].low is None


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"once": 1}, "once of group 2 is 1; .* true or false"),
        ({"repeats": 1}, "repeats of group 2 cannot be set there; .* whole"),
        ({"workload": {"corpus": "a.txt"}}, "workload.corpus of group 2 cannot .* whole"),
        ({"workload": {"modle": "1b"}}, r"workload.modle of group 2 .* workload.model\?"),
        ({"axes": {"accumulate": [0]}}, r"axes.accumulate of group 2 is \[0\]; it must be"),
        ({"groups": [{"once": True}]}, "groups of group 2 cannot be set there; .* whole"),
    ],
)
def test_what_is_wrong_in_a_group_is_named(group: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"^mine.toml: {words}"):
        grouped({"once": True}, group)


def test_the_batch_may_grow_with_the_ranks() -> None:
    made = make_matrix(
        {"workload.for_each_rank": True}, backend=["ddp-eager"], accumulate=[4], world_size=[1, 2]
    )
    cells = [cell for cell in expand(made, BACKENDS, 0).cells if not cell.twin]
    sizes = [
        (cell.backend, cell.world_size, cell.global_batch_size, cell.micro_batch_size)
        for cell in cells
    ]
    assert sizes == [
        (REFERENCE, 1, 16, 16),
        (REFERENCE, 1, 32, 32),
        ("ddp-eager", 1, 16, 4),
        ("ddp-eager", 2, 32, 4),
    ]
    with pytest.raises(InputError, match=r"is 16 for each rank, .* by N = 3; "):
        expand(make_matrix({"workload.for_each_rank": True}, accumulate=[3]), BACKENDS, 0)


MISSION = [
    *(f"deepspeed-zero{stage}-{sync}" for stage in (2, 3) for sync in ("eager", "deferred")),
    *(f"lightning-deepspeed-zero{stage}-corrected" for stage in (2, 3)),
]


OFFLOAD = [
    *(f"deepspeed-zero{stage}-offload{sync}" for stage in (2, 3) for sync in ("", "-deferred")),
    *("fsdp2-offload-eager", "fsdp2-offload-deferred"),
]


@pytest.mark.parametrize("num_gpus", first([1, 8], [1, 2, 4, 8]))
def test_the_gpu_matrix_asks_what_the_bench_is_for(num_gpus: int) -> None:
    made = matrix_file.load("gpu")
    cells = expand(made, BACKENDS, num_gpus).cells
    trained_once = expand(made, BACKENDS, num_gpus).once
    timed = [cell for cell in cells if cell.cell_id not in trained_once and not cell.twin]
    assert made["repeats"] >= MIN_TRIALS, "or there is no interval"
    for backend in ("fsdp2-eager", "fsdp2-deferred"):
        assert {cell.accumulate for cell in timed if cell.backend == backend} == {
            1,
            2,
            4,
            8,
            16,
            32,
        }
    whole = [cell for cell in timed if cell.model == "1b" and cell.sequence_length == 256]
    main = [name for name in MISSION if not name.endswith("-deferred")]
    for backend in ("fsdp2-eager", "fsdp2-deferred", "ddp-deferred", "lightning-ddp", *main):
        assert {cell.accumulate for cell in whole if cell.backend == backend} >= {1, 4, 16}, backend
    assert {cell.backend for cell in whole if cell.accumulate == 4} == {
        *(
            "fsdp2-eager",
            "fsdp2-deferred",
            "ddp-deferred",
            "lightning-ddp",
            "lightning-fsdp2",
            *main,
        ),
        *(
            "lightning-deepspeed-zero2",
            "lightning-deepspeed-zero3",
            "deepspeed-zero3-defaults-eager",
        ),
        *(HSDP if num_gpus >= 4 else ()),
    }
    offloading = {cell.backend: cell.accumulate for cell in cells if cell.backend in OFFLOAD}
    assert offloading == dict.fromkeys(OFFLOAD, 2)
    in_fp32 = {(cell.backend, cell.accumulate) for cell in timed if cell.precision == "fp32"}
    assert in_fp32 == {
        (name, n) for name in MISSION if name.startswith("deepspeed") for n in (1, 4, 16)
    }
    assert {cell.micro_batch_size for cell in timed if cell.sequence_length == 2048} == {1}
    assert {cell.world_size for cell in timed} == {num_gpus}
    assert (
        len({(cell.model, cell.global_batch_size, cell.sequence_length) for cell in whole}) == 1
    ), "one work"
    (twin,) = (cell for cell in cells if cell.twin)
    assert dataclasses.replace(twin, twin="") in timed and twin.cell_id not in trained_once
    assert {
        cell.cell_id for cell in cells if cell.is_reference or not cell.world.has_all_ranks
    } <= set(trained_once)
    assert {cell.world_size for cell in cells if not cell.world.has_all_ranks} == {8, 64}
    others = [cell for cell in cells if not cell.is_reference]
    assert {cell.model for cell in others if cell.activation_checkpointing} == {"8b"}
    curves = [cell for cell in others if cell.windows >= 100]
    assert {cell.optimizer for cell in curves} == {"adamw-fused", "sgd"}
    families = {cell.backend for cell in whole if cell.accumulate == 4}
    families -= {"fsdp2-eager", "deepspeed-zero3-defaults-eager", *HSDP}
    for optimizer in ("adamw-fused", "sgd"):
        assert {cell.backend for cell in curves if cell.optimizer == optimizer} == families
