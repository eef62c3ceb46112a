"""Imported once by the fork server, so that no trial waits for imports. Must never initialize CUDA."""

from contextlib import suppress

for _module in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "lightning.pytorch",
    "lightning.fabric",
    "bench.workload.llama",
):
    with suppress(ImportError):
        __import__(_module)
