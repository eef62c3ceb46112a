"""The prediction: published cases, estimates by hand, the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.base import registry
from bench.cli import main
from bench.errors import GOOD, WRONG, InputError
from bench.forecast.choice import Choice, Question
from bench.forecast.lora import LoRA
from bench.forecast.prediction import (
    Link,
    TimeEstimate,
    Traffic,
    communication,
    model_flops,
    predict,
)
from bench.forecast.prediction_text import EstimateAccuracy
from bench.plan.cell import REFERENCES, Cell, Device, Precision
from bench.plan.models import SIZES
from tests.conftest import HSDP, ROOT
from tests.factories import make_cell

GIB = 2**30
ASKED = ["--world-size", "64", "--accumulate", "16", "--sequence", "8192", "--precision", "bf16"]
TIMED = ["--link", "50GB/s", "--latency", "20us", "--compute-time", "22s"]
WITH_HSDP = [
    name
    for name, backend in registry().items()
    if backend.__module__.startswith("bench.") and name not in REFERENCES
]
BUILT_IN = [name for name in WITH_HSDP if name not in HSDP]
NODES = ["--link", "intra=450GB/s,inter=50GB/s", "--node-size", "8"]


def asked(**changes: Any) -> Cell:
    """The 8b model on 64 ranks, 16 micro-batches of one sample."""
    values: dict[str, Any] = {
        "backend": "", "model": "8b", "precision": Precision.BF16, "accumulate": 16, "world_size": 64,
        "sequence_length": 8192, "device": Device.CUDA,
    }  # fmt: skip
    values |= changes
    return make_cell(global_batch_size=values["accumulate"] * values["world_size"], **values)


def traffic(backend: str, **changes: Any) -> tuple[Traffic, ...]:
    (prediction,) = predict(asked(**changes), [backend])
    return prediction.traffic


# Traffic.


@pytest.mark.parametrize(
    ("ranks", "stride", "node_size"),
    [(16, 1, 8), (8, 1, 8), (4, 1, 8), (2, 8, 8), (8, 4, 8), (32, 1, 8), (6, 1, 1)],
)
def test_what_leaves_a_node_is_what_rings_over_all_its_network_cards_send(
    ranks: int, stride: int, node_size: int
) -> None:
    """One ring for each rank that a group has in a node; in each another rank is the last before the next node."""
    group = [stride * position for position in range(ranks)]
    nodes = [list(inside) for _, inside in itertools.groupby(group, lambda rank: rank // node_size)]
    sent = {(rank, inter): 0.0 for rank in group for inter in (False, True)}
    for first in range(num_rings := len(nodes[0])):
        ring = [rank for node in nodes for rank in (*node[first:], *node[:first])]
        for rank, follower in itertools.pairwise([*ring, ring[0]]):
            sent[rank, rank // node_size != follower // node_size] += 840.0 / num_rings
    intra, inter = Traffic(1, 840.0, ranks, stride).levels(node_size)
    assert sent == pytest.approx(
        {(rank, way): inter if way else intra for rank in group for way in (False, True)}
    )


def test_traffic_of_hsdp_by_hand() -> None:
    """8 replicas over groups of 8: gathers of 2P in forward and backward, but 1 for the root; 4P / 8 per all-reduce."""
    size, n = SIZES["8b"], 16
    parameters, root = (
        size.num_parameters,
        2 * size.vocab_size * size.hidden_size + size.hidden_size,
    )
    gathers = n * 2 * (2 * parameters - root) * 7 / 8
    for backend, reductions, all_reduces in zip(HSDP, (n, n, 1), (n, 1, 1), strict=True):
        shards, replicas = sorted(traffic(backend, replicate=8), key=lambda part: part.stride)
        assert shards == Traffic(
            n * 65 + reductions * 33, gathers + reductions * 4 * parameters * 7 / 8, 8
        )
        assert replicas == Traffic(
            all_reduces * 33, all_reduces * 2 * 4 * parameters / 8 * 7 / 8, 8, 8
        )
        assert shards.levels(8)[1] == 0 == replicas.levels(8)[0], "within a node, and between nodes"


# Estimates and choice, on made-up traffic.


def made(name: str, calls: float, wire: float, peak: int, accumulate: int = 4) -> Any:
    """A prediction whose calls and bytes are given per micro-batch; a ``name`` that is constant: per window."""
    times = 1 if name == "constant" else accumulate
    return SimpleNamespace(
        name=name,
        is_missing=False,
        defect="",
        offloads=False,
        traffic=(Traffic(calls * times, wire * times, 8),),
        memory=SimpleNamespace(peak=peak),
        cell=asked(accumulate=accumulate),
    )


def question(link: Link) -> Question:
    return Question(cell=asked(accumulate=4), link=link, compute_s=4.0)


def test_estimates_by_hand() -> None:
    """100 calls of 10 ms and 8 GB on 2 GB/s: 1 s + 4 s against 4 s and 10 s of compute."""
    asks = question(Link(bytes_per_s=2e9, latency_s=0.01))
    assert asks.step(made("constant", 100, 8e9, 1)) == TimeEstimate(5.0, 9.0)
    assert asks.step(made("constant", 100, 8e9, 1, 10)) == TimeEstimate(10.0, 15.0), (
        "compute grows with N"
    )


def test_estimates_over_two_levels_by_hand() -> None:
    """Groups of 4 in a node send 8 GB at 4 GB/s, and pairs of them 3 GB at 1 GB/s to the other node: 2 s and 3 s.

    A group of all 8 ranks sends 1/4 of its 8 GB to the other node, 2 s, and meanwhile the rest in its own, 1.5 s.
    """
    link = Link(bytes_per_s=1e9, intra_bytes_per_s=4e9, node_size=4)
    shards, replicas, everyone = Traffic(0, 8e9, 4), Traffic(0, 3e9, 2, 4), Traffic(0, 8e9, 8)
    assert communication([shards, replicas], link) == TimeEstimate(3.0, 5.0), (
        "levels run at once, or in turn"
    )
    assert communication([everyone], link) == TimeEstimate(2.0, 2.0)
    assert communication([everyone, shards], link) == TimeEstimate(3.5, 4.0), (
        "1.5 s and 2 s within the node"
    )
    assert communication(
        [everyone, shards], dataclasses.replace(link, latency_s=0.1)
    ) == TimeEstimate(3.5, 4.0)


def test_overlapping_estimates_are_undecided() -> None:
    """4 s of compute, and 4 s or 1 s of communication: 4 to 8 s, or 4 to 5 s, and nobody knows what is hidden."""
    both = [made("each", 0, 1e9, 1), made("constant", 0, 1e9, 2)]
    assert question(Link(bytes_per_s=1e9)).choose(both) == Choice("constant", rivals=("each",))
    assert question(Link(bytes_per_s=1e8)).choose(both) == Choice("constant"), (
        "40 to 44 s against 10 to 14 s"
    )
    assert question(Link(bytes_per_s=1e12)).choose(both) == Choice("each"), (
        "both within 2 % of 4 s: the memory decides"
    )


def test_what_is_kept_free_is_that_of_as_many_ranks() -> None:
    """One rank has no communicator of NCCL, whatever W was asked for."""
    alone, two = (predict(asked(world_size=ranks), ["ddp-eager"])[0] for ranks in (1, 2))
    for ranks in (1, 2):
        asks = Question(cell=asked(world_size=ranks))
        assert asks.reserved(alone).least < asks.reserved(two).least


# The command.


def test_nothing_that_offloads_is_offered_for_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Its copies are not estimated. With the first example of docs/commands.md, whose link leaves much open."""
    example = "--model 8b --world-size 64 --accumulate 16 --sequence 8192 --precision bf16 "
    example += "--activation-checkpointing --memory 80GiB --link 400Gbps --peak H100"
    assert run(*example.split()) == GOOD
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Recommendation") for line in lines)
    assert not [line for line in lines if line.startswith("Less memory:") and "offload" in line]


