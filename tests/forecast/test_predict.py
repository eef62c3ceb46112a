"""The prediction: published cases, bounds and flips by hand, the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.backends.base import registry
from bench.cli import main
from bench.errors import GOOD, WRONG
from bench.forecast import prediction_map, prediction_text
from bench.forecast.best import EXACT, Choice, Question, where_best
from bench.forecast.live import ESTIMATED, HELD
from bench.forecast.prediction import Link, Prediction, Traffic, at, predict
from bench.judge.formulas import expect
from bench.plan.cell import REFERENCES, SGD, Cell, Device, Precision
from bench.plan.models import SIZES
from tests import legible
from tests.conftest import ROOT
from tests.factories import make_cell

GIB = 2**30
ASKED = ["--world-size", "64", "--accumulate", "16", "--sequence", "8192", "--precision", "bf16"]
TIMED = ["--link", "50GB/s", "--latency", "20us", "--compute-time", "22s"]
BUILT_IN = [
    name for name, backend in registry().items() if backend.__module__.startswith("bench.") and name not in REFERENCES
]


def asked(**changes: Any) -> Cell:
    """The 8b model on 64 ranks, 16 micro-batches of one sample."""
    values: dict[str, Any] = {
        "backend": "", "model": "8b", "precision": Precision.BF16, "accumulate": 16, "world_size": 64,
        "sequence_length": 8192, "device": Device.CUDA, "micro_batch": 1,
    }  # fmt: skip
    values |= changes
    batch = values.pop("micro_batch") * values["accumulate"] * values["world_size"]
    return make_cell(global_batch_size=batch, **values)


def one(backend: str, **changes: Any) -> Prediction:
    return predict(asked(**changes), [backend])[0]


@pytest.mark.parametrize("model", ["8b", "1b", "135m"])
@pytest.mark.parametrize("world_size", [8, 64])
def test_deferred_holds_4p_less_a_shard_more_than_eager(model: str, world_size: int) -> None:
    """C8 of the research sheet: 4P(1 - 1/W), but for the padding of eager's shards."""
    deferred, eager = (one(f"fsdp2-{sync}", model=model, world_size=world_size) for sync in ("deferred", "eager"))
    difference = deferred.memory(16).parts["gradients"] - eager.memory(16).parts["gradients"]
    assert difference == pytest.approx(4 * SIZES[model].num_parameters * (1 - 1 / world_size), rel=2e-3)


def test_published_differences_at_8b() -> None:
    for world_size, gib in ((8, 26.17), (64, 29.45)):
        found = [one(f"fsdp2-{sync}", world_size=world_size).memory(16).peak for sync in ("deferred", "eager")]
        difference = found[0] - found[1]
        assert difference / GIB == pytest.approx(gib, abs=0.01)


def test_deferred_does_not_shrink_with_the_world_and_memory_not_grow_with_n() -> None:
    assert (
        one("fsdp2-deferred").memory(4).parts["gradients"]
        == one("fsdp2-deferred", world_size=8).memory(99).parts["gradients"]
    )
    assert one("fsdp2-deferred").memory(2) == one("fsdp2-deferred").memory(256)


def test_a_window_of_one_defers_nothing() -> None:
    """The first micro-batch is the last: every unit is reduced in its backward."""
    assert one("fsdp2-deferred").memory(1) == one("fsdp2-eager").memory(1)
    assert one("fsdp2-deferred").traffic(1) == one("fsdp2-eager").traffic(1)


@pytest.mark.parametrize("backend", BUILT_IN)
def test_categories_are_named_and_not_negative(backend: str) -> None:
    for n, world_size, precision, device in itertools.product((1, 4), (1, 8), Precision, Device):
        cell = asked(model="1b", accumulate=n, world_size=world_size, precision=precision, device=device)
        memory = predict(cell, [backend])[0].memory(n)
        assert set(memory.parts) == {*HELD, *ESTIMATED}
        assert min(memory.parts.values()) >= 0
        assert memory.parts["activations"] > 0 or memory.moment in ("flush", "step", "root")


