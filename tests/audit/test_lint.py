"""Lint: for every rule a config that it finds and one that it lets pass, and what hostile input meets."""

from __future__ import annotations

import copy
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
from bench.audit.lint.arithmetic import batches_per_epoch, num_lost, windows_of
from bench.audit.lint.known import Options, version
from bench.audit.lint.logging_rules import LONGEST
from bench.audit.lint.rates import Rates
from bench.audit.lint.rules import RULES, LintFinding, Severity
from bench.audit.monitor import TOLERANCE, judge, measure
from bench.audit.monitor_grid import Point, RateVerdict
from bench.audit.versions.__main__ import parsed
from bench.backends.base import registry
from bench.errors import BAD, GOOD, WRONG, InputError

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

# code; what triggers it; what does not; and of each the options. The second differs from the first in one thing.
CASES: dict[str, list[tuple[Any, dict[str, Any], Any, dict[str, Any]]]] = {
    "ACC01": [
        (engine(bf16=ON), {}, engine(bf16=ON, data_types=FP32), {}),
        (engine(bf16=ON), {}, engine(bf16=ON, gradient_accumulation_steps=1), {}),
        (lightning(ZERO.format(2), precision="bf16-mixed"), {}, lightning(ZERO.format(2), precision="32-true"), {}),
        (lightning(ZERO.format(2), precision="bf16-true"), {}, lightning("ddp", precision="bf16-true"), {}),
        (
            lightning(strategy({"zero_optimization": {"stage": 3}}), precision="bf16-mixed"),
            {},
            lightning(strategy({"zero_optimization": {"stage": 3}, "data_types": FP32}), precision="bf16-mixed"),
            {},
        ),
    ],
    "ACC02": [
        (
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 0}),
            {},
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 1}),
            {},
        )
    ],
    "AUT01": [
        (
            lightning(strategy({"gradient_clipping": "auto"})),
            {},
            lightning(strategy({"gradient_clipping": 0.0})),
            {},
        ),
        (lightning(strategy({"bf16": {"enabled": "auto"}})), {}, engine(bf16={"enabled": "auto"}), {}),
        (lightning(strategy({"train_batch_size": "auto"})), {}, engine(train_batch_size="auto"), {}),
    ],
    "BAT01": [
        (engine(train_batch_size=30), TWO_RANKS, engine(train_batch_size=16), TWO_RANKS),
        (engine(train_batch_size=30), {}, engine(train_batch_size=24), {}),
        (
            engine(train_batch_size=30, gradient_accumulation_steps=None),
            TWO_RANKS,
            engine(train_batch_size=32, gradient_accumulation_steps=None),
            TWO_RANKS,
        ),
        (
            engine(train_batch_size=9, train_micro_batch_size_per_gpu=None),
            TWO_RANKS,
            engine(train_batch_size=8, train_micro_batch_size_per_gpu=None),
            TWO_RANKS,
        ),
        (lightning(strategy({"train_batch_size": 8})), {}, lightning(strategy({"train_batch_size": 16})), {}),
        (lightning(strategy({"train_batch_size": 8})), {}, lightning(strategy({"train_batch_size": 8}), devices=1), {}),
    ],
    "BAT02": [(engine(train_micro_batch_size_per_gpu=None), {}, engine(), {})],
    "BAT03": [
        (
            lightning(strategy({"train_micro_batch_size_per_gpu": 1})),
            {},
            lightning(strategy({"train_micro_batch_size_per_gpu": 2})),
            {},
        )
    ],
    "CLP01": [
        (engine(gradient_clipping=None), {}, engine(gradient_clipping=0), {}),
        (engine(gradient_clipping=None), {}, engine(gradient_clipping=None), {"deepspeed": (0, 19, 2)}),
        (engine(gradient_clipping=None), {}, engine(gradient_clipping="auto"), {}),
        (engine(gradient_clipping=None), {"deepspeed": None}, lightning(ZERO.format(2)), {"deepspeed": None}),
    ],
    "CLP02": [
        (
            lightning(ZERO.format(3), gradient_clip_algorithm="value", gradient_clip_val=1),
            {},
            lightning("ddp", gradient_clip_algorithm="value", gradient_clip_val=1),
            {},
        ),
        (
            lightning(ZERO.format(3), gradient_clip_algorithm="value"),
            {},
            lightning(ZERO.format(3), gradient_clip_algorithm="norm"),
            {},
        ),
    ],
    "CLP03": [
        (
            lightning(strategy({"gradient_clipping": 0.5}), gradient_clip_val=1.0),
            {},
            lightning(strategy({"gradient_clipping": 1.0}), gradient_clip_val=1.0),
            {},
        )
    ],
    "CLP04": [
        (
            lightning("fsdp", gradient_clip_val=1.0),
            {},
            lightning("fsdp", gradient_clip_val=1.0, gradient_clip_algorithm="value"),
            {},
        ),
        (
            lightning({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, gradient_clip_val=1.0),
            {},
            lightning({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}, gradient_clip_val=1.0),
            {},
        ),
    ],
    "DBL01": [
        (lightning(ZERO.format(1)), {}, lightning(ZERO.format(1), accumulate_grad_batches=1), {}),
        (lightning("deepspeed"), {}, lightning("ddp"), {}),
        (lightning(strategy(None, stage=3)), {}, lightning(None), {}),
        ({"fit": lightning("deepspeed")}, {}, {"fit": lightning("auto")}, {}),
    ],
    "DBL02": [
        (
            lightning(ZERO.format(2), gradient_clip_val=1.0),
            {},
            lightning(ZERO.format(2), gradient_clip_val=0),
            {},
        ),
        (
            lightning(strategy({"gradient_clipping": 1.0})),
            {},
            lightning(strategy({"gradient_clipping": 0.0}), gradient_clip_val=1.0),
            {},
        ),
        # To read the norm, people clip where nothing is ever clipped.
        (lightning(ZERO.format(2), gradient_clip_val=1e6), {}, lightning(ZERO.format(2), gradient_clip_val=1e7), {}),
        (lightning(ZERO.format(2), gradient_clip_val=5), {}, lightning(ZERO.format(2), gradient_clip_val="1e30"), {}),
    ],
    "GAS01": [
        (
            lightning(strategy({"gradient_accumulation_steps": 4})),
            {},
            lightning(strategy({"train_micro_batch_size_per_gpu": 2})),
            {},
        ),
        (lightning(strategy({"gradient_accumulation_steps": "auto"})), {}, lightning(strategy({})), {}),
    ],
    "LOG01": [
        (
            lightning(max_epochs=2, log_every_n_steps=None),
            EIGHT,
            lightning(max_epochs=2, log_every_n_steps=4),
            EIGHT,
        ),
        (lightning(max_epochs=2, log_every_n_steps=7), TEN, lightning(max_epochs=2, log_every_n_steps=6), TEN),
        # Fewer micro-batches than a window: Lightning above DeepSpeed counts no step.
        (lightning(ZERO.format(2), max_epochs=9), {"samples": 12}, lightning(max_epochs=9), {"samples": 12}),
    ],
    "LOG02": [(lightning(log_every_n_steps=8), {}, lightning(log_every_n_steps=10), {})],
    "SCH01": [
        (
            lightning(ZERO.format(2), accumulate_grad_batches=1, callbacks=[schedule({0: 1, 4: 8})]),
            {},
            lightning("ddp", accumulate_grad_batches=1, callbacks=[schedule({0: 1, 4: 8})]),
            {},
        )
    ],
    "SCH02": [
        (
            lightning(accumulate_grad_batches=4, callbacks=schedule({0: 1, 4: 8})),
            {},
            lightning(accumulate_grad_batches=1, callbacks=schedule({0: 1, 4: 8})),
            {},
        )
    ],
    "SCH03": [
        (
            lightning(accumulate_grad_batches=None, callbacks=[schedule({4: 8})]),
            {},
            lightning(accumulate_grad_batches=None, callbacks=[schedule({4: 1})]),
            {},
        )
    ],
    "STP01": [
        (lightning(max_steps=5), TEN, lightning(max_steps=5), EIGHT),
        (lightning(max_steps=5), TEN, lightning(max_steps=6), TEN),
        (lightning(max_steps=5), TEN, lightning(max_steps=2), TEN),
    ],
    "STP02": [
        (lightning(ZERO.format(2), max_steps=5), TEN, lightning(ZERO.format(2), max_steps=4), TEN),
        (lightning(ZERO.format(2), max_steps=5), TEN, lightning(ZERO.format(2), max_steps=5), EIGHT),
    ],
    "STP03": [
        (lightning(max_steps=7, max_epochs=2), TEN, lightning(max_steps=6, max_epochs=2), TEN),
        (
            lightning(ZERO.format(2), max_steps=5, max_epochs=2),
            TEN,
            lightning(ZERO.format(2), max_steps=4, max_epochs=2),
            TEN,
        ),
        (lightning(ZERO.format(2), max_steps=2), {"samples": 12}, lightning(max_steps=2), {"samples": 12}),
    ],
    "TAIL01": [
        (lightning(max_epochs=2), TEN, lightning(max_epochs=2), EIGHT),
        (lightning(max_epochs=2), TEN, lightning(max_epochs=2), {}),
        (lightning(max_epochs=2), TEN, lightning(max_epochs=2, limit_train_batches=8), TEN),
        (
            lightning(max_epochs=2),
            {"samples": 34},
            lightning(max_epochs=2, data={"batch_size": 2, "drop_last": True}),
            {"samples": 34},
        ),
    ],
    "TAIL02": [
        (engine(), TEN | TWO_RANKS, engine(), EIGHT | TWO_RANKS),
        (engine(), TEN | TWO_RANKS, engine(managed_gradient_accumulation=False), TEN | TWO_RANKS),
        (engine(), TEN | TWO_RANKS, engine(train_batch_size="auto"), TEN | TWO_RANKS),
        (engine(), {"samples": 34} | TWO_RANKS, engine(dataloader_drop_last=True), {"samples": 34} | TWO_RANKS),
    ],
    "TAIL03": [
        (lightning(ZERO.format(2), max_epochs=2), TEN, lightning(ZERO.format(2), max_epochs=2), EIGHT),
        (lightning(ZERO.format(2), max_epochs=2), TEN, lightning(ZERO.format(2), max_epochs=1), TEN),
    ],
    "TAIL04": [
        (lightning(ZERO.format(3), max_epochs=2), TEN, lightning(ZERO.format(2), max_epochs=2), TEN),
        (lightning(ZERO.format(1), max_epochs=2), TEN, lightning(ZERO.format(1), max_epochs=2), EIGHT),
        (lightning(ZERO.format(1), max_epochs=2), TEN, lightning(ZERO.format(1), max_epochs=1), TEN),
    ],
    "TAIL05": [
        (lightning(ZERO.format(2), max_epochs=1), TEN, lightning(ZERO.format(2), max_epochs=2), TEN),
        (lightning(ZERO.format(2), max_epochs=1), TEN, lightning("ddp", max_epochs=1), TEN),
        (lightning(ZERO.format(2), max_steps=3), TEN, lightning(ZERO.format(2), max_steps=2), TEN),
    ],
    "THR01": [
        (lightning(callbacks=[monitor(10)]), {}, lightning(callbacks=[monitor(9)]), {}),
        (
            lightning(accumulate_grad_batches=8, callbacks=[monitor()]),
            {},
            lightning(accumulate_grad_batches=3, callbacks=[monitor()]),
            {},
        ),
        # 99 of 100 micro-batches: within the 1 % of the measurement.
        (lightning(accumulate_grad_batches=5, callbacks=[monitor(98)]), {}, lightning(callbacks=[monitor()]), {}),
        (lightning(callbacks=[monitor(10)]), {}, lightning(accumulate_grad_batches=1, callbacks=[monitor(10)]), {}),
        # A partial window: whole epochs are right, and so is a window that is long enough.
        (lightning(callbacks=[monitor(5)]), TEN, lightning(callbacks=[monitor(11)]), TEN),
        (
            lightning(callbacks=[monitor(97)], log_every_n_steps=5),
            TEN,
            lightning(callbacks=[monitor(100)], log_every_n_steps=5),
            TEN,
        ),
        # Which steps are logged matters: at every third of three per epoch, or in the only epoch before its end.
        (
            lightning(callbacks=[monitor(5)], log_every_n_steps=3),
            TEN,
            lightning(callbacks=[monitor(9)], accumulate_grad_batches=2, log_every_n_steps=3),
            {"samples": 20},
        ),
        (
            lightning(callbacks=[monitor(5)], max_epochs=1),
            TEN,
            lightning(callbacks=[monitor(5)], max_epochs=1, log_every_n_steps=2),
            TEN,
        ),
        (lightning(callbacks=[monitor(10)]), {}, lightning(callbacks=[monitor(10)], log_every_n_steps=0), {}),
        # DeepSpeed's steps go on over the ends of epochs.
        (lightning(callbacks=[monitor(5)]), TEN, lightning(ZERO.format(2), callbacks=[monitor(5)]), TEN),
        # NB = 2 is fewer than N: windows are of 2.
        (
            lightning(callbacks=[monitor(4)]),
            {"samples": 8},
            lightning(callbacks=[monitor(3)]),
            {"samples": 8},
        ),
        # Nothing is said of rates that are never logged.
        (
            lightning(callbacks=[monitor(16)], max_epochs=2),
            EIGHT,
            lightning(callbacks=[monitor(18)], max_epochs=2),
            EIGHT,
        ),
    ],
    "THR02": [
        (
            lightning(callbacks=[monitor(21)], max_epochs=2),
            TEN,
            lightning(callbacks=[monitor(17)], max_epochs=2),
            TEN,
        ),
        (
            lightning(callbacks=[monitor(5)], max_epochs=2, log_every_n_steps=7),
            TEN,
            lightning(callbacks=[monitor(5)], max_epochs=2, log_every_n_steps=6),
            TEN,
        ),
        (
            lightning(ZERO.format(2), callbacks=[monitor(5)], max_epochs=2),
            {"samples": 12},
            lightning("ddp", callbacks=[monitor(5)], max_epochs=2),
            {"samples": 12},
        ),
    ],
    "THR03": [
        (
            lightning(callbacks=[monitor(9)], log_every_n_steps=8),
            {"lightning": (2, 2, 0)},
            lightning(callbacks=[monitor(9)], log_every_n_steps=8),
            {"lightning": (2, 2, 1)},
        ),
        (
            lightning(callbacks=[monitor(9)], log_every_n_steps=None),
            {"lightning": (2, 2, 0)},
            lightning(callbacks=[monitor(9)], log_every_n_steps=2),
            {"lightning": (2, 2, 0)},
        ),
    ],
    "THR04": [(lightning(callbacks=[monitor(1)]), {}, lightning(callbacks=[monitor(5)]), {})],
    "VER01": [
        (engine(), {"deepspeed": (0, 17, 6)}, engine(), {"deepspeed": (0, 17, 5)}),
        (engine(), {"deepspeed": (0, 18, 2)}, engine(), {"deepspeed": (0, 18, 3)}),
        (
            engine(),
            {"deepspeed": (0, 18, 2)},
            engine(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
            {"deepspeed": (0, 18, 2)},
        ),
        (
            lightning(ZERO.format(2)),
            {"deepspeed": (0, 18, 2)},
            lightning(ZERO.format("2_offload")),
            {"deepspeed": (0, 18, 2)},
        ),
        (engine(), {"deepspeed": (0, 18, 2)}, engine(), {"deepspeed": None}),
    ],
    "VER02": [
        (
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            {"deepspeed": (0, 18, 6)},
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            {"deepspeed": (0, 19, 0)},
        ),
        (
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            {"deepspeed": (0, 18, 6)},
            engine(zero_optimization={"stage": 1}, bf16=ON, data_types=FP32),
            {"deepspeed": (0, 18, 6), "world_size": 1},
        ),
    ],
    "VER03": [
        (
            engine(bf16=ON, data_types=FP32),
            {"deepspeed": (0, 19, 3)},
            engine(bf16=ON, data_types=FP32),
            {"deepspeed": NEW},
        ),
        (
            engine(bf16=ON, data_types=FP32),
            {"deepspeed": (0, 17, 5)},
            engine(bf16=ON, data_types=FP32, zero_optimization={"stage": 3}),
            {"deepspeed": (0, 17, 5)},
        ),
        (
            engine(bf16=ON, data_types=FP32),
            {"deepspeed": (0, 19, 7)},
            engine(bf16=ON, data_types=FP32, gradient_accumulation_steps=1),
            {"deepspeed": (0, 19, 7)},
        ),
        (
            lightning(strategy({"data_types": FP32, "zero_optimization": {"stage": 2}}), precision="bf16-mixed"),
            {"deepspeed": (0, 19, 7)},
            lightning(strategy({"data_types": FP32, "zero_optimization": {"stage": 2}}), precision="32-true"),
            {"deepspeed": (0, 19, 7)},
        ),
    ],
    "WIN01": [
        (lightning(max_epochs=2), {"samples": 12}, lightning(max_epochs=2), {"samples": 16}),
        (lightning(ZERO.format(3), max_epochs=2), {"samples": 12}, lightning(ZERO.format(3)), {"samples": 16}),
        (engine(), {"samples": 12} | TWO_RANKS, engine(), {"samples": 16} | TWO_RANKS),
    ],
}


def test_every_rule_has_cases() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("code", "bad", "bad_options", "good", "good_options"),
    [(code, *case) for code, cases in CASES.items() for case in cases],
)
def test_rule(tmp_path: Path, code: str, bad: Any, bad_options: Any, good: Any, good_options: Any) -> None:
    found_codes = codes(found(tmp_path, bad, **bad_options))
    assert found_codes.count(code) == 1, found_codes
    assert code not in codes(found(tmp_path, good, **good_options))


