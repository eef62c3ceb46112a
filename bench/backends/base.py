"""The backend interface and the registry.

This module imports neither torch nor a framework, so that planning works without them; ``train``
imports what it needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from bench import backends
from bench.backends.training_job import Job
from bench.errors import InputError, UnsupportedError
from bench.plan.categories import Category
from bench.plan.cell import Cell, Device, Sharding, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINTS = "bench.backends"
"""Entry-point group for backends of other packages; each entry names a subclass of Backend."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
"""Allowed backend names: they become part of file names, table cells and pages."""
ALL = "all"
"""Selects all backends except untried ones and those of installed packages, which must be named."""
EXTRA_BACKENDS = "BENCH_BACKENDS"
"""Environment variable with further backends: ``module:Class``, comma-separated."""


class BackendFamily(StrEnum):
    """Groups of backends in listings and tables, in this order."""

    PYTORCH = "PyTorch"
    DEEPSPEED = "DeepSpeed"
    LIGHTNING = "Lightning"
    HUGGING_FACE = "Hugging Face"
    OTHER = "Others"


Call = tuple[str, str, int, int]
"""Calls of a collective: operation, dtype, elements of the whole logical tensor, and how often it
is called."""


Setting = TypeVar("Setting")


def known(function: Callable[..., object], settings: dict[str, Setting]) -> dict[str, Setting]:
    """The settings. Raises UnsupportedError if the installed function lacks such arguments."""
    if unknown := settings.keys() - inspect.signature(function).parameters.keys():
        package = function.__module__.partition(".")[0]
        version = importlib.metadata.version(package)
        raise UnsupportedError(
            f"{package} {version} does not know the setting {', '.join(sorted(unknown))}"
        )
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossy:
    """What a backend declares to lose on purpose, as digits of gradients reduced in bf16."""

    why: str
    """In words, as every table of a report has them."""
    tolerance: float
    """Largest relative L2 error of the update of a window, which the gates then allow."""
    reduce_dtype: str = "fp32"
    """Dtype in which gradients are reduced."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1 or not self.why.strip():
            raise InputError(
                f"lossy: why is {self.why!r} and tolerance {self.tolerance!r}; they must be words, "
                "and a number between 0 and 1"
            )


BF16_AUTOCAST = "autocast over fp32 parameters"
BF16_PARAMETERS = "bf16 copies of fp32 parameters"


class Backend(ABC):
    """One way to accumulate gradients.

    Subclass it, set the class variables, and implement ``train``. CONTRIBUTING.md has a complete
    backend as an example.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    """Display name of the framework."""
    sync: ClassVar[Sync]
    sharding: ClassVar[Sharding]
    replicate: ClassVar[int] = 0
    """R where the matrix names none, for a backend that trains replicas of a sharded model (HSDP);
    0 for all others."""
    stepping: ClassVar[Stepping] = Stepping.UNKNOWN
    """How the backend handles an incomplete window at the end of an epoch."""
    bf16_as: ClassVar[str] = BF16_AUTOCAST
    """How bf16 is computed: autocast keeps the residual stream and norms in fp32, bf16 parameters
    do not."""
    refuses: ClassVar[Refusals] = Refusals()
    """What the backend cannot do, with the reasons."""
    defect: ClassVar[str] = ""
    """A known defect of the framework that the gates should catch when N > 1, in words; empty if
    none."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Import names of required packages besides torch."""
    preload: ClassVar[tuple[str, ...]] = ()
    """What a fork server imports before it forks trials (``module``) or calls
    (``module:function``); empty for ``requires``."""
    untried: ClassVar[bool] = False
    """Whether the backend has never run. It must then be named: ``all`` does not select it."""

    family: ClassVar[BackendFamily] = BackendFamily.OTHER
    colour: ClassVar[str] = ""
    """The framework's colour in figures, ``#rrggbb``; empty for one that no other framework of the
    run has."""
    is_mechanism: ClassVar[bool] = False
    """Whether it shards and reduces itself, as others wrap it."""
    formula: ClassVar[Callable[..., Any] | str] = ""
    """What it must send and hold, for a backend of another package: a static method, or
    ``package.module:function``. Backends of this package have theirs in
    ``bench.judge.formulas``."""

    @abstractmethod
    def train(self, job: Job) -> None:
        """Build the model and train ``job.windows`` windows.

        Use ``job.loader`` for micro-batches, ``job.loss`` for losses, ``job.optimizer`` for the
        optimizer. Raises UnsupportedError for a job that the backend cannot run.
        """

    @abstractmethod
    def full_parameters(self) -> Mapping[str, Tensor]:
        """The full fp32 parameters, under the names of the built model.

        Called on every rank, because gathering shards is collective: after ``train``, and in
        semantic scenarios also during it, when the first micro-batch after an update is fetched.
        Values may be gathered on access, so all ranks access the same names in the same order.
        """

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The full optimizer state by key (``exp_avg``) and name, gathered as ``full_parameters``.

        Called after that, and only for backends whose inner optimizer steps something else than the
        parameters of the built model, such as a flat partition: of all others the state is read off
        that optimizer.
        """
        return {}

    def reported(self) -> dict[str, int]:
        """The framework's own step counters by name; the first is the primary one."""
        return {}

    def continue_training(self, job: Job) -> None:
        """Continue training with what ``train`` built, after an exception in a window.

        Semantic scenarios call this and the two methods below. A backend without them is
        ``unsupported`` there.
        """
        raise UnsupportedError(
            f"{self.name} cannot continue after an exception: define continue_training()"
        )

    def zero_grad(self) -> None:
        """Clear the gradients in the middle of a window as user code would.

        The default calls ``self.optimizer``.
        """
        if not hasattr(self, "optimizer"):
            raise UnsupportedError(f"{self.name} cannot clear gradients: define zero_grad()")
        self.optimizer.zero_grad()

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        """Write a checkpoint into ``folder`` after ``seen`` micro-batches of the epoch. Collective.

        Returns how many of them the resumed training should skip. The default suits loops over
        ``each_window``: it saves nothing beyond the parameters, which the caller saves and which
        are the state at the last update, so the open window is repeated. A framework with its own
        checkpoints reads them from ``job.resume`` if that is a folder.
        """
        return seen - seen % accumulate

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        """Tensors whose use cannot be told from outside, as flat buffers, by category.

        The memory pass calls this at every tapped event of one window, and assigns the storages of
        these tensors to the categories for their whole life. It finds the following by itself:
        parameters that operators take, their gradients, the inner optimizer's parameters and state,
        and what collectives read and write.
        """
        return {}

    def settings(self) -> dict[str, object]:
        """Framework settings to be stored: other than the defaults, or of time and memory."""
        return {}

    @classmethod
    def extra_collectives(cls, cell: Cell) -> list[Call]:
        """What a trainer communicates in a window besides parameters and gradients."""
        return []

    @classmethod
    def extra_held_bytes(cls, cell: Cell) -> int:
        """What stays of ``extra_collectives`` between micro-batches."""
        return 0

    @classmethod
    def remark(cls, cell: Cell) -> str:
        """A caveat for the numbers of this cell in one sentence; empty if there is none.

        It is stored in run.json at the start of the run (``remarks``, by cell id).
        """
        return ""

    @classmethod
    def lossy(cls, cell: Cell) -> Lossy | None:
        """What the updates of this cell lose on purpose; None by default: nothing.

        The gates allow them to be off by as much as is declared here, and every table says so. It
        is stored in run.json at the start of the run (``lossy``, by cell id).
        """
        return None

    @classmethod
    def preloaded(cls) -> tuple[str, ...]:
        """What the process from which ranks are forked loads (``load``)."""
        if not cls.preload:
            return cls.requires
        return cls.preload

    @classmethod
    def missing(cls, device: Device) -> str:
        """Why this machine cannot run the backend on ``device``, and a remedy; empty if it can."""
        absent: list[str] = []
        for package in ("torch", *cls.requires):
            if importlib.util.find_spec(package) is None:
                absent.append(package)
        if absent:
            return f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
        if device is Device.CUDA and importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a CPU build: pip install one for CUDA"
        return ""