def test_known_activations_replace_the_estimate() -> None:
    given = predict(asked(), ["fsdp2-eager"], 20 * GIB)[0].memory(16)
    assert given.parts["activations"] == 20 * GIB


def test_the_step_needs_room_of_its_own() -> None:
    """DDP with tiny activations: 4 + 4 + 4 + 8 bytes, and 4 for the root of the second moment; none with SGD."""
    parameters = SIZES["tiny"].num_parameters
    few: dict[str, Any] = {"model": "tiny", "sequence_length": 1, "world_size": 2, "precision": Precision.FP32}
    adamw = one("ddp-eager", **few).memory(16)
    assert adamw.moment == "step"
    assert adamw.peak == pytest.approx(24 * parameters, rel=1e-3)
    assert one("ddp-eager", optimizer=SGD, **few).memory(16).peak < 13 * parameters


# Traffic.


@pytest.mark.parametrize("model", ["tiny", "1b"])
@pytest.mark.parametrize("n", [9, 64, 100])
def test_traffic_of_a_long_window_is_not_a_guess(model: str, n: int) -> None:
    """From N = 4 on every further micro-batch adds the same, whatever the backend."""
    for found in predict(asked(model=model), BUILT_IN):
        expectation = expect(at(found.cell, n), found.layout)
        assert expectation is not None
        assert found.traffic(n).calls == sum(row.calls for row in expectation.collectives), found.name
        again = Prediction(found.cell, found.backend, found.layout)
        again._expectations[8] = expectation
        assert found.traffic(n).wire_bytes == pytest.approx(again.traffic(8).wire_bytes, rel=1e-12), found.name


def test_wire_bytes_and_calls_of_fsdp2_by_hand() -> None:
    """Eager N reduce-scatters of 4P and, resident, one gather of 2P; times 63/64; 33 units."""
    parameters = SIZES["8b"].num_parameters
    assert one("fsdp2-deferred-resident").traffic(16) == Traffic(66, 6 * parameters * 63 / 64)
    assert one("fsdp2-zero2-eager").traffic(16) == Traffic(2 * 16 * 33, 16 * 6 * parameters * 63 / 64)


def test_one_rank_sends_nothing() -> None:
    for found in predict(asked(world_size=1), BUILT_IN):
        assert found.traffic(16) == Traffic(0, 0)


# Bounds and choice, on made-up traffic.


def made(name: str, calls: float, wire: float, peak: int, defect: str = "") -> Any:
    """A prediction whose numbers are given per micro-batch; ``name`` is ``constant`` for once per window."""

    class Made:
        refusal = ""

        def __init__(self) -> None:
            self.name = name

        def defect(self, accumulate: int) -> str:
            return defect if accumulate > 1 else ""

        def traffic(self, accumulate: int) -> Traffic:
            times = 1 if name.startswith("constant") else accumulate
            return Traffic(calls * times, wire * times)

        def memory(self, accumulate: int) -> Any:
            return type("Memory", (), {"peak": peak})

    return Made()


def question(*ones: Any, compute_s: float = 4.0, **more: Any) -> Question:
    return Question(predictions=list(ones), compute_s=compute_s, accumulate=4, **{"margin": 0.0, **more})


def test_bounds_by_hand() -> None:
    """100 calls of 10 ms and 8 GB on 2 GB/s: 1 s + 4 s against 4 s and 10 s of compute."""
    slow = made("constant", 100, 8e9, 1)
    link = Link(bytes_per_s=2e9, latency_s=0.01)
    bounds = question(slow).bounds(slow, 4, link)
    assert (bounds.lower, bounds.upper) == (5.0, 9.0)
    bounds = question(slow).bounds(slow, 10, link)
    assert (bounds.lower, bounds.upper) == (10.0, 15.0), "compute grows with N"
    assert question().hidden_from(slow, 4, 0.01) == pytest.approx(8e9 / 3)
    assert question().hidden_from(slow, 4, 0.04) == math.inf


