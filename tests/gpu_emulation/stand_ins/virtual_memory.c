/* The driver's virtual memory, as vLLM's allocator for sleep mode uses it: addresses are reserved, and pages
 * mapped there and unmapped. While there are none an access ends the process; those that come have other bytes
 * than those that went, as on a GPU, where nothing is said of them. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda.h"
#include "device.h"
#include "memory.h"

#define GRANULARITY (2ull << 20)

static void *pages(void *start, size_t bytes, int protection, int flags)
{
    int all = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags;
    return mmap(start, bytes, protection, all, -1, 0);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
    CUmemAllocationGranularity_flags option)
{
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted,
    unsigned long long flags)
{
    if (bytes % GRANULARITY || alignment > GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    char *found = pages(NULL, bytes + GRANULARITY, PROT_NONE, 0);
    if (found == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)found + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
    size_t before = aligned - found;
    if (before)
        munmap(found, before);
    munmap(aligned + bytes, GRANULARITY - before);
    *start = (CUdeviceptr)aligned;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes)
{
    return munmap((void *)start, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* A handle is the size of what it stands for. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
    unsigned long long flags)
{
    if (memory_used(current_device) + bytes > TOTAL_MEMORY - IN_USE_BY_OTHERS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return CUDA_SUCCESS; }

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long flags)
{
    static atomic_uint maps;
    void *address = (void *)start;
    if (offset || bytes != handle || !memory_adopt(address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (pages(address, bytes, PROT_READ | PROT_WRITE, MAP_FIXED) == MAP_FAILED) {
        memory_disown(address);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* Small numbers in every type: what vLLM reads before it writes must not become NaN. */
    memset(address, 1 + atomic_fetch_add(&maps, 1) % 48, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *wanted, size_t count)
{
    return memory_kind((void *)start) == DEVICE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes)
{
    void *address = (void *)start;
    if (!memory_disown(address))
        return CUDA_ERROR_INVALID_VALUE;
    if (pages(address, bytes, PROT_NONE, MAP_FIXED) == MAP_FAILED)
        return CUDA_ERROR_UNKNOWN;
    return CUDA_SUCCESS;
}