def run(*arguments: str) -> int:
    return main(["predict", *arguments])


def test_json_is_a_list_with_one_object_per_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "8b", *ASKED, *TIMED, "--memory", "96GiB", "--json") == GOOD
    rows = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in rows] == BUILT_IN
    by = {row["backend"]: row for row in rows}
    eager = by["fsdp2-eager"]
    assert sum(eager["memory"].values()) == eager["peak_memory_bytes"]
    assert eager["fits"] and not by["fsdp2-deferred"]["fits"] and not by["ddp-eager"]["may_fit"]
    tokens = 16 * 8192
    assert eager["tokens_per_s"] == pytest.approx([tokens / eager["serial_s"], tokens / 22])
    assert eager["mfu"] is None, "no peak was given"
    assert eager["collectives"][1] == {
        "op": "reduce_scatter", "group": "world", "dtype": "float32", "calls": 528,
        "payload_bytes": 16 * 4 * SIZES["8b"].num_parameters,
        "wire_bytes": 16 * 4 * SIZES["8b"].num_parameters * 63 / 64,
    }  # fmt: skip
    assert eager["communication_s"] == pytest.approx(
        eager["num_calls"] * 20e-6 + eager["wire_bytes"] / 50e9
    )
    assert (
        eager["serial_s"] == pytest.approx(22 + eager["communication_s"])
        and eager["overlapped_s"] == 22
    )
    assert [row["backend"] for row in rows if row["recommended"]] == ["fsdp2-eager"]
    assert not eager["best"]
    assert by["deepspeed-zero3-eager"]["may_be_fastest"] and not eager["may_be_fastest"]
    assert by["lightning-fsdp2"]["equals"] == "fsdp2-eager" and not eager["equals"]
    assert by["lightning-fsdp2"]["peak_memory_bytes"] == eager["peak_memory_bytes"]
    refused = by["deepspeed-zero2-deferred"]
    assert "bf16" in refused["refusal"] and refused["memory"] == {} and refused["serial_s"] is None
    assert by["lightning-deepspeed-zero2"]["defect"] and not by["lightning-deepspeed-zero2"]["best"]


