"""The weight of each micro-batch in two updates of a DeepSpeed engine, by stage and offload."""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from one_hot import WINDOWS, N, OneHot, print_weights


def train(config):
    model = OneHot()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    for i in range(N * WINDOWS):
        engine.backward(engine(torch.tensor(i)))
        engine.step()
    return 0 - safe_get_full_fp32_param(model.weights)


if __name__ == "__main__":
    print_weights(train)