def everything(tmp_path: Path) -> list[LintFinding]:
    return [
        finding for cases in CASES.values() for bad, options, *_ in cases for finding in found(tmp_path, bad, **options)
    ]


def test_findings_are_complete(tmp_path: Path) -> None:
    """Every finding has a place that is there, numbers, and a proof whose backends and options exist."""
    parser = cli._parser()
    for finding in everything(tmp_path):
        assert finding.line >= 1 and finding.key and finding.file.startswith(str(tmp_path))
        assert finding.what and finding.fix and finding.proof
        assert not any(word in f"{finding.what} {finding.fix}" for word in ("None", "inf ", "nan", "\n"))
        for backends in re.findall(r"--backend (\S+)", finding.proof):
            assert set(backends.split(",")) <= registry().keys()
        if finding.proof.startswith("python -m bench "):
            parser.parse_args(command_of(finding.proof))


@pytest.mark.parametrize(
    "config",
    [
        lightning(max_epochs=2),
        lightning(ZERO.format(2), accumulate_grad_batches=1, gradient_clip_val=1.0, max_epochs=2),
        lightning("ddp", callbacks=[monitor(9)], max_epochs=4),
        engine(),
        engine(bf16=ON, data_types=FP32),
        {"trainer": None},
        {"trainer": {}},
    ],
)
def test_sound_configs_are_silent(tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, config)
    assert cli.main(["lint", str(path), "--samples", "64", "--world-size", "2"]) == GOOD
    assert capsys.readouterr().out == ""


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
    *[(code, bad, options) for code in ("LOG01", "THR01", "THR02") for bad, options, *_ in CASES[code]],
    # The default window, and the default of log_every_n_steps.
    ("LOG01", lightning(callbacks=[monitor()], log_every_n_steps=None, max_epochs=2), EIGHT),
    ("THR02", lightning(callbacks=[monitor()], log_every_n_steps=None, max_epochs=2), EIGHT),
    # Trainings that max_steps ends, in mid-epoch.
    ("LOG01", lightning(log_every_n_steps=9, max_steps=8), TEN),
    ("THR02", lightning(callbacks=[monitor(30)], log_every_n_steps=2, max_steps=8), TEN),
    ("THR02", lightning(callbacks=[monitor(5)], max_steps=1), {"samples": 10**6}),
    ("THR02", lightning(callbacks=[monitor(9)], accumulate_grad_batches=1, max_steps=5), TEN),
    # Trainings that are too long for a proof become shorter ones.
    ("LOG01", lightning(log_every_n_steps=5001, max_epochs=2), {"samples": 40_000}),
    ("THR02", lightning(callbacks=[monitor(10**6)], max_epochs=2), {"samples": 40_000}),
    ("THR02", lightning(callbacks=[monitor(5)], log_every_n_steps=5001, max_epochs=2), {"samples": 40_000}),
    ("THR01", lightning(callbacks=[monitor()], accumulate_grad_batches=200), {}),
    ("THR01", lightning(callbacks=[monitor()], accumulate_grad_batches=100), {"samples": 4 * 8 * 97}),
    ("THR01", lightning(callbacks=[monitor()], accumulate_grad_batches=200), {"samples": 4 * 80}),
    ("THR01", lightning(callbacks=[monitor(33)], accumulate_grad_batches=8), {"samples": 4 * 5001}),
    # DeepSpeed carries windows over; what it counts is what is shown.
    ("LOG01", lightning(ZERO.format(2), max_epochs=2, log_every_n_steps=5), TEN),
    ("THR02", lightning(ZERO.format(2), callbacks=[monitor(21)], max_epochs=2), TEN),
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
        (lightning(callbacks=[monitor()], accumulate_grad_batches=8), {}, [97, 105]),
        (lightning(callbacks=[monitor(5)], log_every_n_steps=5), TEN, [11]),
        (lightning(callbacks=[monitor(97)], log_every_n_steps=5), TEN, [91, 101]),
        (lightning(callbacks=[monitor(10)], accumulate_grad_batches=8), {"samples": 16}, [9, 13]),
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


