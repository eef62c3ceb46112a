"""Torch elastic's agent: it hears of the end of its ranks, and does not look for it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.launch import agent

SLEEP_S = 1.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Torch elastic sets its own for these signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def act(task_json: str) -> None:
    """What a rank does: sleeps, and ends as it is told."""
    task = json.loads(task_json)
    if os.environ["RANK"] != str(task.get("rank", os.environ["RANK"])):
        time.sleep(3600)
    time.sleep(SLEEP_S)
    if "signal" in task:
        os.kill(os.getpid(), task["signal"])
    if "exit" in task:
        os._exit(task["exit"])


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ({"rank": 1, "exit": 7}, {"failure": "rank 1 ended with exit code 7", "rank": 1}),
        ({"rank": 0, "signal": 9}, {"failure": "rank 0 was ended by SIGKILL", "rank": 0, "signal": 9}),
    ],
    ids=["exit", "signal"],
)
def test_it_sleeps_until_a_rank_returns_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, Any], answer: dict[str, Any]
) -> None:
    looks = []
    look = agent.LocalElasticAgent._monitor_workers

    def counted(own: agent.Agent, group: Any) -> Any:
        looks.append(time.monotonic())
        return look(own, group)

    monkeypatch.setattr(agent.LocalElasticAgent, "_monitor_workers", counted)
    monkeypatch.setattr(agent, "LOOK_S", 3600.0)
    monkeypatch.setattr(agent, "LOOK_BLIND_S", 3600.0)
    assert agent.run(act, json.dumps(task), 2, str(tmp_path), "spawn") == answer
    assert 1 <= len(looks) <= 4, "one for each rank and pipe that tells something"
    assert len(list(tmp_path.glob("*/attempt_0/*/stderr.log"))) == 2


def test_where_torch_hides_what_it_could_wait_for_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.Agent, "_signs", lambda _: [])
    monkeypatch.setattr(agent, "LOOK_S", 3600.0)
    assert agent.run(act, "{}", 1, str(tmp_path), "spawn") == {"failure": "a rank ended without a result"}
