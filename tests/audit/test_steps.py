"""The step calculator: closed forms, an independent simulation of every rule, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bench.audit.stepcount import StepRule, Steps, calculate
from bench.audit.training_plan import TrainingPlan
from bench.cli import main
from bench.errors import GOOD
from bench.plan.cell import REFERENCES, Stepping

WINDOW = StepRule(stepping=Stepping.WINDOW)
FLUSH = StepRule(stepping=Stepping.FLUSH)
CARRY = StepRule(stepping=Stepping.CARRY)
ZERO2 = StepRule(stepping=Stepping.SPLIT, twice=True)
ZERO3 = StepRule(stepping=Stepping.SPLIT, clears=True, twice=True)
CORRECTED = StepRule(stepping=Stepping.SPLIT)
RULES = [WINDOW, FLUSH, CARRY, ZERO2, ZERO3, CORRECTED]
CANCEL = StepRule(stepping=Stepping.CANCEL)


def plan(
    num_micro_batches: int, accumulate: int, epochs: int | None = None, **options: Any
) -> TrainingPlan:
    """A scenario by its micro-batches per epoch, of one sample each."""
    return TrainingPlan(
        samples=num_micro_batches, batch_size=1, accumulate=(accumulate,), epochs=epochs, **options
    )


def calculated(scenario: TrainingPlan, rule: StepRule) -> Steps:
    steps = calculate(scenario, rule)
    assert steps is not None
    return steps


@settings(max_examples=60)
@given(
    st.integers(1, 10**15),
    st.integers(1, 2000),
    st.integers(1, 10**9),
    st.none() | st.integers(1, 10**18),
)
def test_large_numbers_are_those_of_closed_forms(
    samples: int, n: int, epochs: int, limit: int | None
) -> None:
    numbers: dict[str, Any] = {
        "batch_size": 3,
        "accumulate": (n,),
        "world_size": 4,
        "drop_last": samples > 99,
    }
    scenario = TrainingPlan(samples=samples, epochs=epochs, max_steps=limit, **numbers)
    per_epoch, windows = scenario.micro_batches_per_epoch, scenario.windows
    whole = epochs * per_epoch
    for rule in RULES:
        found = calculated(scenario, rule)
        assert_conserved(scenario, found)
        if rule in (WINDOW, FLUSH):
            steps = min(epochs * windows, limit or epochs * windows)
            done, rest = divmod(steps - 1, windows)
            consumed = done * per_epoch + min((rest + 1) * n, per_epoch)
        elif rule is CARRY or not limit:
            consumed = min(whole, (limit or whole) * n)
            steps = consumed // n
        else:  # the Trainer's counter is that of whole windows in epochs
            of_epoch = per_epoch // n
            reached = (
                (limit - 1) // of_epoch * per_epoch + ((limit - 1) % of_epoch + 1) * n
                if of_epoch
                else whole
            )
            consumed = min(whole, reached)
            steps = consumed // n
        assert (found.micro_batches_consumed, found.optimizer_steps) == (consumed, steps)


# Properties.


@st.composite
def scenarios(draw: st.DrawFn) -> TrainingPlan:
    """Small enough to be simulated."""
    limit = draw(st.sampled_from(["epochs", "max_steps", "both"]))
    numbers: dict[str, Any] = {
        "samples": draw(st.integers(1, 120)),
        "batch_size": draw(st.integers(1, 6)),
        "accumulate": (
            draw(st.integers(1, 12)),
            *draw(st.just([]) | st.lists(st.integers(1, 12), max_size=3)),
        ),
        "world_size": draw(st.integers(1, 5)),
        "epochs": None if limit == "max_steps" else draw(st.integers(1, 9)),
        "max_steps": None if limit == "epochs" else draw(st.integers(0, 40)),
        "drop_last": draw(st.booleans()),
        "sampler_drop_last": draw(st.booleans()),
        "limit_batches": draw(st.none() | st.integers(1, 12)),
    }
    of_rank = numbers["samples"] // numbers["world_size"]
    if not numbers["sampler_drop_last"]:
        of_rank = -(-numbers["samples"] // numbers["world_size"])
    assume(of_rank >= (numbers["batch_size"] if numbers["drop_last"] else 1))
    return TrainingPlan(**numbers)


rules = st.sampled_from([*RULES, CANCEL])


def assert_conserved(scenario: TrainingPlan, found: Steps) -> None:
    accounted = found.samples_used + found.samples_lost_in_mid_run + found.samples_left_open
    accounted += found.samples_dropped + found.samples_unread
    assert accounted == scenario.samples * found.epochs_begun + found.samples_padded


class Simulation:
    """Trains micro-batch by micro-batch as the sources say, and counts. Nothing is calculated in closed form.

    ``give_up`` says when nobody would wait any longer for ``max_steps``.
    """

    def __init__(
        self, scenario: TrainingPlan, rule: StepRule, give_up: Callable[[Simulation], bool]
    ) -> None:
        self.give_up = give_up
        self.ns, self.rule = scenario.accumulate, rule
        self.max_steps = scenario.max_steps
        self.split = rule.stepping is Stepping.SPLIT
        self.accumulated: list[tuple[int, Fraction]] = []
        """Samples and coefficient of each micro-batch in the gradients."""
        self.open: list[int] = []
        """Samples of each micro-batch since the last update, cleared or not."""
        self.in_window = 0
        self.consumed = self.updates = self.counter = self.used = self.lost = 0
        self.begun = self.finished = 0
        self.scales: Counter[Fraction] = Counter()
        self.by_epoch: list[int] = []
        self.stops = ""
        sizes = self.loader(scenario)
        while not self.stops:
            if self.done():
                self.stops = "max_steps"
            elif self.finished == scenario.epochs:
                self.stops = "epochs"
            elif scenario.epochs is None and give_up(self):
                self.stops = "never"
            else:
                self.epoch(sizes, endless=scenario.epochs is None)

    @staticmethod
    def loader(scenario: TrainingPlan) -> list[int]:
        """Samples of each micro-batch of an epoch, over all ranks, as torch's own samplers hand them out."""
        from torch.utils.data import BatchSampler
        from torch.utils.data.distributed import DistributedSampler

        batches = []
        for rank in range(scenario.world_size):
            data: Any = range(scenario.samples)
            dropping = scenario.sampler_drop_last
            sampler = DistributedSampler(
                data, scenario.world_size, rank, shuffle=False, drop_last=dropping
            )
            batches.append(
                [len(b) for b in BatchSampler(sampler, scenario.batch_size, scenario.drop_last)]
            )
        return [sum(sizes) for sizes in zip(*batches, strict=True)][: scenario.limit_batches]

    def done(self) -> bool:
        return self.max_steps is not None and self.counter >= self.max_steps

    def epoch(self, sizes: list[int], *, endless: bool) -> None:
        self.n = self.ns[min(self.begun, len(self.ns) - 1)]
        self.begun += 1
        before = self.updates
        for index, size in enumerate(sizes):
            if self.done() or (endless and self.give_up(self)):
                return
            self.micro_batch(index, size, last=index == len(sizes) - 1)
        self.finished += 1
        self.by_epoch.append(self.updates - before)

    def micro_batch(self, index: int, size: int, *, last: bool) -> None:
        self.consumed += 1
        self.in_window += 1
        self.open.append(size)
        if self.split and self.rule.clears and index % self.n == 0:
            self.accumulated = []
        twice = self.n if self.rule.twice else 1
        self.accumulated.append((size, Fraction(1, self.n * twice)))
        of_epoch = (index + 1) % self.n == 0
        flushes = self.rule.stepping in (Stepping.WINDOW, Stepping.FLUSH)
        if (of_epoch or last) if flushes else self.in_window == self.n:
            scale = sum((coefficient for _, coefficient in self.accumulated), Fraction(0))
            if self.rule.stepping is Stepping.WINDOW:
                scale = Fraction(1)
            self.scales[scale] += 1
            reached = sum(size for size, _ in self.accumulated)
            self.used += reached
            self.lost += sum(self.open) - reached
            self.updates += 1
            self.in_window, self.accumulated, self.open = 0, [], []
            self.counter += not self.split
        if self.split and of_epoch:
            self.counter += 1


