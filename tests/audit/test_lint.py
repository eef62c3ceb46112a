"""Lint: for every rule a config that it finds and one that it lets pass, and what hostile input meets."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import cli
from bench.audit import advisories
from bench.audit.lint import config_file, launch_script, lint, version_facts
from bench.audit.lint.known_keys import known_keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.logging_rules import Rates
from bench.audit.lint.rules import EXAMPLES, LintFinding, rules
from bench.audit.lint.sum_rules import equal_sum
from bench.audit.lint.version_facts import UsedVersion
from bench.audit.monitor import TOLERANCE, judge, measure
from bench.audit.monitor_grid import Point, RateVerdict
from bench.backends.base import registry
from bench.errors import BAD, GOOD, WRONG, InputError
from bench.findings import Level
from tests.conftest import first

NEW = UsedVersion((0, 19, 8))
DATA = {"class_path": "my.Data", "init_args": {"batch_size": 2}}


def lightning(strategy: Any = "ddp", *, data: Any = DATA, **trainer: Any) -> dict[str, Any]:
    """A LightningCLI config of two ranks with N = 4, that logs each step."""
    base = {
        "strategy": strategy,
        "devices": 2,
        "accumulate_grad_batches": 4,
        "log_every_n_steps": 1,
    }
    return {
        "trainer": {key: value for key, value in (base | trainer).items() if value is not None},
        "data": data,
    }


def engine(**keys: Any) -> dict[str, Any]:
    """A DeepSpeed config that no rule finds fault with; a key of None is taken out."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    return {key: value for key, value in (base | keys).items() if value is not None}


def write(folder: Path, config: Any, name: str = "") -> Path:
    """The config as a file: a mapping with a Trainer is YAML, another JSON."""
    if "trainer" in config or "fit" in config:
        suffix, text = ".yaml", yaml.safe_dump(config)
    else:
        suffix, text = ".json", json.dumps(config, indent=2)
    path = folder / (name or f"config{suffix}")
    path.write_text(text)
    return path


def codes(findings: list[LintFinding]) -> list[str]:
    return [finding.code for finding in findings]


CORPUS = yaml.safe_load((Path(__file__).parent / "lint_corpus.yaml").read_text())
CASES: list[dict[str, Any]] = CORPUS["cases"]
CASES += [
    yaml.safe_load(f"{{finds: {[each.code, *each.also]}, {each.config}}}") for each in EXAMPLES
]


def findings_in(case: dict[str, Any], folder: Path) -> list[LintFinding]:
    """What lint finds in a case of the corpus."""
    if "named" in case:
        (folder / "ds.json").write_text(json.dumps(case["named"]))
    files = []
    for kind in KINDS:
        if kind in case:
            config = {
                key: value
                for key, value in (CORPUS["bases"][kind] | case[kind]).items()
                if value is not None
            }
            if kind == "lightning":
                config = {"trainer": config, "data": case.get("data", CORPUS["bases"]["data"])}
            files.append(folder / f"{kind}.{'json' if kind == 'deepspeed' else 'yaml'}")
            text = json.dumps(config) if kind == "deepspeed" else yaml.safe_dump(config)
            files[-1].write_text(text + case.get("text", {}).get(kind, ""))
    known = {name: case[name] for name in ("samples", "world_size", "batch_size") if name in case}
    return lint(
        files,
        LintOptions(deepspeed=used("deepspeed", case), lightning=used("lightning", case), **known),
    )


NEWEST = {"deepspeed": (0, 19, 8), "lightning": (2, 6, 6)}
KINDS = (
    "lightning",
    "deepspeed",
    "hugging_face",
    "accelerate",
    "torchtune",
    "axolotl",
    "nanotron",
    "litgpt",
)


def used(package: str, case: dict[str, Any]) -> UsedVersion:
    return UsedVersion(tuple(case.get(f"{package}_version", NEWEST[package])))


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{place}-{'-'.join(case['finds'])}" for place, case in enumerate(CASES)]
)
def test_corpus(tmp_path: Path, case: dict[str, Any]) -> None:
    """Nothing is missed, nothing is found that is not there, and the numbers are those of the measured runs."""
    findings = findings_in(case, tmp_path)
    assert sorted(codes(findings)) == sorted(case["finds"])
    texts = {each.code: f"{each.what}; {each.proof}" for each in findings}
    for code, words in case.get("says", {}).items():
        assert all(each in texts[code] for each in ([words] if isinstance(words, str) else words))


def test_corpus_has_every_rule() -> None:
    assert (
        {code for case in CASES for code in case["finds"]}
        == {each.code for each in EXAMPLES}
        == rules().keys()
    )
    kinds = {kind: [case["finds"] for case in CASES if kind in case] for kind in CORPUS["bases"]}
    assert (
        all(found.count([]) >= 8 for k, found in kinds.items() if k in KINDS[:4])
        and len(CASES) >= 280
    )


def test_findings_are_complete(tmp_path: Path) -> None:
    """Every finding has a place that is there, numbers, and a proof whose backends and options exist."""
    parser = cli._parser()
    for finding in [finding for case in CASES for finding in findings_in(case, tmp_path)]:
        assert finding.line >= 1 and finding.key and finding.file.startswith(str(tmp_path))
        assert finding.what and finding.fix and finding.proof
        assert not any(
            word in f"{finding.what} {finding.fix}" for word in ("None", "inf ", " nan ", "\n")
        )
        for backends in re.findall(r"--backend (\S+)", finding.proof):
            assert set(backends.split(",")) <= registry().keys()
        if finding.proof.startswith("python -m bench "):
            parser.parse_args(command_of(finding.proof))


def command_of(text: str) -> list[str]:
    assert text.startswith("python -m bench ")
    return text.partition(" (")[0].split()[3:]


