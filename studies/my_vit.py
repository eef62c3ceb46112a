"""A ViT of transformers on random images, as a workload: ``--workload my_vit:ViT`` in the folder of this file."""

import torch
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

CONFIG = ViTConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    image_size=32,
    patch_size=8,
    num_labels=10,
)


class ViT:
    entropy_floor = flops_per_sample = None
    tokens_per_sample = (CONFIG.image_size // CONFIG.patch_size) ** 2  # patches

    def __init__(self, spec):
        self.seed = spec.seed

    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ViTForImageClassification(CONFIG).train()

    def blocks(self, model):
        return list(model.vit.layers)

    def data(self, num_samples):
        """Images and labels; each sample has a generator of its own."""
        images, labels = [], []
        for sample in range(num_samples):
            generator = torch.Generator().manual_seed(self.seed + sample)
            images.append(torch.randn(3, CONFIG.image_size, CONFIG.image_size, generator=generator))
            labels.append(torch.randint(CONFIG.num_labels, (), generator=generator))
        return {"images": torch.stack(images), "labels": torch.stack(labels)}

    def loss(self, model, batch):
        return cross_entropy(model(pixel_values=batch["images"]).logits.float(), batch["labels"])
