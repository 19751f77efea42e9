/* The CUDA driver, as far as torch, Triton and vLLM ask it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "device.h"
#include "memory.h"

/* The primary context of a device is this and its number. */
#define FIRST_CONTEXT 0x55
static __thread CUcontext current, pushed[16];
static __thread size_t depth;

static CUresult make_current(CUcontext context)
{
    current = context;
    if (context)
        current_device = (int)((uintptr_t)context - FIRST_CONTEXT);
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION_HERE;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index)
{
    *device = index;
    return machine_number(index) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = visible_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute number, CUdevice device)
{
    *value = device_attribute(number);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    strncpy(name, DEVICE_NAME, bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    /* As cudaGetDeviceProperties has it. */
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = machine_number(device) + 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    *can = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    return make_current(context);
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    if (depth == sizeof pushed / sizeof *pushed)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pushed[depth++] = current;
    return make_current(context);
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = current;
    return make_current(pushed[--depth]);
}

CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = current_device;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)(uintptr_t)(FIRST_CONTEXT + device);
    return machine_number(device) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = "an error of the stand-in for a GPU";
    if (error == CUDA_ERROR_NOT_SUPPORTED)
        *text = "not supported by the stand-in for a GPU; stderr names what was asked for";
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    enum kind kind = memory_kind((const void *)address);
    void *start;
    size_t bytes;
    if (!memory_range((const void *)address, &start, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = kind == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = memory_device(start); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(void **)value = start; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = bytes; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)value = memory_number((const void *)address) != 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = memory_number((const void *)address);
        return CUDA_SUCCESS;
    default: return missing("an attribute of cuPointerGetAttribute");
    }
}

/* ---- memory ---- */

CUresult cuMemAlloc(CUdeviceptr *start, size_t bytes)
{
    *start = (CUdeviceptr)memory_new(bytes, DEVICE);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr start)
{
    return memory_delete((void *)start) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemsetD8(CUdeviceptr start, unsigned char value, size_t bytes)
{
    memset((void *)start, value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    memcpy(to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address)
{
    void *begin;
    if (memory_kind((const void *)address) != DEVICE)
        return CUDA_ERROR_NOT_FOUND;
    memory_range((const void *)address, &begin, bytes);
    *start = (CUdeviceptr)begin;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    static char streams;
    *stream = (CUstream)&streams;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) { return CUDA_SUCCESS; }

/* ---- CUDA IPC: the memory of the device lies in files, which the other process opens ---- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr start)
{
    struct memory_handle exported;
    if (!memory_export((const void *)start, &exported))
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, &exported, sizeof exported);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *start, CUipcMemHandle handle, unsigned flags)
{
    struct memory_handle exported;
    memcpy(&exported, handle.reserved, sizeof exported);
    *start = (CUdeviceptr)memory_import(&exported);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr start)
{
    return memory_unimport((void *)start) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The newest version of a function, as the driver gives it: `cuMemAlloc_v2` for `cuMemAlloc`. */
static void *newest(const char *name)
{
    static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    for (size_t at = 0; at < sizeof versions / sizeof *versions; at++) {
        char versioned[128];
        snprintf(versioned, sizeof versioned, "%s%s", name, versions[at]);
        void *function = dlsym(RTLD_DEFAULT, versioned);
        if (!function && driver)
            function = dlsym(driver, versioned);
        if (function)
            return function;
    }
    return NULL;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *found)
{
    *function = newest(name);
    if (found)
        *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