@pytest.mark.parametrize(
    ("accumulate", "num_batches"), [(2, 5), (3, 7), (4, 10), (4, 8), (4, 3), (4, 1), (8, 20), (8, 27)]
)
def test_rates_are_counted_as_they_are_measured(accumulate: int, num_batches: int) -> None:
    for window in (2, 3, num_batches + 1, 17, 30, 31):
        for every in (1, 3):
            wanted = Rates(accumulate, num_batches, every).ratios(window)
            ratios = [r.ratio for r in measure(Point(accumulate, every, window, micro_batches=num_batches)).rates]
            assert wanted is not None
            assert (wanted.low, wanted.high) == pytest.approx((min(ratios), max(ratios)))
            assert wanted.is_right == (judge(ratios, TOLERANCE) is RateVerdict.RIGHT)


@settings(max_examples=200, deadline=None)
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


def test_old_deepspeed_needs_more_than_a_dtype(tmp_path: Path) -> None:
    def fix(stage: int, number: Any) -> str:
        config = engine(bf16=ON, zero_optimization={"stage": stage})
        return next(each.fix for each in found(tmp_path, config, deepspeed=number) if each.code == "ACC01")

    assert "DeepSpeed 0.19.3 still sums in bf16 (VER03)" in fix(2, (0, 19, 3))
    assert "DeepSpeed below 0.19.8 still sums in bf16" in fix(2, None)
    assert "VER03" not in fix(2, NEW) and "VER03" not in fix(3, (0, 19, 3))
    (finding,) = found(tmp_path, engine(bf16=ON, data_types=FP32), deepspeed=(0, 19, 3))
    assert (finding.code, finding.key) == ("VER03", "data_types.grad_accum_dtype")
    assert finding.proof == "nox -s versions -- deepspeed==0.19.3"
    assert parsed(finding.proof.split()[-1]) == ("deepspeed", "0.19.3")


