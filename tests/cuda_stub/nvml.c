/* libnvidia-ml.so.1: what nvidia-ml-py, torch and the bench ask. What is not here, nvidia-ml-py reports as a function
 * that an older driver lacks, and the bench leaves empty.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "machine.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

#define POWER_MW 350000
#define POWER_LIMIT_MW 700000
#define CLOCK_MHZ 1980
#define MEMORY_CLOCK_MHZ 2619
#define TOPOLOGY_NODE 40 /* NVML_TOPOLOGY_NODE: both are of one NUMA node */
#define CLOCK_MEMORY 2   /* NVML_CLOCK_MEM */

static void *handle_of(int gpu) {
    return (void *)(intptr_t)(gpu + 1);
}

static int gpu_of(void *handle) {
    return (int)(intptr_t)handle - 1;
}

static int answer(char *to, unsigned size, const char *text) {
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlInit(void) {
    return SUCCESS;
}

int nvmlInit_v2(void) {
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int nvmlShutdown(void) {
    return SUCCESS;
}

const char *nvmlErrorString(int error) {
    return error == NOT_SUPPORTED ? "Not Supported" : error == NOT_FOUND ? "Not Found" : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return answer(text, size, DRIVER_VERSION);
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

int nvmlDeviceGetCount(unsigned *count) {
    *count = machine_num_gpus();
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    return nvmlDeviceGetCount(count);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= machine_num_gpus())
        return INVALID_ARGUMENT;
    *handle = handle_of(index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2 || number < 1 || (int)number > machine_num_gpus())
        return NOT_FOUND;
    *handle = handle_of(number - 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *asked, void **handle) {
    for (int gpu = 0; gpu < machine_num_gpus(); gpu++) {
        char uuid[UUID_CHARACTERS];
        machine_gpu_uuid_text(gpu, uuid);
        if (strcmp(uuid, asked) == 0) {
            *handle = handle_of(gpu);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    *index = gpu_of(handle);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    (void)handle;
    return answer(text, size, GPU_NAME);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    char uuid[UUID_CHARACTERS];
    machine_gpu_uuid_text(gpu_of(handle), uuid);
    return answer(text, size, uuid);
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    found->total = machine_gpu_bytes();
    found->used = machine_gpu_used(gpu_of(handle));
    found->free = found->total - found->used;
    return SUCCESS;
}

/* nvmlProcessInfo_v2_t; version 3 of the question answers with it. */
struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_info *found) {
    int pids[64];
    size_t bytes[64];
    unsigned room = *count;
    *count = machine_gpu_processes(gpu_of(handle), 64, pids, bytes);
    if (*count > room)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        found[i] = (struct process_info){pids[i], bytes[i], ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process_info *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found); /* torch, for its message on memory */
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_info *found) {
    (void)handle, (void)found;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    (void)handle;
    *current = *pending = 0;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(void *handle, int *current, int *pending) {
    (void)handle;
    *current = *pending = 1;
    return SUCCESS;
}

/* As if the GPU drew the same power since the machine was started. */
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    struct timespec now;
    (void)handle;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = now.tv_sec * (unsigned long long)POWER_MW + now.tv_nsec / 1000000 * POWER_MW / 1000;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    (void)handle;
    *milliwatts = POWER_MW;
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    (void)handle;
    *milliwatts = POWER_LIMIT_MW;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) {
    (void)handle;
    *mhz = kind == CLOCK_MEMORY ? MEMORY_CLOCK_MHZ : CLOCK_MHZ;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *mhz) {
    return nvmlDeviceGetClockInfo(handle, kind, mhz);
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    (void)handle, (void)sensor;
    *celsius = 40;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    (void)handle;
    *reasons = 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation) {
    (void)handle;
    *generation = 5;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *lanes) {
    (void)handle;
    *lanes = 16;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *is_active) {
    (void)handle;
    *is_active = link < 18 && machine_num_gpus() > 1;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(void *first, void *second, int *level) {
    (void)first, (void)second;
    *level = TOPOLOGY_NODE;
    return SUCCESS;
}

/* torch refuses a library that lacks these; it asks them only for memory that is shared between machines. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    (void)handle, (void)link, (void)type;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *found) {
    (void)handle, (void)link, (void)found;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetGpuFabricInfoV(void *handle, void *found) {
    (void)handle, (void)found;
    return NOT_SUPPORTED;
}
