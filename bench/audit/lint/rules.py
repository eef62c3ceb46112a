"""What lint can find: the table of rules, and a finding."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.words import plain


class Severity(StrEnum):
    """How bad a finding is. Errors and warnings make the exit status 1, an info does not."""

    ERROR = "error"
    """Training does not start, never ends, or optimizes something other than the config says."""
    WARNING = "warning"
    """Training runs, but steps, scales or logs differ from what the config's numbers suggest."""
    INFO = "info"
    """Worth knowing, but nothing is wrong yet."""


ERROR, WARNING, INFO = Severity


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of finding."""

    severity: Severity
    """Unless a finding says otherwise."""
    title: str
    """One line, for lists."""
    source: str
    """Where it can be checked: a file of the framework, or an issue."""


STOPS = "training stops before its first step: "
"""How the proof of what a framework refuses begins."""
ENGINE = "deepspeed/runtime/engine.py"
ENGINE_CONFIG = "deepspeed/runtime/config.py"
STRATEGY = "lightning/pytorch/strategies/deepspeed.py"
FORMATS = f"{STRATEGY} _format_batch_size_and_grad_accum_config"
SCHEDULER = "lightning/pytorch/callbacks/gradient_accumulation_scheduler.py"
LOOP = "lightning/pytorch/loops/training_epoch_loop.py _should_accumulate"
LOGGER = "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py"
THROUGHPUT = "lightning/fabric/utilities/throughput.py Throughput"

RULES: dict[str, Rule] = {
    "ACC01": Rule(WARNING, "gradients are summed in 16 bits", f"{ENGINE} get_data_types; DeepSpeed #1800"),
    "ACC02": Rule(ERROR, "fp32 sum of 16-bit gradients without ZeRO", f"{ENGINE} _do_optimizer_sanity_check"),
    "AUT01": Rule(ERROR, "'auto' that nothing fills in", f"{STRATEGY}; Lightning #19891"),
    "BAT01": Rule(ERROR, "batch sizes do not multiply", f"{ENGINE_CONFIG} _batch_assertion"),
    "BAT02": Rule(INFO, "no batch size", f"{ENGINE_CONFIG} _set_batch_related_parameters"),
    "BAT03": Rule(INFO, "two micro-batch sizes", f"{STRATEGY} _auto_select_batch_size"),
    "BAT04": Rule(WARNING, "a micro-batch is split among the ranks", "transformers/training_args.py; accelerate"),
    "BAT05": Rule(WARNING, "effective batch that changes by itself", "transformers/trainer.py"),
    "CLP01": Rule(
        WARNING, "clipping that was not asked for", "deepspeed/runtime/constants.py GRADIENT_CLIPPING_DEFAULT; #8068"
    ),
    "CLP02": Rule(ERROR, "clipping by value with DeepSpeed", f"{STRATEGY} init_deepspeed"),
    "CLP03": Rule(WARNING, "two clipping thresholds", FORMATS),
    "CLP04": Rule(ERROR, "clipping by norm with FSDP", "lightning/pytorch/plugins/precision/fsdp.py; Lightning #19235"),
    "DBL01": Rule(
        ERROR, "loss divided by N twice", f"lightning/pytorch/loops/optimization/automatic.py; {ENGINE} backward"
    ),
    "DBL02": Rule(WARNING, "clipping threshold N times too high", "as DBL01: the norm is N times too small"),
    "DEV01": Rule(WARNING, "fast_dev_run tries a partial window", "lightning/pytorch/trainer/setup.py"),
    "GAS01": Rule(ERROR, "accumulation set in DeepSpeed's config too", FORMATS),
    "GAS02": Rule(WARNING, "accumulation reset to 1", "accelerate/utils/dataclasses.py DeepSpeedPlugin"),
    "GAS03": Rule(
        INFO, "accumulation set outside the script", "accelerate/accelerator.py __init__, _prepare_deepspeed"
    ),
    "KEY01": Rule(ERROR, "unknown key", "bench/audit/lint/keys.toml"),
    "KEY02": Rule(WARNING, "unknown key that is ignored", "bench/audit/lint/keys.toml"),
    "LOG01": Rule(WARNING, "training ends before the first logged step", LOGGER),
    "LOG02": Rule(INFO, "log_every_n_steps counts optimizer steps", LOGGER),
    "MEM01": Rule(INFO, "unsharded gradients between micro-batches", "transformers/trainer.py; accelerate no_sync"),
    "MIS01": Rule(ERROR, "DeepSpeed and TrainingArguments differ", "transformers/integrations/deepspeed.py"),
    "MIS02": Rule(ERROR, "settings beside deepspeed_config_file", "accelerate/utils/dataclasses.py DeepSpeedPlugin"),
    "OPT01": Rule(WARNING, "optimizer or schedule in DeepSpeed's config", f"{STRATEGY} _initialize_deepspeed_train"),
    "OPT02": Rule(ERROR, "layerwise optimizer with accumulation", "transformers/trainer_optimizer.py"),
    "OPT03": Rule(ERROR, "optimizer that steps in every backward", "lomo_optim/lomo.py fused_backward"),
    "SCH01": Rule(ERROR, "GradientAccumulationScheduler with DeepSpeed", SCHEDULER),
    "SCH02": Rule(ERROR, "two accumulation factors", SCHEDULER),
    "SCH03": Rule(INFO, "estimated number of steps ignores that N changes", "lightning/pytorch/trainer/trainer.py"),
    "SCH04": Rule(INFO, "schedule that steps once per rank", "accelerate/scheduler.py; accelerate #2926"),
    "STP01": Rule(WARNING, "max_steps reached early", LOOP),
    "STP02": Rule(WARNING, "max_steps reached late", LOOP),
    "STP03": Rule(WARNING, "max_steps never reached", "lightning/pytorch/loops/fit_loop.py done"),
    "STP04": Rule(WARNING, "num_train_epochs ignored", "transformers/trainer.py set_initial_training_values"),
    "STP05": Rule(WARNING, "warm-up longer than the training", "transformers/training_args.py get_warmup_steps"),
    "TAIL01": Rule(WARNING, "partial window under-weighted", "Lightning #19987"),
    "TAIL02": Rule(WARNING, "partial window carried into the next epoch", "DeepSpeed #7439"),
    "TAIL03": Rule(
        WARNING, "trainer and engine out of phase", "lightning tests/tests_pytorch/strategies/test_deepspeed.py:893"
    ),
    "TAIL04": Rule(
        ERROR, "micro-batches lost in every epoch", "deepspeed/runtime/zero/stage3.py zero_grad; see TAIL03"
    ),
    "TAIL05": Rule(WARNING, "last window of the training dropped", "DeepSpeed #7439"),
    "THR01": Rule(WARNING, "ThroughputMonitor's rates are biased", f"{THROUGHPUT}.compute"),
    "THR02": Rule(WARNING, "ThroughputMonitor never logs a rate", f"{THROUGHPUT}.compute"),
    "THR03": Rule(ERROR, "ThroughputMonitor's check is inverted", "Lightning #19461, fixed in 2.2.1 by #19470"),
    "THR04": Rule(ERROR, "ThroughputMonitor's window is too short", THROUGHPUT),
    "TOK01": Rule(
        WARNING, "tokens weighed by rank", "transformers/trainer.py _get_num_items_in_batch; transformers #34191"
    ),
    "VER01": Rule(ERROR, "ZeRO-2 keeps only the last micro-batch", "DeepSpeed #7718"),
    "VER02": Rule(ERROR, "ZeRO-1 misses the last average", "DeepSpeed #7985"),
    "VER03": Rule(
        WARNING,
        "ZeRO-2 sums in bf16 in spite of the config",
        "docs/versions.md; deepspeed/runtime/zero/stage_1_and_2.py",
    ),
    "WIN01": Rule(WARNING, "fewer micro-batches per epoch than a window", "Lightning #21808"),
}
"""All rules by code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFinding:
    """One finding at one place of one file."""

    code: str
    """A key of RULES."""
    severity: Severity
    file: str
    line: int
    """Counted from 1."""
    key: str
    """Dotted."""
    what: str
    """What will happen, in the config's own numbers."""
    fix: str
    """What to write instead."""
    proof: str
    """The command that shows it in small, or what stops the training before its first step."""

    @property
    def stops(self) -> bool:
        """Whether training does not start, so that nothing else in the config matters yet."""
        return self.severity is Severity.ERROR and self.proof.startswith(STOPS)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with title and source of the rule."""
        rule = RULES[self.code]
        return dataclasses.asdict(self) | {"title": rule.title, "source": rule.source}

    def __str__(self) -> str:
        """The finding as a compiler would print it, in four lines, whatever is in the config."""
        key, what, fix, proof = map(plain, (self.key, self.what, self.fix, self.proof))
        head = f"{self.file}:{self.line}: {self.severity} {self.code} {key}: {RULES[self.code].title}"
        return f"{head}\n    what happens: {what}\n    fix: {fix}\n    proof: {proof}"
