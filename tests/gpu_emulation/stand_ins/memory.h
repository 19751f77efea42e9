/* What all stand-ins share: the device's memory, and how what is missing is told. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

enum kind { UNKNOWN, DEVICE, PINNED };

#define TOTAL_MEMORY (80ull << 30)

/* Zeroed memory of the host, 2 MiB aligned as CUDA's large allocations are; NULL: there is none. That of
 * the device lies in a file (memfd), so that other processes can map it. */
void *memory_new(size_t bytes, enum kind kind);

/* Gives memory back. False if `start` is not the start of such memory. */
bool memory_delete(void *start);

/* Counts host memory that is not ours as pinned (cudaHostRegister), and no longer. */
bool memory_pin(void *start, size_t bytes);
bool memory_unpin(void *start);

/* Counts memory that is mapped elsewhere as the device's (cuMemMap), and no longer. */
bool memory_adopt(void *start, size_t bytes);
bool memory_disown(void *start);

/* Of any address within. */
enum kind memory_kind(const void *address);

/* The device, as this process numbers them, that an address belongs to; 0: to none. */
int memory_device(const void *address);

/* The start and size of the memory that an address is in; false if it is in none. */
bool memory_range(const void *address, void **start, size_t *bytes);

/* The number of the device memory that an address is in, of which no other has it in this process; 0:
 * in none, or in what another process has exported. */
unsigned long long memory_number(const void *address);

/* What CUDA IPC has in its 64 bytes: whose file it is, and which. */
struct memory_handle {
    int pid, file;
    unsigned long long inode, bytes, in_machine;
};

/* The handle of device memory. False if `start` is not its start. */
bool memory_export(const void *start, struct memory_handle *handle);

/* Maps memory of another process; NULL: it has ended, has other memory there, or has it mapped here already, or it is of
 * a device that this process does not see. */
void *memory_import(const struct memory_handle *handle);

/* Unmaps it. False if `start` is not the start of such memory. */
bool memory_unimport(void *start);

/* Bytes in use of a device, as this process numbers them. */
size_t memory_used(int device);

/* Says on stderr, once a name, that something is asked for that has no stand-in; returns CUDA's 801
 * (not supported). Nothing returns success without its work: a wrong token would be looked for in kvferry. */
int missing(const char *name);
