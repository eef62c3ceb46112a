"""Training scripts as users write them, right and wrong, and the verdict that each must get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.audit.command import audited_command
from bench.audit.command.audit_screen import document
from bench.audit.command.training_audit import (
    IN_PART,
    NOT_JUDGED,
    RIGHT,
    RIGHT_FOR_MAIN,
    TrainingAudit,
)
from bench.backends.torchtitan import TorchtitanEager
from bench.plan.cell import Device

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ALONE = ("single", "several", "kinds", "spawn", "lightning")
"""Scripts of one process, and those that start their ranks themselves."""
OPEN = (RIGHT_FOR_MAIN, IN_PART, NOT_JUDGED)
"""Verdicts of scripts with nothing wrong of which not everything is judged."""


def missing(script: str) -> str:
    """What a script of torchtitan needs that this machine lacks; empty if nothing."""
    if script.startswith("torchtitan"):
        return TorchtitanEager.missing(Device.CPU)
    return ""


@dataclass(frozen=True)
class Case:
    """A script with its arguments, the verdict, and a finding that must be among the others."""

    script: str
    verdict: str
    finding: str = ""
    about: str = ""
    ranks: int = 2
    """Of torchrun, where the script needs one."""
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        where = ("on one rank",) * (self.ranks == 1)
        return " ".join((self.script, *self.options, *where))

    @property
    def command(self) -> list[str]:
        name, *arguments = self.script.split()
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
        ]
        return [
            sys.executable,
            *([] if name in ALONE else launcher),
            f"train_{name}.py",
            *arguments,
        ]


FAST = (
    Case("single scaler", RIGHT, about="a loss scaler"),
    Case("ddp clip", RIGHT, "deferred"),
    Case("fsdp2 deferred", RIGHT, "deferred"),
    Case("single tied", RIGHT, about="an embedding that is the head, too"),
    Case("single penalty", RIGHT, about="autograd.grad within a window"),
    Case("single lbfgs", NOT_JUDGED, "not judged", "an optimizer with several backwards per step"),
    Case("single closure", RIGHT, about="the last backward of a window in the optimizer's closure"),
    Case("several gan", RIGHT, "other loss", "two backwards of one optimizer, one of another"),
    Case("ddp loss-inside", RIGHT, about="the model in DDP returns its loss"),
    Case("ddp late", "partly reduced", about="the first micro-batch synchronizes, not the last"),
    Case("ddp unwrapped", "not reduced", about="the module in DDP is called, not DDP"),
)
"""A representative of each kind."""
SPAWNED = Case("spawn fork", RIGHT, "eager", "ranks forked by the script")
SLOW = (
    Case(
        "single auxiliary",
        RIGHT_FOR_MAIN,
        "other losses",
        about="a second loss with a small factor",
    ),
    Case(
        "single masked",
        "mean of means",
        about="a masked sum over its mask's sum, with masks of 7 to 13",
    ),
    Case("single overflow", RIGHT, about="the loss scaler skips an update"),
    Case("ddp manual", RIGHT, about="all-reduces by hand"),
    Case("ddp right", RIGHT, "deferred", "no_sync until the last micro-batch"),
    Case("ddp eager", RIGHT, "eager", "reduces at each micro-batch"),
    Case("ddp clip-value", RIGHT, about="each element is clipped"),
    Case("ddp clip-divide", RIGHT, about="the sum is clipped and then divided"),
    Case(
        "ddp clip-with-norm",
        RIGHT,
        about="clipped with a norm that was calculated before, as by torchtitan",
    ),
    Case("ddp sparse", RIGHT, about="an embedding with sparse gradients"),
    Case("ddp workers", RIGHT, about="forked data loaders"),
    Case("ddp compile", RIGHT),
    Case("ddp flush-right", RIGHT, about="a last window of 2 micro-batches, divided by 2"),
    Case("ddp each-step", RIGHT, about="a step at each micro-batch"),
    Case("ddp each-step-divided", IN_PART, "scale", "the same, with the loss divided by 4"),
    Case(
        "ddp each-step-divided",
        "other N",
        "scale",
        "a step at each micro-batch, where `--expect 4` asks for four",
        options=("--expect", "4"),
    ),
    Case("ddp undivided", "not divided"),
    Case("ddp n-is-w", "not divided", about="2 micro-batches on 2 ranks: said to be ambiguous"),
    Case("ddp twice", "divided twice"),
    Case("ddp uncleared", "not cleared", about="zero_grad only once per epoch"),
    Case("ddp zero-before", "lost", about="zero_grad before each micro-batch"),
    Case("ddp dropped", "lost", about="the end of an epoch is cleared before it is used"),
    Case(
        "ddp underweight", "partial window", about="a last window of 2 micro-batches, divided by 4"
    ),
    Case(
        "ddp unreduced", IN_PART, "not reduced", "no DDP at all, as before parameters are averaged"
    ),
    Case(
        "ddp ensemble",
        IN_PART,
        "not judged",
        "a model for each rank, with LayerNorms that begin the same",
    ),
    Case(
        "ddp expert",
        IN_PART,
        "not reduced",
        "DDP ignores a parameter that is marked as an expert's",
    ),
    Case(
        "ddp unsynchronized",
        IN_PART,
        "not judged",
        "no DDP, and every rank begins with other parameters",
    ),
    Case("ddp manual-sum", "scaled by ranks", about="all-reduces by hand without a division"),
    Case("ddp differ", "ranks differ", about="windows of 4 and of 2"),
    Case("ddp clip-early", "clips too early", about="clips at each micro-batch"),
    Case(
        "ddp nanogpt", "partly reduced", about="the flag of DDP is set between forward and backward"
    ),
    Case("ddp backward-only", RIGHT, "eager", "no_sync around the backward alone defers nothing"),
    Case("ddp bf16", "low precision", about="the whole model in bf16"),
    Case("fsdp2 eager", RIGHT, "eager"),
    Case("fsdp2 compile", RIGHT),
    Case("fsdp2 undivided", "not divided"),
    Case("fsdp2 never", "no gradient", about="the reduction is never switched on"),
    Case("fsdp2 bf16-fp32", RIGHT, about="bf16, sums in fp32"),
    Case("fsdp2 bf16-deferred", "low precision", about="bf16, sums in bf16"),
    Case("fsdp2 hsdp-deferred", RIGHT, "deferred", ranks=4),
    Case(
        "fsdp2 hsdp-all-reduce",
        RIGHT,
        about="shards are reduced at once, replicas at the end",
        ranks=4,
    ),
    Case("fsdp2 hsdp-never", "no gradient", about="replicas are never reduced", ranks=4),
    Case("deepspeed right 2", RIGHT, "eager"),
    Case("deepspeed right 3", RIGHT, "eager"),
    Case("deepspeed clip 2", RIGHT),
    Case("deepspeed bf16 1", RIGHT, about="bf16 under ZeRO-1, sums in fp32"),
    Case("deepspeed bf16 2", RIGHT, about="bf16 under ZeRO-2, sums in fp32"),
    Case(
        "deepspeed twice 2", "divided twice", about="the loss is divided, and by the engine again"
    ),
    Case("accelerate right", RIGHT),
    Case(
        "accelerate partial",
        "partial window",
        about="a last window of 2 micro-batches: stock Accelerate",
    ),
    Case("accelerate twice", "divided twice"),
    Case(
        "accelerate fsdp2",
        "not sharded",
        about="cpu=True and FSDP2: stock Accelerate trains without it",
    ),
    Case("lightning right ddp", RIGHT),
    Case("lightning twice ddp", "divided twice"),
    Case(
        "lightning partial ddp",
        "partial window",
        about="a last window of 2 micro-batches: stock Lightning",
    ),
    Case("lightning scheduled ddp", RIGHT, about="2 micro-batches in an epoch, 4 in the next"),
    Case("lightning right fsdp2", RIGHT),
    Case("lightning right deepspeed", "divided twice", about="stock Lightning with DeepSpeed"),
    Case("hf right", RIGHT, "token-exact"),
    Case("hf twice", "divided twice"),
    Case(
        "hf ignores-items",
        "not divided, mean of means",
        "mean of means",
        "a compute_loss without num_items_in_batch",
    ),
    Case(
        "titan right", RIGHT, "token-exact", "sums over the tokens of the window, and no averages"
    ),
    Case(
        "titan averaged",
        "scaled by ranks",
        about="sums over the tokens of the window, which FSDP2 averages",
    ),
    Case("titan local-tokens", "scaled by ranks", about="the same over the tokens of one rank"),
    Case(
        "torchtitan right",
        IN_PART,
        "eager",
        "its loss in 8 chunks, each with a backward for the head alone",
    ),
    Case("torchtitan whole", RIGHT, "eager", "its loss of whole rows"),
    Case("torchtitan whole-averaged", "scaled by ranks", about="and FSDP2 averages over ranks"),
    Case("single lora", RIGHT),
    Case("single checkpoint", RIGHT),
    Case("single reentrant", RIGHT, about="checkpointing that runs backwards in the backward"),
    Case("single evaluation", RIGHT, about="an evaluation within a window"),
    Case("single meta", RIGHT, about="a backward on the device meta, as it counts operations"),
    Case("single smoothing", IN_PART, "scale", "label smoothing"),
    Case("single halves", IN_PART, "scale", "two losses with factors of 0.5"),
    Case("single weighted", IN_PART, "scale", "a loss times 0.7"),
    Case("single identical", IN_PART, "scale not judged", "the same batch again and again"),
    Case("single compiled-criterion", IN_PART, "scale not judged"),
    Case("several losses", RIGHT, "scale 1", "two different losses per batch"),
    Case("several shared", IN_PART, "scale not judged", "two backwards of one graph"),
    Case("several actor", RIGHT, "scale 1", "two models, each clipped after its own backward"),
    Case("parallel tensor", RIGHT),
    Case("parallel pipeline", RIGHT),
    Case(
        "parallel pipeline-accumulated",
        "divided again",
        about="1F1B three times per update: each divides the sum",
    ),
    Case("ddp idle", "ranks differ", about="one rank's optimizer never steps"),
    Case("ddp ignored", "not reduced", "reduced less", "DDP ignores one parameter"),
    Case(
        "ddp average-parameters",
        IN_PART,
        "not reduced",
        "parameters are averaged instead of gradients",
    ),
    Case("kinds two-optimizers", RIGHT, about="two optimizers with windows of 1 and of 4"),
    Case(
        "kinds two-optimizers-uncleared", "not cleared", about="of two optimizers one never clears"
    ),
    Case("kinds tasks", IN_PART, "scale", "four losses of one batch, with a backward each"),
    Case("kinds cached", IN_PART, "scale not judged", "contrastive, with cached features"),
    Case("kinds cached-divided", IN_PART, "scale not judged", "the same, and wrongly divided by 4"),
    Case("kinds sharpness-aware", NOT_JUDGED, "not judged", "SAM by hand"),
    Case("kinds hooks", IN_PART, "scale not judged", "hooks of parameters divide by 4"),
    Case("kinds output-hook", RIGHT, about="a hook of the output divides by 4"),
    Case("kinds divide-later", RIGHT, about="the sum is divided before the step"),
    Case(
        "kinds divide-sum", "divided again", about="the sum so far is divided at each micro-batch"
    ),
    Case("kinds second-loss", RIGHT_FOR_MAIN, "other losses", "a second loss is not divided"),
    Case("kinds lengths", "mean of means", about="micro-batches of 2 to 20 rows"),
    Case("kinds sequences", IN_PART, "mean of means", "one sequence of 2 to 20 rows each"),
    Case("kinds clip-infinite", RIGHT, about="only the norm is wanted, at each micro-batch"),
    Case("kinds clip-each", "clips too early", about="clips at each micro-batch"),
    Case("kinds scaler", "clips scaled gradients", about="clips before unscale_"),
    Case("kinds scaler-unscaled", RIGHT, about="clips after unscale_"),
    Case("kinds schedule", RIGHT, "schedule", "the schedule steps at each micro-batch"),
    Case("kinds one-cycle", RIGHT, "schedule", "its schedule is as long as all micro-batches"),
    Case("kinds steps-twice", IN_PART, "steps again", "step() twice with one gradient"),
    Case(
        "kinds head-later",
        IN_PART,
        "other weights",
        "the head's gradient is made smaller on purpose",
    ),
    Case("kinds head-uncleared", "not cleared", about="zero_grad of the encoder alone"),
    Case("kinds adversarial", IN_PART, "discarded", "backwards that attack the input"),
    Case(
        "kinds clip-samples", IN_PART, "unequal weights", "the gradient of each sample is clipped"
    ),
    Case(
        "kinds clip-samples-zeroed",
        IN_PART,
        "unequal weights",
        "the same, with zeros instead of None",
    ),
    Case("kinds meta-tasks", IN_PART, "scale", "a sum over tasks, as MAML has it"),
    Case("kinds branches", IN_PART, "scale", "an undivided loss with a backward in two branches"),
    Case("kinds lengths-squares", IN_PART, "mean of means", "squares of 2 to 20 rows"),
    Case("kinds each-epoch", RIGHT, about="a new optimizer for each epoch"),
    Case("kinds later", IN_PART, "not judged", "an optimizer that begins after sampling"),
    Case("kinds deleted", RIGHT, about="a model that is deleted after training is gone"),
    Case("accelerate fsdp2", RIGHT, "not sharded", "FSDP2's plugin on one rank", ranks=1),
    Case("parallel fsdp1", NOT_JUDGED, "not judged"),
    Case("spawn spawn", RIGHT, "eager"),
)
CASES = (*FAST, SPAWNED, *SLOW)


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=SCRIPTS, env=os.environ | ours, capture_output=True, text=True
    )


def audit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench audit``, in the folder of the scripts."""
    return _run([sys.executable, "-m", "bench", "audit", *arguments], environment)


