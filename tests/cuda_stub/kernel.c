/* Kernels: registered, asked about and launched, and nothing is computed.
 *
 * With values, a kernel that belongs to no operator is an error: it would go without them.
 */
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "counters.h"
#include "values.h"

#define SYMBOL_BYTES 65536 /* as large as constant memory is: no variable on a device is larger */

static int are_on;
static __thread int is_inside;

void fake_values_are_on(void) {
    are_on = 1;
}

int values_are_on(void) {
    return are_on;
}

int fake_in_operator(int inside) {
    int before = is_inside;
    is_inside = inside;
    return before;
}

int is_in_operator(void) {
    return is_inside;
}

static cudaError_t launch(void) {
    count(KERNEL);
    if (are_on && !is_inside)
        fake_fail("a kernel that is launched outside an operator of torch has no values");
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return launch();
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    (void)config, (void)function, (void)arguments;
    return launch();
}

/* What nvcc makes of <<<...>>>: the configuration is pushed, popped by the kernel's own stub, and handed to a launch. */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    (void)grid, (void)block, (void)shared, (void)stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    grid->x = grid->y = grid->z = 1;
    *block = *grid;
    *shared = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* Called by every library with kernels when it is loaded. */
static void *registered;

void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    return &registered;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    (void)function;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = 90;
    found->numRegs = 32;
    found->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_size,
                                                                   size_t shared, unsigned flags) {
    (void)function, (void)block_size, (void)shared, (void)flags;
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared, 0);
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    (void)symbol;
    *address = calloc(1, SYMBOL_BYTES);
    return cudaSuccess;
}

static long does_nothing(void) {
    return 0;
}

/* What torch asks the driver for directly (memory mapping, stream writes) is not used by its default allocator. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    (void)symbol, (void)version, (void)flags;
    *function = (void *)does_nothing;
    if (result)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
