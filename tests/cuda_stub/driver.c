/* libcuda.so.1: whether CUDA is initialized, which the bench asks before it forks; generate.py adds the rest. */
#include "machine.h"

#define NOT_INITIALIZED 3 /* CUDA_ERROR_NOT_INITIALIZED */

static int is_initialized;

int cuInit(unsigned flags) {
    (void)flags;
    is_initialized = 1;
    return 0;
}

int cuDeviceGetCount(int *count) {
    if (!is_initialized)
        return NOT_INITIALIZED;
    *count = machine_num_gpus();
    return 0;
}

int cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    (void)device;
    *flags = 0;
    *is_active = 1;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &is_initialized; /* any address but 0 */
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "the stub of the driver";
    return 0;
}
