/* NCCL: communicators of real processes over shared memory.
 *
 * Every collective makes the ranks meet, and fails on all of them unless each asks for the same (operation, number of
 * elements, dtype, reduction, root): where real ranks would hang or add up garbage, these say so. Payloads of up to
 * SLOT bytes per rank are really sent and reduced, in NCCL's order of arithmetic; of larger ones nothing is moved, since
 * the stub's kernels have computed nothing that is worth it. A call returns when all ranks have made it, while NCCL's
 * returns at once and its kernel waits.
 *
 *   FAKE_NCCL_KILL=RANK:CALL   that rank of the first communicator is killed (SIGKILL) inside its CALL-th collective
 *
 * Point-to-point calls are refused: no backend makes them.
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

/* Of nccl.h 2.28. */
typedef enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 } Result;
typedef enum { SUM, PROD, MAX, MIN, AVG, NUM_OPS } Reduction;
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8A, FLOAT8B } Type;
typedef struct {
    char internal[128];
} UniqueId;
#define NO_COLOR (-1)

#define SLOT ((size_t)256 << 10) /* of each rank in /dev/shm, which containers limit to 64 MiB */
#define MAX_RANKS 64
#define MAX_NAME 100
#define WAIT_US 50

/* What a rank asks of a collective; all ranks of a communicator must ask for the same. */
struct request {
    char operation[16];
    size_t count;
    int type, reduction, root;
};

struct member {
    struct request request;
    char payload[SLOT];
};

/* What the ranks of a communicator share. */
struct meeting {
    volatile int num_arrived, round, is_aborted;
    struct member members[];
};

struct communicator {
    int rank, size, num_splits, num_calls, is_first;
    char name[MAX_NAME];
    struct meeting *meeting;
};

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
    while (meeting->round == round) {
        if (meeting->is_aborted)
            return REMOTE_ERROR;
        usleep(WAIT_US);
    }
    return SUCCESS;
}

