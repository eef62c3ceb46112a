/* Memory of devices and pinned memory of the host: reserved address space that costs nothing until it is touched.
 *
 * Copies and memsets are real up to FAKE_COPY_MAX bytes (1 MiB): enough for what frameworks tell each other, such as
 * sizes and pickled objects, while the weights of a model of 8 G parameters take no memory of this machine.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "counters.h"
#include "device.h"
#include "machine.h"

#define PAGE ((size_t)2 << 20) /* cudaMalloc gives whole pages of this size */
#define HOST (-1)

/* Known blocks, sorted by address. torch's allocator asks for few and large ones. */
static struct block {
    char *begin;
    size_t size;
    int gpu; /* or HOST, for pinned memory */
} *blocks;
static size_t num_blocks, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The index of the first block that begins after an address; hold the lock. */
static size_t after(const char *address) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int find(const void *address, struct block *found) {
    pthread_mutex_lock(&lock);
    size_t index = after(address);
    int is_known = index > 0 && (char *)address < blocks[index - 1].begin + blocks[index - 1].size;
    if (is_known)
        *found = blocks[index - 1];
    pthread_mutex_unlock(&lock);
    return is_known;
}

static void add(char *begin, size_t size, int gpu) {
    pthread_mutex_lock(&lock);
    if (num_blocks == room) {
        room = room ? 2 * room : 1024;
        blocks = realloc(blocks, room * sizeof *blocks);
        if (blocks == NULL)
            abort();
    }
    size_t index = after(begin);
    memmove(blocks + index + 1, blocks + index, (num_blocks++ - index) * sizeof *blocks);
    blocks[index] = (struct block){begin, size, gpu};
    pthread_mutex_unlock(&lock);
}

static int take_out(const void *begin, struct block *found) {
    pthread_mutex_lock(&lock);
    size_t index = after(begin);
    int is_known = index > 0 && blocks[index - 1].begin == begin;
    if (is_known) {
        *found = blocks[index - 1];
        memmove(blocks + index - 1, blocks + index, (num_blocks-- - index) * sizeof *blocks);
    }
    pthread_mutex_unlock(&lock);
    return is_known;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    cudaError_t error = device_begin();
    if (error != cudaSuccess)
        return error;
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    int gpu = device_current_gpu();
    if (machine_gpu_take(gpu, size) != 0)
        return cudaErrorMemoryAllocation;
    void *begin = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) {
        machine_gpu_give(gpu, size);
        return cudaErrorMemoryAllocation;
    }
    add(begin, size, gpu);
    *address = begin;
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    struct block block;
    if (address == NULL)
        return device_begin();
    count(BLOCKING_FREE);
    if (!take_out(address, &block))
        return cudaErrorInvalidValue;
    munmap(block.begin, block.size);
    machine_gpu_give(block.gpu, block.size);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    cudaError_t error = device_begin();
    int gpu = device_current_gpu();
    machine_gpu_take(gpu, 0); /* asking makes a context */
    *total_bytes = machine_gpu_bytes();
    *free_bytes = *total_bytes - machine_gpu_used(gpu);
    return error;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    if (posix_memalign(address, 4096, bytes ? bytes : 1) != 0)
        return cudaErrorMemoryAllocation;
    add(*address, bytes ? bytes : 1, HOST);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    struct block block;
    if (address == NULL)
        return cudaSuccess;
    count(BLOCKING_FREE);
    if (!take_out(address, &block))
        return cudaErrorInvalidValue;
    free(address);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    (void)flags;
    add(address, bytes, HOST);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    struct block block;
    return take_out(address, &block) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    struct block block;
    memset(found, 0, sizeof *found);
    found->hostPointer = (void *)address;
    if (!find(address, &block)) {
        found->type = cudaMemoryTypeUnregistered;
        found->device = -2; /* cudaInvalidDeviceId */
        return device_begin();
    }
    found->devicePointer = (void *)address;
    if (block.gpu == HOST) {
        found->type = cudaMemoryTypeHost;
    } else {
        found->type = cudaMemoryTypeDevice;
        found->device = device_of_gpu(block.gpu);
        found->hostPointer = NULL;
    }
    return device_begin();
}

static size_t copied_at_most(void) {
    const char *text = getenv("FAKE_COPY_MAX");
    return text ? (size_t)atoll(text) : (size_t)1 << 20;
}

/* Memory of the host that is not pinned: a copy from or to it makes the host wait. */
static int is_pageable(const void *address) {
    struct block block;
    return !find(address, &block);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    (void)stream;
    count(is_pageable(to) || is_pageable(from) ? BLOCKING_COPY : COPY);
    if (bytes <= copied_at_most())
        memmove(to, from, bytes);
    return device_begin();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    count(BLOCKING_COPY);
    if (bytes <= copied_at_most())
        memmove(to, from, bytes);
    return device_begin();
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    (void)to_device;
    (void)from_device;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    count(COPY);
    if (bytes <= copied_at_most())
        memset(to, value, bytes);
    return device_begin();
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, NULL);
}
