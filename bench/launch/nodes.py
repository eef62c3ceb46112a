"""The other nodes of a job, as the controller has them: who has joined, and what they report.

On node 0 ``bench run`` is the controller; on each other node the same command follows it
(``follower``). A node that is lost makes its trials ``interrupted``. It may come back at any time,
and is used from the next trial on.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing import AuthenticationError
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from bench import validation
from bench.backends.base import EXTRA_BACKENDS
from bench.errors import InputError
from bench.formatting import plain
from bench.launch import job_nodes
from bench.launch.channel import HELLO_BYTES, PING_S, SILENT_S, LostError, NodeChannel
from bench.launch.job_nodes import Place
from bench.launch.node import ForkError
from bench.launch.node_task import NodeReport, NodeTask
from bench.launch.process import START_TIMEOUT_S
from bench.launch.watchdog import Sight
from bench.plan.cell import Device

MOST_STRANGERS = 64
"""Connections at a time that have not proved yet that they know the secret: the nodes of a large
job, all at once."""
STRANGER_S = 10.0
"""How long such a connection may last."""
MOST_LINES = 20
"""Addresses that the log says it has refused."""
JOIN_S = 50.0
"""How long the controller waits for the other nodes at the start, and they for it."""
ANSWER_S = 60.0
"""How long another node may take to do as it is told."""
ERRORS: dict[str, type[Exception]] = {"InputError": InputError, "ForkError": ForkError}
"""Errors that travel from another node; any other means that it is lost."""
About = Mapping[str, Any]
"""What a node says of itself: its versions, its GPUs, and why it cannot be used; parsed JSON."""


class RemoteNode:
    """Another node. Its methods are those of ``bench.launch.node.Node``.

    Every method raises LostError, with the node's name and the reason, if the node is gone or says
    nothing.
    """

    def __init__(self, number: int, host: str, channel: NodeChannel, about: About) -> None:
        self.number, self.name, self.address = number, f"node {number} ({host})", channel.address
        self.about = about
        self.lost = ""
        """Why it is lost, with its name; empty while it is there."""
        self.channel = channel
        self._asked = 0
        self._folder = Path()

    def fileno(self) -> int:
        """A file that becomes readable when the node answers or is gone."""
        return self.channel.fileno()

    def open(self, device: Device) -> bool:
        return bool(self._call("open", device=device, backends=os.environ.get(EXTRA_BACKENDS, "")))

    def start(self, every: Iterable[tuple[str, ...]], *, cold: bool) -> None:
        self._ask("start", every=list(every), cold=cold)

    def ready(self) -> None:
        self._answer(START_TIMEOUT_S + ANSWER_S)

    def begin(self, node_task: NodeTask) -> int:
        self._folder = Path(node_task.folder)
        self._call("begin", node_task=dataclasses.asdict(node_task))
        return 0

    def look(self) -> tuple[Sight, NodeReport | None]:
        self._ask("look")
        answer = self._answer(SILENT_S)
        try:
            sight, report = validation.read(Sight, answer["sight"]), None
            if answer["report"] is not None:
                report = self._report(answer["report"])
            return sight, report
        except (KeyError, TypeError, InputError) as error:
            self.lose(f"its answer is malformed ({error})")

    def end(self, *, dump: bool) -> NodeReport:
        return self._report(self._call("end", dump=dump))

    def close(self) -> None:
        """End every process there. Does nothing if the node is lost, or gets lost."""
        if not self.lost:
            with contextlib.suppress(LostError):
                self._call("close")

    def lose(self, why: str) -> NoReturn:
        """Give the node up. Raises LostError."""
        self.lost = f"{self.name} was lost: {why}"
        self.channel.close()
        raise LostError(self.lost)

    def _call(self, do: str, **arguments: object) -> Any:
        self._ask(do, **arguments)
        return self._answer(ANSWER_S)

    def _ask(self, do: str, **arguments: object) -> None:
        self._asked += 1
        with contextlib.suppress(LostError):  # waiting for the answer says why
            self.channel.send({"do": do, "id": self._asked, **arguments})

    def _answer(self, limit_s: float) -> Any:
        """The answer to what was last asked."""
        deadline = time.monotonic() + limit_s
        answer: Mapping[str, Any] | None = None
        while answer is None or answer.get("id") != self._asked:
            if (left := deadline - time.monotonic()) <= 0:
                self.lose(f"it has not answered for {limit_s:g} s")
            try:
                answer = self.channel.receive(left)
            except LostError as error:
                self.lose(str(error))
        if "error" not in answer:
            return answer["answer"]
        text = " ".join(str(answer["error"]).split())
        if answer["kind"] not in ERRORS:
            self.lose(text)
        raise ERRORS[answer["kind"]](f"{self.name}: {text}")

    def _report(self, answer: object) -> NodeReport:
        """The report in an answer, after writing its files into the folder of the trial."""
        try:
            report = validation.read(NodeReport, answer)
            for name, content in report.files.items():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts:
                    raise InputError(f"a file is named {name!r}")
                folder = self._folder
                if len(path.parts) > 1:
                    folder = self._folder / f"node{self.number}"
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(base64.b64decode(content))
        except ValueError as error:
            self.lose(f"its report is malformed ({error})")
        return report


@dataclasses.dataclass(frozen=True, slots=True)
class Stranger:
    """A connection whose other end has not proved yet that it knows the secret."""

    link: socket.socket
    """A duplicate, which can be ended from another thread."""
    deadline: float


class Nodes(contextlib.AbstractContextManager["Nodes"]):
    """The other nodes of a job. As a context, it listens on the head's address until the end."""

    def __init__(self, place: Place, secret: bytes, about: About) -> None:
        self.address = job_nodes.address_of(place)
        self.nodes: list[RemoteNode] = []
        """Nodes 1, 2, ..., once ``gather`` has returned."""
        self._place, self._secret, self._about = place, secret, about
        self._arrived: queue.Queue[RemoteNode | InputError] = queue.Queue()
        self._strangers: dict[int, Stranger] = {}
        """By number, the oldest first."""
        self._num_strangers = 0
        self._refused: dict[str, str] = {}
        """Why an address was refused, of which the log has a line."""
        family = socket.AF_INET
        if ":" in self.address:
            family = socket.AF_INET6
        try:
            self._listener = socket.create_server((self.address, place.port), family=family)
        except OSError as error:
            raise InputError(
                f"MASTER_ADDR, MASTER_PORT: node 0 cannot listen on {self.address} "
                f"port {place.port} ({error.strerror}); set them to an address of the first node "
                "and a free port"
            ) from error
        self._listener.settimeout(PING_S)
        threading.Thread(target=self._listen, name="nodes", daemon=True).start()

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        nodes: list[RemoteNode | InputError] = [*self.nodes]
        while not self._arrived.empty():
            nodes.append(self._arrived.get())
        for node in nodes:
            if isinstance(node, RemoteNode) and not node.lost:
                with contextlib.suppress(LostError):
                    node.channel.send({"do": "bye"})
                node.channel.close()

    def gather(self) -> None:
        """Wait until every node has joined.

        Raises InputError naming the node that did not, or cannot.
        """
        deadline = time.monotonic() + JOIN_S
        found: dict[int, RemoteNode] = {}
        missing = set(range(1, self._place.num_nodes))
        while missing:
            try:
                node = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise InputError(self._missing(min(missing))) from None
            if isinstance(node, InputError):
                raise node
            if node.number in found:
                other = found[node.number].name
                raise InputError(f"{node.name}: node {node.number} has joined already, as {other}")
            found[node.number] = node
            self.nodes = [found[number] for number in sorted(found)]
            missing.discard(node.number)

    def _missing(self, number: int) -> str:
        """That a node did not join, and what may be why."""
        found = f"node {number} of {self._place.num_nodes} did not join within {JOIN_S:g} s; "
        for address, why in self._refused.items():
            found += f"node 0 refused {plain(address)}: {why}; "
        return (
            f"{found}see what it printed, and whether it can connect to {self.address} "
            f"port {self._place.port}"
        )

    def welcome_back(self, device: Device) -> None:
        """Take in nodes that were lost and have come again."""
        while not self._arrived.empty():
            node = self._arrived.get()
            if isinstance(node, InputError):
                continue  # the trials of that node say why it was lost
            index = node.number - 1
            if not self.nodes[index].lost:
                with contextlib.suppress(LostError):
                    self.nodes[index].lose("another process took its number")
            try:
                node.open(device)
            except (InputError, LostError) as error:
                node.lost = str(error)
            self.nodes[index] = node

    def _listen(self) -> None:
        """Answer whoever connects, and tell the nodes that the controller is there."""
        ping = time.monotonic()
        while self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):  # nobody came, or it is closed
                link, _ = self._listener.accept()
                self._receive(link)
            self._end_strangers(MOST_STRANGERS)
            if time.monotonic() - ping > PING_S:
                ping = time.monotonic()
                for node in list(self.nodes):
                    with contextlib.suppress(LostError):
                        node.channel.send({"do": "ping"})

    def _receive(self, link: socket.socket) -> None:
        """Greet whoever has connected; if too many are strangers, the oldest of them has to go."""
        self._num_strangers += 1
        number = self._num_strangers
        self._strangers[number] = Stranger(link.dup(), time.monotonic() + STRANGER_S)
        self._end_strangers(MOST_STRANGERS)
        try:
            threading.Thread(target=self._greet_and_leave, args=[link, number], daemon=True).start()
        except RuntimeError:  # no thread can be started
            link.close()
            self._forget(number)

    def _end_strangers(self, most: int) -> None:
        """End the connections of those who took too long, and of the oldest beyond ``most``."""
        for number, stranger in list(self._strangers.items()):
            if len(self._strangers) > most or time.monotonic() > stranger.deadline:
                with contextlib.suppress(OSError):
                    stranger.link.shutdown(socket.SHUT_RDWR)  # whatever its thread waits for ends
                self._forget(number)

    def _forget(self, number: int) -> None:
        stranger = self._strangers.pop(number, None)
        if stranger is not None:
            stranger.link.close()

    def _greet_and_leave(self, link: socket.socket, number: int) -> None:
        try:
            self._greet(link, number)
        except OSError:  # it is gone
            link.close()
        self._forget(number)

    def _say_refused(self, address: str, why: str) -> None:
        """One line per address, and no more than MOST_LINES: a stranger cannot fill the log."""
        if address not in self._refused and len(self._refused) < MOST_LINES:
            self._refused[address] = why
            print(f"bench: node 0 refused {plain(address)}: {plain(why)}", file=sys.stderr)

    def _greet(self, link: socket.socket, stranger: int) -> None:
        """Let another node in, or say why not: to the job only if it knows the secret."""
        channel, who = NodeChannel(link), ""
        try:
            hello = channel.expect(STRANGER_S, HELLO_BYTES)
            number, host = int(hello["node"]), plain(hello["host"])[:80]
            who = f"node {number} ({host})"
            channel.authenticate(self._secret, is_controller=True)
            self._forget(stranger)
            about = channel.expect(ANSWER_S)
            refusal = self._refusal(number, about)
            if refusal:
                channel.send({"refused": f"{who}: {refusal}"})
            else:
                channel.send({"welcome": True})
                self._arrived.put(RemoteNode(number, host, channel, about))
        except AuthenticationError:
            self._say_refused(channel.address, f"its {job_nodes.SECRET} is not that of node 0")
            channel.close()
            return
        except (KeyError, TypeError, ValueError, OverflowError, LostError):
            self._say_refused(channel.address, "it is no node of this job")
            channel.close()
            return
        if refusal:
            channel.close()
            self._arrived.put(InputError(f"{who}: {refusal}"))

    def _refusal(self, number: int, about: About) -> str:
        """Why this node cannot take part; empty if it can."""
        if about.get("error"):
            return str(about["error"])
        if (
            about.get("num_nodes") != self._place.num_nodes
            or not 0 < number < self._place.num_nodes
        ):
            return (
                f"it was started as one of {about.get('num_nodes')} nodes, and node 0 as one "
                f"of {self._place.num_nodes}"
            )
        theirs = about.get("versions", {})
        for name, version in self._about["versions"].items():
            if theirs.get(name) != version:
                return (
                    f"{name} is {theirs.get(name)}, and {version} on node 0; install the same on "
                    "every node"
                )
        num, num_here = len(about.get("gpus", ())), len(self._about["gpus"])
        if num != num_here:
            return f"it has {num} GPUs, and node 0 has {num_here}; all nodes need the same number"
        return ""