def test_the_winner_fits_and_is_right() -> None:
    fast, big, wrong = made("fast", 1, 1e9, 10), made("big", 1, 5e8, 20), made("wrong", 1, 1e8, 5, "half the update")
    link = Link(bytes_per_s=1e9)

    def asks(memory: int | None = None) -> Question:
        return question(fast, big, wrong, memory_bytes=memory, compute_s=0.1)

    assert asks().choose(4, link) == Choice("big")
    assert asks(15).choose(4, link) == Choice("fast")
    assert asks(15).choose(1, link) == Choice("wrong"), "nothing is wrong at N = 1"
    assert asks(7).choose(4, link) == Choice("")


def test_overlapping_bounds_are_undecided() -> None:
    """4 s of compute, and 4 s or 1 s of communication: 4 to 8 s, or 4 to 5 s, and nobody knows what is hidden."""
    each, once = made("each", 0, 1e9, 1), made("constant", 0, 1e9, 2)
    asks = question(each, once, margin=0.02)
    middle, slow, fast = (Link(bytes_per_s=speed) for speed in (1e9, 1e8, 1e12))
    assert asks.choose(4, middle) == Choice("constant", undecided=True)
    assert asks.rivals("constant", 4, middle) == ["each"]
    assert asks.choose(4, slow) == Choice("constant"), "40 to 44 s against 10 to 14 s"
    assert asks.choose(4, fast) == Choice("each"), "both within 2 % of 4 s, so the memory decides"
    stretches = asks.along_link(4, 0.0)
    assert [(one.choice.best, one.choice.undecided) for one in stretches] == [
        ("constant", False),
        ("constant", True),
        ("constant", False),
        ("each", False),
    ]
    assert where_best("constant", stretches) == [(one.low, one.high) for one in (stretches[0], stretches[2])]


def test_ties_are_broken_by_memory_within_the_margin() -> None:
    lean, fast = made("lean", 0, 1.01e9, 1), made("fast", 0, 1e9, 2)
    link = Link(bytes_per_s=1e9)
    assert question(lean, fast, compute_s=0.01).choose(4, link) == Choice("fast")
    assert question(lean, fast, compute_s=0.01, margin=0.02).choose(4, link) == Choice("lean")
    twin = made("twin", 0, 1e9, 2)
    assert question(twin, fast).choose(4, link) == Choice("twin", ("fast",)), "what sends the same is no rival"


def test_the_link_at_which_the_answer_flips() -> None:
    """1 call and 3 GB against 101 calls and 1 GB, 1 ms each: even where 2 GB take as long as 100 ms, at 20 GB/s."""
    few, many = made("constant few", 1, 3e9, 1), made("constant many", 101, 1e9, 1)
    found = question(few, many, compute_s=0.0).along_link(4, 1e-3)
    assert [stretch.choice.best for stretch in found] == ["constant many", "constant few"]
    assert found[0].high == found[1].low == pytest.approx(2e10, rel=2 * EXACT)
    assert (found[0].low, found[-1].high) == (1e8, 1e12)
    assert where_best("constant few", found) == [(found[1].low, 1e12)]
    assert question(few, many, compute_s=0.0).along_link(4, 1e-3, 1e7)[0].low == 1e7, "the asked one is always inside"


def test_a_short_stretch_between_two_others_is_found() -> None:
    a, b, c = made("constant a", 1, 4e9, 1), made("constant b", 48, 3e9, 1), made("constant c", 101, 2e9, 1)
    found = question(a, b, c, compute_s=0.0).along_link(4, 1e-3)
    assert [stretch.choice.best[-1] for stretch in found] == ["c", "b", "a"]
    assert found[0].high == pytest.approx(1e9 / 0.053, rel=2 * EXACT)
    assert found[1].high == pytest.approx(1e9 / 0.047, rel=2 * EXACT)


