"""Where frameworks make the host wait inside a timed window, with torch 2.11, Lightning 2.6.6 and DeepSpeed 0.19.8."""

FRAMEWORKS = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "lightning/",
    "deepspeed/",
    "accelerate/",
    "transformers/trainer",
)
"""Files that are a backend's framework; torch's others, and transformers' models, are called by the bench itself."""
NATIVE_FRAMEWORKS = ("c10d::Reducer", "c10d::Logger", "c10d::CudaTimer")
"""The same in C++, where no Python runs."""

ZERO2 = {
    "stream: deepspeed/runtime/zero/stage_1_and_2.py:3248 has_overflow": 1,
    "copy: deepspeed/runtime/utils.py:887 mask_nan_or_inf_with_val_inplace": 1,
    "stream: deepspeed/runtime/utils.py:887 mask_nan_or_inf_with_val_inplace": 1,
    "stream: deepspeed/runtime/utils.py:888 mask_nan_or_inf_with_val_inplace": 1,
    "stream: deepspeed/runtime/utils.py:233 is_invalid_grad_norm": 1,
}
"""An update asks whether gradients are finite, and what their norm is."""
ZERO3_ALONE = {
    "stream: deepspeed/runtime/zero/partition_parameters.py:84 wait": 16,
    "stream: deepspeed/runtime/zero/partition_parameters.py:114 wait": 244,
    "stream: deepspeed/runtime/zero/stage3.py:1414 independent_gradient_partition_epilogue": 4,
    "copy: deepspeed/runtime/zero/stage3.py:2483 get_grad_norm_direct": 1,
    "stream: deepspeed/runtime/zero/stage3.py:2483 get_grad_norm_direct": 1,
    "stream: deepspeed/runtime/utils.py:233 is_invalid_grad_norm": 1,
}
"""Where there is nobody to gather from, every block that is "gathered" synchronizes the stream, and so does every
parameter outside blocks."""
ZERO3_DEFAULTS_ALONE = {
    where: times for where, times in ZERO3_ALONE.items() if ":84" not in where
} | {"stream: deepspeed/runtime/zero/partition_parameters.py:114 wait": 13}
"""DeepSpeed's defaults keep all gathered from forward to backward."""
ZERO2_BESIDE = ZERO2 | {"device: deepspeed/accelerator/cuda_accelerator.py:89 synchronize": 4}
"""Where gradients go to other ranks, each micro-batch ends in a synchronization of the device."""
ZERO3_BESIDE = {
    where: times for where, times in ZERO3_ALONE.items() if "partition_parameters" not in where
}
ASKED = {"stream: accelerate/utils/deepspeed.py:291 get_global_grad_norm": 1}
"""HF Trainer reads the norm of the gradient at every update, to log it."""
TRAINER = {
    "copy: lightning/pytorch/loops/training_epoch_loop.py:261 _broadcast_sigterm_tensor": 4,
    "stream: lightning/pytorch/loops/training_epoch_loop.py:261 _broadcast_sigterm_tensor": 4,
    "stream: lightning/pytorch/loops/training_epoch_loop.py:269 _broadcast_sigterm_tensor": 4,
}
"""Lightning's Trainer tells all ranks in every micro-batch whether one of them got SIGTERM."""

