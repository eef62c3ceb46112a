"""Which micro-batches of two epochs of six reach an update under Lightning's DeepSpeedStrategy, by stage; N = 4."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

logger.setLevel(logging.ERROR)
# Compile nothing.
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
N = 4


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(12))

    def training_step(self, i, _):
        return self.weights[i].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_batch_end(self, *_):
        self.change = 0 - safe_get_full_fp32_param(self.weights)


class StrategyOnCPU(DeepSpeedStrategy):
    """The strategy wants CUDA; these three methods are all that keeps it from the CPU."""

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        self.parallel_devices = [torch.device("cpu", 0)]
        self.set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:  # newer versions do it later
            self._format_config()
            self._config_initialized = True

    def _get_process_group_backend(self):
        return "gloo"


class Numbered(torch.utils.data.Dataset):
    """Six items, which are numbered on in the second epoch."""

    def __init__(self):
        self.taken = 0

    def __len__(self):
        return 6

    def __getitem__(self, _):
        self.taken += 1
        return self.taken - 1


for stage in (1, 2, 3):
    module = Module()
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
    }
    trainer = Trainer(
        strategy=StrategyOnCPU(config=config),
        accumulate_grad_batches=N,
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Numbered(), batch_size=1))
    reached = [i for i, weight in enumerate(module.change.tolist(), start=1) if weight]
    print(
        json.dumps({"case": f"ZeRO-{stage}", "measured": reached, "right": list(range(1, 13))}),
        flush=True,
    )
