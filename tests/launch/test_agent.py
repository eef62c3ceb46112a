"""Torch elastic's agent says which rank failed first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from bench.launch import agent
from bench.launch.node_task import NodeTask


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Torch elastic sets its own for these signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def act(task_json: str) -> None:
    """A rank ends as it is told."""
    task = json.loads(task_json)
    how = task[os.environ["RANK"]]
    if how == "report":
        Path(task["folder"], f"rank{os.environ['RANK']}.json").touch()
    if isinstance(how, int):
        os._exit(how) if how >= 0 else os.kill(os.getpid(), -how)
    os._exit(1)


def run(num_ranks: int, folder: Path, **ends: Any) -> dict[str, Any]:
    """Run the ranks of a trial on one node; ``rank1`` is how rank 1 ends."""
    task = {"folder": str(folder)} | {name.removeprefix("rank"): how for name, how in ends.items()}
    node_task = NodeTask(
        entry="",
        payload=json.dumps(task),
        folder=str(folder),
        run_id="made",
        num_ranks=num_ranks,
        num_nodes=1,
        address="127.0.0.1",
        packages=(),
    )
    return agent.run(act, node_task, agent.Rendezvous(node_task), "fork")


@pytest.mark.parametrize(
    ("ranks", "failure"),
    [
        ({"rank0": "report", "rank1": 0}, "rank 1 ended without a result"),
        ({"rank0": 3, "rank1": -11}, "rank 1 was ended by SIGSEGV"),
        ({"rank0": "report", "rank1": 7}, "rank 1 ended with exit code 7"),
        ({"rank0": -9, "rank1": 0}, "rank 0 was ended by SIGKILL"),
    ],
)
def test_an_agent_that_looks_late_blames_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, Any], failure: str
) -> None:
    """As on a busy machine: all ranks have ended before it looks."""

    def late(signs: list[Any], timeout: float | None = None) -> list[Any]:
        for sign in signs:
            if isinstance(sign, int):
                wait([sign])
        return wait(signs)

    monkeypatch.setattr(agent, "wait", late)
    found = run(2, tmp_path, **ranks)
    assert f"rank {found['rank']} {found['failure']}" == failure
