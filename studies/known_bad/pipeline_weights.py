"""The weight of each micro-batch under DeepSpeed's PipelineEngine with two stages; two ranks."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils.logging import logger

logger.setLevel(logging.ERROR)
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
    False  # compile nothing
)

N = 4


class Scale(torch.nn.Module):
    """Multiplies its input by weights that start at 1."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(N))

    def forward(self, x):
        return x * self.weights


deepspeed.init_distributed("gloo", verbose=False)
layers = PipelineModule(
    [Scale(), Scale()], num_stages=2, loss_fn=lambda x, _: x.sum(), partition_method="uniform"
)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "steps_per_print": 1000,
}
sgd = torch.optim.SGD(layers.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=layers, optimizer=sgd, config=config)
engine.train_batch(iter([(one_hot[None], one_hot[None]) for one_hot in torch.eye(N)]))
mine = 1 - torch.cat([parameter.detach() for parameter in layers.parameters()])
every = [torch.zeros(N) for _ in range(2)]
torch.distributed.all_gather(every, mine)
measured = [stage.tolist() for stage in every]
if engine.global_rank == 0:
    print(
        json.dumps({"case": "weights by stage", "measured": measured, "right": [[1 / N] * N] * 2}),
        flush=True,
    )
