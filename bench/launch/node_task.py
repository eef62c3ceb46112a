"""What one node does in a trial, and what it reports: plain JSON between launcher and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from bench.launch.outcome import Ending, RankJson
from bench.plan.cell import Status


class LauncherReply(TypedDict, total=False):
    """What a launcher's process answers: that it is ready, or what becomes of a trial."""

    ready: bool
    initialized_by: str
    """The module that initialized CUDA; empty if none did."""
    port: int
    """Of the trial's store, which listens."""
    failure: str
    """What ended the trial. If ``rank`` is there, it lacks the rank's name."""
    rank: int
    signal: int
    spent: bool
    """Whether one of its helpers was killed, so that it cannot run another trial."""
    died: bool
    """Whether the process has ended, and said nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTask:
    """The ranks of a trial that run on one node."""

    entry: str
    """``module:function``, called on every rank with the payload."""
    payload: str
    folder: str
    run_id: str
    num_ranks: int
    """Ranks on each node."""
    num_nodes: int
    address: str
    """Where the store of the first node listens."""
    packages: Sequence[str]
    """What the process from which ranks are forked has loaded."""
    node: int = 0
    port: int = 0
    """The store's; 0 until the first node has opened it."""

    @property
    def ranks(self) -> range:
        """The numbers of this node's ranks among all."""
        return range(self.node * self.num_ranks, (self.node + 1) * self.num_ranks)


@dataclass(kw_only=True, slots=True)
class NodeReport:
    """How the ranks of one node ended."""

    results: Sequence[RankJson | None]
    """What each rank wrote."""
    ending: Ending
    """Its failure lacks the name of the rank."""
    log_bytes: int = 0
    died_early: bool = False
    """Whether the launcher's process died before any rank began."""
    recording: dict[str, Any] | None = None
    """What telemetry recorded of this node's GPUs."""
    files: dict[str, str] = field(default_factory=dict)
    """From another node, after a failure: the ends of its logs and its dumps, in base 64, by
    path."""

    @property
    def is_good(self) -> bool:
        """Whether every rank succeeded."""
        return all(result is not None and result["status"] == Status.OK for result in self.results)
