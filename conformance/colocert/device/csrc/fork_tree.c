/* Every operation sequence on the real library, in a tree of processes that share their prefixes. A program.
 *
 *     fork-tree DEPTH TAG:BYTES:BACKUP... -- OPERATION...
 *
 * A node of the tree is a process in the state that its sequence leads to. For each operation it forks a child, which
 * applies it, says what it sees, and goes on as a node: an operation runs once however many sequences begin with it,
 * and one that ends its process costs that process only. The stand-in's device forks with it
 * (COLOCERT_STANDIN_FORK=snapshot). It is C because its time is that of its forks, and a small process forks fast.
 *
 * Runs under torch_memory_saver's preload library. colocert.device.differential starts it, says which operations, and
 * reads its lines: the sequence as operation numbers, then how the process ended (exit, or a signal's number), or
 * `alive`, whether the operation was refused, bytes held, free and pinned, and the content of every allocation.
 */
#include "standin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LONGEST 16
#define BROKEN 70  /* exit code of a node that failed by itself; it travels up to the root */
#define PAUSED -1  /* in place of a content, as in differential.py */
#define MIXED -2
#define END 2048 /* bytes at either end of a block that are written and compared; the middle would cost a copy a fork */

struct block {
    unsigned char *at;
    size_t size;
    const char *tag;
    int paused;
};

extern int cudaMalloc(void **out, size_t size);
extern int cudaFree(void *at);
extern int cudaMemGetInfo(size_t *free_bytes, size_t *total);
static int (*tms_pause)(const char *), (*tms_resume)(const char *);
static void (*set_tag)(const char *), (*set_backup)(_Bool), (*set_region)(_Bool);

static char **regions, **operations;
static int region_count, operation_count, depth;

static struct block live[LONGEST];
static int live_count, writes;
static int path[LONGEST], length;

static void fail(const char *what) {
    fprintf(stderr, "fork-tree: %s\n", what);
    _exit(BROKEN);
}

static void say(const char *end, int refused, int alive) {
    char line[1024];
    int n = 0;
    for (int i = 0; i < length; i++) n += snprintf(line + n, sizeof line - n, "%s%d", i ? "," : "", path[i]);
    n += snprintf(line + n, sizeof line - n, " %s", end);
    if (alive) {
        size_t free_bytes, total;
        cudaMemGetInfo(&free_bytes, &total);
        n += snprintf(line + n, sizeof line - n, " %d %llu %zu %llu ", refused,
                      (unsigned long long)colocert_standin_own_bytes(), free_bytes,
                      (unsigned long long)colocert_standin_pinned_bytes());
        for (int i = 0; i < live_count; i++) {
            unsigned char *head = live[i].at, *tail = live[i].at + live[i].size - END;
            int content = PAUSED;
            if (!live[i].paused) {
                int even = !memcmp(head, head + 1, END - 1) && !memcmp(tail, tail + 1, END - 1) && *head == *tail;
                content = even ? *head : MIXED;
            }
            n += snprintf(line + n, sizeof line - n, "%s%d", i ? "," : "", content);
        }
    }
    line[n++] = '\n';
    if (write(STDOUT_FILENO, line, n) != n) fail("cannot write a line");
}

static void write_newest(void) {
    struct block *b = &live[live_count - 1];
    writes++;
    memset(b->at, writes, END);
    memset(b->at + b->size - END, writes, END);
}

static int allocate(const char *tag) {
    for (int i = 0; i < region_count; i++) {
        size_t name = strlen(tag);
        if (strncmp(regions[i], tag, name) || regions[i][name] != ':') continue;
        char *rest;
        struct block *b = &live[live_count];
        *b = (struct block){NULL, strtoull(regions[i] + name + 1, &rest, 10), tag, 0};
        set_tag(tag);
        set_backup(rest[1] == '1');
        set_region(1);
        int status = cudaMalloc((void **)&b->at, b->size);
        set_region(0);
        if (status) return 1;
        live_count++;
        write_newest();
        return 0;
    }
    fail("an operation names a tag that has no region");
    return 1;
}

/* Applies one operation; true where it was refused and the process goes on. */
static int apply(const char *operation) {
    const char *blank = strchr(operation, ' '), *tag = blank ? blank + 1 : NULL;
    int pause = !strncmp(operation, "pause", 5);
    if (pause || !strncmp(operation, "resume", 6)) {
        (pause ? tms_pause : tms_resume)(tag);
        for (int i = 0; i < live_count; i++)
            if (!tag || !strcmp(live[i].tag, tag)) live[i].paused = pause;
        return 0;
    }
    if (!strncmp(operation, "alloc", 5)) return allocate(tag);
    if (!strcmp(operation, "free")) return cudaFree(live[--live_count].at) != OK;
    volatile unsigned char seen = *live[live_count - 1].at;
    (void)seen;
    write_newest();
    return 0;
}

/* Forks a child for each operation, one after another, and says which of them ended it. */
static void extend(void) {
    for (int i = 0; i < operation_count; i++) {
        int on_live = !strcmp(operations[i], "free") || !strcmp(operations[i], "touch");
        if (on_live && !live_count) continue;
        path[length++] = i;
        pid_t child = fork();
        if (child < 0) fail("cannot fork");
        if (!child) {
            say("alive", apply(operations[i]), 1);
            if (length < depth) extend();
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        char end[16] = "exit";
        if (WIFSIGNALED(status)) snprintf(end, sizeof end, "%d", WTERMSIG(status));
        else if (WEXITSTATUS(status) > 1) _exit(BROKEN);
        if (status) say(end, 0, 0);
        length--;
    }
}

int main(int count, char **arguments) {
    int split = 2;
    while (split < count && strcmp(arguments[split], "--")) split++;
    if (split >= count || (depth = atoi(arguments[1])) < 1 || depth > LONGEST) fail("see its head for the arguments");
    regions = arguments + 2, region_count = split - 2;
    operations = arguments + split + 1, operation_count = count - split - 1;
    *(void **)&tms_pause = dlsym(RTLD_DEFAULT, "tms_pause");
    *(void **)&tms_resume = dlsym(RTLD_DEFAULT, "tms_resume");
    *(void **)&set_tag = dlsym(RTLD_DEFAULT, "tms_set_current_tag");
    *(void **)&set_backup = dlsym(RTLD_DEFAULT, "tms_set_enable_cpu_backup");
    *(void **)&set_region = dlsym(RTLD_DEFAULT, "tms_set_interesting_region");
    if (!tms_pause || !tms_resume || !set_tag || !set_backup || !set_region) fail("the preload library is not mapped");
    extend();
    return 0;
}
