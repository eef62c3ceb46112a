"""Objects of frameworks and models in the process: what they were asked for, and their names."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Tuple  # noqa: UP035 - older Pythons

import torch
from torch import Tensor

from .records import RateSchedule

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.optim.lr_scheduler import LRScheduler

PACKAGES = ("torch", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers")
DISTRIBUTIONS = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "transformers": "transformers",
    "trl": "trl",
}
"""By package, what its versions are listed under."""
N = ("gradient_accumulation_steps", "accumulate_grad_batches")
"""Attributes with the number of micro-batches that was asked for."""
FACTS: dict[str, tuple[str, ...]] = {
    "DistributedDataParallel": (),
    "FullyShardedDataParallel": (),
    "FSDPParam": ("sharded_param.device_mesh.shape", "sharded_param.placements"),
    "FullyShardedDataParallelPlugin": ("fsdp_version",),
    "DeepSpeedEngine": (N[0], "zero_optimization_stage"),
    "ZeROOptimizer": (),
    "Accelerator": (N[0], "distributed_type"),
    "TrainingArguments": (N[0],),
    "Trainer": (N[1],),
}
"""By the name of a class or a base, the attributes that are read."""
SCALER = "GradScaler"
LENGTHS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "PolynomialLR": "total_iters",
    "LinearLR": "total_iters",
    "LambdaLR": "num_training_steps",
}
"""By schedule what its length is called. That of a LambdaLR is known to the functions that
transformers and diffusers make."""
AVERAGES = ("ModelAverager", "PostLocalSGDState", "LocalSGD")
"""Names of classes with which replicas drift apart on purpose."""
OBSTACLES = {
    "FullyShardedDataParallel": "FSDP1 keeps gradients in flat parameters",
    **dict.fromkeys(AVERAGES, "local SGD averages parameters instead of gradients"),
    "main_grad": "Megatron keeps gradients in main_grad",
}
"""By the name of a class, or of an attribute of leaves, why a training is not judged."""
PARALLEL = {
    "PipelineModule": "in a pipeline ranks hold different layers",
    "_PipelineStageBase": "in a pipeline ranks hold different layers",
    "_local_tensor": "parameters are distributed tensors, as in tensor parallelism",
}
"""By the name of a class, or of an attribute of leaves, why ranks hold different parameters."""
KNOWN = {*FACTS, *OBSTACLES, *PARALLEL, SCALER, *LENGTHS}
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
"""What wrappers put into the names of parameters."""
HeldSchedule = Tuple["weakref.ReferenceType[LRScheduler]", RateSchedule]  # noqa: UP006 - older Pythons
"""Without keeping it alive, which would keep its optimizer."""


class FoundObjects:
    """The objects that the garbage collector knows."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        """The newest of each name; the attributes of frameworks differ by version."""
        self.sharded: dict[int, FSDPParam] = {}
        """FSDP2's parameters by the id of the leaf that autograd sees."""
        self.modules: list[torch.nn.Module] = []
        """All modules, those of other modules among them."""
        self.schedules: list[HeldSchedule] = []
        """Those whose length is known."""
        names: dict[type, str] = {}
        for found in gc.get_objects():
            kind = type(found)
            if kind not in names:
                names[kind] = _name(kind)
            name = names[kind]
            length = None
            if name in LENGTHS:
                length = _length(found, LENGTHS[name])
            elif name:
                self._last[name] = found
            if length is not None:
                schedule = RateSchedule(name, LENGTHS[name], length)
                self.schedules.append((weakref.ref(found), schedule))
            if name == "FSDPParam" and hasattr(found, "_unsharded_param"):
                self.sharded[id(found._unsharded_param)] = found
            if _is_module(found):
                self.modules.append(found)
        self.roots = _outermost(self.modules)
        """Modules that are in no other."""
        self.zero: Any = self._last.get("ZeROOptimizer")
        self._frozen: dict[tuple[int, ...], list[Tensor]] = {}
        """Parameters and buffers that are not trained, by shape."""
        self._names = self._parameter_names()

    def forget(self) -> None:
        """Let go of all objects, which the training may want to delete."""
        self._last.clear()
        self.sharded.clear()
        self.modules.clear()
        self.roots.clear()
        self._frozen.clear()
        self.zero = None

    def name_of(self, tensor: Tensor, otherwise: str = "") -> str:
        """What the model calls a parameter or a buffer; ``otherwise`` if no module has it."""
        sharded = self.sharded.get(id(tensor))
        if sharded is None:
            return self._names.get(id(tensor), otherwise)
        name: str | None = getattr(sharded, "_param_fqn", None)
        if name is None:
            return self._names.get(id(sharded.sharded_param), otherwise)
        return name

    def facts(self) -> dict[str, str]:
        """What each that is set up was asked for."""
        facts = {}
        for name, found in self._last.items():
            if name not in FACTS:
                continue
            values = {key: _read(found, key) for key in FACTS[name]}
            if None not in values.values():
                facts[name] = ", ".join(f"{key} {value}" for key, value in values.items())
        return facts

    def versions(self) -> dict[str, str]:
        """Of the frameworks that are imported, by distribution."""
        from importlib.metadata import PackageNotFoundError, version

        versions = {}
        for package, distribution in DISTRIBUTIONS.items():
            if package in sys.modules:
                try:
                    versions[distribution] = version(distribution)
                except PackageNotFoundError:  # it is on the path, and not installed
                    continue
        return versions

    def deepspeed_config(self) -> str | None:
        """The config of DeepSpeed's engine as JSON; None if there is none."""
        config = _read(self._last.get("DeepSpeedEngine"), "_config._param_dict")
        if not isinstance(config, dict):
            return None
        return json.dumps(config, default=str)

    def reasons(self, leaves: Sequence[Tensor], table: Mapping[str, str]) -> list[str]:
        """The texts of the table's names that are found among objects, or attributes of leaves."""
        reasons = set()
        for name, text in table.items():
            if name in self._last or any(hasattr(leaf, name) for leaf in leaves):
                reasons.add(text)
        return sorted(reasons)

    def scaler_factor(self) -> Tensor | None:
        """The factor of the newest loss scaler; None if it is not in use."""
        scaler = self._last.get(SCALER)
        if scaler is None or not scaler._enabled:
            return None
        scale: Tensor | None = scaler._scale
        return scale

    def loss_scale(self) -> Tensor | None:
        """The same; None if the scaler has unscaled gradients since its last update."""
        scale = self.scaler_factor()
        if scale is None:
            return None
        for state in self._last[SCALER]._per_optimizer_states.values():
            if state["stage"].name == "UNSCALED":
                return None
        return scale.detach().clone()

    def asked(self) -> int:
        """The most micro-batches per update that one asks for now: a callback may change that."""
        most = 1
        for found in self._last.values():
            for key in N:
                count = _read(found, key)
                if isinstance(count, int):
                    most = max(most, count)
        return most

    def batch_norms(self, leaves: Iterable[Tensor]) -> int:
        """Modules that are trained with the statistics of the micro-batch that they are given."""
        trained = set(map(id, leaves))
        count = 0
        for module in self.modules:
            is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            if is_norm and module.training and id(module.weight) in trained:
                count += 1
        return count

    def copies_of(self, leaf: Tensor, name: str) -> Tensor | None:
        """An untrained tensor of another module with this name and shape, as of an average."""
        ending = name.split(".", 1)[-1]
        for other in self._frozen.get(tuple(leaf.shape), ()):
            if self._names.get(id(other), "").endswith(ending) and ending:
                return other
        return None

    def _parameter_names(self) -> dict[int, str]:
        """By id, with the variable that holds the outermost module, where several are trained."""
        prefixes = _prefixes(self.roots)
        names: dict[int, str] = {}
        for root in self.roots:
            prefix = prefixes.get(id(root), "")
            tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers()]
            for name, parameter in tensors:
                full = _without_wrappers(prefix + name)
                if len(full) < len(names.get(id(parameter), full + " ")):
                    names[id(parameter)] = full
                if not parameter.requires_grad:
                    self._frozen.setdefault(tuple(parameter.shape), []).append(parameter)
        return names


