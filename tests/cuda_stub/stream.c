/* Streams and events.
 *
 * Without FAKE_STREAMS what is asked of a stream is done when the call returns. With FAKE_STREAMS=SEED each stream has a
 * thread, which does it later, in any order that events and waits allow. Some tasks are held: they begin when somebody
 * waits for them, or after some milliseconds. The seed chooses how many of each stream, and which.
 *
 * All streams are as torch makes them: they do not wait for the default stream of their device. An event's time is the
 * host's when it was reached, so durations are those of Python, not of a device.
 */
#define _GNU_SOURCE
#include "stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "counters.h"
#include "device.h"
#include "machine.h"
#include "values.h"

#define MAX_QUEUES 1024
#define MAX_HELD_MS 64 /* longer than the host needs for the step of a small model */

struct task {
    struct task *next;
    void (*work)(void *); /* or NULL: wait for `after` */
    void *data;
    struct moment after;
};

/* A stream; tasks are numbered from 1. */
struct queue {
    int priority;
    pthread_cond_t arrived, finished;
    struct task *first, *last;
    long asked, done, wanted; /* somebody waits until `wanted` tasks are done */
    unsigned random;
    int held_one_in; /* tasks; 0 for none */
};

struct event {
    unsigned flags;
    int is_recorded;
    struct moment moment;
    struct timespec at;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct queue defaults[MAX_GPUS], *started[MAX_QUEUES];
static int num_started, num_working, is_over;

static const char *seed;

__attribute__((constructor)) static void read_seed(void) {
    seed = getenv("FAKE_STREAMS");
}

int streams_are_threads(void) {
    return seed != NULL;
}

static struct queue *queue_of(cudaStream_t stream) {
    return stream == NULL || stream == cudaStreamLegacy ? &defaults[device_current_gpu()] : (struct queue *)stream;
}

static struct timespec now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time;
}

/* The functions below until stream_do are called with the lock. */

static void wait_until_done(struct moment moment) {
    struct queue *queue = moment.queue;
    if (queue->wanted < moment.number) {
        queue->wanted = moment.number;
        pthread_cond_signal(&queue->arrived);
    }
    while (queue->done < moment.number && !is_over)
        pthread_cond_wait(&queue->finished, &lock);
}

/* Until somebody waits for the next task, or its time has come. */
static void hold(struct queue *queue) {
    struct timespec end = now();
    end.tv_nsec += (1 + rand_r(&queue->random) % MAX_HELD_MS) * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    while (queue->wanted <= queue->done && pthread_cond_timedwait(&queue->arrived, &lock, &end) != ETIMEDOUT)
        ;
}

static void *serve(void *served) {
    struct queue *queue = served;
    fake_on_device(1);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (queue->first == NULL || is_over)
            pthread_cond_wait(&queue->arrived, &lock);
        struct task *task = queue->first;
        if (queue->held_one_in && rand_r(&queue->random) % queue->held_one_in == 0)
            hold(queue);
        if (task->work == NULL) {
            wait_until_done(task->after);
        } else {
            num_working++;
            pthread_mutex_unlock(&lock);
            task->work(task->data);
            pthread_mutex_lock(&lock);
            num_working--;
        }
        queue->first = task->next;
        queue->done++;
        free(task);
        pthread_cond_broadcast(&queue->finished);
    }
    return NULL;
}

/* When the process ends no thread may work on, since what it works with is destroyed. */
static void stop(void) {
    pthread_mutex_lock(&lock);
    is_over = 1;
    for (int i = 0; i < num_started; i++)
        pthread_cond_broadcast(&started[i]->finished);
    for (int tries = 0; num_working && tries < 1000; tries++) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}

static void start(struct queue *queue) {
    static const int rates[] = {0, 4, 32, 256};
    pthread_condattr_t monotonic;
    pthread_t thread;
    if (num_started == MAX_QUEUES)
        abort();
    if (num_started == 0)
        atexit(stop);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->arrived, &monotonic);
    pthread_cond_init(&queue->finished, &monotonic);
    queue->random = (unsigned)atoi(seed) * 7919 + (unsigned)(num_started * MAX_GPUS + device_current_gpu());
    rand_r(&queue->random);
    queue->held_one_in = rates[rand_r(&queue->random) % 4];
    started[num_started++] = queue;
    if (pthread_create(&thread, NULL, serve, queue) != 0)
        abort();
    pthread_detach(thread);
}

