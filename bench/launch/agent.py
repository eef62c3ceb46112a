"""Torch elastic's agent and rendezvous of one trial, on one machine.

Torch's own agent looks every ``monitor_interval`` seconds whether ranks have ended: many looks in a long trial, each of
which takes a core that may be measured on, and half an interval lost at the end of a short one. This one hears of each
rank that ends as soon as it does. Torch's own rendezvous handlers make stores that listen on all interfaces, and anyone
who reaches such a port can write into it. This one's store listens on the loopback interface alone.
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
"""How long the agent sleeps at most while nothing happens; the second, where torch hides what it could wait for."""


class Agent(LocalElasticAgent):
    """Sleeps until a rank has returned or ended."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        signs = self._signs()
        ready = wait(signs, LOOK_S if signs else LOOK_BLIND_S)
        # If a rank has ended, torch's own look ends the others.
        held = stragglers.mapped(self.pids) if any(isinstance(sign, int) for sign in ready) else set()
        result: RunResult = super()._monitor_workers(worker_group)
        stragglers.remove(held)
        return result

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _signs(self) -> list[Any]:
        """What becomes readable when a rank returns, which its result's pipe tells, or ends, as its sentinel does."""
        context: Any = self._pcontext
        try:
            pipes = [queue._reader for rank, queue in context._ret_vals.items() if rank not in context._return_values]
            return [*pipes, *context._pc.sentinels]  # without those of ranks that are known to have ended
        except AttributeError:
            return []


def run(
    rank_main: Callable[[str], None], payload: str, world_size: int, folder: str, start_method: str
) -> dict[str, Any]:
    """Run ``rank_main(payload)`` in so many ranks to their end: what failed, by rank and exit code or signal.

    Their logs go into the folder. The answer is that of ``server``; without an error it still lacks their word.
    """
    spec = WorkerSpec(
        role="rank",
        local_world_size=world_size,
        rdzv_handler=LoopbackRendezvous(uuid.uuid4().hex),
        entrypoint=rank_main,
        args=(payload,),
        max_restarts=0,
        monitor_interval=1e-3,  # of sleep before each wait
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
    """One node, which has always met itself."""

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
        """The ranks use the same store, so that none of them opens another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(HOST, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
