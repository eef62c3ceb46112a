"""The launcher's process: torch elastic's agent, and a fork server for its ranks.

``python -m bench.server``, started by ``bench.launch``. It lives as long as the bench's own process: when that is gone,
even by SIGKILL, this one ends everything that came from it, and itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from bench import stragglers

MONITOR_INTERVAL_S = 0.25
"""How often torch elastic's agent looks at its ranks. Each look takes a core that may be measured on."""


def serve(requests: int, replies: int, *, cold: bool) -> None:
    """Trials as JSON lines from one pipe, one JSON line of answer each to the other."""
    import multiprocessing

    # Imports torch for the agent itself.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from bench.rendezvous import BACKEND

    start_method = "spawn" if cold else "forkserver"
    if not cold:
        multiprocessing.set_forkserver_preload(["bench.preload"])
    context: Any = multiprocessing.get_context(start_method)
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    helpers = _own() | {os.getpid()}
    _reply(replies, {"ready": True})
    with os.fdopen(requests) as lines:
        for line in lines:
            entry, world_size, folder, payload = json.loads(line)
            module, _, function = entry.partition(":")
            rank_main = getattr(importlib.import_module(module), function)
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=world_size,
                rdzv_backend=BACKEND,
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=MONITOR_INTERVAL_S,
                start_method=start_method,
                logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
            )
            answer = _supervise(elastic_launch(config, rank_main), payload)
            signal.signal(signal.SIGTERM, _end_quietly)  # torch elastic has set its own
            # Torch elastic ends only the ranks themselves, and what they leave running would be measured next.
            stragglers.kill(lambda: _own() - helpers)
            answer["spent"] = not helpers <= _own() | {os.getpid()}  # one of them was killed
            _reply(replies, answer)


def _supervise(launch: Callable[[str], Any], payload: str) -> dict[str, Any]:
    """Run torch elastic to its end; what failed, by rank and exit code or signal, from its structured error."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch(payload)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return {"failure": f"rank {rank} was ended by {name}", "rank": rank, "signal": -failure.exitcode}
        return {"failure": f"rank {rank} ended with exit code {failure.exitcode}", "rank": rank}
    except Exception as error:
        return {"failure": f"torch elastic: {type(error).__name__}: {error}"}
    return {"failure": "a rank ended without a result"}


def _nothing() -> None:
    """Makes multiprocessing start its helpers, and the fork server import."""


def _own() -> set[int]:
    """All that came from this process, without itself."""
    here = stragglers.find(os.getpid())
    assert here is not None, "it is running"
    return stragglers.family(here.pid, os.environ[stragglers.MARK], here.started) - {here.pid}


def _reply(replies: int, answer: dict[str, Any]) -> None:
    os.write(replies, (json.dumps(answer) + "\n").encode())


def _end_quietly(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent(requests: int) -> None:
    """Wait until nobody can send a request any more, which is when the bench's own process has ended; then end all."""
    poll = select.poll()
    poll.register(requests, 0)  # POLLHUP is told of unasked
    poll.poll()
    with contextlib.suppress(OSError):
        stragglers.kill(lambda: stragglers.without_trackers(_own()))
    shutil.rmtree(os.environ["BENCH_TMPDIR"], ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_quietly)
    stragglers.adopt_orphans()
    # To be woken up, if somebody stopped it, and find that it is alone.
    stragglers.signal_at_parents_end(signal.SIGCONT)
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    serve(int(sys.argv[1]), int(sys.argv[2]), cold=sys.argv[3] == "cold")
