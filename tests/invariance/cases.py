"""Training scripts, right and wrong, and what a comparison of two splits must say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.audit.command import audited_command
from bench.audit.invariance.invariance_verdict import (
    DIFFERENT,
    NOT_COMPARABLE,
    NOT_JUDGED,
    ROUNDED,
    InvarianceVerdict,
)
from bench.audit.invariance.split_runs import SplitRun, read
from bench.audit.invariance.splits import TrainingSplit

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (Path(__file__).parent / "scripts", ROOT / "tests/audit_command/scripts")
BATCH, UPDATES = 8, 3


@dataclass(frozen=True)
class SplitCase:
    """A script, its verdict, and the topic of a finding and a word of its text."""

    script: str
    verdict: str
    topic: str = ""
    word: str = ""
    about: str = ""
    ranks: int = 1
    accumulate: int = 4

    @property
    def name(self) -> str:
        return self.script if self.ranks == 1 else f"{self.script} on {self.ranks}"


def right(script: str, about: str = "", ranks: int = 1) -> SplitCase:
    return SplitCase(script, ROUNDED, about=about, ranks=ranks)


def wrong(script: str, topic: str, word: str, about: str, ranks: int = 1) -> SplitCase:
    return SplitCase(script, DIFFERENT, topic, word, about, ranks)


def compare(cases: Sequence[SplitCase], folder: Path) -> list[InvarianceVerdict]:
    """The verdicts of cases, whose processes share the import of torch."""
    jobs = []
    for number, case in enumerate(cases):
        for run, count in enumerate((1, 1, case.accumulate)):
            environment = {"ACCUMULATE": str(count), "BATCH": str(BATCH // count)}
            job = {"name": f"{number}/{run}", "script": case.script, "ranks": case.ranks}
            jobs.append(job | {"environment": environment})
    ours = audited_command.environment(folder, UPDATES) | {"BENCH_AUDIT_FOR": "invariance"}
    paths = f"{ours['PYTHONPATH']}{os.pathsep}{ROOT}"
    subprocess.run(
        [sys.executable, "-m", "tests.invariance.forked_splits", str(folder / "runs")],
        input=json.dumps(jobs),
        text=True,
        env=ours | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    verdicts = []
    for number, case in enumerate(cases):
        counts = (1, 1, case.accumulate)
        first, again, other = (
            _run(folder / "runs" / str(number) / str(run), count)
            for run, count in enumerate(counts)
        )
        verdicts.append(InvarianceVerdict([first, other], again, UPDATES))
    return verdicts


def _run(folder: Path, count: int) -> SplitRun:
    split = TrainingSplit(f"N={count} B={BATCH // count}", (), count, BATCH // count)
    return SplitRun(split, int((folder / "status").read_text()), read(folder))


PAIRS = (
    right("state plain"),
    wrong("state plain-undivided", "gradient differs", "(N)", "the loss is not divided"),
    wrong("state plain-twice", "gradient differs", "1/N", "the loss is divided twice"),
    wrong("state lost", "gradient differs", "all", "zero_grad before each micro-batch"),
    wrong("state stepout", "micro-batches", "1 of 4", "a step at each micro-batch"),
    wrong("state offbyone", "micro-batches", "3 of 4", "a window of 3, counted from 1"),
    right("state ema"),
    wrong("state ema-each", "copy differs", "shadow", "a moving average per micro-batch"),
    right("state average"),
    wrong("state average-each", "copy differs", "average", "the same in a list of tensors"),
    right("state swa"),
    wrong("state swa-each", "copy differs", "", "an average of weights per micro-batch"),
    right("state schedule"),
    wrong("state schedule-each", "position", "instead of", "a schedule per micro-batch"),
    right("state clip"),
    wrong("state clip-each", "gradient differs", "", "clips at each micro-batch"),
    right("state clip-value"),
    wrong("state clip-value-each", "gradient differs", "", "the same, each element"),
    right("state scaler"),
    wrong("state scaler-each", "gradient differs", "", "unscaled by hand per micro-batch"),
    right("state lengths"),
    wrong("state lengths-mean", "mean of means", "terms", "micro-batches of unequal length"),
    right("state empty", "a micro-batch without a token that counts adds nothing"),
    wrong("state empty-mean", "gradient differs", "", "the mean over none of its tokens is NaN"),
    wrong(
        "state moe-auxiliary", "gradient differs", "router", "an auxiliary loss that is not divided"
    ),
    right("state moe", "experts with an auxiliary loss, whose bias is moved once per update"),
    wrong("state moe-each", "buffer differs", "router", "the bias is moved per micro-batch"),
    right("state noise", "gradient noise once per update"),
    wrong("state noise-each", "gradient differs", "", "gradient noise per micro-batch"),
    right("state penalty"),
    wrong("state penalty-each", "gradient differs", "", "a penalty that is not divided"),
    right("state orthogonal"),
    wrong(
        "state orthogonal-each",
        "gradient differs",
        "",
        "orthogonal factors, as Muon's, per micro-batch",
    ),
    right("state galore"),
    wrong(
        "state galore-each",
        "gradient differs",
        "",
        "projected to rank 4, as by GaLore, per micro-batch",
    ),
    wrong("state sign-each", "gradient differs", "", "signs per micro-batch"),
    right("state sign"),
    right("state decay"),
    wrong("state decay-each", "parameters move", "", "parameters decay per micro-batch"),
    right("state divide"),
    wrong("state divide-each", "gradient differs", "", "the sum so far is halved per micro-batch"),
    right("state partial"),
    right("state carried", "what is left of an epoch belongs to the first update of the next"),
    wrong(
        "state partial-divided", "gradient differs", "update 3", "a last window of 2, divided by 4"
    ),
)
RIGHT_ONES = (
    right("state sgd"),
    right("state adafactor"),
    right("state rmsprop"),
    right("state adagrad"),
    right("state nadam"),
    right("state muon"),
    right("state sparse"),
    right("state tied"),
    right("state lora"),
    right("state checkpoint"),
    right("state codes", "a quantized state of the optimizer"),
    right("state smoothing"),
    right("state double", "float64"),
    right("state autocast", "bf16 by autocast"),
    right("state bfloat16", "all in bf16"),
    right("state shuffle"),
    right("state workers"),
)
NAMED = (
    SplitCase("state dropout", NOT_JUDGED, "not judged", "dropout", "two layers of dropout"),
    SplitCase("state batchnorm", NOT_JUDGED, "not judged", "BatchNorm"),
    SplitCase("state batchnorm-by-hand", NOT_JUDGED, "not judged", "a batch norm"),
    SplitCase("state spectral", NOT_JUDGED, "not judged", "spectral normalization"),
    SplitCase("state contrastive", NOT_JUDGED, "not judged", "contrasted"),
    SplitCase("state contrastive-by-hand", NOT_JUDGED, "not judged", "contrasted"),
    SplitCase("state quantized", NOT_JUDGED, "not judged", "quantized"),
    SplitCase("state unseeded", NOT_COMPARABLE, "A/A", "seed the model"),
    SplitCase("state sampler", NOT_COMPARABLE, "A/A", "seed the sampler"),
    SplitCase("state lbfgs", NOT_COMPARABLE, "not comparable", "several backwards"),
)
RANKS = (
    right("ddp right", ranks=2),
    right("ddp eager", ranks=2),
    right("ddp clip", ranks=2),
    right("ddp manual", ranks=2),
    right("ddp flush-right", ranks=2),
    wrong("ddp underweight", "gradient differs", "update 3", "a last window of 2, divided by 4", 2),
    wrong(
        "ddp late", "gradient differs", "", "the first micro-batch synchronizes, not the last", 2
    ),
    wrong("ddp clip-early", "gradient differs", "", "clips at each micro-batch", 2),
    wrong("ddp zero-before", "gradient differs", "", "zero_grad before each micro-batch", 2),
    wrong("ddp undivided", "gradient differs", "(N)", "the loss is not divided", 2),
    wrong("ddp unwrapped", "not reduced", "", "the module in DDP is called, not DDP", 2),
    right("fsdp2 eager", ranks=2),
    right("fsdp2 deferred", ranks=2),
    right("fsdp2 bf16-fp32", ranks=2),
    wrong("fsdp2 undivided", "gradient differs", "(N)", "the loss is not divided", 2),
    right("parallel tensor", ranks=2),
    right("ranks head", ranks=2),
    wrong("ranks head-bypassed", "not reduced", "net.1", "a head whose DDP is bypassed", 2),
    right("ranks pipeline", "1F1B with more micro-batches", ranks=2),
    wrong(
        "ranks pipeline-several",
        "gradient differs",
        "",
        "1F1B several times per update, scale_grads=True",
        2,
    ),
    right("ranks pipeline-divided-later", "the same with scale_grads=False", ranks=2),
    right("ranks tensor", "tensor parallel layers in FSDP2", ranks=4),
    wrong(
        "ranks tensor-undivided", "gradient differs", "(N or W)", "the head's gradient times N", 4
    ),
    right("ranks titan", "sums over the tokens of the window, and FSDP2 that sums", ranks=2),
    wrong(
        "ranks titan-micro-batch",
        "gradient differs",
        "(N)",
        "sums over the tokens of the micro-batch",
        2,
    ),
)
CASES = (*PAIRS, *RIGHT_ONES, *NAMED, *RANKS)
_EVERYDAY = (
    "state ema-each",
    "state moe-each",
    "state lengths-mean",
    "state partial-divided",
    "state schedule-each",
    "state dropout",
    "state unseeded",
    "state autocast",
    "ddp late on 2",
    "fsdp2 deferred on 2",
)
EVERYDAY = tuple(case for case in CASES if case.name in _EVERYDAY)
"""One of each kind."""
FRAMEWORKS = (
    right("accelerate right"),
    right("accelerate short-scaled", "a last window of 2, whose loss is multiplied by 4 / 2"),
    wrong(
        "accelerate short", "gradient differs", "update 3", "a last window of 2: stock Accelerate"
    ),
    wrong("accelerate twice", "gradient differs", "1/N", "the loss is divided twice"),
    right("hf right"),
    wrong("hf twice", "gradient differs", "1/N", "the loss is divided twice"),
    wrong("hf ignores-items", "mean of means", "", "a compute_loss without num_items_in_batch"),
    right("deepspeed right 2", ranks=2),
    right("deepspeed right 3", ranks=2),
    right("deepspeed clip 2", ranks=2),
    wrong(
        "deepspeed twice 2",
        "gradient differs",
        "1/N",
        "the loss is divided, and by the engine again",
        2,
    ),
    right("lightning right ddp", ranks=2),
    wrong("lightning twice ddp", "gradient differs", "1/N", "the loss is divided twice", 2),
    right(
        "lightning partial-scaled ddp", "a last window of 2, whose loss is multiplied by 4 / 2", 2
    ),
    wrong(
        "lightning partial ddp",
        "gradient differs",
        "update 3",
        "a last window of 2: stock Lightning",
        2,
    ),
    right("lightning right fsdp2", ranks=2),
    right("lightning multiplied deepspeed", "the loss is multiplied by N", ranks=2),
    wrong(
        "lightning right deepspeed",
        "gradient differs",
        "1/N",
        "divided by the Trainer and by DeepSpeed: stock Lightning",
        2,
    ),
    right("lightning manual alone", "manual optimization with a schedule"),
    wrong(
        "lightning manual-undivided alone",
        "gradient differs",
        "B=2: the gradient",
        "manual optimization without a division",
    ),
    wrong(
        "lightning manual-schedule-each alone",
        "position",
        "instead of",
        "manual optimization, a schedule per micro-batch",
    ),
    right("lightning average alone"),
    wrong(
        "lightning average-each alone",
        "copy differs",
        "SmallLM",
        "a callback that averages at each batch",
    ),
    right("lightning clip alone"),
    wrong(
        "lightning clip-each alone",
        "gradient differs",
        "",
        "clips in `on_after_backward`, which each micro-batch runs",
    ),
)
TORCHTITAN = (
    right("torchtitan right", "divided by the tokens of the window", ranks=2),
    wrong(
        "torchtitan mean-of-means",
        "gradient differs",
        "",
        "divided by N times the tokens of the micro-batch",
        2,
    ),
    wrong(
        "torchtitan micro-batch",
        "gradient differs",
        "",
        "divided by the tokens of the micro-batch",
        2,
    ),
    wrong("torchtitan clip-each", "gradient differs", "", "clips at each micro-batch", 2),
)
CASES = (*CASES, *FRAMEWORKS, *TORCHTITAN)
