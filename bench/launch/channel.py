"""JSON messages over a connection: with the launcher's process, and between the nodes of a job.

Nodes talk over TCP, and both ends prove that they know the job's secret before anything else is
read: each answers the other's fresh random challenge by its HMAC (``multiprocessing.connection``).
So nobody without the secret can hand a task to a node, which would run code there, or report
results, or replay earlier messages. The messages are not encrypted: whoever can change packets
between the nodes can change them, as well as all that the ranks send each other over gloo, NCCL and
torch's store, which know no secret. Nothing is unpickled.

Not by its ``Listener`` and ``Client``: a stranger who says nothing would hold ``accept``, and so
every node, for ever.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from bench.errors import reason_of

SILENT_S = 30.0
"""After so long without a message a node counts as lost, and for a node so does the controller."""
PING_S = 5.0
"""How often the controller says that it is there."""
HELLO_BYTES, MESSAGE_BYTES = 4096, 2**30
"""Largest message before and after authentication."""


class LostError(Exception):
    """The other end is gone, or says nothing any more."""


class Channel:
    """One end of a connection. ``multiprocessing.connection.wait`` can wait for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.fileno, self.close = connection.fileno, connection.close

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message. Raises LostError."""
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise LostError(f"the connection to it broke ({reason_of(error)})") from error

    def receive(
        self, timeout_s: float | None = None, max_bytes: int = MESSAGE_BYTES
    ) -> dict[str, Any] | None:
        """The next message; None if there is none within the time. Raises LostError."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            message = json.loads(self._connection.recv_bytes(max_bytes))
        except (EOFError, ConnectionResetError) as error:
            # A reset, if it ended before it had read everything.
            raise LostError("its process ended") from error
        except (OSError, ValueError, RecursionError) as error:
            raise LostError(f"the connection to it broke ({error})") from error
        if not isinstance(message, dict):
            raise LostError("its message is not a JSON object")
        return message

    def expect(self, timeout_s: float, max_bytes: int = MESSAGE_BYTES) -> dict[str, Any]:
        """The next message. Raises LostError, also if there is none within the time."""
        message = self.receive(timeout_s, max_bytes)
        if message is None:
            raise LostError(f"it said nothing for {timeout_s:g} s")
        return message


class NodeChannel(Channel):
    """One end of the connection between the controller and another node."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(SILENT_S), 0))
        self.own_address, self.address = str(link.getsockname()[0]), str(link.getpeername()[0])
        super().__init__(Connection(link.detach()))

    def authenticate(self, secret: bytes, *, is_controller: bool) -> None:
        """Prove to the other end that this one knows the secret, and let it do the same.

        Raises AuthenticationError if it has another secret, and LostError.
        """
        challenges = (answer_challenge, deliver_challenge)
        if is_controller:
            challenges = (deliver_challenge, answer_challenge)
        try:
            for challenge in challenges:
                challenge(self._connection, secret)
        except (EOFError, OSError, ValueError, AssertionError) as error:
            raise LostError(f"no proof: {error}") from error