def measured(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The points of a proof that is run for real, on the virtual clock."""
    assert command[0] == "throughput"
    capsys.readouterr()
    cli.main([*command, "--json"])
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


MEASURED = {"LOG01", "THR01", "THR02"}


@pytest.mark.torch
@pytest.mark.parametrize(
    "case", [case for case in CASES if MEASURED & {*case["finds"]} and "lightning" in case], ids=str
)
def test_proofs_of_the_monitor_show_their_findings(
    tmp_path: Path, case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    findings = {each.code: each for each in findings_in(case, tmp_path)}
    for code in MEASURED & findings.keys():
        command = command_of(findings[code].proof)
        if (
            command[0] == "semantics"
        ):  # Lightning above DeepSpeed counts no step; throughput trains without DeepSpeed
            assert re.search(r"trainer.global_step (is|grows by) 0", findings["WIN01"].what)
            continue
        (point,) = measured(command, capsys)
        if code == "LOG01":
            assert point["num_updates"] and point["verdict"] == "silent" and point["num_logs"] == 0
        elif code == "THR02":
            assert point["num_updates"] and point["num_rates_logged"] == 0
            assert point["verdict"] == (
                "silent" if "no step is logged" in findings[code].what else "unrated"
            )
        else:
            assert point["verdict"] in {"biased", "unsteady"} and point["ratio_min"] < 0.99


@pytest.mark.parametrize(
    ("window", "every", "samples", "advised"),
    [(10, 1, None, [9, 13]), (5, 5, 40, [11]), (21, 1, 40, [11])],
)
def test_advised_windows_are_measured_as_right(
    tmp_path: Path,
    window: int,
    every: int,
    samples: int | None,
    advised: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 40 samples, an epoch has 10 micro-batches per rank."""
    monitor = {"class_path": "ThroughputMonitor", "init_args": {"window_size": window}}
    config = {
        "callbacks": [monitor],
        "log_every_n_steps": every,
        "max_epochs": 2 if window == 21 else None,
    }
    findings = findings_in(
        {"lightning": config, **({"samples": samples} if samples else {})}, tmp_path
    )
    (finding,) = [each for each in findings if each.code in {"THR01", "THR02"}]
    sizes = re.match(r"set window_size to (\d+)(?: or (\d+))?", finding.fix)
    assert sizes and [int(size) for size in sizes.groups() if size] == advised
    length = "--micro-batches 10" if samples else "--epoch whole"
    numbers = f"--accumulate 4 --log-every {every} {length}"
    for point in measured(
        ["throughput", *numbers.split(), "--window-size", ",".join(map(str, advised))], capsys
    ):
        assert (
            point["verdict"] == "right"
            and point["ratio_min"] == pytest.approx(1) == point["ratio_max"]
        )


@pytest.mark.torch
@pytest.mark.parametrize(
    "sizes", first([(4, 10), (4, 3)], [(2, 5), (3, 7), (4, 10), (4, 8), (4, 3), (4, 1), (8, 27)])
)
def test_rates_are_counted_as_they_are_measured(sizes: tuple[int, int]) -> None:
    accumulate, num_batches = sizes
    for window in (2, 3, num_batches + 1, 17, 30, 31):
        for every in (1, 3):
            wanted = Rates(accumulate, num_batches, every).ratios(window)
            ratios = [
                r.ratio
                for r in measure(Point(accumulate, every, window, micro_batches=num_batches)).rates
            ]
            assert wanted is not None
            assert (wanted.low, wanted.high) == pytest.approx((min(ratios), max(ratios)))
            assert wanted.is_right == (judge(ratios) is RateVerdict.RIGHT)


@pytest.mark.torch
@settings(max_examples=50)
@given(
    accumulate=st.integers(2, 300),
    num_batches=st.integers(1, 3000),
    window=st.integers(2, 700),
    every=st.integers(1, 60),
)
def test_what_is_advised_and_shown(
    accumulate: int, num_batches: int, window: int, every: int
) -> None:
    rates = Rates(accumulate, num_batches, every, last=3000)
    for size in [*rates.right(window, math.inf), rates.safe, rates.safe + 7]:
        found = Rates(accumulate, num_batches, every).ratios(size)
        assert found is not None and found.is_right and 1 - found.limit <= TOLERANCE + 1e-12
        assert size >= rates.safe or found.low == pytest.approx(1)
    found = rates.ratios(window)
    if found is None or found.is_right:
        return
    small = rates.shortened(window)
    shown = small.ratios(window)
    assert shown is not None and not shown.is_right
    assert (
        math.prod(Point(small.accumulate, 1, window, micro_batches=small.num_batches).lengths)
        < 20_000
    )


def test_places(tmp_path: Path) -> None:
    """Keys and lines are those of the file, also of one that another names."""
    engine = tmp_path / "ds.json"
    engine.write_text(
        '{\n\t"gradient_clipping": 1.0,\n\t"zero_optimization": {\n\t\t"stage": 3}\n,\n'
        '"gradient_accumulation_steps": 4}'
    )
    path = tmp_path / "config.yaml"
    path.write_text(
        "# mine\ntrainer:\n  strategy:\n    class_path: DeepSpeedStrategy\n    init_args: {config: ds.json}\n"
        "  accumulate_grad_batches: 4\n  callbacks:\n  - class_path: x.Other\n  - class_path: ThroughputMonitor\n"
        "    dict_kwargs:\n      window_size: 10\n"
    )
    # The DeepSpeed config is read as part of the other, not as one without a micro-batch size.
    findings = lint([engine, path], LintOptions(deepspeed=NEW))
    places = [(each.code, Path(each.file).name, each.line, each.key) for each in findings]
    # Nothing else in the training matters before it starts.
    assert places == [("GAS01", "ds.json", 6, "gradient_accumulation_steps")]
    engine.write_text(engine.read_text().replace(',\n"gradient_accumulation_steps": 4', ""))
    findings = lint([engine, path], LintOptions(deepspeed=NEW))
    places = [(each.code, Path(each.file).name, each.line, each.key) for each in findings]
    assert places == [
        ("DBL02", "ds.json", 2, "gradient_clipping"),
        ("DBL01", "config.yaml", 3, "trainer.strategy"),
        ("THR01", "config.yaml", 11, "trainer.callbacks.1.dict_kwargs.window_size"),
    ]


def test_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log names its version and all rules, and has a place for every finding."""
    path, out = (
        write(tmp_path, lightning("deepspeed", fast_dev_run=True), "a config.yaml"),
        tmp_path / "lint.sarif",
    )
    assert cli.main(["lint", str(path), "--sarif", str(out), "--json"]) == BAD
    findings = json.loads(capsys.readouterr().out)
    log = json.loads(out.read_text())
    (run,) = log["runs"]
    listed = run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0" and [rule["id"] for rule in listed] == list(rules())
    assert len(run["results"]) == len(findings) == 2
    for result, finding in zip(run["results"], findings, strict=True):
        assert listed[result["ruleIndex"]]["id"] == result["ruleId"] == finding["code"]
        assert (
            result["level"] in {"error", "warning", "note"}
            and finding["what"] in result["message"]["text"]
        )
        (place,) = result["locations"]
        assert place["physicalLocation"]["region"] == {"startLine": finding["line"]}
        assert place["physicalLocation"]["artifactLocation"]["uri"] == path.as_uri()
    assert cli.main(["lint", str(path), "--sarif", str(tmp_path / "none" / "x")]) == WRONG
    assert "--sarif" in capsys.readouterr().err


class Read(dict[str, Any]):
    """A config that remembers the keys asked for."""

    asked: set[str]

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


@pytest.mark.torch
def test_known_keys_are_those_of_the_frameworks() -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from lightning.pytorch import Trainer
    from transformers import TrainingArguments

    def fields(model: Any) -> set[str]:
        return set(model.model_fields) | {
            each.alias for each in model.model_fields.values() if each.alias
        }

    names = {table: set(keys) for table, keys in known_keys().items()}
    assert names["trainer"] == set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert names["training_arguments"] == {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    assert names["zero_optimization"] == fields(DeepSpeedZeroConfig)
    assert names["bf16"] == fields(precision_config.DeepSpeedBF16Config)
    assert names["fp16"] == fields(precision_config.DeepSpeedFP16Config)
    config = Read(engine())
    config.asked = set()
    DeepSpeedConfig(config)
    assert config.asked <= names["deepspeed"]


@pytest.mark.torch
def test_equal_gradients_are_added_as_torch_adds_them() -> None:
    import torch

    for accumulate, (name, dtype) in itertools.product(
        (3, 48, 100, 257, 1000, 20_000), (("bf16", torch.bfloat16), ("fp16", torch.float16))
    ):
        total = torch.zeros((), dtype=dtype)
        for _ in range(accumulate):
            total += torch.tensor(1 / accumulate, dtype=torch.float64).to(dtype)
        assert equal_sum(accumulate, name) == total.item()


def test_a_finding_has_four_lines_whatever_the_key(tmp_path: Path) -> None:
    findings = findings_in({"deepspeed": {"gradient\r_clip\x1b[31mping": 1.0}}, tmp_path)
    assert findings and all(
        len(str(each).splitlines()) == 4 and str(each).replace("\n", "").isprintable()
        for each in findings
    )


def test_hint_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        write(tmp_path, lightning("deepspeed"), "one.yaml"),
        write(tmp_path, lightning(), "two.yaml"),
    )
    assert cli.main(["lint", str(first), str(second)]) == BAD
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("hint: --samples ")
    assert re.match(
        rf"{re.escape(str(first))}:\d+: error DBL01 trainer\.strategy: loss divided by N twice\n    what ",
        out,
    )
    assert "\n    fix: " in out and "\n    proof: python -m bench semantics " in out
    assert cli.main(["lint", str(first), "--json", "--samples", "32"]) == BAD
    out, err = capsys.readouterr()
    (finding,) = json.loads(out)
    assert (
        finding["code"] == "DBL01" and finding["level"] == "error" and finding["source"] and not err
    )


@pytest.mark.parametrize("case", CORPUS["refused"], ids=lambda case: case["refused"])
def test_wrong_values(tmp_path: Path, case: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=case["refused"]) as caught:
        findings_in(case, tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

MERGES = "n0: &n0 {k: 1}\n" + "".join(
    f"n{number}: &n{number} {{<<: [*n{number - 1}, *n{number - 1}]}}\n" for number in range(1, 50)
)

HOSTILE = [
    (
        "c.yaml",
        b"trainer: !!python/object/apply:os.system ['true']\n",
        r":1: is not plain YAML \(.*os.system",
    ),
    ("c.yaml", b"!!set {trainer}\n", r"has no keys"),
    ("c.yaml", b"trainer: {devices: 1\n", "is not plain YAML"),
    ("c.yaml", b"trainer: {devices: !!int two}\n", ":1: is not plain YAML"),
    ("c.yaml", b"trainer: {devices: " + b"9" * 5000 + b"}\n", "is not plain YAML"),
    ("c.yaml", b"[" * 30_000, "nested more than"),
    ("c.yaml", (BOMB + "trainer: {}\n").encode(), "with its aliases expanded"),
    ("c.yaml", (MERGES + "<<: *n49\n").encode(), "with its aliases expanded"),
    ("c.json", b"/* " * 300_000, "is empty"),
    ("c.json", b'"' + b'\\"' * 300_000, "is not JSON"),
    ("c.yaml", b"- trainer\n", "has no keys"),
    ("c.yaml", b"model: {}\n", "is of no kind that lint knows"),
    ("c.yaml", b"#" * (config_file.MAX_BYTES + 1), "is larger than 1024 KiB"),
    ("c.json", b"{}", "is of no kind that lint knows"),
    ("c.json", b'{"a": [1, 2', r":1: is not JSON, with or without comments"),
    ("c.json", b'{"a":' * 50_000, "nested more than"),
    ("c.toml", b"[training\nsteps = 1\n", "is not TOML"),
    ("c.toml", b"[training]\nsteps = 1\n", "is of no kind that lint knows"),
    ("c.sh", b"echo 'no end\n", "has no command that launches"),
    ("c.yaml", bytes(range(256)), "is not UTF-8 text"),
    ("c.ini", b"[a]", "is of no kind that lint knows"),
]


@pytest.mark.parametrize(("name", "content", "words"), HOSTILE)
def test_hostile_files(
    tmp_path: Path, name: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert cli.main(["lint", str(path)]) == WRONG
    out, err = capsys.readouterr()
    assert (
        not out and re.match(rf"bench: {re.escape(str(path))}:\d+: ", err) and err.count("\n") == 1
    )
    assert re.search(words, err), err


def test_a_bad_file_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder, all files are judged, links are not followed, and each bad file is one line."""
    write(tmp_path, lightning("deepspeed"), "good.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (50 << 20))
    (tmp_path / "binary.json").write_bytes(b"\x80\x81")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere.yaml").symlink_to(tmp_path / "nowhere.yaml")
    assert cli.main(["lint", str(tmp_path)]) == BAD
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines() if not line.startswith(" ")] == ["DBL01"]
    told = [line for line in err.splitlines() if line.startswith(("problem: ", "unknown: "))]
    assert len(told) == 3 and all(re.search(r"(large|binary|list)\.\w+:1: ", line) for line in told)
    (tmp_path / "good.yaml").unlink()
    assert cli.main(["lint", str(tmp_path)]) == WRONG
    empty = tmp_path / "empty"
    empty.mkdir()
    capsys.readouterr()
    assert cli.main(["lint", str(empty)]) == WRONG
    assert re.fullmatch(r"bench: .*empty: has no file .*\n", capsys.readouterr().err)
    other = write(tmp_path, {"model": {}}, "other.json")
    assert cli.main(["lint", str(other), str(tmp_path / "list.json")]) == GOOD
    assert cli.main(["lint", str(other)]) == WRONG


OTHERS = [
    "kind: Service\n---\nkind: Deployment\n",
    "e: !!python/name:a.b\n",
    "a: {{ .Values.a }}\n",
]


@pytest.mark.parametrize("text", OTHERS)
def test_yaml_for_other_programs_is_unknown_in_a_folder(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes the status 2 only where it is named itself."""
    good = write(tmp_path, lightning("ddp"), "good.yaml")
    other = tmp_path / "other.yaml"
    other.write_text(text)
    assert cli.main(["lint", str(tmp_path)]) == GOOD
    assert f"unknown: {other}:" in capsys.readouterr().err
    for named in ([other], [good, other]):
        assert cli.main(["lint", *map(str, named)]) == WRONG
        assert "is not plain YAML" in capsys.readouterr().err


def test_what_another_program_fills_in_is_no_approval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = write(tmp_path, CORPUS["bases"]["auto"] | {"bf16": {"enabled": True}}, "auto.json")
    assert cli.main(["lint", str(auto)]) == GOOD
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert (
        not out
        and "gradient_accumulation_steps" in line
        and "N > 1, gradients are added in bf16 (ACC01)" in line
    )


SCRIPT = """
#!/bin/bash
N=16
ARGS="--bf16 True \\
  --save_steps 10"
for GPUS in 4 8; do
torchrun --nproc_per_node=$GPUS train.py --deepspeed ds.json $ARGS \\
  --per_device_train_batch_size 1 \\
  --gradient_accumulation_steps $N --num_train_epochs 3 --max_steps $(expr 10 + 1) > log 2>&1
done
accelerate launch --num_processes 2 train_no_trainer.py --per_device_train_batch_size 1 --gradient_accumulation_steps 4
echo torchrun train.py --per_device_train_batch_size 1
"""


def test_commands_of_a_script(tmp_path: Path) -> None:
    """Variables that are set once are known; what a loop or a command makes is not."""
    (tmp_path / "ds.json").write_text(
        json.dumps(CORPUS["bases"]["auto"] | {"bf16": {"enabled": "auto"}})
    )
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    first, *_ = launch_script.commands(SCRIPT, str(path))
    values = first.arguments.value
    assert (
        values["gradient_accumulation_steps"] == 16
        and values["bf16"] is True
        and first.ranks is None
    )
    assert (
        first.arguments.at("max_steps").unknown
        and first.arguments.at("per_device_train_batch_size").line == 8
    )
    findings = lint([path], LintOptions(deepspeed=NEW))
    assert (
        codes(findings) == ["ACC01"]
        and "15 x 2^-9" in findings[0].what
        and findings[0].file.endswith("ds.json")
    )


BATCHES = "B=4 R=8\nN=$((128 / (B * R)))\n"
ARRAY = """
ARGS=(
  --bf16  # the dtype
  --note "two words"
)
ARGS+=(--n "$N")
"""
READ = [
    ("N=8\n{} --n $N", {"n": 8}),
    ("N=8; {} --n ${{N}} --b $N", {"n": 8, "b": 8}),
    ('export N="8"\n{} --n="$N" # --n 9', {"n": 8}),
    (BATCHES + "{} --n $N --m $[B*R]", {"n": 4, "m": 32}),
    (BATCHES + "{} --n $(( $B + ${{R}} ))", {"n": 12}),
    ('N=8\nA="--n $N \\\n --b 2"\n{} $A', {"n": 8, "b": 2}),
    ("N=2" + ARRAY + '{} "${{ARGS[@]}}"', {"bf16": True, "note": "two words", "n": 2}),
    ("L=(a b)\n{} --x ${{L[1]}} --all ${{L[@]}}", {"x": "b", "all": ["a", "b"]}),
    ("N=8\nN=16\n{} --n $N", {"n": 16}),
    ("if true; then N=8; {} --n $N; else N=4; fi", {"n": 8}),
    ("f() {{\n local N=8\n {} --n $N\n}}\nf", {"n": 8}),
    ("N=8\ncat > c.txt <<EOF\nN=9\nit's $N\nEOF\n{} --n $N", {"n": 8}),
    ("N=8\nbash <<EOF\n{} --n $N\nEOF", {"n": 8}),
    ('N=8\neval "{} --n $N"', {"n": 8}),
    ("function f {{\n local N=8\n {} --n $N\n}}\nf", {"n": 8}),
    ("N=8\n(N=4)\n{} --n $N", {"n": 8}),
    ("(N=4; case $N in 4) N=8;; esac; true)\nN=2\n({} --n $N)", {"n": 2}),
    ("N=8\nsource env/bin/activate\n{} --n $N", {"n": 8}),
    ("{} --a 1 \\\n  # --b 2 \\\n  --n 3\n", {"a": 1}),  # the comment ends the command
    ("{} --n 8 2>&1 | tee log; true", {"n": 8}),
]
"""Scripts around a command, and the options with which a shell starts it."""
LAUNCH = "torchrun --nproc_per_node 2 train.py"


@pytest.mark.parametrize(("text", "values"), READ)
def test_a_script_is_read_as_bash_runs_it(
    tmp_path: Path, text: str, values: dict[str, object]
) -> None:
    """Bash itself starts a torchrun that keeps its words: they are the ones that lint reads."""
    script = text.format(LAUNCH)
    (command,) = launch_script.commands(script, "train.sh")
    assert command.arguments.value == values and command.ranks == 2
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > words\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, check=False, capture_output=True
    )
    words = (tmp_path / "words").read_text().split("\0")[3:-1]
    line = "train() { :; }\n" + LAUNCH + " " + shlex.join(words)
    (again,) = launch_script.commands(line, "train.sh")
    assert again.arguments.value == values


@pytest.mark.parametrize(
    ("option", "found"),
    [("--max_step 50", []), ("--max_stps 50", ["KEY02"]), ("--gradient_accumulation_step 8", [])],
)
def test_the_beginning_of_an_option_is_the_option(
    tmp_path: Path, option: str, found: list[str]
) -> None:
    """argparse takes it where no other option begins so; a YAML file has no such rule."""
    path = tmp_path / "train.sh"
    path.write_text(
        "torchrun train.py --output_dir o --per_device_train_batch_size 1 --logging_steps 1 "
        f"--learning_rate 1e-4 {option}\n"
    )
    assert codes(lint([path], LintOptions(deepspeed=NEW))) == found


def test_what_stops_lint_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command in place of a file; a script whose program could be any."""
    path = tmp_path / "train.sh"
    path.write_text("\naccelerate launch train.py --gradient_accumulation_steps $N\n")
    wrong = {"accelerate": "put it into one", f"{path}": "line 2 launches a training"}
    for name, says in wrong.items():
        assert cli.main(["lint", name]) == WRONG
        assert says in capsys.readouterr().err


UNTOLD = [
    "{} --n $N",
    '{} --n "${{N:-8}}"',
    "N=${{N:-8}}\n{} --n $N",
    "{} --n $1",
    "{} --n $(nproc)",
    "{} --n `cat n`",
    "{} --n $((N * 2))",
    "{} --n ${{#LIST[@]}}",
    "{} --n ${{!NAME}}",
    "N=8\nif [ $1 ]; then N=4; fi\n{} --n $N",
    "N=8\n[ $1 ] && N=4\n{} --n $N",
    "N=8\ncase $1 in --n) N=$2;; *) ;; esac\n{} --n $N",
    "N=8\nwhile read N; do {} --n $N; done",
    "for N in 4 8; do {} --n $N; done",
    "N=8\nf() {{ {} --n $N; }}\nf\nN=4\nf",
    "N=8 {} --n $M",
    "N=8\n((N++))\n{} --n $N",
    "N=8\n{} --n '$N'",
    "source settings\n{} --n $N",
    "N=8\nsource settings\n{} --n $N",
    "N=8\n[ -f settings ] && . settings\n{} --n $N",
    "( N=8 )\n{} --n $N",
    "N=8\nfunction f {{ {} --n $N; }}\nf\nN=4\nf",
    "{} --n <N>",
]


@pytest.mark.parametrize("text", UNTOLD)
def test_what_a_script_does_not_say_is_not_known(text: str) -> None:
    (command,) = launch_script.commands(text.format("torchrun train.py"), "train.sh")
    assert command.arguments.at("n").unknown and not command.has_unknown_options


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("--num_gpus 2", 2),
        ("--num_gpus 2 --num_nodes 3", 6),
        ("--hostfile hosts --num_gpus 2", None),
        ("-H hosts --num_gpus 2", None),
        ("--hostfile hosts --num_gpus 2 --num_nodes 3", 6),
        ("--include localhost:0,2,3", 3),
        ("-i localhost:0,2,3", 3),
        ("--include localhost", None),
        ("--include one@two:0,1", None),
        ("--include one:0@two:0,1", None),
        ("--include localhost:$GPUS", None),
    ],
)
def test_ranks_of_the_deepspeed_launcher(options: str, ranks: int | None) -> None:
    """GPUs are counted on each host, and a host without a list has all of its own."""
    (command,) = launch_script.commands(f"deepspeed {options} train.py --n 1", "train.sh")
    assert command.ranks == ranks


