/* A stand-in for NVIDIA's management library: libnvidia-ml.so.1 without a driver beneath it.
 *
 * Its whole truth is the text file $FAKE_NVML_DIR/state, read again whenever it was replaced, and
 * the claims of live processes in $FAKE_NVML_DIR/claims. `driver.py` writes both and documents the
 * lines. The shapes are those of the public nvml.h; unknown functions are simply not there, as in
 * an older driver. Built with -DOLD_DRIVER the functions of newer drivers are left out.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15,
};
enum { GPUS = 32, SLICES = 8, LINKS = 18, ROWS = 1024, RULES = 64, FIELDS = 16, EVENTS = 256 };
#define UNAVAILABLE 0xFFFFFFFFFFFFFFFFull

typedef struct Device {
    int index, slot; /* slot < 0: a whole GPU */
    int here;
    char uuid[96], name[96], pci[32];
    int minor, mode, persistence, drained, numa, mig, fabric, gi, ci, accounting, events;
    int throttle, util, memutil, power_mw, temperature, link_count;
    ull total, reserved, ownerless;
    ull cpus[16];
    char link[LINKS][32]; /* "" down, "switch", or the peer's index */
    uint field_id[FIELDS];
    ull field_value[FIELDS];
    int fields;
    uint remap[4];
    ull ecc;
    struct Device *parent;
} Device;

typedef struct { int gpu, slot; char kind; uint pid; ull used; uint gi, ci; } Process;
typedef struct { int gpu; uint pid; ull max, start_us, time_ms; uint running, util; } Account;
typedef struct { int gpu; uint pid; ull at_us; uint sm; } Sample;
typedef struct { char kind; char function[64]; int gpu, value, times, used; } Rule;
typedef struct { ull number; int gpu; ull type, data; } Event;

static Device gpus[GPUS];
static Device slices[GPUS][SLICES];
static Process processes[ROWS];
static Account accounts[ROWS];
static Sample samples[ROWS];
static Rule rules[RULES];
static Event events[EVENTS];
static int p2p[GPUS][GPUS], levels[GPUS][GPUS];
static int n_gpus, n_processes, n_accounts, n_samples, n_rules, n_events, n_at_init;
static int init_code, wide_rows, hidden, references;
static char driver_version[64];
static ull registered_after; /* events before the registration are lost */
static struct timespec state_time;
static ino_t state_inode;
static ull *calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *place(const char *name)
{
    static __thread char path[512];
    const char *directory = getenv("FAKE_NVML_DIR");
    snprintf(path, sizeof path, "%s/%s", directory ? directory : "/nonexistent", name);
    return path;
}

/* --- the state file ------------------------------------------------------------------------- */

static void clear_state(void)
{
    memset(gpus, 0, sizeof gpus);
    memset(slices, 0, sizeof slices);
    n_gpus = n_processes = n_accounts = n_samples = n_events = 0;
    init_code = wide_rows = hidden = 0;
    for (int a = 0; a < GPUS; a++) {
        gpus[a].index = a;
        gpus[a].slot = -1;
        gpus[a].minor = gpus[a].numa = gpus[a].fabric = gpus[a].link_count = -1;
        gpus[a].events = 1;
        for (int b = 0; b < GPUS; b++) {
            p2p[a][b] = 1; /* "chipset not supported" */
            levels[a][b] = a == b ? 0 : 50;
        }
    }
}