def audit_case(case: Case, **environment: str) -> dict[str, Any]:
    """The audit of a case as data; its exit status is checked."""
    found = audit("--json", *case.options, "--", *case.command, **environment)
    assert found.returncode in (0, 1, 3), found.stderr[-3000:]
    assert found.stdout, found.stderr[-3000:]
    data: dict[str, Any] = json.loads(found.stdout)
    assert not data["exit_status"], found.stderr[-3000:]
    assert (found.returncode == 1) == any(
        finding["level"] == "error" for finding in data["findings"]
    )
    assert (found.returncode == 3) == (data["verdict"] == NOT_JUDGED)
    return data


def audit_forked(
    cases: Sequence[Case], folder: Path, *, audited: bool = True
) -> list[dict[str, Any]]:
    """The audits of several cases, whose processes share the import of torch; empty if they are not audited."""
    ours = audited_command.environment(folder, 8) if audited else os.environ
    command = [
        sys.executable,
        "-m",
        "tests.audit_command.forked",
        str(folder),
        *(case.script for case in cases),
    ]
    environment = {
        **ours,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ours.get('PYTHONPATH', '')}:{ROOT}",
    }
    subprocess.run(command, env=environment, check=True)
    ranks = [audited_command.read(folder / str(number))[0] for number in range(len(cases))]
    return [document(TrainingAudit(records), 0) for records in ranks if records]


def train(case: Case, **environment: str) -> None:
    """The case without an audit."""
    assert not _run(case.command, environment).returncode
