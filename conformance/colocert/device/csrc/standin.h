/* The stand-in device: a GPU's memory, and nothing else of a GPU.
 *
 * Two shared libraries take the place of the CUDA driver (libcuda.so.1) and of its runtime
 * (libcudart.so.13) under an unmodified torch_memory_saver:
 *
 *     ledger.c    who holds how many bytes; one file shared by every process on one "GPU"
 *     memory.c    physical memory, reserved addresses, and which of the first is mapped at which of the second
 *     driver.c    cu*:   the driver calls that torch_memory_saver makes
 *     runtime.c   cuda*: the runtime calls that torch_memory_saver and a test make
 *
 * Known here: capacity, granules, residency, contents, processes. Not known: streams, kernels, contexts, more
 * than one device, bandwidth. A touch of released memory is a SIGSEGV where a GPU reports an illegal access.
 *
 * Environment, read once a process:
 *     COLOCERT_STANDIN_CAPACITY   bytes of the device (default 1 GiB)
 *     COLOCERT_STANDIN_LEDGER     the ledger file; without it the device belongs to this process alone
 *     COLOCERT_STANDIN_PINNED     "sticky": freed pinned host memory is never given back
 *     COLOCERT_STANDIN_FORK       "snapshot": a forked child has its own copy of the whole device (no ledger file)
 */
#ifndef COLOCERT_STANDIN_H
#define COLOCERT_STANDIN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

/* Status codes that the driver and the runtime share, with CUDA's values. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3, /* what CUDA says in a child forked after the first use */
    UNKNOWN = 999,
};

#define GRANULE ((size_t)2 << 20)
#define POISON 0xDB /* what new physical memory contains */

#define EXPORT __attribute__((visibility("default")))

typedef struct physical physical; /* one cuMemCreate */

/* ledger.c */
int ledger_charge(uint64_t bytes); /* OUT_OF_MEMORY where the capacity does not allow it; nothing is charged then */
void ledger_uncharge(uint64_t bytes);
void ledger_totals(uint64_t *free_bytes, uint64_t *capacity);
int ledger_snapshot_on_fork(void);

/* memory.c; an address is 0 where none could be had */
int memory_create(physical **out, size_t size);
int memory_release(physical *handle);
uintptr_t memory_reserve(size_t size);
int memory_unreserve(uintptr_t address, size_t size);
int memory_map(uintptr_t address, size_t size, physical *handle);
int memory_unmap(uintptr_t address, size_t size);
int memory_allow(uintptr_t address, size_t size);
/* A whole device block as cudaMalloc hands it out: reserved, created, mapped. */
EXPORT int colocert_standin_block(uintptr_t *address, size_t size);
EXPORT int colocert_standin_unblock(uintptr_t address);

/* What a test may ask; loaded by name from Python. */
EXPORT uint64_t colocert_standin_own_bytes(void);
EXPORT uint64_t colocert_standin_own_peak(void);    /* high-water mark of own bytes */
EXPORT uint64_t colocert_standin_device_peak(void); /* high-water mark of the whole device */
EXPORT void colocert_standin_reset_own_peak(void);
EXPORT void colocert_standin_reset_device_peak(void);
EXPORT uint64_t colocert_standin_pinned_bytes(void); /* in libcudart: host bytes held by cudaMallocHost */

#endif
