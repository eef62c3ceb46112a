"""What the measurements of weights share: a model whose update says each weight, DeepSpeed's config, what is printed.

It needs no bench: the scripts beside it import it in the environment of any version.
"""

import json
import logging

import deepspeed.ops
import torch
from deepspeed.utils.logging import logger

N, WINDOWS = 4, 2


class OneHot(torch.nn.Module):
    """The gradient of micro-batch i is 1 in weight i and 0 elsewhere."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(N * WINDOWS))

    def forward(self, i):
        return (self.weights * torch.nn.functional.one_hot(i, N * WINDOWS)).sum()


def config_of(stage, offload):
    zero = {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def print_weights(train):
    """Print the weight of each micro-batch in two updates, by stage and offload; ``train`` gives them for a config."""
    logger.setLevel(logging.ERROR)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    for stage in (1, 2, 3):
        for offload in (False, True):
            case = f"ZeRO-{stage}{', offload_optimizer' if offload else ''}"
            try:
                weights = train(config_of(stage, offload)).tolist()
                measured = [
                    [round(w, 4) for w in weights[first : first + N]]
                    for first in range(0, N * WINDOWS, N)
                ]
            except Exception as error:
                measured = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(
                json.dumps({"case": case, "measured": measured, "right": [[1 / N] * N] * WINDOWS}),
                flush=True,
            )
