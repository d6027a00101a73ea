/* Work in parallel, on torch's own threads where they can be had, else on a pool of ours.
 *
 * OpenMP's threads wait for their next piece of work awake: ours would have to share their cores with them, and to be
 * woken for every job.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "kernels.h"

enum { MOST_WORKERS = 255, MOST_SHARES = 64, ELEMENTS_PER_THREAD = 65536 };

/* Units that lie one after the other, for one thread, which has their neighbours of the last job in its caches: torch
 * divides its work the same way. Whoever has done its own share takes from others'. */
typedef struct {
    int64_t next; /* atomic: the next unit that nobody has taken */
    int64_t end;
    char line[48]; /* no other share on its line of the cache */
} share;

typedef struct {
    gf_run *run;
    const void *argument;
    size_t scratch_bytes;
    pthread_t caller;
    int count; /* of shares */
    share shares[MOST_SHARES];
} job;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job it is */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static job *current;
static int workers, seats, working;
static pthread_key_t scratch_key;
static gf_team *team; /* atomic: runs a function on all of torch's threads; NULL where there are none to be had */

/* What a thread has of its own. */
typedef struct {
    size_t bytes;
    void *memory;
    int number; /* from 1 on, the same in all jobs of others */
} scratch_block;

static int numbered; /* atomic: threads that have a number */

static void free_scratch(void *value) {
    scratch_block *block = value;
    free(block->memory);
    free(block);
}

/* Return the thread's own scratch, at least `bytes` long; NULL where there is no memory. */
static scratch_block *find_scratch(size_t bytes) {
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
    return block->memory ? block : NULL;
}

/* Divide units into shares of one size, give or take one. */
static void divide(job *j, int64_t units, int threads) {
    j->count = threads < 1 ? 1 : threads > MOST_SHARES ? MOST_SHARES : threads;
    if (j->count > units) j->count = units < 1 ? 1 : (int)units;
    for (int64_t i = 0; i < j->count; i++) {
        j->shares[i].next = i * units / j->count;
        j->shares[i].end = (i + 1) * units / j->count;
    }
}

/* Work on all shares, from the thread's own on: the caller's is the first. A thread without scratch leaves all to others. */
static void take_units(job *j) {
    scratch_block *own = find_scratch(j->scratch_bytes);
    if (!own) return;
    int first = 0;
    if (!pthread_equal(pthread_self(), j->caller)) {
        if (!own->number) own->number = __atomic_add_fetch(&numbered, 1, __ATOMIC_RELAXED);
        first = own->number % j->count;
    }
    for (int i = 0; i < j->count; i++) {
        share *s = j->shares + (first + i) % j->count;
        for (int64_t unit; (unit = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->end;)
            j->run(j->argument, unit, own->memory);
    }
}

/* Units are lost only where no thread at all had scratch. */
static int has_failed(job *j) {
    for (int i = 0; i < j->count; i++)
        if (__atomic_load_n(&j->shares[i].next, __ATOMIC_RELAXED) < j->shares[i].end) return -1;
    return 0;
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
    job j;
    j.run = run;
    j.argument = argument;
    j.scratch_bytes = scratch_bytes;
    j.caller = pthread_self();
    pthread_once(&once, start);
    gf_team *const others = __atomic_load_n(&team, __ATOMIC_RELAXED);
    divide(&j, units, threads);
    if (others && threads > 1 && units > 1) {
        others(join, &j, 0, 0); /* as many as torch has: another number would cost OpenMP a new team */
        return has_failed(&j);
    }
    if (threads > units) threads = (int)units;
    if (threads > MOST_WORKERS + 1) threads = MOST_WORKERS + 1;
    /* Where another thread's job has the workers, this one runs by itself. */
    if (threads <= 1 || pthread_mutex_trylock(&turn)) {
        take_units(&j);
        return has_failed(&j);
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
    return has_failed(&j);
}