def test_the_n_at_which_the_answer_flips() -> None:
    """Once 10 GB or 3 GB per micro-batch: from N = 4 on once is less."""
    once, each = made("constant", 0, 10e9, 2), made("each", 0, 3e9, 1)
    found = question(once, each, compute_s=0.0).along_n(Link(bytes_per_s=1e9))
    assert [(stretch.low, stretch.high, stretch.choice.best) for stretch in found] == [
        (1, 3, "each"),
        (4, 256, "constant"),
    ]


# The command.


def run(*arguments: str) -> int:
    return main(["predict", *arguments])


def test_json_is_a_list_with_one_object_per_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "80GiB", "--json") == GOOD
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    assert [row["backend"] for row in rows] == BUILT_IN
    by = {row["backend"]: row for row in rows}
    eager = by["fsdp2-eager"]
    assert sum(eager["memory"].values()) == eager["peak_memory_bytes"]
    assert eager["fits"] and not by["fsdp2-deferred"]["fits"]
    assert eager["collectives"][1] == {
        "op": "reduce_scatter", "dtype": "float32", "calls": 528, "payload_bytes": 16 * 4 * SIZES["8b"].num_parameters,
        "wire_bytes": 16 * 4 * SIZES["8b"].num_parameters * 63 / 64,
    }  # fmt: skip
    assert eager["communication_s"] == pytest.approx(eager["num_calls"] * 20e-6 + eager["wire_bytes"] / 50e9)
    assert eager["upper_s"] == pytest.approx(22 + eager["communication_s"]) and eager["lower_s"] == 22
    assert [row["backend"] for row in rows if row["recommended"]] == ["fsdp2-eager"] and not eager["best"]
    assert by["deepspeed-zero3-eager"]["may_be_fastest"] and not eager["may_be_fastest"]
    assert eager["best_where"]["link"][0][0] == 1e8 and eager["best_where"]["accumulate"] == []
    assert by["fsdp2-deferred"]["best_where"]["link"] == []
    refused = by["deepspeed-zero2-deferred"]
    assert "bf16" in refused["refusal"] and refused["memory"] == {} and refused["upper_s"] is None
    assert by["lightning-deepspeed-zero2"]["defect"] and not by["lightning-deepspeed-zero2"]["best"]


def test_without_compute_time_the_bounds_are_missing_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "1b", *ASKED, "--link", "50GB/s") == GOOD
    said = capsys.readouterr().out
    assert "For one by time, add --peak." in said and "upper/s" not in said
    assert "activations are estimated" in said
    assert run("--model", "1b", *ASKED, "--json") == GOOD
    assert {row["lower_s"] for row in json.loads(capsys.readouterr().out)} == {None}


def test_it_ends_in_a_recommendation_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def last(*arguments: str) -> str:
        assert run("--model", "8b", *ASKED, *arguments) == GOOD
        return capsys.readouterr().out.splitlines()[-1]

    said = last(*TIMED, "--memory", "120GiB")
    assert said.startswith("Recommendation until then: fsdp2-deferred-resident: 22 to 22.95 s per step, 107 GiB")
    assert said.endswith("the fastest if nothing is hidden, and at most 4.3 % slower than the best case of any other.")
    said = last("--link", "400Mbps", "--compute-time", "22s", "--memory", "120GiB")
    assert (
        said.startswith("Recommendation: fsdp2-deferred-resident: ") and "no other can be more than 2 % faster" in said
    )
    said = last("--memory", "80GiB")
    assert said.startswith("Recommendation: deepspeed-zero3-eager needs the least: 63.9 GiB of memory, of 74.6 GiB")
    said = last(*TIMED, "--memory", "8GiB")
    assert "none fits; deepspeed-zero3-eager needs the least" in said and "--activation-checkpointing" in said
    said = last("--backend", "lightning-deepspeed-zero2")
    assert said == (
        "Recommendation: none; every backend that was asked for is refused, not predicted, or known to be wrong."
    )