ENDLESS = [
    "A=aaaaaaaa\n" + "A=$A$A\n" * 50,
    "L=(a b c d)\n" + 'L=("${L[@]}" "${L[@]}")\n' * 50,
    "A=(" * 5000,
    "eval " * 5000,
    'A=\'eval "$A"; eval "$A"; # ' + "x" * 40_000 + '\'\neval "$A"',
    "{ " * 5000,
    "( " * 5000,
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_a_script_that_grows_is_read_as_far_as_people_write(text: str) -> None:
    assert len(launch_script.commands(f"{text}\n{LAUNCH} --n 8\n", "train.sh")) <= 1


TRAINER = "deepspeed --num_gpus 2 train.py --per_device_train_batch_size 1 --logging_steps 9 --bf16"


@pytest.mark.parametrize(
    ("options", "config", "found"),
    [
        ("--gradient_accumulation_steps 8", {}, ["ACC01"]),
        ("--gradient_accumulation_steps $N", {}, []),
        ("--gradient_accumulation_steps $N --max_steps 5", {}, ["LOG01"]),  # the rest is linted
        ("", {"gradient_clipping": 0.5}, ["MIS01"]),
        ("$EXTRA", {"gradient_clipping": 0.5}, []),  # it may have --max_grad_norm
        ('"$@"', {"gradient_clipping": 0.5}, []),
        ('--tf32 "${ARGS[@]}"', {"gradient_clipping": 0.5}, []),
        ("--do_train $MORE_ARGS", {"gradient_clipping": 0.5}, []),
        ("--max_steps 5 $EXTRA", {}, []),  # and --logging_first_step
    ],
)
def test_nothing_is_accused_because_of_what_is_not_known(
    tmp_path: Path, options: str, config: dict[str, object], found: list[str]
) -> None:
    base = CORPUS["bases"]["auto"] | {"bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(base | config))
    path = tmp_path / "train.sh"
    path.write_text(f"{TRAINER} --deepspeed ds.json {options}\n")
    assert codes(lint([path], LintOptions(deepspeed=NEW))) == found


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "per_device_train_batch_size"])
def test_an_unknown_batch_makes_no_steps(tmp_path: Path, key: str) -> None:
    """The default of a value that the script gets from elsewhere is not its value."""
    given = {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "64"}
    path = tmp_path / "train.sh"
    options = LintOptions(deepspeed=NEW, samples=640, world_size=2)
    for value, is_found in ((given[key], True), ("$X", False)):
        words = " ".join(f"--{name} {text}" for name, text in {**given, key: value}.items())
        path.write_text(f"torchrun train.py {words} --num_train_epochs 1 --logging_steps 99\n")
        assert ("LOG01" in codes(lint([path], options))) is is_found


