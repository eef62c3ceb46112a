/* Devices as this process sees them: CUDA_VISIBLE_DEVICES is honoured, so device 0 need not be GPU 0. */
#pragma once
#include <cuda_runtime_api.h>

/* Initialize CUDA; what the runtime says in a process that was forked from one that had done so. */
cudaError_t device_begin(void);
/* The GPU behind the calling thread's current device. */
int device_current_gpu(void);
/* The device that a GPU is here, or -1. */
int device_of_gpu(int gpu);