class Offloading(Backend):
    """What a backend is made from, too, whose optimizer works on the host.

    Its masters and their gradients rest there. On CUDA the host's memory, and what is copied
    between host and device, are measured too.
    """

    @classmethod
    def remark(cls, cell: Cell) -> str:
        found = [super().remark(cell)]
        if cell.device is Device.CPU:
            found.append(
                "on the CPU the device is the host: nothing is copied between them and nothing is "
                "pinned, so time and memory say nothing about offload from a GPU"
            )
        else:
            found.append("the update runs on the host, on as many threads as the rank has")
        return "; ".join(filter(None, found))


def load(name: str) -> None:
    """Import ``module``, or call ``module:function``, unless it is not installed.

    See ``Backend.preloaded``.
    """
    module, _, function = name.partition(":")
    with suppress(ImportError):
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()


@cache
def built_in() -> dict[str, type[Backend]]:
    """The backends in the modules of this package, by name.

    Modules come by family, and in a family those that begin with an unsharded backend come first.
    """
    found: list[list[type[Backend]]] = []
    for info in pkgutil.iter_modules(backends.__path__, "bench.backends."):
        values = vars(importlib.import_module(info.name)).values()
        if defined := [value for value in values if _is_defined_in(info.name, value)]:
            found.append(defined)
    found.sort(key=_place_of_module)
    return {backend.name: backend for backend in itertools.chain.from_iterable(found)}


