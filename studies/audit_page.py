"""The page on ``python -m bench audit``: verdicts of the scripts in tests/audit_command, screens, limits and cost.

``python -m studies.audit_page`` runs what docs/audit.json has no result of, and writes both; ``--again scripts``
runs all of them, and ``--again costs`` times, on an idle machine. ``--packages FOLDER`` runs the right loops of the
frameworks with the versions that ``pip install --no-deps --target FOLDER`` has put there, and without it with those of
this environment. Status 1: counting costs more than 2 %, or a right loop is not called right with a version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.audit.command.training_audit import RIGHT
from bench.tabular import markdown_table
from studies import ROOT
from tests.audit_command.cases import CASES, OPEN, Case, audit, audit_case

PAGE, DATA = ROOT / "docs/audit.md", ROOT / "docs/audit.json"
COMMAND = "python -m studies.audit_page"
SCREENS = ("ddp late", "lightning right deepspeed", "hf ignores-items")
COSTS = ("ddp 64",)
VERSIONS = "versions"
RIGHT_LOOPS = {
    "deepspeed": ("deepspeed right 2", "deepspeed right 3"),
    "accelerate": ("accelerate right",),
    "lightning": ("lightning right ddp",),
    "transformers": ("hf right",),
}
"""By package."""
BLOCKS = 150
"""Windows of each mode."""
MOST = 1.02
"""Of an interval of what counting costs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has no result yet, keep each result at once, and write the page."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--again", choices=("scripts", "costs"), help="run all of these again")
    parser.add_argument(
        "--packages", type=Path, nargs="+", default=[], help="folders with other versions"
    )
    options = parser.parse_args(argv)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    data = {key: data[key] for key in data if options.again != _part(key)}
    for case in CASES:
        if case.name not in data:
            found = audit_case(case)
            data[case.name] = {key: found[key] for key in ("verdict", "findings")}
            _keep(data)
            print(
                f"{'' if found['verdict'] == case.verdict else 'NOT EXPECTED '}{case.name}: {found['verdict']}"
            )
    for script in SCREENS:
        if f"screen of {script}" not in data:
            data[f"screen of {script}"] = _screen(Case(script, ""))
            _keep(data)
    for cost in COSTS:
        if f"cost of {cost}" not in data:
            data[f"cost of {cost}"] = _cost(Case(f"cost {cost} {BLOCKS}", ""))
            _keep(data)
            print(f"{cost}: {data[f'cost of {cost}']}")
    data.setdefault(VERSIONS, {})
    for folder in (None, *options.packages):
        _audit_versions(data, folder)
    PAGE.write_text(page(data), encoding="utf-8")
    is_costly = any(data[f"cost of {cost}"]["counting"][-1] > MOST for cost in COSTS)
    return int(is_costly or set(data[VERSIONS].values()) != {RIGHT})


def _part(key: str) -> str:
    """Which ``--again`` makes a result again."""
    if key.startswith("cost of"):
        return "costs"
    return key if key == VERSIONS else "scripts"


def _audit_versions(data: dict[str, Any], folder: Path | None) -> None:
    """Audit right loops with the frameworks in a folder, or with those of this environment; some have a result."""
    path = [str(ROOT), *([str(folder.resolve())] if folder else [])]
    for package, scripts in RIGHT_LOOPS.items():
        if folder is None:
            number = version(package)
        else:
            found = [found.version for found in distributions(name=package, path=[str(folder)])]
            if not found:
                continue
            number = found[0]
        for script in scripts:
            key = f"{package} {number}, {script}"
            if key not in data[VERSIONS]:
                verdict = audit_case(Case(script, RIGHT), PYTHONPATH=os.pathsep.join(path))[
                    "verdict"
                ]
                data[VERSIONS][key] = verdict
                _keep(data)
                print(f"{key}: {verdict}")


def _keep(data: dict[str, Any]) -> None:
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _screen(case: Case) -> list[str]:
    lines = audit("--", *case.command).stdout.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("verdict")) :]


