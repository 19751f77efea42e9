/* The CUDA runtime. Everything is done when it is asked for, in the caller's thread: streams keep no
 * order among each other because there is nothing left to order, and every event has passed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "device.h"
#include "memory.h"

static __thread cudaError_t last_error;

static cudaError_t answer(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

static void *new_handle(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static uintptr_t next = 0x1000;
    pthread_mutex_lock(&lock);
    void *handle = (void *)(next += 16);
    pthread_mutex_unlock(&lock);
    return handle;
}

/* ---- errors, versions ---- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error)
{
    return error == 801 ? "cudaErrorNotSupported" : "cudaErrorOfTheStandIn";
}

const char *cudaGetErrorString(cudaError_t error)
{
    if (error == cudaErrorNotSupported)
        return "not supported by the stand-in for a GPU; stderr names what was asked for";
    return "an error of the stand-in for a GPU";
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDA_VERSION_HERE;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION_HERE;
    return cudaSuccess;
}

/* ---- the device ---- */

int device_attribute(int number)
{
    switch (number) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrCanMapHostMemory: return 1;
    case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr number, int device)
{
    *value = device_attribute(number);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device)
{
    memset(found, 0, sizeof *found);
    if (machine_number(device) < 0)
        return answer(cudaErrorInvalidDevice);
    strcpy(found->name, DEVICE_NAME);
    found->uuid.bytes[15] = machine_number(device) + 1;
    found->totalGlobalMem = TOTAL_MEMORY;
    found->sharedMemPerBlock = device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    found->regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock);
    found->warpSize = device_attribute(cudaDevAttrWarpSize);
    found->maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
    for (int axis = 0; axis < 3; axis++) {
        found->maxThreadsDim[axis] = device_attribute(cudaDevAttrMaxBlockDimX + axis);
        found->maxGridSize[axis] = device_attribute(cudaDevAttrMaxGridDimX + axis);
    }
    found->totalConstMem = device_attribute(cudaDevAttrTotalConstantMemory);
    found->major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    found->minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    found->textureAlignment = 512;
    found->multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
    found->canMapHostMemory = 1;
    found->concurrentKernels = 1;
    found->asyncEngineCount = device_attribute(cudaDevAttrAsyncEngineCount);
    found->unifiedAddressing = 1;
    found->memoryBusWidth = device_attribute(cudaDevAttrGlobalMemoryBusWidth);
    found->l2CacheSize = device_attribute(cudaDevAttrL2CacheSize);
    found->maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    found->sharedMemPerMultiprocessor =
        device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    found->regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    found->managedMemory = 1;
    found->cooperativeLaunch = 1;
    found->sharedMemPerBlockOptin = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->maxBlocksPerMultiProcessor = device_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    found->memoryPoolsSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = visible_count();
    return answer(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

static void bind_context(bool is_other_device);

cudaError_t cudaSetDevice(int device)
{
    if (machine_number(device) < 0)
        return answer(cudaErrorInvalidDevice);
    if (device != current_device) {
        current_device = device;
        bind_context(true);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *name, int bytes, int device)
{
    snprintf(name, bytes, BUS_ID_FORMAT, machine_number(device) + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = (cudaMemPool_t)8;
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **start, size_t bytes)
{
    *start = NULL;
    if (!bytes)
        return cudaSuccess;
    if (memory_used(current_device) + bytes > TOTAL_MEMORY - IN_USE_BY_OTHERS)
        return answer(cudaErrorMemoryAllocation);
    *start = memory_new(bytes, DEVICE);
    return answer(*start ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *start)
{
    return answer(!start || memory_delete(start) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void **start, size_t bytes, cudaStream_t stream)
{
    return cudaMalloc(start, bytes);
}

cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned flags)
{
    *start = memory_new(bytes, PINNED);
    return answer(*start ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags)
{
    return answer(memory_pin(start, bytes) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *start)
{
    return answer(memory_unpin(start) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *total = TOTAL_MEMORY;
    *available = TOTAL_MEMORY - IN_USE_BY_OTHERS - memory_used(current_device);
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *start)
{
    struct memory_handle exported;
    if (!memory_export(start, &exported))
        return answer(cudaErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, &exported, sizeof exported);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **start, cudaIpcMemHandle_t handle, unsigned flags)
{
    struct memory_handle exported;
    memcpy(&exported, handle.reserved, sizeof exported);
    *start = memory_import(&exported);
    return answer(*start ? cudaSuccess : cudaErrorMapBufferObjectFailed);
}

cudaError_t cudaIpcCloseMemHandle(void *start)
{
    return answer(memory_unimport(start) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
    cudaStream_t stream)
{
    return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
    size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream)
{
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *start, int value, size_t bytes)
{
    memset(start, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream)
{
    return cudaMemset(start, value, bytes);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address)
{
    enum kind kind = memory_kind(address);
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered;
    if (kind == DEVICE)
        found->type = cudaMemoryTypeDevice;
    if (kind == PINNED)
        found->type = cudaMemoryTypeHost;
    found->device = kind == UNKNOWN ? -2 : memory_device(address);
    found->devicePointer = kind == UNKNOWN ? NULL : (void *)address;
    found->hostPointer = kind == DEVICE ? NULL : (void *)address;
    return cudaSuccess;
}

/* ---- streams, events, graphs ---- */

/* The stream whose work is recorded for a graph; one at a time. Replays are Python's
 * (emulation/graphs.py). */
static struct {
    bool active;
    cudaStream_t stream;
    unsigned long long id;
} capture;

static enum cudaStreamCaptureStatus status_of(cudaStream_t stream)
{
    if (capture.active && capture.stream == stream)
        return cudaStreamCaptureStatusActive;
    return cudaStreamCaptureStatusNone;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = 0;
    return cudaSuccess;
}

/* On a GPU a thread has no context of the driver's before it uses a stream; `cudaSetDevice` to the
 * device that it is on already changes nothing. */
static void bind_context(bool is_other_device)
{
    static __thread bool is_bound;
    if (is_bound && !is_other_device)
        return;
    is_bound = true;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    int (*retain)(void **, int) = driver ? dlsym(driver, "cuDevicePrimaryCtxRetain") : NULL;
    int (*set)(void *) = driver ? dlsym(driver, "cuCtxSetCurrent") : NULL;
    void *context = NULL;
    if (retain && set && !retain(&context, current_device))
        set(context);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    bind_context(false);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    bind_context(false);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = status_of(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
    unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count)
{
    *status = status_of(stream);
    if (id) *id = *status ? capture.id : 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (capture.active)
        return answer(cudaErrorIllegalState);
    capture.active = true;
    capture.stream = stream;
    capture.id++;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (status_of(stream) != cudaStreamCaptureStatusActive)
        return answer(cudaErrorIllegalState);
    capture.active = false;
    *graph = new_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
    unsigned long long flags)
{
    *made = new_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = new_handle();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    *ms = 0.5f;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument)
{
    function(argument);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
    void *argument, unsigned flags)
{
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

/* ---- kernels: each that reaches this file has no stand-in, and is named by the address at which
 * it was registered ---- */

#define MAX_KERNELS 262144
static struct { const void *address; const char *name; } kernels[MAX_KERNELS];

static unsigned long place_of(const void *address)
{
    unsigned long place = ((uintptr_t)address >> 4) % MAX_KERNELS;
    while (kernels[place].address && kernels[place].address != address)
        place = (place + 1) % MAX_KERNELS;
    return place;
}

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle[4];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void) {}

void __cudaRegisterFunction(void **handle, const char *address, char *device_function,
    const char *name)
{
    static unsigned long count;
    if (count >= MAX_KERNELS / 2)
        return; /* then some are not named */
    unsigned long place = place_of(address);
    count += !kernels[place].address;
    kernels[place].address = address;
    kernels[place].name = name;
}

static cudaError_t launched(const void *address)
{
    const char *name = kernels[place_of(address)].name;
    return answer(missing(name ? name : "a kernel without a name"));
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *address)
{
    *kernel = (cudaKernel_t)address;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
    size_t shared, cudaStream_t stream)
{
    return launched(kernel);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
    size_t shared, cudaStream_t stream)
{
    return launched(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
    void **arguments)
{
    return launched(function);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(void **)stream = call.stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function)
{
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 64;
    found->binaryVersion = 90;
    found->ptxVersion = 90;
    found->maxDynamicSharedSizeBytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
    const void *function, int threads, size_t shared, unsigned flags)
{
    return *blocks = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
    int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
        shared, 0);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
    unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result)
{
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
        *function = driver ? dlsym(driver, name) : NULL;
    }
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function)
        missing(name);
    return cudaSuccess;
}