SWIFT = """
swift {command} --model Qwen/Qwen3-8B {options} --dataset 'AI-ModelScope/alpaca#500' \\
  --torch_dtype bfloat16 --learning_rate 1e-5 --save_total_limit 2 --load_from_cache_file true
"""


@pytest.mark.parametrize(
    ("command", "options", "found"),
    [
        ("sft", "--tuner_type full --gradient_accumulation_steps 16", ["ACC01"]),
        ("sft", "--train_type full --gradient_accumulation_steps 16", ["ACC01"]),
        ("pt", "--sft_type full --gradient_accumulation_steps 16", ["ACC01"]),
        ("sft", "--tuner_type full", []),  # N is what makes 16 samples of all ranks
        ("sft", "--gradient_accumulation_steps 16", []),  # LoRA
        ("rlhf", "--rlhf_type dpo --max_steps 9 --num_train_epochs 1", ["STP04"]),
        ("sft", "--max_steps 4", []),  # the first step is logged, and then each fifth
    ],
)
def test_ms_swift_has_defaults_of_its_own(
    tmp_path: Path, command: str, options: str, found: list[str]
) -> None:
    """swift/trainers/arguments.py and swift/arguments/sft_args.py of ms-swift."""
    path = tmp_path / "train.sh"
    path.write_text(SWIFT.format(command=command, options=f"{options} --dataset_num_proc 4"))
    for samples in (None, 64):
        options_of_lint = LintOptions(deepspeed=NEW, samples=samples, world_size=2)
        assert codes(lint([path], options_of_lint)) == found


