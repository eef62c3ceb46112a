"""Torch elastic's agent and rendezvous for one trial, on one node.

Torch's own agent polls the ranks every ``monitor_interval`` seconds: each poll of a long trial
takes CPU time from a core that may be under measurement, and a short trial loses half an interval
at its end. It also takes a rank that exits with code 0 for a good one, and gives the others half a
minute to end. This agent is woken as soon as a rank ends.

Torch's own rendezvous handlers create stores that listen on all interfaces, and anyone who reaches
such a port can write to it.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from bench.launch import stragglers
from bench.launch.node_task import LauncherReply, NodeTask
from bench.launch.outcome import written

JOIN_S = 60
"""How long a node tries to reach the store of the first one, in seconds."""


class Agent(LocalElasticAgent):
    """Sleeps until a rank has returned or ended.

    One that ends before all have returned ends the others.
    """

    exits: Mapping[int, int] = MappingProxyType({})
    """Exit codes of the ranks that ended by themselves before all had returned, by their number on
    this node; negative for signals."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext
        signs = list(context._pc.sentinels)  # readable once a rank has ended
        for rank, queue in context._ret_vals.items():
            if rank not in context._return_values:
                signs.append(queue._reader)  # once it has returned
        ready = wait(signs)
        if not any(isinstance(sign, int) for sign in ready):
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        exits: dict[int, int] = {}
        for rank, process in enumerate(context._pc.processes):
            if process.sentinel in ready or not stragglers.alive(stragglers.find(process.pid)):
                process.join()  # until its exit code is known
                exits[rank] = process.exitcode
        self.exits = exits
        held = stragglers.mapped(context.pids().values())
        context.close(signal.SIGKILL)
        stragglers.remove(held)
        return RunResult(state=WorkerState.FAILED)


def run(
    rank_main: Callable[[str], None], node_task: NodeTask, rendezvous: Rendezvous, start_method: str
) -> LauncherReply:
    """Run ``rank_main`` in this node's ranks and return what failed: the rank, and how it ended.

    Their logs go into the folder. ``server`` sends the answer on. Without a failure, the answer
    says that a rank ended without a result; that counts only if a result is missing. A failure with
    a ``rank`` lacks its name.
    """
    spec = WorkerSpec(
        role="rank",
        local_world_size=node_task.num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=rank_main,
        args=(node_task.payload,),
        max_restarts=0,
        monitor_interval=1e-3,  # the sleep before each wait, in seconds
        local_addr=node_task.address,
    )
    logs = DefaultLogsSpecs(log_dir=node_task.folder, redirects=Std.ALL)
    agent = Agent(spec, logs, start_method=start_method)
    try:
        result = agent.run()
    except Exception as error:
        return {"failure": f"torch elastic: {type(error).__name__}: {error}"}
    first = node_task.ranks.start
    exits: dict[int, int] = {}  # by the rank's number among all, as in torch's failures
    for local_rank, code in agent.exits.items():
        exits[first + local_rank] = code
    if not exits:
        for rank, failed in result.failures.items():
            exits[rank] = failed.exitcode
    if not exits:
        return {"failure": "a rank ended without a result"}
    # Of several, one that a signal ended, or that reported nothing, is why the others failed.
    reported = written(Path(node_task.folder), node_task.ranks)
    rank = min(exits, key=lambda rank: (exits[rank] >= 0, rank in reported))
    code = exits[rank]
    if code < 0:
        return {
            "failure": f"was ended by {stragglers.name(-code)}",
            "rank": rank,
            "signal": -code,
        }
    failure = "ended without a result"
    if code:
        failure = f"ended with exit code {code}"
    return {"failure": failure, "rank": rank}


class Rendezvous(StaticTCPRendezvous):
    """A rendezvous of nodes that are known beforehand.

    The store of the first listens on one address only. The ranks use it too, so none of them opens
    another.
    """

    def __init__(self, node_task: NodeTask) -> None:
        port, listener = node_task.port, None
        if node_task.node == 0:
            family = socket.AF_INET
            if ":" in node_task.address:
                family = socket.AF_INET6
            listener = socket.create_server(
                (node_task.address, 0), family=family, backlog=socket.SOMAXCONN
            )
            port = int(listener.getsockname()[1])
        super().__init__(
            node_task.address, port, node_task.node, node_task.num_nodes, node_task.run_id, JOIN_S
        )
        if listener is not None:
            descriptor = listener.detach()
            self._store = TCPStore(
                node_task.address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
