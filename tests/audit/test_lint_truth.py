"""What the rules of lint say about a framework, each executed once against it, on the CPU. Needs ``--all``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench import cli
from bench.audit.lint import lint
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import EXAMPLES, rules
from tests.audit.test_lint import CORPUS, findings_in

TRUTHS: dict[str, Callable[[Path], None]] = {}
ELSEWHERE = {
    "THR01": "test_lint.py test_proofs_of_the_monitor_show_their_findings",
    "THR02": "test_lint.py test_proofs_of_the_monitor_show_their_findings",
    "THR03": "docs/versions.md: Lightning 2.2.0 needs an older torch",
    "VER01": "docs/versions.md: measured with each version of DeepSpeed",
    "VER02": "DeepSpeed #7985: needs DeepSpeed 0.18.6",
    "VER03": "docs/versions.md: measured with each version of DeepSpeed",
    "VER04": "docs/known-bad.md: each entry has a reproducer, which tests/audit/test_advisories.py runs",
    "CLP05": "torchtune recipes/full_finetune_distributed.py __init__ was read; torchtune is not installed",
    "OPT03": "lomo_optim needs CUDA",
    "MEM01": "docs/memory-and-bytes.md: peaks of fsdp2-deferred and fsdp2-eager",
    "TOK01": "tests/audit/test_semantics.py: the scenario of tokens counted per rank",
}
"""Rules whose sentences are measured by something else, or cannot be here."""


def truth(*codes: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(function: Callable[[Path], None]) -> Callable[[Path], None]:
        TRUTHS.update(dict.fromkeys(codes, function))
        return function

    return add


def example(code: str, folder: Path) -> Any:
    """The finding of a rule in its own example, and what the example says."""
    (first, *_) = [each for each in EXAMPLES if each.code == code]
    case = yaml.safe_load(f"{{{first.config}}}")
    (finding, *_) = [each for each in findings_in(case, folder) if each.code == code]
    return finding


# --- what a framework refuses


@truth("KEY01", "KEY04")
def _unknown_keys(folder: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from lightning.pytorch import Trainer
    from pydantic import ValidationError

    for key in ("accumulate_grad_batch", "gpus"):
        with pytest.raises(TypeError, match=key):
            Trainer(**{key: 2})
    with pytest.raises(ValidationError, match="enable"):
        DeepSpeedBF16Config(enable=True)
    path = folder / "accelerate.yaml"
    path.write_text(
        yaml.safe_dump(CORPUS["bases"]["accelerate"] | {"gradient_accumulation_steps": 4})
    )
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(path))


@truth("KEY02", "BAT01", "BAT02", "KEY03")
def _deepspeed_config(folder: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    base = CORPUS["bases"]["deepspeed"]
    assert (
        DeepSpeedConfig(base | {"gradient_accumulation_step": 8}).gradient_accumulation_steps == 4
    )
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        DeepSpeedConfig(base | {"train_batch_size": 30})
    without = {key: value for key, value in base.items() if "batch" not in key}
    with pytest.raises(AssertionError, match="train_batch_size"):
        DeepSpeedConfig(without)
    path = folder / "ds.json"
    path.write_text('{// as hjson\n"train_batch_size": 2, "train_batch_size": 2}')
    with pytest.raises(ValueError, match="Duplicate keys"):
        DeepSpeedConfig(str(path))
    assert yaml.safe_load("a: 1\na: 2\n") == {"a": 2}


@truth("SCH01", "SCH02", "CLP02", "CLP04", "GAS01", "AUT01", "THR04")
def _refused_by_lightning(folder: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from lightning.fabric.utilities.throughput import Throughput
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins.precision import FSDPPrecision
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    scheduler, module = GradientAccumulationScheduler({0: 1, 4: 8}), BoringModel()
    for strategy, n, error in (
        (DeepSpeedStrategy(), 1, RuntimeError),
        (DDPStrategy(), 4, ValueError),
    ):
        with pytest.raises(error):
            scheduler.on_train_start(
                SimpleNamespace(strategy=strategy, accumulate_grad_batches=n), module
            )
    by_value = SimpleNamespace(trainer=SimpleNamespace(gradient_clip_algorithm="value"))
    strategy = DeepSpeedStrategy(config={"gradient_accumulation_steps": 4})
    strategy._lightning_module = by_value
    with pytest.raises(MisconfigurationException, match="Do not set `gradient_accumulation_steps`"):
        strategy._format_batch_size_and_grad_accum_config()
    strategy._lightning_module = BoringModel()
    strategy._lightning_module._trainer = SimpleNamespace(
        gradient_clip_algorithm="value", _fabric=None
    )
    with pytest.raises(MisconfigurationException, match="by value"):
        strategy.init_deepspeed()
    with pytest.raises(MisconfigurationException, match="norm"):
        FSDPPrecision("32-true").clip_grad_by_norm(None, 1.0)
    config = DeepSpeedConfig(
        CORPUS["bases"]["deepspeed"] | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    )
    assert config.bfloat16_config.enabled is False
    with pytest.raises(TypeError):
        _ = config.gradient_clipping > 0.0
    with pytest.raises(AssertionError):
        Throughput(window_size=1)


@truth("MIS01", "CLP03")
def _filled_in_by_the_trainer(folder: Path) -> None:
    """Values other than 'auto' must be those of TrainingArguments; what is missing is not filled in."""
    from accelerate import DeepSpeedPlugin
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = {
        "world_size": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.25,
        "learning_rate": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "save_on_each_node": False,
        "fp16": False,
        "fp16_full_eval": False,
        "bf16": False,
        "bf16_full_eval": False,
        "get_warmup_steps": lambda steps: 0,
        "optim": "adamw_torch",
    }
    auto = CORPUS["bases"]["auto"]
    given = [auto | {"gradient_clipping": 0.5}, auto | {"gradient_accumulation_steps": 8}, auto]
    for config, is_refused in zip(given, (True, True, False), strict=True):
        filled = HfTrainerDeepSpeedConfig(json.loads(json.dumps(config)))
        filled.trainer_config_process(SimpleNamespace(**arguments))
        if is_refused:
            with pytest.raises(ValueError, match="correct the following DeepSpeed config"):
                filled.trainer_config_finalize(SimpleNamespace(**arguments), None, 10)
        else:
            filled.trainer_config_finalize(SimpleNamespace(**arguments), None, 10)
            assert filled.config["gradient_clipping"] == 0.25
    silent = HfTrainerDeepSpeedConfig(
        {key: value for key, value in auto.items() if key != "gradient_clipping"}
    )
    silent.trainer_config_process(SimpleNamespace(**arguments))
    assert "gradient_clipping" not in silent.config
    # BAT01: accelerate sets a missing N to 1, after the Trainer has filled in the batch sizes.
    auto = {key: value for key, value in auto.items() if key != "gradient_accumulation_steps"}
    for more, is_refused in (({"train_batch_size": "auto"}, True), ({}, False)):
        filled = HfTrainerDeepSpeedConfig(auto | more)
        filled.trainer_config_process(SimpleNamespace(**arguments))
        made = DeepSpeedPlugin(hf_ds_config=filled).deepspeed_config
        assert made["gradient_accumulation_steps"] == 1
        made = made | {"steps_per_print": 1}
        if is_refused:
            with pytest.raises(AssertionError, match="train_batch_size is not equal"):
                DeepSpeedConfig(made)
        else:
            assert DeepSpeedConfig(made).train_batch_size == 4


@truth("MIS02")
def _beside_a_file(folder: Path) -> None:
    from accelerate import DeepSpeedPlugin

    path = folder / "ds.json"
    path.write_text(json.dumps(CORPUS["bases"]["auto"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,mixed_precision")
        with pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin(hf_ds_config=str(path))


@truth("OPT02")
def _layerwise(folder: Path) -> None:
    import torch
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _setup_low_rank_optimizer

    name = "galore_adamw_layerwise"
    arguments = TrainingArguments(
        output_dir=str(folder),
        gradient_accumulation_steps=4,
        optim_target_modules=["0"],
        use_cpu=True,
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="does not support gradient accumulation"):
        _setup_low_rank_optimizer(arguments, model, name, {name: torch.optim.AdamW}, {}, {})


# --- what is counted and logged


@truth("STP04", "STP05", "LOG01", "LOG02", "BAT04", "BAT05")
def _counts_of_the_trainer(folder: Path) -> None:
    """max_steps alone ends training, a warm-up that is too long ends it below its peak, and rare logs never come."""
    log = trained(folder, max_steps=3, num_train_epochs=9, warmup_steps=6, logging_steps=1)
    rates = [each["learning_rate"] for each in log if "learning_rate" in each]
    assert len(rates) == 3 and max(rates) == pytest.approx(0.1 * 2 / 6)
    assert not any("loss" in each for each in trained(folder, max_steps=3, logging_steps=5))
    rare = trained(folder, max_steps=3, eval_strategy="steps", eval_steps=5, logging_steps=5)
    assert [each["step"] for each in rare if "eval_runtime" in each] == [3]  # at the end
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), accelerator_config={"split_batches": True}, use_cpu=True
    )
    assert arguments.accelerator_config.split_batches
    from accelerate.utils.memory import find_executable_batch_size

    sizes = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")

    train()
    assert sizes[0] == 8 and sizes[-1] <= 4


def trained(folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The log of a small training by Hugging Face's Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": (self.weight * x).sum()}

    given = {
        "learning_rate": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    made = TrainingArguments(
        output_dir=str(folder), gradient_accumulation_steps=2, **given, **arguments
    )
    data = [{"x": torch.ones(2)} for _ in range(64)]
    trainer = Trainer(model=Model(), args=made, train_dataset=data, eval_dataset=data)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return list(trainer.state.log_history)


Record = dict[str, Any]


def weights(record: Record) -> list[float]:
    """Of each update, its sum of coefficients, 1 of the right one."""
    return [update["sum"] / update["right_sum"] for update in record["updates"]]


def crosses_epochs(record: Record) -> bool:
    return any(len(update["epochs"]) > 1 for update in record["updates"])


def limit(record: Record) -> int:
    return int(record["scenario"]["max_steps"] or 0)


def counted(record: Record) -> int:
    return int(record["steps_reported"]["trainer.global_step"])


def is_shown(code: str, records: dict[str, Record]) -> bool:
    """Whether small trainings, by backend, do what the rule says."""
    last = list(records.values())[-1]
    if code == "DBL01":
        return set(weights(records["lightning-deepspeed-zero2"])) == {0.25} and {
            *weights(last)
        } == {1.0}
    if code == "DBL02":
        clipped, unclipped = (
            [update["sum"] for update in records[name]["updates"]]
            for name in ("lightning-ddp", "lightning-deepspeed-zero2")
        )
        return clipped == pytest.approx([0.75] * len(clipped), abs=0.01) and {*unclipped} == {0.25}
    steps = last["optimizer_steps_observed"]
    shown = {
        "TAIL01": min(weights(last)) == 0.5,
        "TAIL02": crosses_epochs(last),
        "TAIL03": "trainer.global_step" in last["steps_reported"] and counted(last) != steps,
        "TAIL04": last["samples_lost"] > 0,
        "TAIL05": last["samples_left_open"] > 0,
        "WIN01": crosses_epochs(last),
        "DEV01": weights(last)[-1] == 0.5,
        "STP01": steps == limit(last) and last["micro_batches"] < limit(last) * 4,
        "STP02": steps > limit(last),
        "STP03": steps < limit(last) and last["stopped"] == "ended",
    }
    return bool(shown[code])


def proved(code: str) -> Callable[[Path], None]:
    """Run the proof of a finding, which is a small training of the same structure."""

    def run(folder: Path) -> None:
        cases = [yaml.safe_load(f"{{{each.config}}}") for each in EXAMPLES if each.code == code]
        proofs = [
            each.proof for case in cases for each in findings_in(case, folder) if each.code == code
        ]
        (proof, *_) = [proof for proof in proofs if proof.startswith("python -m bench semantics ")]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            cli.main([*proof.partition(" (")[0].split()[3:], "--json"])
        answer = json.loads(out.getvalue())
        if isinstance(answer, dict):
            answer = [answer]
        assert is_shown(code, {record["backend"]: record for record in answer}), answer

    return run


for _code in (
    "DBL01",
    "DBL02",
    *(f"TAIL0{n}" for n in range(1, 6)),
    "WIN01",
    "DEV01",
    "STP01",
    "STP02",
    "STP03",
):
    TRUTHS[_code] = proved(_code)


# --- sums


@truth("ACC01", "ACC02")
def _sums(folder: Path) -> None:
    """The one-liner of the finding, and DeepSpeed's own check of what it can add."""
    finding = example("ACC01", folder)
    command = re.search(r'python -c "([^"]+)"', finding.proof)
    assert command
    done = subprocess.run(
        [sys.executable, "-c", command.group(1)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) != 1.0
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = SimpleNamespace(
        get_data_types=lambda: (torch.bfloat16, torch.float32),
        zero_optimization=lambda: False,
        zero_allow_untested_optimizer=lambda: True,
        amp_enabled=lambda: False,
        bfloat16_enabled=lambda: True,
        pipeline_parallelism=False,
    )
    with pytest.raises(NotImplementedError, match="unsupported mix"):
        DeepSpeedEngine._do_optimizer_sanity_check(engine, None)


# --- accelerate with DeepSpeed's engine, in a process of its own

ENGINE = """
import json, os, sys
asked = json.loads(sys.argv[1])
os.environ.update(asked["environment"], ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
import torch
torch.distributed.init_process_group("gloo", init_method="file://" + asked["store"], rank=0, world_size=1)
from bench.backends.deepspeed import prepare
prepare()
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
PartialState(backend="gloo")
plugin = DeepSpeedPlugin(**asked["plugin"])
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=asked["n"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=2)
engine, *_ = accelerator.prepare(model, optimizer, loader)
print("FOUND", json.dumps([engine.gradient_clipping(), engine.gradient_accumulation_steps()]))
"""


def engine_of(folder: Path, plugin: dict[str, Any], n: int = 1, **environment: str) -> list[float]:
    """The clipping threshold and N of the engine that accelerate makes."""
    store = folder / f"store{len(list(folder.iterdir()))}"
    asked = json.dumps({"plugin": plugin, "n": n, "environment": environment, "store": str(store)})
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, asked],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ranks,
    )
    line = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert line, done.stderr[-3000:]
    found: list[float] = json.loads(line[-1].removeprefix("FOUND "))
    return found


