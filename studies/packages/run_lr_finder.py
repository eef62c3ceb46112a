"""``LRFinder.range_test`` of torch-lr-finder."""

import torch
from small import N, batches, model
from torch_lr_finder import LRFinder

net = model()
optimizer = torch.optim.SGD(net.parameters(), 1e-4)
finder = LRFinder(net, optimizer, torch.nn.CrossEntropyLoss(), device="cpu")
finder.range_test(batches(20 * N), end_lr=0.1, num_iter=10, accumulation_steps=N)