def test_mfu_is_the_one_that_was_assumed_if_communication_is_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--model", "8b", *ASKED, "--link", "H100", "--peak", "H100", "--mfu", "40%"]
    assert run(*command, "--backend", "fsdp2-eager", "--json") == GOOD
    (row,) = json.loads(capsys.readouterr().out)
    least, most = row["mfu"]
    assert most == pytest.approx(0.4) and least == pytest.approx(
        0.4 * row["compute_s"] / row["serial_s"]
    )
    assert run(*command, "--backend", "fsdp2-eager", "--activation-checkpointing", "--json") == GOOD
    (recomputed,) = json.loads(capsys.readouterr().out)
    assert recomputed["mfu"][1] < most, "what is recomputed is no model FLOP"


def test_a_preset_is_its_datasheets_rates_with_nccls_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def communication_s(*arguments: str) -> float:
        command = [*("--model", "8b", *ASKED), "--backend", "fsdp2-eager", *arguments, "--json"]
        assert run(*command) == GOOD
        (row,) = json.loads(capsys.readouterr().out)
        return float(row["communication_s"])

    rates = communication_s(*NODES)
    assert communication_s("--link", "H100") == communication_s("--link", "h100") == rates
    assert communication_s("--link", "H100") == communication_s(*NODES, "--latency", "32us")
    assert communication_s("--link", "A100") > 1.5 * communication_s("--link", "H100")
    part = ["--world-size", "4", "--link", "H100"]
    assert communication_s(*part) == communication_s("--world-size", "4", "--link", "450GB/s")


