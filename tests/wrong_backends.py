"""Loops with one defect each, such as programs have by accident, and sound ones beside them, in one process group.

Each class is made of the public interface alone. In one that has no ``found_by``, nothing may be found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.backends.base import Backend, registry
from bench.backends.training_job import Job
from bench.judge.gates import Gate
from bench.measure.trial import RankTrial
from bench.plan.cell import Cell, Precision, Sharding, Status, Sync
from bench.plan.task import Spec, Task

ALWAYS = tuple(Precision)
FP32 = (Precision.FP32,)


class Loop(Backend):
    """Sums gradients over a window, averages them over the ranks once, and steps."""

    framework = "made"
    sync, sharding = Sync.DEFERRED, Sharding.NONE
    found_by: ClassVar[Gate | None] = None
    """The gate that must find the defect; None for a sound loop."""
    words: ClassVar[str] = ""
    """What the reason must say."""
    found_in: ClassVar[Sequence[Precision]] = ALWAYS
    """Where it must be found; elsewhere it may be lost in what bf16 rounds away."""

    def train(self, job: Job) -> None:
        self.job = job
        self.model = job.build()
        self.optimizer = self.make_optimizer(job)
        for number, window in enumerate(job.each_window()):
            self.window = number
            for index, (batch, _) in enumerate(window):
                with job.autocast():
                    loss = job.loss(self.model, batch)
                self.backward(loss / window.size, index)
            self.reduce()
            self.before_step()
            job.clip(self.model.parameters())
            self.step()
            self.after_step()
            self.clear()

    @property
    def is_last(self) -> bool:
        return self.window == self.job.windows - 1

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        return job.optimizer(self.model.parameters())

    def backward(self, loss: Tensor, index: int) -> None:
        loss.backward()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def reduce(self) -> None:
        for name, gradient in self.gradients():
            if self.is_reduced(name):
                dist.all_reduce(gradient)
                gradient.div_(self.job.world_size)

    def is_reduced(self, name: str) -> bool:
        return True

    def before_step(self) -> None: ...

    def step(self) -> None:
        self.optimizer.step()

    def after_step(self) -> None: ...

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def full_parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


class SoundLoop(Loop):
    name = "sound"


class ByParameter(Loop):
    """Steps without foreach, clears with zeros, and averages before it sums."""

    name = "sound-by-parameter"

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        made = super().make_optimizer(job)
        for group in made.param_groups:
            group["foreach"] = False
        return made

    def reduce(self) -> None:
        for _, gradient in self.gradients():
            gradient.div_(self.job.world_size)
            dist.all_reduce(gradient)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class TwoOptimizers(Loop):
    """Every second parameter has another optimizer."""

    name = "sound-two-optimizers"

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        every = list(self.model.parameters())
        self.second = None
        if len(every) > 1:
            self.second = job.optimizer(every[1::2])
        return job.optimizer(every[::2])

    def step(self) -> None:
        self.optimizer.step()
        if self.second is not None:
            self.second.step()

    def clear(self) -> None:
        self.model.zero_grad()


class SplitOptimizer(Loop):
    """ZeRO-1 by hand: each rank steps every second parameter and sends it to the others."""

    name = "sound-split-optimizer"
    sharding = Sharding.OPTIMIZER

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        self.every = list(self.model.parameters())
        self.is_split = len(self.every) >= job.world_size
        if not self.is_split:
            return job.optimizer(self.every)
        return job.optimizer(self.every[job.rank :: job.world_size])

    def after_step(self) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.every if self.is_split else ()):
                dist.broadcast(parameter, index % self.job.world_size)

    def clear(self) -> None:
        self.model.zero_grad()


class FlatMasters(Loop):
    """The optimizer steps one flat copy of all parameters."""

    name = "sound-flat-masters"

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        self.every = list(self.model.parameters())
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.every]))
        return job.optimizer([self.flat])

    def before_step(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.every]
        self.flat.grad = torch.cat([gradient.flatten() for gradient in gradients])

    def after_step(self) -> None:
        sizes = [p.numel() for p in self.every]
        with torch.no_grad():
            for parameter, value in zip(self.every, self.flat.split(sizes), strict=True):
                parameter.copy_(value.view_as(parameter))

    def clear(self) -> None:
        self.model.zero_grad()


class Settings(Loop):
    """AdamW with another setting."""

    found_by = Gate.STATE
    changes: ClassVar[dict[str, Any]]

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        made = super().make_optimizer(job)
        for group in made.param_groups:
            group.update({key: value for key, value in self.changes.items() if key in group})
        return made


class NoDecay(Settings):
    name, words, changes = (
        "no-weight-decay",
        "weight_decay is 0.0, 0.01 was due",
        {"weight_decay": 0.0},
    )


class TenTimesDecay(Settings):
    name, words, changes = "ten-times-weight-decay", "weight_decay is 0.1", {"weight_decay": 0.1}


class LargeEpsilon(Settings):
    name, words, changes = "epsilon-1e-6", "eps is 1e-06, 1e-08 was due", {"eps": 1e-6}


class OtherBetas(Settings):
    name, words, changes = "beta2-0.95", "betas is (0.9, 0.95)", {"betas": (0.9, 0.95)}


class Amsgrad(Settings):
    name, words, changes = "amsgrad", "amsgrad is True", {"amsgrad": True}


class NormsWithoutDecay(Loop):
    """As many recipes have it, and this training has not."""

    name, found_by, words = "norms-without-decay", Gate.STATE, "weight_decay is 0.0"

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        made = super().make_optimizer(job)
        if "betas" in made.defaults:
            group = made.param_groups[0]
            norms = {id(p) for name, p in self.model.named_parameters() if "norm" in name}
            of_norms = [p for p in group["params"] if id(p) in norms]
            group["params"] = [p for p in group["params"] if id(p) not in norms]
            made.add_param_group({"params": of_norms, "weight_decay": 0.0})
        return made


class LowRateAtFirst(Loop):
    """A warm-up of one window that nobody asked for; all settings are right in the end."""

    name, found_by, words, found_in = "low-rate-in-window-2", Gate.STATE, "off by", FP32

    def before_step(self) -> None:
        for group in self.optimizer.param_groups:
            if self.window == 1:
                group["lr"] *= 0.1

    def after_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"]


class UndoesDecay(Loop):
    """Takes back by hand what weight decay did."""

    name, found_by, words, found_in = "undoes-decay", Gate.STATE, "norm", FP32

    def after_step(self) -> None:
        if "betas" in self.optimizer.defaults:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + self.optimizer.defaults["lr"] * 0.01)


class RoundsState(Loop):
    name, found_by, words = "state-in-bf16", Gate.STATE, "no digits are left"
    keys: ClassVar[Sequence[str]] = ("exp_avg", "exp_avg_sq")

    def after_step(self) -> None:
        for state in self.optimizer.state.values():
            for key in self.keys:
                if key in state:
                    state[key].copy_(rounded(state[key]))


class RoundsSecondMoment(RoundsState):
    name, words, keys = "second-moment-in-bf16", "exp_avg_sq of", ("exp_avg_sq",)


class ForgetsState(Loop):
    name, found_by, words = "forgets-state", Gate.STATE, "after the last window exp_avg"

    def after_step(self) -> None:
        if not self.is_last:
            self.optimizer.state.clear()


class SecondStep(Loop):
    """A second step without gradients, which moments still move."""

    name, found_by, words = "second-step", Gate.STATE, "counts 10 steps, 5 were due"

    def after_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()


class SecondStepLater(SecondStep):
    name, words = "second-step-in-the-last-window", "counts 6 steps, 5 were due"

    def after_step(self) -> None:
        if self.is_last and self.window:
            super().after_step()


class StepsTwice(Loop):
    name, found_by, words = "steps-twice", Gate.UPDATE, "2 times too large"

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.step()


class RoundsWeights(Loop):
    name, found_by, words = "weights-in-bf16", Gate.STATE, "no digits are left"

    def after_step(self) -> None:
        if self.window:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(rounded(parameter))


class OneRank(Loop):
    """The defect is on rank 1 alone."""

    found_by, words = Gate.RANKS, "on rank 1"

    @property
    def is_mine(self) -> bool:
        return self.job.rank == 1


class OneRankRoundsWeights(OneRank):
    name = "rank-1-weights-in-bf16"

    def after_step(self) -> None:
        if self.is_mine:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(rounded(parameter))


class OneRankFreezesNorms(OneRank):
    name = "rank-1-norms-frozen"

    def before_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.is_mine and "norm" in name:
                parameter.grad = None


class OneRankScales(OneRank):
    """AdamW does not mind."""

    name = "rank-1-gradients-times-1000"

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            if self.is_mine:
                gradient.mul_(1000)


class OneRankKeepsItsOwn(OneRank):
    name = "rank-1-keeps-its-own-gradient"

    def reduce(self) -> None:
        own = [gradient.clone() for _, gradient in self.gradients()]
        super().reduce()
        for mine, (_, gradient) in zip(own, self.gradients(), strict=True):
            if self.is_mine:
                gradient.copy_(mine)


class OneRankDecaysMore(OneRank):
    name, words = "rank-1-decays-more", "weight_decay is 0.1"

    def make_optimizer(self, job: Job) -> torch.optim.Optimizer:
        made = super().make_optimizer(job)
        for group in made.param_groups:
            if job.rank == 1 and "betas" in group:
                group["weight_decay"] *= 10
        return made


class OneRankRoundsState(OneRank):
    name, words = "rank-1-state-in-bf16", "on rank 1"

    def after_step(self) -> None:
        for state in self.optimizer.state.values():
            if self.is_mine and "exp_avg" in state:
                state["exp_avg"].copy_(rounded(state["exp_avg"]))


class OneRankMissesAStep(OneRank):
    """Its last update is lost."""

    name = "rank-1-loses-its-last-update"

    def step(self) -> None:
        before = [p.detach().clone() for p in self.model.parameters()]
        super().step()
        if self.is_mine and self.is_last and self.window:
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(value)


class NormsNotReduced(Loop):
    name, found_by, words = "norms-never-reduced", Gate.RANKS, "norm"

    def is_reduced(self, name: str) -> bool:
        return "norm" not in name


class NormsNotReducedLater(NormsNotReduced):
    name = "norms-not-reduced-from-window-2"

    def is_reduced(self, name: str) -> bool:
        return self.window == 0 or super().is_reduced(name)


class NormsNotTrained(Loop):
    """On all ranks, so they agree."""

    name, found_by, words = "norms-never-trained", Gate.UPDATE, "norm.weight, which is off by 1"

    def before_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                parameter.grad = None


class OneNormNotTrained(NormsNotTrained):
    name, words = "one-norm-never-trained", "model.norm.weight, which is off by 1"

    def before_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name == "model.norm.weight":
                parameter.grad = None


class NormsHalved(Loop):
    name, found_by, words = "norms-gradient-halved", Gate.UPDATE, "norm.weight, which is off by 0.5"

    def before_step(self) -> None:
        for name, gradient in self.gradients():
            if "norm" in name:
                gradient.div_(2)


class NormsOffALittle(NormsHalved):
    """Far below what bf16 rounds."""

    name, words = "norms-gradient-2-percent-off", "model.norm.weight, which is off by 0.02"

    def before_step(self) -> None:
        for name, gradient in self.gradients():
            if name == "model.norm.weight":
                gradient.mul_(1.02)


class NormsFreezeLater(Loop):
    name, found_by, words = "norms-frozen-from-window-2", Gate.STATE, "norm"

    def before_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.window and "norm" in name:
                parameter.grad = None


class BF16Gradients(Loop):
    name, found_by, words = "bf16-gradients", Gate.ACCUMULATION, "reach the optimizer in bf16"
    first: ClassVar[int] = 0

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            if self.window >= self.first:
                gradient.copy_(rounded(gradient))


class BF16GradientsLater(BF16Gradients):
    name, first = "bf16-gradients-from-window-2", 1


class ScaledLater(Loop):
    """AdamW does not mind."""

    name, found_by, words = "divided-twice-from-window-2", Gate.STATE, "exp_avg"

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            if self.window:
                gradient.div_(self.job.accumulate)


class NotUnscaledLater(ScaledLater):
    name = "loss-scale-left-from-window-2"

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            if self.window:
                gradient.mul_(1024)


class SummedLater(ScaledLater):
    name = "summed-over-ranks-from-window-2"

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            if self.window:
                gradient.mul_(self.job.world_size)


class DividedTwice(Loop):
    name, found_by, words = "divided-twice", Gate.UPDATE, "divided by N = 3 twice"

    def before_step(self) -> None:
        for _, gradient in self.gradients():
            gradient.div_(self.job.accumulate)


class NotReducedAtLast(Loop):
    name, found_by, words = "not-reduced-in-the-last-window", Gate.RANKS, "after the last window"

    def is_reduced(self, name: str) -> bool:
        return not (self.is_last and self.window)


class NotReducedLater(Loop):
    name, found_by, words = "not-reduced-from-window-2", Gate.RANKS, "after the last window"

    def is_reduced(self, name: str) -> bool:
        return self.window == 0


class ClippedLater(Loop):
    name, found_by, words = "clipped-from-window-2", Gate.STATE, "exp_avg"

    def before_step(self) -> None:
        if self.window:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class LeavesOneOutLater(Loop):
    """The last micro-batch of a window is not in its update."""

    name, found_by, words = "leaves-one-out-from-window-2", Gate.STATE, "exp_avg"

    def backward(self, loss: Tensor, index: int) -> None:
        if self.window == 0 or index < self.job.accumulate - 1:
            loss.backward()


class TakesOneTwiceLater(LeavesOneOutLater):
    name = "takes-one-twice-from-window-2"

    def backward(self, loss: Tensor, index: int) -> None:
        ((1.0 + (self.window > 0 and index == 0)) * loss).backward()


class NeverClears(Loop):
    """Gradients of a window are still there in the next."""

    name, found_by, words = "never-clears", Gate.STATE, "exp_avg"

    def reduce(self) -> None:
        super().reduce()
        self.kept = [gradient.clone() for _, gradient in self.gradients()]

    def clear(self) -> None:
        for held, (_, gradient) in zip(self.kept, self.gradients(), strict=True):
            gradient.copy_(held)


class StaleGradients(Loop):
    """From the second window on, each steps with the gradients of the one before."""

    name, found_by, words = "stale-gradients", Gate.STATE, "exp_avg"
    kept: Sequence[Tensor] = ()

    def before_step(self) -> None:
        new = [gradient.clone() for _, gradient in self.gradients()]
        for old, (_, gradient) in zip(self.kept, self.gradients(), strict=False):
            gradient.copy_(old)
        self.kept = new


class NoisyLater(Loop):
    """The same noise on all ranks."""

    name, found_by, words = "noise-from-window-2", Gate.ACCUMULATION, "gradients are summed in"

    def before_step(self) -> None:
        generator = torch.Generator().manual_seed(self.window)
        for _, gradient in self.gradients():
            if self.window:
                noise = torch.randn(gradient.shape, generator=generator)
                gradient.add_(0.01 * gradient.abs().mean() * noise)


class ClampsWeights(Loop):
    name, found_by, words, found_in = "clamps-weights", Gate.STATE, "off by", ALWAYS

    def after_step(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if self.window and "norm" not in name:
                    parameter.clamp_(-0.03, 0.03)


class UndoesOneTensor(Loop):
    """What the last window did to one tensor is lost, on all ranks."""

    name, found_by, words, found_in = "last-update-of-a-tensor-lost", Gate.STATE, "embed", FP32

    def step(self) -> None:
        named = dict(self.model.named_parameters())
        weight = named.get("model.embed_tokens.weight")
        if weight is None:
            super().step()
            return
        before = weight.detach().clone()
        super().step()
        if self.is_last and self.window:
            with torch.no_grad():
                weight.copy_(before)


def _all(kind: type[Loop]) -> Iterator[type[Loop]]:
    for below in kind.__subclasses__():
        if "name" in vars(below):
            yield below
        yield from _all(below)


KINDS = {kind.name: kind for kind in _all(Loop)}
SOUND = [name for name, kind in KINDS.items() if kind.found_by is None]
WRONG = [name for name, kind in KINDS.items() if kind.found_by is not None]


@dataclass(kw_only=True)
class Trials(Task):
    """Trials of several cells, one after the other; references run on the first rank alone."""

    work: ClassVar[str] = "tests.wrong_backends:run"

    backend: str = "ddp-deferred"
    cells: tuple[Cell, ...]
    passes: tuple[str, ...] = ("time", "update", "accumulation")
    references: str
    """The folder of the references' files."""


def reference_file(folder: str, cell: Cell) -> Path:
    return Path(folder) / f"{cell.reference().cell_id}.safetensors"


def kind_of(name: str) -> type[Backend]:
    """The backend with this name: a loop of this module, a framework used in another way, or a built-in one."""
    from tests.wrong_frameworks import MISUSES

    if name in KINDS:
        return KINDS[name]
    if name in MISUSES:
        return MISUSES[name]
    return registry([name])[name]


def run(task: Trials, rank: int, device: torch.device) -> dict[str, Any]:
    """One rank's part: its result for each cell, or None."""
    found: list[dict[str, Any] | None] = []
    for cell in task.cells:
        gc.collect()
        spec = Spec(
            cell=cell,
            passes=task.passes,
            folder=task.folder,
            reference=str(reference_file(task.references, cell)),
        )
        kind = kind_of(cell.backend)
        mine: dict[str, Any] | None = None
        if rank < cell.world_size:
            mine = RankTrial(spec, rank, device, kind).run()
        dist.barrier()
        found.append(mine)
    return {"status": Status.OK, "trials": found}
