"""Orders the gathers of DeepSpeed's ZeRO-3 after the update that they read, which DeepSpeed does not."""

from __future__ import annotations

from typing import Any


def gather_after_updates(engine: Any) -> None:
    """Make the stream on which ZeRO-3 gathers wait for the update, before the next forward; the host does not wait.

    DeepSpeed writes updated shards on the current stream (stage3.py: ``_reassign_or_swap_out_partitioned_parameters``)
    and gathers them on another (partition_parameters.py: ``_all_gather_dtype``), which never waits for the first.
    By default two things hide that, since they synchronize the device: the throughput timer, which ``zero_config``
    turns off, and the gather of small parameters after each update, of which ``zero_options`` leaves none.
    """
    from deepspeed.accelerator import get_accelerator

    gathers = engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
    ordered_steps = -1  # the initial weights are written on the current stream, too

    def wait(*_: Any) -> None:
        nonlocal ordered_steps
        if engine.global_steps != ordered_steps:
            gathers.wait_stream(get_accelerator().current_stream())
            ordered_steps = engine.global_steps

    if gathers is not None:  # None on the CPU
        engine.module.register_forward_pre_hook(wait, prepend=True)
