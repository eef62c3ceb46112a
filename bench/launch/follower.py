"""``bench run`` on each node but node 0: runs the node's ranks of each trial.

It does as the controller on node 0 commands, and ends when that says so, or by itself when that is
gone for ``SILENT_S``. It leaves nothing behind.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from bench.backends.base import EXTRA_BACKENDS
from bench.errors import BAD, GOOD, InputError, reason_of
from bench.files import end_of
from bench.launch import job_nodes
from bench.launch.channel import SILENT_S, LostError, NodeChannel
from bench.launch.job_nodes import Place
from bench.launch.node import Node
from bench.launch.node_task import NodeReport, NodeTask
from bench.launch.nodes import ANSWER_S, JOIN_S
from bench.plan.cell import Device

RETRY_S = 0.5
"""How often it tries to reach the controller."""
FILE_BYTES = 2**20
"""How much of the end of each log and dump travels to the controller."""


def follow(place: Place, secret: bytes, about: Mapping[str, object]) -> int:
    """Join the job and do as the controller says; the exit status.

    Raises InputError if it cannot join.
    """
    channel = _connect(place)
    try:
        channel.send({"node": place.node, "host": socket.gethostname()})
        channel.authenticate(secret, is_controller=False)
        channel.send({**about, "num_nodes": place.num_nodes})
        answer = channel.expect(ANSWER_S)
    except AuthenticationError as error:
        raise InputError(
            f"{job_nodes.SECRET}: node 0 at {channel.address} has another secret"
        ) from error
    except LostError as error:
        raise InputError(
            f"node 0 at {channel.address} did not let this node in ({error})"
        ) from error
    if "welcome" not in answer:
        raise InputError(
            str(answer.get("refused", f"node 0 at {channel.address} did not let this node in"))
        )
    print(
        f"bench: this is node {place.node} of {place.num_nodes}; node 0 at {channel.address} leads",
        file=sys.stderr,
    )
    with _Follower(channel) as follower:
        try:
            follower.serve()
        except LostError as error:
            print(f"bench: node {place.node} ends, since node 0 is gone: {error}", file=sys.stderr)
            return BAD
    return GOOD


def _connect(place: Place) -> NodeChannel:
    """A connection to the controller, which may start later than this node."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            end = (job_nodes.address_of(place), place.port)
            return NodeChannel(socket.create_connection(end, timeout=RETRY_S * 10))
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"node {place.node} could not reach node 0 at {place.head} port {place.port} "
                    f"within {JOIN_S:g} s ({reason_of(error)}); is it started, and are "
                    "MASTER_ADDR and MASTER_PORT its own?"
                ) from error
            time.sleep(RETRY_S)


class _Follower(contextlib.AbstractContextManager["_Follower"]):
    """Runs the ranks of this node. As a context, it leaves no process and no file behind."""

    def __init__(self, channel: NodeChannel) -> None:
        self._channel = channel
        self._node = Node(channel.own_address)
        self._folder: Path | None = None
        """Of the trial whose ranks run here."""

    def __exit__(self, *exc: object) -> None:
        try:
            self._node.close()
            self._node.release()
        finally:
            self._channel.close()
            self._forget()

    def serve(self) -> None:
        """Do what the controller asks for until it says goodbye. Raises LostError if it is gone."""
        while True:
            message = self._channel.receive(SILENT_S)
            if message is None:
                raise LostError(f"it has said nothing for {SILENT_S:g} s")
            if message["do"] == "bye":
                return
            if message["do"] != "ping":
                self._channel.send({"id": message["id"], **self._answer(message)})

    def _answer(self, message: Mapping[str, Any]) -> dict[str, object]:
        """Carry out a command; its result, or the error."""
        try:
            asked = dict(message)
            del asked["id"]
            return {"answer": self._do(**asked)}
        except Exception as error:
            return {"error": str(error), "kind": type(error).__name__}

    def _do(self, do: str, **given: Any) -> object:
        match do:
            case "open":
                os.environ[EXTRA_BACKENDS] = given["backends"]
                return self._node.open(Device(given["device"]))
            case "start":
                self._node.start(map(tuple, given["every"]), cold=given["cold"])
                self._node.ready()
            case "begin":
                self._folder = self._node.scratch
                self._folder.mkdir(mode=0o700)
                folder, node_task = str(self._folder), given["node_task"]
                payload = json.dumps({**json.loads(node_task["payload"]), "folder": folder})
                self._node.begin(NodeTask(**{**node_task, "folder": folder, "payload": payload}))
            case "look":
                sight, report = self._node.look()
                packed = None
                if report is not None:
                    packed = self._packed(report)
                return {"sight": dataclasses.asdict(sight), "report": packed}
            case "end":
                return self._packed(self._node.end(dump=given["dump"]))
            case "close":
                self._node.close()
                self._forget()
        return None

    def _packed(self, report: NodeReport) -> dict[str, object]:
        """The report of the ranks with their logs and dumps, if not all is well."""
        if self._folder is not None and not report.is_good:
            for path in _kept(self._folder):
                name = str(path.relative_to(self._folder))
                report.files[name] = base64.b64encode(end_of(path, FILE_BYTES)).decode()
        self._forget()
        return dataclasses.asdict(report)

    def _forget(self) -> None:
        """Remove what the last trial wrote."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _kept(folder: Path) -> list[Path]:
    """The logs and dumps of a trial."""
    paths = [*folder.rglob("*.log"), *folder.glob("rank*.stacks"), *folder.glob("flight-*")]
    return [path for path in paths if path.is_file()]
