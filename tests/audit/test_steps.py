"""The step calculator: measured cases, an independent simulation of every rule, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bench.audit.stepcount import StepRule, Steps, Stops, calculate, reaches, updates
from bench.audit.training import LARGEST_ACCUMULATE, TrainingPlan
from bench.cli import main
from bench.errors import GOOD, WRONG, InputError
from bench.plan.cell import Sharding, Stepping

ROOT = Path(__file__).resolve().parents[2]
WINDOW = StepRule(stepping=Stepping.WINDOW)
FLUSH = StepRule(stepping=Stepping.FLUSH)
CARRY = StepRule(stepping=Stepping.CARRY)
ZERO2 = StepRule.of(Stepping.SPLIT, Sharding.GRADS)
ZERO3 = StepRule.of(Stepping.SPLIT, Sharding.PARAMS)
CORRECTED = StepRule.of(Stepping.SPLIT, Sharding.GRADS, divides_once=True)
RULES = [WINDOW, FLUSH, CARRY, ZERO2, ZERO3, CORRECTED]


def plan(num_micro_batches: int, accumulate: int, epochs: int | None = None, **options: Any) -> TrainingPlan:
    """A scenario by its micro-batches per epoch, of one sample each."""
    return TrainingPlan(samples=num_micro_batches, batch_size=1, accumulate=accumulate, epochs=epochs, **options)


def calculated(scenario: TrainingPlan, rule: StepRule) -> Steps:
    steps = calculate(scenario, rule)
    assert steps is not None
    return steps


# Measured cases: Lightning 2.6.6, DeepSpeed 0.19.8.


def test_ten_micro_batches_in_windows_of_four() -> None:
    found = {rule: calculated(plan(10, 4, 2), rule) for rule in RULES}
    assert [found[rule].optimizer_steps for rule in RULES] == [6, 6, 5, 5, 5, 5]
    assert found[WINDOW].steps_reported == {}
    assert found[WINDOW].update_scales == {1: 6}
    assert found[FLUSH].update_scales == {1: 4, 0.5: 2}
    assert found[FLUSH].steps_reported == {"trainer.global_step": 6, "trainer.estimated_stepping_batches": 6}
    assert found[CARRY].update_scales == {1: 5}
    assert found[CARRY].steps_reported == {"engine.global_steps": 5}
    assert found[CARRY].steps_per_epoch == (2, 3)
    assert found[ZERO2].steps_reported == found[ZERO3].steps_reported == found[CORRECTED].steps_reported
    assert found[ZERO2].steps_reported == {
        "trainer.global_step": 4,
        "trainer.estimated_stepping_batches": 6,
        "engine.global_steps": 5,
    }
    assert found[ZERO2].update_scales == {0.25: 5}
    assert found[CORRECTED].update_scales == {1: 5}
    assert found[ZERO3].update_scales == {0.25: 2, 0.125: 3}
    assert found[ZERO3].micro_batches_lost_in_mid_run == 6
    assert found[ZERO2].micro_batches_lost_in_mid_run == 0


@pytest.mark.parametrize(("drop_last", "steps"), [(False, [6, 6, 5, 5, 5, 5]), (True, [6, 6, 4, 4, 4, 4])])
def test_drop_last_drops_a_micro_batch_but_no_window(drop_last: bool, steps: list[int]) -> None:
    scenario = TrainingPlan(samples=39, batch_size=4, accumulate=4, epochs=2, drop_last=drop_last)
    assert scenario.micro_batches_per_epoch == (9 if drop_last else 10)
    assert scenario.last_micro_batch == (4 if drop_last else 3)
    found = [calculated(scenario, rule) for rule in RULES]
    assert [one.optimizer_steps for one in found] == steps
    if drop_last:
        assert [one.samples_dropped for one in found] == [6] * 6
        assert [one.micro_batches_left_open for one in found] == [0, 0, 2, 2, 2, 2]
        assert found[4].micro_batches_lost_in_mid_run == 2, "the 9th and the 13th"
        assert [one.steps_reported.get("trainer.global_step") for one in found] == [None, 6, None, 4, 4, 4]


def test_a_divisible_epoch_is_the_same_for_all() -> None:
    found = [calculated(plan(8, 4, 2), rule) for rule in RULES]
    assert {one.optimizer_steps for one in found} == {4}
    assert {one.equal_max_steps for one in found} == {4}
    assert {one.steps_reported.get("trainer.global_step", 4) for one in found} == {4}
    assert calculated(plan(8, 4, 2), ZERO3).update_scales == {0.25: 4}


@pytest.mark.parametrize(("epochs", "native", "engine"), [(3, 3, 2), (4, 4, 3), (5, 5, 3)])
def test_an_epoch_shorter_than_a_window(epochs: int, native: int, engine: int) -> None:
    found = [calculated(plan(3, 4, epochs), rule) for rule in RULES]
    assert [one.optimizer_steps for one in found] == [native, native, engine, engine, engine, engine]
    assert found[1].update_scales == {0.75: native}
    assert found[3].steps_reported["trainer.global_step"] == 0
    assert [one.equal_max_steps for one in found] == [native, native, engine, None, None, None]


def test_max_steps_in_mid_epoch() -> None:
    found = [calculated(plan(10, 4, max_steps=5), rule) for rule in RULES]
    assert {one.stops for one in found} == {Stops.MAX_STEPS}
    assert [one.micro_batches_consumed for one in found] == [18, 18, 20, 24, 24, 24]
    assert [one.optimizer_steps for one in found] == [5, 5, 5, 6, 6, 6]
    assert [one.samples_unread for one in found] == [2, 2, 0, 6, 6, 6]
    assert found[0].epochs_consumed == 1.8
    assert calculated(plan(10, 4, max_steps=4), ZERO2).micro_batches_consumed == 18
    assert calculated(plan(10, 4, max_steps=4), ZERO2).optimizer_steps == 4


def test_max_steps_that_are_never_reached() -> None:
    scenario = plan(3, 4, 9, max_steps=2)
    assert calculated(scenario, FLUSH).epochs_consumed == 2
    split = calculated(scenario, ZERO2)
    assert (split.stops, split.optimizer_steps) == (Stops.EPOCHS, 6)
    assert split.steps_reported["trainer.global_step"] == 0
    endless = calculated(plan(3, 4, max_steps=2), ZERO3)
    assert (endless.stops, endless.optimizer_steps, endless.micro_batches_consumed) == (Stops.NEVER, 2, 8)
    assert endless.steps_reported["trainer.global_step"] == 0


@pytest.mark.parametrize("rule", RULES)
def test_max_steps_zero_trains_nothing(rule: StepRule) -> None:
    for scenario in (plan(10, 4, max_steps=0), plan(3, 4, 5, max_steps=0)):
        found = calculated(scenario, rule)
        assert (found.stops, found.micro_batches_consumed, found.optimizer_steps) == (Stops.MAX_STEPS, 0, 0)
        assert (found.epochs_begun, found.samples_padded, found.update_scales) == (0, 0, {})


def test_no_max_steps_equals_epochs_that_the_counters_split() -> None:
    """4 stops after 18 micro-batches with 4 updates, 5 after 24 with 6; the epochs make 5."""
    assert calculated(plan(10, 4, 2), ZERO2).equal_max_steps is None
    assert [calculated(plan(10, 4, max_steps=k), ZERO2).optimizer_steps for k in (4, 5)] == [4, 6]


def test_an_unknown_rule_is_not_calculated() -> None:
    assert calculate(plan(10, 4, 2), StepRule(stepping=Stepping.UNKNOWN)) is None


def test_only_zero2_keeps_what_is_accumulated() -> None:
    kept = {sharding: not StepRule.of(Stepping.SPLIT, sharding).clears for sharding in Sharding}
    assert [sharding for sharding in Sharding if kept[sharding]] == [Sharding.GRADS]
    assert StepRule.of(Stepping.CARRY, Sharding.PARAMS) == CARRY


def test_large_numbers_are_exact_and_quick() -> None:
    scenario = TrainingPlan(
        samples=10**15 + 7, batch_size=3, accumulate=1000, world_size=64, epochs=10**6, drop_last=True
    )
    for rule in RULES:
        found = calculated(scenario, rule)
        assert found.optimizer_steps * 1000 >= found.micro_batches_consumed - 1000
        assert_conserved(scenario, found)


# Properties.


@st.composite
def scenarios(draw: st.DrawFn, limit: str = "any") -> TrainingPlan:
    """Small enough to be simulated; ``limit``: epochs, max_steps or any."""
    limit = draw(st.sampled_from(["epochs", "max_steps", "both"])) if limit == "any" else limit
    numbers: dict[str, Any] = {
        "samples": draw(st.integers(1, 120)),
        "batch_size": draw(st.integers(1, 6)),
        "accumulate": draw(st.integers(1, 12)),
        "world_size": draw(st.integers(1, 5)),
        "epochs": None if limit == "max_steps" else draw(st.integers(1, 9)),
        "max_steps": None if limit == "epochs" else draw(st.integers(0, 40)),
        "drop_last": draw(st.booleans()),
    }
    assume(not numbers["drop_last"] or -(-numbers["samples"] // numbers["world_size"]) >= numbers["batch_size"])
    return TrainingPlan(**numbers)


rules = st.sampled_from(RULES)


def assert_conserved(scenario: TrainingPlan, found: Steps) -> None:
    accounted = found.samples_used + found.samples_lost_in_mid_run + found.samples_left_open
    accounted += found.samples_dropped + found.samples_unread
    assert accounted == scenario.samples * found.epochs_begun + found.samples_padded


class Simulation:
    """Trains micro-batch by micro-batch as the sources say, and counts. Nothing is calculated in closed form.

    ``give_up`` says when nobody would wait any longer for ``max_steps``.
    """

    def __init__(self, scenario: TrainingPlan, rule: StepRule, give_up: Callable[[Simulation], bool]) -> None:
        self.give_up = give_up
        self.n, self.rule = scenario.accumulate, rule
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
            sampler = DistributedSampler(range(scenario.samples), scenario.world_size, rank, shuffle=False)  # type: ignore[arg-type]
            batches.append([len(b) for b in BatchSampler(sampler, scenario.batch_size, scenario.drop_last)])
        return [sum(sizes) for sizes in zip(*batches, strict=True)]

    def done(self) -> bool:
        return self.max_steps is not None and self.counter >= self.max_steps

    def epoch(self, sizes: list[int], *, endless: bool) -> None:
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


@settings(max_examples=400, deadline=None)
@given(scenario=scenarios(), rule=rules)
@example(scenario=TrainingPlan(samples=3, batch_size=1, accumulate=4, epochs=None, max_steps=3), rule=ZERO3)
@example(scenario=TrainingPlan(samples=37, batch_size=4, accumulate=12, world_size=2, epochs=9), rule=ZERO3)
def test_as_simulated(scenario: TrainingPlan, rule: StepRule) -> None:
    found, simulated = calculated(scenario, rule), simulate(scenario, rule)
    assert found.stops == simulated.stops
    assert found.micro_batches_consumed == simulated.consumed
    assert found.optimizer_steps == simulated.updates
    assert (found.epochs_begun, found.samples_used) == (simulated.begun, simulated.used)
    assert found.samples_lost_in_mid_run == simulated.lost
    assert found.samples_left_open == sum(simulated.open)
    assert found.micro_batches_left_open == len(simulated.open)
    assert found.update_scales == pytest.approx({float(scale): count for scale, count in simulated.scales.items()})
    assert list(found.update_scales) == sorted(found.update_scales, reverse=True)
    for name, counter in (("trainer.global_step", simulated.counter), ("engine.global_steps", simulated.updates)):
        assert found.steps_reported.get(name, counter) == counter
    pattern = found.steps_per_epoch
    assert simulated.by_epoch == [pattern[epoch % len(pattern)] for epoch in range(simulated.finished)]


@settings(deadline=None)
@given(scenario=scenarios(), rule=rules)
def test_every_sample_is_accounted_for(scenario: TrainingPlan, rule: StepRule) -> None:
    found = calculated(scenario, rule)
    assert_conserved(scenario, found)
    assert min(found.samples_used, found.samples_left_open, found.samples_unread, found.samples_lost_in_mid_run) >= 0
    assert sum(found.update_scales.values()) == found.optimizer_steps
    assert all(0 < scale <= 1 for scale in found.update_scales)
    if found.stops == Stops.EPOCHS:
        assert found.samples_unread == 0
    if found.micro_batches_lost_in_mid_run == 0:
        assert found.samples_lost_in_mid_run == 0


@given(scenario=scenarios("epochs"), rule=rules)
def test_more_of_anything_gives_no_fewer_steps(scenario: TrainingPlan, rule: StepRule) -> None:
    steps = calculated(scenario, rule).optimizer_steps
    given_ = {name: getattr(scenario, name) for name in TrainingPlan.__dataclass_fields__}
    for name, fewer in (("epochs", False), ("samples", False), ("accumulate", True)):
        other = calculated(TrainingPlan(**given_ | {name: given_[name] + 1}), rule).optimizer_steps
        assert other <= steps if fewer else other >= steps


@given(scenario=scenarios("max_steps"), rule=rules)
def test_a_later_limit_stops_later(scenario: TrainingPlan, rule: StepRule) -> None:
    assert scenario.max_steps is not None
    first, second = (reaches(scenario, rule, scenario.max_steps + more) for more in (0, 1))
    assert second is None or (first is not None and first < second)
    if first is not None:
        taken = updates(scenario, rule, first)
        assert taken >= scenario.max_steps
        assert taken == scenario.max_steps or rule.stepping is Stepping.SPLIT


@given(scenario=scenarios("epochs"), rule=rules)
def test_equal_max_steps_makes_the_same_updates(scenario: TrainingPlan, rule: StepRule) -> None:
    by_epochs = calculated(scenario, rule)
    given_ = {name: getattr(scenario, name) for name in TrainingPlan.__dataclass_fields__} | {"epochs": None}

    def stopped(max_steps: int) -> Steps:
        return calculated(TrainingPlan(**given_ | {"max_steps": max_steps}), rule)

    if by_epochs.equal_max_steps is not None:
        same = stopped(by_epochs.equal_max_steps)
        for name in ("optimizer_steps", "samples_used", "samples_lost_in_mid_run", "update_scales"):
            assert getattr(same, name) == getattr(by_epochs, name)
    else:
        assert rule.stepping is Stepping.SPLIT
        candidates = [stopped(max_steps) for max_steps in range(by_epochs.optimizer_steps + 2)]
        ended = [one.optimizer_steps for one in candidates if one.stops == Stops.MAX_STEPS]
        assert by_epochs.optimizer_steps not in ended


@given(windows=st.integers(1, 30), accumulate=st.integers(1, 12), epochs=st.integers(1, 9))
def test_where_windows_fit_all_rules_agree(windows: int, accumulate: int, epochs: int) -> None:
    scenario = plan(windows * accumulate, accumulate, epochs)
    for rule in RULES:
        found = calculated(scenario, rule)
        assert found.optimizer_steps == found.equal_max_steps == scenario.naive_steps == windows * epochs
        assert set(found.steps_reported.values()) <= {windows * epochs}
        assert found.samples_used == scenario.samples * epochs
        assert found.update_scales == {1 / (accumulate if rule.twice else 1): windows * epochs}


@given(scenario=scenarios())
def test_the_naive_formula_is_right_where_epochs_are_closed_and_nothing_dropped(scenario: TrainingPlan) -> None:
    """ceil(ceil(ceil(S / W) / b) / N) = ceil(S / (W b N))."""
    if not scenario.dropped_per_epoch:
        assert calculated(scenario, WINDOW).optimizer_steps == scenario.naive_steps
        assert calculated(scenario, FLUSH).optimizer_steps == scenario.naive_steps


@given(scenario=scenarios())
def test_padding_is_among_what_is_dropped(scenario: TrainingPlan) -> None:
    if scenario.dropped_per_epoch:
        assert scenario.dropped_per_epoch >= scenario.padding_per_epoch


# The command.


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str) -> tuple[int, str, str]:
        status = main(["steps", *line.split()])
        out, err = capsys.readouterr()
        return status, out, err

    return run


CASE = "--samples 40 --batch-size 4 --accumulate 4 --epochs 2"


def test_all_backends_are_in_one_rule_each(call: Any) -> None:
    from bench.backends.base import registry

    status, out, err = call(f"{CASE} --json")
    assert (status, err) == (GOOD, "")
    answer = json.loads(out)
    assert answer.keys() == {"training", "notes", "naive", "rules"}
    listed = [name for rule in answer["rules"] for name in rule["backends"]]
    assert sorted(listed) == sorted(registry())
    names = [rule["name"] for rule in answer["rules"]]
    assert sorted(names) == ["carry", "flush", "split", "split (clearing)", "split (divided once)", "window"]
    assert answer["naive"]["optimizer_steps"] == 6
    assert "ceil(40 / 16) x 2 = 6, but carry takes 5; split takes 5" in answer["naive"]["wrong"]
    for rule in answer["rules"]:
        assert rule.keys() == {"name", "stepping", "clears", "twice", "backends", "steps", "differences"}
        assert rule["steps"].keys() == set(Steps.__dataclass_fields__)


def test_only_the_backends_that_are_asked_for(call: Any) -> None:
    _, out, _ = call(f"{CASE} --json --backend lightning-deepspeed-zero3 --backend lightning-ddp,deepspeed-zero2-eager")
    answer = json.loads(out)
    assert {rule["name"]: rule["backends"] for rule in answer["rules"]} == {
        "carry": ["deepspeed-zero2-eager"],
        "flush": ["lightning-ddp"],
        "split (clearing)": ["lightning-deepspeed-zero3"],
    }


def test_table_and_sentences(call: Any) -> None:
    status, out, err = call(CASE)
    assert (status, err) == (GOOD, "")
    lines = out.splitlines()
    table = {line[:20].strip(): line.split() for line in lines[3:10]}
    assert lines[2].split()[:4] == ["rule", "updates", "per", "epoch"]
    assert table["naive formula"][2] == "6"
    assert table["window"][1:3] == ["6", "3"]
    assert table["carry"][1:3] == ["5", "2,3"]
    assert (
        "lightning-deepspeed-zero3: 6 of 20 micro-batches (24 samples over all ranks) are cleared in mid-window" in out
    )
    assert "trainer.global_step says 4, and trainer.estimated_stepping_batches says 6" in out
    assert "lightning-ddp, lightning-fsdp2: the last window of an epoch has 2 of 4 micro-batches" in out
    assert "2 of 6 updates are 0.5 of the right one" in out
    assert "no max_steps gives the same updates as 2 epochs" in out
    assert "\nnaive: ceil(40 / 16) x 2 = 6, but carry takes 5;" in out


def test_nothing_is_said_where_nothing_differs(call: Any) -> None:
    _, out, _ = call(
        "--samples 32 --batch-size 4 --accumulate 4 --backend ddp-deferred,lightning-ddp,deepspeed-zero3-eager"
    )
    assert out.splitlines()[-1] == "flush: lightning-ddp"


def test_padding_dropping_and_a_short_micro_batch_are_told(call: Any) -> None:
    _, out, _ = call("--samples 39 --batch-size 8 --world-size 2 --backend ddp-eager")
    assert "all: DistributedSampler repeats 1 sample per epoch" in out
    assert "the last micro-batch of an epoch has 4 of 8 samples" in out and "counts 2 times as much" in out
    _, out, _ = call("--samples 39 --batch-size 8 --world-size 2 --backend ddp-eager --drop-last")
    assert "all of them among those that drop_last leaves out" in out
    assert "drop_last leaves out 8 samples in every epoch" in out
    assert "it counts samples that drop_last leaves out" in out


def test_max_steps_late_never_and_too_many(call: Any) -> None:
    _, out, _ = call("--samples 10 --batch-size 1 --accumulate 4 --max-steps 5 --backend lightning-deepspeed-zero2")
    assert "max_steps 5 stops training 1 update late, after 6" in out
    short = "--samples 3 --batch-size 1 --accumulate 4 --max-steps 2 --backend lightning-deepspeed-zero2"
    _, out, _ = call(short)
    assert "trainer.global_step stays 0 and max_steps 2 is never reached: training never ends" in out
    assert "it should end after 8 micro-batches, with 2 updates made" in out
    _, out, _ = call(f"{short} --epochs 9")
    assert "never reached: the epochs end it, with 6 updates taken" in out
    _, out, _ = call(f"{CASE} --max-steps 6 --backend deepspeed-zero2-eager")
    assert "the epochs end it before max_steps 6, with 5 updates taken" in out


def test_max_steps_of_minus_one_is_no_limit(call: Any) -> None:
    assert call("--samples 10 --batch-size 1 --max-steps -1") == call("--samples 10 --batch-size 1")


def test_a_backend_that_declares_no_rule_is_not_calculated(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.backends.plain import DDPEager

    monkeypatch.setattr(DDPEager, "stepping", Stepping.UNKNOWN)
    _, out, _ = call(f"{CASE} --backend ddp-eager")
    assert "ddp-eager: declares no rule, so nothing is calculated" in out
    _, out, _ = call(f"{CASE} --backend ddp-eager --json")
    assert json.loads(out)["rules"][0]["steps"] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--batch-size 4", "the following arguments are required: --samples"),
        ("--samples 0 --batch-size 4", "--samples is 0; it must be an integer of at least 1"),
        ("--samples 9 --batch-size -1", "--batch-size is -1; it must be an integer of at least 1"),
        ("--samples 9 --batch-size 4 --accumulate 0", "--accumulate is 0; it must be an integer of at least 1"),
        (f"--samples 9 --batch-size 4 --accumulate {LARGEST_ACCUMULATE + 1}", "it must be at most 1000000"),
        ("--samples 9 --batch-size 4 --world-size 0", "--world-size is 0; it must be an integer of at least 1"),
        ("--samples 9 --batch-size 4 --epochs 0", "--epochs is 0; it must be an integer of at least 1"),
        ("--samples 9 --batch-size 4 --max-steps -2", "--max-steps is -2; it must be an integer of at least 0, or -1"),
        ("--samples 9 --batch-size x", "--batch-size: 'x' is not an integer"),
        ("--samples 1e3 --batch-size 4", "--samples: '1e3' is not an integer"),
        ("--samples 9 --batch-size 6 --world-size 2 --drop-last", "--batch-size is 6, but a rank has only 5 samples"),
        ("--samples 9 --batch-size 4 --backend ddp-eagre", "'ddp-eagre' is unknown; did you mean ddp-eager?"),
        ("--samples 9 --batch-size 4 --backend ,", "--backend: no name is given; it must be 'all' or a list"),
        ("--samples 9 --batch-size 4 --backend xyzzy", "'xyzzy' is unknown; use one of reference, "),
    ],
)
def test_bad_input_is_one_line(call: Any, line: str, words: str) -> None:
    status, out, err = call(line)
    assert (status, out) == (WRONG, "")
    assert words in err
    assert err.startswith("bench: ") and err.count("\n") == 1


def test_a_scenario_has_an_end() -> None:
    with pytest.raises(InputError, match="training has no end"):
        TrainingPlan(samples=1, batch_size=1, epochs=None)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = f"""
import sys
from bench.cli import main
status = main(["steps", *"{CASE}".split()])
heavy = {{"torch", "pandas", "lightning", "deepspeed", "transformers", "matplotlib"}}
print(status, sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr.splitlines()[-1] == "0 []"
