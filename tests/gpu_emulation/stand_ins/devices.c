/* Which devices there are, and which of them this process sees. */
#include "device.h"

#include <ctype.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

__thread int current_device;

static pthread_once_t is_read = PTHREAD_ONCE_INIT;
static int count, visible, numbers[MAX_DEVICES];

static bool is_taken(int number)
{
    for (int at = 0; at < visible; at++)
        if (numbers[at] == number)
            return true;
    return false;
}

static void read_once(void)
{
    const char *devices = getenv("GPU_EMULATION_DEVICES");
    count = devices ? atoi(devices) : 1;
    if (count < 1)
        count = 1;
    if (count > MAX_DEVICES)
        count = MAX_DEVICES;
    const char *named = getenv("CUDA_VISIBLE_DEVICES");
    if (!named) {
        for (; visible < count; visible++)
            numbers[visible] = visible;
        return;
    }
    while (isdigit((unsigned char)*named)) {
        char *end;
        long number = strtol(named, &end, 10);
        /* As CUDA does: a device that is named twice leaves none. */
        if (number >= count || is_taken(number)) {
            visible = number >= count ? visible : 0;
            return;
        }
        numbers[visible++] = number;
        named = end + (*end == ',');
    }
}

int device_count(void)
{
    pthread_once(&is_read, read_once);
    return count;
}

int visible_count(void)
{
    pthread_once(&is_read, read_once);
    return visible;
}

int machine_number(int device)
{
    return device >= 0 && device < visible_count() ? numbers[device] : -1;
}

int visible_number(int in_machine)
{
    for (int at = 0; at < visible_count(); at++)
        if (numbers[at] == in_machine)
            return at;
    return -1;
}