@truth("CLP01", "GAS02", "GAS03")
def _engine_of_accelerate(folder: Path) -> None:
    """A threshold of 0 becomes 1.0, as does a missing one; N is that of the YAML, and 1 where a file is silent."""
    from deepspeed.runtime.config import DeepSpeedConfig

    without = {
        key: value
        for key, value in CORPUS["bases"]["deepspeed"].items()
        if key != "gradient_clipping"
    }
    assert DeepSpeedConfig(without).gradient_clipping == 1.0
    stage = {"zero_stage": 2}
    assert engine_of(folder, stage, 2, ACCELERATE_GRADIENT_CLIPPING="0.0") == [1.0, 2]
    steps = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert engine_of(folder, stage, 2, **steps) == [1.0, 4]
    path = folder / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2})
    )
    assert engine_of(folder, {"hf_ds_config": str(path)}, 4)[1] == 1


@truth("SCH03", "SCH04", "OPT01", "BAT03")
def _schedules(folder: Path) -> None:
    """A prepared scheduler steps once per rank; estimated_stepping_batches knows the first N only."""
    import torch
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, GradientState

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", lambda self, *_, **__: None)
        patch.setattr(AcceleratorState, "num_processes", 2, raising=False)
        GradientState._reset_state()
        prepared = AcceleratedScheduler(schedule, SimpleNamespace(step_was_skipped=False))
        for _ in range(4):
            prepared.step()
    assert schedule.last_epoch == 8
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.demos.boring_classes import BoringModel

    estimates = []

    class Module(BoringModel):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    callback = GradientAccumulationScheduler({0: 1, 1: 4})
    trainer = Trainer(
        max_epochs=2, limit_train_batches=8, limit_val_batches=0, callbacks=[callback], **quiet
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(Module())
    assert estimates == [16] and trainer.global_step == 8 + 2


@pytest.mark.torch
def test_what_accelerate_writes_is_known(tmp_path: Path) -> None:
    """No key that accelerate itself writes is unknown."""
    from accelerate.commands.config.config_args import ClusterConfig

    made = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="NO",
        mixed_precision="no",
        use_cpu=False,
        debug=False,
    )
    path = tmp_path / "default.yaml"
    made.to_yaml_file(str(path))
    assert lint([path], LintOptions()) == []


def test_every_rule_has_been_executed() -> None:
    assert TRUTHS.keys() | ELSEWHERE.keys() == rules().keys()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("code", sorted(TRUTHS))
def test_a_rule_says_what_happens(code: str, tmp_path: Path) -> None:
    TRUTHS[code](tmp_path)