def _cost(case: Case) -> dict[str, list[float]]:
    """By mode the ratio of a window to one without an audit: the median, and an interval of 95 %."""
    found = audit("--updates", "999999", "--", *case.command)
    line = next(line for line in found.stdout.splitlines() if line.startswith("COST "))
    times = {
        mode: np.array(values) for mode, values in json.loads(line.removeprefix("COST ")).items()
    }
    ratios = {
        mode: values / times["without"] for mode, values in times.items() if mode != "without"
    }
    return {mode: _interval(values) for mode, values in ratios.items()}


def _interval(ratios: np.ndarray) -> list[float]:
    interval = stats.bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
    return [float(np.median(ratios)), float(interval.low), float(interval.high)]


def page(data: dict[str, Any]) -> str:
    wrong = [case for case in CASES if case.verdict not in (RIGHT, *OPEN)]
    found = [case for case in wrong if data[case.name]["verdict"] == case.verdict]
    sound = [case for case in CASES if case.verdict in (RIGHT, *OPEN)]
    accused = [case for case in sound if data[case.name]["verdict"] not in (RIGHT, *OPEN)]
    return "\n".join(
        [
            "# Audit of any training command",
            "",
            f"Written by `{COMMAND}`.",
            "",
            INTRODUCTION,
            "",
            "## Scripts with a known verdict",
            "",
            f"They are in tests/audit_command/scripts. {len(found)} of {len(wrong)} wrong ones are "
            f"found by name, and {len(accused)} of {len(sound)} others are accused.",
            "",
            *markdown_table(
                ("script", "what is special", "verdict", "findings"),
                [_row(case, data[case.name]) for case in CASES],
            ),
            "## Three screens",
            "",
            *(
                line
                for script in SCREENS
                for line in (f"Of `{script}`:", "", "```", *data[f"screen of {script}"], "```", "")
            ),
            LIMITS,
            "",
            "## What it costs",
            "",
            "The time of a window relative to one without an audit, on two ranks in turns within one run: the median, "
            f"and a bootstrapped interval of 95 % over {BLOCKS:,} windows. *counting* is what remains after the first "
            "8 updates, and *sampling* is what these cost. The machine has two cores.",
            "",
            *markdown_table(
                ("loop and width", "counting", "sampling"),
                [
                    (
                        cost,
                        *(
                            _ratio(data[f"cost of {cost}"][mode])
                            for mode in ("counting", "sampling")
                        ),
                    )
                    for cost in COSTS
                ],
            ),
            VERSIONS_TEXT,
            *markdown_table(
                ("package", "script", "verdict"),
                [_version(*run) for run in sorted(data[VERSIONS].items())],
            ),
            HELD_OUT,
            PUBLIC,
            *markdown_table(
                ("script", "commit", "what the audit says", "checked by hand"), PUBLIC_SCRIPTS
            ),
        ]
    )


