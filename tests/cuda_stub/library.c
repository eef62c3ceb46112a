/* cuBLAS and CUPTI, as far as torch looks at what they answer; generate.py adds the calls that only succeed. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "counters.h"

#define HANDLE_BYTES 1024 /* more than any of their opaque descriptors has */

static int make(void **handle) {
    *handle = calloc(1, HANDLE_BYTES);
    return 0;
}

int cublasCreate_v2(void **handle) {
    return make(handle);
}

int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    return *mode = 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    (void)handle;
    return *mode = 0;
}

size_t cublasLtGetVersion(void) {
    return 130100;
}

int cublasLtMatmulDescCreate(void **made, int compute, int scale) {
    (void)compute, (void)scale;
    return make(made);
}

int cublasLtMatmulPreferenceCreate(void **made) {
    return make(made);
}

int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    (void)type, (void)rows, (void)columns, (void)leading;
    return make(made);
}

/* cublasLtMatmulHeuristicResult_t of cublasLt.h 13.1. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, struct heuristic found[], int *num_found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)asked;
    memset(found, 0, sizeof found[0]);
    *num_found = 1;
    return 0;
}

int cublasLtMatmul(void) {
    count(LIBRARY);
    return 0;
}

/* No record is ever there: torch's profiler sees nothing on the device. */
int cuptiActivityGetNextRecord(void) {
    return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED */
}

int cuptiGetVersion(uint32_t *version) {
    *version = 130001;
    return 0;
}

int cuptiGetResultString(int result, const char **text) {
    (void)result;
    *text = "the stub of CUPTI";
    return 0;
}
