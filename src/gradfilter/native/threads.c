/* Work in parallel, on torch's own threads where they can be had, else on a pool of ours.
 *
 * OpenMP's threads wait for their next piece of work awake: ours would have to share their cores with them, and to be
 * woken for every job.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "kernels.h"

enum { MOST_WORKERS = 255, ELEMENTS_PER_THREAD = 65536 };

typedef struct {
    gf_run *run;
    const void *argument;
    int64_t units;
    size_t scratch_bytes;
    int64_t next;  /* atomic: the next unit that nobody has taken */
    int failed;    /* atomic: a thread had no scratch */
} job;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job it is */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static job *current;
static int workers, seats, working;
static pthread_key_t scratch_key;
static gf_team *team; /* atomic: runs a function on all of torch's threads; NULL where there are none to be had */

typedef struct {
    size_t bytes;
    void *memory;
} scratch_block;

static void free_scratch(void *value) {
    scratch_block *block = value;
    free(block->memory);
    free(block);
}

/* Return the thread's own scratch, at least `bytes` long; NULL where there is no memory. */
static void *find_scratch(size_t bytes) {
    scratch_block *block = pthread_getspecific(scratch_key);
    if (!block) {
        block = calloc(1, sizeof *block);
        if (!block || pthread_setspecific(scratch_key, block)) {
            free(block);
            return NULL;
        }
    }
    if (block->bytes < bytes || !block->memory) {
        free(block->memory);
        block->bytes = (bytes + 4095) / 4096 * 4096 + 4096;
        block->memory = aligned_alloc(64, block->bytes);
        if (!block->memory) block->bytes = 0;
    }
    return block->memory;
}

static void take_units(job *j) {
    void *scratch = find_scratch(j->scratch_bytes);
    if (!scratch) {
        __atomic_store_n(&j->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        const int64_t unit = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (unit >= j->units) return;
        j->run(j->argument, unit, scratch);
    }
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!seats) pthread_cond_wait(&wake, &lock);
        job *j = current;
        seats--;
        working++;
        pthread_mutex_unlock(&lock);
        take_units(j);
        pthread_mutex_lock(&lock);
        if (!--working) pthread_cond_signal(&done);
    }
    return NULL;
}

/* Add workers until there are `wanted`, or as many as the system allows. Signals stay with the program's own threads. */
static void hire(int wanted) {
    sigset_t all, before;
    pthread_attr_t detached;
    if (workers >= wanted) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; workers < wanted && !pthread_create(&thread, &detached, work, NULL);) workers++;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void before_fork(void) {
    pthread_mutex_lock(&turn);
    pthread_mutex_lock(&lock);
}

static void after_fork_parent(void) {
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
}

/* A child has only the thread that forked: it starts without workers. */
static void after_fork_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&turn, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&done, NULL);
    current = NULL;
    workers = seats = working = 0;
    gf_set_team(NULL); /* OpenMP's threads are lost, and it does not know */
}

static void start(void) {
    pthread_key_create(&scratch_key, free_scratch);
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

GF_EXPORT void gf_set_team(gf_team *wanted) { __atomic_store_n(&team, wanted, __ATOMIC_RELAXED); }

static void join(void *argument) { take_units(argument); }

int gf_useful_threads(int threads, int64_t elements) {
    const int64_t useful = elements / ELEMENTS_PER_THREAD;
    return useful < threads ? (useful < 1 ? 1 : (int)useful) : threads;
}

int gf_parallel(gf_run *run, const void *argument, int64_t units, int threads, size_t scratch_bytes) {
    job j = {.run = run, .argument = argument, .units = units, .scratch_bytes = scratch_bytes};
    pthread_once(&once, start);
    gf_team *const others = __atomic_load_n(&team, __ATOMIC_RELAXED);
    if (others && threads > 1 && units > 1) {
        others(join, &j, 0, 0); /* as many as torch has: another number would cost OpenMP a new team */
        return j.next < units ? -1 : 0;
    }
    if (threads > units) threads = (int)units;
    if (threads > MOST_WORKERS + 1) threads = MOST_WORKERS + 1;
    /* Where another thread's job has the workers, this one runs by itself. */
    if (threads <= 1 || pthread_mutex_trylock(&turn)) {
        take_units(&j);
        return -j.failed;
    }
    pthread_mutex_lock(&lock);
    hire(threads - 1);
    current = &j;
    seats = workers < threads - 1 ? workers : threads - 1;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    take_units(&j);
    pthread_mutex_lock(&lock);
    seats = 0; /* a worker that has not woken up by now has nothing to do */
    while (working) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
    /* Units are lost only where no thread at all had scratch. */
    return __atomic_load_n(&j.next, __ATOMIC_RELAXED) < units ? -1 : 0;
}