def test_endless_training_is_an_error(tmp_path: Path) -> None:
    config = lightning(ZERO.format(2), max_steps=2, max_epochs=-1)
    (finding,) = [each for each in found(tmp_path, config, samples=12) if each.code == "STP03"]
    assert finding.severity is Severity.ERROR and "never ends" in finding.what
    (finding,) = [each for each in found(tmp_path, lightning(max_steps=7, max_epochs=2), **TEN) if each.code == "STP03"]
    assert finding.severity is Severity.INFO


def test_proofs_keep_the_structure(tmp_path: Path) -> None:
    def proof(code: str, config: Any, **options: Any) -> str:
        return next(each.proof for each in found(tmp_path, config, **options) if each.code == code)

    command = "python -m bench semantics --backend lightning-ddp --samples 20 --batch-size 1 --accumulate 4 --epochs 2"
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


def test_data_is_found_where_people_put_it(tmp_path: Path) -> None:
    for data in (
        {"batch_size": 2},
        {"class_path": "my.Data", "init_args": {"train_batch_size": 2}},
        {"init_args": {"val_loader": {"batch_size": 9}, "loader": {"batch_size": 2, "num_workers": 3}}},
    ):
        assert "TAIL01" in codes(found(tmp_path, lightning(max_epochs=2, data=data), **TEN))
    assert "TAIL01" in codes(found(tmp_path, lightning(max_epochs=2, data={"batch_size": 2, "num_samples": 40})))
    assert "TAIL01" in codes(found(tmp_path, lightning(max_epochs=2, data=None, limit_train_batches=10)))
    assert "TAIL01" in codes(found(tmp_path, lightning(max_epochs=2, limit_train_batches=0.5), samples=80))
    assert "TAIL01" in codes(found(tmp_path, lightning(max_epochs=2), samples=160, world_size=4, batch_size=4))