def simulate(scenario: TrainingPlan, rule: StepRule) -> Simulation:
    """The training, cut off where it should have ended if it does not."""
    done = Simulation(scenario, rule, lambda it: it.updates > 4 * (scenario.max_steps or 0) + 4)
    if done.stops == "never":
        return Simulation(scenario, rule, lambda it: it.updates == scenario.max_steps)
    return done


@pytest.mark.torch
@settings(max_examples=400)
@given(scenario=scenarios(), rule=rules)
@example(
    scenario=TrainingPlan(samples=3, batch_size=1, accumulate=(4,), epochs=None, max_steps=3),
    rule=ZERO3,
)
@example(
    scenario=TrainingPlan(samples=37, batch_size=4, accumulate=(12,), world_size=2, epochs=9),
    rule=ZERO3,
)
def test_as_simulated(scenario: TrainingPlan, rule: StepRule) -> None:
    found = calculate(scenario, rule)
    if found is None:  # a window may hold micro-batches of two N
        assert scenario.accumulate[1:] and rule.stepping not in (Stepping.WINDOW, Stepping.FLUSH)
        return
    simulated = simulate(scenario, rule)
    assert found.stops == simulated.stops
    assert found.micro_batches_consumed == simulated.consumed
    assert found.optimizer_steps == simulated.updates
    assert (found.epochs_begun, found.samples_used) == (simulated.begun, simulated.used)
    assert found.samples_lost_in_mid_run == simulated.lost
    assert found.samples_left_open == sum(simulated.open)
    assert found.micro_batches_left_open == len(simulated.open)
    assert found.update_scales == pytest.approx(
        {float(scale): count for scale, count in simulated.scales.items()}
    )
    assert list(found.update_scales) == sorted(found.update_scales, reverse=True)
    counters = {
        "trainer.global_step": simulated.counter,
        "engine.global_steps": simulated.updates,
        "trainer.step": simulated.updates + (simulated.updates < scenario.naive_steps),
    }
    for name, counter in counters.items():
        assert found.steps_reported.get(name, counter) == counter
    pattern = found.steps_per_epoch
    last = len(pattern) - 1
    place = (
        (lambda epoch: min(epoch, last))
        if scenario.accumulate[1:]
        else (lambda epoch: epoch % len(pattern))
    )
    assert simulated.by_epoch == [pattern[place(epoch)] for epoch in range(simulated.finished)]
    assert_conserved(scenario, found)


