"""What a backend is, what it is given, and where backends are found.

Nothing here imports torch or a framework: the plan lists backends on machines that have neither. A backend's
``train`` imports what it needs when a trial calls it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.errors import InputError, UnsupportedError
from bench.plan.categories import Category
from bench.plan.cell import Cell, Device, Sharding, Stepping, Sync

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

ENTRY_POINTS = "bench.backends"
"""Entry-point group in which other packages offer backends; each names a subclass of Backend."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
"""What a backend may be called: names become parts of file names, and cells of tables and pages."""
ALL = "all"
"""Where backends are named: all but those of installed packages, which have to be named one by one."""
MORE = "BENCH_BACKENDS"
"""Environment variable that names backends of no installed package: ``module:Class``, with commas between them."""


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on this rank; iterable once."""

    size: int
    """How many there are: N, or fewer at the end of an epoch."""
    batches: Iterator[Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Each micro-batch, fetched when it is asked for, and whether it is the window's last."""
        for index, batch in enumerate(self.batches, start=1):
            yield batch, index == self.size


@dataclass(kw_only=True)
class Job:
    """What one pass of one trial asks of a backend on this rank: whole windows. The process group is already up."""

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
    """A new model on ``device`` in fp32, with the same initial weights on every rank.

    Its blocks are checkpointed and compiled already, if the cell asks for that (``bench.backends.blocks``).
    """
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    """The submodules of a built model that are sharded as units of their own."""
    loader: Any
    """The ``windows * accumulate`` micro-batches of this rank, on ``device``: sized, iterable once, and tapped."""
    loss: Callable[[nn.Module, Tensor], Tensor]
    """``loss(model, micro_batch)``: the mean loss of a micro-batch, by one forward of ``model``; tapped."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    """Makes the tapped optimizer. A framework may wrap it, but must step this one."""
    keep_parameters: bool = False
    """Whether ``full_parameters`` will be called after ``train``."""
    clip_norm: float = 0.0
    """The largest L2 norm of the gradient that an update may use; 0 for no clipping."""

    @property
    def bf16(self) -> bool:
        """Whether forward and backward compute in bfloat16."""
        return str(self.cell.precision) == "bf16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast to the cell's precision, for backends that keep fp32 parameters; does nothing in fp32."""
        import torch

        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def clip(self, parameters: Iterable[Parameter]) -> None:
        """Scale the gradients down to ``clip_norm``, if there is such a limit; sharded ones by their whole norm."""
        if self.clip_norm:
            from torch.nn.utils import clip_grad_norm_

            clip_grad_norm_(parameters, self.clip_norm)

    def each_window(self) -> Iterator[Window]:
        """The windows of the training. In scenarios (``bench.audit``) one at the end of an epoch may be smaller.

        Dividing the loss of every micro-batch by the *window's* size makes each update the big batch of its samples.
        """
        batches = iter(self.loader)
        for _ in range(self.windows):
            yield Window(self.accumulate, itertools.islice(batches, self.accumulate))


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
                for window in job.each_window():
                    for batch, _ in window:
                        (job.loss(self.model, batch) / window.size).backward()
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

    not_virtual: ClassVar[str] = ""
    """Why the backend cannot be rank 0 of a virtual world (``bench.launch.rank``), in words; empty if it can."""
    not_fake: ClassVar[str] = ""
    """Why it cannot be that on fake tensors (``bench.measure.tensors``), in words; empty if it can."""
    not_checkpointed: ClassVar[str] = ""
    """Why its blocks cannot be checkpointed (``bench.backends.blocks``), in words; empty if they can."""
    not_compiled: ClassVar[str] = ""
    """Why they cannot be compiled, in words; empty if they can."""

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
        """The whole fp32 parameters by the names that the built model gives them.

        Called on every rank, since gathering shards is collective: after ``train``, and in semantic scenarios also
        during it, when the next micro-batch after an update is fetched. A value may be gathered when it is looked at,
        so all ranks look at the same ones in the same order.
        """

    def reported(self) -> dict[str, int]:
        """What the framework itself says it did: its own step counters by name. The first is the headline."""
        return {}

    def again(self, job: Job) -> None:
        """Train on with what ``train`` built, after an exception left it in the middle of a window.

        Semantic scenarios ask this, and the two below. A backend without an answer is ``unsupported`` there.
        """
        raise UnsupportedError(f"{self.name} does not say how it goes on after an exception: define again()")

    def zero_grad(self) -> None:
        """Clear the gradients as user code would in the middle of a window: by ``self.optimizer``, if there is one."""
        if not hasattr(self, "optimizer"):
            raise UnsupportedError(f"{self.name} does not say how gradients are cleared: define zero_grad()")
        self.optimizer.zero_grad()

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        """Write a checkpoint into ``folder`` between two micro-batches, ``seen`` of the epoch being behind; collective.

        Returns how many of those the resumed training is not to be given again. The default suits loops over
        ``each_window``: the parameters alone, which the caller saves, are the state at the last update, so the open
        window is trained again. A framework with checkpoints of its own reads them where ``job.resume`` is a folder.
        """
        return seen - seen % accumulate

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        """What the framework holds now, where a tensor's use cannot be told from outside: its own flat buffers.

        The memory pass asks at every tapped event of one window, after all is built, and puts the storages of these
        tensors into these categories for their whole life. What it finds by itself need not be named: parameters that
        operators take, their gradients, the inner optimizer's parameters and state, what collectives read and write.
        """
        return {}

    def settings(self) -> dict[str, Any]:
        """Settings of the framework that differ from its defaults or move time and memory, to be stored."""
        return {}

    @classmethod
    def remark(cls, cell: Cell) -> str:
        """What has to be said beside the numbers of this cell, in one sentence; empty if nothing has.

        It is written to run.json when the run begins (``remarks``, by id of cells), for all who show the cell.
        """
        return ""

    @classmethod
    def missing(cls, device: Device) -> str:
        """Why this machine cannot run the backend on ``device``, and what to do; empty if it can."""
        absent = [package for package in ("torch", *cls.requires) if importlib.util.find_spec(package) is None]
        if absent:
            return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
        if device is Device.CUDA and importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a CPU build: pip install one for CUDA"
        return ""