@pytest.mark.parametrize(
    ("devices", "ranks"),
    [(2, 2), ("2", 2), ("0,1", 2), ("1,", 1), ([0, 1, 2], 3), ("auto", None), (-1, None), ("-1", None)],
)
def test_devices(tmp_path: Path, devices: Any, ranks: int | None) -> None:
    options = Options(samples=40, batch_size=1)
    lint([write(tmp_path, lightning(devices=devices, num_nodes=2))], options)
    assert options.wanted == (set() if ranks else {"--world-size"})
    if ranks:
        findings = lint([write(tmp_path, lightning(devices=devices, num_nodes=2, max_epochs=1))], options)
        batches = -(-40 // (ranks * 2))
        assert ("TAIL01" in codes(findings)) is bool(batches % 4)


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


def test_exit_status_of_an_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, lightning(log_every_n_steps=8))
    assert cli.main(["lint", str(path)]) == GOOD
    assert "info LOG02" in capsys.readouterr().out


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "--rules"]) == GOOD
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RULES)


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


def test_versions() -> None:
    assert [version(text) for text in ("0.18.2", "2.2.0.post0", "0.19", "1")] == [(0, 18, 2), (2, 2, 0), (0, 19), (1,)]
    for text in ("", "v1", "dev", "1" * 99):
        with pytest.raises(ValueError, match="is no version"):
            version(text)


