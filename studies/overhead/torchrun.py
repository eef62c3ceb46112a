"""Trains one side of a comparison in processes of torch elastic: ``python -m studies.overhead.torchrun TASK``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bench.plan.cell import Device
from bench.plan.task import Task
from studies.overhead.in_turn import work

PRELOADED = (
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "studies.overhead.in_turn",
    "studies.overhead.preload",
)
"""What the process imports from which the ranks are forked."""


def main(task_json: str) -> None:
    """A rank: train, and write the result to ``torchrun<rank>.json`` in the task's folder."""
    task: Any = Task.from_json(task_json)
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed's collectives warn at every call
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    device = torch.device("cpu")
    if task.device is Device.CUDA:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if task.device is Device.CUDA else "gloo")
    rank = dist.get_rank()
    result = work(task, rank, device)
    Path(task.folder, f"torchrun{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # As the bench's, the ranks are forked from a process that has imported everything, and share one session. torchrun
    # gives each its own, and so each as much of a busy machine as both together get here (sched(7), autogroup).
    task = Task.from_json(sys.argv[1])
    set_forkserver_preload(list(PRELOADED))
    meeting = {
        "run_id": "bare",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
    }
    config = LaunchConfig(
        1, 1, task.world_size, max_restarts=0, start_method="forkserver", **meeting
    )
    elastic_launch(config, main)(sys.argv[1])
