"""Wraps what torch calls in every training, and reports it to the recorder."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.data
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .autograd_nodes import SavedTensorHooks
from .graph_survey import plain
from .training_recorder import TrainingRecorder

CLIPPING = ("_clip_grads_with_norm_", "clip_grad_value_")
OLD_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
"""Before torch 2.6 one function calculates the norm and clips."""
HOOK_VALUES = 8
"""Sampled values of a gradient that a hook is given."""


class GradientWatcher(Protocol):
    """What is told of backwards, of clipping, of steps, of forks and of the end of a process."""

    active: bool
    sampling: bool
    inner_gradients: int
    """Calls of autograd.grad whose result is differentiated again."""

    def guard(self, method: Callable[..., None], *arguments: object) -> None: ...
    def before_backward(self, roots: Sequence[object], keeps_graph: bool) -> None: ...
    def after_backward(self) -> None: ...
    def before_clip(self, parameters: Sequence[Tensor], bound: object) -> None: ...
    def after_clip(self) -> None: ...
    def before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], options: dict[str, object]
    ) -> None: ...
    def after_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], options: dict[str, object]
    ) -> None: ...
    def restart(self) -> None: ...
    def end(self) -> None: ...


def install() -> None:
    """Watch this process, and the processes that it forks."""
    recorder = TrainingRecorder()
    _wrap_hooks(recorder)
    _wrap_loaders(recorder)
    watch(recorder)


def watch(recorder: GradientWatcher) -> None:
    """Tell a recorder what it needs to know, and leave a file that says that it is told."""
    wrap_backward(recorder)
    SavedTensorHooks.watch()
    names = OLD_CLIPPING
    if hasattr(clip_grad, CLIPPING[0]):
        names = CLIPPING
    for name in names:
        wrap_clipping(getattr(clip_grad, name), recorder)
    register_optimizer_step_pre_hook(functools.partial(recorder.guard, recorder.before_step))
    register_optimizer_step_post_hook(functools.partial(recorder.guard, recorder.after_step))
    os.register_at_fork(after_in_child=recorder.restart)
    atexit.register(recorder.guard, recorder.end)
    Path(os.environ["BENCH_AUDIT_FOLDER"], f"{os.getpid()}.torch").touch()


def wrap_backward(recorder: GradientWatcher) -> None:
    """Wrap what ``Tensor.backward`` and ``autograd.grad`` call, and check that it is called.

    The check runs no backward: once the engine has run, torch may refuse to run it in a forked
    process.
    """
    autograd: Any = torch.autograd  # the function is none that torch declares
    run: Callable[..., object] = autograd._engine_run_backward
    calls: list[object] = []
    autograd._engine_run_backward = lambda *arguments, **options: calls.append(
        options.get("accumulate_grad")
    )
    torch.ones(1, requires_grad=True).sum().backward()
    autograd._engine_run_backward = run
    if calls != [True]:
        raise RuntimeError("backward of this version of torch cannot be watched")

    def backward(
        roots: Sequence[object],
        gradients: object,
        retain_graph: bool,
        *arguments: object,
        **options: object,
    ) -> object:
        # autograd.grad accumulates nothing; checkpointing runs backwards inside of one.
        is_inside = torch._C._current_graph_task_id() != -1
        is_training = bool(options.get("accumulate_grad")) and not is_inside
        if arguments[:1] == (True,) and not options.get("accumulate_grad"):  # create_graph
            recorder.inner_gradients += 1
        if not is_training or any(map(_has_no_values, roots)):
            return run(roots, gradients, retain_graph, *arguments, **options)
        recorder.guard(recorder.before_backward, roots, retain_graph)
        try:
            return run(roots, gradients, retain_graph, *arguments, **options)
        finally:
            recorder.guard(recorder.after_backward)

    autograd._engine_run_backward = backward


def _has_no_values(root: object) -> bool:
    """Whether a loss is on fake tensors or on those of the device meta, which train nothing."""
    if isinstance(root, Tensor) and root.is_meta:
        return True
    return type(root).__name__ == "FakeTensor"


def wrap_clipping(original: Callable[..., object], recorder: GradientWatcher) -> None:
    """Wrap a function of torch that clips gradients, wherever torch has it."""

    def clip(
        parameters: Tensor | Iterable[Tensor], *arguments: object, **options: object
    ) -> object:
        if not (recorder.active and recorder.sampling):
            return original(parameters, *arguments, **options)
        if isinstance(parameters, Tensor):
            clipped = [parameters]
        else:
            clipped = list(parameters)
        bound = next(iter((*arguments, *options.values())), None)
        recorder.guard(recorder.before_clip, clipped, bound)
        result = original(clipped, *arguments, **options)
        recorder.guard(recorder.after_clip)
        return result

    for module in (clip_grad, torch.nn.utils):
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, functools.wraps(original)(clip))


def _wrap_hooks(recorder: TrainingRecorder) -> None:
    """While backwards are sampled, compare what hooks make of gradients with what they get."""
    original: Callable[..., object] = Tensor.register_hook

    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> object:
        if not (recorder.active and recorder.sampling) or getattr(hook, "__module__", "") == _OURS:
            return original(tensor, hook)
        is_parameter = tensor.is_leaf

        def watched(gradient: Tensor) -> Tensor | None:
            if not (recorder.active and recorder.sampling):
                return hook(gradient)
            before = _some_or_none(gradient)
            result = hook(gradient)
            if result is None:
                after = _some_or_none(gradient)
            else:
                after = _some_or_none(result)
            recorder.guard(recorder.on_hook, is_parameter, before, after)
            return result

        return original(tensor, watched)

    Tensor.register_hook = register_hook  # type: ignore[method-assign]


_OURS = __name__.rpartition(".")[0] + ".leaf_probes"


def _some_or_none(gradient: object) -> Tensor | None:
    """A few values of a gradient; None also where reading them fails."""
    try:
        return _some(gradient)
    except Exception:
        return None


def _some(gradient: object) -> Tensor | None:
    """A few values of a gradient, as they are now; None if it is no dense tensor."""
    if not isinstance(gradient, Tensor):
        return None
    local = plain(gradient)
    if local.is_sparse or not local.numel():
        return None
    count = local.numel()
    places = torch.arange(0, count, max(1, count // HOOK_VALUES), device=local.device)
    return local.detach().take(places[:HOOK_VALUES])


def _wrap_loaders(recorder: TrainingRecorder) -> None:
    iterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    original: Callable[[object], object] = iterator.__next__

    @functools.wraps(original)
    def count(loader: object) -> object:
        batch = original(loader)
        recorder.fetched += 1
        recorder.last_loader = weakref.ref(loader)
        return batch

    iterator.__next__ = count
