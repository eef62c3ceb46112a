"""Hooks on backward, on clipping, and on the step of every optimizer.

The recorder imports nothing of bench: the command may run in another environment. It communicates nothing, draws from
no global generator, changes no tensor, and never raises into the training.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .training_recorder import TrainingRecorder


def install() -> None:
    """Watch this process, and the processes that it forks."""
    recorder = TrainingRecorder()
    _wrap_backward(recorder)
    for function in (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
        _wrap_clipping(function, recorder)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    os.register_at_fork(after_in_child=recorder.restart)
    atexit.register(recorder.end)
    Path(os.environ["BENCH_AUDIT_FOLDER"], f"{os.getpid()}.torch").touch()


def _wrap_backward(recorder: TrainingRecorder) -> None:
    """Wrap what ``Tensor.backward`` and ``autograd.grad`` call, and check that it is called.

    The check runs no backward: once the engine has run, torch may refuse to run it in a forked process.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    calls: list[object] = []
    autograd._engine_run_backward = lambda *arguments, **options: calls.append(options.get("accumulate_grad"))
    torch.ones(1, requires_grad=True).sum().backward()
    autograd._engine_run_backward = run
    if calls != [True]:
        raise RuntimeError("backward of this version of torch cannot be watched")

    def backward(roots: Any, gradients: Any, retain_graph: bool, *arguments: Any, **options: Any) -> Any:
        # autograd.grad accumulates nothing; checkpointing runs backwards inside of one; fake tensors train nothing.
        is_training = options.get("accumulate_grad") and torch._C._current_graph_task_id() == -1
        if not is_training or any(type(root).__name__ == "FakeTensor" for root in roots):
            return run(roots, gradients, retain_graph, *arguments, **options)
        recorder.before_backward(roots, keeps_graph=retain_graph)
        try:
            return run(roots, gradients, retain_graph, *arguments, **options)
        finally:
            recorder.after_backward()

    autograd._engine_run_backward = backward


def _wrap_clipping(original: Any, recorder: TrainingRecorder) -> None:
    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.before_clip(clipped)
        result = original(clipped, *arguments, **options)
        recorder.after_clip()
        return result

    for module in (clip_grad, torch.nn.utils):
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, clip)
