/* What is counted in each process, and the hook that is called where the host waits for the device.
 *
 * tests/cuda_stub/counters.py reads both; the order of the kinds is the same there.
 */
#pragma once

enum kind {
    KERNEL,            /* kernels launched by torch */
    LIBRARY,           /* products by cuBLAS and attention by cuDNN, each at least one kernel */
    COPY,              /* copies and memsets that a stream does by itself */
    COLLECTIVE,        /* calls of NCCL */
    STREAM_SYNC,       /* the host waits, from here on */
    DEVICE_SYNC,
    EVENT_SYNC,
    BLOCKING_COPY,     /* cudaMemcpy, and asynchronous ones to memory of the host that is not pinned */
    BLOCKING_FREE,     /* cudaFree and cudaFreeHost wait for the device */
    NUM_KINDS
};

extern long fake_counts[NUM_KINDS];
void count(enum kind kind);
void fake_set_hook(void (*called_where_the_host_waits)(int kind));
