/* NVML: one H100. Prototypes are ours, by NVIDIA's documentation: its header is in no small
 * package. */
#include <stdint.h>
#include <string.h>

#include "device.h"
#include "memory.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };
static int the_device;

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "an error of the stand-in for NVML"; }

int nvmlSystemGetDriverVersion(char *text, unsigned bytes)
{
    strncpy(text, "580.0", bytes);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
    *version = CUDA_VERSION_HERE;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = &the_device;
    return index ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    *device = &the_device;
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *device, unsigned *index)
{
    *index = 0;
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *text, unsigned bytes)
{
    strncpy(text, DEVICE_NAME, bytes);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes)
{
    strncpy(text, "GPU-00000000-0000-0000-0000-000000000001", bytes);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetNumaNodeId(void *device, unsigned *node)
{
    *node = 0;
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned words, unsigned long *set)
{
    memset(set, 0xff, words * sizeof *set);
    return SUCCESS;
}

struct memory_info { unsigned long long total, available, used; };

int nvmlDeviceGetMemoryInfo(void *device, struct memory_info *found)
{
    found->total = TOTAL_MEMORY;
    found->used = IN_USE_BY_OTHERS + memory_used();
    found->available = found->total - found->used;
    return SUCCESS;
}

struct pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *found)
{
    memset(found, 0, sizeof *found);
    strcpy(found->legacy_bus_id, BUS_ID);
    strcpy(found->bus_id, "0000" BUS_ID);
    found->bus = 1;
    return SUCCESS;
}
