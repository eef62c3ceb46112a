"""Which node of a job this process is, read from the variables of what started it.

There is one process on each node. The head's address comes from MASTER_ADDR where that is set, and
its port from MASTER_PORT.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.errors import InputError

LOOPBACK = "127.0.0.1"
PORT = 29555
"""Port of the controller where nothing names another."""
SECRET = "BENCH_SECRET"
"""Variable with the job's secret, or with the path of a file that holds it."""
SECRET_CHARACTERS = 16
"""Least length of a secret."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The variables in which something that starts jobs describes them.

    It is recognized if the first three are set.
    """

    name: str
    node: str
    """Number of this node, from 0."""
    num_nodes: str
    head: str
    """Address of node 0, or addresses or names of all nodes."""
    processes: str = ""
    """Number of processes, on a node or in all."""
    in_all: bool = False


TORCHRUN, SLURM = "torchrun", "Slurm"
ENGINES = (
    # https://docs.pytorch.org/docs/stable/elastic/run.html, Environment Variables
    Engine(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE"),
    # https://slurm.schedmd.com/srun.html, Output Environment Variables
    Engine(
        SLURM,
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_NUM_TASKS",
        in_all=True,
    ),
    # https://github.com/kubeflow/trainer: torchrun's options as variables
    Engine("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    # https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
    Engine("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    # https://dstack.ai/docs/concepts/tasks, distributed tasks
    Engine("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch
    Engine("PyTorchJob", "RANK", "WORLD_SIZE", "MASTER_ADDR"),
)
"""In the order in which they are looked for: torchrun may run inside of others, and others set RANK
too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One node of a job."""

    node: int
    num_nodes: int
    head: str
    """Name or address of node 0."""
    port: int

    @property
    def is_controller(self) -> bool:
        return self.node == 0


def here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process; None if its job has one node.

    Raises InputError naming the variable that is wrong.
    """
    get = environment.get
    for engine in ENGINES:
        if not (get(engine.node) and get(engine.num_nodes) and get(engine.head)):
            continue
        num_nodes = _number(environment, engine.num_nodes)
        if num_nodes == 1:
            return None
        node = _number(environment, engine.node)
        if node >= num_nodes:
            raise InputError(
                f"{engine.node} is {node}, and {engine.num_nodes} is {num_nodes}; nodes count "
                "from 0"
            )
        needed = 1
        if engine.in_all:
            needed = num_nodes
        if engine.processes and (found := get(engine.processes, "not set")) != str(needed):
            raise InputError(
                f"{engine.processes} is {found}, and must be {needed}: start one process on each "
                "node"
            )
        head = get("MASTER_ADDR")
        if not head:
            head = get("PET_MASTER_ADDR")
        if not head:
            head = _first_host(environment[engine.head])
        return Place(node=node, num_nodes=num_nodes, head=head, port=_port(environment, engine))
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal() or len(text) > 6:
        raise InputError(f"{name} is '{text[:60]}', and must be a number")
    return int(text)


def _first_host(listed: str) -> str:
    """The first of several hosts: one on each line, or as in Slurm's ``n[01-04,7],m2``."""
    first = listed.split(maxsplit=1)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first).split(",")[0]


def _port(environment: Mapping[str, str], engine: Engine) -> int:
    """The port of the controller; under torchrun the one after its own store's, MASTER_PORT."""
    for name in ("MASTER_PORT", "PET_MASTER_PORT"):
        if environment.get(name):
            return _number(environment, name) + (engine.name == TORCHRUN)
    job = environment.get("SLURM_JOB_ID", "")  # jobs of several users may share a node
    if engine.name == SLURM and job.isdecimal():
        return 20_000 + int(job) % 9_000
    return PORT


def secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the job.

    Raises InputError if it is missing or short, or if others can read its file.
    """
    found = environment.get(SECRET, "")
    if found.startswith("/"):
        path = Path(found)
        try:
            shared = path.stat().st_mode & 0o077
            found = path.read_text().strip()
        except (OSError, ValueError) as error:
            raise InputError(
                f"{SECRET}: {path} cannot be read ({error}); name a file with the job's secret"
            ) from error
        if shared:
            raise InputError(
                f"{SECRET}: others can read {path}; chmod 600 it, and take another secret"
            )
    if len(found) < SECRET_CHARACTERS:
        raise InputError(
            f"{SECRET}: a job of several nodes needs a secret of at least {SECRET_CHARACTERS} "
            f"characters, the same on each: export {SECRET}=$(openssl rand -hex 16) before they "
            "are started"
        )
    return found.encode()


def address_of(place: Place) -> str:
    """The head's address in numbers.

    Raises InputError if it is unknown, or one that other nodes cannot reach.
    """
    try:
        found = str(socket.getaddrinfo(place.head, place.port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"MASTER_ADDR: node {place.node} does not know the head '{place.head}' ({error})"
        ) from error
    if ipaddress.ip_address(found).is_loopback and place.head[0].isalpha():
        raise InputError(
            f"MASTER_ADDR: '{place.head}' is {found} on node {place.node}, which no other node can "
            "reach; set it to an address in numbers"
        )
    return found


def interface_of(address: str) -> str:
    """The name of the network interface with this address of this node."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return name
    raise InputError(
        f"{address} is not an address of this node; set MASTER_ADDR to one of the first node's"
    )


def check_interfaces() -> None:
    """Raise InputError if gloo or NCCL is told to use a network interface that this node lacks."""
    known = list(psutil.net_if_addrs())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        if value.startswith("^"):  # NCCL: all but these
            continue
        # NCCL takes prefixes, unless '=' stands before them.
        is_exact = name.startswith("GLOO") or value.startswith("=")
        for wanted in filter(None, value.removeprefix("=").split(",")):
            if is_exact:
                is_known = wanted.partition(":")[0] in known
            else:
                is_known = any(has.startswith(wanted) for has in known)
            if not is_known:
                raise InputError(
                    f"{name} is '{value}', and the interfaces here are {', '.join(known)}"
                )
