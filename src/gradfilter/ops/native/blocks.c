/* Large blocks of memory that are used again: a fresh one costs a page fault per 4 kB, more than the pass that fills it.
 *
 * All blocks lie in one range of addresses, each as low as it fits, so that whatever was used before is used again, by
 * blocks of any size. Pages of free blocks stay with the process, but never so many that it holds more than an eighth
 * above the most that was in use at once: what lies highest goes back to the system first.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

enum { GRAIN = 1 << 16, HUGE_PAGE = 1 << 21, ROUND = 2048 };

/* The address sanitizer knows nothing of this range: it is told what of it may be used, with a gap behind every block. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { GAP = GRAIN };
#else
enum { GAP = 0 };
#define ASAN_POISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#endif

/* A part of the range; the parts follow each other without gaps up to the highest one in use. */
typedef struct block {
    char *memory;
    size_t bytes;
    int used, kept; /* kept: free, and its pages are still there */
    struct block *before, *after;
} block;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *range, *range_end;
static block *first, *last;
static size_t kept_bytes, used_bytes, most_bytes;
static size_t most_now, most_before, takes; /* in use at once in this round of requests, and in the one before */

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) { pthread_mutex_init(&lock, NULL); }

/* Reserve addresses, not memory: four times what the machine has, or as much as it lets us have. */
static void start(void) {
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    const size_t pages = (size_t)sysconf(_SC_PHYS_PAGES), page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t bytes = 4 * pages * page / HUGE_PAGE * HUGE_PAGE; bytes > 16 * HUGE_PAGE; bytes /= 2) {
        char *all = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) continue;
        range = all + (HUGE_PAGE - (uintptr_t)all % HUGE_PAGE) % HUGE_PAGE;
        range_end = all + bytes;
#ifdef MADV_HUGEPAGE
        madvise(range, (size_t)(range_end - range), MADV_HUGEPAGE);
#endif
        return;
    }
}

/* Give the pages of free blocks back to the system, the highest first, until at most `limit` bytes are kept. */
static void shrink(size_t limit) {
    for (block *b = last; b && kept_bytes > limit; b = b->before)
        if (b->kept) {
            madvise(b->memory, b->bytes, MADV_DONTNEED);
            b->kept = 0;
            kept_bytes -= b->bytes;
        }
}

static void set_free(block *b, int kept) {
    b->used = 0;
    b->kept = kept;
    if (kept) kept_bytes += b->bytes;
}

/* Put a new part behind `at`, or at the start of the range where that is NULL. */
static block *insert(block *at, char *memory, size_t bytes) {
    block *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    b->memory = memory;
    b->bytes = bytes;
    b->before = at;
    b->after = at ? at->after : first;
    if (b->after) b->after->before = b;
    else last = b;
    if (at) at->after = b;
    else first = b;
    return b;
}

static void drop(block *b) {
    if (b->before) b->before->after = b->after;
    else first = b->after;
    if (b->after) b->after->before = b->before;
    else last = b->before;
    free(b);
}

/* Take the front of a free part; the rest stays a free part of its own. */
static block *take_front(block *b, size_t bytes) {
    const size_t rest = b->bytes - bytes;
    if (rest) {
        block *other = insert(b, b->memory + bytes, rest);
        if (!other) return NULL;
        if (b->kept) kept_bytes -= rest;
        set_free(other, b->kept);
    }
    b->bytes = bytes;
    if (b->kept) kept_bytes -= bytes;
    return b;
}

/* The most bytes that may be kept free; those in use are never more than were in use at once. */
static size_t find_limit(void) { return most_bytes + most_bytes / 8 - used_bytes; }

/* Find the lowest free part that fits, whose pages are there or not. */
static block *find_free(size_t bytes, int kept) {
    block *b = first;
    while (b && (b->used || b->kept != kept || b->bytes < bytes)) b = b->after;
    return b;
}

