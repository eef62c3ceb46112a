"""A DeepSpeed engine in a plain loop: train_deepspeed.py VARIANT STAGE."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, SmallLM, Tokens, save_losses
from torch.utils.data import DataLoader, DistributedSampler

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")
import deepspeed
import deepspeed.ops

variant, stage = sys.argv[1], int(sys.argv[2])
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
    False  # it would be compiled
)
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = SmallLM()
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATE,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0 if variant == "clip" else 0.0,
    "zero_optimization": {
        "stage": stage,
        "reduce_bucket_size": 5000,
        "allgather_bucket_size": 5000,
    },
}
if variant == "bf16":  # with sums in fp32
    config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
data = Tokens(16 * dist.get_world_size())
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
losses = []
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(engine(x).flatten(0, 1).float(), y.flatten())
        engine.backward(loss / ACCUMULATE if variant == "twice" else loss)
        engine.step()
        losses.append(loss.detach())
save_losses(losses)
dist.destroy_process_group()
