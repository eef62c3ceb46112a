"""The same through Lightning's DeepSpeedStrategy, which a subclass lets run on the CPU."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

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


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = OneHot()

    def training_step(self, i, _):
        return self.model(i)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class StrategyOnCPU(DeepSpeedStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        self.parallel_devices = [torch.device("cpu", 0)]
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _get_process_group_backend(self):
        return "gloo"


def train(config):
    module = Module()
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        del config[key]
    trainer = Trainer(
        strategy=StrategyOnCPU(config=config),
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=N,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    changes = []
    module.on_train_batch_end = lambda *_: changes.append(0 - safe_get_full_fp32_param(module.model.weights))
    trainer.fit(module, torch.utils.data.DataLoader(range(N * WINDOWS), batch_size=1))
    return changes[-1]


if __name__ == "__main__":
    logger.setLevel(logging.ERROR)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    for stage in (1, 2, 3):
        for offload in (False, True):
            case = f"ZeRO-{stage}{', offload_optimizer' if offload else ''}"
            try:
                weights = train(config_of(stage, offload)).tolist()
                measured = [[round(w, 4) for w in weights[first : first + N]] for first in range(0, N * WINDOWS, N)]
            except Exception as error:
                measured = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(json.dumps({"case": case, "measured": measured, "right": [[1 / N] * N] * WINDOWS}), flush=True)