@pytest.mark.parametrize("key", ["packing: true", "num_generations: 8", "max_epochs: 1"])
def test_an_epoch_of_other_samples_is_not_counted(tmp_path: Path, key: str) -> None:
    """With packed samples, or several of each prompt, --samples says nothing on the steps."""
    path = tmp_path / "config.yaml"
    text = "per_device_train_batch_size: 8\ngradient_accumulation_steps: 8\nwarmup_steps: 100\n"
    for also, found in (("", ["LOG01", "STP05"]), (key, [])):
        path.write_text(f"{text}num_train_epochs: 1\n{also}\n")
        options = LintOptions(deepspeed=NEW, samples=640, world_size=1)
        assert codes(lint([path], options)) == found


@pytest.mark.parametrize(
    ("name", "key", "found"),
    [
        ("config.json", "", ["LOG01", "MIS01"]),
        ("config.json", "num_generations", []),
        ("config.yaml", "completion_only_loss", []),
    ],
)
def test_defaults_are_unknown_where_trl_may_set_them(
    tmp_path: Path, name: str, key: str, found: list[str]
) -> None:
    """TRL's arguments have logging_steps 10, and bf16 unless there is fp16."""
    config = CORPUS["bases"]["hugging_face"] | {"max_steps": 50}
    if key:
        config |= {key: 8}
    bf16 = CORPUS["bases"]["auto"] | {"bf16": {"enabled": True}}
    codes_found = []
    for deepspeed in ({}, {"deepspeed": bf16}):
        path = tmp_path / name
        path.write_text(json.dumps(config | deepspeed))
        codes_found += codes(lint([path], LintOptions(deepspeed=NEW)))
    assert sorted({*codes_found} - {"ACC01"}) == found


