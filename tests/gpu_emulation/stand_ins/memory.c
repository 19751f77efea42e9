#define _GNU_SOURCE
#include "memory.h"

#include "device.h"

#include <pthread.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALIGNMENT (2ull << 20)
#define PAGE 4096ull
#define MAX_RANGES 65536
#define MAX_NAMES 256

struct range {
    char *start;
    size_t bytes;
    enum kind kind;
    int device; /* as this process numbers them */
    void *mapped; /* NULL: memory of the caller */
    size_t mapped_bytes;
    int file; /* of device memory; -1: in none */
    unsigned long long number;
    struct memory_handle imported; /* of memory of another process; its pid is 0 otherwise */
};

static struct range ranges[MAX_RANGES];
static int range_count;
static size_t used[MAX_DEVICES];
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
    if (range.kind == DEVICE && !range.imported.pid)
        used[range.device] += range.bytes;
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

/* Maps so much of a file (-1: of none) into addresses of its own, and adds it. */
static void *map(struct range range)
{
    /* Not reserved: engines take gigabytes and touch megabytes. */
    range.mapped_bytes = range.bytes + ALIGNMENT;
    range.mapped = mmap(NULL, range.mapped_bytes, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range.mapped == MAP_FAILED)
        return NULL;
    range.start = (char *)(((uintptr_t)range.mapped + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    bool is_mapped = range.file < 0 || mmap(range.start, range.bytes, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_FIXED | MAP_NORESERVE, range.file, 0) != MAP_FAILED;
    pthread_mutex_lock(&lock);
    bool added = is_mapped && add(range);
    pthread_mutex_unlock(&lock);
    if (!added) {
        munmap(range.mapped, range.mapped_bytes);
        return NULL;
    }
    return range.start;
}

void *memory_new(size_t bytes, enum kind kind)
{
    static unsigned long long last_number;
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    struct range range = {
        .bytes = whole ? whole : PAGE, .kind = kind, .device = current_device, .file = -1};
    if (kind == DEVICE) {
        range.number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        range.file = memfd_create("gpu-emulation", MFD_CLOEXEC);
        if (range.file < 0 || ftruncate(range.file, range.bytes)) {
            if (range.file >= 0)
                close(range.file);
            return NULL;
        }
    }
    void *start = map(range);
    if (!start && range.file >= 0)
        close(range.file);
    return start;
}

static bool forget(void *start, bool ours, bool imported)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < range_count && start && !found; at++) {
        struct range *each = &ranges[at];
        if (each->start != start || (each->mapped != NULL) != ours)
            continue;
        if ((each->imported.pid != 0) != imported)
            continue;
        if (each->mapped)
            munmap(each->mapped, each->mapped_bytes);
        if (each->file >= 0)
            close(each->file);
        if (each->kind == DEVICE && !imported)
            used[each->device] -= each->bytes;
        each->start = NULL;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool memory_delete(void *start)
{
    return forget(start, true, false);
}

bool memory_pin(void *start, size_t bytes)
{
    pthread_mutex_lock(&lock);
    bool added = !holding(start) && add((struct range){.start = start, .bytes = bytes, .kind = PINNED, .file = -1});
    pthread_mutex_unlock(&lock);
    return added;
}

bool memory_unpin(void *start)
{
    return forget(start, false, false);
}

bool memory_adopt(void *start, size_t bytes)
{
    pthread_mutex_lock(&lock);
    bool added = !holding(start) && add((struct range){
        .start = start, .bytes = bytes, .kind = DEVICE, .device = current_device, .file = -1});
    pthread_mutex_unlock(&lock);
    return added;
}

bool memory_disown(void *start)
{
    return forget(start, false, false);
}

enum kind memory_kind(const void *address)
{
    pthread_mutex_lock(&lock);
    struct range *found = holding(address);
    enum kind kind = found ? found->kind : UNKNOWN;
    pthread_mutex_unlock(&lock);
    return kind;
}

int memory_device(const void *address)
{
    pthread_mutex_lock(&lock);
    struct range *found = holding(address);
    int device = found ? found->device : 0;
    pthread_mutex_unlock(&lock);
    return device;
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

unsigned long long memory_number(const void *address)
{
    pthread_mutex_lock(&lock);
    struct range *found = holding(address);
    unsigned long long number = found ? found->number : 0;
    pthread_mutex_unlock(&lock);
    return number;
}

bool memory_export(const void *start, struct memory_handle *handle)
{
    struct stat file;
    pthread_mutex_lock(&lock);
    struct range *found = holding(start);
    bool is_exported = found && found->start == start && found->number && !fstat(found->file, &file);
    if (is_exported)
        *handle = (struct memory_handle){
            getpid(), found->file, file.st_ino, found->bytes, machine_number(found->device)};
    pthread_mutex_unlock(&lock);
    return is_exported;
}

static bool is_open(const struct memory_handle *handle)
{
    pthread_mutex_lock(&lock);
    bool found = false;
    for (int at = 0; at < range_count && !found; at++)
        found = ranges[at].start && !memcmp(&ranges[at].imported, handle, sizeof *handle);
    pthread_mutex_unlock(&lock);
    return found;
}

void *memory_import(const struct memory_handle *handle)
{
    struct stat file;
    char path[64];
    int device = visible_number(handle->in_machine);
    if (device < 0 || is_open(handle) || handle->pid == getpid())
        return NULL;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return NULL;
    void *start = NULL;
    if (!fstat(opened, &file) && file.st_ino == handle->inode && (unsigned long long)file.st_size == handle->bytes)
        start = map((struct range){
            .bytes = handle->bytes, .kind = DEVICE, .device = device, .file = opened, .imported = *handle});
    if (!start)
        close(opened);
    return start;
}

bool memory_unimport(void *start)
{
    return forget(start, true, true);
}

size_t memory_used(int device)
{
    pthread_mutex_lock(&lock);
    size_t now = used[device];
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