FSDP2_DEFERRED_OFFLOAD = {
    "event: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:610 finalize_backward": 272,
}
"""The first gradient of each parameter in a window comes to pinned memory, for which the end of the backward waits."""
FSDP2_OFFLOAD = FSDP2_DEFERRED_OFFLOAD | {
    "copy: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:626 foreach_reduce": 816,
    "stream: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:626 foreach_reduce": 816,
}
"""Further ones are added on the host, which waits for each."""
ZERO2_STEP = "deepspeed/runtime/zero/stage_1_and_2.py"
ZERO2_OFFLOAD = {
    f"stream: {ZERO2_STEP}:1792 update_offload_overflow_tracker": 272,
    f"stream: {ZERO2_STEP}:1929 complete_grad_norm_calculation_for_cpu_offload": 272,
    f"event: {ZERO2_STEP}:1737 _wait_for_offload_copies": 1,
    f"copy: {ZERO2_STEP}:3239 has_overflow": 1,
    f"stream: {ZERO2_STEP}:3239 has_overflow": 1,
    f"stream: {ZERO2_STEP}:3248 has_overflow": 1,
    f"copy: {ZERO2_STEP}:1944 complete_grad_norm_calculation_for_cpu_offload": 1,
    f"stream: {ZERO2_STEP}:1944 complete_grad_norm_calculation_for_cpu_offload": 1,
    f"stream: {ZERO2_STEP}:1949 complete_grad_norm_calculation_for_cpu_offload": 1,
}
"""An update asks of each parameter whether its gradient is finite, and what its norm is."""
ZERO3_STEP = "deepspeed/runtime/zero/stage3.py"
ZERO3_OFFLOAD = {where: times for where, times in ZERO3_ALONE.items() if "norm" not in where} | {
    f"copy: {ZERO3_STEP}:1989 complete_grad_norm_calculation_for_cpu_offload": 1,
    f"stream: {ZERO3_STEP}:1989 complete_grad_norm_calculation_for_cpu_offload": 2,
    f"copy: {ZERO3_STEP}:2003 complete_grad_norm_calculation_for_cpu_offload": 1,
    f"stream: {ZERO3_STEP}:2003 complete_grad_norm_calculation_for_cpu_offload": 1,
    **{where: times for where, times in ZERO2.items() if "mask_nan" in where},
}

WAITS: dict[int, dict[str, dict[str, int]]] = {
    1: {
        "fsdp2-offload-eager": FSDP2_OFFLOAD,
        "fsdp2-offload-deferred": FSDP2_DEFERRED_OFFLOAD,
        "deepspeed-zero2-offload": ZERO2_OFFLOAD,
        "deepspeed-zero3-offload": ZERO3_OFFLOAD,
        "deepspeed-zero2-eager": ZERO2,
        "deepspeed-zero3-eager": ZERO3_ALONE,
        "deepspeed-zero2-defaults-eager": ZERO2,
        "deepspeed-zero3-defaults-eager": ZERO3_DEFAULTS_ALONE,
        "lightning-deepspeed-zero2": ZERO2,
        "lightning-deepspeed-zero2-corrected": ZERO2,
        "lightning-deepspeed-zero3": ZERO3_ALONE,
        "lightning-deepspeed-zero3-corrected": ZERO3_ALONE,
        "accelerate-deepspeed-zero2": ZERO2,
        "accelerate-deepspeed-zero3": ZERO3_ALONE,
        "hf-trainer-deepspeed-zero2": ZERO2 | ASKED,
        "hf-trainer-deepspeed-zero3": ZERO3_ALONE | ASKED,
    },
    2: {
        "deepspeed-zero2-eager": ZERO2_BESIDE,
        "deepspeed-zero3-eager": ZERO3_BESIDE,
        "deepspeed-zero2-defaults-eager": ZERO2_BESIDE,
        "deepspeed-zero3-defaults-eager": ZERO3_BESIDE
        | {
            "device: deepspeed/accelerator/cuda_accelerator.py:89 synchronize": 1
        },  # gathers small parameters
        "lightning-ddp": TRAINER,
        "lightning-fsdp2": TRAINER,
        "lightning-deepspeed-zero2": ZERO2_BESIDE | TRAINER,
        "lightning-deepspeed-zero2-corrected": ZERO2_BESIDE | TRAINER,
        "lightning-deepspeed-zero3": ZERO3_BESIDE | TRAINER,
        "lightning-deepspeed-zero3-corrected": ZERO3_BESIDE | TRAINER,
        "accelerate-deepspeed-zero2": ZERO2_BESIDE,
        "accelerate-deepspeed-zero3": ZERO3_BESIDE,
        "hf-trainer-deepspeed-zero2": ZERO2_BESIDE | ASKED,
        "hf-trainer-deepspeed-zero3": ZERO3_BESIDE | ASKED,
    },
}
"""By world size and backend: for what the host waits, ``file:line function`` or C++, and how often per window of 4
micro-batches. Backends that are not here never make it wait."""

RACES = {"lightning-ddp": {"lightning/pytorch/strategies/ddp.py:196 _setup_model"}}
"""By backend: the earlier of two accesses that no wait between streams orders. Lightning builds DDP on a stream of its
own, where DDP copies rank 0's weights; the first forward does not wait for it. Here all ranks draw equal weights."""
