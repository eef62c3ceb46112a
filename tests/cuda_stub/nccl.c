/* NCCL: communicators of real processes over shared memory.
 *
 * Every collective makes the ranks meet, and fails on all of them unless each asks for the same (operation, number of
 * elements, dtype, reduction, root): where real ranks would hang or add up garbage, these say so. With values all
 * payloads are sent and reduced, in chunks of SLOT bytes per rank, in the order of ranks and rounded at each addition, as
 * NCCL's kernels round. Without values larger payloads are not moved, since nothing that is worth it was computed.
 *
 * Two ranks of a communicator on one GPU are refused, unless NCCL_HOSTID makes them hosts of their own.
 *
 * Where streams are threads (stream.c), a call returns at once, as NCCL's does, and ranks that disagree are told by
 * ncclCommGetAsyncError. Calls of one communicator are carried out one after the other on whatever streams.
 *
 *   FAKE_NCCL_KILL=RANK:CALL   that rank of the first communicator is killed (SIGKILL) inside its CALL-th collective
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "counters.h"
#include "device.h"
#include "stream.h"
#include "values.h"

/* Of nccl.h 2.28. */
typedef enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 } Result;
typedef enum { SUM, PROD, MAX, MIN, AVG, NUM_OPS } Reduction;
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8A, FLOAT8B } Type;
typedef struct {
    char internal[128];
} UniqueId;
#define NO_COLOR (-1)

#define SLOT ((size_t)256 << 10) /* of each rank in /dev/shm, which containers limit to 64 MiB */
#define BOX ((size_t)32 << 10)
#define MAX_RANKS 64
#define MAX_NAME 100
#define NUM_YIELDS 100 /* before a rank that waits for others sleeps */
#define WAIT_US 50

typedef enum { ALL_GATHER, ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, SPLIT } Operation;
static const char *const NAMES[] = {"all-gather", "all-reduce", "reduce",    "reduce-scatter",
                                    "broadcast",  "all-to-all", "splitting"};

/* What a rank asks of a collective; all ranks of a communicator must ask for the same. */
struct request {
    size_t count;
    int operation, type, reduction, root;
};

struct member {
    uint64_t host;
    int gpu;
    struct request request;
    char payload[SLOT];
};

/* What one rank sends another, in parts. */
struct box {
    volatile int is_full;
    size_t bytes;
    char payload[BOX];
};

/* What the ranks of a communicator share; a box from each to each follows the members. */
struct meeting {
    volatile int num_arrived, round, is_aborted;
    struct member members[];
};

struct communicator {
    int rank, size, num_splits, num_calls, is_first;
    char name[MAX_NAME];
    struct meeting *meeting;
    struct moment last; /* call */
    Result failed;
};

static size_t shared_bytes(const struct communicator *own) {
    return sizeof(struct meeting) + own->size * (sizeof(struct member) + own->size * sizeof(struct box));
}

static struct box *box_between(const struct communicator *own, int from, int to) {
    return (struct box *)(own->meeting->members + own->size) + from * own->size + to;
}

static int num_communicators;
static __thread char last_error[400];
static float multipliers[256]; /* of reductions made by ncclRedOpCreatePreMulSum */
static int num_multipliers;

/* All ranks of a communicator arrive; REMOTE_ERROR if one of them aborts it meanwhile. */
static Result wait_for_all(struct communicator *own) {
    struct meeting *meeting = own->meeting;
    if (own->size == 1)
        return SUCCESS;
    int round = meeting->round;
    if (__sync_add_and_fetch(&meeting->num_arrived, 1) == own->size) {
        meeting->num_arrived = 0;
        __sync_synchronize();
        meeting->round = round + 1;
        return SUCCESS;
    }
    for (int tries = 0; meeting->round == round; tries++) {
        if (meeting->is_aborted)
            return REMOTE_ERROR;
        if (tries < NUM_YIELDS)
            sched_yield();
        else
            usleep(WAIT_US);
    }
    return SUCCESS;
}

/* What NCCL takes for the host of this process: NCCL_HOSTID, or otherwise its name. */
static uint64_t host_hash(void) {
    const char *given = getenv("NCCL_HOSTID");
    char name[256] = "";
    if (given == NULL && gethostname(name, sizeof name - 1) == 0)
        given = name;
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const char *at = given ? given : ""; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    return hash;
}