static void read_gpu(int index, const char *key, const char *value)
{
    Device *gpu = &gpus[index];
    gpu->here = 1;
    if (index >= n_gpus) n_gpus = index + 1;
    ull number = strtoull(value, NULL, 0);
    if (!strcmp(key, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
    else if (!strcmp(key, "name")) snprintf(gpu->name, sizeof gpu->name, "%s", value);
    else if (!strcmp(key, "pci")) snprintf(gpu->pci, sizeof gpu->pci, "%s", value);
    else if (!strcmp(key, "minor")) gpu->minor = atoi(value);
    else if (!strcmp(key, "compute_mode")) gpu->mode = atoi(value);
    else if (!strcmp(key, "persistence")) gpu->persistence = atoi(value);
    else if (!strcmp(key, "drained")) gpu->drained = atoi(value);
    else if (!strcmp(key, "numa")) gpu->numa = atoi(value);
    else if (!strcmp(key, "mig")) gpu->mig = atoi(value);
    else if (!strcmp(key, "fabric")) gpu->fabric = atoi(value);
    else if (!strcmp(key, "accounting")) gpu->accounting = atoi(value);
    else if (!strcmp(key, "events")) gpu->events = atoi(value);
    else if (!strcmp(key, "throttle")) gpu->throttle = atoi(value);
    else if (!strcmp(key, "util")) gpu->util = atoi(value);
    else if (!strcmp(key, "memutil")) gpu->memutil = atoi(value);
    else if (!strcmp(key, "power_mw")) gpu->power_mw = atoi(value);
    else if (!strcmp(key, "temperature")) gpu->temperature = atoi(value);
    else if (!strcmp(key, "links")) gpu->link_count = atoi(value);
    else if (!strcmp(key, "total")) gpu->total = number;
    else if (!strcmp(key, "reserved")) gpu->reserved = number;
    else if (!strcmp(key, "ownerless")) gpu->ownerless = number;
    else if (!strcmp(key, "ecc")) gpu->ecc = number;
    else if (!strcmp(key, "remap"))
        sscanf(value, "%u %u %u %u", gpu->remap, gpu->remap + 1, gpu->remap + 2, gpu->remap + 3);
    else if (!strcmp(key, "cpus")) {
        char *rest = (char *)value;
        for (int word = 0; word < 16 && *rest; word++) gpu->cpus[word] = strtoull(rest, &rest, 16);
    } else if (!strcmp(key, "link")) {
        int link;
        char peer[32];
        if (sscanf(value, "%d %31s", &link, peer) == 2 && link >= 0 && link < LINKS)
            snprintf(gpu->link[link], sizeof gpu->link[link], "%s", peer);
    } else if (!strcmp(key, "field") && gpu->fields < FIELDS) {
        sscanf(value, "%u %llu", gpu->field_id + gpu->fields, gpu->field_value + gpu->fields);
        gpu->fields++;
    }
}

static void read_slice(const char *line)
{
    int gpu, slot, gi, ci;
    ull total;
    char uuid[96];
    int length = 0;
    if (sscanf(line, "%d %d %95s %d %d %llu %n", &gpu, &slot, uuid, &gi, &ci, &total, &length) < 6
        || gpu >= GPUS || slot >= SLICES)
        return;
    Device *slice = &slices[gpu][slot];
    *slice = (Device){.index = gpu, .slot = slot, .here = 1, .gi = gi, .ci = ci, .total = total,
                      .minor = -1, .numa = -1, .fabric = -1, .parent = &gpus[gpu]};
    snprintf(slice->uuid, sizeof slice->uuid, "%s", uuid);
    snprintf(slice->name, sizeof slice->name, "%s", line + length);
}

static void read_rule(char kind, const char *line)
{
    if (n_rules >= RULES) return;
    Rule *rule = &rules[n_rules];
    char gpu[16] = "*";
    Rule read = {.kind = kind, .gpu = -1, .times = -1};
    sscanf(line, "%63s %15s %d %d", read.function, gpu, &read.value, &read.times);
    if (gpu[0] != '*') read.gpu = atoi(gpu);
    read.used = rule->used;
    if (strcmp(rule->function, read.function) || rule->gpu != read.gpu || rule->kind != kind)
        read.used = 0;
    *rule = read;
    n_rules++;
}

static void read_line(char *line)
{
    char word[32] = "", key[32] = "";
    int gpu, other, value, length = 0;
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, "%31s %n", word, &length) < 1) return;
    char *rest = line + length;
    if (!strcmp(word, "gpu") && sscanf(rest, "%d %31s %n", &gpu, key, &length) == 2 && gpu < GPUS)
        read_gpu(gpu, key, rest + length);
    else if (!strcmp(word, "driver")) snprintf(driver_version, sizeof driver_version, "%s", rest);
    else if (!strcmp(word, "init")) init_code = atoi(rest);
    else if (!strcmp(word, "wide_rows")) wide_rows = atoi(rest);
    else if (!strcmp(word, "hidden")) hidden = atoi(rest);
    else if (!strcmp(word, "mig")) read_slice(rest);
    else if (!strcmp(word, "proc") && n_processes < ROWS) {
        Process row = {.gi = ~0u, .ci = ~0u, .slot = -1};
        long long used;
        sscanf(rest, "%d %c %u %lld %u %u", &row.gpu, &row.kind, &row.pid, &used, &row.gi, &row.ci);
        row.used = used < 0 ? UNAVAILABLE : (ull)used;
        processes[n_processes++] = row;
    } else if (!strcmp(word, "account") && n_accounts < ROWS) {
        Account row = {0};
        long long most;
        sscanf(rest, "%d %u %lld %llu %u %u %llu", &row.gpu, &row.pid, &most, &row.start_us,
               &row.running, &row.util, &row.time_ms);
        row.max = most < 0 ? UNAVAILABLE : (ull)most;
        accounts[n_accounts++] = row;
    } else if (!strcmp(word, "sample") && n_samples < ROWS) {
        Sample row = {0};
        sscanf(rest, "%d %u %llu %u", &row.gpu, &row.pid, &row.at_us, &row.sm);
        samples[n_samples++] = row;
    } else if (!strcmp(word, "event") && n_events < EVENTS) {
        Event row = {0};
        sscanf(rest, "%llu %d %llu %llu", &row.number, &row.gpu, &row.type, &row.data);
        events[n_events++] = row;
    } else if (!strcmp(word, "p2p") && sscanf(rest, "%d %d %d", &gpu, &other, &value) == 3)
        p2p[gpu][other] = p2p[other][gpu] = value;
    else if (!strcmp(word, "level") && sscanf(rest, "%d %d %d", &gpu, &other, &value) == 3)
        levels[gpu][other] = levels[other][gpu] = value;
    else if (!strcmp(word, "error")) read_rule('e', rest);
    else if (!strcmp(word, "delay")) read_rule('d', rest);
    else if (!strcmp(word, "hang")) read_rule('h', rest);
    else if (!strcmp(word, "crash")) read_rule('c', rest);
    else if (!strcmp(word, "exit")) read_rule('x', rest);
    else if (!strcmp(word, "grow")) read_rule('g', rest);
}

