"""``Learner.fit`` of fastai with its ``GradientAccumulation``, which counts samples."""

from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from small import BATCH, N, batches, model
from torch.nn import CrossEntropyLoss

data = DataLoaders(batches(5 * N), batches(1))
learner = Learner(data, model(), loss_func=CrossEntropyLoss(), cbs=GradientAccumulation(N * BATCH))
with learner.no_bar(), learner.no_logging():
    learner.fit(1, 1e-3)