/* As NCCL: two ranks of one communicator may not have the same host and GPU. */
static Result require_gpus_of_their_own(const struct communicator *own) {
    const struct member *members = own->meeting->members;
    for (int rank = 0; rank < own->size; rank++)
        for (int other = 0; other < rank; other++)
            if (members[rank].host == members[other].host && members[rank].gpu == members[other].gpu) {
                snprintf(last_error, sizeof last_error,
                         "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", rank, other,
                         1 + members[rank].gpu);
                fprintf(stderr, "stub of NCCL: %s\n", last_error);
                return INVALID_USAGE;
            }
    return SUCCESS;
}

static Result join(struct communicator *own) {
    size_t size = shared_bytes(own);
    own->is_first = num_communicators++ == 0;
    int file = shm_open(own->name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        return SYSTEM_ERROR;
    own->meeting = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (own->meeting == MAP_FAILED)
        return SYSTEM_ERROR;
    own->meeting->members[own->rank].host = host_hash();
    own->meeting->members[own->rank].gpu = device_current_gpu();
    Result result = wait_for_all(own);
    shm_unlink(own->name); /* all have it open; whoever comes second finds it gone */
    return result == SUCCESS ? require_gpus_of_their_own(own) : result;
}

static struct communicator *new_communicator(int size, int rank) {
    struct communicator *made = calloc(1, sizeof *made);
    made->size = size;
    made->rank = rank;
    return made;
}

Result ncclGetVersion(int *version) {
    *version = 22809;
    return SUCCESS;
}

Result ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id->internal, 8, 0) == 8 ? SUCCESS : SYSTEM_ERROR;
}

Result ncclCommInitRankConfig(void **made, int size, UniqueId id, int rank, void *config) {
    (void)config;
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
        return INVALID_ARGUMENT;
    struct communicator *own = new_communicator(size, rank);
    uint64_t name;
    memcpy(&name, id.internal, sizeof name);
    snprintf(own->name, MAX_NAME, "/cuda_stub_%016lx", (unsigned long)name);
    *made = own;
    return join(own);
}

Result ncclCommInitRank(void **made, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, NULL);
}

Result ncclCommInitRankScalable(void **made, int size, int rank, int num_ids, UniqueId ids[], void *config) {
    return num_ids < 1 ? INVALID_ARGUMENT : ncclCommInitRankConfig(made, size, ids[0], rank, config);
}

Result ncclCommCount(struct communicator *own, int *size) {
    *size = own->size;
    return SUCCESS;
}

Result ncclCommUserRank(struct communicator *own, int *rank) {
    *rank = own->rank;
    return SUCCESS;
}

Result ncclCommGetAsyncError(struct communicator *own, Result *found) {
    *found = own->meeting->is_aborted ? REMOTE_ERROR : own->failed;
    return SUCCESS;
}

/* A thread of this process may be inside a collective, so the memory stays mapped. */
Result ncclCommAbort(struct communicator *own) {
    own->meeting->is_aborted = 1;
    return SUCCESS;
}

Result ncclCommDestroy(struct communicator *own) {
    host_wait(own->last);
    munmap(own->meeting, shared_bytes(own));
    free(own);
    return SUCCESS;
}

const char *ncclGetErrorString(Result result) {
    switch (result) {
    case SUCCESS: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    }
    return "unknown result code";
}

const char *ncclGetLastError(struct communicator *own) {
    (void)own;
    return last_error;
}

static size_t size_of(Type type) {
    switch (type) {
    case INT32: case UINT32: case FLOAT32: return 4;
    case INT64: case UINT64: case FLOAT64: return 8;
    case FLOAT16: case BFLOAT16: return 2;
    default: return 1;
    }
}

