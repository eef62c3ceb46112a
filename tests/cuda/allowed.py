"""Where frameworks make the host wait inside a timed window, with torch 2.11, Lightning 2.6.6 and DeepSpeed 0.19.8."""

FRAMEWORKS = ("torch/distributed/", "torch/nn/parallel/", "lightning/", "deepspeed/")
"""Files that are a backend's framework; torch's others, and transformers, are called by the bench itself."""
NATIVE_FRAMEWORKS = ("c10d::Reducer", "c10d::Logger", "c10d::CudaTimer")
"""The same in C++, where no Python runs."""

WAITS: dict[int, dict[str, dict[str, int]]] = {1: {}, 2: {}}
"""By world size and backend: ``KIND file:line function`` or C++, and how often per window of 4 micro-batches."""
