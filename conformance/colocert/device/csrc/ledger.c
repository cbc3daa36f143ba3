/* Who holds how many bytes of the device.
 *
 * The ledger is a small file mapped by every process on one device. A process owns one slot, named by its pid and its
 * start time: a slot whose process is gone, is a zombie, or has a pid that now belongs to another, is cleared by
 * whoever next counts. So the memory of a process killed with SIGKILL comes back, as a driver gives it back.
 *
 * Every process on the device must see the others under the same pids (one pid namespace).
 * colocert/device/ledger.py reads the same file without taking part; `struct ledger` is its format.
 */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOTS 256
#define MAGIC 0x0032524547444C43ull /* "CLDGER2" */

struct slot {
    uint64_t pid; /* 0: empty */
    uint64_t started;
    uint64_t used;
    uint64_t peak;
};

struct ledger {
    uint64_t magic;
    uint64_t capacity;
    uint64_t peak; /* of the whole device */
    uint64_t slots;
    struct slot slot[SLOTS];
    pthread_mutex_t mutex; /* last: its size differs between machines */
};

static struct ledger private_ledger; /* a device of one process; fork copies it */
static struct ledger *ledger;
static struct slot *own; /* this process's slot; 0 until its first charge */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void die(const char *what, const char *name) {
    fprintf(stderr, "colocert stand-in: %s %s: %s\n", what, name, errno ? strerror(errno) : "refused");
    abort();
}

static uint64_t capacity_wanted(void) {
    const char *text = getenv("COLOCERT_STANDIN_CAPACITY");
    if (!text || !*text) return (uint64_t)1 << 30;
    char *end;
    errno = 0;
    uint64_t bytes = strtoull(text, &end, 0);
    if (errno || *end || !bytes) die("COLOCERT_STANDIN_CAPACITY must be a positive number of bytes, got", text);
    return bytes;
}

static void start_ledger(struct ledger *l, int shared) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    if (shared) {
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    }
    pthread_mutex_init(&l->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    l->capacity = capacity_wanted();
    l->slots = SLOTS;
    l->magic = MAGIC;
}

static void open_ledger(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX)) die("cannot open the ledger", path);
    struct stat status;
    if (fstat(fd, &status) || (status.st_size == 0 && ftruncate(fd, sizeof *ledger))) die("cannot size the ledger", path);
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ledger == MAP_FAILED) die("cannot map the ledger", path);
    if (status.st_size == 0) start_ledger(ledger, 1);
    errno = 0;
    if (ledger->magic != MAGIC) die("not a ledger of this version:", path);
    if (ledger->capacity != capacity_wanted()) die("COLOCERT_STANDIN_CAPACITY differs from the one in the ledger", path);
    flock(fd, LOCK_UN); /* closing would not: the mapping keeps the open file, and with it the lock */
    close(fd);
}

static void forked(void) { own = NULL; } /* the slot belongs to the parent */

int ledger_snapshot_on_fork(void) {
    const char *text = getenv("COLOCERT_STANDIN_FORK");
    return text && !strcmp(text, "snapshot");
}

static void initialise(void) {
    const char *path = getenv("COLOCERT_STANDIN_LEDGER");
    errno = EINVAL;
    if (path && *path) {
        if (ledger_snapshot_on_fork()) die("COLOCERT_STANDIN_FORK=snapshot excludes", "COLOCERT_STANDIN_LEDGER");
        open_ledger(path);
        pthread_atfork(NULL, NULL, forked);
    } else {
        ledger = &private_ledger;
        start_ledger(ledger, 0);
        if (!ledger_snapshot_on_fork()) pthread_atfork(NULL, NULL, forked);
    }
}

static void lock(void) {
    pthread_once(&once, initialise);
    /* The last holder died inside: each change is one counter, so what it left is usable. */
    if (pthread_mutex_lock(&ledger->mutex) == EOWNERDEAD) pthread_mutex_consistent(&ledger->mutex);
}

static void unlock(void) { pthread_mutex_unlock(&ledger->mutex); }

/* The start time of a process in clock ticks since boot; 0 where it is gone or only waits to be reaped. */
static uint64_t started(uint64_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *field = strrchr(text, ')'); /* the name may hold blanks and brackets; it is field 2 */
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0;
    for (int i = 2; i < 22 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static int gone(const struct slot *s) {
    if (kill((pid_t)s->pid, 0) && errno == ESRCH) return 1;
    return started(s->pid) != s->started;
}

/* With the lock held: clears the slots of the dead and adds up the rest. */
static uint64_t used_by_all(void) {
    uint64_t used = 0;
    for (int i = 0; i < SLOTS; i++) {
        struct slot *s = &ledger->slot[i];
        if (!s->pid) continue;
        if (s != own && gone(s)) memset(s, 0, sizeof *s);
        used += s->used;
    }
    return used;
}

/* With the lock held: this process's slot, taken at the first charge. */
static struct slot *own_slot(void) {
    if (own) return own;
    for (int i = 0; i < SLOTS; i++) {
        if (ledger->slot[i].pid) continue;
        own = &ledger->slot[i];
        own->pid = (uint64_t)getpid();
        own->started = started(own->pid);
        return own;
    }
    errno = 0;
    die("more than 256 processes on one device;", "the ledger is full");
    return NULL;
}

int ledger_charge(uint64_t bytes) {
    lock();
    uint64_t used = used_by_all();
    int fits = bytes <= ledger->capacity && used <= ledger->capacity - bytes;
    if (fits) {
        struct slot *s = own_slot();
        s->used += bytes;
        if (s->used > s->peak) s->peak = s->used;
        if (used + bytes > ledger->peak) ledger->peak = used + bytes;
    }
    unlock();
    return fits ? OK : OUT_OF_MEMORY;
}

void ledger_uncharge(uint64_t bytes) {
    lock();
    if (own) own->used -= bytes;
    unlock();
}

void ledger_totals(uint64_t *free_bytes, uint64_t *capacity) {
    lock();
    *capacity = ledger->capacity;
    *free_bytes = ledger->capacity - used_by_all();
    unlock();
}

uint64_t colocert_standin_own_bytes(void) {
    lock();
    uint64_t used = own ? own->used : 0;
    unlock();
    return used;
}

uint64_t colocert_standin_own_peak(void) {
    lock();
    uint64_t peak = own ? own->peak : 0;
    unlock();
    return peak;
}

uint64_t colocert_standin_device_peak(void) {
    lock();
    uint64_t peak = ledger->peak;
    unlock();
    return peak;
}

void colocert_standin_reset_own_peak(void) {
    lock();
    if (own) own->peak = own->used;
    unlock();
}

void colocert_standin_reset_device_peak(void) {
    lock();
    ledger->peak = used_by_all();
    unlock();
}
