"""``NeuralNetClassifier.fit`` of skorch, which has no accumulation."""

import torch
from skorch import NeuralNetClassifier
from small import BATCH, model, rows

features, labels = rows(12).tensors
net = NeuralNetClassifier(
    model(),
    criterion=torch.nn.CrossEntropyLoss,
    batch_size=BATCH,
    max_epochs=1,
    train_split=None,
    verbose=0,
)
net.fit(features.numpy(), labels.numpy())