# The command.


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str) -> tuple[int, str, str]:
        status = main(["steps", *line.split()])
        out, err = capsys.readouterr()
        return status, out, err

    return run


CASE = "--samples 40 --micro-batch 4 --accumulate 4 --epochs 2"


PUBLISHED = [
    # samples, epochs, micro-batch, N, ranks, "Total optimization steps" of the log; all by transformers before 4.52
    (900, 10, 1, 8, 2, 560),  # hiyouga/LLaMA-Factory #4783
    (1047, 300, 10, 8, 1, 3900),  # hk.pswp.cn/pingmian/73165.shtml
    (6668, 3, 2, 2, 1, 5001),  # blog.csdn.net/Yaki_Duck/article/details/145152631
    (4107, 2, 8, 8, 1, 128),  # qa.1r1g.com/sf/ask/5320179721
    (467, 5, 2, 4, 1, 290),  # unslothai/unsloth #1140
    (396_746, 3, 4, 4, 8, 9297),  # modelscope/ms-swift #4366
    (8 * 5498, 1, 8, 4, 7, 196),  # huggingface/open-r1 #483, with 8 generations of each prompt
    (23_256, 1, 1, 4, 1, 5814),  # haotian-liu/LLaVA #1670, by its 23,256 micro-batches
    (14_339, 3, 8, 8, 1, 672),  # zjunlp/DeepKE #402, with the N of its script
    (
        7 * 8031,
        1,
        1,
        4,
        7,
        2007,
    ),  # StarsfieldAI/R1-V #122, with as many generations of a prompt as ranks, as it needs
    (
        4 * 1283,
        1,
        1,
        1,
        4,
        1283,
    ),  # huggingface/trl #3442: of the generations that 4 ranks can have, 4 fit
    (72 * 800_000, 1, 3, 1, 24, 800_000),  # huggingface/trl #3165: of the divisors of 72, 72 fits
    (698, 3, 2, 4, 4, 66),  # huggingface/alignment-handbook #220, by the samples after packing
    # tulerfeng/Video-R1 #58, with "1.7k" prompts: its trainer inherits the sampler of transformers, not trl's, takes
    # each prompt once, and a rank generates all answers to it (src/r1-v/src/open_r1/trainer/grpo_trainer.py:
    # num_return_sequences)
    (1700, 8, 1, 1, 8, 1704),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: str(case[-1]))