static struct moment add(struct queue *queue, struct task content) {
    struct task *task = malloc(sizeof *task);
    *task = content;
    if (queue->asked == 0)
        start(queue);
    if (queue->first == NULL)
        queue->first = task;
    else
        queue->last->next = task;
    queue->last = task;
    pthread_cond_signal(&queue->arrived);
    return (struct moment){queue, ++queue->asked};
}

struct moment stream_do(cudaStream_t stream, void (*work)(void *), void *data) {
    if (!streams_are_threads()) {
        int before = fake_on_device(1);
        work(data);
        fake_on_device(before);
        return (struct moment){NULL, 0};
    }
    pthread_mutex_lock(&lock);
    struct moment moment = add(queue_of(stream), (struct task){NULL, work, data, {NULL, 0}});
    pthread_mutex_unlock(&lock);
    return moment;
}

void stream_wait(cudaStream_t stream, struct moment moment) {
    pthread_mutex_lock(&lock);
    if (moment.queue && moment.queue->done < moment.number)
        add(queue_of(stream), (struct task){NULL, NULL, NULL, moment});
    pthread_mutex_unlock(&lock);
}

void host_wait(struct moment moment) {
    if (moment.queue == NULL)
        return;
    pthread_mutex_lock(&lock);
    wait_until_done(moment);
    pthread_mutex_unlock(&lock);
}

void host_wait_for_all(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_started; i++)
        wait_until_done((struct moment){started[i], started[i]->asked});
    pthread_mutex_unlock(&lock);
}

/* What the stream has been asked so far. */
static struct moment present(cudaStream_t stream) {
    struct queue *queue = queue_of(stream);
    pthread_mutex_lock(&lock);
    struct moment moment = {queue->asked ? queue : NULL, queue->asked};
    pthread_mutex_unlock(&lock);
    return moment;
}

static int is_past(struct moment moment) {
    pthread_mutex_lock(&lock);
    int answer = moment.queue == NULL || moment.queue->done >= moment.number;
    pthread_mutex_unlock(&lock);
    return answer;
}

void fake_stream_do(void *stream, void (*work)(void *), void *data) {
    stream_do(stream, work, data);
}

void fake_stream_wait(void *stream) {
    host_wait(present(stream));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    (void)flags;
    struct queue *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    *made = (cudaStream_t)stream;
    return device_begin();
}

cudaError_t cudaStreamCreate(cudaStream_t *made) {
    return cudaStreamCreateWithPriority(made, 0, 0);
}

/* Its thread may still work, so the memory stays. torch destroys none. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? queue_of(stream)->priority : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count(STREAM_SYNC);
    host_wait(present(stream));
    return device_begin();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return is_past(present(stream)) ? device_begin() : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void) {
    count(DEVICE_SYNC);
    host_wait_for_all();
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
    host_wait(present(stream));
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    stream_do(stream, function, data);
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

/* A stream may have yet to reach it: then the memory stays. */
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    if (!streams_are_threads())
        free(handle);
    return cudaSuccess;
}

static void stamp(void *event) {
    ((struct event *)event)->at = now();
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    (void)flags;
    struct event *event = (struct event *)handle;
    event->moment = stream_do(stream, stamp, event);
    event->is_recorded = 1;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    stream_wait(stream, ((struct event *)event)->moment);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return is_past(((struct event *)event)->moment) ? device_begin() : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    struct event *begin = (struct event *)first, *end = (struct event *)second;
    if ((begin->flags | end->flags) & cudaEventDisableTiming || !begin->is_recorded || !end->is_recorded)
        return cudaErrorInvalidResourceHandle;
    if (!is_past(begin->moment) || !is_past(end->moment))
        return cudaErrorNotReady;
    *milliseconds = (end->at.tv_sec - begin->at.tv_sec) * 1e3f + (end->at.tv_nsec - begin->at.tv_nsec) / 1e6f;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count(EVENT_SYNC);
    host_wait(((struct event *)event)->moment);
    return device_begin();
}
