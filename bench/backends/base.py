"""What a backend is, what it is given, and where backends are found.

Nothing here imports torch or a framework: the plan lists backends on machines that have neither. A backend's
``train`` imports what it needs when a trial calls it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench.cell import Cell, Device, Sharding, Stepping, Sync
from bench.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

    from bench.taps import TappedLoader

ENTRY_POINTS = "bench.backends"
"""Entry-point group in which other packages offer backends; each names a subclass of Backend."""


@dataclass(kw_only=True)
class Job:
    """What one pass of one trial asks of a backend on this rank. The process group is already up."""

    cell: Cell
    rank: int
    world_size: int
    device: torch.device
    windows: int
    """Optimizer steps to take."""
    accumulate: int
    """N: micro-batches per optimizer step."""
    num_parameters: int
    """P: elements of the model's parameters, a tied one counted once."""
    block_parameters: int
    """Elements of the largest block's parameters: how far ahead a sharded backend may gather."""
    build: Callable[[], nn.Module]
    """A new model on ``device`` in fp32, with the same initial weights on every rank."""
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    """The submodules of a built model that are sharded as units of their own."""
    loader: TappedLoader
    """Exactly ``windows * accumulate`` micro-batches of this rank, on ``device``."""
    loss: Callable[[nn.Module, Tensor], Tensor]
    """``loss(model, micro_batch)``: the mean loss of a micro-batch, by one forward of ``model``; tapped."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    """Makes the tapped optimizer. A framework may wrap it, but must step this one."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Autocast to the cell's precision, for backends that keep fp32 parameters; does nothing in fp32."""
    keep_parameters: bool = False
    """Whether ``full_parameters`` will be called after ``train``."""

    @property
    def bf16(self) -> bool:
        """Whether forward and backward compute in bfloat16."""
        return str(self.cell.precision) == "bf16"


BF16_AUTOCAST = "autocast over fp32 parameters"
BF16_PARAMETERS = "bf16 copies of fp32 parameters"


class Backend(ABC):
    """One way to accumulate gradients. Subclass it, set the class variables, and write ``train``.

    A complete backend, data parallel with a reduction per micro-batch::

        class DDPEager(Backend):
            name, framework = "ddp-eager", "torch DDP"
            sync, sharding = Sync.EAGER, Sharding.NONE

            def train(self, job):
                from torch.nn.parallel import DistributedDataParallel
                self.model = DistributedDataParallel(job.build())
                optimizer = job.optimizer(self.model.parameters())
                for index, batch in enumerate(job.loader, start=1):
                    (job.loss(self.model, batch) / job.accumulate).backward()
                    if index % job.accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()

            def full_parameters(self):
                return self.model.module.state_dict()
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    """The name of the framework, for people."""
    sync: ClassVar[Sync]
    sharding: ClassVar[Sharding]
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages beside torch that must be installed, by import name."""
    defect: ClassVar[str] = ""
    """A known defect of the framework that the gates are expected to catch when N > 1, in words; empty if none."""

    stepping: ClassVar[Stepping] = Stepping.UNKNOWN
    """What the backend does with the incomplete window at the end of an epoch."""
    bf16_as: ClassVar[str] = BF16_AUTOCAST
    """How forward and backward compute in bf16: autocast keeps the residual stream and norms in fp32, copies do not."""

    @abstractmethod
    def train(self, job: Job) -> None:
        """Build the model and train ``job.windows`` windows.

        Micro-batches come from ``job.loader``, losses from ``job.loss``, the optimizer from ``job.optimizer``. Raises
        UnsupportedError for what the backend cannot run.
        """

    @abstractmethod
    def full_parameters(self) -> Mapping[str, Tensor]:
        """After ``train``: the whole fp32 parameters by the names that the built model gives them.

        Called on every rank, since gathering shards is collective; only rank 0's answer is used.
        """

    def reported(self) -> dict[str, int]:
        """What the framework itself says it did: its own step counters by name. The first is the headline."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Settings of the framework that differ from its defaults or move time and memory, to be stored."""
        return {}

    @classmethod
    def missing(cls, device: Device) -> str:
        """Why this machine cannot run the backend on ``device``, and what to do; empty if it can."""
        absent = [package for package in ("torch", *cls.requires) if importlib.util.find_spec(package) is None]
        if absent:
            return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
        if device is Device.CUDA and importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a CPU build: pip install one for CUDA"
        return ""


BUILT_IN = ("plain", "fsdp2", "deepspeed", "lightning")
"""Modules of this package that hold backends."""


def registry() -> dict[str, type[Backend]]:
    """All backends by name: the built-in ones, then those of installed packages.

    Raises InputError if an installed package offers something that is not a backend or takes a name already taken.
    """
    found: dict[str, type[Backend]] = {}
    for module in BUILT_IN:
        for backend in importlib.import_module(f"bench.backends.{module}").BACKENDS:
            found[backend.name] = backend
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        place = f"entry point '{entry.name}' ({entry.value}) in group {ENTRY_POINTS}"
        try:
            backend = entry.load()
        except Exception as error:
            raise InputError(f"{place}: cannot be loaded ({error}); fix or uninstall that package") from error
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            raise InputError(f"{place}: is not a subclass of bench.backends.base.Backend")
        if backend.name in found:
            raise InputError(f"{place}: the name '{backend.name}' is taken; choose another")
        found[backend.name] = backend
    return found
