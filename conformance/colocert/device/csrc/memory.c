/* Physical memory, reserved addresses, and what is mapped where.
 *
 * Physical memory is a memfd, so that device bytes show as shared memory of the process and never disturb a test that
 * counts its anonymous host memory. With COLOCERT_STANDIN_FORK=snapshot it is private anonymous memory that is moved to
 * its address, so that a fork copies the device and the next touch on either side stays on that side.
 *
 * A block of physical memory is mapped at one address at most, and as a whole: torch_memory_saver asks for no more.
 */
#include "standin.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct physical {
    size_t size;
    int fd;            /* -1: private memory */
    char *parked;      /* where the memory lies while it is mapped nowhere; 0: a memfd that was mapped before */
    uintptr_t address; /* where it is mapped; 0: nowhere */
    int released;      /* the handle is gone; the memory stays until it is unmapped, as in CUDA */
    pid_t owner;
    physical *next; /* in its bucket, while mapped */
};

#define NOWHERE (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
#define BUCKETS 4096
static physical *mapped[BUCKETS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static physical **bucket(uintptr_t address) { return &mapped[address / GRANULE % BUCKETS]; }

/* With the mutex held: the link that points at what is mapped there; the link holds 0 where nothing is. */
static physical **find(uintptr_t address) {
    physical **link = bucket(address);
    while (*link && (*link)->address != address) link = &(*link)->next;
    return link;
}

/* A child that was forked after the first allocation has no device, unless fork copies it. */
static int foreign(const physical *p) { return p->owner != getpid() && !ledger_snapshot_on_fork(); }

static char *reserve(size_t size, int protection) {
    char *raw = mmap(NULL, size + GRANULE, protection, NOWHERE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *aligned = (char *)(((uintptr_t)raw + GRANULE - 1) & ~(GRANULE - 1));
    if (aligned > raw) munmap(raw, aligned - raw);
    munmap(aligned + size, GRANULE - (aligned - raw));
    return aligned;
}

static int back_by_private_memory(physical *p) {
    p->fd = -1;
    p->parked = reserve(p->size, PROT_READ | PROT_WRITE);
    if (!p->parked) return 0;
    madvise(p->parked, p->size, MADV_HUGEPAGE); /* one fault a granule where the kernel has huge pages */
    memset(p->parked, POISON, p->size);
    return 1;
}

static int back_by_memfd(physical *p) {
    p->fd = (int)syscall(SYS_memfd_create, "colocert-standin", 1u /* close on exec */);
    if (p->fd < 0) return 0;
    /* Taking the pages now turns a full machine into an out-of-memory code rather than a SIGBUS later. */
    int flags = MAP_SHARED | MAP_POPULATE | MAP_FIXED;
    if (!ftruncate(p->fd, (off_t)p->size) && !fallocate(p->fd, 0, 0, (off_t)p->size))
        p->parked = reserve(p->size, PROT_NONE);
    if (!p->parked || mmap(p->parked, p->size, PROT_READ | PROT_WRITE, flags, p->fd, 0) == MAP_FAILED) {
        if (p->parked) munmap(p->parked, p->size);
        close(p->fd);
        return 0;
    }
    memset(p->parked, POISON, p->size); /* the view moves to the memory's first address: its pages are mapped once */
    return 1;
}

int memory_create(physical **out, size_t size) {
    if (!size || size % GRANULE) return INVALID_VALUE;
    int status = ledger_charge(size);
    if (status) return status;
    physical *p = calloc(1, sizeof *p);
    if (p) {
        p->size = size;
        p->owner = getpid();
        if (ledger_snapshot_on_fork() ? back_by_private_memory(p) : back_by_memfd(p)) {
            *out = p;
            return OK;
        }
    }
    free(p);
    ledger_uncharge(size);
    return OUT_OF_MEMORY;
}

static void give_back(physical *p) {
    if (p->fd >= 0) close(p->fd);
    if (p->parked) munmap(p->parked, p->size);
    ledger_uncharge(p->size);
    free(p);
}

int memory_release(physical *p) {
    if (foreign(p)) return NOT_INITIALIZED;
    pthread_mutex_lock(&mutex);
    int still_mapped = p->address != 0;
    p->released = 1;
    pthread_mutex_unlock(&mutex);
    if (!still_mapped) give_back(p);
    return OK;
}

uintptr_t memory_reserve(size_t size) {
    if (!size || size % GRANULE) return 0;
    return (uintptr_t)reserve(size, PROT_NONE);
}

int memory_unreserve(uintptr_t address, size_t size) { return munmap((void *)address, size) ? INVALID_VALUE : OK; }

int memory_map(uintptr_t address, size_t size, physical *p) {
    if (foreign(p)) return NOT_INITIALIZED;
    if (address % GRANULE || size != p->size || p->address) return INVALID_VALUE;
    void *at = (void *)address;
    if (!p->parked) {
        if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    } else {
        if (mremap(p->parked, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) return OUT_OF_MEMORY;
        p->parked = NULL;
        if (mprotect(at, size, PROT_NONE)) return UNKNOWN;
    }
    pthread_mutex_lock(&mutex);
    p->address = address;
    p->next = *bucket(address);
    *bucket(address) = p;
    pthread_mutex_unlock(&mutex);
    return OK;
}

/* Private memory leaves its address with its contents; a memfd keeps them by itself. */
static int move_out(physical *p) {
    if (p->fd >= 0 || p->released) return OK;
    char *parked = reserve(p->size, PROT_NONE);
    if (!parked) return OUT_OF_MEMORY;
    if (mremap((void *)p->address, p->size, p->size, MREMAP_MAYMOVE | MREMAP_FIXED, parked) == MAP_FAILED) return UNKNOWN;
    p->parked = parked;
    return OK;
}

int memory_unmap(uintptr_t address, size_t size) {
    pthread_mutex_lock(&mutex);
    physical **link = find(address), *p = *link;
    int status = !p || p->size != size ? INVALID_VALUE : foreign(p) ? NOT_INITIALIZED : move_out(p);
    if (!status) {
        if (mmap((void *)address, size, PROT_NONE, NOWHERE | MAP_FIXED, -1, 0) == MAP_FAILED) status = OUT_OF_MEMORY;
    }
    if (!status) {
        *link = p->next;
        p->address = 0;
    }
    int last_use = !status && p->released;
    pthread_mutex_unlock(&mutex);
    if (last_use) give_back(p);
    return status;
}

int memory_allow(uintptr_t address, size_t size) {
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
#ifdef MADV_POPULATE_WRITE
    madvise((void *)address, size, MADV_POPULATE_WRITE); /* the pages exist: one call instead of a fault each */
#endif
    return OK;
}

int colocert_standin_block(uintptr_t *address, size_t size) {
    if (size > SIZE_MAX - GRANULE) return OUT_OF_MEMORY;
    size = size ? (size + GRANULE - 1) / GRANULE * GRANULE : GRANULE;
    physical *p;
    int status = memory_create(&p, size);
    if (status) return status;
    uintptr_t at = memory_reserve(size);
    status = at ? memory_map(at, size, p) : OUT_OF_MEMORY;
    if (!status) status = memory_allow(at, size);
    memory_release(p); /* from here the mapping alone holds it */
    if (status) {
        if (at) {
            memory_unmap(at, size);
            memory_unreserve(at, size);
        }
        return status;
    }
    *address = at;
    return OK;
}

int colocert_standin_unblock(uintptr_t address) {
    pthread_mutex_lock(&mutex);
    physical *p = *find(address);
    size_t size = p ? p->size : 0;
    pthread_mutex_unlock(&mutex);
    if (!size) return INVALID_VALUE;
    int status = memory_unmap(address, size);
    return status ? status : memory_unreserve(address, size);
}
