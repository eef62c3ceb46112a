#include "counters.h"

#include <stddef.h>

long fake_counts[NUM_KINDS];
static void (*hook)(int kind);

void fake_set_hook(void (*called_where_the_host_waits)(int kind)) {
    hook = called_where_the_host_waits;
}

void count(enum kind kind) {
    __sync_fetch_and_add(&fake_counts[kind], 1);
    if (hook != NULL && kind >= STREAM_SYNC)
        hook(kind);
}