@pytest.mark.parametrize("num_batches", range(1, 14))
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 5, 8])
def test_lost_micro_batches(num_batches: int, accumulate: int) -> None:
    """Against counting one micro-batch after the other."""
    for epochs in range(1, 7):
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


def test_batches_per_epoch() -> None:
    assert batches_per_epoch(39, 4, 1, drop_last=False) == 10
    assert batches_per_epoch(39, 4, 1, drop_last=True) == 9
    assert batches_per_epoch(3, 4, 1, drop_last=True) == 0


# What is wrong is said in one line that names the place.

WRONG_VALUES = [
    (lightning(accumulate_grad_batches="four"), r"trainer\.accumulate_grad_batches is 'four'; it must be an integer"),
    (lightning(accumulate_grad_batches={0: 4}), r"trainer\.accumulate_grad_batches is \{'0': 4\}; it must be an int"),
    (lightning(accumulate_grad_batches=0), "it must be an integer of at least 1"),
    (lightning(accumulate_grad_batches=10**9), "at most 1000000"),
    (lightning(accumulate_grad_batches=True), "it must be an integer"),
    (lightning(max_steps=-2), r"trainer\.max_steps is -2; it must be an integer of at least -1"),
    (lightning(max_epochs=1.5), r"trainer\.max_epochs is 1\.5"),
    (lightning(log_every_n_steps=-1), "an integer of at least 0"),
    (lightning(gradient_clip_val="much"), r"trainer\.gradient_clip_val is 'much'; it must be a finite number of at le"),
    (lightning(gradient_clip_val=-1), "a finite number of at least 0"),
    (lightning(gradient_clip_val=True), "a finite number of at least 0"),
    (lightning(gradient_clip_val=float("nan")), r"gradient_clip_val is nan; it must be a finite number of at least 0"),
    (lightning(gradient_clip_val=float("inf")), r"gradient_clip_val is inf; it must be a finite number of at least 0"),
    (lightning(gradient_clip_val="1e999"), "a finite number of at least 0"),
    (lightning(gradient_clip_val=10**400), "a finite number of at least 0"),
    (lightning(gradient_clip_algorithm="both"), "norm or value"),
    (lightning(devices="many"), "a number of devices, a list of them, or auto"),
    (lightning(devices=[]), r"trainer\.devices is \[\]"),
    (lightning(num_nodes=0), r"trainer\.num_nodes is 0"),
    (lightning(limit_train_batches=1.5), "a share from 0.0 to 1.0"),
    (lightning(precision=[16]), "a precision such as bf16-mixed"),
    (lightning(3), "a name such as deepspeed_stage_2"),
    (lightning({"init_args": {}}), "class_path and init_args"),
    (lightning({"class_path": "DeepSpeedStrategy", "init_args": [1]}), r"trainer\.strategy\.init_args is \[1\]"),
    (lightning(strategy(None, stage=4)), "0, 1, 2 or 3"),
    (lightning(strategy("missing.json")), r"trainer\.strategy\.init_args\.config is 'missing\.json'; .* path"),
    (lightning(strategy("x" * 5000)), "the path of a DeepSpeed JSON"),
    (lightning(strategy(7)), "it must be a string"),
    (lightning(callbacks=[1]), r"trainer\.callbacks\.0 is 1; it must be a class_path"),
    (lightning(callbacks=[monitor("wide")]), "window_size is 'wide'"),  # type: ignore[arg-type]
    (lightning(callbacks=[schedule([1])]), "it must be a mapping"),
    (lightning(callbacks=[schedule({"first": 2})]), "a mapping of epochs"),
    (lightning(callbacks=[schedule({0: 0})]), r"scheduling\.0 is 0"),
    (lightning(data={"batch_size": 0}), r"data\.batch_size is 0"),
    ({"trainer": [1]}, r"trainer is \[1\]; it must be a mapping"),
    (engine(train_batch_size=1.5), r"config\.json:\d: train_batch_size is 1\.5; .* or 'auto'"),
    (engine(train_micro_batch_size_per_gpu="some"), "it must be an integer of at least 1 or 'auto'"),
    (engine(gradient_clipping=[1]), "a finite number of at least 0"),
    (engine(gradient_clipping=float("inf")), r"config\.json:\d: gradient_clipping is inf; it must be a finite number"),
    (engine(zero_optimization=2), "zero_optimization is 2; it must be a mapping"),
    (engine(zero_optimization={"stage": 4}), "0, 1, 2 or 3"),
    (engine(bf16={"enabled": 1}), "true or false"),
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
    (
        "c.yaml",
        b"trainer:\n  devices: !!python/name:os.system ''\n",
        r":2: is not plain YAML \(could not determine a constructor",
    ),
    (
        "c.yaml",
        b"trainer:\n  devices: !mine 2\n",
        r":2: is not plain YAML \(could not determine a constructor for the tag '!mine'",
    ),
    ("c.yaml", b"!!set {trainer}\n", r"has no keys"),
    ("c.yaml", b"trainer: {devices: 1}\ntrainer: {devices: 2}\n", r":2: trainer is repeated \(first in line 1\)"),
    ("c.yaml", b"trainer:\n  devices: 1\n  'devices': 2\n", r":3: trainer\.devices is repeated"),
    ("c.yaml", b"trainer: {? [a] : 1}\n", ":1: is not plain YAML .found unhashable key"),
    ("c.yaml", b"trainer: {devices: 1\n", "is not plain YAML"),
    ("c.yaml", b"trainer: *missing\n", "is not plain YAML"),
    ("c.yaml", b"---\ntrainer: 1\n---\ntrainer: 2\n", "is not plain YAML"),
    ("c.yaml", b"trainer: {devices: !!int two}\n", ":1: is not plain YAML"),
    ("c.yaml", b"trainer: {devices: !!timestamp two}\n", ":1: is not plain YAML"),
    ("c.yaml", b"trainer: {<<: 3}\n", ":1: is not plain YAML .expected a mapping or list of mappings for merging"),
    ("c.yaml", b"trainer: &a {<<: *a}\n", "nested more than"),
    ("c.yaml", b"trainer: {<<: &a [*a]}\n", "nested more than"),
    ("c.yaml", b"trainer: &a\n  b: *a\n", "nested more than"),
    ("c.yaml", b"trainer: {devices: " + b"9" * 5000 + b"}\n", "."),
    ("c.yaml", b"[" * 30_000, "nested more than"),
    ("c.yaml", b"{a: " * 90 + b"1" + b"}" * 90, "nested more than"),
    ("c.yaml", (BOMB + "trainer: {}\n").encode(), "with its aliases expanded"),
    ("c.yaml", MERGE_BOMB.encode(), "with its aliases expanded"),
    ("c.yaml", b"", "is empty"),
    ("c.yaml", b"# nothing\n", "is empty"),
    ("c.yaml", b"- trainer\n", "has no keys"),
    ("c.yaml", b"model: {}\n", "is not a known kind of config; a LightningCLI config has 'trainer'"),
    ("c.yaml", b"\x00\x01\xff\xfe", "is not UTF-8 text"),
    ("c.yaml", b"trainer: \x00", "is not plain YAML"),
    ("c.yaml", b'trainer: "\\UFFFFFFFF"', "is not plain YAML"),
    ("c.yaml", b"#" * (config_file.MAX_BYTES + 1), "is larger than 256 KiB"),
    ("c.json", b"", "is not JSON"),
    ("c.json", b"[1]", "has no keys"),
    ("c.json", b"{}", "is not a known kind of config"),
    (
        "c.json",
        b'{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": true}',
        "not a known kind",
    ),
    ("c.json", b'{"zero_optimization": {"stage": 2,\n "stage": 3}}', r":2: zero_optimization\.stage is repeated"),
    ("c.json", b'{// why\n"bf16": {}}', r":1: is not JSON .*comments"),
    ("c.json", b'{"train_batch_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    ("c.json", b'{"train_batch_size": 1e999}', "it must be an integer"),
    ("c.json", b'{"a":' * 50_000, "nested more than"),
    ("c.json", b'{"a":' * 90 + b"1" + b"}" * 90, "nested more than"),
    ("c.toml", b"[training]\nsteps = 1\n", r"TOML is not read: .*; give a .yaml of"),
    ("c.ini", b"[a]", "is not a known kind of config; give a .yaml"),
    ("c", b"trainer: {}", "is not a known kind of config; give a .yaml"),
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


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name, words in [
        ("missing.yaml", "cannot be read (No such file"),
        ("folder.yaml", "cannot be read (Is a directory"),
        ("x" * 300 + ".yaml", "cannot be read"),
        ("\0.yaml", "cannot be read"),
    ]:
        assert cli.main(["lint", str(tmp_path / name)]) == WRONG
        assert words in capsys.readouterr().err


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base\n  accumulate_grad_batches: 4\n  devices: 1\n"
        "trainer:\n  <<: *base\n  strategy: deepspeed\n  devices: 2\n"
    )
    (finding,) = lint([path], Options(deepspeed=NEW))
    assert finding.code == "DBL01" and "1/16" in finding.what and finding.line == 6


# Lint never fails but with an InputError.

SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 12),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "value", "norm", "bf16-mixed", "fp32", "0,1", "2", "1e-1", "", "deepspeed_stage_3"]),
    st.text(max_size=4),
)
ANY = st.recursive(
    SMALL, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
ENGINE_KEYS = {
    "train_batch_size": st.integers(1, 64) | ANY,
    "train_micro_batch_size_per_gpu": st.integers(1, 8) | ANY,
    "gradient_accumulation_steps": st.integers(1, 2000) | ANY,
    "gradient_clipping": st.floats(0, 2) | ANY,
    "zero_optimization": st.fixed_dictionaries({"stage": st.integers(0, 3) | ANY}) | ANY,
    "bf16": st.fixed_dictionaries({"enabled": st.booleans() | ANY}) | ANY,
    "data_types": st.fixed_dictionaries({"grad_accum_dtype": SMALL}) | ANY,
}
ENGINES = st.fixed_dictionaries({}, optional=ENGINE_KEYS)
CALLBACKS = st.lists(
    st.one_of(
        st.builds(monitor, st.integers(1, 120)),
        st.builds(schedule, st.dictionaries(st.integers(0, 5), st.integers(1, 9)) | ANY),
        ANY,
    ),
    max_size=3,
)
TRAINERS = st.fixed_dictionaries(
    {},
    optional={
        "accumulate_grad_batches": st.integers(1, 1000) | ANY,
        "max_steps": st.integers(-1, 1000) | ANY,
        "max_epochs": st.integers(-1, 2000) | ANY,
        "log_every_n_steps": st.integers(0, 100) | ANY,
        "limit_train_batches": st.integers(0, 99) | st.floats(0, 1) | ANY,
        "gradient_clip_val": st.floats(0, 9) | ANY,
        "gradient_clip_algorithm": st.sampled_from(["norm", "value"]) | ANY,
        "strategy": st.one_of(
            st.sampled_from(["ddp", "fsdp", "deepspeed", *(ZERO.format(n) for n in range(4))]),
            st.builds(strategy, ENGINES),
            st.builds(strategy, st.none(), stage=st.integers(0, 3)),
            ANY,
        ),
        "devices": st.integers(1, 9) | ANY,
        "num_nodes": st.integers(1, 3) | ANY,
        "precision": ANY,
        "callbacks": CALLBACKS | ANY,
    },
)
SIZES = st.none() | st.integers(1, 2000)


def never_fails(folder: Path, name: str, content: bytes, options: Options) -> None:
    path = folder / name
    path.write_bytes(content)
    refusal = ""
    try:
        findings = lint([path], options)
    except InputError as error:
        findings, refusal = [], str(error)
    assert not refusal or refusal.startswith(str(path))
    for finding in findings:
        assert len(str(finding).splitlines()) == 4 and finding.code in RULES


@settings(max_examples=300, deadline=None)
@given(
    trainer=TRAINERS | ANY,
    data=st.fixed_dictionaries({}, optional={"batch_size": st.integers(1, 9) | ANY, "drop_last": ANY}) | ANY,
    samples=SIZES,
    world_size=SIZES,
    number=st.sampled_from([None, (0, 17, 6), NEW]),
)
def test_no_lightning_config_fails(
    tmp_path_factory: pytest.TempPathFactory, trainer: Any, data: Any, samples: Any, world_size: Any, number: Any
) -> None:
    content = yaml.safe_dump({"trainer": trainer, "data": data}).encode(errors="replace")
    options = Options(
        samples=samples, world_size=world_size, batch_size=samples and 2, deepspeed=number, lightning=(2, 2, 0)
    )
    never_fails(tmp_path_factory.getbasetemp(), "c.yaml", content, options)


@settings(max_examples=200, deadline=None)
@given(config=ENGINES | ANY, samples=SIZES, world_size=SIZES, number=st.sampled_from([None, (0, 18, 6), NEW]))
def test_no_deepspeed_config_fails(
    tmp_path_factory: pytest.TempPathFactory, config: Any, samples: Any, world_size: Any, number: Any
) -> None:
    options = Options(samples=samples, world_size=world_size, deepspeed=number)
    never_fails(tmp_path_factory.getbasetemp(), "c.json", json.dumps(config).encode(), options)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["c.yaml", "c.json"]),
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.text("trainer:{}[]&a*<!-?,'\"\\\n |>#%=0.1eU\t", max_size=40).map(str.encode)
    | st.text("trainer:{}[]&a*<!-?, \n", max_size=30).map(lambda text: f"trainer: {text}".encode()),
)
def test_no_bytes_fail(tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes) -> None:
    never_fails(tmp_path_factory.getbasetemp(), name, content, Options())


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


def test_configs_are_not_changed(tmp_path: Path) -> None:
    config = lightning(strategy(engine()))
    before = copy.deepcopy(config)
    found(tmp_path, config)
    assert config == before