static void read_state(void)
{
    struct stat found;
    const char *path = place("state");
    if (stat(path, &found) != 0) return;
    if (found.st_ino == state_inode && found.st_mtim.tv_sec == state_time.tv_sec
        && found.st_mtim.tv_nsec == state_time.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    state_inode = found.st_ino;
    state_time = found.st_mtim;
    clear_state();
    n_rules = 0;
    char line[1024];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

static void count_call(void)
{
    if (!calls) {
        int fd = open(place("calls"), O_RDWR);
        if (fd < 0) return;
        void *page = mmap(NULL, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (page == MAP_FAILED) return;
        calls = page;
    }
    __atomic_fetch_add(calls, 1, __ATOMIC_RELAXED);
}

static void sleep_ms(int ms)
{
    struct timespec pause = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&pause, NULL);
}

static __thread int peer = -1; /* of a call about a pair: a rule for either is one for the pair */

static int matches(const Rule *rule, const char *function, int gpu)
{
    if (rule->gpu >= 0 && rule->gpu != gpu && rule->gpu != peer) return 0;
    if (rule->times >= 0 && rule->used >= rule->times) return 0;
    return rule->function[0] == '*' ? gpu >= 0 : !strcmp(rule->function, function);
}

/* Every function begins here: counts, rereads, and does to it what the rules say. */
static int enter(const char *function, int gpu)
{
    count_call();
    pthread_mutex_lock(&lock);
    read_state();
    int code = references > 0 ? SUCCESS : UNINITIALIZED;
    int pause = 0, forever = 0;
    for (int i = 0; i < n_rules && code != UNINITIALIZED; i++) {
        Rule *rule = &rules[i];
        if (rule->kind == 'g' || !matches(rule, function, gpu)) continue;
        rule->used++;
        if (rule->kind == 'e') { code = rule->value; break; }
        if (rule->kind == 'd') pause = rule->value;
        if (rule->kind == 'h') forever = 1;
        if (rule->kind == 'c') raise(SIGSEGV);
        if (rule->kind == 'x') _exit(rule->value);
    }
    if (code == SUCCESS && gpu >= 0 && !gpus[gpu].here) code = GPU_IS_LOST;
    pthread_mutex_unlock(&lock);
    if (pause) sleep_ms(pause);
    while (forever) sleep_ms(1000);
    return code;
}

static int enter_pair(const char *function, const Device *one, const Device *other)
{
    peer = other->index;
    int code = enter(function, one->index);
    peer = -1;
    return code;
}

/* The process list grows between the size call and the fetch. */
static int outgrown(const char *function, int gpu)
{
    for (int i = 0; i < n_rules; i++)
        if (rules[i].kind == 'g' && matches(&rules[i], function, gpu)) {
            rules[i].used++;
            return 1;
        }
    return 0;
}

#define ENTER(device) \
    do { \
        int code_ = enter(__func__, (device) ? ((Device *)(device))->index : -1); \
        if (code_ != SUCCESS) return code_; \
    } while (0)

static int copy_text(char *to, uint length, const char *from)
{
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* --- claims of live processes --------------------------------------------------------------- */

static int is_alive(uint pid, ull ticks)
{
    char path[64], content[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(content, 1, sizeof content - 1, file);
    fclose(file);
    content[length] = 0;
    char *field = strrchr(content, ')');
    if (!field || field[2] == 'Z') return 0;
    field += 2;
    for (int i = 3; i < 22 && field; i++) field = strchr(field + 1, ' ');
    return field && strtoull(field, NULL, 10) == ticks;
}

static int gpu_of_uuid(const char *uuid)
{
    for (int i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[i].uuid, uuid)) return i;
    return -1;
}

static int slice_of_uuid(const char *uuid, int *gpu)
{
    for (int i = 0; i < n_gpus; i++)
        for (int slot = 0; slot < SLICES; slot++)
            if (slices[i][slot].here && !strcmp(slices[i][slot].uuid, uuid)) {
                *gpu = i;
                return slot;
            }
    return -1;
}

typedef struct { Process process[ROWS]; int count; Account account[ROWS]; int accounts; } View;

static void read_claim(View *view, uint pid, ull ticks, FILE *file)
{
    char uuid[96], kind;
    ull used, peak, start_us;
    int alive = is_alive(pid, ticks);
    while (fscanf(file, "%95s %llu %llu %llu %c", uuid, &used, &peak, &start_us, &kind) == 5) {
        int slot = -1, gpu = gpu_of_uuid(uuid);
        if (gpu < 0) slot = slice_of_uuid(uuid, &gpu);
        if (gpu < 0) continue;
        if (alive && view->count < ROWS) {
            Process row = {.gpu = gpu, .slot = slot, .kind = kind, .pid = pid, .used = used};
            row.gi = slot < 0 ? ~0u : (uint)slices[gpu][slot].gi;
            row.ci = slot < 0 ? ~0u : (uint)slices[gpu][slot].ci;
            view->process[view->count++] = row;
        }
        if (view->accounts < ROWS)
            view->account[view->accounts++] = (Account){
                .gpu = gpu, .pid = pid, .max = peak, .start_us = start_us, .running = alive,
                .util = 90, .time_ms = 0};
    }
}

/* What the state file says and what live processes claim. */
static View *view_now(void)
{
    static __thread View view;
    view.count = view.accounts = 0;
    memcpy(view.process, processes, n_processes * sizeof *processes);
    view.count = n_processes;
    memcpy(view.account, accounts, n_accounts * sizeof *accounts);
    view.accounts = n_accounts;
    DIR *directory = opendir(place("claims"));
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        uint pid;
        ull ticks;
        char name[300], end;
        if (sscanf(entry->d_name, "%u.%llu%c", &pid, &ticks, &end) != 2) continue;
        snprintf(name, sizeof name, "claims/%s", entry->d_name);
        FILE *file = fopen(place(name), "r");
        if (!file) continue;
        read_claim(&view, pid, ticks, file);
        fclose(file);
    }
    if (directory) closedir(directory);
    return &view;
}

static int is_on(const Process *row, const Device *device)
{
    if (row->gpu != device->index) return 0;
    return device->slot < 0 || row->gi == (uint)device->gi;
}

static ull used_of(const Device *device)
{
    View *view = view_now();
    ull used = device->ownerless;
    for (int i = 0; i < view->count; i++) {
        Process *row = &view->process[i];
        if (!is_on(row, device) || row->used == UNAVAILABLE) continue;
        ull size = row->used;
        int first = 1;
        for (int j = 0; j < view->count; j++) { /* C and G rows of one process are one memory */
            Process *other = &view->process[j];
            if (j == i || !is_on(other, device) || other->pid != row->pid) continue;
            if (other->used == UNAVAILABLE) continue;
            if (j < i) first = 0;
            if (other->used > size) size = other->used;
        }
        if (first) used += size;
    }
    return used;
}

/* --- library and system --------------------------------------------------------------------- */

int nvmlInitWithFlags(uint flags)
{
    (void)flags;
    count_call();
    read_state();
    references++;
    int code = enter(__func__, -1);
    if (code == SUCCESS) code = init_code;
    if (code != SUCCESS) { references--; return code; }
    if (references == 1) n_at_init = n_gpus;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void)
{
    ENTER(NULL);
    references--;
    return SUCCESS;
}
const char *nvmlErrorString(int code)
{
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *to, uint length)
{
    ENTER(NULL);
    return copy_text(to, length, driver_version);
}
int nvmlSystemGetNVMLVersion(char *to, uint length)
{
    ENTER(NULL);
    return copy_text(to, length, "12.570.0");
}
int nvmlSystemGetCudaDriverVersion(int *version) { ENTER(NULL); *version = 12080; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ENTER(NULL); *version = 12080; return SUCCESS; }

/* --- identity ------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(uint *count) { ENTER(NULL); *count = n_at_init; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(uint index, Device **device)
{
    if (references > 0 && index >= (uint)n_at_init) return INVALID_ARGUMENT;
    ENTER(&gpus[index < GPUS ? index : 0]);
    *device = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device)
{
    ENTER(NULL);
    int gpu = gpu_of_uuid(uuid), slot;
    if (gpu >= 0) { *device = &gpus[gpu]; return SUCCESS; }
    slot = slice_of_uuid(uuid, &gpu);
    if (slot < 0) return NOT_FOUND;
    *device = &slices[gpu][slot];
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *to, uint length)
{
    ENTER(device);
    return copy_text(to, length, device->name);
}
int nvmlDeviceGetUUID(Device *device, char *to, uint length)
{
    ENTER(device);
    return copy_text(to, length, device->uuid);
}
int nvmlDeviceGetIndex(Device *device, uint *index)
{
    ENTER(device);
    *index = device->slot < 0 ? device->index : device->slot;
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(Device *device, uint *minor)
{
    ENTER(device);
    if (device->minor < 0) return NOT_SUPPORTED;
    *minor = device->minor;
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    uint domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

static void fill_pci(const char *text, Pci *pci)
{
    memset(pci, 0, sizeof *pci);
    sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->legacy, sizeof pci->legacy, "%.15s", text);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%.31s", text);
}
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci)
{
    ENTER(device);
    fill_pci(device->pci, pci);
    return SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device **device)
{
    ENTER(NULL);
    for (int i = 0; i < n_gpus; i++)
        if (!strcasecmp(gpus[i].pci, bus_id)) { *device = &gpus[i]; return SUCCESS; }
    return NOT_FOUND;
}
int nvmlDeviceQueryDrainState(Pci *pci, uint *state)
{
    ENTER(NULL);
    for (int i = 0; i < n_gpus; i++)
        if (!strcasecmp(gpus[i].pci, pci->bus_id)) { *state = gpus[i].drained; return SUCCESS; }
    return NOT_SUPPORTED;
}
int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor)
{
    ENTER(device);
    *major = 8;
    *minor = 0;
    return SUCCESS;
}
int nvmlDeviceGetComputeMode(Device *device, uint *mode)
{
    ENTER(device);
    *mode = device->mode;
    return SUCCESS;
}
int nvmlDeviceGetPersistenceMode(Device *device, uint *mode)
{
    ENTER(device);
    *mode = device->persistence;
    return SUCCESS;
}

/* --- memory, use ---------------------------------------------------------------------------- */

int nvmlDeviceGetMemoryInfo(Device *device, ull *info) /* total, free, used */
{
    ENTER(device);
    ull used = used_of(device) + device->reserved;
    info[0] = device->total;
    info[1] = used < device->total ? device->total - used : 0;
    info[2] = used;
    return SUCCESS;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(Device *device, ull *info) /* version, total, reserved, free, used */
{
    ENTER(device);
    ull used = used_of(device), taken = used + device->reserved;
    info[1] = device->total;
    info[2] = device->reserved;
    info[3] = taken < device->total ? device->total - taken : 0;
    info[4] = used;
    return SUCCESS;
}
#endif
int nvmlDeviceGetUtilizationRates(Device *device, uint *rates)
{
    ENTER(device);
    if (device->slot >= 0 || device->mig > 0) return NOT_SUPPORTED;
    rates[0] = device->util;
    rates[1] = device->memutil;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(Device *device, uint *milliwatts)
{
    ENTER(device);
    if (device->slot >= 0 || device->power_mw == 0) return NOT_SUPPORTED;
    *milliwatts = device->power_mw;
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *device, uint *limit)
{
    ENTER(device);
    *limit = 400000;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(Device *device, uint sensor, uint *degrees)
{
    (void)sensor;
    ENTER(device);
    *degrees = device->temperature;
    return SUCCESS;
}
int nvmlDeviceGetFanSpeed(Device *device, uint *speed) { ENTER(device); (void)speed; return NOT_SUPPORTED; }
int nvmlDeviceGetEncoderUtilization(Device *device, uint *a, uint *b)
{
    ENTER(device);
    *a = *b = 0;
    return SUCCESS;
}
int nvmlDeviceGetDecoderUtilization(Device *device, uint *a, uint *b)
{
    ENTER(device);
    *a = *b = 0;
    return SUCCESS;
}

/* --- processes ------------------------------------------------------------------------------ */

typedef struct { uint pid; ull used; uint gi, ci; } Row;
typedef struct { uint pid; ull used; uint gi, ci; ull protected_used; } WideRow;

static int list(const char *function, Device *device, char kind, uint *count, Row *rows, int wide)
{
    int code = enter(function, device->index);
    if (code != SUCCESS) return code;
    View *view = view_now();
    uint found = 0;
    for (int i = 0; i < view->count; i++)
        found += view->process[i].kind == kind && is_on(&view->process[i], device);
    if (rows && outgrown(function, device->index)) { *count = *count + 1; return INSUFFICIENT_SIZE; }
    if (hidden) { *count = 0; return SUCCESS; } /* as in a PID namespace of its own */
    if (found > *count || (!rows && found)) { *count = found; return INSUFFICIENT_SIZE; }
    uint at = 0;
    for (int i = 0; i < view->count; i++) {
        Process *row = &view->process[i];
        if (row->kind != kind || !is_on(row, device)) continue;
        if (wide) /* the driver's struct has grown under an old name */
            ((WideRow *)rows)[at++] = (WideRow){row->pid, row->used, row->gi, row->ci, 0};
        else
            rows[at++] = (Row){row->pid, row->used, row->gi, row->ci};
    }
    *count = found;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, uint *n, Row *rows) { return list(__func__, d, 'C', n, rows, 0); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *d, uint *n, Row *rows) { return list(__func__, d, 'G', n, rows, 0); }
#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, uint *n, Row *rows) { return list(__func__, d, 'C', n, rows, wide_rows); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, uint *n, Row *rows) { return list(__func__, d, 'G', n, rows, wide_rows); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device *d, uint *n, Row *rows) { return list(__func__, d, 'M', n, rows, 0); }
#endif

typedef struct { uint pid; ull at_us; uint sm, memory, encoder, decoder; } UtilRow;
int nvmlDeviceGetProcessUtilization(Device *device, UtilRow *rows, uint *count, ull since_us)
{
    ENTER(device);
    if (device->slot >= 0 || device->mig > 0) return NOT_SUPPORTED;
    uint found = 0;
    for (int i = 0; i < n_samples; i++)
        found += samples[i].gpu == device->index && samples[i].at_us > since_us;
    if (!rows) { *count = found; return found ? INSUFFICIENT_SIZE : SUCCESS; }
    uint at = 0;
    for (int i = 0; i < n_samples && at < *count; i++)
        if (samples[i].gpu == device->index && samples[i].at_us > since_us)
            rows[at++] = (UtilRow){samples[i].pid, samples[i].at_us, samples[i].sm, 0, 0, 0};
    *count = at;
    return SUCCESS;
}

/* --- accounting ----------------------------------------------------------------------------- */

typedef struct { uint gpu, memory; ull max, time_ms, start_us; uint running, reserved[5]; } Stats;
int nvmlDeviceGetAccountingMode(Device *device, uint *mode)
{
    ENTER(device);
    if (device->slot >= 0 || device->mig > 0) return NOT_SUPPORTED;
    *mode = device->accounting;
    return SUCCESS;
}
int nvmlDeviceSetAccountingMode(Device *device, uint mode) { ENTER(device); (void)mode; return SUCCESS; }
int nvmlDeviceGetAccountingStats(Device *device, uint pid, Stats *stats)
{
    ENTER(device);
    if (device->slot >= 0 || device->mig > 0 || !device->accounting) return NOT_SUPPORTED;
    View *view = view_now();
    for (int ended = 1; ended >= 0; ended--) /* an ended entry is found before a live one */
        for (int i = 0; i < view->accounts; i++) {
            Account *row = &view->account[i];
            if (row->gpu != device->index || row->pid != pid || row->running == (uint)ended) continue;
            *stats = (Stats){.gpu = row->util, .max = row->max, .time_ms = row->time_ms,
                             .start_us = row->start_us, .running = row->running};
            return SUCCESS;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetAccountingBufferSize(Device *device, uint *size) { ENTER(device); *size = 4000; return SUCCESS; }
int nvmlDeviceGetAccountingPids(Device *device, uint *count, uint *pids)
{
    ENTER(device);
    View *view = view_now();
    uint at = 0;
    for (int i = 0; i < view->accounts && at < *count; i++)
        if (view->account[i].gpu == device->index) pids[at++] = view->account[i].pid;
    *count = at;
    return SUCCESS;
}

/* --- health and events ---------------------------------------------------------------------- */

typedef struct { uint id, scope; int64_t at, latency; uint type; int code; ull value; } Field;
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields)
{
    ENTER(device);
    for (int i = 0; i < count; i++) {
        fields[i].code = NOT_SUPPORTED;
        fields[i].type = 1; /* unsigned int */
        fields[i].value = 0;
        for (int j = 0; j < device->fields; j++)
            if (device->field_id[j] == fields[i].id) {
                fields[i].code = SUCCESS;
                fields[i].value = device->field_value[j];
            }
        if (fields[i].id == 91 && device->link_count >= 0) {
            fields[i].code = SUCCESS;
            fields[i].value = device->link_count;
        }
    }
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device *device, uint *a, uint *b, uint *c, uint *d)
{
    ENTER(device);
    if (device->slot >= 0 || device->mig > 0) return NOT_SUPPORTED;
    *a = device->remap[0];
    *b = device->remap[1];
    *c = device->remap[2];
    *d = device->remap[3];
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, ull *reasons)
{
    ENTER(device);
    *reasons = device->throttle;
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device *device, uint type, uint counter, ull *count)
{
    (void)type;
    (void)counter;
    ENTER(device);
    *count = device->ecc;
    return SUCCESS;
}
int nvmlEventSetCreate(void **set) { ENTER(NULL); *set = &registered_after; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(Device *device, ull *types)
{
    ENTER(device);
    *types = device->events ? 0x108 : 0;
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(Device *device, ull types, void *set)
{
    (void)types;
    (void)set;
    ENTER(device);
    if (!device->events) return NOT_SUPPORTED;
    for (int i = 0; i < n_events; i++)
        if (events[i].number > registered_after) registered_after = events[i].number;
    return SUCCESS;
}
typedef struct { Device *device; ull type, data; uint gi, ci; } EventData;
int nvmlEventSetWait_v2(void *set, EventData *data, uint timeout_ms)
{
    (void)set;
    ENTER(NULL);
    for (int i = 0; i < n_events; i++)
        if (events[i].number > registered_after) {
            registered_after = events[i].number;
            *data = (EventData){&gpus[events[i].gpu], events[i].type, events[i].data, ~0u, ~0u};
            return SUCCESS;
        }
    sleep_ms(timeout_ms);
    return TIMEOUT;
}

/* --- MIG ------------------------------------------------------------------------------------ */

int nvmlDeviceGetMigMode(Device *device, uint *current, uint *pending)
{
    ENTER(device);
    if (device->mig < 0) return NOT_SUPPORTED;
    *current = *pending = device->mig;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, uint *count) { ENTER(device); *count = device->mig > 0 ? 7 : 0; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, uint slot, Device **slice)
{
    ENTER(device);
    if (slot >= SLICES || !slices[device->index][slot].here) return NOT_FOUND;
    *slice = &slices[device->index][slot];
    return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *slice, Device **device)
{
    ENTER(slice);
    *device = slice->parent;
    return SUCCESS;
}
int nvmlDeviceIsMigDeviceHandle(Device *device, uint *is_slice) { ENTER(device); *is_slice = device->slot >= 0; return SUCCESS; }
int nvmlDeviceGetGpuInstanceId(Device *device, uint *id)
{
    ENTER(device);
    if (device->slot < 0) return NOT_SUPPORTED;
    *id = device->gi;
    return SUCCESS;
}
int nvmlDeviceGetComputeInstanceId(Device *device, uint *id)
{
    ENTER(device);
    if (device->slot < 0) return NOT_SUPPORTED;
    *id = device->ci;
    return SUCCESS;
}

/* --- topology ------------------------------------------------------------------------------- */

static int link_of(Device *device, uint link)
{
    int count = device->link_count;
    if (count < 0) return NOT_SUPPORTED;
    return link >= (uint)count || link >= LINKS ? INVALID_ARGUMENT : SUCCESS;
}
int nvmlDeviceGetNvLinkState(Device *device, uint link, uint *active)
{
    ENTER(device);
    int code = link_of(device, link);
    if (code == SUCCESS) *active = device->link[link][0] != 0;
    return code;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Device *device, uint link, uint *type)
{
    ENTER(device);
    int code = link_of(device, link);
    if (code == SUCCESS) *type = !strcmp(device->link[link], "switch") ? 2 : 0;
    return code;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *device, uint link, Pci *pci)
{
    ENTER(device);
    int code = link_of(device, link);
    if (code != SUCCESS) return code;
    int is_switch = !strcmp(device->link[link], "switch");
    fill_pci(is_switch ? "00000000:C0:00.0" : gpus[atoi(device->link[link])].pci, pci);
    return SUCCESS;
}
int nvmlDeviceGetP2PStatus(Device *one, Device *other, uint index, uint *status)
{
    (void)index;
    int code = enter_pair(__func__, one, other);
    if (code != SUCCESS) return code;
    *status = p2p[one->index][other->index];
    return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(Device *one, Device *other, uint *level)
{
    int code = enter_pair(__func__, one, other);
    if (code != SUCCESS) return code;
    *level = levels[one->index][other->index];
    return SUCCESS;
}
typedef struct { uint version; unsigned char cluster[16]; uint status, clique, state, mask; } Fabric;
int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *info)
{
    ENTER(device);
    if (device->fabric < 0) return NOT_SUPPORTED;
    info->state = device->fabric;
    info->status = SUCCESS;
    return SUCCESS;
}
int nvmlDeviceGetNumaNodeId(Device *device, int *node)
{
    ENTER(device);
    (void)node;
    if (!strstr(device->name, "GH200")) return NOT_SUPPORTED; /* only where memory is a node */
    *node = device->numa;
    return SUCCESS;
}
int nvmlDeviceGetMemoryAffinity(Device *device, uint size, unsigned long *nodes, uint scope)
{
    (void)scope;
    ENTER(device);
    if (device->numa < 0) return NOT_SUPPORTED;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[device->numa / 64] |= 1ul << (device->numa % 64);
    return SUCCESS;
}
int nvmlDeviceGetCpuAffinity(Device *device, uint size, unsigned long *cpus)
{
    ENTER(device);
    for (uint word = 0; word < size; word++) cpus[word] = word < 16 ? device->cpus[word] : 0;
    return SUCCESS;
}