def test_the_readmes_example_ends_in_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"`python -m bench (predict .*?)`", (ROOT / "README.md").read_text())
    assert main(command.split()) == GOOD
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Recommendation until then: fsdp2-deferred-resident: 28.84 to 29.79 s per step, 60.3 GiB")
    assert "at most 3.3 % slower than the best case of any other" in last


def test_the_command_that_measures_what_is_hidden_is_one_that_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "80GiB", "--activation-checkpointing") == GOOD
    said = capsys.readouterr().out
    (command,) = re.findall(r"^How much each hides .*: python -m bench run (.*)$", said, re.MULTILINE)
    assert main(["plan", "--on", "8 x H100 80GiB", *command.split()]) == GOOD
    out = capsys.readouterr().out
    rows = [line.split()[1:6] for line in out.splitlines() if " fsdp2-" in line]
    assert {tuple(row[1:]) for row in rows} == {("16", "8", "1", "bf16")} and "skipped:" not in out
    assert {"fsdp2-deferred-resident", "fsdp2-eager"} <= {row[0] for row in rows}


def test_what_is_wrong_is_told_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "120GiB") == GOOD
    said = capsys.readouterr().out
    assert re.search(r"^lightning-deepspeed-zero2 .* WRONG$", said, re.MULTILINE)
    assert "WRONG: Lightning divides the loss by N" in said
    assert "from 2 on undecided, fsdp2-deferred-resident leads" in said


def test_a_reserve_of_the_memory_is_kept_free(capsys: pytest.CaptureFixture[str]) -> None:
    """77.9 of 80 GiB do not fit: there are a CUDA context, NCCL and fragments too."""

    def fits(*arguments: str) -> bool:
        command = ["--model", "8b", *ASKED, "--backend", "fsdp2-zero2-eager", "--memory", "80GiB", *arguments]
        assert run(*command, "--json") == GOOD
        (row,) = json.loads(capsys.readouterr().out)
        assert row["peak_memory_bytes"] / GIB == pytest.approx(77.9, abs=0.05)
        return bool(row["fits"])

    assert not fits() and fits("--reserve", "2GiB") and not fits("--reserve", "2.2GiB") and fits("--reserve", "0B")
    assert run("--model", "8b", *ASKED, "--memory", "80GiB") == GOOD
    said = capsys.readouterr().out
    assert "memory 80 GiB, 5.43 GiB of it reserved" in said
    assert "CUDA context 0.763 GiB (github.com/pytorch/pytorch/issues/34323)" in said and "--reserve changes" in said


@pytest.mark.parametrize("speed", ["50GB/s", "400Gbit/s", "400Gbps", "400 Gb/s", "0.05TB/s", "0.4Tbps", "400000Mbit/s"])
def test_bits_and_bytes_per_second(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "tiny", *ASKED, "--link", speed, "--backend", "ddp-eager", "--json") == GOOD
    (row,) = json.loads(capsys.readouterr().out)
    assert row["communication_s"] == pytest.approx(row["wire_bytes"] / 50e9)


