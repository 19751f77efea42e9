/* The devices, in numbers that the runtime, the driver and NVML all give: those of an H100. */
#pragma once
#define MAX_DEVICES 8
#define DEVICE_NAME "NVIDIA H100 80GB HBM3"
#define BUS_ID_FORMAT "0000:%02x:00.0"
#define CUDA_VERSION_HERE 13000
#define IN_USE_BY_OTHERS (1ull << 30)

/* By the number that cudaDeviceAttr and CUdevice_attribute give it; 0 for those that nobody here asks
 * for. */
int device_attribute(int number);

/* How many this machine has: GPU_EMULATION_DEVICES, one without it. NVML shows all of them. */
int device_count(void);

/* How many CUDA shows to this process, numbered from 0: those of CUDA_VISIBLE_DEVICES, which names them by
 * their numbers in the machine, up to the first that there is not; all without it. Read once. */
int visible_count(void);

/* The number in the machine of a device that this process sees, and the reverse; -1: it does not see it. */
int machine_number(int device);
int visible_number(int in_machine);

/* The device that a thread is on, as `cudaSetDevice` or a context of the driver's has put it there. */
extern __thread int current_device;
