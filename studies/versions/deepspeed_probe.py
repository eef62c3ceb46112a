"""What one version of DeepSpeed does with the micro-batches of a window; for versions from 0.17 on, in one process.

The model has one weight per micro-batch. The gradient of a micro-batch's loss is 1 for its own weight and 0 for the
others, so that under SGD with learning rate 1 an update changes each weight by the coefficient of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.backends.deepspeed import prepare
from studies.versions.versions_page import VersionFact

if TYPE_CHECKING:
    from torch import Tensor

STAGES = (2, 3)
GAS, WINDOWS = 4, 2
"""Micro-batches per window, and windows."""
LARGE = 5.0
"""Norm of the gradient in the test of clipping."""
MANY = 1024
"""Gradients of 1/MANY sum to 1, but to 1/4 in bf16, which has 8 significant bits."""


def findings() -> Iterator[VersionFact]:
    """One measurement per question and stage; that a probe fails is one too."""
    import torch.distributed

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # exported, but the stubs do not say so
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    prepare()
    for question, ask in QUESTIONS.items():
        for stage in STAGES:
            yield asked(question, ask, stage)
    torch.distributed.destroy_process_group()


def asked(question: str, ask: Callable[[int], tuple[str, bool]], stage: int) -> VersionFact:
    """The answer to one question at one stage, or why there is none."""
    name = f"ZeRO-{stage}: {question}"
    try:
        return VersionFact(name, *ask(stage))
    except Exception as error:
        return VersionFact(
            name, " ".join(f"probe failed: {type(error).__name__}: {error}".split())[:300], False
        )


def decoded(stage: int) -> tuple[str, bool]:
    """Which micro-batches reached each update, with what coefficient; good: each of N with 1/N."""
    changes = train(stage, num_batches=GAS * WINDOWS, config={"gradient_clipping": 0.0})
    wanted = [
        dict.fromkeys(range(first, first + GAS), 1 / GAS) for first in range(1, GAS * WINDOWS, GAS)
    ]
    found = [{i: c for i, c in enumerate(change.tolist(), start=1) if c} for change in changes]
    return "; ".join(map(spelled, found)) or "no update", found == wanted


def clipped(stage: int) -> tuple[str, bool]:
    """What is clipped if the config says nothing; good: nothing."""
    clipping: list[float] = []
    changes = train(stage, num_batches=1, gas=1, scale=LARGE, clipping=clipping)
    norm = float(changes[0].norm())
    words = f"engine.gradient_clipping() is {clipping[0]}; a gradient of norm {LARGE:g} moved the weights by {norm:.4g}"
    return words, abs(norm - LARGE) < 1e-3 * LARGE


def summed(stage: int, config: Mapping[str, Any]) -> tuple[str, bool]:
    """The sum of many small gradients in bf16; good: 1."""
    config = {**config, "bf16": {"enabled": True}, "gradient_clipping": 0.0}
    changes = train(stage, num_batches=MANY, gas=MANY, config=config, one_weight=True)
    total = float(changes[0].sum())
    return f"{total:.4g}", abs(total - 1) < 1e-2


MANY_GRADIENTS = f"bf16, sum of {MANY} gradients of 1/{MANY}, grad_accum_dtype"
QUESTIONS: dict[str, Callable[[int], tuple[str, bool]]] = {
    f"micro-batches in each update, gradient_accumulation_steps {GAS}": decoded,
    "gradient_clipping not set": clipped,
    f"{MANY_GRADIENTS} not set": partial(summed, config={}),
    f"{MANY_GRADIENTS} fp32": partial(summed, config={"data_types": {"grad_accum_dtype": "fp32"}}),
}


def spelled(coefficients: Mapping[int, float]) -> str:
    """The micro-batches of one update, neighbours with the same coefficient as a range: ``1-4 by 1/4``."""
    if not coefficients:
        return "nothing"
    runs: list[tuple[int, int, float]] = []
    for i, value in coefficients.items():
        if runs and runs[-1][1] == i - 1 and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], i, value)
        else:
            runs.append((i, i, value))
    words = []
    for first, last, value in runs:
        fraction = Fraction(value).limit_denominator(64)
        exact = abs(float(fraction) - value) < 1e-6
        words.append(
            f"{first if first == last else f'{first}-{last}'} by {fraction if exact else f'{value:.4g}'}"
        )
    return ", ".join(words)


def train(
    stage: int,
    *,
    num_batches: int,
    gas: int = GAS,
    scale: float = 1.0,
    config: Mapping[str, Any] | None = None,
    one_weight: bool = False,
    clipping: list[float] | None = None,
) -> list[Tensor]:
    """By how much each update lowered the weights; ``engine.gradient_clipping()`` is appended to ``clipping``.

    With ``one_weight``, every micro-batch has the first weight.
    """
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(num_batches))

        def forward(self, i: int) -> Tensor:
            chosen = torch.zeros_like(self.weights)
            chosen[i] = scale
            return (self.weights * chosen).sum()

    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(True))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # The default of 5e8 elements would take gigabytes.
            "reduce_bucket_size": 10_000,
            "allgather_bucket_size": 10_000,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        },
        **(config or {}),
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    if clipping is not None:
        clipping.append(engine.gradient_clipping())
    parameter = next(engine.module.parameters())
    before = torch.zeros(num_batches)
    changes: list[Tensor] = []
    for i in range(num_batches):
        engine.backward(engine(0 if one_weight else i))
        engine.step()
        if steps:
            steps.clear()
            now = safe_get_full_fp32_param(parameter).detach().float().cpu().clone()
            changes.append(before - now)
            before = now
    engine.destroy()
    return changes
