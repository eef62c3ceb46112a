"""The recorder of ``python -m bench audit``, inside each process of the audited command.

Imports nothing of bench: the command may run in another environment, and sitecustomize loads this folder by its path.
It communicates nothing, draws from no global generator, changes no tensor, and never raises into the training.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from .event_log import EventLog
from .training_recorder import TrainingRecorder


def install(torch: Any, folder: Path) -> None:
    """Watch this process, and the processes that it forks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    recorder = TrainingRecorder(torch, EventLog(torch, folder), updates=int(os.environ["BENCH_AUDIT_UPDATES"]))
    _wrap_backward(torch, recorder)
    _wrap_optimizer(torch, recorder)
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        _wrap_clipping(torch, recorder, name)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    os.register_at_fork(after_in_child=recorder.restart)
    atexit.register(recorder.end)
    (folder / f"{os.getpid()}.torch").touch()


def _wrap_backward(torch: Any, recorder: TrainingRecorder) -> None:
    """Wrap what ``Tensor.backward`` and ``autograd.grad`` call, and check that it is called.

    The check runs no backward: once the engine has run, torch may refuse to run it in a forked process.
    """
    run = torch.autograd._engine_run_backward
    calls: list[object] = []
    torch.autograd._engine_run_backward = lambda *arguments, **options: calls.append(options.get("accumulate_grad"))
    torch.ones(1, requires_grad=True).sum().backward()
    torch.autograd._engine_run_backward = run
    if calls != [True]:
        raise RuntimeError("backward of this version of torch cannot be watched")

    def backward(roots: Any, gradients: Any, retain_graph: bool, *arguments: Any, **options: Any) -> Any:
        # autograd.grad accumulates nothing; checkpointing runs backwards inside of one; fake tensors train nothing.
        is_training = options.get("accumulate_grad") and torch._C._current_graph_task_id() == -1
        is_training = is_training and not any(type(root).__name__ == "FakeTensor" for root in roots)
        if is_training:
            recorder.before_backward(roots, keeps_graph=retain_graph)
        try:
            return run(roots, gradients, retain_graph, *arguments, **options)
        finally:
            if is_training:
                recorder.after_backward()

    torch.autograd._engine_run_backward = backward


def _wrap_optimizer(torch: Any, recorder: TrainingRecorder) -> None:
    optimizer, scaler = torch.optim.Optimizer, torch.amp.GradScaler
    clear, step = optimizer.zero_grad, scaler.step

    def zero_grad(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder.on_zero_grad()
        return clear(self, *arguments, **options)

    def scaled_step(self: Any, *arguments: Any, **options: Any) -> Any:
        before = recorder.steps
        result = step(self, *arguments, **options)
        if recorder.steps == before:
            recorder.on_skipped_step()
        return result

    optimizer.zero_grad, scaler.step = zero_grad, scaled_step


def _wrap_clipping(torch: Any, recorder: TrainingRecorder, name: str) -> None:
    original = getattr(torch.nn.utils.clip_grad, name)

    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.on_clip(clipped)
        return original(clipped, *arguments, **options)

    for place in (torch.nn.utils.clip_grad, torch.nn.utils):
        if hasattr(place, name):
            setattr(place, name, clip)
