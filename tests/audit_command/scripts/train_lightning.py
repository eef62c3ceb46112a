"""Lightning's Trainer: train_lightning.py VARIANT STRATEGY.

STRATEGY is ddp, fsdp2 or deepspeed on two ranks, or alone for one process without a strategy.
"""

import copy
import logging
import os
import sys
import warnings

import torch
import torch.nn.functional as F

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")
import lightning
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
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

    def loss_of(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(0, 1).float(), y.flatten())
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch, index):
        loss = self.loss_of(batch)
        if variant == "twice":
            return loss / ACCUMULATE
        if variant == "multiplied":  # DeepSpeed's engine divides what the Trainer has divided
            return loss * ACCUMULATE
        if variant == "partial-scaled":  # the Trainer divides by N also what is left of an epoch
            before = index // ACCUMULATE * ACCUMULATE
            return loss * ACCUMULATE / min(ACCUMULATE, self.trainer.num_training_batches - before)
        return loss

    def on_after_backward(self):
        if variant == "clip-each":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Module):
    """Its training step does all that the Trainer would do."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = self.loss_of(batch)
        self.manual_backward(loss if variant == "manual-undivided" else loss / ACCUMULATE)
        last = (index + 1) % ACCUMULATE == 0
        if last:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        if last or variant == "manual-schedule-each":
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class AveragesEachBatch(Callback):
    """A moving average, as if every batch made an update."""

    def on_fit_start(self, trainer, module):
        self.average = copy.deepcopy(module.net)

    def on_train_batch_end(self, trainer, module, *_):
        for averaged, parameter in zip(
            self.average.parameters(), module.net.parameters(), strict=True
        ):
            averaged.data.lerp_(parameter.data, 0.1)


def callbacks():
    if variant == "scheduled":
        return [GradientAccumulationScheduler({0: 2, 1: ACCUMULATE})]
    if variant == "average":
        return [lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9)]
    if variant == "average-each":
        return [AveragesEachBatch()]
    return None


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
elif name == "deepspeed":
    strategy = deepspeed_strategy()
else:
    strategy = {"ddp": "ddp", "alone": "auto"}[name]
ranks = 1 if name == "alone" else 2
manual = variant.startswith("manual")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=strategy,
    max_epochs=2,
    accumulate_grad_batches=1 if manual or variant == "scheduled" else ACCUMULATE,
    callbacks=callbacks(),
    gradient_clip_val=0.5 if variant == "clip" else None,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Manual() if manual else Module()
rows = 20 if variant.startswith("partial") else 16
trainer.fit(module, DataLoader(Tokens(rows * ranks), BATCH))
save_losses(module.losses)
