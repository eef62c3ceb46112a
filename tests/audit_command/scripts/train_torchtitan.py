"""torchtitan's Trainer with its debug model on chats, on the CPU: train_torchtitan.py VARIANT [DIMENSION].

torchtitan trains on accelerators. This is replaced, and all else is its own, or in its config:

- its device, which is CUDA where it finds none, and that device's functions for memory, which `torch.cpu` lacks;
- where Triton is missing, the module with its kernels for one kind of expert parallelism, which all models import;
- `torch.distributed.set_timeout`, which torch 2.13 has under another name;
- the operation by which FSDP2 adds gradients up: gloo has no PREMUL_SUM.
"""

import importlib.util
import json
import os
import random
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.tools.utils


class Processor:
    """`torch.cpu`, which has no functions for memory."""

    device_count, set_device = torch.cpu.device_count, torch.cpu.set_device
    synchronize = torch.cpu.synchronize
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device: "CPU")
    get_device_properties = staticmethod(lambda device: types.SimpleNamespace(total_memory=2**30))
    memory_stats = staticmethod(lambda device: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


class Kernels(types.ModuleType):
    """A module from which every kernel can be imported, and none called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Processor
if importlib.util.find_spec("triton") is None:
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[name] = Kernels(name)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.utils import clip_grad_norm_, dist_sum_tensor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import sft_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

variant, dimension = sys.argv[1], (sys.argv[2:] or ["shard"])[0]
ACCUMULATE, BATCH = int(os.environ.get("ACCUMULATE", "4")), int(os.environ.get("BATCH", "2"))
WORDS = [f"word{number}" for number in range(96)]
SPECIAL = ["[UNK]", "<begin>", "<end>", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
UPDATES, LENGTH, LAYERS = 4, 32, 2


class MeanOfMeans(Trainer):
    """Divides by N times the tokens of the micro-batch, and not by those of the window."""

    factor = ACCUMULATE

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        own = dist_sum_tensor((labels != -100).sum(), self.parallel_dims.get_mesh("batch"))
        return super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=own * self.factor
        )


class MicroBatch(MeanOfMeans):
    """Divides by the tokens of the micro-batch alone."""

    factor = 1


class ClipEach(Trainer):
    """Clips what is accumulated so far at each micro-batch."""

    def forward_backward_step(self, **batch):
        loss = super().forward_backward_step(**batch)
        parameters = [p for part in self.model_parts for p in part.parameters()]
        clip_grad_norm_(parameters, self.config.training.max_norm)
        return loss


def save_assets(folder):
    """A tokenizer of whole words and chats with answers of 1 to 12 words."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    settings = {"bos_token": "<begin>", "eos_token": "<end>", "chat_template": TEMPLATE}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    chance = random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(400):
            question = " ".join(chance.choices(WORDS, k=chance.randint(3, 12)))
            answer = " ".join(chance.choices(WORDS, k=chance.randint(1, 12)))
            print(json.dumps({"question": question, "answer": answer}), file=file)


def configured(folder):
    """torchtitan's debug config for chats, of 2 layers, with rows of 32 tokens, in fp32, without checkpoints."""
    config = sft_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:  # the other kinds of attention need a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.dataloader.load_dataset_kwargs = {
        "data_files": str(folder / "chats.jsonl"),
        "split": "train",
        "cache_dir": str(folder / "cache"),
    }
    replicas = int(os.environ["WORLD_SIZE"])
    if variant.startswith("whole"):
        config.loss = config.loss.loss_fn
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a later torch
    if dimension == "replicate":
        config.parallelism.data_parallel_replicate_degree = 2
    elif dimension == "tensor":
        config.parallelism.tensor_parallel_degree = 2
        replicas //= 2
    training = config.training
    training.local_batch_size = BATCH
    training.global_batch_size = BATCH * ACCUMULATE * replicas
    training.seq_len, training.steps, training.gc_freq = LENGTH, UPDATES, 1000
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    config.checkpoint.enable = False
    config.debug.seed = 0
    return config


TRAINERS = {
    "mean-of-means": MeanOfMeans,
    "micro-batch": MicroBatch,
    "clip-each": ClipEach,
}


def main():
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        save_assets(Path(folder))
        trainer = TRAINERS.get(variant, Trainer)(configured(Path(folder)))
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    if variant == "whole-averaged":
                        module.set_gradient_divide_factor(float(dist.get_world_size()))
        trainer.train()
        trainer.close()
    dist.destroy_process_group()


main()
