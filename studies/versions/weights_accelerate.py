"""The same through Accelerate's DeepSpeedPlugin and accumulate()."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import safe_get_full_fp32_param
from one_hot import WINDOWS, N, OneHot, print_weights


def train(config):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = OneHot()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(range(N * WINDOWS), batch_size=1)
    engine, optimizer, loader = accelerator.prepare(model, sgd, loader)
    for i in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(i))
            optimizer.step()
            optimizer.zero_grad()
    return 0 - safe_get_full_fp32_param(model.weights)


if __name__ == "__main__":
    print_weights(train)
