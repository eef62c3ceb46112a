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
    updates = int(os.environ.get("BENCH_AUDIT_UPDATES", "8"))
    recorder = TrainingRecorder(torch, EventLog(torch, folder), updates)
    if torch.distributed.is_available():
        recorder.kernels.install()
    _wrap_backward(torch, recorder)
    _wrap_gradients(torch, recorder)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    os.register_at_fork(after_in_child=recorder.restart)
    atexit.register(recorder.end)
    (folder / f"{os.getpid()}.torch").touch()


def _wrap_backward(torch: Any, recorder: TrainingRecorder) -> None:
    """Wrap what ``Tensor.backward`` and ``autograd.grad`` call, and check that it is called.

    The check runs no backward: once the engine has run, torch refuses to run it in a forked process.
    """
    run = torch.autograd._engine_run_backward
    calls: list[object] = []
    torch.autograd._engine_run_backward = lambda *arguments, **options: calls.append(options.get("accumulate_grad"))
    try:
        torch.ones(8, requires_grad=True).sum().backward()
    finally:
        torch.autograd._engine_run_backward = run
    if calls != [True]:
        raise RuntimeError("backward of this version of torch cannot be watched")

    def backward(roots: Any, *arguments: Any, **options: Any) -> Any:
        # create_graph and retain_graph are positional; autograd.grad accumulates nothing.
        if not options.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            return run(roots, *arguments, **options)
        recorder.before_backward(roots, keeps_graph=bool(arguments[1]))
        try:
            return run(roots, *arguments, **options)
        finally:
            recorder.after_backward()

    torch.autograd._engine_run_backward = backward


def _wrap_gradients(torch: Any, recorder: TrainingRecorder) -> None:
    """Wrap what clears, clips and unscales gradients."""
    clipping, optimizer = torch.nn.utils.clip_grad, torch.optim.Optimizer
    clear, scaler = optimizer.zero_grad, torch.amp.GradScaler
    step = scaler.step

    def zero_grad(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder.on_zero_grad()
        return clear(self, *arguments, **options)

    def scaled_step(self: Any, *arguments: Any, **options: Any) -> Any:
        before = recorder.steps
        result = step(self, *arguments, **options)
        if recorder.steps == before:
            recorder.on_skipped_step()
        return result

    def clips(original: Any) -> Any:
        def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
            clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            recorder.on_clip(clipped)
            return original(clipped, *arguments, **options)

        return clip

    optimizer.zero_grad, scaler.step = zero_grad, scaled_step
    clipping._clip_grads_with_norm_ = clips(clipping._clip_grads_with_norm_)
    clipping.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = clips(clipping.clip_grad_value_)
