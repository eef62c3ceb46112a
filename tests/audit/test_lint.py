"""Lint: for every rule a config that it finds and one that it lets pass, and what hostile input meets."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import cli
from bench.audit.lint import config_file, lint
from bench.audit.lint.arithmetic import num_lost, windows_of
from bench.audit.lint.known import Options
from bench.audit.lint.logging_rules import LONGEST
from bench.audit.lint.rates import Rates
from bench.audit.lint.rules import RULES, LintFinding
from bench.audit.monitor import TOLERANCE, judge, measure
from bench.audit.monitor_grid import Point, RateVerdict
from bench.backends.base import registry
from bench.errors import BAD, WRONG
from tests.conftest import first

NEW = (0, 19, 8)
DATA = {"class_path": "my.Data", "init_args": {"batch_size": 2}}
ZERO = "deepspeed_stage_{}"


def lightning(strategy: Any = "ddp", *, data: Any = DATA, **trainer: Any) -> dict[str, Any]:
    """A LightningCLI config of two ranks with N = 4, that logs each step."""
    base = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 4, "log_every_n_steps": 1}
    return {"trainer": {key: value for key, value in (base | trainer).items() if value is not None}, "data": data}


def strategy(config: Any, **arguments: Any) -> dict[str, Any]:
    return {
        "class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
        "init_args": {"config": config, **arguments},
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


def monitor(window: int | None = None) -> dict[str, Any]:
    arguments = {"batch_size_fn": "my.size"} | ({} if window is None else {"window_size": window})
    return {"class_path": "lightning.pytorch.callbacks.ThroughputMonitor", "init_args": arguments}


def schedule(factors: Any) -> dict[str, Any]:
    name = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    return {"class_path": name, "init_args": {"scheduling": factors}}


def write(folder: Path, config: Any, name: str = "") -> Path:
    """The config as a file: a mapping with a Trainer is YAML, another JSON."""
    if "trainer" in config or "fit" in config:
        suffix, text = ".yaml", yaml.safe_dump(config)
    else:
        suffix, text = ".json", json.dumps(config, indent=2)
    path = folder / (name or f"config{suffix}")
    path.write_text(text)
    return path


def found(folder: Path, config: Any, **options: Any) -> list[LintFinding]:
    options = {"deepspeed": NEW, "lightning": (2, 6, 6)} | options
    return lint([write(folder, config)], Options(**options))


def codes(findings: list[LintFinding]) -> list[str]:
    return [finding.code for finding in findings]


FP32 = {"grad_accum_dtype": "fp32"}
ON = {"enabled": True}
TWO_RANKS = {"world_size": 2}
"""Options of a DeepSpeed config, which does not say how many ranks there are."""
TEN = {"samples": 40}
"""10 micro-batches per rank of 2 samples each on 2 ranks."""
EIGHT = {"samples": 32}

# code; what triggers it; what does not, which differs in one thing; the options of both, or of each.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "ACC01": [
        (engine(bf16=ON), engine(bf16=ON, data_types=FP32)),
        (engine(bf16=ON), engine(bf16=ON, gradient_accumulation_steps=1)),
    ],
    "ACC02": [
        (
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 0}),
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 1}),
        ),
    ],
    "AUT01": [
        (lightning(strategy({"gradient_clipping": "auto"})), lightning(strategy({"gradient_clipping": 0.0}))),
    ],
    "BAT01": [
        (engine(train_batch_size=30), engine(train_batch_size=16), TWO_RANKS),
        (engine(train_batch_size=30), engine(train_batch_size=24)),
        (
            engine(train_batch_size=30, gradient_accumulation_steps=None),
            engine(train_batch_size=32, gradient_accumulation_steps=None),
            TWO_RANKS,
        ),
    ],
    "BAT02": [
        (engine(train_micro_batch_size_per_gpu=None), engine()),
    ],
    "BAT03": [
        (
            lightning(strategy({"train_micro_batch_size_per_gpu": 1})),
            lightning(strategy({"train_micro_batch_size_per_gpu": 2})),
        ),
    ],
    "CLP01": [
        (engine(gradient_clipping=None), engine(gradient_clipping=0)),
        (engine(gradient_clipping=None), engine(gradient_clipping=None), {}, {"deepspeed": (0, 19, 2)}),
    ],
    "CLP02": [
        (
            lightning(ZERO.format(3), gradient_clip_algorithm="value", gradient_clip_val=1),
            lightning("ddp", gradient_clip_algorithm="value", gradient_clip_val=1),
        ),
    ],
    "CLP03": [
        (
            lightning(strategy({"gradient_clipping": 0.5}), gradient_clip_val=1.0),
            lightning(strategy({"gradient_clipping": 1.0}), gradient_clip_val=1.0),
        ),
    ],
    "CLP04": [
        (
            lightning("fsdp", gradient_clip_val=1.0),
            lightning("fsdp", gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        ),
    ],
    "DBL01": [
        (lightning(ZERO.format(1)), lightning(ZERO.format(1), accumulate_grad_batches=1)),
        (lightning("deepspeed"), lightning("ddp")),
    ],
    "DBL02": [
        (lightning(ZERO.format(2), gradient_clip_val=1.0), lightning(ZERO.format(2), gradient_clip_val=0)),
        (
            lightning(strategy({"gradient_clipping": 1.0})),
            lightning(strategy({"gradient_clipping": 0.0}), gradient_clip_val=1.0),
        ),
        (
            lightning(ZERO.format(2), gradient_clip_val=1000000.0),
            lightning(ZERO.format(2), gradient_clip_val=10000000.0),
        ),
    ],
    "GAS01": [
        (
            lightning(strategy({"gradient_accumulation_steps": 4})),
            lightning(strategy({"train_micro_batch_size_per_gpu": 2})),
        ),
    ],
    "LOG01": [
        (lightning(max_epochs=2, log_every_n_steps=None), lightning(max_epochs=2, log_every_n_steps=4), EIGHT),
        (lightning(max_epochs=2, log_every_n_steps=7), lightning(max_epochs=2, log_every_n_steps=6), TEN),
    ],
    "LOG02": [
        (lightning(log_every_n_steps=8), lightning(log_every_n_steps=10)),
    ],
    "SCH01": [
        (
            lightning(ZERO.format(2), accumulate_grad_batches=1, callbacks=[schedule({0: 1, 4: 8})]),
            lightning("ddp", accumulate_grad_batches=1, callbacks=[schedule({0: 1, 4: 8})]),
        ),
    ],
    "SCH02": [
        (
            lightning(accumulate_grad_batches=4, callbacks=schedule({0: 1, 4: 8})),
            lightning(accumulate_grad_batches=1, callbacks=schedule({0: 1, 4: 8})),
        ),
    ],
    "SCH03": [
        (
            lightning(accumulate_grad_batches=None, callbacks=[schedule({4: 8})]),
            lightning(accumulate_grad_batches=None, callbacks=[schedule({4: 1})]),
        ),
    ],
    "STP01": [
        (lightning(max_steps=5), lightning(max_steps=5), TEN, EIGHT),
        (lightning(max_steps=5), lightning(max_steps=6), TEN),
    ],
    "STP02": [
        (lightning(ZERO.format(2), max_steps=5), lightning(ZERO.format(2), max_steps=4), TEN),
    ],
    "STP03": [
        (lightning(max_steps=7, max_epochs=2), lightning(max_steps=6, max_epochs=2), TEN),
    ],
    "TAIL01": [
        (lightning(max_epochs=2), lightning(max_epochs=2), TEN, EIGHT),
    ],
    "TAIL02": [
        (engine(), engine(), TEN | TWO_RANKS, EIGHT | TWO_RANKS),
        (engine(), engine(managed_gradient_accumulation=False), TEN | TWO_RANKS),
    ],
    "TAIL03": [
        (lightning(ZERO.format(2), max_epochs=2), lightning(ZERO.format(2), max_epochs=2), TEN, EIGHT),
    ],
    "TAIL04": [
        (lightning(ZERO.format(3), max_epochs=2), lightning(ZERO.format(2), max_epochs=2), TEN),
    ],
    "TAIL05": [
        (lightning(ZERO.format(2), max_epochs=1), lightning(ZERO.format(2), max_epochs=2), TEN),
        (lightning(ZERO.format(2), max_epochs=1), lightning("ddp", max_epochs=1), TEN),
    ],
    "THR01": [
        (lightning(callbacks=[monitor(10)]), lightning(callbacks=[monitor(9)])),
        (
            lightning(accumulate_grad_batches=8, callbacks=[monitor()]),
            lightning(accumulate_grad_batches=3, callbacks=[monitor()]),
        ),
        (lightning(accumulate_grad_batches=5, callbacks=[monitor(98)]), lightning(callbacks=[monitor()])),
        (lightning(callbacks=[monitor(10)]), lightning(accumulate_grad_batches=1, callbacks=[monitor(10)])),
        (lightning(callbacks=[monitor(5)]), lightning(callbacks=[monitor(11)]), TEN),
    ],
    "THR02": [
        (lightning(callbacks=[monitor(21)], max_epochs=2), lightning(callbacks=[monitor(17)], max_epochs=2), TEN),
        (
            lightning(callbacks=[monitor(5)], max_epochs=2, log_every_n_steps=7),
            lightning(callbacks=[monitor(5)], max_epochs=2, log_every_n_steps=6),
            TEN,
        ),
    ],
    "THR03": [
        (
            lightning(callbacks=[monitor(9)], log_every_n_steps=8),
            lightning(callbacks=[monitor(9)], log_every_n_steps=8),
            {"lightning": (2, 2, 0)},
            {"lightning": (2, 2, 1)},
        ),
    ],
    "THR04": [
        (lightning(callbacks=[monitor(1)]), lightning(callbacks=[monitor(5)])),
    ],
    "VER01": [
        (engine(), engine(), {"deepspeed": (0, 17, 6)}, {"deepspeed": (0, 17, 5)}),
        (engine(), engine(), {"deepspeed": (0, 18, 2)}, {"deepspeed": (0, 18, 3)}),
    ],
    "VER02": [
        (
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            {"deepspeed": (0, 18, 6)},
            {"deepspeed": (0, 19, 0)},
        ),
    ],
    "VER03": [
        (
            engine(bf16=ON, data_types=FP32),
            engine(bf16=ON, data_types=FP32),
            {"deepspeed": (0, 19, 3)},
            {"deepspeed": NEW},
        ),
        (
            engine(bf16=ON, data_types=FP32),
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 3}),
            {"deepspeed": (0, 17, 5)},
        ),
    ],
    "WIN01": [
        (lightning(max_epochs=2), lightning(max_epochs=2), {"samples": 12}, {"samples": 16}),
    ],
}


@pytest.mark.parametrize(("code", "case"), [(code, case) for code, cases in CASES.items() for case in cases])
def test_rule(tmp_path: Path, code: str, case: tuple[Any, ...]) -> None:
    bad, good, *options = case
    found_codes = codes(found(tmp_path, bad, **options[0] if options else {}))
    assert found_codes.count(code) == 1, found_codes
    assert code not in codes(found(tmp_path, good, **options[-1] if options else {}))


def everything(tmp_path: Path) -> list[LintFinding]:
    return [
        finding
        for cases in CASES.values()
        for bad, _, *options in cases
        for finding in found(tmp_path, bad, **options[0] if options else {})
    ]


def test_findings_are_complete(tmp_path: Path) -> None:
    """Every finding has a place that is there, numbers, and a proof whose backends and options exist."""
    assert CASES.keys() == RULES.keys()
    parser = cli._parser()
    for finding in everything(tmp_path):
        assert finding.line >= 1 and finding.key and finding.file.startswith(str(tmp_path))
        assert finding.what and finding.fix and finding.proof
        assert not any(word in f"{finding.what} {finding.fix}" for word in ("None", "inf ", "nan", "\n"))
        for backends in re.findall(r"--backend (\S+)", finding.proof):
            assert set(backends.split(",")) <= registry().keys()
        if finding.proof.startswith("python -m bench "):
            parser.parse_args(command_of(finding.proof))


def test_numbers(tmp_path: Path) -> None:
    """The numbers of the measured runs: NB = 10, N = 4, two epochs."""
    said = {each.code: each.what for each in found(tmp_path, lightning(ZERO.format(3), max_epochs=2), **TEN)}
    assert "engine has made 5 steps, trainer.global_step is 4" in said["TAIL03"]
    assert "estimated_stepping_batches says 6" in said["TAIL03"]
    assert "6 of the 20 micro-batches of 2 epochs (30.0%)" in said["TAIL04"]
    assert "weighs 1/16 instead of 1/4" in said["DBL01"]
    said = {each.code: each.what for each in found(tmp_path, lightning(max_steps=5), **TEN)}
    assert "after 18 micro-batches" in said["STP01"] and "2/4 of the mean gradient" in said["TAIL01"]
    said = {each.code: each.what for each in found(tmp_path, lightning(ZERO.format(2), max_steps=5), **TEN)}
    assert "after 24 micro-batches per rank, the engine has made 6 steps, 1 more" in said["STP02"]
    said = {each.code: each.what for each in found(tmp_path, lightning(ZERO.format(2), gradient_clip_val=0.5))}
    assert "4 x 0.5 = 2 is clipped" in said["DBL02"]
    said = {each.code: each.what for each in found(tmp_path, engine(bf16=ON, gradient_accumulation_steps=1024))}
    assert "256/1024 = 0.25 of the truth" in said["ACC01"]
    said = {each.code: each.what for each in found(tmp_path, lightning(callbacks=[monitor(10)]))}
    assert "9/4 = 2.25 would be right: rates are up to 25.0% too low" in said["THR01"]
    assert "(18.2% where it takes as long as 8 micro-batches)" in said["THR01"]
    said = {each.code: each.what for each in found(tmp_path, lightning(callbacks=[monitor(5)]), **TEN)}
    assert "2 windows of 4 and a partial one of 2" in said["THR01"]
    assert "0.733 to 1.000 of the truth" in said["THR01"] and "down to 0.667" in said["THR01"]


def command_of(text: str) -> list[str]:
    """The proof's command, for ``cli.main``."""
    assert text.startswith("python -m bench ")
    return text.partition(" (")[0].split()[3:]