def _is_defined_in(module: str, value: object) -> bool:
    """Whether a value in a module is a backend that it defines.

    Not one that it imports, nor a base of several.
    """
    if not (isinstance(value, type) and issubclass(value, Backend)):
        return False
    return value.__module__ == module and "name" in vars(value)


def _place_of_module(defined: list[type[Backend]]) -> tuple[int, bool]:
    """What sorts modules, from the backends that each defines."""
    first = defined[0]
    return list(BackendFamily).index(first.family), first.sharding is not Sharding.NONE


def installed_backends() -> dict[str, str]:
    """Backends that ``all`` does not select, by name, as ``module:Class``.

    Those of packages are not imported.
    """
    found = {entry.name: entry.value for entry in _entry_points()}
    for name, kind in built_in().items():
        if kind.untried:
            found[name] = f"{kind.__module__}:{kind.__name__}"
    return found


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def registry(names: Iterable[str] = ()) -> dict[str, type[Backend]]:
    """Backends by name: built-in ones, those in EXTRA_BACKENDS, and of packages those of ``names``.

    Only installed packages of requested backends are imported, and only requested backends may be
    untried. Unknown names are left out. Raises InputError for something that is not a backend, or a
    name that is invalid or already taken.
    """
    names = list(dict.fromkeys(names))
    found = {name: backend for name, backend in built_in().items() if not backend.untried}
    for named in _named_in_environment():
        place = f"{EXTRA_BACKENDS}: '{named}'"
        backend = _load(_entry_of(named), place)
        if backend.name in found:
            raise InputError(f"{place}: the name '{backend.name}' is taken; choose another")
        found[backend.name] = backend
    found |= {name: built_in()[name] for name in names if name in built_in()}
    wanted = [name for name in names if name not in {*found, ALL}]
    entries = []
    if wanted:
        entries = list(_entry_points())
    for name in wanted:
        several = [entry for entry in entries if entry.name == name]
        if len(several) > 1:
            both = " and ".join(entry.value for entry in several)
            raise InputError(
                f"backend '{name}': {both} both offer it in group {ENTRY_POINTS}; uninstall one of "
                "them"
            )
        for entry in several:
            place = f"entry point '{name}' ({entry.value}) in group {ENTRY_POINTS}"
            found[name] = _load(entry, place)
            if found[name].name != name:
                raise InputError(
                    f"{place}: its backend's name is '{found[name].name}'; both must be the same"
                )
    return found


def place_of(name: str) -> str:
    """``module:Class`` of the backend of another package, as it was named.

    Empty for one of this package.
    """
    if name in built_in():
        return ""
    for place in _named_in_environment():
        if _load(_entry_of(place), f"'{place}'").name == name:
            return place
    for entry in _entry_points():
        if entry.name == name:
            return entry.value
    return ""


def only(name: str, place: str) -> type[Backend]:
    """The backend of a trial, by its name and place (``place_of``); no other package is imported.

    A module may change torch when it is imported, which must not reach the trials of others.
    """
    if name in built_in():
        return built_in()[name]
    if not place:
        return registry([name])[name]
    return _load(_entry_of(place), f"'{place}'")


def _named_in_environment() -> list[str]:
    """Backends as ``module:Class`` in EXTRA_BACKENDS."""
    return [name.strip() for name in os.environ.get(EXTRA_BACKENDS, "").split(",") if name.strip()]


def _entry_of(place: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(place, place, ENTRY_POINTS)


def register(named: str) -> str:
    """Register the backend ``module:Class`` in this process and its children, and return its name.

    Raises InputError if the class does not exist or is not a backend.
    """
    backend = _load(_entry_of(named), f"'{named}'")
    os.environ[EXTRA_BACKENDS] = ",".join(dict.fromkeys([*_named_in_environment(), named]))
    return backend.name


def _load(entry: importlib.metadata.EntryPoint, place: str) -> type[Backend]:
    """Load the backend of an entry point. Raises InputError starting with ``place``."""
    try:
        backend = entry.load()
    except Exception as error:
        raise InputError(
            f"{place}: cannot be loaded ({error}); fix or uninstall that package"
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise InputError(f"{place}: is not a subclass of bench.backends.base.Backend")
    name = getattr(backend, "name", None)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise InputError(
            f"{place}: its name is {name!r}; it may only contain letters, digits and . _ + -"
        )
    return backend
