/* The machine that is pretended: how many GPUs, of what size, and which processes hold how much of them.
 *
 * Environment variables:
 *   FAKE_GPUS      number of GPUs (1)
 *   FAKE_MEM_MIB   memory of each, in MiB (81559, as an H100 with 80 GB reports)
 *   FAKE_MACHINE   a file that all processes of one machine map, so that those on one GPU share its memory and NVML
 *                  lists them; without it, every process is alone
 */
#pragma once
#include <stddef.h>

#define MAX_GPUS 16
#define UUID_CHARACTERS 48
#define GPU_NAME "NVIDIA H100 80GB HBM3"
#define DRIVER_VERSION "580.95.05"
#define CUDA_VERSION_NUMBER 13000
#define CONTEXT_BYTES ((size_t)600 << 20) /* what a process's CUDA context takes of a GPU, about */

int machine_num_gpus(void);
size_t machine_gpu_bytes(void);
void machine_gpu_uuid(int gpu, unsigned char uuid[16]);
/* As NVML and CUDA_VISIBLE_DEVICES write it. */
void machine_gpu_uuid_text(int gpu, char text[UUID_CHARACTERS]);

/* Bytes of a GPU that living processes hold, contexts included. */
size_t machine_gpu_used(int gpu);
/* Take so many bytes of a GPU for this process, and its context with the first; 0, or -1 if they are not there. */
int machine_gpu_take(int gpu, size_t bytes);
void machine_gpu_give(int gpu, size_t bytes);
/* Living processes with a context on a GPU: fills up to `limit` of both arrays, returns how many there are. */
int machine_gpu_processes(int gpu, int limit, int pids[], size_t bytes[]);