/* Remember the most that was in use at once; one large batch is not remembered for ever. */
static void note_use(void) {
    if (++takes % ROUND == 0) {
        most_before = most_now;
        most_now = 0;
    }
    if (used_bytes > most_now) most_now = used_bytes;
    most_bytes = most_now > most_before ? most_now : most_before;
}

static block *take(size_t asked) {
    pthread_once(&once, start);
    const size_t bytes = (asked + GAP + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&lock);
    block *b = find_free(bytes, 1);
    if (!b) b = find_free(bytes, 0);
    if (b) {
        b = take_front(b, bytes);
    } else {
        char *end = last ? last->memory + last->bytes : range;
        if (range && (size_t)(range_end - end) >= bytes) b = insert(last, end, bytes);
    }
    if (b) {
        b->used = 1;
        b->kept = 0;
        used_bytes += bytes;
        note_use();
        shrink(find_limit());
        ASAN_UNPOISON_MEMORY_REGION(b->memory, asked);
        ASAN_POISON_MEMORY_REGION(b->memory + asked, bytes - asked);
    }
    pthread_mutex_unlock(&lock);
    return b;
}

/* Join two neighbours that are free alike. */
static void join(block *low, block *high) {
    if (!low || !high || low->used || high->used || low->kept != high->kept) return;
    low->bytes += high->bytes;
    drop(high);
}

static void give_back(block *b) {
    pthread_mutex_lock(&lock);
    ASAN_POISON_MEMORY_REGION(b->memory, b->bytes);
    used_bytes -= b->bytes;
    set_free(b, 1);
    shrink(find_limit());
    join(b, b->after);
    join(b->before, b);
    pthread_mutex_unlock(&lock);
}

void *gf_take_memory(size_t bytes, void **owner) {
    block *b = take(bytes);
    *owner = b;
    return b ? b->memory : aligned_alloc(64, (bytes + 63) / 64 * 64);
}

void gf_give_memory(void *memory, void *owner) {
    if (owner)
        give_back(owner);
    else
        free(memory);
}

/* Bytes in use, kept free, and the most that were in use at once. */
GF_EXPORT void gf_block_bytes(void *to) {
    pthread_mutex_lock(&lock);
    const gf_memory now = {(int64_t)used_bytes, (int64_t)kept_bytes, (int64_t)most_bytes};
    pthread_mutex_unlock(&lock);
    memcpy(to, &now, sizeof now);
}

/* Give all free blocks back to the system, and forget how much was in use. */
GF_EXPORT void gf_trim(void) {
    pthread_mutex_lock(&lock);
    shrink(0);
    most_bytes = most_now = used_bytes;
    most_before = 0;
    pthread_mutex_unlock(&lock);
}

/* A tensor as DLPack (version 0) describes it, so that torch can own a block. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t axes;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} tensor;

typedef struct managed {
    tensor view;
    void *context;
    void (*deleter)(struct managed *);
} managed;

typedef struct {
    managed head;
    block *memory;
    gf_request request;
} owner;

static void delete_owner(managed *m) {
    owner *o = m->context;
    give_back(o->memory);
    free(o);
}

/* Make a tensor; NULL where there is no memory. The caller, or whoever consumes it, calls its deleter. */
GF_EXPORT managed *gf_make_tensor(const void *request) {
    owner *o = calloc(1, sizeof *o);
    if (!o) return NULL;
    gf_request *r = &o->request;
    memcpy(r, request, sizeof *r); /* the caller's bytes have no alignment */
    o->memory = take((size_t)r->bytes);
    if (!o->memory) {
        free(o);
        return NULL;
    }
    o->head = (managed){
        .view = {o->memory->memory, 1, 0, r->axes, (uint8_t)r->code, (uint8_t)r->bits, 1, r->shape, r->strides, 0},
        .context = o,
        .deleter = delete_owner,
    };
    return &o->head;
}
