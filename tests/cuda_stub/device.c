/* Devices: how many, what they can do, which is current. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "machine.h"
#include "values.h"

static __thread int current;
static __thread cudaError_t last_error;
static int initialized_in; /* the process that initialized CUDA; its children cannot use it */
static int visible[MAX_GPUS], num_visible;

static int gpu_called(const char *name) {
    char *end;
    long index = strtol(name, &end, 10);
    if (end != name && *end == '\0')
        return index >= 0 && index < machine_num_gpus() ? (int)index : -1;
    for (int gpu = 0; gpu < machine_num_gpus(); gpu++) {
        char uuid[UUID_CHARACTERS];
        machine_gpu_uuid_text(gpu, uuid);
        if (strncmp(name, "GPU-", 4) == 0 && strncmp(name, uuid, strlen(name)) == 0)
            return gpu;
    }
    return -1;
}

static void read_visible(void) {
    const char *asked = getenv("CUDA_VISIBLE_DEVICES");
    if (asked == NULL) {
        for (num_visible = 0; num_visible < machine_num_gpus(); num_visible++)
            visible[num_visible] = num_visible;
        return;
    }
    char *names = strdup(asked), *rest = names, *name;
    while ((name = strsep(&rest, ",")) != NULL && num_visible < MAX_GPUS) {
        int gpu = gpu_called(name);
        if (gpu < 0)
            break; /* CUDA sees only what stands before the first that it does not know */
        visible[num_visible++] = gpu;
    }
    free(names);
}

static int is_failed;

void fake_fail(const char *text) {
    fprintf(stderr, "stub of CUDA: %s\n", text);
    is_failed = 1;
}

cudaError_t device_begin(void) {
    if (is_failed)
        return last_error = cudaErrorAssert;
    if (initialized_in == 0) {
        initialized_in = getpid();
        read_visible();
        /* The bench asks the driver's library whether CUDA was initialized. */
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
        int (*initialize)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
        if (initialize != NULL)
            initialize(0);
    }
    if (initialized_in != getpid())
        return last_error = cudaErrorInitializationError;
    return cudaSuccess;
}

int device_current_gpu(void) {
    device_begin();
    return current < num_visible ? visible[current] : 0;
}

int device_of_gpu(int gpu) {
    for (int device = 0; device < num_visible; device++)
        if (visible[device] == gpu)
            return device;
    return -1;
}

cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = device_begin();
    *count = num_visible;
    if (error != cudaSuccess)
        return error;
    return num_visible ? cudaSuccess : (last_error = cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return device_begin();
}

cudaError_t cudaSetDevice(int device) {
    cudaError_t error = device_begin();
    if (error != cudaSuccess)
        return error;
    if (device < 0 || device >= num_visible)
        return last_error = cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}

/* The one list of what an H100 can do; both questions below are answered from it. */
static const struct {
    int sms, threads_per_sm, threads_per_block, blocks_per_sm, registers, warp;
    int shared_block, shared_optin, shared_sm, grid_x, grid_yz, l2_bytes;
} h100 = {132, 2048, 1024, 32, 65536, 32, 49152, 232448, 233472, 2147483647, 65535, 50 << 20};

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    cudaError_t error = device_begin();
    if (error != cudaSuccess)
        return error;
    if (device < 0 || device >= num_visible)
        return last_error = cudaErrorInvalidDevice;
    memset(found, 0, sizeof *found);
    strcpy(found->name, GPU_NAME);
    machine_gpu_uuid(visible[device], (unsigned char *)found->uuid.bytes);
    found->totalGlobalMem = machine_gpu_bytes();
    found->major = 9;
    found->minor = 0;
    found->multiProcessorCount = h100.sms;
    found->maxThreadsPerMultiProcessor = h100.threads_per_sm;
    found->maxThreadsPerBlock = h100.threads_per_block;
    found->maxBlocksPerMultiProcessor = h100.blocks_per_sm;
    found->regsPerBlock = found->regsPerMultiprocessor = h100.registers;
    found->warpSize = h100.warp;
    found->sharedMemPerBlock = h100.shared_block;
    found->sharedMemPerBlockOptin = h100.shared_optin;
    found->sharedMemPerMultiprocessor = h100.shared_sm;
    found->maxGridSize[0] = h100.grid_x;
    found->maxGridSize[1] = found->maxGridSize[2] = h100.grid_yz;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = h100.threads_per_block;
    found->maxThreadsDim[2] = 64;
    found->l2CacheSize = h100.l2_bytes;
    found->memPitch = 2147483647;
    found->textureAlignment = 512;
    found->totalConstMem = 65536;
    found->unifiedAddressing = found->managedMemory = found->cooperativeLaunch = found->concurrentKernels = 1;
    found->memoryPoolsSupported = found->streamPrioritiesSupported = found->ECCEnabled = 1;
    found->asyncEngineCount = 3;
    found->pciBusID = 1 + visible[device];
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    cudaError_t error = device_begin();
    (void)device;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = h100.sms; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = h100.threads_per_sm; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = h100.threads_per_block; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = h100.blocks_per_sm; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = h100.registers; break;
    case cudaDevAttrWarpSize: *value = h100.warp; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = h100.shared_block; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = h100.shared_optin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = h100.shared_sm; break;
    case cudaDevAttrMaxGridDimX: *value = h100.grid_x; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = h100.grid_yz; break;
    case cudaDevAttrL2CacheSize: *value = h100.l2_bytes; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
    }
    return error;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return device_begin();
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    cudaError_t error = device_begin();
    snprintf(text, size, "00000000:%02X:00.0", device < num_visible ? visible[device] + 1 : 0);
    return error;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return device_begin();
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void) {
    return is_failed ? cudaErrorAssert : last_error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
};

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].text;
    return "an error that the stub has no words for";
}

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].name;
    return "cudaErrorUnknown";
}
