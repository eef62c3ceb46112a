"""The same through Lightning's DeepSpeedStrategy, which a subclass lets run on the CPU."""

import torch
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from one_hot import WINDOWS, N, OneHot, print_weights


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
        if not self._config_initialized:  # newer versions do it later
            self._format_config()
            self._config_initialized = True

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
        use_distributed_sampler=False,  # which would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    changes = []
    module.on_train_batch_end = lambda *_: changes.append(
        0 - safe_get_full_fp32_param(module.model.weights)
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(N * WINDOWS), batch_size=1))
    return changes[-1]


if __name__ == "__main__":
    print_weights(train)