def _is_module(found: object) -> bool:
    # isinstance would ask proxies for their class, some of which warn.
    return issubclass(type(found), torch.nn.Module) and "_modules" in vars(found)


def _outermost(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    inner: set[int] = set()
    for module in modules:
        inner.update(map(id, module._modules.values()))
    return [module for module in modules if id(module) not in inner]


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _prefixes(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    """What stands before the names of the parameters of each module, by its id.

    Nothing if there is one.
    """
    if len(roots) < 2:
        return {}
    variables = _variables(roots)
    return {id(root): f"{variables.get(id(root), type(root).__name__)}." for root in roots}


def _variables(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    """What the frames that train call these modules, the outermost first."""
    wanted = set(map(id, roots))
    frames = []
    frame = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    found: dict[int, str] = {}
    for frame in reversed(frames):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in (*PACKAGES, "_bench_audit"):
            continue
        values = frame.f_locals
        for name, value in list(values.items()):
            if id(value) in wanted and not name.startswith("_"):
                found.setdefault(id(value), name)
        # Before Python 3.13 a function's frame keeps this copy, and all that is in it alive.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(values) is dict:
            values.clear()
    return found


def _name(kind: type) -> str:
    """What the tables call a class; empty if it is in none."""
    for base in kind.__mro__:
        package = str(base.__module__).partition(".")[0]
        if package in PACKAGES and base.__name__ in KNOWN:
            return base.__name__
    return ""


def _length(schedule: object, name: str) -> int | None:
    """How many steps a schedule has; None if it does not say."""
    length = getattr(schedule, name, None)
    for function in getattr(schedule, "lr_lambdas", ())[:1]:
        length = _bound(function, name)
    if isinstance(length, int):
        return length
    return None


def _bound(function: object, name: str) -> object:
    """The value that a function has for a name: an argument that is given, or a variable around it.

    None if it has none.
    """
    if isinstance(function, functools.partial):
        return function.keywords.get(name)
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if name not in free:
        return None
    closure: Any = function
    try:
        value: object = closure.__closure__[free.index(name)].cell_contents
    except ValueError:  # it is not set yet
        return None
    return value


def _read(found: object, attribute: str) -> object:
    """An attribute, or what a method returns; None before it is set up."""
    try:
        value: object = attrgetter(attribute)(found)
        if callable(value):
            value = value()
    except Exception:
        return None
    return value
