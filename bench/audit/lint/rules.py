"""What lint can find: the table of rules, and a finding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is. Errors and warnings make the exit status 1, an info does not."""

    ERROR = "error"
    """Training does not start, never ends, or trains on something else than the config says."""
    WARNING = "warning"
    """Training runs, but steps, scales or logs differ from what the config's numbers suggest."""
    INFO = "info"
    """Worth knowing; nothing is wrong yet."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of finding."""

    title: str
    """One line, for lists."""
    source: str
    """Where it can be checked: a file of the framework, or an issue."""


RULES: dict[str, Rule] = {
    "ACC01": Rule("gradients are summed in bf16", "deepspeed/runtime/engine.py get_data_types; DeepSpeed #1800"),
    "ACC02": Rule(
        "fp32 accumulation of bf16 gradients without ZeRO",
        "deepspeed/runtime/engine.py _do_optimizer_sanity_check",
    ),
    "AUT01": Rule("'auto' that nobody fills in", "lightning/pytorch/strategies/deepspeed.py; Lightning #19891"),
    "BAT01": Rule("batch sizes that do not multiply", "deepspeed/runtime/config.py _batch_assertion"),
    "BAT02": Rule("no batch size at all", "deepspeed/runtime/config.py _set_batch_related_parameters"),
    "BAT03": Rule("two micro-batch sizes", "lightning/pytorch/strategies/deepspeed.py _auto_select_batch_size"),
    "CLP01": Rule("clipping that was not asked for", "deepspeed/runtime/constants.py GRADIENT_CLIPPING_DEFAULT; #8068"),
    "CLP02": Rule("clipping by value with DeepSpeed", "lightning/pytorch/strategies/deepspeed.py init_deepspeed"),
    "CLP03": Rule(
        "two clipping thresholds",
        "lightning/pytorch/strategies/deepspeed.py _format_batch_size_and_grad_accum_config",
    ),
    "CLP04": Rule("clipping by norm with FSDP", "lightning/pytorch/plugins/precision/fsdp.py; Lightning #19235"),
    "DBL01": Rule(
        "loss divided by N twice",
        "lightning/pytorch/loops/optimization/automatic.py; deepspeed/runtime/engine.py backward",
    ),
    "DBL02": Rule("clipping threshold loosened N times", "as DBL01: the clipped norm is N times too small"),
    "GAS01": Rule(
        "accumulation set beside the Trainer's",
        "lightning/pytorch/strategies/deepspeed.py _format_batch_size_and_grad_accum_config",
    ),
    "LOG01": Rule("metrics of steps that are never logged", "lightning/pytorch .../logger_connector.py"),
    "LOG02": Rule("log_every_n_steps counts optimizer steps", "lightning/pytorch .../logger_connector.py"),
    "SCH01": Rule("GradientAccumulationScheduler with DeepSpeed", "lightning/.../gradient_accumulation_scheduler.py"),
    "SCH02": Rule("two accumulation factors", "lightning/.../gradient_accumulation_scheduler.py"),
    "SCH03": Rule("a changing N makes the estimate of steps wrong", "lightning/pytorch/trainer/trainer.py"),
    "STP01": Rule("max_steps reached early", "lightning/pytorch/loops/training_epoch_loop.py _should_accumulate"),
    "STP02": Rule("max_steps reached late", "lightning/pytorch/loops/training_epoch_loop.py _should_accumulate"),
    "STP03": Rule("max_steps never reached", "lightning/pytorch/loops/fit_loop.py done"),
    "TAIL01": Rule("partial window under-weighted", "Lightning #19987"),
    "TAIL02": Rule("partial window carried into the next epoch", "DeepSpeed #7439"),
    "TAIL03": Rule("trainer and engine out of phase", "lightning tests/tests_pytorch/strategies/test_deepspeed.py:893"),
    "TAIL04": Rule("micro-batches lost in every epoch", "deepspeed/runtime/zero/stage3.py zero_grad; see TAIL03"),
    "TAIL05": Rule("last window of the training dropped", "DeepSpeed #7439"),
    "THR01": Rule(
        "ThroughputMonitor's window holds parts of accumulation windows",
        "lightning/fabric/utilities/throughput.py Throughput.compute",
    ),
    "THR02": Rule("ThroughputMonitor never logs a rate", "lightning/fabric/utilities/throughput.py Throughput.compute"),
    "THR03": Rule("ThroughputMonitor's inverted check", "Lightning #19461, fixed in 2.2.1 by #19470"),
    "THR04": Rule("ThroughputMonitor's window is too short", "lightning/fabric/utilities/throughput.py Throughput"),
    "VER01": Rule("ZeRO-2 keeps only the last micro-batch", "DeepSpeed #7718"),
    "VER02": Rule("ZeRO-1 misses the last average", "DeepSpeed #7985"),
    "VER03": Rule(
        "ZeRO-2 sums in bf16 whatever is asked for", "docs/versions.md; deepspeed/runtime/zero/stage_1_and_2.py"
    ),
    "WIN01": Rule("fewer micro-batches per epoch than a window", "Lightning #21808"),
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; title and source of the rule with them."""
        rule = RULES[self.code]
        return {
            "code": self.code,
            "severity": self.severity.value,
            "title": rule.title,
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "what": self.what,
            "fix": self.fix,
            "proof": self.proof,
            "source": rule.source,
        }

    def __str__(self) -> str:
        """The finding as a compiler would say it, over four lines."""
        return (
            f"{self.file}:{self.line}: {self.severity} {self.code} {self.key}: {RULES[self.code].title}\n"
            f"    what happens: {self.what}\n    fix: {self.fix}\n    proof: {self.proof}"
        )