def test_names_of_gpus_have_no_case(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(gpu: str) -> object:
        named = ["--link", gpu, "--peak", gpu, "--json"]
        assert run("--model", "8b", *ASKED, *named) == GOOD
        return json.loads(capsys.readouterr().out)

    assert answer("h100") == answer("H100")


def test_it_begins_with_a_recommendation_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def first(*arguments: str) -> str:
        assert run("--model", "8b", *ASKED, *arguments) == GOOD
        return capsys.readouterr().out.splitlines()[0]

    assert "no other is more than 2 % faster" in first(
        "--link", "400Mbps", "--compute-time", "22s", "--memory", "120GiB"
    )
    leanest = first("--memory", "80GiB")
    assert leanest.startswith(
        "Recommendation: deepspeed-zero3-eager needs the least without offload"
    )
    assert "63.95 GiB of memory, of 80.00 GiB, which is tight" in leanest
    with_offload = first(*TIMED, "--memory", "68GiB")
    assert with_offload.startswith("Recommendation: deepspeed-zero3-offload needs the least: ")
    assert "61.84 GiB of memory, of 68.00 GiB, and 3,111.2 MiB" in with_offload
    assert "which is tight" in with_offload and "Without offload none fits" in with_offload
    nothing_fits = first(*TIMED, "--memory", "8GiB")
    assert "none fits; deepspeed-zero3-offload needs the least" in nothing_fits
    assert "--activation-checkpointing" in nothing_fits
    assert first("--backend", "lightning-deepspeed-zero2").startswith("Recommendation: none; ")


def test_wrappers_are_named_beside_the_mechanism_that_they_equal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(*arguments: str) -> dict[str, str]:
        assert run("--model", "8b", *ASKED, *arguments) == GOOD
        _, table = capsys.readouterr().out.split("optimizer step:\n")
        assert "lightning-deepspeed-zero2, lightning-deepspeed-zero3: WRONG: " in table
        return {line.split()[0]: line for line in table.partition("\n\n")[0].splitlines()[1:]}

    short = rows()
    assert short["fsdp2-eager"].endswith(
        "= torchtitan-eager, lightning-fsdp2, accelerate-fsdp2-eager"
    )
    assert "lightning-deepspeed-zero2 (WRONG)" in short["deepspeed-zero2-eager"] and len(short) < 22
    every = rows("--all")
    assert list(every) == BUILT_IN and every["lightning-deepspeed-zero2"].endswith(" WRONG")


def test_the_first_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    command = re.findall(r"^python -m bench (predict (?:.*\\\n)*.*)", text, re.MULTILINE)[0]
    assert main(shlex.split(command.replace("\\\n", " "), comments=True)) == GOOD
    shown = capsys.readouterr().out
    assert shown.startswith("Recommendation until measured: fsdp2-deferred: ")
    for part in ("28.84 s (overlapped) to 38.96 s (serial)", "47.27 GiB", "at most 35 % longer"):
        assert part in shown.partition("\n")[0]


def test_the_command_that_measures_what_is_hidden_is_one_that_run_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run("--model", "8b", *ASKED, *TIMED, "--memory", "80GiB", "--activation-checkpointing")
        == GOOD
    )
    (command,) = re.findall(
        r"^May be faster: .*: python -m bench run (.*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["plan", "--on", "8 x H100 80GiB", *command.split()]) == GOOD
    out = capsys.readouterr().out
    rows = [line.split()[1:6] for line in out.splitlines() if "  fsdp2-" in line]
    assert {tuple(row[1:]) for row in rows} == {("16", "8", "1", "bf16")} and "skipped:" not in out
    assert {"fsdp2-deferred", "fsdp2-eager"} <= {row[0] for row in rows}


def test_slow_cards_between_nodes_make_hsdp_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """48 GiB are too few to hold whole gradients; then only HSDP keeps gathers off the link between nodes."""
    command = [
        "--model",
        "8b",
        *ASKED,
        "--activation-checkpointing",
        "--compute-time",
        "28.84s",
        "--memory",
        "48GiB",
    ]
    command += ["--link", "intra=450GB/s,inter=3GB/s", "--node-size", "8"]
    command += ["--backend", ",".join(["fsdp2-eager", "fsdp2-deferred", *HSDP])]
    assert run(*command, "--json") == GOOD
    by = {row["backend"]: row for row in json.loads(capsys.readouterr().out)}
    best = by["hsdp-deferred-all-reduce"]
    assert [name for name, row in by.items() if row["best"]] == ["hsdp-deferred-all-reduce"]
    assert (
        [16, 64] in best["best_at"]
        and [256, 256] in best["best_at"]
        and [1, 16] not in best["best_at"]
    )
    assert by["hsdp-eager"]["intra_bytes"] == best["intra_bytes"]
    assert by["hsdp-eager"]["inter_bytes"] == 16 * best["inter_bytes"]
    assert by["hsdp-deferred"]["fits"] is False
    assert run(*command) == GOOD
    shown = capsys.readouterr().out
    assert "W = 64, R = 8 replicas" in shown
    assert "450 GB/s within nodes of 8 and 3 GB/s" in shown
    assert "all_reduce float32 in the replicate group 33 x" in shown
    assert re.search(r"^ +W = 16 +W = 32 +W = 64 +W = 128 +W = 256$", shown, re.MULTILINE)
    assert re.search(r"^N = 256( +hsdp-deferred-all-reduce( \?)?){5}$", shown, re.MULTILINE)


def test_replicas_are_nodes_unless_asked_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    def held(*arguments: str) -> dict[str, int]:
        assert run("--model", "8b", *ASKED, *arguments, "--json") == GOOD
        return {
            row["backend"]: row["held"].get("parameters")
            for row in json.loads(capsys.readouterr().out)
        }

    parameters = 4 * SIZES["8b"].num_parameters
    for arguments, ranks in (
        (NODES, 8),
        ([*NODES, "--replicate", "4"], 16),
        (["--replicate", "2"], 32),
    ):
        assert held(*arguments)["hsdp-eager"] == parameters / ranks
    assert list(held("--link", "50GB/s")) == BUILT_IN == list(held(*NODES[:3], "64")), (
        "one level, or one node"
    )


def test_a_published_step_of_hsdp_is_serial(capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/method.md says of github.com/NVIDIA/cosmos-framework/pull/162: 88.8 s, and 54.3 s once deferred."""
    command = [
        "--model",
        "8b",
        "--world-size",
        "16",
        "--accumulate",
        "4",
        "--sequence",
        "8192",
        "--precision",
        "bf16",
    ]
    command += [
        "--link",
        "intra=300GB/s,inter=350MB/s",
        "--node-size",
        "8",
        "--compute-time",
        "42.1s",
    ]
    assert run(*command, "--backend", "hsdp-eager,hsdp-deferred-all-reduce", "--json") == GOOD
    eager, deferred = (row["serial_s"] for row in json.loads(capsys.readouterr().out))
    assert [eager, deferred] == pytest.approx([88.8, 54.3], rel=0.005)
    text = " ".join((ROOT / "docs/method.md").read_text().split())
    told = re.search(r"Serial steps take ([\d.]+) and ([\d.]+) s with", text)
    assert told and told.groups() == (f"{eager:.1f}", f"{deferred:.1f}")


def test_a_reserve_of_the_memory_is_kept_free(capsys: pytest.CaptureFixture[str]) -> None:
    """77.9 of 80 GiB do not fit: there are a CUDA context, NCCL, and what the allocator reserves beyond the peak."""

    def fits(*arguments: str, size: str = "80GiB") -> bool:
        command = [
            "--model",
            "8b",
            *ASKED,
            "--backend",
            "fsdp2-zero2-eager",
            "--memory",
            size,
            *arguments,
        ]
        assert run(*command, "--json") == GOOD
        (row,) = json.loads(capsys.readouterr().out)
        assert row["peak_memory_bytes"] / GIB == pytest.approx(77.9, abs=0.05)
        assert row["may_fit"] or not row["fits"]
        return bool(row["fits"])

    assert fits(size="109GiB") and not fits(size="108GiB"), "37 % of it, and 1.4 GiB"
    assert (
        not fits()
        and fits("--reserve", "2GiB")
        and not fits("--reserve", "2.2GiB")
        and fits("--reserve", "0B")
    )
    assert run("--model", "8b", *ASKED, "--memory", "80GiB") == GOOD
    shown = capsys.readouterr().out
    assert re.search(r"^fsdp2-zero2-eager .* NO", shown, re.MULTILINE)
    assert re.search(r"^fsdp2-eager .* tight", shown, re.MULTILINE)
    assert "6 to 37 % of it" in shown and "--reserve replaces" in shown
    assert "CUDA context 781.0 MiB (github.com/pytorch/pytorch/issues/34323)" in shown


@pytest.mark.parametrize("speed", ["50GB/s", "400Gbit/s", "400Gbps", "400 Gb/s", "0.05TB/s"])
def test_bits_and_bytes_per_second(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            *("--model", "tiny", *ASKED, "--link", speed, "--latency", "0s"),
            "--backend",
            "ddp-eager",
            "--json",
        )
        == GOOD
    )
    (row,) = json.loads(capsys.readouterr().out)
    assert row["communication_s"] == pytest.approx(row["wire_bytes"] / 50e9)


def test_what_is_said_of_the_estimates_is_what_the_study_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is typed in: other runs, other sentences; and a file that cannot be is named."""
    other = tmp_path / "other.json"
    stored = {"num_steps": 8, "num_below_overlapped": 3, "num_above_serial": 2, "longest": 1.26}
    other.write_text(json.dumps(stored | {"num_pairs": 9, "num_in_order": 7}))
    monkeypatch.setattr("bench.forecast.prediction_text.ACCURACY", other)
    assert run("--model", "8b", *ASKED, *TIMED) == GOOD
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 of 8 steps took less than overlapped, and 2 took" in shown
    assert "up to 1.3 times as long" in shown and "7 of 9 pairs" in shown
    other.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"other\.json: num_pairs is missing"):
        EstimateAccuracy.stored()


# LoRA.

LORA = ["--model", "8b", *ASKED, "--lora-rank", "16", "--parameters", "bf16"]


def rows_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    assert main(["predict", *options, "--all", "--json"]) == GOOD
    return {row["backend"]: row for row in json.loads(capsys.readouterr().out)}


def test_lora_holds_and_sends_little_beside_its_frozen_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By hand: 16 x (4096 + 4096) and 16 x (4096 + 1024) parameters in each of 32 blocks; their gradients are sent."""
    trained = 32 * 16 * (4096 + 4096 + 4096 + 1024)
    rows = rows_of(capsys, *LORA)
    ddp = rows["ddp-deferred"]
    assert ddp["memory"]["parameters"] == 2 * (SIZES["8b"].num_parameters + trained)
    sent = {row["op"]: row["payload_bytes"] for row in ddp["collectives"]}
    assert sent["all_reduce"] == 2 * trained
    assert ddp["memory"]["optimizer_state"] == pytest.approx(4 * trained, rel=1e-4)
    full = rows_of(capsys, *LORA[:-4], "--parameters", "bf16")["fsdp2-eager"]
    fsdp2 = rows["fsdp2-eager"]
    sent, of_all = (
        {row["op"]: row["payload_bytes"] for row in each["collectives"]} for each in (fsdp2, full)
    )
    assert of_all["all_gather"] < sent["all_gather"] < 1.01 * of_all["all_gather"]
    assert sent["reduce_scatter"] < 0.01 * of_all["reduce_scatter"]
    assert "frozen weights" in rows["deepspeed-zero2-eager"]["not_predicted"]
    assert rows["ddp-deferred"]["equals"] == ""


def test_lora_leaves_out_the_gradients_of_frozen_weights() -> None:
    """A third of the products with weights; attention and LoRA's own are whole."""
    cell = asked(sequence_length=1)
    tokens, lora = 16, LoRA(16)
    size = SIZES["8b"]
    matrices = size.num_layers * size.num_matrix_parameters + size.vocab_size * size.hidden_size
    expected = 6 * lora.num_parameters(size) - 2 * matrices
    assert model_flops(cell, lora) - model_flops(cell) == tokens * expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-targets", "q_proj"], "--lora-rank"),
        (["--lora-rank", "8", "--lora-targets", "q"], "q_proj"),
        (["--lora-rank", "8", "--exact", "--backend", "ddp-eager"], "--lora-rank"),
        (["--lora-rank", "8", "--lora-targets", "embed_tokens"], "q_proj"),
        (["--lora-rank", "8", "--lora-targets", "lm_head"], "lm_head"),
        (["--model", "1b", "--lora-rank", "8", "--lora-targets", "q_proj,lm_head"], "embedding"),
        (["--lora-dropout", "0.1"], "--lora-rank"),
        (["--lora-rank", "8", "--lora-dropout", "100%"], "--lora-dropout"),
        (["--lora-rank", "8", "--lora-parameters", "bf16"], "--parameters bf16"),
    ],
)
def test_options_of_lora_that_cannot_be(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--model", "8b", *ASKED, *options]) == WRONG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["--batch", "1024", "--link", "H100", "--peak", "H100"]], ids=["one", "batch"]
)
def test_the_text_says_what_lora_trains(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LORA, "--lora-targets", "q_proj,down_proj", *options]
    if options:
        place = words.index("--accumulate")
        del words[place : place + 2]
    assert main(["predict", *words]) == GOOD
    out = capsys.readouterr().out
    assert "bf16 parameters without fp32 masters, LoRA of rank 16 on q_proj, down_proj" in out
    assert "--lora-parameters fp32" in out


