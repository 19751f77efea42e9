#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT (2ull << 20)
#define PAGE 4096ull
#define MAX_RANGES 65536
#define MAX_NAMES 256

struct range {
    char *start;
    size_t bytes;
    enum kind kind;
    void *mapped; /* NULL: memory of the caller */
    size_t mapped_bytes;
};

static struct range ranges[MAX_RANGES];
static int range_count;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The lock is held. */
static bool add(struct range range)
{
    int at = 0;
    while (at < range_count && ranges[at].start)
        at++;
    if (at == MAX_RANGES)
        return false;
    if (at == range_count)
        range_count++;
    ranges[at] = range;
    if (range.kind == DEVICE)
        used += range.bytes;
    return true;
}

/* The lock is held. */
static struct range *holding(const void *address)
{
    for (int at = 0; at < range_count; at++) {
        struct range *each = &ranges[at];
        const char *at_byte = address;
        if (each->start && at_byte >= each->start && at_byte < each->start + each->bytes)
            return each;
    }
    return NULL;
}

void *memory_new(size_t bytes, enum kind kind)
{
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    if (!whole)
        whole = PAGE;
    /* Not reserved: engines take gigabytes and touch megabytes. */
    void *mapped = mmap(NULL, whole + ALIGNMENT, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    char *start = (char *)(((uintptr_t)mapped + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    pthread_mutex_lock(&lock);
    bool added = add((struct range){start, whole, kind, mapped, whole + ALIGNMENT});
    pthread_mutex_unlock(&lock);
    if (!added) {
        munmap(mapped, whole + ALIGNMENT);
        return NULL;
    }
    return start;
}

static bool forget(void *start, bool ours)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < range_count && start && !found; at++) {
        struct range *each = &ranges[at];
        if (each->start != start || (each->mapped != NULL) != ours)
            continue;
        if (each->mapped)
            munmap(each->mapped, each->mapped_bytes);
        if (each->kind == DEVICE)
            used -= each->bytes;
        each->start = NULL;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool memory_delete(void *start)
{
    return forget(start, true);
}

bool memory_pin(void *start, size_t bytes)
{
    pthread_mutex_lock(&lock);
    bool added = !holding(start) && add((struct range){start, bytes, PINNED, NULL, 0});
    pthread_mutex_unlock(&lock);
    return added;
}

bool memory_unpin(void *start)
{
    return forget(start, false);
}

bool memory_adopt(void *start, size_t bytes)
{
    pthread_mutex_lock(&lock);
    bool added = !holding(start) && add((struct range){start, bytes, DEVICE, NULL, 0});
    pthread_mutex_unlock(&lock);
    return added;
}

bool memory_disown(void *start)
{
    return forget(start, false);
}

enum kind memory_kind(const void *address)
{
    pthread_mutex_lock(&lock);
    struct range *found = holding(address);
    enum kind kind = found ? found->kind : UNKNOWN;
    pthread_mutex_unlock(&lock);
    return kind;
}

bool memory_range(const void *address, void **start, size_t *bytes)
{
    pthread_mutex_lock(&lock);
    struct range *found = holding(address);
    if (found) {
        *start = found->start;
        *bytes = found->bytes;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

size_t memory_used(void)
{
    pthread_mutex_lock(&lock);
    size_t now = used;
    pthread_mutex_unlock(&lock);
    return now;
}

int missing(const char *name)
{
    static char said[MAX_NAMES][96];
    static int count;
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < count && strncmp(said[at], name, sizeof said[at] - 1))
        at++;
    if (at == count && count < MAX_NAMES) {
        strncpy(said[count++], name, sizeof said[at] - 1);
        fprintf(stderr, "[gpu emulation] no stand-in for %s\n", name);
    }
    pthread_mutex_unlock(&lock);
    return 801;
}
