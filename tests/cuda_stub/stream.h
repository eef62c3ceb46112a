/* What is asked of a stream: done before the call returns or, with FAKE_STREAMS, later by the stream's thread. */
#pragma once
#include <cuda_runtime_api.h>

/* What a stream has done when its `number`-th task is done. */
struct moment {
    struct queue *queue;
    long number;
};

int streams_are_threads(void);
struct moment stream_do(cudaStream_t stream, void (*work)(void *), void *data);
/* What is asked of the stream from now on is done after that moment. */
void stream_wait(cudaStream_t stream, struct moment moment);
/* The calling thread waits, which is not counted. */
void host_wait(struct moment moment);
/* For all streams of all devices. */
void host_wait_for_all(void);