def test_a_command_that_leaves_n_to_accelerate_is_not_refused(tmp_path: Path) -> None:
    """Its program may be another than the Trainer; one that gives another N is refused."""
    config = CORPUS["bases"]["accelerate"] | {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 8},
    }
    (tmp_path / "ds.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "train.sh"
    command = "accelerate launch --config_file ds.yaml main.py --per_device_train_batch_size 2"
    for options, is_refused in (("", False), (" --gradient_accumulation_steps 4", True)):
        path.write_text(f"{command} --do_train --num_train_epochs 2{options}\n")
        found = codes(lint([path], LintOptions(deepspeed=NEW)))
        assert ("MIS01" in found) is is_refused


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ({"optimizer": {"type": "Adam"}, "train_batch_size": 16}, Level.WARNING),
        ({"optimizer": {"type": "Adam"}}, Level.NOTE),  # Lightning and the Trainer give a batch
        ({"train_batch_size": 16}, Level.NOTE),
    ],
)
def test_clipping_that_another_program_may_set_is_a_note(
    tmp_path: Path, keys: dict[str, Any], level: Level
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | keys))
    found = lint([path], LintOptions(deepspeed=NEW))
    assert [each.level for each in found if each.code == "CLP01"] == [level]


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ({"optimizer": {"type": "Adam"}}, Level.WARNING),
        ({"optimizer": {"type": "Adam"}, "train_batch_size": "auto"}, Level.NOTE),
        ({}, Level.NOTE),
    ],
)
def test_sums_of_a_config_that_a_program_completes_are_a_note(
    tmp_path: Path, keys: dict[str, Any], level: Level
) -> None:
    """A program that brings the optimizer, or fills in 'auto', may set N and the dtype too."""
    path = tmp_path / "ds.json"
    config = {"gradient_accumulation_steps": 4, "bf16": {"enabled": True}, "gradient_clipping": 1}
    path.write_text(json.dumps(config | keys))
    found = lint([path], LintOptions(deepspeed=NEW))
    assert [each.level for each in found if each.code == "ACC01"] == [level]


OF_TRAINER = "--per_device_train_batch_size 2 --save_steps 9 --gradient_accumulation_steps 4"


def levels_of(code: str, path: Path) -> list[Level]:
    return [each.level for each in lint([path], LintOptions(deepspeed=NEW)) if each.code == code]


@pytest.mark.parametrize(
    ("command", "level"),
    [
        ("python run_clm.py --torch_dtype bfloat16", Level.WARNING),
        ("torchrun examples/run_clm.py --torch_dtype bfloat16", Level.WARNING),
        ("python my_run_clm.py --torch_dtype bfloat16", Level.NOTE),
        ("python train.py --torch_dtype bfloat16", Level.NOTE),
        ("swift sft --model m --train_type full --torch_dtype bfloat16", Level.WARNING),
        ("llamafactory-cli train --finetuning_type full --pure_bf16 true", Level.WARNING),
    ],
)
def test_an_option_that_only_the_program_knows_is_a_note(
    tmp_path: Path, command: str, level: Level
) -> None:
    """TrainingArguments has no torch_dtype, so some programs read it and load the model otherwise."""
    path = tmp_path / "train.sh"
    path.write_text(f"{command} {OF_TRAINER}\n")
    assert levels_of("ACC01", path) == [level]


def test_an_option_that_only_the_program_knows_is_a_note_in_a_config(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    config = CORPUS["bases"]["hugging_face"] | {"torch_dtype": "bfloat16", "num_train_epochs": 1}
    path.write_text(yaml.safe_dump(config))
    assert levels_of("ACC01", path) == [Level.NOTE]


STAGE_2 = "accelerate launch --use_deepspeed --zero_stage 2 --mixed_precision bf16"


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        (f"{STAGE_2} train.py {OF_TRAINER} --bf16 True", ["ACC01"]),
        (f"{STAGE_2} --gradient_accumulation_steps 4 train.py {OF_TRAINER} --bf16", ["ACC01"]),
        (f"{STAGE_2} --gradient_accumulation_steps 8 train.py {OF_TRAINER} --bf16", ["MIS01"]),
        (f"accelerate launch --mixed_precision bf16 train.py {OF_TRAINER} --bf16 True", []),
        (
            "accelerate launch --config_file n8.yaml --gradient_accumulation_steps 4 train.py "
            f"{OF_TRAINER} --bf16",
            ["ACC01"],
        ),
        (f"accelerate launch --config_file n8.yaml train.py {OF_TRAINER} --bf16", ["MIS01"]),
        (
            f"accelerate launch --config_file n8.yaml --use_fsdp train.py {OF_TRAINER} --bf16",
            ["MEM01"],
        ),
    ],
)
def test_options_of_accelerate_launch_overrule_its_config(
    tmp_path: Path, launch: str, found: list[str]
) -> None:
    """A config on the user's machine may say what they leave out, such as the kind of training."""
    config = CORPUS["bases"]["accelerate"] | {
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 8}
    }
    (tmp_path / "n8.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "train.sh"
    path.write_text(f"{launch}\n")
    assert codes(lint([path], LintOptions(deepspeed=NEW))) == found


@pytest.mark.parametrize(
    ("own", "level"), [("pipe_parallel_size: 1\n", Level.WARNING), ("", Level.NOTE)]
)
def test_keys_of_deepspeed_in_yaml_are_of_a_program_that_is_not_known(
    tmp_path: Path, own: str, level: Level
) -> None:
    """GPT-NeoX has such a config with keys of its own."""
    path = tmp_path / "config.yml"
    path.write_text(
        f"{own}train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\n"
        "zero_optimization: {stage: 1}\nprecision: bfloat16\nbf16: {enabled: true}\n"
    )
    assert levels_of("ACC01", path) == [level]


@pytest.mark.parametrize(
    ("key", "found"),
    [("new_config: {enabled: true}", []), ("new_config: 1", ["KEY01"]), ("new: {a: 1}", ["KEY01"])],
)
def test_a_part_that_a_fork_of_accelerate_adds_is_not_refused(
    tmp_path: Path, key: str, found: list[str]
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 1\n{key}\n"
    )
    assert codes(lint([path], LintOptions(deepspeed=NEW))) == found


def test_a_script_may_go_to_the_folder_of_its_deepspeed_config(tmp_path: Path) -> None:
    config = CORPUS["bases"]["auto"] | {"bf16": {"enabled": True}}
    for folder, dtype in (("", "fp32"), ("inner", "bf16")):
        place = tmp_path / folder / "ds.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(config | {"data_types": {"grad_accum_dtype": dtype}}))
    path = tmp_path / "tools" / "train.sh"
    path.parent.mkdir()
    command = f"torchrun train.py --deepspeed ds.json --bf16 True {OF_TRAINER}\n"
    for before, found in (
        ("", []),
        ("cd /home/me/repo/inner\n", ["ACC01"]),
        ("cd inner && ", ["ACC01"]),
        ("cd /home/me/repo\ncd inner\n", ["ACC01"]),
        ("cd inner\ncd $HOME\n", []),
        ("cd /home/me/repo\n", []),
        ("cd $(dirname $0)/..\n", []),
    ):
        path.write_text(before + command)
        assert codes(lint([path], LintOptions(deepspeed=NEW))) == found


def test_a_wrong_config_of_accelerate_beside_options_is_refused(tmp_path: Path) -> None:
    config = CORPUS["bases"]["accelerate"] | {"deepspeed_config": "ds.json"}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "train.sh"
    launch = "accelerate launch --config_file wrong.yaml --zero_stage 2 train.py"
    path.write_text(f"{launch} {OF_TRAINER}\n")
    with pytest.raises(InputError, match=r"deepspeed_config is 'ds\.json'; it must be a mapping"):
        lint([path], LintOptions(deepspeed=NEW))


def test_a_launch_without_a_known_program_is_a_note(tmp_path: Path) -> None:
    """A program that never calls accumulate() steps after each micro-batch."""
    path = tmp_path / "accelerate.yaml"
    config = CORPUS["bases"]["accelerate"] | {
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4},
    }
    path.write_text(yaml.safe_dump(config))
    assert levels_of("ACC01", path) == [Level.NOTE]