def test_recomputation_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A forward of all blocks, a third of their FLOPs; nothing of the head."""
    arguments = [
        "--model",
        "8b",
        *ASKED,
        "--link",
        "50GB/s",
        "--backend",
        "fsdp2-eager",
        "--json",
        "--peak",
        "1PFLOP/s",
    ]
    seconds = []
    for more in ([], ["--activation-checkpointing"]):
        assert run(*arguments, "--mfu", "100%", *more) == GOOD
        seconds.append(json.loads(capsys.readouterr().out)[0]["compute_s"])
    head = 6 * 128_256 * 4096 * 8192 * 16 / 1e15
    assert seconds[1] - seconds[0] == pytest.approx((seconds[0] - head) / 3)


def test_compute_from_flops(capsys: pytest.CaptureFixture[str]) -> None:
    """7.59e15 FLOP per step and rank at half of 989 TFLOP/s."""
    arguments = ["--model", "8b", *ASKED, "--link", "50GB/s", "--backend", "fsdp2-eager", "--json", "--mfu", "50%"]
    size = SIZES["8b"]
    seconds = size.flops_per_token(8192) * 8192 * 16 / 494.5e12
    for peak in ("H100", "989TFLOP/s"):
        assert run(*arguments, "--peak", peak) == GOOD
        assert json.loads(capsys.readouterr().out)[0]["compute_s"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"--model": "9b"}, "--model"),
        ({"--world-size": "0"}, "--world-size"),
        ({"--world-size": "2.5"}, "--world-size"),
        ({"--world-size": "-4"}, "--world-size"),
        ({"--accumulate": "x"}, "--accumulate"),
        ({"--accumulate": "99999999"}, "--accumulate"),
        ({"--precision": "fp8"}, "--precision"),
        ({"--memory": "80"}, "--memory"),
        ({"--memory": "80gib"}, "--memory"),
        ({"--memory": "0GiB"}, "--memory"),
        ({"--reserve": "4GiB"}, "--reserve"),
        ({"--reserve": "4GiB", "--memory": "4GiB"}, "--reserve"),
        ({"--link": "400gbps"}, "--link"),
        ({"--link": "50"}, "--link"),
        ({"--link": "50GB"}, "--link"),
        ({"--link": "-1GB/s"}, "--link"),
        ({"--link": "1e999GB/s"}, "--link"),
        ({"--latency": "20"}, "--latency"),
        ({"--latency": "20us"}, "--latency"),
        ({"--compute-time": "nans"}, "--compute-time"),
        ({"--compute-time": "1.9"}, "--compute-time"),
        ({"--backend": "fsdp3-eager"}, "--backend"),
        ({"--backend": "reference"}, "--backend"),
        ({"--backend": ","}, "--backend"),
        ({"--peak": "B200"}, "--peak"),
        ({"--peak": "100"}, "--peak"),
        ({"--peak": "H100", "--precision": "fp32"}, "--peak"),
        ({"--peak": "H100", "--compute-time": "1s"}, "--peak"),
        ({"--mfu": "40%"}, "--mfu"),
        ({"--mfu": "140%", "--peak": "H100"}, "--mfu"),
        ({"--margin": "2"}, "--margin"),
        ({"--optimizer": "adam"}, "--optimizer"),
        ({"--out": "/dev/null/x", "--memory": "1GiB"}, "--out"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, str], place: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"--model": "tiny", **dict(zip(ASKED[::2], ASKED[1::2], strict=True)), **changes}
    assert run(*itertools.chain(*([key, value] for key, value in values.items()))) == WRONG
    said = capsys.readouterr().err
    assert place in said and said.count("\n") == 1 and said.startswith("bench: ")


def test_torch_is_not_imported() -> None:
    command = ["predict", "--model", "tiny", *ASKED, *TIMED]
    code = (
        f"import sys; from bench.cli import main; assert main({command!r}) == 0; "
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# The map.


def drawn(memory: int | None, **changes: Any) -> tuple[Any, Question, prediction_text.About]:
    cell = asked(**changes)
    asks = Question(predictions=predict(cell, BUILT_IN), compute_s=22.0, accumulate=16, memory_bytes=memory)
    about = prediction_text.About(
        cell=cell, link=Link(bytes_per_s=50e9, latency_s=20e-6), latency_given=True, compute_s=22.0,
        compute_from="as given", memory_bytes=memory, reserve_bytes=0, reserve_given=False, activations_given=False,
        margin=0.02, answer=None,
    )  # fmt: skip
    return prediction_map.draw(about, asks), asks, about


@pytest.mark.parametrize("gib", [1, 70, 80, 100, None])
def test_the_map_is_legible_and_names_every_winner(gib: int | None) -> None:
    drawing, asks, _ = drawn(None if gib is None else gib * GIB)
    legible.assert_legible(drawing.figure, 9.0)
    said = " ".join(legible.words(drawing.figure))
    for name in set(drawing.data["best"]):
        assert (name or "nothing fits") in said
    assert set(drawing.data["accumulate"]) == set(asks.powers)
    for n, rows in drawing.data.groupby("accumulate"):
        assert rows["link_low_bytes_per_s"].tolist()[1:] == rows["link_high_bytes_per_s"].tolist()[:-1]
        for row in rows.to_dict("records"):
            middle = math.sqrt(row["link_low_bytes_per_s"] * row["link_high_bytes_per_s"])
            chosen = asks.choose(int(str(n)), Link(bytes_per_s=middle, latency_s=20e-6))
            assert (chosen.best, chosen.undecided) == (row["best"], row["undecided"])
    hatched = [patch.get_hatch() for axes in drawing.figure.axes for patch in axes.patches]
    assert hatched.count("//") == drawing.data["undecided"].sum() and ("undecided" in said.split()) == any(hatched)


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "100GiB", "--out", str(tmp_path / "new")) == GOOD
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "predict.md", "predict.png", "predict.svg", "predict.csv",
    }  # fmt: skip
    page = (tmp_path / "new" / "predict.md").read_text()
    assert "| fsdp2-deferred |" in page and "Recommendation until then: fsdp2-zero2-eager" in page
    assert "fsdp2-zero2-eager" in (tmp_path / "new" / "predict.csv").read_text()


def test_activation_checkpointing_needs_less_memory_and_sends_the_same() -> None:
    for backend in ("ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager"):
        kept, less = one(backend, micro_batch=4), one(backend, micro_batch=4, activation_checkpointing=True)
        assert less.memory(16).peak < kept.memory(16).peak
        assert less.memory(16).parts["optimizer_state"] == kept.memory(16).parts["optimizer_state"]
        assert less.traffic(16) == kept.traffic(16)


def test_the_activations_of_checkpointed_blocks_by_hand() -> None:
    """Of each block its input in bf16, and what is outside of blocks: cos and sin, and the last norm's tensors."""
    found = one("fsdp2-eager", activation_checkpointing=True).memory(16)
    size, tokens = SIZES["8b"], 8192
    assert found.moment == "loss", "of a vocabulary of 128,256 tokens"
    blocks = 2 * size.hidden_size * tokens * size.num_layers
    last_norm = (4 + 2 + 2) * size.hidden_size * tokens + 4 * tokens
    angles, targets = 2 * 2 * size.head_size * tokens, 8 * tokens
    assert found.parts["activations"] == blocks + last_norm + angles + targets


def test_zero_3_with_activation_checkpointing_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert one("deepspeed-zero3-eager", activation_checkpointing=True).refusal.startswith("not predicted: ")
    assert main(["predict", "--model", "8b", *ASKED, *TIMED, "--memory", "80GiB", "--activation-checkpointing"]) == GOOD
    out, _ = capsys.readouterr()
    assert re.search(r"^deepspeed-zero3-eager .* not predicted$", out, re.MULTILINE)
    assert "deepspeed-zero3-eager, lightning-deepspeed-zero3: not predicted: in which order ZeRO-3 gathers" in out
    assert "Not predicted, and so not considered: deepspeed-zero3-eager, lightning-deepspeed-zero3." in out
    assert ", activation checkpointing, micro-batches" in out and "compute their forward once more" in out


def test_the_map_says_that_it_is_of_checkpointed_blocks() -> None:
    for checkpointed in (False, True):
        drawing, *_ = drawn(None, activation_checkpointing=checkpointed)
        assert ("activation checkpointing" in drawing.words.title) == checkpointed


def test_given_activations_are_those_without_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "8b", *ASKED, "--activation-checkpointing", "--activations", "9GiB"]) == WRONG
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "--activations: are those kept without --activation-checkpointing" in err
