/* The one device, in numbers that the runtime, the driver and NVML all give: those of an H100. */
#pragma once
#define DEVICE_NAME "NVIDIA H100 80GB HBM3"
#define BUS_ID "0000:01:00.0"
#define CUDA_VERSION_HERE 13000
#define IN_USE_BY_OTHERS (1ull << 30)

/* By the number that cudaDeviceAttr and CUdevice_attribute give it; 0 for those that nobody here asks
 * for. */
int device_attribute(int number);