@pytest.mark.parametrize(("gpus", "found"), [("gpus: 2, ", ["KEY04"]), ("", ["DBL01"])])
def test_an_argument_that_is_refused_is_all_that_is_said(
    tmp_path: Path, gpus: str, found: list[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"trainer: {{{gpus}accumulate_grad_batches: 4, strategy: deepspeed_stage_2, "
        "max_steps: 9, log_every_n_steps: 1}\n"
    )
    options = LintOptions(deepspeed=NEW, lightning=UsedVersion(NEWEST["lightning"]))
    assert codes(lint([path], options)) == found


TRAINER_HERE = "accumulate_grad_batches: 4, max_steps: 9, log_every_n_steps: 1, mine: 2"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"seed_everything: 1\ntrainer: {{{TRAINER_HERE}}}\n", ["KEY01"]),
        (f"ckpt_path: null\ntrainer: {{{TRAINER_HERE}}}\n", []),
        (
            "seed_everything: 1\ntrainer: {class_path: lightning.Trainer, init_args: {"
            f"strategy: deepspeed_stage_2, {TRAINER_HERE}}}}}\n",
            ["DBL01"],
        ),
        (
            "seed_everything: 1\ntrainer: {_target_: lightning.Trainer, _recursive_: false, "
            f"{TRAINER_HERE}}}\n",
            [],
        ),
    ],
)
def test_only_lightning_cli_refuses_keys(tmp_path: Path, text: str, found: list[str]) -> None:
    """Its Trainer is no class_path, and no call of Hydra's."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    options = LintOptions(deepspeed=NEW, lightning=UsedVersion(NEWEST["lightning"]))
    assert codes(lint([path], options)) == found


def test_a_list_of_lightning_cli_may_be_added_to(tmp_path: Path) -> None:
    """jsonargparse reads callbacks+ in a config as it does on the command line."""
    path = tmp_path / "config.yaml"
    start = "seed_everything: 1\ntrainer:\n  max_steps: 9\n  log_every_n_steps: 1\n  accelerator: cpu\n  "
    schedule = (
        "{class_path: GradientAccumulationScheduler, init_args: {scheduling: {'0': 1, '4': 8}}}"
    )
    bar = "{class_path: TQDMProgressBar}"
    for added, found in (
        (f"callbacks+: [{bar}]", []),
        (f"callback+: [{bar}]", ["KEY01"]),
        (f"callbacks+: [{schedule}]", ["SCH03"]),
        (f"callbacks: [{schedule}]\n  callbacks+: [{bar}]", []),
    ):
        path.write_text(f"{start}{added}\n")
        assert codes(lint([path], LintOptions(lightning=UsedVersion(NEWEST["lightning"])))) == found


def test_json_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """Comments, trailing commas and placeholders, as hjson has them; a key given twice is refused."""
    hjson = pytest.importorskip("hjson")
    text = '{\n  // one\n  "a": 1, # two\n  /* three\n */ "b": {"c": "// no comment", "d": [1, 2,],},\n}\n'
    part = config_file._json(text, "c.json")
    assert part.values == json.loads(json.dumps(hjson.loads(text))) and part.lines["b", "c"] == 5
    path = tmp_path / "ds.json"
    engine = (
        '"train_batch_size": GBS, "optimizer": {}, "zero_optimization": {}, '
        '"bf16": {"enabled": true},\n"bf16": {}'
    )
    for text, words, level in (
        (f"{{{engine}}}", "DeepSpeed raises ValueError", "error"),
        (f'{{{engine}, "scheduler": {{"params": {{"lr": "auto"}}}}}}', "is what counts", "warning"),
    ):
        path.write_text(text)
        findings = lint([path], LintOptions(deepspeed=NEW))
        (finding,) = [each for each in findings if each.code == "KEY03"]
        assert (finding.line, str(finding.level)) == (2, level) and words in finding.what


def test_a_key_given_twice_is_not_refused_where_deepspeed_does_not_read_the_file(
    tmp_path: Path,
) -> None:
    """Accelerate reads a DeepSpeed config with json.load, and YAML gives DeepSpeed a dictionary."""
    config = CORPUS["bases"]["auto"]
    (tmp_path / "ds.json").write_text(json.dumps(config)[:-1] + ', "gradient_clipping": "auto"}')
    for deepspeed, keys in (
        ("ds.json", ["gradient_clipping"]),
        (json.dumps(config), ["gradient_accumulation_steps"]),
    ):
        path = tmp_path / "config.yaml"
        twice = "gradient_accumulation_steps: 4\n" * (1 + (deepspeed != "ds.json"))
        path.write_text(f"per_device_train_batch_size: 4\n{twice}deepspeed: {deepspeed}\n")
        findings = lint([path], LintOptions(deepspeed=NEW))
        assert [(each.code, each.key) for each in findings] == [("KEY03", key) for key in keys]
        assert not [each for each in findings if each.level is Level.ERROR]


def test_the_last_of_repeated_keys_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer: {accumulate_grad_batches: 2, strategy: deepspeed, devices: 1,\n devices: 2, strategy: ddp}\n"
    )
    findings = lint([path], LintOptions(deepspeed=NEW))
    assert [(each.code, each.line, each.key) for each in findings] == [
        ("KEY03", 2, "trainer.devices"),
        ("KEY03", 2, "trainer.strategy"),
    ]


HYDRA = """
callbacks:
  monitor: {_target_: lightning.pytorch.callbacks.ThroughputMonitor, window_size: 10}
  schedule: {_target_: lightning.pytorch.callbacks.GradientAccumulationScheduler, scheduling: {0: 4}}
