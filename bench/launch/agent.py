"""Torch elastic's agent of one trial: starts the ranks, and hears of each that returns or ends as soon as it does.

The agent that torch ships looks every ``monitor_interval`` seconds instead: many looks in a long trial, each of which
takes a core that may be measured on, and half an interval lost at the end of a short one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from bench.launch import segments, stragglers
from bench.launch.rendezvous import HOST, LoopbackRendezvous

LOOK_S, LOOK_BLIND_S = 2.0, 0.25
"""How long the agent sleeps at most while nothing happens; the second, where torch hides what it could wait for."""


class Agent(LocalElasticAgent):
    """Sleeps until a rank has returned or ended."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        signs = self._signs()
        ready = wait(signs, LOOK_S if signs else LOOK_BLIND_S)
        # If a rank has ended, torch's own look ends the others.
        held = segments.mapped(self.pids) if any(isinstance(sign, int) for sign in ready) else set()
        result: RunResult = super()._monitor_workers(worker_group)
        segments.remove(held)
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
    rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0:
        name = stragglers.name(-first.exitcode)
        return {"failure": f"rank {rank} was ended by {name}", "rank": rank, "signal": -first.exitcode}
    return {"failure": f"rank {rank} ended with exit code {first.exitcode}", "rank": rank}