def measured(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The points of a proof that is run for real, on the virtual clock."""
    assert command[0] == "throughput"
    capsys.readouterr()
    cli.main([*command, "--json"])
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


MONITORED: list[tuple[str, Any, dict[str, Any]]] = [
    *[
        (code, bad, options[0] if options else {})
        for code in ("LOG01", "THR01", "THR02")
        for bad, _, *options in CASES[code]
    ],
    # The default window, and the default of log_every_n_steps.
    ("LOG01", lightning(callbacks=[monitor()], log_every_n_steps=None, max_epochs=2), EIGHT),
    ("THR02", lightning(callbacks=[monitor()], log_every_n_steps=None, max_epochs=2), EIGHT),
    # Trainings that max_steps ends, in mid-epoch.
    ("THR02", lightning(callbacks=[monitor(30)], log_every_n_steps=2, max_steps=8), TEN),
    # Trainings that are too long for a proof become shorter ones.
    ("LOG01", lightning(log_every_n_steps=5001, max_epochs=2), {"samples": 40_000}),
    ("THR02", lightning(callbacks=[monitor(5)], log_every_n_steps=5001, max_epochs=2), {"samples": 40_000}),
    ("THR01", lightning(callbacks=[monitor()], accumulate_grad_batches=100), {"samples": 4 * 8 * 97}),
    ("THR01", lightning(callbacks=[monitor()], accumulate_grad_batches=200), {"samples": 4 * 80}),
    # DeepSpeed carries windows over; what it counts is what is shown.
    ("LOG01", lightning(ZERO.format(2), max_epochs=2, log_every_n_steps=5), TEN),
]


@pytest.mark.parametrize(("code", "config", "options"), MONITORED)
def test_proofs_of_the_monitor_show_their_findings(
    tmp_path: Path, code: str, config: Any, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = [each for each in found(tmp_path, config, **options) if each.code == code]
    command = command_of(finding.proof)
    if command[0] == "semantics":  # Lightning above DeepSpeed counts no step; throughput trains without DeepSpeed
        assert "trainer.global_step is 0" in next(
            each.what for each in found(tmp_path, config, **options) if each.code == "WIN01"
        )
        return
    (point,) = measured(command, capsys)
    if code == "LOG01":
        assert point["num_updates"] and point["verdict"] == "silent" and point["num_logs"] == 0
    elif code == "THR02":
        assert point["num_updates"] and point["num_rates_logged"] == 0
        assert point["verdict"] == ("silent" if "no step is logged" in finding.what else "unrated")
    else:
        assert point["verdict"] in {"biased", "unsteady"} and point["ratio_min"] < 0.99


@pytest.mark.parametrize(
    ("config", "options", "advised"),
    [
        (lightning(callbacks=[monitor(10)]), {}, [9, 13]),
        (lightning(callbacks=[monitor(5)], log_every_n_steps=5), TEN, [11]),
        (lightning(callbacks=[monitor(21)], max_epochs=2), TEN, [11]),
    ],
)
def test_advised_windows_are_measured_as_right(
    tmp_path: Path, config: Any, options: dict[str, Any], advised: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = [each for each in found(tmp_path, config, **options) if each.code in {"THR01", "THR02"}]
    sizes = re.match(r"set window_size to (\d+)(?: or (\d+))?", finding.fix)
    assert sizes and [int(size) for size in sizes.groups() if size] == advised
    command = [word for word in command_of(finding.proof) if word not in {"--epochs", "2"}]
    command[command.index("--window-size") + 1] = ",".join(map(str, advised))
    for point in measured(command, capsys):
        assert point["verdict"] == "right" and point["ratio_min"] == pytest.approx(1) == point["ratio_max"]


@pytest.mark.parametrize("sizes", first([(4, 10), (4, 3)], [(2, 5), (3, 7), (4, 10), (4, 8), (4, 3), (4, 1), (8, 27)]))
def test_rates_are_counted_as_they_are_measured(sizes: tuple[int, int]) -> None:
    accumulate, num_batches = sizes
    for window in (2, 3, num_batches + 1, 17, 30, 31):
        for every in (1, 3):
            wanted = Rates(accumulate, num_batches, every).ratios(window)
            ratios = [r.ratio for r in measure(Point(accumulate, every, window, micro_batches=num_batches)).rates]
            assert wanted is not None
            assert (wanted.low, wanted.high) == pytest.approx((min(ratios), max(ratios)))
            assert wanted.is_right == (judge(ratios, TOLERANCE) is RateVerdict.RIGHT)


@settings(max_examples=50, deadline=None)
@given(
    accumulate=st.integers(2, 300),
    num_batches=st.integers(1, 3000),
    window=st.integers(2, 700),
    every=st.integers(1, 60),
)
def test_what_is_advised_and_shown(accumulate: int, num_batches: int, window: int, every: int) -> None:
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
    point = Point(small.accumulate, small.every, window, micro_batches=small.num_batches)
    assert math.prod(point.lengths) < 5 * LONGEST


def test_proofs_keep_the_structure(tmp_path: Path) -> None:
    def proof(code: str, config: Any, **options: Any) -> str:
        return next(each.proof for each in found(tmp_path, config, **options) if each.code == code)

    command = "python -m bench semantics --backend lightning-ddp --samples 20 --micro-batch 1 --accumulate 4 --epochs 2"
    assert proof("TAIL01", lightning(max_epochs=2), **TEN) == f"{command} --world-size 2"
    # N = 64 with half a window left becomes N = 4 with half a window left, on two ranks at most.
    large = lightning(accumulate_grad_batches=64, max_epochs=2, devices=8, num_nodes=4)
    assert proof("TAIL01", large, samples=2 * 32 * 96) == f"{command} --world-size 2"
    assert "--samples 6 " in proof("WIN01", lightning(max_epochs=2), samples=12)
    assert proof("STP02", lightning(ZERO.format(2), max_steps=5), **TEN).endswith(
        "--epochs 3 --world-size 2 --max-steps 5"
    )
    assert "--drop-last" in proof("TAIL01", lightning(max_epochs=2, data={"batch_size": 2, "drop_last": True}), **TEN)
    assert "zero2-corrected" in proof("DBL01", lightning(ZERO.format(2)))


def test_places(tmp_path: Path) -> None:
    """Keys and lines are those of the file, also of one that another names."""
    own = tmp_path / "ds.json"
    own.write_text(
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
    findings = lint([own, path], Options(deepspeed=NEW))
    places = [(each.code, Path(each.file).name, each.line, each.key) for each in findings]
    assert places == [
        ("DBL02", "ds.json", 2, "gradient_clipping"),
        ("GAS01", "ds.json", 6, "gradient_accumulation_steps"),
        ("DBL01", "config.yaml", 3, "trainer.strategy"),
        ("THR01", "config.yaml", 11, "trainer.callbacks.1.dict_kwargs.window_size"),
    ]


def test_hint_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path, lightning("deepspeed"), "one.yaml"), write(tmp_path, lightning(), "two.yaml")
    assert cli.main(["lint", str(one), str(two)]) == BAD
    out, err = capsys.readouterr()
    assert err.splitlines() == ["hint: --samples would enable the rules about windows, steps and logs"]
    assert re.match(
        rf"{re.escape(str(one))}:\d+: error DBL01 trainer\.strategy: loss divided by N twice\n    what ", out
    )
    assert "\n    fix: " in out and "\n    proof: python -m bench semantics " in out
    assert cli.main(["lint", str(one), "--json", "--samples", "32"]) == BAD
    out, err = capsys.readouterr()
    (finding,) = json.loads(out)
    assert finding["code"] == "DBL01" and finding["severity"] == "error" and finding["source"] and not err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name at least one config"),
        (["{}", "--samples", "0"], "argument --samples: '0' is not an integer of at least 1"),
        (["{}", "--world-size", "two"], "argument --world-size: 'two'"),
        (["{}", "--deepspeed-version", "new"], "'new' is no version such as 0.18.2"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, lightning())
    assert cli.main(["lint", *(argument.format(path) for argument in arguments)]) == WRONG
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 5, 8])
def test_lost_micro_batches(accumulate: int) -> None:
    """Against counting one micro-batch after the other."""
    for epochs, num_batches in itertools.product(range(1, 7), range(1, 14)):
        open_batches: list[int] = []
        used = 0
        for position in range(epochs * num_batches):
            if position % num_batches % accumulate == 0:
                open_batches.clear()
            open_batches.append(position)
            if (position + 1) % accumulate == 0:
                used += len(open_batches)
                open_batches.clear()
        assert num_lost(windows_of(num_batches, accumulate), epochs) == epochs * num_batches - used


# What is wrong is said in one line that names the place.

WRONG_VALUES = [
    (lightning(accumulate_grad_batches="four"), r"trainer\.accumulate_grad_batches is 'four'; it must be an integer"),
    (lightning(accumulate_grad_batches=0), "it must be an integer of at least 1"),
    (lightning(max_steps=-2), r"trainer\.max_steps is -2; it must be an integer of at least -1"),
    (lightning(gradient_clip_val=float("nan")), r"gradient_clip_val is nan; it must be a finite number of at least 0"),
    (lightning(devices="many"), "a number of devices, a list of them, or auto"),
    (lightning({"class_path": "DeepSpeedStrategy", "init_args": [1]}), r"trainer\.strategy\.init_args is \[1\]"),
    (lightning(strategy("missing.json")), r"trainer\.strategy\.init_args\.config is 'missing\.json'; .* path"),
    (lightning(callbacks=[1]), r"trainer\.callbacks\.0 is 1; it must be a class_path"),
    (lightning(callbacks=[schedule({"first": 2})]), "a mapping of epochs"),
    (lightning(data={"batch_size": 0}), r"data\.batch_size is 0"),
    (engine(gradient_clipping=[1]), "a finite number of at least 0"),
    (engine(zero_optimization={"stage": 4}), "0, 1, 2 or 3"),
    (engine(data_types={"grad_accum_dtype": 32}), "it must be a string"),
]


@pytest.mark.parametrize(("config", "words"), WRONG_VALUES)
def test_wrong_values(tmp_path: Path, config: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, config)
    assert cli.main(["lint", str(path)]) == WRONG
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and len(err) < 6000
    assert re.search(words, err), err
    assert str(path) in err


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "trainer: &a {x: 1}\n" + "".join(
    f"k{n}: &m{n} {{<<: [{', '.join(['*a' if n == 0 else f'*m{n - 1}'] * 9)}]}}\n" for n in range(9)
)

HOSTILE = [
    (
        "c.yaml",
        b"trainer: !!python/object/apply:os.system ['true']\n",
        r":1: is not plain YAML \(could not determine a constructor for the tag .*os.system",
    ),
    ("c.yaml", b"!!set {trainer}\n", r"has no keys"),
    ("c.yaml", b"trainer: {devices: 1}\ntrainer: {devices: 2}\n", r":2: trainer is repeated \(first in line 1\)"),
    ("c.yaml", b"trainer: {devices: 1\n", "is not plain YAML"),
    ("c.yaml", b"trainer: {devices: !!int two}\n", ":1: is not plain YAML"),
    ("c.yaml", b"trainer: {devices: " + b"9" * 5000 + b"}\n", "."),
    ("c.yaml", b"[" * 30_000, "nested more than"),
    ("c.yaml", (BOMB + "trainer: {}\n").encode(), "with its aliases expanded"),
    ("c.yaml", b"- trainer\n", "has no keys"),
    ("c.yaml", b"model: {}\n", "is not a known kind of config; a LightningCLI config has 'trainer'"),
    ("c.yaml", b"#" * (config_file.MAX_BYTES + 1), "is larger than 256 KiB"),
    ("c.json", b"{}", "is not a known kind of config"),
    ("c.json", b'{// why\n"bf16": {}}', r":1: is not JSON .*comments"),
    ("c.json", b'{"a":' * 50_000, "nested more than"),
    ("c.toml", b"[training]\nsteps = 1\n", r"TOML is not read: .*; give a .yaml of"),
    ("c.ini", b"[a]", "is not a known kind of config; give a .yaml"),
]


@pytest.mark.parametrize(("name", "content", "words"), HOSTILE)
def test_hostile_files(
    tmp_path: Path, name: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert cli.main(["lint", str(path)]) == WRONG
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"bench: {path}") and err.count("\n") == 1
    assert re.search(words, err), err


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base\n  accumulate_grad_batches: 4\n  devices: 1\n"
        "trainer:\n  <<: *base\n  strategy: deepspeed\n  devices: 2\n"
    )
    (finding,) = lint([path], Options(deepspeed=NEW))
    assert finding.code == "DBL01" and "1/16" in finding.what and finding.line == 6


SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 12),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "value", "norm", "bf16-mixed", "fp32", "0,1", "2", "1e-1", "", "deepspeed_stage_3"]),
    st.text(max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    )
)
def test_json_lines(value: Any) -> None:
    """Each key of a JSON text has the line where it stands, whatever the strings around it are."""
    text = json.dumps({"top": value, 'a"b,{[': 1}, indent=1)
    lines = config_file._json_lines(text, "c.json")
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
