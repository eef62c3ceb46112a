"""Models that the bench does not ship: of transformers, and a user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.judge.loading import load
from bench.workload.preflight import examine
from tests.conftest import Command, bench, run_matrix
from tests.factories import make_cell

DECODER = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": DECODER,
    "qwen2": DECODER | {"tie_word_embeddings": True},
    "qwen3": DECODER | {"head_dim": 8},
    "mistral": DECODER | {"sliding_window": 8},
    "gemma": DECODER | {"head_dim": 8},
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "olmo2": DECODER,
    "mixtral": DECODER | EXPERTS,
    "qwen3_moe": DECODER | EXPERTS | {"head_dim": 8},
    "phi3": DECODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
}
"""Ten models of two layers, by model type; with dropout where their authors had some."""
BACKENDS = [
    "ddp-eager",
    "ddp-deferred",
    "fsdp2-eager",
    "fsdp2-deferred",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
]


def _config(folder: Path, kind: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    return folder


def _trained(folder: Path, kind: str, command: Command) -> None:
    config = _config(folder, kind)
    options = ("--workload", f"hf:{config}", "--accumulate", "2", "--batch", "8")
    run = run_matrix(folder, *options, backend=BACKENDS, command=command)
    trials = run.tables.trials
    found = trials[["backend", "status", "reason"]].to_string()
    assert (trials["status"] == "ok").all(), found + run.process.stdout + run.process.stderr
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    assert set(BACKENDS) < set(trials["backend"])
    name = f"hf:{config.name}"
    assert all(re.fullmatch(rf"{name}@sha256:[0-9a-f]{{16}}", text) for text in trials["workload"])
    shown = run.process.stdout + (run.folder / "report.md").read_text()
    assert name in " ".join(shown.split()), "pages call the model so, wherever its config lies"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_of_transformers_is_right_under_every_kind_of_backend(
    tmp_path: Path, here: Command, kind: str
) -> None:
    _trained(tmp_path, kind, here)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"llama", "gpt2"}))
def test_so_are_others(tmp_path: Path, here: Command, kind: str) -> None:
    _trained(tmp_path, kind, here)


def test_a_backend_may_return_a_state_dict(tmp_path: Path) -> None:
    options = ("--workload", "tests.own_workload:Odd", "--accumulate", "2", "--batch", "8")
    named = ("--backend", "tests.own_workload:StateDict")
    run = run_matrix(tmp_path, *options, *named, backend=["ddp-eager"])
    assert run.trial("returns-state-dict")["status"] == "ok", (
        run.process.stdout + run.process.stderr
    )
    assert "Scope" in run.process.stdout
    assert "tests.own_workload:Odd" in run.process.stdout, "the model has the name of its workload"


@pytest.mark.parametrize(
    ("workload", "covered"), [("Odd", False), ("Buffered", True), ("Prefixed", True)]
)
def test_what_a_users_model_may_have_does_not_accuse(
    tmp_path: Path, here: Command, workload: str, covered: bool
) -> None:
    """Buffers of any dtype, frozen and tied parameters, nested samples, and in micro-batches of 1 gradients that are
    views of larger tensors."""
    options = (
        "--workload",
        f"tests.own_workload:{workload}",
        "--model",
        "2",
        "--accumulate",
        "2",
        "--batch",
        "4",
    )
    run = run_matrix(
        tmp_path,
        *options,
        backend=["ddp-deferred", "fsdp2-eager", "deepspeed-zero2-eager"],
        command=here,
    )
    tables = load(run.folder).tables
    trials, collectives = tables.trials, tables.collectives
    found = trials[["backend", "status", "reason"]].to_string()
    assert (trials["status"] == "ok").all(), found + run.process.stdout + run.process.stderr
    of_built_in = collectives[collectives["cell_id"] == run.trial("ddp-deferred")["cell_id"]]
    assert of_built_in["expected_calls"].notna().all() == covered
    unchecked = "no formula: the parameter 'blocks.0.up.weight' is frozen"
    assert (unchecked in " ".join(here("check", "run").stdout.split())) != covered


UNFIT = {
    "Untold": r"'Untold' object has no attribute 'tokens_per_sample'; see 'A model of your own'",
    "DropsOut": r"its module '2' \(Dropout\) draws random",
    "Noisy": r"loss\(\) draws random numbers",
    "Summed": r"the loss of samples 0 and 1 is [0-9.]+, .* [0-9.]+: it is not a mean",
    "NotANumber": r"the loss of .* samples is nan",
    "Counts": r"the loss of the same samples is [0-9.]+, and [0-9.]+ when",
    "Short": r"data\(4\) has a tensor of shape \[3, 17\]",
    "Unsharded": r"blocks\(\) is empty: there are none to shard",
    "WrongAlone": r"the gradient of 4 samples is not the mean of those of micro-batches of 2: off by 1, most in '",
    "Random": r"model\(\) returns another '0.weight' each time",
}


@pytest.mark.parametrize("name", ["Cycle", "Odd", *UNFIT])
def test_what_breaks_a_comparison_is_found_before_it(name: str) -> None:
    cell = make_cell(workload=f"tests.own_workload:{name}", model="1", sequence_length=16)
    assert re.match(UNFIT.get(name, "$"), examine(cell, None, shards=True).wrong)


@pytest.mark.parametrize("command", [("run", "--out", "run"), ("plan", "--check")])
def test_an_unfit_workload_is_refused_in_one_line_before_any_trial(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    options = ("--workload", "tests.own_workload:DropsOut", "--backend", "ddp-eager")
    found = bench(*command, *options, cwd=tmp_path)
    (line,) = found.stderr.splitlines()
    assert found.returncode == 2
    assert line.startswith("bench: workload 'tests.own_workload:DropsOut': its module '2'"), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("workload", "precision", "words"),
    [
        ("NormInFp32", "bf16", "its module '2' (_NormInFp32) raises RuntimeError with bf16 "),
        ("NormInFp32", "fp32", ""),
        ("TrainedComplex", "fp32", "its parameter '1.turn' is complex64, others beside it are "),
        ("Odd", "bf16", ""),
    ],
)
def test_backends_that_cannot_train_the_dtypes_of_a_model_are_skipped(
    tmp_path: Path, workload: str, precision: str, words: str
) -> None:
    options = ("--workload", f"tests.own_workload:{workload}", "--precision", precision)
    refused, other = ["fsdp2-eager", "deepspeed-zero2-eager"], "ddp-deferred"
    check = ("plan", "--check", *options, "--accumulate", "1", "--backend")
    found = bench(*check, ",".join([other, *refused]), cwd=tmp_path)
    skipped = {line.split()[1] for line in found.stdout.splitlines() if "skipped: " in line}
    assert found.returncode == 0, found.stderr
    assert skipped == (set(refused) if words else set()), found.stdout
    assert words in found.stdout
    alone = bench(*check, "fsdp2-eager", cwd=tmp_path)
    assert alone.returncode == (2 if words else 0)
    assert words in alone.stderr
    assert alone.stderr.count("\n") == bool(words), alone.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "model_type is missing"),
        (None, "name a config.json of transformers"),
        ('{"model_type": "lama"}', "model_type 'lama' is unknown to transformers; "),
        (
            json.dumps({"model_type": "llama", **DECODER, "max_position_embeddings": 8}),
            "give --sequence 8 or less",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, config: str | None, words: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    found = bench(
        "plan", "--check", "--workload", f"hf:{tmp_path}", "--backend", "ddp-eager", cwd=tmp_path
    )
    assert found.returncode == 2
    assert words in found.stderr, found.stderr
