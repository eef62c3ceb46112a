/* cuDNN: its fused attention, which torch prefers on an H100, is planned and "executed"; nothing else is used here.
 *
 * A plan is asked for by descriptors that have attributes. The one that matters: heuristics find one engine, which needs
 * no work space. Every other answer is a zero.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "counters.h"

#define DESCRIPTOR_BYTES 64
/* Of cudnn_graph.h 9.19. */
#define TYPE_INT64 3
#define TYPE_DESCRIPTOR 15
#define TYPE_INT32 23
#define ATTRIBUTE_HEURISTIC_RESULTS 202
#define ATTRIBUTE_CHOSEN_ENGINE 300

/* Of the cuDNN that torch 2.11 was compiled with, which it compares. */
size_t cudnnGetVersion(void) {
    return 91900;
}

int cudnnGetProperty(int which, int *value) {
    static const int version[] = {9, 19, 0}; /* MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL */
    *value = version[which];
    return 0;
}

int cudnnCreate(void **handle) {
    *handle = calloc(1, DESCRIPTOR_BYTES);
    return 0;
}

int cudnnBackendCreateDescriptor(int type, void **made) {
    (void)type;
    *made = calloc(1, DESCRIPTOR_BYTES);
    return 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return 0;
}

int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t room, int64_t *num_found, void *found) {
    (void)descriptor;
    size_t size = type == TYPE_INT64 ? sizeof(int64_t) : type == TYPE_INT32 ? sizeof(int32_t) : 0;
    int64_t number = size > 0;
    if (type == TYPE_DESCRIPTOR)
        number = attribute == ATTRIBUTE_HEURISTIC_RESULTS || attribute == ATTRIBUTE_CHOSEN_ENGINE;
    if (num_found != NULL)
        *num_found = number;
    if (room > 0 && found != NULL)
        memset(found, 0, size); /* such as work space and shared memory, of which torch allows only so much */
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *arguments) {
    (void)handle, (void)plan, (void)arguments;
    count(LIBRARY);
    return 0;
}

const char *cudnnGetErrorString(int status) {
    return status == 0 ? "CUDNN_STATUS_SUCCESS" : "an error that the stub has no words for";
}

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size > 0)
        *text = '\0';
}
