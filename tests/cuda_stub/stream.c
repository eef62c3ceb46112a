/* Streams and events. Nothing is ever pending: what is asked of a stream is done when the call returns.
 *
 * An event's time is the host's when it was recorded, so durations are those of Python, not of a device.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <time.h>

#include "counters.h"
#include "device.h"

struct stream {
    int priority;
};

struct event {
    unsigned flags;
    int is_recorded;
    struct timespec at;
};

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    (void)flags;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    *made = (cudaStream_t)stream;
    return device_begin();
}

cudaError_t cudaStreamCreate(cudaStream_t *made) {
    return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? ((struct stream *)stream)->priority : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    count(STREAM_SYNC);
    return device_begin();
}

cudaError_t cudaDeviceSynchronize(void) {
    count(DEVICE_SYNC);
    return device_begin();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *num_nodes) {
    (void)stream, (void)graph, (void)nodes, (void)edges, (void)num_nodes;
    *status = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    (void)flags;
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    (void)stream;
    function(data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    struct event *event = calloc(1, sizeof *event);
    event->flags = flags;
    *made = (cudaEvent_t)event;
    return device_begin();
}

cudaError_t cudaEventCreate(cudaEvent_t *made) {
    return cudaEventCreateWithFlags(made, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    (void)stream, (void)flags;
    struct event *event = (struct event *)handle;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    event->is_recorded = 1;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    struct event *begin = (struct event *)first, *end = (struct event *)second;
    if ((begin->flags | end->flags) & cudaEventDisableTiming || !begin->is_recorded || !end->is_recorded)
        return cudaErrorInvalidResourceHandle;
    *milliseconds = (end->at.tv_sec - begin->at.tv_sec) * 1e3f + (end->at.tv_nsec - begin->at.tv_nsec) / 1e6f;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    count(EVENT_SYNC);
    return cudaSuccess;
}
