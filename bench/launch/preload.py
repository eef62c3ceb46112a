"""Imported once by a fork server, so that no trial waits for imports. Should never initialize CUDA.

Beside what every trial needs, the packages named in BENCH_PRELOAD are imported, and no others.
"""

import gc
import os
import signal
from contextlib import suppress

from bench.launch import driver, stragglers

# Its children end with it, and would otherwise keep it alive when the launcher's process is gone.
stragglers.signal_at_parents_end(signal.SIGKILL)

_PARTS = {
    # deepspeed.initialize imports the second one, and it imports all of torch.compile.
    "deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.original_muon"),
    "lightning": ("lightning.pytorch", "lightning.fabric"),
}
"""What to import of a package of which the name alone would not do."""
_packages = [name for name in os.environ.get("BENCH_PRELOAD", "").split(",") if name]

initialized_by = ""
"""The first module whose import initialized CUDA. There should be none: children of this process cannot use it then."""

for _module in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    *(part for name in _packages for part in _PARTS.get(name, (name,))),
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
    if not initialized_by and driver.initialized():
        initialized_by = _module

# A collection would walk a million objects that never die, in every trial and perhaps in a timed window.
gc.collect()
gc.freeze()
