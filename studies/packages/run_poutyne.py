"""``Model.fit`` of Poutyne."""

import poutyne
import torch
from small import N, batches, model

net = model()
trained = poutyne.Model(net, torch.optim.SGD(net.parameters(), 0.1), "cross_entropy")
trained.fit_generator(batches(5 * N), epochs=1, batches_per_step=N, verbose=False)