data: {_target_: mine.Data, batch_size: 64}
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  accumulate_grad_batches: 4
  max_epochs: 10
  devices: 2
"""


def test_hydra_gives_the_trainer_the_callbacks_beside_it(tmp_path: Path) -> None:
    """The composed config of a program that calls the Trainer with the callbacks that it made."""
    file = tmp_path / "composed.yaml"
    file.write_text(HYDRA)
    (finding,) = lint([file], LintOptions(samples=55_000))
    assert (finding.code, finding.key, finding.line) == ("SCH02", "callbacks.schedule", 4)
    file.write_text(re.sub("  schedule.*\n", "", HYDRA))
    found = {each.code: each.key for each in lint([file], LintOptions(samples=55_000))}
    assert found["THR01"] == "callbacks.monitor.window_size" and "TAIL01" in found


def test_parts_that_hydra_composes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer").mkdir()
    part = tmp_path / "trainer" / "ddp.yaml"
    part.write_text("defaults: [default]\nstrategy: ddp\ndevices: 4\nsync_batchnorm: true\n")
    top = tmp_path / "train.yaml"
    top.write_text("defaults: [_self_, trainer: ddp]\nseed: 1\n")
    how = "lint the YAML that the program prints with --cfg job --resolve"
    assert cli.main(["lint", str(tmp_path)]) == GOOD
    err = capsys.readouterr().err
    assert f"hint: Hydra composes {top} and 1 more file with others: {how}" in err
    assert cli.main(["lint", str(top)]) == WRONG
    assert f"of no kind that lint knows; Hydra composes {top} with others: {how}\n" in (
        capsys.readouterr().err
    )


NOT_JUDGED = [
    (
        "template: t\ncutoff_len: 8\nflash_attn: fa2\nmax_steps: 10\ndist_config: {name: fsdp2}\n",
        "llama-factory-1.yaml",
    ),
    ("trainer: {total_epochs: 15, n_gpus_per_node: 8, nnodes: 1, logger: [console]}", "rl.yaml"),
    (
        '{"train_batch_size": 2, "gradient_accumulation_steps": 4, "mixed_precision": "bf16"}',
        "diffusion.json",
    ),
    (
        "gradient_accumulation_steps: 4\nadam_betas: [0.9, 0.9]\nnum_train_epochs: 3\nlearning_rate: 0.1\n",
        "dpr.yaml",
    ),
    (
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nmax_train_steps: 9\n",
        "no_trainer.yaml",
    ),
    (
        "defaults: [base]\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n",
        "hydra.yaml",
    ),
    (
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nclip_grad_norm: 1.0\n",
        "own_trainer.yaml",
    ),
    (
        "per_device_train_batch_size: {value: 2}\ngradient_accumulation_steps: {value: 4}\n",
        "wandb.yaml",
    ),
    ("batch_size: 2\ngradient_accumulation_steps: 16\ndtype: bf16\n", "mine.yaml"),
]


@pytest.mark.parametrize(("text", "name"), NOT_JUDGED, ids=[name for _, name in NOT_JUDGED])
def test_other_programs_are_not_judged(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="is of no kind that lint knows"):
        lint([tmp_path / name], LintOptions(deepspeed=NEW))


LIGHT = """
import sys

BLOCKED = {"torch", "deepspeed", "lightning", "transformers", "accelerate", "pandas", "hjson"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
from bench import cli
sys.exit(cli.main(["lint", *sys.argv[1:]]))
"""


def test_lint_needs_no_framework(tmp_path: Path) -> None:
    """Where neither torch nor a framework is installed, lint finds the same."""
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(
        json.dumps(CORPUS["bases"]["auto"] | {"bf16": {"enabled": "auto"}})
    )
    write(tmp_path, lightning("deepspeed", callbacks=["ThroughputMonitor"]), "config.yaml")
    command = [sys.executable, "-c", LIGHT, "--samples", "40", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == BAD and "Traceback" not in done.stderr
    assert {"ACC01", "DBL01", "TAIL03"} <= {*re.findall(r"\b[A-Z]{3,4}\d\d\b", done.stdout)}


def test_versions_are_those_of_the_advisories() -> None:
    """A rule asks an advisory for the versions of its defect, and nothing else says them again."""
    known = {advisory.id for advisory in advisories.load()}
    asked = {rule.advisory for rule in rules().values()} - {""}
    assert len(asked) == 5 and asked <= known
    facts = version_facts._tables()["facts"]
    assert all(
        fact["source"] and fact["package"] in version_facts.PACKAGES for fact in facts.values()
    )


@pytest.mark.parametrize(
    ("name", "number", "is_bad"),
    [
        ("deepspeed-zero2-last-only", (0, 17, 6), True),
        ("deepspeed-zero2-last-only", (0, 18, 3), False),
        ("deepspeed-silent-clipping", (0, 19, 2), False),
        ("deepspeed-silent-clipping", (0, 20), True),
        ("deepspeed-zero2-bf16-sum", (0, 20), False),
        ("lightning-throughput-log-every", (2, 2), True),
        ("lightning-throughput-log-every", (2, 1, 4), False),
        ("lightning-deepspeed-divides-twice", (2, 1, 4), True),
        ("lightning-deepspeed-divides-twice", (2, 0, 9), False),
    ],
)
def test_a_defect_that_no_version_has_mended_is_in_newer_ones_too(
    name: str, number: version_facts.Version, is_bad: bool
) -> None:
    assert version_facts.is_known_bad(name, UsedVersion(number)) is is_bad


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base\n  accumulate_grad_batches: 4\n  devices: 1\n"
        "trainer:\n  <<: *base\n  strategy: deepspeed\n  devices: 2\n"
    )
    (finding,) = lint([path], LintOptions(deepspeed=NEW))
    assert finding.code == "DBL01" and "1/16" in finding.what and finding.line == 6


SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 12),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["auto", "value", "norm", "bf16-mixed", "fp32", "0,1", "2", "1e-1", "", "deepspeed_stage_3"]
    ),
    st.text(max_size=4),
)


@settings(max_examples=200)
@given(
    value=st.recursive(
        SMALL,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
    )
)
def test_json_lines(value: Any) -> None:
    """Each key of a JSON text has the line where it stands, whatever the strings around it are."""
    text = json.dumps({"top": value, 'a"b,{[': 1}, indent=1)
    part = config_file._json(text, "c.json")
    values, lines = part.values, part.lines
    assert repr(values) == repr(json.loads(text))
    content = text.split("\n")

    def walk(here: Any, path: tuple[str, ...]) -> None:
        if path and isinstance(path[-1], str):
            assert path in lines
        if isinstance(here, dict):
            for key, inner in here.items():
                assert json.dumps(key) in content[lines[(*path, key)] - 1]
                walk(inner, (*path, key))
        elif isinstance(here, list):
            for index, inner in enumerate(here):
                walk(inner, (*path, str(index)))

    walk(json.loads(text), ())
