"""Lightning's Trainer: train_lightning.py VARIANT STRATEGY."""

import logging
import os
import sys
import warnings

import torch
import torch.nn.functional as F

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")
import lightning
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from small_lm import ACCUMULATE, BATCH, SmallLM, Tokens, save_losses
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
variant, name = sys.argv[1:]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = SmallLM()
        self.losses = []

    def configure_model(self):
        if name == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(0, 1).float(), y.flatten())
        self.losses.append(loss.detach())
        return loss / ACCUMULATE if variant == "twice" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def deepspeed_strategy():
    import deepspeed.ops
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False

    class OnCpu(DeepSpeedStrategy):
        """Lightning's own insists on CUDA."""

        def setup_environment(self):
            DDPStrategy.setup_environment(self)

        def setup_distributed(self):
            self.parallel_devices = [torch.device("cpu", 0)] * self.num_processes
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        def _get_process_group_backend(self):
            return "gloo"

    zero = {"stage": 2, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    return OnCpu(config=config, process_group_backend="gloo")


torch.manual_seed(0)
if name == "fsdp2":
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
else:
    strategy = deepspeed_strategy() if name == "deepspeed" else "ddp"
scheduled = variant == "scheduled"
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=2,
    accumulate_grad_batches=1 if scheduled else ACCUMULATE,
    callbacks=[GradientAccumulationScheduler({0: 2, 1: ACCUMULATE})] if scheduled else None,
    gradient_clip_val=0.5 if variant == "clip" else None,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, DataLoader(Tokens((20 if variant == "partial" else 16) * 2), BATCH))
save_losses(module.losses)