/* Long double holds every number of every type. */
static long double load(const char *from, Type type, size_t index) {
    switch (type) {
    case INT8: return ((const int8_t *)from)[index];
    case INT32: return ((const int32_t *)from)[index];
    case UINT32: return ((const uint32_t *)from)[index];
    case INT64: return ((const int64_t *)from)[index];
    case UINT64: return ((const uint64_t *)from)[index];
    case FLOAT16: return ((const _Float16 *)from)[index];
    case FLOAT32: return ((const float *)from)[index];
    case FLOAT64: return ((const double *)from)[index];
    case BFLOAT16: {
        uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    default: return ((const uint8_t *)from)[index];
    }
}

static void store(char *to, Type type, size_t index, long double value) {
    switch (type) {
    case INT8: ((int8_t *)to)[index] = (int8_t)value; break;
    case INT32: ((int32_t *)to)[index] = (int32_t)value; break;
    case UINT32: ((uint32_t *)to)[index] = (uint32_t)value; break;
    case INT64: ((int64_t *)to)[index] = (int64_t)value; break;
    case UINT64: ((uint64_t *)to)[index] = (uint64_t)value; break;
    case FLOAT16: ((_Float16 *)to)[index] = (_Float16)(float)value; break;
    case FLOAT32: ((float *)to)[index] = (float)value; break;
    case FLOAT64: ((double *)to)[index] = (double)value; break;
    case BFLOAT16: {
        float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        /* Round to nearest, ties to even; NaN stays one. */
        uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
        ((uint16_t *)to)[index] = single != single ? 0x7fc0 : (uint16_t)(rounded >> 16);
        break;
    }
    default: ((uint8_t *)to)[index] = (uint8_t)value;
    }
}

static int is_floating(Type type) {
    return type >= FLOAT16;
}

/* Averages and scaled sums multiply every input before it is added, in fp32 unless the type is wider: NCCL's order. */
static long double scaled(long double value, Type type, int reduction, int size) {
    if (reduction >= NUM_OPS)
        return type == FLOAT64 ? value * multipliers[reduction - NUM_OPS]
                               : (long double)((float)value * multipliers[reduction - NUM_OPS]);
    if (reduction == AVG && is_floating(type))
        return type == FLOAT64 ? (long double)((double)value * (1.0 / size)) : (long double)((float)value * (1.0f / size));
    return value;
}

static long double combined(long double left, long double right, int reduction) {
    switch (reduction) {
    case PROD: left *= right; break;
    case MAX: return left > right ? left : right;
    case MIN: return left < right ? left : right;
    default: left += right;
    }
    return left;
}

static long double rounded(long double value, Type type) {
    char element[8];
    store(element, type, 0, value);
    return load(element, type, 0);
}

/* Elements `first` to `first + count` of all ranks' payloads, reduced. */
static void reduce(struct communicator *own, char *to, size_t first, size_t count, Type type, int reduction) {
    for (size_t i = 0; i < count; i++) {
        long double sum = 0;
        for (int rank = 0; rank < own->size; rank++) {
            long double value = load(own->meeting->members[rank].payload, type, first + i);
            value = rounded(scaled(value, type, reduction, own->size), type);
            sum = rank == 0 ? value : rounded(combined(sum, value, reduction), type);
        }
        if (reduction == AVG && !is_floating(type))
            sum = (long double)((int64_t)sum / own->size);
        store(to, type, i, sum);
    }
}

static void die_if_asked(struct communicator *own) {
    const char *asked = getenv("FAKE_NCCL_KILL");
    int rank, call;
    own->num_calls++;
    if (asked && own->is_first && sscanf(asked, "%d:%d", &rank, &call) == 2 && own->rank == rank &&
        own->num_calls == call)
        kill(getpid(), SIGKILL);
}

/* Make the ranks meet over a request with what each sends, `bytes` of it; SUCCESS if all ask for the same.
 *
 * `bytes` is at most SLOT. Read the others' payloads after it, and then call wait_for_all.
 */
static Result meet(struct communicator *own, struct request request, const void *sent, size_t bytes) {
    struct member *members = own->meeting->members;
    die_if_asked(own);
    members[own->rank].request = request;
    memcpy(members[own->rank].payload, sent, bytes);
    Result result = wait_for_all(own);
    for (int rank = 0; result == SUCCESS && rank < own->size; rank++) {
        struct request *other = &members[rank].request;
        if (memcmp(other, &members[0].request, sizeof *other) == 0)
            continue;
        snprintf(last_error, sizeof last_error,
                 "ranks disagree: rank 0 asks for %s of %zu elements (type %d, reduction %d, root %d), "
                 "rank %d for %s of %zu (type %d, reduction %d, root %d)",
                 NAMES[members[0].request.operation], members[0].request.count, members[0].request.type,
                 members[0].request.reduction, members[0].request.root, rank, NAMES[other->operation], other->count,
                 other->type, other->reduction, other->root);
        fprintf(stderr, "stub of NCCL: %s\n", last_error);
        result = INVALID_USAGE;
    }
    return result;
}

Result ncclCommSplit(struct communicator *parent, int color, int key, void **made, void *config) {
    (void)config;
    int mine[2] = {color, key};
    *made = NULL;
    count(COLLECTIVE);
    host_wait(parent->last);
    Result result = meet(parent, (struct request){2, SPLIT, INT32, 0, 0}, mine, sizeof mine);
    if (result != SUCCESS)
        return result;
    struct communicator *own = new_communicator(0, 0);
    for (int rank = 0; rank < parent->size; rank++) {
        const int *other = (const int *)parent->meeting->members[rank].payload;
        if (other[0] != color)
            continue;
        own->size++;
        own->rank += other[1] < key || (other[1] == key && rank < parent->rank);
    }
    parent->num_splits++;
    result = wait_for_all(parent);
    if (result != SUCCESS || color == NO_COLOR) {
        free(own);
        return result;
    }
    int length = snprintf(own->name, MAX_NAME, "%s_%d_%d", parent->name, parent->num_splits, color);
    *made = own;
    return length < MAX_NAME ? join(own) : SYSTEM_ERROR;
}

struct call {
    struct communicator *own;
    const char *send;
    char *receive;
    struct request request;
};

/* The ranks' payloads hold `bytes` from `offset` on of what each sends: what of it this rank receives. */
static void receive(const struct call *call, size_t offset, size_t bytes) {
    const struct request *request = &call->request;
    struct communicator *own = call->own;
    struct member *members = own->meeting->members;
    size_t size = size_of(request->type), part = request->count * size;
    int is_split = request->operation == REDUCE_SCATTER || request->operation == ALL_TO_ALL;
    size_t begin = is_split ? own->rank * part : 0, end = begin + part;
    size_t from = offset > begin ? offset : begin, until = offset + bytes < end ? offset + bytes : end;
    if (from >= until)
        return;
    switch (request->operation) {
    case ALL_GATHER:
    case ALL_TO_ALL:
        for (int rank = 0; rank < own->size; rank++)
            memcpy(call->receive + rank * part + from - begin, members[rank].payload + from - offset, until - from);
        break;
    case BROADCAST:
        memcpy(call->receive + from, members[request->root].payload, until - from);
        break;
    default:
        if (request->operation != REDUCE || own->rank == request->root)
            reduce(own, call->receive + from - begin, (from - offset) / size, (until - from) / size, request->type,
                   request->reduction);
    }
}

static Result carry_out(const struct call *call) {
    const struct request *request = &call->request;
    struct communicator *own = call->own;
    int is_split = request->operation == REDUCE_SCATTER || request->operation == ALL_TO_ALL;
    size_t bytes = (is_split ? own->size : 1) * request->count * size_of(request->type), offset = 0, chunk;
    int is_moved = values_are_on() || bytes <= SLOT;
    do {
        chunk = bytes - offset < SLOT ? bytes - offset : SLOT;
        Result result;
        if (offset == 0) {
            result = meet(own, *request, call->send, is_moved ? chunk : 0);
        } else {
            memcpy(own->meeting->members[own->rank].payload, call->send + offset, chunk);
            result = wait_for_all(own);
        }
        if (result != SUCCESS)
            return result;
        if (is_moved)
            receive(call, offset, chunk);
        result = wait_for_all(own);
        if (result != SUCCESS)
            return result;
        offset += chunk;
    } while (is_moved && offset < bytes);
    return SUCCESS;
}

static void carry_out_and_free(void *data) {
    struct call *call = data;
    if (call->own->failed == SUCCESS)
        call->own->failed = carry_out(call);
    free(call);
}

/* Do something after all that the communicator was asked before; how it ends is known at once without threads. */
static Result ask(struct communicator *own, cudaStream_t stream, void (*work)(void *), void *data) {
    if (!streams_are_threads()) {
        own->failed = SUCCESS;
        stream_do(stream, work, data);
        return own->failed;
    }
    stream_wait(stream, own->last);
    own->last = stream_do(stream, work, data);
    return SUCCESS;
}

static Result begin(struct call call, cudaStream_t stream) {
    count(COLLECTIVE);
    struct call *kept = malloc(sizeof *kept);
    *kept = call;
    return ask(call.own, stream, carry_out_and_free, kept);
}

Result ncclAllGather(const void *send, void *receive, size_t count, Type type, struct communicator *own, void *stream) {
    return begin((struct call){own, send, receive, {count, ALL_GATHER, type, 0, 0}}, stream);
}

Result ncclAllReduce(const void *send, void *receive, size_t count, Type type, int reduction, struct communicator *own,
                     void *stream) {
    return begin((struct call){own, send, receive, {count, ALL_REDUCE, type, reduction, 0}}, stream);
}

Result ncclReduce(const void *send, void *receive, size_t count, Type type, int reduction, int root,
                  struct communicator *own, void *stream) {
    return begin((struct call){own, send, receive, {count, REDUCE, type, reduction, root}}, stream);
}

Result ncclReduceScatter(const void *send, void *receive, size_t count, Type type, int reduction,
                         struct communicator *own, void *stream) {
    return begin((struct call){own, send, receive, {count, REDUCE_SCATTER, type, reduction, 0}}, stream);
}

Result ncclBroadcast(const void *send, void *receive, size_t count, Type type, int root, struct communicator *own,
                     void *stream) {
    send = own->rank == root ? send : receive;
    return begin((struct call){own, send, receive, {count, BROADCAST, type, 0, root}}, stream);
}

Result ncclBcast(void *buffer, size_t count, Type type, int root, struct communicator *own, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, own, stream);
}