def _row(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    topics = [finding["topic"] for finding in found["findings"] if finding["level"] != "error"]
    return f"`{case.name}`", case.about, found["verdict"], ", ".join(topics)


def _version(run: str, verdict: str) -> tuple[str, ...]:
    package, script = run.split(", ")
    return package, f"`{script}`", verdict


def _ratio(interval: list[float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


INTRODUCTION = """\
`python -m bench audit -- torchrun --nproc-per-node 2 train.py ...` runs a training command unchanged, and says which
weight each micro-batch of each rank has in each update. It needs no change of the script, adds no communication, and
changes nothing that is trained. `--expect N` says how many micro-batches an update should have, `--updates K` how many
updates of each optimizer are sampled (8 by default), and `--json` prints the verdict as data.

The recorder gets into every Python process through PYTHONPATH, as a `sitecustomize` that also runs the one it hides.
Hooks on at most 128 parameters sample at most 64 coordinates of each. The same coordinates are read from the gradient
that the optimizer uses: of DDP, of FSDP2's shards, of ZeRO's partitions, of tensor parallel parts. Least squares give
the coefficients, of all parameters together, and of each alone where they differ. The columns are the micro-gradients
of ranks with the same parameter, so stages of a pipeline and tensor parallel ranks are judged by what they hold. A hook
on the criterion's node gives the factor of the loss; hooks that scale a gradient behind it are counted, too. Kernels on
the c10d operators count what is reduced at which backward. After the sampled updates only backwards are counted.

A window belongs to the parameters of an optimizer: the backwards that add to them between two of its steps. A backward
is a micro-batch where a data loader hands out a batch for each, or where one place in the code calls it with other data
each time. Otherwise the number of micro-batches is unknown, and no factor is called wrong.

| verdict | exit status | what it says |
| --- | --- | --- |
| weights right | 0 | in the updates that it names, all micro-batches are in the gradient alone, and weights sum to 1 |
| weights right for the main loss | 0 | the same; other losses have factors that are not judged |
| weights judged in part | 0 | a part is unknown or unusual: lines with `!` say what |
| the name of a fault | 1 | coefficients, or a gradient that changed, show it: lines with `x` |
| not judged | 3 | nothing could be judged: a line with `!` says why |

*Not divided*, *divided twice* and *scaled by ranks* are certain as numbers, and inferred as faults, since a loss may
have any factor on purpose. *Mean of means* is a fault where most updates have micro-batches with different numbers of
terms on one rank, weights do not follow them, and the gradient is off by more than 5 %. *Not reduced* needs replicas
that end with different parameters.

Signals reach the command as they would without an audit, which waits for it as long as it takes, and gives its verdict
of what was recorded until then."""
LIMITS = """\
## What it cannot see

- FSDP1, Megatron's `main_grad`, optimizers that run several backwards per step (LBFGS), and parameters that move
  between the backwards of an update (SAM) are recognized and not judged. Backwards that run inside of another backward,
  as cached contrastive losses do in a hook, are not seen as such.
- With one sequence in a micro-batch, a loss that weighs sequences alike on purpose is taken for a mean of means.
- The scale is not judged where the terms of a loss have factors of their own, where their number is not visible (label
  smoothing, a compiled or chunked criterion, targets that checkpointing or offloading has packed), where a loss joins
  rows with and without a gradient, where hooks of parameters scale gradients, and where backwards may be parts of one
  loss.
- An optimizer's gradient with the loss of another one (a critic that keeps the generator's gradient) is a warning:
  whether that loss is meant to train it is not visible.
- Parameters beyond 128 in a process are not sampled. Bytes that DDP reduces are compared with those of all gradients.
- An update with more micro-batches, over all ranks, than sampled coordinates is not judged.
- Micro-batches of a whole window without weight are not called lost, since an update may have been skipped: a warning.
- A fault that begins after the sampled updates is not seen: the verdict names the updates that it is of. A window of
  another length is named; `--updates` samples it.
- In which dtype ZeRO holds gradients between micro-batches is not read.
- Clipping is undone where torch's functions or ZeRO clip. By hand, or by DeepSpeed without ZeRO, it is taken for a
  factor of the loss: a warning.
- A schedule that steps at each micro-batch is seen by the learning rate, and a moving average of the parameters where a
  module holds it. One in tensors outside of modules is not.
- Ranks on other hosts are seen if TMPDIR is a folder that all hosts share, and the launcher passes PYTHONPATH and
  BENCH_AUDIT_FOLDER on.
- In a folder with a `bench.py`, `python -m bench` runs that one: call it `accumulation-bench audit`.
- `python -I` and `-E` ignore PYTHONPATH, so nothing is seen.
- On an accelerator samples stay on the device until all are taken, so that the host waits only while leaves are chosen
  and once at the end; a process that is killed before takes its samples along."""
VERSIONS_TEXT = """\
## Right loops over versions of frameworks

Scripts that are right, each with torch 2.13.0 and the named version of one package, and of what that version needs.
All others are as in constraints.txt. It is a gate on false accusations.
"""
HELD_OUT = """\
## Scripts written before any verdict was seen

The limits were chosen with the scripts above. So 55 others were written first, and then audited once: other models
(CNN, LSTM, VAE, two towers, a mixture of experts), criteria, wrappers (Fabric, ZeroRedundancyOptimizer, communication
hooks, Muon) and loops. Of 18 wrong ones 11 were found by name. 4 got a warning with the right number: gradients of
every 8th micro-batch alone, a loss divided by the ranks once too often, sums that are summed again, and Hugging Face's
`compute_loss_func` without `num_items_in_batch` on 2 ranks (N times W). 3 were not judged. Of 37 right ones 1 was
accused (it clips the sum of N gradients, and divides then), and in 1 the audit stopped the training (sparse
gradients). Both are fixed, and among the scripts above.
"""
PUBLIC = """\
## Scripts that nobody here wrote

Each was run by hand once, on the CPU, most of them on two ranks. Only sizes and data were changed (random tokens,
tiny models), and the device where a script insists on CUDA. What was found was checked by reading the code. None
of them is a part of this repository.
"""
PUBLIC_SCRIPTS = (
    (
        "karpathy/build-nanogpt, `train_gpt2.py`",
        "01fd941",
        "**partly reduced**: micro-batches 2, 3 and 4 of 4 of the other rank are missing; reduces at backward 1 of 4",
        "true: `require_backward_grad_sync` is set after the forward, which reads it; f6d194b fixes it",
    ),
    ("the same", "6104ab1", "right, deferred", "true"),
    (
        "karpathy/nanoGPT, `train.py`, on one rank and on two",
        "3adf61e",
        "right; on two ranks deferred",
        "true",
    ),
    (
        "huggingface/accelerate, `by_feature/gradient_accumulation.py`, `--updates 28`",
        "16cb6eb",
        "**partial window**: 1 of 4 micro-batches at the end of the epoch, and its weights sum to 0.25",
        "true: Accelerate divides by 4 whatever is left of the epoch",
    ),
    (
        "huggingface/accelerate, `by_feature/gradient_accumulation_for_autoregressive_models.py`",
        "16cb6eb",
        "token-exact, but weights sum to 0.9524: this may be meant",
        "true: labels are shifted in the script and again in the model, so one counted label of each row is not used",
    ),
    (
        "huggingface/accelerate, `by_feature/automatic_gradient_accumulation.py`",
        "16cb6eb",
        "right, no accumulation",
        "true: the batch fits, so N is 1",
    ),
    (
        "huggingface/accelerate, `by_feature/local_sgd.py`",
        "16cb6eb",
        "not judged: local SGD averages parameters instead of gradients",
        "true",
    ),
    (
        "trl's `SFTTrainer` with a tiny Llama, one rank, N = 4",
        "PyPI",
        "weights judged in part: the loss is a sum that receives 1/78, and its number of terms is not visible",
        "true: 78 is the number of tokens of the window",
    ),
    (
        "trl's `DPOTrainer`, the same model",
        "PyPI",
        "weights right: a mean that receives 1/4",
        "true: a mean over preference pairs, all windows have 4 micro-batches of 2",
    ),
    (
        "sentence-transformers' trainer, `MultipleNegativesRankingLoss`",
        "PyPI",
        "weights right: a mean that receives -1/4",
        "true in weights; each micro-batch has its own negatives",
    ),
    (
        "the same with `CachedMultipleNegativesRankingLoss`",
        "PyPI",
        "not judged (exit 3): no parameter was found in the graphs of the losses",
        "true: a hook runs the backwards of the model inside of that of the loss",
    ),
    (
        "peft's LoRA on the same model in a plain loop",
        "PyPI",
        "weights right: 4 micro-batches of 1/4, the 8 matrices of LoRA are sampled",
        "true",
    ),
    (
        "pytorch-metric-learning's trainer, `MetricLossOnly`, two optimizers, no accumulation",
        "PyPI",
        "weights judged in part: the loss is a sum of which the number of terms is not visible",
        "true: its reducer averages over the pairs that it finds",
    ),
    (
        "pytorch/examples, `time_sequence_prediction/train.py`",
        "77f55b9",
        "not judged: LBFGS runs several backwards per step",
        "true",
    ),
    (
        "pytorch/examples, `regression/main.py`",
        "77f55b9",
        "no update",
        "true: it changes its parameters without an optimizer",
    ),
    (
        "pytorch/examples, `ddp-tutorial-series/multigpu_torchrun.py`",
        "77f55b9",
        "weights unknown: gradients are 0",
        "true: its cross-entropy is over one class, so it is 0 and nothing is learned",
    ),
)


if __name__ == "__main__":
    sys.exit(main())
