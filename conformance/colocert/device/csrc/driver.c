/* libcuda.so.1: the driver calls that torch_memory_saver makes, over memory.c and ledger.c.
 *
 * A handle is the address of its `physical`. Properties, access descriptors, alignment and flags are not read: there is
 * one device, its granule is 2 MiB, and access is read and write.
 */
#include "standin.h"

#define HANDLE(h) ((physical *)(uintptr_t)(h))

EXPORT int cuInit(unsigned flags) {
    (void)flags;
    return OK;
}

EXPORT int cuGetErrorString(int status, const char **text) {
    *text = status == OK                ? "no error"
            : status == INVALID_VALUE   ? "invalid argument"
            : status == OUT_OF_MEMORY   ? "out of memory"
            : status == NOT_INITIALIZED ? "initialization error"
                                        : "unknown error of the stand-in device";
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal ? INVALID_VALUE : OK;
}

EXPORT int cuCtxGetDevice(int *device) { return cuDeviceGet(device, 0); }

/* The one attribute asked for is GPUDirect RDMA, which a laptop has not. */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 0;
    return OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t *granule, const void *properties, int option) {
    (void)properties, (void)option;
    *granule = GRANULE;
    return OK;
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    uint64_t free_now, capacity;
    ledger_totals(&free_now, &capacity);
    *free_bytes = free_now;
    *total = capacity;
    return OK;
}

EXPORT int cuMemCreate(uint64_t *handle, size_t size, const void *properties, uint64_t flags) {
    (void)properties, (void)flags;
    physical *created = NULL;
    int status = memory_create(&created, size);
    *handle = (uint64_t)(uintptr_t)created;
    return status;
}

EXPORT int cuMemRelease(uint64_t handle) { return handle ? memory_release(HANDLE(handle)) : INVALID_VALUE; }

EXPORT int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
    (void)alignment, (void)wanted, (void)flags;
    *address = memory_reserve(size);
    return *address ? OK : OUT_OF_MEMORY;
}

EXPORT int cuMemAddressFree(uint64_t address, size_t size) { return memory_unreserve(address, size); }

EXPORT int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    (void)flags;
    return offset || !handle ? INVALID_VALUE : memory_map(address, size, HANDLE(handle));
}

EXPORT int cuMemUnmap(uint64_t address, size_t size) { return memory_unmap(address, size); }

EXPORT int cuMemSetAccess(uint64_t address, size_t size, const void *descriptors, size_t count) {
    (void)descriptors, (void)count;
    return memory_allow(address, size);
}
