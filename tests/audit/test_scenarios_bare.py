"""The newer scenarios against loops written without the bench (bare.py): every coefficient and every counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.audit.semantics_files import load
from bench.backends.base import registry
from tests.conftest import ROOT, Command, asked, bench

_, OBSERVATIONS = load(ROOT / "results/semantics/observations.json")
SUITE = {
    (observation["scenario"]["name"], observation["backend"]): observation
    for observation in OBSERVATIONS
}
"""As committed; ``test_what_is_committed_is_measured_again`` measures it."""


def run_bare(script: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """What a script beside this file prints at last."""
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def assert_same_updates(seen: dict[str, Any], alone: dict[str, Any]) -> None:
    updates = [update["samples"] for update in seen["updates"]]
    assert updates == [pytest.approx(update, rel=1e-4) for update in alone["updates"]], seen[
        "diagnosis"
    ]


@pytest.mark.parametrize(
    "framework",
    [
        "torch",
        "torchtitan",
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("lightning"),
    ],
)
def test_loops_without_the_bench_compute_the_same(framework: str, tmp_path: Path) -> None:
    bare = run_bare("bare.py", framework, folder=tmp_path)
    assert bare
    for name, backends in bare.items():
        for backend, alone in backends.items():
            seen = SUITE[name, backend]
            assert_same_updates(seen, alone)
            loading = alone["reported"].pop("inner_steps_of_loading", 0)
            assert loading == (2 if (name, backend) == ("resume-epoch", "fsdp2-deferred") else 0)
            for counter, value in alone["reported"].items():
                assert seen["steps_reported"][counter] == value, (name, backend, counter)


def test_steps_that_load_an_optimizer_are_counted_and_are_no_updates(tmp_path: Path) -> None:
    """torch's distributed checkpoint makes two with SGD: as many as in the loop without the bench above."""
    numbers = [
        "--samples",
        "40",
        "--micro-batch",
        "2",
        "--accumulate",
        "4",
        "--epochs",
        "2",
        "--json",
    ]
    fault = ["--fault", "checkpoint", "--at", "10"]  # an epoch's end
    done = bench(
        "semantics", "--backend", "tests.audit.dcp:WithDCP", *numbers, *fault, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + done.stdout
    seen = json.loads(done.stdout)
    assert (seen["verdict"], seen["optimizer_steps_without_effect"]) == ("right", 2)
    assert [update["sum"] for update in seen["updates"]] == pytest.approx([1] * 6)
    assert "2 steps of the inner optimizer changed nothing" in seen["diagnosis"]


TRAINERS = [name for name in registry() if name.startswith("hf-trainer")]


def test_hugging_faces_trainer_alone_computes_the_same(
    request: pytest.FixtureRequest, here: Command, tmp_path: Path
) -> None:
    """Tokens that are counted on all ranks, on each alone or not at all; a partial window; a checkpoint."""
    backends = ",".join(asked(request, ("hf-trainer-ddp", "hf-trainer-fsdp2"), TRAINERS))
    bare = run_bare("bare_trainer.py", backends, folder=tmp_path)
    gathers, reduces, alone = (
        "_allgather_base_",
        "_reduce_scatter_base_",
        {"allgather_": 1},
    )  # of the counted tokens
    sent = {  # N = 4, one parameter in one unit; DDP searches for unused parameters, which the bench turns off
        "hf-trainer-ddp": alone | {"allreduce_": 1 + 1},
        "hf-trainer-fsdp2": alone | {gathers: 2 * 4, reduces: 1},
        "hf-trainer-deepspeed-zero2": alone | {"allreduce_": 4 + 1, gathers: 1},
        "hf-trainer-deepspeed-zero3": alone | {gathers: 4, reduces: 4, "allreduce_": 1},
    }
    assert bare.pop("collectives") == {name: sent[name] for name in backends.split(",")}
    options = (
        "--suite",
        "--scenario",
        ",".join(bare),
        "--backend",
        backends,
        "--json",
        "--out",
        "out",
    )
    measured = json.loads(here("semantics", *options).stdout)
    assert len(measured) == len(bare) * len(backends.split(","))
    for seen in measured:
        alone = bare[seen["scenario"]["name"]][seen["backend"]]
        assert_same_updates(seen, alone)
        assert seen["steps_reported"].items() >= alone["reported"].items(), seen["diagnosis"]
    verdicts = {(seen["scenario"]["name"], seen["verdict"]) for seen in measured}
    assert {
        word for name, word in verdicts if name in ("tokens-mean", "tokens-counted-per-rank")
    } == {"mean of means"}
    assert {word for name, word in verdicts if name == "tokens-counted"} == {"right"}


def test_accelerate_without_the_bench_computes_and_sends_the_same(tmp_path: Path) -> None:
    bare = run_bare("bare_accelerate.py", folder=tmp_path)
    assert bare.pop("fallbacks") == {
        "cpu=True": "DistributedDataParallel on 2",
        "neither": "Weights on 1",
    }
    sent = {
        name.removeprefix("accelerate-"): calls for name, calls in bare.pop("collectives").items()
    }
    assert (
        sent
        == {  # N = 4, one parameter, one unit; ZeRO adds the norm, and stage 2 the gather after the step
            "ddp": {"allreduce_": 1},
            "ddp-eager": {"allreduce_": 4},
            "fsdp2": {"_allgather_base_": 4, "_reduce_scatter_base_": 1},
            "fsdp2-eager": {"_allgather_base_": 4, "_reduce_scatter_base_": 4},
            "deepspeed-zero2": {"allreduce_": 4 + 1, "_allgather_base_": 1},
            "deepspeed-zero3": {"_allgather_base_": 4, "_reduce_scatter_base_": 4, "allreduce_": 1},
        }
    )
    measured = [
        (name, backend, alone)
        for name, backends in bare.items()
        for backend, alone in backends.items()
    ]
    assert len(measured) == len(bare) * len(sent)
    for name, backend, alone in measured:
        seen = SUITE[name, backend]
        assert_same_updates(seen, alone)
        assert seen["steps_reported"] == alone["reported"], (name, backend)
        if name == "own-loader":
            assert (len(seen["updates"]), seen["verdict"]) == (5, "carried over"), backend
        if name == "prepared-scheduler":
            assert (seen["verdict"], seen["steps_reported"]["lr_scheduler.last_epoch"]) == (
                "miscounted",
                2 * 4,
            )
