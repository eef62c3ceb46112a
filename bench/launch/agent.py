"""Torch elastic's agent and rendezvous for one trial, on one machine.

Torch's own agent polls the ranks every ``monitor_interval`` seconds: each poll of a long trial takes CPU time from a
core that may be under measurement, and a short trial loses half an interval at its end. This agent is woken as soon as
a rank ends. Torch's own rendezvous handlers create stores that listen on all interfaces, and anyone who reaches such a
port can write to it. This store listens on the loopback interface only.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from bench.launch import stragglers

LOOK_S, LOOK_BLIND_S = 2.0, 0.25
"""Longest sleep of the agent; the second value where torch does not expose anything to wait for."""


class Agent(LocalElasticAgent):
    """Sleeps until a rank has returned or ended."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        signs = self._signs()
        ready = wait(signs, LOOK_S if signs else LOOK_BLIND_S)
        # If a rank has ended, torch's own check ends the others.
        held = stragglers.mapped(self.pids) if any(isinstance(sign, int) for sign in ready) else set()
        result: RunResult = super()._monitor_workers(worker_group)
        stragglers.remove(held)
        return result

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _signs(self) -> list[Any]:
        """Objects that become readable when a rank returns (the pipe of its result) or ends (its sentinel)."""
        context: Any = self._pcontext
        try:
            pipes = [queue._reader for rank, queue in context._ret_vals.items() if rank not in context._return_values]
            return [*pipes, *context._pc.sentinels]  # sentinels of ranks that have not ended yet
        except AttributeError:
            return []


def run(
    rank_main: Callable[[str], None], payload: str, world_size: int, folder: str, start_method: str
) -> dict[str, Any]:
    """Run ``rank_main(payload)`` in ``world_size`` ranks and return what failed: the rank, its exit code or signal.

    Their logs go into the folder. ``server`` sends the answer on. Without a failure of torch elastic's, the answer says
    that a rank ended without a result; that counts only if a result is missing.
    """
    spec = WorkerSpec(
        role="rank",
        local_world_size=world_size,
        rdzv_handler=LoopbackRendezvous(uuid.uuid4().hex),
        entrypoint=rank_main,
        args=(payload,),
        max_restarts=0,
        monitor_interval=1e-3,  # the sleep before each wait, in seconds
        local_addr=HOST,
    )
    logs = DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL)
    try:
        result = Agent(spec, logs, start_method=start_method).run()
    except Exception as error:
        return {"failure": f"torch elastic: {type(error).__name__}: {error}"}
    if not result.failures:
        return {"failure": "a rank ended without a result"}
    # Seen together, a rank that a signal ended is why another one failed.
    rank, first = min(result.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
    if first.exitcode < 0:
        name = stragglers.name(-first.exitcode)
        return {"failure": f"rank {rank} was ended by {name}", "rank": rank, "signal": -first.exitcode}
    return {"failure": f"rank {rank} ended with exit code {first.exitcode}", "rank": rank}


BACKEND = "bench-loopback"
HOST = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one node with itself."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen(socket.SOMAXCONN)
        self._port = int(listener.getsockname()[1])
        self._store = TCPStore(
            HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too, so that none of them opens another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(HOST, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: no other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