BUILT_IN = ("plain", "fsdp2", "deepspeed", "lightning", "fabric")
"""Modules of this package that hold backends."""


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def offered() -> dict[str, str]:
    """What installed packages offer, by name: ``module:Class``. Nothing of them is imported."""
    return {entry.name: entry.value for entry in _entry_points()}


def registry(names: Iterable[str] = ()) -> dict[str, type[Backend]]:
    """Backends by name: the built-in ones, those that MORE names, and of those that installed packages offer ``names``.

    No package is imported whose backend is not named. Names that nobody has are left out.

    Raises InputError if what is named is not a backend, or its name cannot be one or is already taken.
    """
    found: dict[str, type[Backend]] = {}
    for module in BUILT_IN:
        for backend in importlib.import_module(f"bench.backends.{module}").BACKENDS:
            found[backend.name] = backend
    for name in os.environ.get(MORE, "").split(","):
        if name.strip():
            place = f"{MORE}: '{name.strip()}'"
            backend = _load(importlib.metadata.EntryPoint(name, name.strip(), ENTRY_POINTS), place)
            if backend.name in found:
                raise InputError(f"{place}: the name '{backend.name}' is taken; choose another")
            found[backend.name] = backend
    wanted = [name for name in dict.fromkeys(names) if name not in {*found, ALL}]
    entries = list(_entry_points()) if wanted else []
    for name in wanted:
        several = [entry for entry in entries if entry.name == name]
        if len(several) > 1:
            both = " and ".join(entry.value for entry in several)
            raise InputError(f"backend '{name}': {both} both offer it in group {ENTRY_POINTS}; uninstall one of them")
        for entry in several:
            place = f"entry point '{name}' ({entry.value}) in group {ENTRY_POINTS}"
            found[name] = _load(entry, place)
            if found[name].name != name:
                raise InputError(f"{place}: its backend's name is '{found[name].name}'; both must be the same")
    return found


def adopt(named: str) -> str:
    """Make the class that ``module:Class`` names a known backend, here and in the processes that are started from here.

    Returns its name. Raises InputError if there is no such class, or it is no backend.
    """
    backend = _load(importlib.metadata.EntryPoint(named, named, ENTRY_POINTS), f"'{named}'")
    known = [name for name in os.environ.get(MORE, "").split(",") if name.strip()]
    os.environ[MORE] = ",".join(dict.fromkeys([*known, named]))
    return backend.name


def _load(entry: importlib.metadata.EntryPoint, place: str) -> type[Backend]:
    """The backend that an entry point names; imports its package. Raises InputError that begins with ``place``."""
    try:
        backend = entry.load()
    except Exception as error:
        raise InputError(f"{place}: cannot be loaded ({error}); fix or uninstall that package") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise InputError(f"{place}: is not a subclass of bench.backends.base.Backend")
    name = getattr(backend, "name", None)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise InputError(f"{place}: its name is {name!r}; it must be of letters, digits and . _ + -")
    return backend