Result ncclAlltoAll(const void *send, void *receive, size_t count, Type type, struct communicator *own, void *stream) {
    return begin((struct call){own, send, receive, {count, ALL_TO_ALL, type, 0, 0}}, stream);
}

/* Point-to-point calls of a group, which are carried out together, in any order of the peers. */
struct letters {
    struct communicator *own;
    cudaStream_t stream;
    int num;
    struct letter {
        char *data;
        size_t left;
        int peer, is_sent;
    } each[2 * MAX_RANKS];
};

static __thread struct letters *open_letters;
static __thread int depth;

/* Moves a part; whether there was anything to move, or room for it. */
static int step(const struct communicator *own, struct letter *letter) {
    struct box *box = letter->is_sent ? box_between(own, own->rank, letter->peer)
                                      : box_between(own, letter->peer, own->rank);
    if (box->is_full == letter->is_sent)
        return 0;
    __sync_synchronize();
    if (letter->is_sent)
        memcpy(box->payload, letter->data, box->bytes = letter->left < BOX ? letter->left : BOX);
    else if (box->bytes <= letter->left)
        memcpy(letter->data, box->payload, box->bytes);
    else
        abort(); /* more was sent than is received */
    letter->data += box->bytes;
    letter->left -= box->bytes;
    __sync_synchronize();
    box->is_full = letter->is_sent;
    return 1;
}

