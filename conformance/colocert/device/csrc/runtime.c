/* libcudart.so.13: the runtime calls that torch_memory_saver and a test make.
 *
 * Its symbols carry the version node `libcudart.so.13`, which the real one has and the preload library asks for.
 * Everything is synchronous; pinned host memory is ordinary memory, locked as far as the machine allows, and counted.
 */
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern int cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
extern int cuGetErrorString(int status, const char **text);

EXPORT const char *cudaGetErrorString(int status) {
    const char *text;
    cuGetErrorString(status, &text);
    return text;
}

EXPORT int cudaSetDevice(int device) { return device ? INVALID_VALUE : OK; }

EXPORT int cudaGetDevice(int *device) {
    *device = 0;
    return OK;
}

EXPORT int cudaDeviceSynchronize(void) { return OK; }

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return cuMemGetInfo_v2(free_bytes, total); }

EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    (void)kind;
    memcpy(to, from, bytes);
    return OK;
}

EXPORT int cudaMemset(void *at, int value, size_t bytes) {
    memset(at, value, bytes);
    return OK;
}

/* What a call outside a region reaches: device memory that no pause moves. */
EXPORT int cudaMalloc(void **out, size_t size) {
    uintptr_t address = 0;
    int status = colocert_standin_block(&address, size);
    *out = (void *)address;
    return status;
}

EXPORT int cudaFree(void *at) { return at ? colocert_standin_unblock((uintptr_t)at) : OK; }

/* Pinned host memory. The page before a block says how large it is and what was asked for. */
struct pinned {
    size_t mapped;
    size_t asked;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t pinned_bytes;

static void count(int64_t change) {
    pthread_mutex_lock(&mutex);
    pinned_bytes += (uint64_t)change;
    pthread_mutex_unlock(&mutex);
}

/* Blocks begin at a granule: large ones are then of huge pages where the kernel has them, one fault for 512. */
EXPORT int cudaMallocHost(void **out, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *out = NULL;
    if (size > SIZE_MAX - 2 * page - GRANULE) return OUT_OF_MEMORY;
    size_t body = (size + page - 1) / page * page, whole = page + body, room = whole + GRANULE;
    char *raw = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return OUT_OF_MEMORY;
    char *block = (char *)(((uintptr_t)raw + page + GRANULE - 1) & ~(uintptr_t)(GRANULE - 1));
    char *head = block - page, *end = block + body, *limit = raw + room;
    if (head > raw) munmap(raw, (size_t)(head - raw));
    if (limit > end) munmap(end, (size_t)(limit - end));
    madvise(block, body, MADV_HUGEPAGE);
    mlock(head, whole); /* as far as RLIMIT_MEMLOCK goes; the count below is exact either way */
    *(struct pinned *)head = (struct pinned){whole, size};
    count((int64_t)size);
    *out = block;
    return OK;
}

EXPORT int cudaFreeHost(void *at) {
    if (!at) return OK;
    const char *sticky = getenv("COLOCERT_STANDIN_PINNED");
    if (sticky && !strcmp(sticky, "sticky")) return OK; /* torch_memory_saver issue #90: the pages stay */
    char *raw = (char *)at - sysconf(_SC_PAGESIZE);
    struct pinned block = *(struct pinned *)raw;
    count(-(int64_t)block.asked);
    return munmap(raw, block.mapped) ? INVALID_VALUE : OK;
}

uint64_t colocert_standin_pinned_bytes(void) {
    pthread_mutex_lock(&mutex);
    uint64_t bytes = pinned_bytes;
    pthread_mutex_unlock(&mutex);
    return bytes;
}
