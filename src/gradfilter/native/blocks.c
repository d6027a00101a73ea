/* Large blocks of memory that are used again: a fresh one costs a page fault per 4 kB, more than the pass that fills it.
 *
 * A block that comes back is kept, together with the free ones that lie next to it; a request takes the head of the
 * smallest kept one that is large enough. (Blocks kept whole, each for requests of its own size, would be too many to
 * keep for the maps of a network, and the largest would be gone by the next step.) What is kept and free never exceeds
 * the largest amount that was in use at once by more than a quarter, which gaps between blocks may take; the blocks that
 * have lain unused for longest go first.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels.h"

enum { GRAIN = 1 << 16, HUGE_PAGE = 1 << 21, AXES = 8 };

typedef struct block {
    char *memory;
    size_t bytes;
    struct block *next; /* of the free blocks: the one that came back before this one */
} block;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *kept;
static size_t kept_bytes, used_bytes, most_bytes;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) { pthread_mutex_init(&lock, NULL); }
static void start(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

/* Map memory that starts at a huge page, so that all of it can lie on huge pages. */
static char *map_memory(size_t bytes) {
    char *all = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)all % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(all, before);
    if (before < HUGE_PAGE) munmap(all + before + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(all + before, bytes, MADV_HUGEPAGE);
#endif
    return all + before;
}

static void release(block *b) {
    munmap(b->memory, b->bytes);
    free(b);
}

/* Give free blocks back to the system, the oldest first, until at most `limit` bytes are kept. Under the lock. */
static void shrink(size_t limit) {
    while (kept_bytes > limit) {
        block **last = &kept;
        while ((*last)->next) last = &(*last)->next;
        kept_bytes -= (*last)->bytes;
        release(*last);
        *last = NULL;
    }
}

static block *describe(char *memory, size_t bytes) {
    block *b = malloc(sizeof *b);
    if (b) *b = (block){.memory = memory, .bytes = bytes};
    return b;
}

/* Take `bytes` from the smallest free block that has them. Under the lock. */
static block *take_kept(size_t bytes) {
    block **best = NULL;
    for (block **at = &kept; *at; at = &(*at)->next)
        if ((*at)->bytes >= bytes && (!best || (*at)->bytes < (*best)->bytes)) best = at;
    if (!best) return NULL;
    block *whole = *best, *head = whole->bytes > bytes ? describe(whole->memory, bytes) : NULL;
    if (head) {
        whole->memory += bytes;
        whole->bytes -= bytes;
    } else {
        *best = whole->next;
        head = whole;
    }
    kept_bytes -= head->bytes;
    return head;
}

/* Put a block first among the free ones, in one with those that lie next to it. Under the lock. */
static void keep(block *b) {
    kept_bytes += b->bytes;
    for (block **at = &kept; *at;) {
        block *other = *at;
        const int before = other->memory + other->bytes == b->memory;
        if (!before && b->memory + b->bytes != other->memory) {
            at = &other->next;
            continue;
        }
        if (before) b->memory = other->memory;
        b->bytes += other->bytes;
        *at = other->next;
        free(other);
    }
    b->next = kept;
    kept = b;
}

static block *make_block(size_t bytes) {
    char *memory = map_memory(bytes);
    if (!memory) return NULL;
    block *b = describe(memory, bytes);
    if (!b) munmap(memory, bytes);
    return b;
}

static block *take(size_t bytes) {
    pthread_once(&once, start);
    bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&lock);
    block *b = take_kept(bytes);
    if (!b) {
        b = make_block(bytes);
        if (!b) {
            shrink(0);
            b = make_block(bytes);
        }
    }
    if (b) {
        used_bytes += b->bytes;
        if (used_bytes > most_bytes) most_bytes = used_bytes;
    }
    pthread_mutex_unlock(&lock);
    return b;
}

static void give_back(block *b) {
    pthread_mutex_lock(&lock);
    used_bytes -= b->bytes;
    keep(b);
    shrink(most_bytes + most_bytes / 4);
    pthread_mutex_unlock(&lock);
}

/* Bytes in use, kept free, and the most that were in use at once. */
GF_EXPORT void gf_block_bytes(int64_t out[3]) {
    pthread_mutex_lock(&lock);
    out[0] = (int64_t)used_bytes;
    out[1] = (int64_t)kept_bytes;
    out[2] = (int64_t)most_bytes;
    pthread_mutex_unlock(&lock);
}

/* Give all free blocks back to the system, and forget how much was in use. */
GF_EXPORT void gf_trim(void) {
    pthread_mutex_lock(&lock);
    shrink(0);
    most_bytes = used_bytes;
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
    int64_t shape[AXES], strides[AXES];
} owner;

static void delete_owner(managed *m) {
    owner *o = m->context;
    give_back(o->memory);
    free(o);
}

/* Make a tensor of `numbers` = shape, then strides, of `axes` axes; NULL where there is no memory. The caller, or
 * whoever consumes it, calls its deleter. */
GF_EXPORT managed *gf_make_tensor(const void *numbers, int axes, int code, int bits, int64_t bytes) {
    owner *o = axes <= AXES ? calloc(1, sizeof *o) : NULL;
    if (!o) return NULL;
    o->memory = take((size_t)bytes);
    if (!o->memory) {
        free(o);
        return NULL;
    }
    const size_t half = sizeof(int64_t) * (size_t)axes;
    memcpy(o->shape, numbers, half);
    memcpy(o->strides, (const char *)numbers + half, half);
    o->head = (managed){
        .view = {o->memory->memory, 1, 0, axes, (uint8_t)code, (uint8_t)bits, 1, o->shape, o->strides, 0},
        .context = o,
        .deleter = delete_owner,
    };
    return &o->head;
}