static Result join(struct communicator *own) {
    size_t size = sizeof(struct meeting) + own->size * sizeof(struct member);
    own->is_first = num_communicators++ == 0;
    int file = shm_open(own->name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        return SYSTEM_ERROR;
    own->meeting = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (own->meeting == MAP_FAILED)
        return SYSTEM_ERROR;
    Result result = wait_for_all(own);
    shm_unlink(own->name); /* all have it open; whoever comes second finds it gone */
    return result;
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
    *found = own->meeting->is_aborted ? REMOTE_ERROR : SUCCESS;
    return SUCCESS;
}

/* A thread of this process may be inside a collective, so the memory stays mapped. */
Result ncclCommAbort(struct communicator *own) {
    own->meeting->is_aborted = 1;
    return SUCCESS;
}

Result ncclCommDestroy(struct communicator *own) {
    munmap(own->meeting, sizeof(struct meeting) + own->size * sizeof(struct member));
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

static long double combined(long double left, long double right, Type type, int reduction) {
    switch (reduction) {
    case PROD: left *= right; break;
    case MAX: return left > right ? left : right;
    case MIN: return left < right ? left : right;
    default: left += right;
    }
    return !is_floating(type) ? left : type == FLOAT64 ? (long double)(double)left : (long double)(float)left;
}

/* Elements `first` to `first + count` of all ranks' payloads, reduced. */
static void reduce(struct communicator *own, char *to, size_t first, size_t count, Type type, int reduction) {
    for (size_t i = 0; i < count; i++) {
        long double sum = 0;
        for (int rank = 0; rank < own->size; rank++) {
            long double value = load(own->meeting->members[rank].payload, type, first + i);
            value = scaled(value, type, reduction, own->size);
            sum = rank == 0 ? value : combined(sum, value, type, reduction);
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
 * Read the others' payloads after it, if `bytes` is at most SLOT, and then call wait_for_all.
 */
static Result meet(struct communicator *own, struct request request, const void *sent, size_t bytes) {
    struct member *members = own->meeting->members;
    count(COLLECTIVE);
    die_if_asked(own);
    members[own->rank].request = request;
    if (bytes <= SLOT)
        memcpy(members[own->rank].payload, sent, bytes);
    Result result = wait_for_all(own);
    for (int rank = 0; result == SUCCESS && rank < own->size; rank++) {
        struct request *other = &members[rank].request;
        if (memcmp(other, &members[0].request, sizeof *other) == 0)
            continue;
        snprintf(last_error, sizeof last_error,
                 "ranks disagree: rank 0 asks for %s of %zu elements (type %d, reduction %d, root %d), "
                 "rank %d for %s of %zu (type %d, reduction %d, root %d)",
                 members[0].request.operation, members[0].request.count, members[0].request.type,
                 members[0].request.reduction, members[0].request.root, rank, other->operation, other->count,
                 other->type, other->reduction, other->root);
        fprintf(stderr, "stub of NCCL: %s\n", last_error);
        result = INVALID_USAGE;
    }
    return result;
}

/* All bytes of a request are set, so that memcmp may compare it. */
static struct request asked(const char *operation, size_t count, Type type, int reduction, int root) {
    struct request request;
    memset(&request, 0, sizeof request);
    strncpy(request.operation, operation, sizeof request.operation - 1);
    request.count = count;
    request.type = type;
    request.reduction = reduction;
    request.root = root;
    return request;
}

Result ncclCommSplit(struct communicator *parent, int color, int key, void **made, void *config) {
    (void)config;
    int mine[2] = {color, key};
    *made = NULL;
    Result result = meet(parent, asked("split", 2, INT32, 0, 0), mine, sizeof mine);
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

Result ncclAllGather(const void *send, void *receive, size_t count, Type type, struct communicator *own, void *stream) {
    (void)stream;
    size_t bytes = count * size_of(type);
    Result result = meet(own, asked("all-gather", count, type, 0, 0), send, bytes);
    if (result != SUCCESS)
        return result;
    for (int rank = 0; bytes <= SLOT && rank < own->size; rank++)
        memcpy((char *)receive + rank * bytes, own->meeting->members[rank].payload, bytes);
    return wait_for_all(own);
}

Result ncclAllReduce(const void *send, void *receive, size_t count, Type type, int reduction, struct communicator *own,
                     void *stream) {
    (void)stream;
    size_t bytes = count * size_of(type);
    Result result = meet(own, asked("all-reduce", count, type, reduction, 0), send, bytes);
    if (result != SUCCESS)
        return result;
    if (bytes <= SLOT)
        reduce(own, receive, 0, count, type, reduction);
    return wait_for_all(own);
}

Result ncclReduce(const void *send, void *receive, size_t count, Type type, int reduction, int root,
                  struct communicator *own, void *stream) {
    (void)stream;
    size_t bytes = count * size_of(type);
    Result result = meet(own, asked("reduce", count, type, reduction, root), send, bytes);
    if (result != SUCCESS)
        return result;
    if (bytes <= SLOT && own->rank == root)
        reduce(own, receive, 0, count, type, reduction);
    return wait_for_all(own);
}

Result ncclReduceScatter(const void *send, void *receive, size_t count, Type type, int reduction,
                         struct communicator *own, void *stream) {
    (void)stream;
    size_t bytes = own->size * count * size_of(type);
    Result result = meet(own, asked("reduce-scatter", count, type, reduction, 0), send, bytes);
    if (result != SUCCESS)
        return result;
    if (bytes <= SLOT)
        reduce(own, receive, own->rank * count, count, type, reduction);
    return wait_for_all(own);
}

Result ncclBroadcast(const void *send, void *receive, size_t count, Type type, int root, struct communicator *own,
                     void *stream) {
    (void)stream;
    size_t bytes = count * size_of(type);
    Result result = meet(own, asked("broadcast", count, type, 0, root), own->rank == root ? send : receive, bytes);
    if (result != SUCCESS)
        return result;
    if (bytes <= SLOT)
        memcpy(receive, own->meeting->members[root].payload, bytes);
    return wait_for_all(own);
}

Result ncclBcast(void *buffer, size_t count, Type type, int root, struct communicator *own, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, own, stream);
}

Result ncclAlltoAll(const void *send, void *receive, size_t count, Type type, struct communicator *own, void *stream) {
    (void)stream;
    size_t part = count * size_of(type), bytes = own->size * part;
    Result result = meet(own, asked("all-to-all", count, type, 0, 0), send, bytes);
    if (result != SUCCESS)
        return result;
    for (int rank = 0; bytes <= SLOT && rank < own->size; rank++)
        memcpy((char *)receive + rank * part, own->meeting->members[rank].payload + own->rank * part, part);
    return wait_for_all(own);
}

static Result no_point_to_point(void) {
    strcpy(last_error, "the stub of NCCL has no point-to-point calls");
    return INVALID_USAGE;
}

Result ncclSend(void) {
    return no_point_to_point();
}

Result ncclRecv(void) {
    return no_point_to_point();
}

Result ncclRedOpCreatePreMulSum(int *reduction, void *scalar, Type type, int residence, struct communicator *own) {
    (void)residence, (void)own; /* both kinds of memory are the host's */
    int index = __sync_fetch_and_add(&num_multipliers, 1) % 256;
    multipliers[index] = (float)load(scalar, type, 0);
    *reduction = NUM_OPS + index;
    return SUCCESS;
}
