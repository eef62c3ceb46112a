#define _GNU_SOURCE
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_PROCESSES 64

/* One row per process that has used a GPU. All zeros is a free row, so a new file is an empty table. */
struct process {
    int pid;
    size_t used[MAX_GPUS];
};

static struct process *table;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

int machine_num_gpus(void) {
    long number_of = number("FAKE_GPUS", 1);
    return number_of < 0 ? 0 : number_of > MAX_GPUS ? MAX_GPUS : (int)number_of;
}

size_t machine_gpu_bytes(void) {
    return (size_t)number("FAKE_MEM_MIB", 81559) << 20;
}

void machine_gpu_uuid(int gpu, unsigned char uuid[16]) {
    memset(uuid, 0x11 + gpu, 16);
}

void machine_gpu_uuid_text(int gpu, char text[UUID_CHARACTERS]) {
    unsigned char uuid[16];
    machine_gpu_uuid(gpu, uuid);
    char *end = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        end += sprintf(end, "%02x%s", uuid[i], i == 3 || i == 5 || i == 7 || i == 9 ? "-" : "");
}

__attribute__((constructor)) static void map_table(void) {
    const char *path = getenv("FAKE_MACHINE");
    size_t size = MAX_PROCESSES * sizeof(struct process);
    int file = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0 && ftruncate(file, (off_t)size) == 0)
        table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    else
        table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (file >= 0)
        close(file);
    if (table == MAP_FAILED)
        abort();
}

static int is_alive(int pid) {
    return pid != 0 && (kill(pid, 0) == 0 || errno != ESRCH);
}

/* The row of this process; a forked child gets one of its own, and rows of the dead are taken over. */
static struct process *own_row(void) {
    int pid = getpid();
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (table[i].pid == pid)
            return &table[i];
    for (int i = 0; i < MAX_PROCESSES; i++) {
        int before = table[i].pid;
        if (!is_alive(before) && __sync_bool_compare_and_swap(&table[i].pid, before, pid)) {
            memset(table[i].used, 0, sizeof table[i].used);
            return &table[i];
        }
    }
    abort(); /* more processes than a test ever starts */
}

size_t machine_gpu_used(int gpu) {
    size_t sum = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (is_alive(table[i].pid))
            sum += table[i].used[gpu];
    return sum;
}

int machine_gpu_take(int gpu, size_t bytes) {
    struct process *row = own_row();
    size_t whole = bytes + (row->used[gpu] ? 0 : CONTEXT_BYTES);
    if (machine_gpu_used(gpu) + whole > machine_gpu_bytes())
        return -1;
    __sync_fetch_and_add(&row->used[gpu], whole);
    return 0;
}

void machine_gpu_give(int gpu, size_t bytes) {
    __sync_fetch_and_sub(&own_row()->used[gpu], bytes);
}

int machine_gpu_processes(int gpu, int limit, int pids[], size_t bytes[]) {
    int found = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        if (!is_alive(table[i].pid) || table[i].used[gpu] == 0)
            continue;
        if (found < limit) {
            pids[found] = table[i].pid;
            bytes[found] = table[i].used[gpu];
        }
        found++;
    }
    return found;
}