def test_published_counts_of_the_trainer(call: Any, case: tuple[int, ...]) -> None:
    samples, epochs, micro, n, ranks, steps = case
    command = f"--samples {samples} --epochs {epochs} --micro-batch {micro} --accumulate {n} --world-size {ranks} "
    command += "--backend hf-trainer-ddp --json --transformers-version"

    def counted(version: str) -> int:
        status, out, err = call(f"{command} {version}")
        assert (status, err) == (GOOD, "")
        (rule,) = json.loads(out)["rules"]
        return int(rule["steps"]["optimizer_steps"])

    micro_batches = -(-samples // (micro * ranks))
    assert counted("4.44.2") == counted("4.51.3") == steps
    assert counted("4.52.1") == counted("5.23.0") == epochs * -(-micro_batches // n)


OTHER_RULES = [
    # as above; what steps would have to be told; and the count
    # unslothai/unsloth #1140 and #1194: unsloth_train divides the samples by N, whatever the micro-batch
    ((467, 5, 2, 4, 1), (467, 5, 1, 4, 1), 580),
    ((1760, 1, 5, 8, 1), (1760, 1, 1, 8, 1), 220),
    # unslothai/unsloth #224: its log has a quarter of the micro-batch
    ((12_734_115, 2, 4, 2, 8), (12_734_115, 2, 16, 2, 8), 99_486),
    # huggingface/optimum-neuron #198: each rank has all samples
    ((287_113, 1, 1, 1, 32), (287_113, 1, 1, 1, 1), 287_113),
]


@pytest.mark.parametrize(("given", "read", "steps"), OTHER_RULES, ids=str)
def test_published_counts_of_programs_with_rules_of_their_own(
    call: Any, given: tuple[int, ...], read: tuple[int, ...], steps: int
) -> None:
    def counted(samples: int, epochs: int, micro: int, n: int, ranks: int) -> int:
        command = f"--samples {samples} --epochs {epochs} --micro-batch {micro} --accumulate {n} --world-size {ranks} "
        _, out, _ = call(f"{command} --backend hf-trainer-ddp --json --transformers-version 4.45.2")
        return int(json.loads(out)["rules"][0]["steps"]["optimizer_steps"])

    assert counted(*given) != steps == counted(*read)


NOT_DETERMINED = [
    # huggingface/trl #455, 489 steps. Of its 8,861 samples trl 0.4.4, the release of that day, trains on those of at
    # least max_seq_length tokens if it does not pack (sft_trainer.py, _prepare_non_packed_dataloader), and they are not
    # counted there. Packing is no reason: a packed dataset's length is that of the unpacked one (utils.py,
    # ConstantLengthDataset.__len__), which gives 1,662.
    ((2604, 3, 4, 4, 1), 486),
    ((2605, 3, 4, 4, 1), 489),
    ((2620, 3, 4, 4, 1), 489),
    ((2621, 3, 4, 4, 1), 492),
    ((8861, 3, 4, 4, 1), 1662),
    # texttron/tevatron #137, "500K" and "250K" steps on 4 and 2 ranks, with 400k samples (#87 there). Its trainer of
    # 2022 gives each rank all of them (src/tevatron/trainer.py of 91f4733, get_train_dataloader). The epochs, which
    # are not told, would be 40 and 20.
    ((400_000, 40, 32, 1, 1), 500_000),
    ((400_000, 20, 32, 1, 1), 250_000),
]
"""Counts for which a number is not published, as above, and what they are with one."""


@pytest.mark.parametrize(("read", "steps"), NOT_DETERMINED, ids=str)
def test_published_counts_with_a_number_that_is_not(
    call: Any, read: tuple[int, ...], steps: int
) -> None:
    samples, epochs, micro, n, ranks = read
    command = f"--samples {samples} --epochs {epochs} --micro-batch {micro} --accumulate {n} --world-size {ranks} "
    _, out, _ = call(f"{command} --backend hf-trainer-ddp --json --transformers-version 4.30.2")
    assert json.loads(out)["rules"][0]["steps"]["optimizer_steps"] == steps


def test_the_trainer_of_older_versions_stops_before_the_epochs_do() -> None:
    """Ten epochs of 5 micro-batches, in windows of 3, were to have one step each (transformers #36297).

    Up to 4.45 a window goes on in the next epoch, so ten windows are 30 micro-batches; then an epoch has two windows.
    """
    training = TrainingPlan(samples=91, batch_size=10, world_size=2, accumulate=(3,), epochs=10)
    rules = [
        StepRule(stepping=Stepping.OVERRIDE).of_trainer(version)
        for version in ((4, 45, 2), (4, 48, 3), None)
    ]
    found = [calculated(training, rule) for rule in rules]
    assert [each.optimizer_steps for each in found] == [10, 10, 20]
    assert [each.micro_batches_consumed for each in found] == [30, 25, 50]
    for each in found:
        assert_conserved(training, each)


@pytest.mark.parametrize(("samples", "steps"), [(15, 1), (16, 2), (17, 2)])
def test_the_trainer_deals_micro_batches(samples: int, steps: int) -> None:
    """With drop_last, 15 samples are three micro-batches of 4, of which two ranks get one each."""
    training = TrainingPlan(samples=samples, batch_size=4, world_size=2, drop_last=True)
    found = calculated(training, StepRule(stepping=Stepping.OVERRIDE).of_trainer(None))
    assert (found.optimizer_steps, found.samples_dropped) == (steps, samples - steps * 8)
    assert_conserved(training, found)


def test_all_backends_are_in_one_rule_each(call: Any) -> None:
    from bench.backends.base import registry

    status, out, err = call(f"{CASE} --json")
    assert (status, err) == (GOOD, "")
    answer = json.loads(out)
    assert answer.keys() == {"training", "notes", "naive", "rules"}
    listed = [name for rule in answer["rules"] for name in rule["backends"]]
    assert sorted(listed) == sorted(set(registry()) - set(REFERENCES))
    names = [rule["name"] for rule in answer["rules"]]
    splits = ["split", "split (clearing)", "split (clearing, divided once)", "split (divided once)"]
    assert sorted(names) == [
        "cancel",
        "carry",
        "flush",
        "flush (no counter)",
        "override",
        *splits,
        "window",
    ]
    assert answer["naive"]["optimizer_steps"] == 6
    wrong = answer["naive"]["wrong"]
    assert all(f"{rule} takes 5; " in wrong for rule in ("cancel", "carry", "split"))
    for rule in answer["rules"]:
        of_rule = {field.name for field in dataclasses.fields(StepRule)}
        assert rule.keys() == {"name", "backends", "steps", "differences"} | of_rule
        assert rule["steps"].keys() == set(Steps.__dataclass_fields__)


def test_table_and_sentences(call: Any) -> None:
    status, out, err = call(CASE)
    assert (status, err) == (GOOD, "")
    lines = out.splitlines()
    table = {line[:20].strip(): line.split() for line in lines[3:14]}
    assert lines[2].split()[:4] == ["rule", "updates", "per", "epoch"]
    assert table["naive formula"][2] == "6"
    assert table["window"][1:3] == ["6", "3"]
    assert table["carry"][1:3] == ["5", "2,3"]
    assert "zero3-corrected: 6 of 20 micro-batches (24 samples" in out
    assert re.search(r"trainer\.global_step says 4, .*estimated_stepping_batches says 6", out)
    assert re.search(r"\nflush, flush \(no counter\): .* 2 of 4 micro-batches", out)
    assert "2 of 6 updates are 0.5 " in out
    assert "\nnaive: ceil(40 / 16) x 2 = 6, but cancel takes 5; " in out


def test_n_by_epoch(call: Any) -> None:
    numbers = "--samples 32 --micro-batch 2 --accumulate 1,4,3 --world-size 2"
    _, out, _ = call(f"{numbers} --epochs 4")
    table = {line[:20].strip(): line.split() for line in out.splitlines()[3:13]}
    assert (
        table["flush"][1:3] == table["window"][1:3] == ["16", "8,2,3"]
    )  # 3 again in the last epoch
    assert table["split"][1] == table["cancel"][1] == table["carry"][1] == "unknown"
    assert "flush, flush (no counter): " in out and "2 of 16 updates at 0.6667 " in out
    assert "estimated_stepping_batches says 32" in out
    assert "Lightning refuses an N by epoch" in out
    _, out, _ = call(f"{numbers.replace('1,4,3', '1,4,2')} --max-steps 11 --json")
    steps = {rule["name"]: rule["steps"] for rule in json.loads(out)["rules"]}
    assert (
        steps["carry"]["micro_batches_consumed"] == steps["window"]["micro_batches_consumed"] == 18
    )


def test_a_backend_that_declares_no_rule_is_not_calculated(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.backends.plain import DDPEager

    monkeypatch.setattr(DDPEager, "stepping", Stepping.UNKNOWN)
    _, out, _ = call(f"{CASE} --backend ddp-eager")
    assert "ddp-eager: declares no rule, so nothing is calculated" in out
    _, out, _ = call(f"{CASE} --backend ddp-eager --json")
    assert json.loads(out)["rules"][0]["steps"] is None
