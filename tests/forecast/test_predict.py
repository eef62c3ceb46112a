"""The prediction: published cases, bounds and flips by hand, the command."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from bench.backends.base import registry
from bench.cli import main
from bench.errors import GOOD, WRONG
from bench.forecast import prediction_map, prediction_text
from bench.forecast.best import EXACT, Choice, Question, where_best
from bench.forecast.prediction import Link, Prediction, Traffic, predict
from bench.plan.cell import REFERENCES, Cell, Device, Precision
from bench.plan.models import SIZES
from tests import legible
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


# Traffic.


def test_wire_bytes_and_calls_of_fsdp2_by_hand() -> None:
    """Eager N reduce-scatters of 4P and, resident, one gather of 2P; times 63/64; 33 units."""
    parameters = SIZES["8b"].num_parameters
    assert one("fsdp2-deferred-resident").traffic(16) == Traffic(66, 6 * parameters * 63 / 64)
    assert one("fsdp2-zero2-eager").traffic(16) == Traffic(2 * 16 * 33, 16 * 6 * parameters * 63 / 64)


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
    assert question(fast, big, wrong).choose(4, link) == Choice("big")
    assert question(fast, big, wrong, memory_bytes=15).choose(4, link) == Choice("fast")
    assert question(fast, big, wrong, memory_bytes=15).choose(1, link) == Choice("wrong"), "nothing is wrong at N = 1"
    assert question(fast, big, wrong, memory_bytes=7).choose(4, link) == Choice("")


def test_the_link_at_which_the_answer_flips() -> None:
    """1 call and 3 GB against 101 calls and 1 GB, 1 ms each: even where 2 GB take as long as 100 ms, at 20 GB/s."""
    few, many = made("constant few", 1, 3e9, 1), made("constant many", 101, 1e9, 1)
    found = question(few, many).along_link(4, 1e-3)
    assert [stretch.choice.best for stretch in found] == ["constant many", "constant few"]
    assert found[0].high == found[1].low == pytest.approx(2e10, rel=2 * EXACT)
    assert (found[0].low, found[-1].high) == (1e8, 1e12)
    assert where_best("constant few", found) == [(found[1].low, 1e12)]
    assert question(few, many).along_link(4, 1e-3, 1e7)[0].low == 1e7, "the asked one is always inside"


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
    assert [row["backend"] for row in rows if row["best"]] == ["fsdp2-zero2-eager"]
    assert by["fsdp2-zero2-eager"]["best_where"]["accumulate"][-1][-1] == 256
    assert by["fsdp2-deferred"]["best_where"]["link"] == []
    refused = by["deepspeed-zero2-deferred"]
    assert "bf16" in refused["refusal"] and refused["memory"] == {} and refused["upper_s"] is None
    assert by["lightning-deepspeed-zero2"]["defect"] and not by["lightning-deepspeed-zero2"]["best"]


def test_the_table_says_what_is_best_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "100GiB") == GOOD
    said = capsys.readouterr().out
    assert "WRONG: Lightning divides the loss by N" in said
    assert "Best at N = 16 and 50 GB/s: fsdp2-deferred (equal: fabric-fsdp2-deferred)." in said
    assert "from 3 on fsdp2-deferred" in said
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "1GiB") == GOOD
    assert "none: nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"--model": "9b"}, "--model"),
        ({"--world-size": "2.5"}, "--world-size"),
        ({"--accumulate": "x"}, "--accumulate"),
        ({"--precision": "fp8"}, "--precision"),
        ({"--memory": "80gib"}, "--memory"),
        ({"--link": "50"}, "--link"),
        ({"--link": "-1GB/s"}, "--link"),
        ({"--latency": "20"}, "--latency"),
        ({"--compute-time": "nans"}, "--compute-time"),
        ({"--backend": "fsdp3-eager"}, "--backend"),
        ({"--backend": ","}, "--backend"),
        ({"--peak": "100"}, "--peak"),
        ({"--peak": "H100", "--compute-time": "1s"}, "--peak"),
        ({"--mfu": "140%", "--peak": "H100"}, "--mfu"),
        ({"--optimizer": "adam"}, "--optimizer"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, str], place: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"--model": "tiny", **dict(zip(ASKED[::2], ASKED[1::2], strict=True)), **changes}
    assert run(*itertools.chain(*([key, value] for key, value in values.items()))) == WRONG
    said = capsys.readouterr().err
    assert place in said and said.count("\n") == 1 and said.startswith("bench: ")


# The map.


def drawn(memory: int | None, **changes: Any) -> tuple[Any, Question, prediction_text.About]:
    cell = asked(**changes)
    asks = Question(predictions=predict(cell, BUILT_IN), compute_s=22.0, accumulate=16, memory_bytes=memory)
    about = prediction_text.About(
        cell=cell, link=Link(bytes_per_s=50e9, latency_s=20e-6), latency_given=True, compute_s=22.0,
        compute_from="as given", memory_bytes=memory, activations_given=False, margin=0.02, answer=None,
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
            assert asks.choose(int(str(n)), Link(bytes_per_s=middle, latency_s=20e-6)).best == row["best"]


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
