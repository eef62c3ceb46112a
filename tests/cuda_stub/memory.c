/* Memory of devices and pinned memory of the host: reserved address space that costs nothing until it is touched.
 *
 * Without values, copies and memsets are real up to FAKE_COPY_MAX bytes (1 MiB): enough for what frameworks tell each
 * other, such as sizes and pickled objects, while the weights of a model of 8 G parameters take no memory of this
 * machine. With values (values.h) all are real, but for those of an operator that gets its values from the CPU.
 *
 * The host cannot touch the memory of a device, as on a GPU: a thread that reads or writes it is ended by SIGSEGV, unless
 * it does what a stream was asked. That takes a processor with protection keys (pku); without them it is not noticed.
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
#include "stream.h"
#include "values.h"

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

static int key = -1;

static void make_key(void) {
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS); /* every other thread starts without access */
}

static int key_of_devices(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    return key;
}

int fake_on_device(int is_allowed) {
    if (key_of_devices() < 0)
        return is_allowed;
    int before = pkey_get(key) == 0;
    pkey_set(key, is_allowed ? 0 : PKEY_DISABLE_ACCESS);
    return before;
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
    if (key_of_devices() >= 0)
        pkey_mprotect(begin, size, PROT_READ | PROT_WRITE, key);
    add(begin, size, gpu);
    *address = begin;
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    struct block block;
    if (address == NULL)
        return device_begin();
    count(BLOCKING_FREE);
    host_wait_for_all();
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
    host_wait_for_all();
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

static int is_moved(size_t bytes) {
    return values_are_on() ? !is_in_operator() : bytes <= copied_at_most();
}

/* Memory of the host that is not pinned: a copy to it makes the host wait, and one from it is staged first. */
static int is_pageable(const void *address) {
    struct block block;
    return !find(address, &block);
}

struct copy {
    void *to;
    const void *from; /* or NULL: set to `value` */
    int value;
    size_t bytes;
    char staged[];
};

static void carry_out(void *data) {
    struct copy *copy = data;
    if (copy->from)
        memmove(copy->to, copy->from, copy->bytes);
    else
        memset(copy->to, copy->value, copy->bytes);
    free(copy);
}

static struct moment copy(void *to, const void *from, int value, size_t bytes, cudaStream_t stream) {
    int is_staged = streams_are_threads() && from && is_pageable(from);
    struct copy *made = malloc(sizeof *made + (is_staged ? bytes : 0));
    *made = (struct copy){to, from, value, bytes};
    if (is_staged)
        made->from = memcpy(made->staged, from, bytes);
    return stream_do(stream, carry_out, made);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    count(is_pageable(to) || is_pageable(from) ? BLOCKING_COPY : COPY);
    if (is_moved(bytes)) {
        struct moment moment = copy(to, from, 0, bytes, stream);
        if (is_pageable(to))
            host_wait(moment);
    }
    return device_begin();
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    count(is_pageable(to) || is_pageable(from) ? BLOCKING_COPY : COPY);
    for (size_t row = 0; row < height && is_moved(width * height); row++) {
        struct moment moment =
            copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, 0, width, stream);
        if (is_pageable(to))
            host_wait(moment);
    }
    return device_begin();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    count(BLOCKING_COPY);
    if (is_moved(bytes))
        host_wait(copy(to, from, 0, bytes, NULL));
    return device_begin();
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    (void)to_device;
    (void)from_device;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    count(COPY);
    if (is_moved(bytes))
        copy(to, NULL, value, bytes, stream);
    return device_begin();
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, NULL);
}
