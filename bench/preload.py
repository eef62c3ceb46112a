"""Imported once by the fork server, so that no trial waits for imports. Must never initialize CUDA."""

import gc
import sys
from contextlib import suppress

for _module in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    # deepspeed.initialize imports this one, and it imports all of torch.compile.
    "deepspeed.runtime.zero.muon.original_muon",
    "lightning.pytorch",
    "lightning.fabric",
    "safetensors.torch",
    "bench.workload.llama",
    "bench.probes.clock",
    "bench.probes.collectives",
    "bench.probes.memory",
    "bench.probes.update",
    "bench.trial",
):
    with suppress(ImportError):
        __import__(_module)

if "torch" in sys.modules:
    assert not sys.modules["torch"].cuda.is_initialized(), "children of a fork cannot use CUDA"
# A collection would walk a million objects that never die, in every trial and perhaps in a timed window.
gc.collect()
gc.freeze()
