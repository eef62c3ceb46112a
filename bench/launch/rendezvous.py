"""A rendezvous for torch elastic on one machine, whose store listens on the loopback interface alone.

Torch's own handlers make stores that listen on all interfaces, and anyone who reaches such a port can write into it.
"""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

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
