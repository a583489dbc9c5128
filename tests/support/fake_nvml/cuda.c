/* A stand-in for CUDA's driver library: libcuda.so.1 over the state of the stand-in driver.
 *
 * Its devices are those of $FAKE_NVML_DIR/state, in that order, chosen by CUDA_VISIBLE_DEVICES as
 * CUDA does it (indices or UUIDs); one whose node may not be opened does not count. What is
 * allocated becomes a claim, which the stand-in for NVML shows as a process. $FAKE_NVML_DIR/cuda
 * holds words for what is wrong with it: `all` (it counts every device), `shifted` (it takes the
 * device after the one named), `stranger` (memory shows as pid 1's), `more` (accounts keep 8 GiB
 * more), `boundless` (no allocation fails), `broken` (no context can be made), `stub` (cuInit fails
 * as the toolkit's).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef PLACE /* where no environment says another */
#define PLACE "/nonexistent"
#endif

typedef unsigned long long ull;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, STUB = 34, UNKNOWN = 999 };
enum { DEVICES = 64 };
#define CONTEXT (300ull << 20)

typedef struct { int number; char uuid[128]; ull total; } Device; /* number < 0: a slice */

static Device all[DEVICES], seen[DEVICES];
static int n_all, n_seen;
static ull held[DEVICES], peak[DEVICES], start_us;

static FILE *open_in(const char *name, const char *how)
{
    char path[512];
    const char *place = getenv("FAKE_NVML_DIR");
    snprintf(path, sizeof path, "%s/%s", place ? place : PLACE, name);
    return fopen(path, how);
}

static int is_wrong(const char *word)
{
    char found[64];
    FILE *file = open_in("cuda", "r");
    int is = 0;
    while (file && fscanf(file, "%63s", found) == 1) is |= !strcmp(found, word);
    if (file) fclose(file);
    return is;
}

static int is_closed(int minor)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/nvidia%d", minor);
    int node = open(path, O_RDONLY | O_NONBLOCK);
    if (node >= 0) close(node);
    return node < 0 && errno == EPERM;
}

static void read_devices(void)
{
    char line[1024], key[32], value[128];
    int gpu, slot, gi, ci, sliced[DEVICES] = {0}, closed[DEVICES] = {0};
    ull total;
    FILE *file = open_in("state", "r");
    Device whole[DEVICES] = {{0}};
    n_all = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "gpu %d %31s %127s", &gpu, key, value) == 3 && gpu < DEVICES) {
            if (!strcmp(key, "uuid")) snprintf(whole[gpu].uuid, sizeof whole[gpu].uuid, "%s", value);
            if (!strcmp(key, "minor")) closed[gpu] = is_closed(atoi(value));
            if (!strcmp(key, "total")) whole[gpu].total = strtoull(value, NULL, 10);
        } else if (sscanf(line, "mig %d %d %127s %d %d %llu", &gpu, &slot, value, &gi, &ci, &total) == 6) {
            sliced[gpu] = 1;
            all[n_all].number = -1;
            all[n_all].total = total;
            snprintf(all[n_all++].uuid, sizeof all->uuid, "%s", value);
        }
    }
    if (file) fclose(file);
    for (int number = gpu = 0; gpu < DEVICES; gpu++) {
        if (!whole[gpu].uuid[0] || closed[gpu]) continue;
        whole[gpu].number = number++;
        if (!sliced[gpu]) all[n_all++] = whole[gpu];
    }
}

static void choose(const char *word)
{
    char *end;
    long number = strtol(word, &end, 10);
    for (int i = 0; i < n_all; i++)
        if (*end ? !strcmp(all[i].uuid, word) : all[i].number == number) {
            seen[n_seen++] = all[is_wrong("shifted") ? (i + 1) % n_all : i];
            return;
        }
}

int cuInit(unsigned flags)
{
    (void)flags;
    if (is_wrong("stub")) return STUB;
    read_devices();
    n_seen = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char words[4096];
    snprintf(words, sizeof words, "%s", visible ? visible : "");
    if (!visible || is_wrong("all"))
        for (int i = 0; i < n_all; i++) seen[n_seen++] = all[i];
    else
        for (char *word = strtok(words, ","); word; word = strtok(NULL, ",")) choose(word);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    start_us = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
    return n_seen ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int *version) { *version = 12080; return OK; }
int cuDeviceGetCount(int *count) { *count = n_seen; return OK; }

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal < n_seen ? OK : INVALID;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    const char *text = strchr(seen[device].uuid, '-') + 1;
    for (int i = 0; i < 16; i++) {
        if (*text == '-') text++;
        unsigned byte = 0;
        sscanf(text, "%2x", &byte);
        uuid[i] = byte;
        text += 2;
    }
    return OK;
}

static ull ticks_of(int pid)
{
    char path[64], content[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    content[fread(content, 1, sizeof content - 1, file)] = 0;
    fclose(file);
    char *field = strrchr(content, ')') + 2;
    for (int i = 3; i < 22; i++) field = strchr(field + 1, ' ');
    return strtoull(field, NULL, 10);
}

static void publish(void)
{
    char name[128];
    int pid = is_wrong("stranger") ? 1 : getpid();
    snprintf(name, sizeof name, "claims/%d.%llu", pid, ticks_of(pid));
    FILE *file = open_in(name, "w");
    if (!file) return;
    for (int i = 0; i < n_seen; i++) {
        ull told = peak[i] + (is_wrong("more") ? 8ull << 30 : 0);
        fprintf(file, "%s %llu %llu %llu C\n", seen[i].uuid, held[i], told, start_us);
    }
    fclose(file);
}

static int take(int device, ull size)
{
    Device *of = &seen[device];
    if (held[device] + size > of->total && !is_wrong("boundless"))
        return NO_MEMORY;
    held[device] += size;
    if (held[device] > peak[device]) peak[device] = held[device];
    if (held[device] <= of->total) publish();
    return OK;
}

static int current;

int cuCtxCreate_v2(void **context, unsigned flags, int device)
{
    (void)flags;
    if (is_wrong("broken")) return UNKNOWN;
    *context = (void *)(long)(device + 1);
    current = device;
    return take(device, CONTEXT);
}
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return OK; }
int cuMemAlloc_v2(ull *pointer, size_t size) { *pointer = current + 1; return take(current, size); }
int cuMemFree_v2(ull pointer) { held[pointer - 1] = CONTEXT; publish(); return OK; }
int cuCtxDestroy_v2(void *context) { held[(long)context - 1] = 0; publish(); return OK; }
