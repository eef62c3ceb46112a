"""Two nodes on one machine, each a process of its own on a loopback address, started as torchrun or Slurm would."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BAD, GOOD, WRONG, InputError
from bench.launch import job_nodes
from bench.launch.job_nodes import Place as Node
from bench.plan.cell import Status
from bench.run.journal import read_document
from tests.conftest import ROOT, until
from tests.faults.harness import MATRIX_RUN, Place, end, place

HEAD = "127.0.0.2"
"""Where node 0 listens; the other one comes from 127.0.0.1."""
SECRET = "of these tests alone"
ENDS_IN_S = 60.0
"""How long a node may take to end when the other one is gone."""


def free_port() -> int:
    with socket.create_server((HEAD, 0)) as found:
        return int(found.getsockname()[1])


def variables(node: int, port: int, **more: str) -> dict[str, str]:
    """The variables that PyTorchJob sets."""
    job = {
        "RANK": node,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": HEAD,
        "MASTER_PORT": port,
        job_nodes.SECRET: SECRET,
    }
    return {name: str(value) for name, value in job.items()} | more


@contextlib.contextmanager
def job(folder: Path) -> Iterator[list[Place]]:
    """Two nodes in folders of their own. Nothing is left of either at the end."""
    port = free_port()
    with (
        place(folder / "node0", **variables(0, port)) as first,
        place(folder / "node1", **variables(1, port)) as other,
    ):
        yield [first, other]
        for node in (first, other):
            assert not node.leaks.left(ENDS_IN_S)


def errors(node: Place) -> list[str]:
    """What a node printed to its standard error, without the line that it follows."""
    return [line for line in node.output("err").splitlines() if "leads" not in line]


RUN = (*MATRIX_RUN, "--ranks-per-node", "1")


@pytest.mark.timeout(900)
def test_two_nodes_train_what_one_does(tmp_path: Path) -> None:
    """And strangers who connect before keep nobody out: one asks for something else, one says nothing to the end."""
    with job(tmp_path) as (first, other), contextlib.ExitStack() as silent:
        first.write("ddp-eager", "fsdp2-deferred")
        leader = first.start(*MATRIX_RUN, "--ranks-per-node", "1,2")
        port = int(first.environment["MASTER_PORT"])

        def greeted() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((HEAD, port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                silent.enter_context(socket.create_connection((HEAD, port)))
                return True
            return False

        until(greeted)
        follower = other.start("run")
        assert (leader.wait(), follower.wait()) == (GOOD, GOOD), (
            first.output("err"),
            other.output("err"),
        )
        found: dict[str, dict[int, Any]] = {}
        for record in first.records:
            assert record["status"] == Status.OK, record["reason"]
            if not record["cell"]["twin"]:
                found.setdefault(record["cell"]["backend"], {})[
                    record["cell"]["ranks_per_node"]
                ] = record
        for backend in ("ddp-eager", "fsdp2-deferred"):
            spread, together = found[backend][1], found[backend][0]
            assert spread["update"] == together["update"]
            assert spread["time"]["losses"] == together["time"]["losses"]
            assert spread["collectives"] == together["collectives"]
        assert list((tmp_path / "node1").glob("run")) == [], "only node 0 writes"
        assert len(read_document(first.folder / "run")["nodes"]) == 1
        checked = first.run("check", "run").process.stdout
        assert "2 nodes have the same hardware" in checked
        first.environment["WORLD_SIZE"] = "1"
        resumed = first.run("run", "--resume", "run").process
        assert resumed.returncode == WRONG
        assert "was begun on 2 nodes" in resumed.stderr, resumed.stderr


@pytest.mark.timeout(900)
def test_a_node_that_is_killed_costs_its_trials_until_it_comes_back(tmp_path: Path) -> None:
    with job(tmp_path) as (first, other):
        first.write("ddp-eager", repeats=2)
        follower = other.start("run")
        leader = first.start(*RUN, "--max-repeats", "2")
        until(lambda: first.journal.count(b"\n") >= 2)
        follower.kill()
        follower.wait()
        assert not other.leaks.left(ENDS_IN_S)
        assert leader.wait() == BAD, first.output("err")
        lost = [record for record in first.records if record["status"] != Status.OK]
        assert lost
        for record in lost:
            assert record["status"] == Status.INTERRUPTED and record["cell"]["ranks_per_node"] == 1
            assert record["reason"].startswith(f"node 1 ({socket.gethostname()}) was lost: "), (
                record["reason"]
            )
        assert {r["repeat"] for r in first.records if r["cell"]["backend"] == "reference"} == {
            0,
            1,
        }, "it went on"
        follower, leader = other.start("run"), first.start("run", "--resume", "run")
        assert (leader.wait(), follower.wait()) == (GOOD, GOOD), (
            first.output("err"),
            other.output("err"),
        )
        assert {record["status"] for record in first.records[-len(lost) :]} == {Status.OK}


@pytest.mark.timeout(900)
def test_what_a_rank_of_the_other_node_does_is_told_with_its_node_and_its_stacks(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as (first, other):
        first.write("f-raises", "f-exits-0", "f-sleeps")
        follower, leader = other.start("run"), first.start(*RUN)
        assert (leader.wait(), follower.wait()) == (BAD, GOOD), first.output("err")
        found = {record["cell"]["backend"]: record for record in first.records}
        rank = f"rank 1 on node 1 ({socket.gethostname()})"
        assert found["f-raises"]["reason"].startswith(f"{rank}: ValueError: no such thing")
        assert found["f-exits-0"]["reason"] == f"{rank} ended without a result"
        hang = found["f-sleeps"]
        assert hang["status"] == Status.HANG and rank in hang["reason"]
        assert hang["reason"].startswith("no rank got on for 8 s ")
        (stacks,) = [path for path in hang["dumps"] if path.endswith("rank1.stacks")]
        assert "in sleeps" in (first.folder / "run" / stacks).read_text()


@pytest.mark.timeout(900)
def test_a_follower_ends_when_its_leader_is_killed(tmp_path: Path) -> None:
    with job(tmp_path) as (first, other):
        first.write("ddp-eager", repeats=3)
        follower, leader = other.start("run"), first.start(*RUN)
        until(lambda: first.journal.count(b"\n") >= 2)
        leader.kill()
        leader.wait()
        assert follower.wait(ENDS_IN_S) == BAD
        (error,) = errors(other)
        assert error.startswith("bench: node 1 ends, since node 0 is gone")


@pytest.mark.timeout(900)
def test_an_interrupt_lets_all_nodes_go(tmp_path: Path) -> None:
    with job(tmp_path) as (first, other):
        first.write("ddp-eager", repeats=3)
        follower, leader = other.start("run"), first.start(*RUN)
        until(lambda: first.journal.count(b"\n") >= 1)
        assert end(leader, signal.SIGTERM, ENDS_IN_S)[0] == 130
        assert follower.wait(ENDS_IN_S) == GOOD


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("change", "node0", "node1"),
    [
        (
            {job_nodes.SECRET: "another secret than that"},
            "node 1 of 2 did not join within 50 s; node 0 refused 127.0.0.1: its BENCH_SECRET ",
            f"BENCH_SECRET: node 0 at {HEAD} has another secret",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "none7"},
            "node 1 (HOST): GLOO_SOCKET_IFNAME is 'none7', ",
            "",
        ),
        ({"PYTHONPATH": f"FOLDER:{ROOT}"}, "node 1 (HOST): torch is 2.0.0, and ", ""),
        (
            {"WORLD_SIZE": "3"},
            "node 1 (HOST): it was started as one of 3 ",
            "",
        ),
    ],
    ids=["secret", "interface", "version", "count"],
)
def test_a_node_that_cannot_take_part_is_named(
    tmp_path: Path, change: dict[str, str], node0: str, node1: str
) -> None:
    with job(tmp_path) as (first, other):
        first.write("ddp-eager")
        other.environment |= {
            name: value.replace("FOLDER", str(tmp_path)) for name, value in change.items()
        }
        (tmp_path / "torch-2.0.0.dist-info").mkdir()
        (tmp_path / "torch-2.0.0.dist-info" / "METADATA").write_text(
            "Name: torch\nVersion: 2.0.0\n"
        )
        follower, leader = other.start("run"), first.start(*RUN)
        assert (leader.wait(), follower.wait()) == (WRONG, WRONG)
        for node, expected in ((first, node0), (other, node1 or node0)):
            line = errors(node)[-1]
            assert line.startswith(f"bench: {expected.replace('HOST', socket.gethostname())}"), line
        assert not (first.folder / "run").exists()


def environment(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split(" ") if word)


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("", None),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", None),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=9", (1, 2, "a", 9)),
        (
            "SLURM_NODEID=1 SLURM_STEP_NUM_NODES=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=gpu-[07-08,11],m2 "
            "SLURM_JOB_ID=9007",
            (1, 4, "gpu-07", 20_007),
        ),
        (
            "GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=9",
            (1, 2, "h", 10),
        ),
        (
            "SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_IPS=10.0.0.7\n10.0.0.9\n",
            (0, 2, "10.0.0.7", job_nodes.PORT),
        ),
        (
            "DSTACK_NODE_RANK=1 DSTACK_NODES_NUM=2 DSTACK_MASTER_NODE_IP=10.0.0.7",
            (1, 2, "10.0.0.7", job_nodes.PORT),
        ),
    ],
)
def test_what_started_the_job_says_where_this_node_is(started: str, expected: Any) -> None:
    found = job_nodes.here(environment(started))
    assert found == (
        expected
        and Node(node=expected[0], num_nodes=expected[1], head=expected[2], port=expected[3])
    )


@pytest.mark.parametrize(
    ("started", "error"),
    [
        (
            "GROUP_RANK=0 GROUP_WORLD_SIZE=2 MASTER_ADDR=h LOCAL_WORLD_SIZE=8",
            "LOCAL_WORLD_SIZE is 8, and must be 1",
        ),
        (
            "GROUP_RANK=0 GROUP_WORLD_SIZE=2 MASTER_ADDR=h",
            "LOCAL_WORLD_SIZE is not set, and must be 1",
        ),
        ("RANK=x WORLD_SIZE=2 MASTER_ADDR=h", "RANK is 'x', and must be a number"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=h", "RANK is 2, and WORLD_SIZE is 2"),
    ],
)
def test_a_job_that_was_started_wrongly(started: str, error: str) -> None:
    with pytest.raises(InputError) as found:
        job_nodes.here(environment(started))
    assert str(found.value).startswith(error)


def test_the_secret_is_long_and_nobody_else_can_read_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert job_nodes.secret({job_nodes.SECRET: str(path)}) == b"0123456789abcdef"
    path.chmod(0o640)
    for wrong in (
        "",
        f"{job_nodes.SECRET}=short",
        f"{job_nodes.SECRET}={path}",
        f"{job_nodes.SECRET}={tmp_path}/none",
    ):
        with pytest.raises(InputError, match=job_nodes.SECRET):
            job_nodes.secret(environment(wrong))