/* Whether no letter before it, between the same two in the same direction, is still under way. */
static int is_next(const struct letters *letters, int index) {
    const struct letter *letter = &letters->each[index];
    for (const struct letter *other = letters->each; other < letter; other++)
        if (other->left && other->peer == letter->peer && other->is_sent == letter->is_sent)
            return 0;
    return letter->left > 0;
}

static void deliver(void *data) {
    struct letters *letters = data;
    for (int is_left = 1; is_left && letters->own->failed == SUCCESS;) {
        int is_moved = is_left = 0;
        for (int i = 0; i < letters->num; i++) {
            is_moved |= is_next(letters, i) && step(letters->own, &letters->each[i]);
            is_left |= letters->each[i].left > 0;
        }
        if (letters->own->meeting->is_aborted)
            letters->own->failed = REMOTE_ERROR;
        if (is_left && !is_moved)
            usleep(WAIT_US);
    }
    free(letters);
}

Result ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

Result ncclGroupEnd(void) {
    struct letters *letters = open_letters;
    if (--depth || letters == NULL)
        return SUCCESS;
    open_letters = NULL;
    return ask(letters->own, letters->stream, deliver, letters);
}

/* Groups are of one communicator and one stream, as torch's are. */
static Result post(struct communicator *own, cudaStream_t stream, struct letter letter) {
    count(COLLECTIVE);
    ncclGroupStart();
    if (open_letters == NULL)
        open_letters = calloc(1, sizeof *open_letters);
    open_letters->own = own;
    open_letters->stream = stream;
    if (open_letters->num == 2 * MAX_RANKS)
        return INVALID_USAGE;
    open_letters->each[open_letters->num++] = letter;
    return ncclGroupEnd();
}

Result ncclSend(const void *data, size_t count, Type type, int peer, struct communicator *own, void *stream) {
    return post(own, stream, (struct letter){(char *)data, count * size_of(type), peer, 1});
}

Result ncclRecv(void *data, size_t count, Type type, int peer, struct communicator *own, void *stream) {
    return post(own, stream, (struct letter){data, count * size_of(type), peer, 0});
}

Result ncclRedOpCreatePreMulSum(int *reduction, void *scalar, Type type, int residence, struct communicator *own) {
    (void)residence, (void)own; /* both kinds of memory are the host's */
    int index = __sync_fetch_and_add(&num_multipliers, 1) % 256;
    multipliers[index] = (float)load(scalar, type, 0);
    *reduction = NUM_OPS + index;
    return SUCCESS;
}
