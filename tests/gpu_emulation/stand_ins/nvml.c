/* NVML: all devices of the machine. Prototypes are ours, by NVIDIA's documentation: its header is in no small
 * package. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "device.h"
#include "memory.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };
static char devices[MAX_DEVICES];
static const char UUID_FORMAT[] = "GPU-00000000-0000-0000-0000-%012d";

static int number_of(void *device) { return (int)((char *)device - devices); }

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
    *count = device_count();
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= (unsigned)device_count())
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    for (int index = 0; index < device_count(); index++) {
        char known[64];
        snprintf(known, sizeof known, UUID_FORMAT, index + 1);
        if (!strcmp(known, uuid))
            return nvmlDeviceGetHandleByIndex_v2(index, device);
    }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetIndex(void *device, unsigned *index)
{
    *index = number_of(device);
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *text, unsigned bytes)
{
    strncpy(text, DEVICE_NAME, bytes);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes)
{
    snprintf(text, bytes, UUID_FORMAT, number_of(device) + 1);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

/* No two devices are joined: vLLM then takes no all-reduce of its own. */
int nvmlDeviceGetP2PStatus(void *device, void *peer, int capability, int *status)
{
    *status = 5;
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
    int seen = visible_number(number_of(device));
    found->total = TOTAL_MEMORY;
    found->used = IN_USE_BY_OTHERS + (seen < 0 ? 0 : memory_used(seen));
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
    found->bus = number_of(device) + 1;
    snprintf(found->legacy_bus_id, sizeof found->legacy_bus_id, BUS_ID_FORMAT, found->bus);
    snprintf(found->bus_id, sizeof found->bus_id, "0000" BUS_ID_FORMAT, found->bus);
    return SUCCESS;
}
