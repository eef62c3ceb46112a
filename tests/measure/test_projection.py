"""Projections of tensors: distances, shards that add up, and replicas that are equal to the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bench.measure.final_state import is_rounded
from bench.measure.projection import ROW, Part, Truth, Truths, added, distance, norm, project
from bench.run.state_check import check_end, ranks_apart

SIZES = (1, 64, ROW - 1, ROW, ROW + 1, 9 * ROW + 77)


@pytest.mark.parametrize("size", SIZES)
def test_the_distance_of_two_tensors_is_estimated_from_their_projections(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        first = torch.randn(size, generator=generator)
        second = first + 1e-3 * torch.randn(size, generator=generator)
        apart = distance(project(second), project(first))
        assert 0.3 < apart / float((second - first).double().norm()) < 2.5
        assert 0.3 < norm(project(first)) / float(first.norm()) < 2.5


@pytest.mark.parametrize("size", SIZES)
def test_projections_of_shards_add_up_wherever_the_tensor_is_cut(size: int) -> None:
    whole = torch.randn(size)
    for cut in {0, 1, size // 3, size // 2, max(0, size - 1)}:
        parts = [project(whole[:cut]), project(whole[cut:], cut)]
        assert added(parts) == pytest.approx(project(whole), rel=1e-9, abs=1e-9)
    mask = torch.rand(size) > 0.5
    assert project(whole, mask=mask) == pytest.approx(project(whole * mask), rel=1e-9, abs=1e-9)


def test_one_bit_of_one_element_is_seen() -> None:
    first = torch.randn(9 * ROW)
    second = first.clone()
    second.view(torch.int32)[5 * ROW + 3] ^= 1
    assert project(first) == project(first.clone()) != project(second)
    assert distance(project(torch.tensor([math.nan])), project(torch.tensor([1.0]))) == math.inf


def part(values: torch.Tensor, name: str = "a", start: int = 0, kind: str = "exp_avg") -> Part:
    return Part(
        kind=kind, name=name, start=start, count=len(values), projections=project(values, start)
    )


def test_replicas_are_compared_and_shards_are_not() -> None:
    values = torch.randn(100)
    apart = ranks_apart([[part(values)], [part(values)], [part(values * 1.01)]])
    assert apart is not None and apart["num_tensors"] == 1
    assert (apart["tensor"], apart["rank"]) == ("exp_avg of a", 2)
    assert 0.003 < apart["error"] < 0.03
    shards = [[part(values[:50])], [part(values[50:], start=50)]]
    assert ranks_apart(shards) is None
    nameless = [[part(values, name="")], [part(-values, name="")]]
    assert ranks_apart(nameless) is None


def test_shards_of_ranks_are_held_against_the_whole_tensor() -> None:
    values = torch.randn(100)
    truth = Truth(
        count=100,
        projections=project(values),
        scale=float(values.norm()),
        size=float(values.norm()),
    )
    truths = Truths(windows=5, steps=5, tensors={"exp_avg": {"a": truth}})

    def checked(*shards: Part, windows: int = 5) -> dict[str, Any]:
        ranks = [
            {"parts": [_plain(shard)], "settings": [], "steps": 5, "whole": True}
            for shard in shards
        ]
        return check_end(ranks, truths, windows)

    right = checked(part(values[:50]), part(values[50:], start=50))
    assert right["errors"]["exp_avg"]["error"] < 1e-12 and not right["unchecked"]
    wrong = checked(part(values[:50]), part(2 * values[50:], start=50))
    assert 0.2 < wrong["errors"]["exp_avg"]["error"] < 2
    half = checked(part(values[:50]))
    assert not half["errors"] and "exp_avg of a is not that" in half["unchecked"]
    longer = checked(part(values), windows=15)
    assert longer["unchecked"] == "the reference trains 5 of 15 windows"


def _plain(shard: Part) -> dict[str, Any]:
    return {name: getattr(shard, name) for name in Part.__slots__}


def test_numbers_of_bf16_are_told_from_those_of_fp32() -> None:
    values = torch.randn(1000)
    assert not is_rounded(values)
    assert is_rounded(values.bfloat16().float()) and is_rounded(values.bfloat16())
    assert not is_rounded(torch.zeros(1000)), "nothing is said of zeros"
    half = torch.where(torch.arange(1000) % 2 == 0, values, values.bfloat16().float())
    assert not is_rounded(half), "a sum of bf16 gradients may be exact in part"
