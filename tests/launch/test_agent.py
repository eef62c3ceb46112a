"""Torch elastic's agent says which rank failed first."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
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


def task_of(payload: dict[str, Any], folder: str, **given: int) -> NodeTask:
    """The ranks of one node; one rank on the only node if nothing else is given."""
    layout = {"num_ranks": 1, "num_nodes": 1} | given
    return NodeTask(
        entry="",
        payload=json.dumps(payload),
        folder=folder,
        run_id="made",
        address="127.0.0.1",
        packages=(),
        **layout,
    )


def run(num_ranks: int, folder: Path, **ends: Any) -> dict[str, Any]:
    """Run the ranks of a trial on one node; ``rank1`` is how rank 1 ends."""
    task = {"folder": str(folder)} | {name.removeprefix("rank"): how for name, how in ends.items()}
    node_task = task_of(task, str(folder), num_ranks=num_ranks)
    return agent.run(act, node_task, agent.Rendezvous(node_task), "fork")


def lead(payload: dict[str, Any], folder: str, port: Connection) -> None:
    """The first of two nodes, with one rank each."""
    task = task_of(payload, folder, num_nodes=2)
    rendezvous = agent.Rendezvous(task)
    port.send(rendezvous._store.port)
    agent.run(act, task, rendezvous, "fork")


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


@pytest.mark.parametrize("seen_by", ["the bench", "torch elastic"])
def test_the_rank_of_another_node_has_its_number_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_by: str
) -> None:
    """Whoever sees first that it ended: torch elastic's agent numbers ranks of all nodes."""

    def without_signs(signs: list[Any], timeout: float | None = None) -> list[Any]:
        wait([sign for sign in signs if isinstance(sign, int)])
        return []

    if seen_by == "torch elastic":
        monkeypatch.setattr(agent, "wait", without_signs)
    payload = {"folder": str(tmp_path), "0": 0, "1": 7}
    receiver, sender = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("spawn").Process(
        target=lead, args=(payload, str(tmp_path), sender)
    )
    first.start()
    assert receiver.poll(60)
    task = task_of(payload, str(tmp_path), num_nodes=2, node=1, port=receiver.recv())
    found = agent.run(act, task, agent.Rendezvous(task), "fork")
    first.join(60)
    assert found == {"failure": "ended with exit code 7", "rank": 1}