def test_dropout_and_fp32_of_lora_s_own_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU, for each token: two inputs instead of one, and a bool of each of their elements; two fp32 inputs.

    The first block's input has no gradient, so that dropout keeps no bools there. Rank 16 returns fp32, too.
    """
    tokens, blocks, hidden = 8192, 32, 4096
    rows = {}
    for name, options in {
        "plain": [],
        "dropout": ["--lora-dropout", "0.1"],
        "fp32": ["--lora-parameters", "fp32"],
    }.items():
        rows[name] = rows_of(capsys, *LORA, *options)
    activations = {
        name: each["ddp-deferred"]["memory"]["activations"] for name, each in rows.items()
    }
    dropped = tokens * hidden * (blocks * (2 + 2) - 2)
    assert activations["dropout"] - activations["plain"] == dropped
    wider = tokens * blocks * (hidden * (2 * 4 - 2) + 2 * 16 * 2)
    assert activations["fp32"] - activations["plain"] == wider
    trained = blocks * 16 * (4096 + 4096 + 4096 + 1024)
    parameters = rows["fp32"]["ddp-deferred"]["memory"]["parameters"]
    assert parameters == 2 * SIZES["8b"].num_parameters + 4 * trained
    assert "fp32 and bf16" in rows["fp32"]["fsdp2-eager"]["not_predicted"]
