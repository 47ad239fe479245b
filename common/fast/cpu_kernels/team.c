/* The threads that compute a job together: the caller, and workers that help it.

   A laptop runs other programs too. The system then takes a core away from a thread for some
   milliseconds, a thousand times as long as a piece takes. So the caller waits only for a piece that
   a worker has begun, never for a worker:

   - Each thread gets an equal share of the pieces, one after the other, so it reads one stream of a
     weight. When its share is empty, it takes pieces from the end of another share. A worker that
     does not run takes none.
   - A thread that waits spins for a moment, because to wake a thread takes longer than most waits.
     Then it sleeps, so that another thread can have its core.
   - Linux counts how long a thread has waited for a core. If the threads of a team wait for a large
     part of the time, the team has more threads than there are cores for it. Then it becomes smaller
     by one thread, and tries the larger size again later: adapt(). */
#define _GNU_SOURCE
#include "team.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define MOST 64           /* threads of a team */
#define MOST_PIECES 65535 /* of a job: a share counts them in 16 bits. More are several jobs. */

/* Times in nanoseconds. */
#define SPIN 50000           /* the caller spins so long before it sleeps */
#define AWAKE 2000000        /* a worker spins so long: longer than the time between two steps */
#define PERIOD 20000000      /* between two looks at the cores */
#define FIRST_PAUSE 30000000 /* before a smaller team grows; each time twice as long ... */
#define LAST_PAUSE 1000000000
#define CALM 1000000000      /* ... unless the larger team had its cores for so long */

/* The part of the time that the threads of a team may wait for cores, all waits together. A core
   that a worker shares with one other busy program makes 0.5. */
#define CROWDED 0.4

/* The pieces that are left of a thread's share. A thread takes a piece by changing the whole word at
   once, so a worker that comes too late takes no piece of another job. */
typedef struct {
    _Alignas(64) _Atomic uint64_t left; /* number of the job << 32 | first piece << 16 | end */
    _Atomic int64_t done;               /* pieces of the job that this thread has computed */
    _Atomic bool sleeps;
    pthread_cond_t wake;
    _Atomic int thread; /* its number in /proc; 0 before it has started */
} Share;

static struct {
    pthread_mutex_t caller; /* held by the thread that uses the team */
    Share shares[MOST];     /* the first one is the caller's */
    int started;            /* workers */

    /* The job does not change while a piece of it is being computed. */
    Piece *piece;
    const void *args;
    int64_t first; /* the index of its first piece */
    _Atomic int threads;
    _Atomic uint32_t job; /* counts the jobs */

    _Atomic int size;                            /* the most threads at the moment */
    int64_t looked_at, waited, pause, larger_at; /* see adapt() */
    pthread_mutex_t lock;                        /* held to go to sleep, and to wake a thread */
} team;

static void reset(void)
{
    pthread_mutex_init(&team.caller, NULL);
    pthread_mutex_init(&team.lock, NULL);
    for (int i = 0; i < MOST; i++) {
        pthread_cond_init(&team.shares[i].wake, NULL);
        atomic_store(&team.shares[i].left, 0);
        atomic_store(&team.shares[i].sleeps, false);
    }
    team.started = 0;
    atomic_store(&team.size, MOST);
}

/* A forked process has no workers: it starts its own. */
__attribute__((constructor)) static void begin(void)
{
    reset();
    pthread_atfork(NULL, NULL, reset);
}

static int thread_number(void)
{
#if defined(__linux__)
    return (int)syscall(SYS_gettid);
#else
    return 0;
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void)
{
    for (int i = 0; i < 16; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#else
        atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* How long a thread has waited for a core since it started, in ns; 0 if the system does not say it. */
static int64_t waited_for_core(int thread)
{
    char path[64], text[96];
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);
    long long ran, waited = 0;
    if (file >= 0)
        close(file);
    text[size < 0 ? 0 : size] = 0;
    return sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
}

/* Look at the cores from time to time, and change the size of the team. */
static void adapt(int64_t time)
{
    int caller = thread_number(), most = team.started + 1;
    int present = team.size < most ? team.size : most;
    int64_t period = time - team.looked_at, waited = 0;
    bool same = caller == atomic_exchange(&team.shares[0].thread, caller) && team.looked_at;
    for (int i = 0; i <= team.started; i++)
        waited += waited_for_core(atomic_load(&team.shares[i].thread));
    bool crowded = same && present > 1 && waited - team.waited > CROWDED * period;
    team.looked_at = time, team.waited = waited;
    if (crowded) {
        int64_t pause = time > team.larger_at + CALM ? FIRST_PAUSE : 2 * team.pause;
        team.pause = pause < LAST_PAUSE ? pause : LAST_PAUSE;
        atomic_store(&team.size, present - 1);
    } else if (present < most && time > team.larger_at)
        atomic_store(&team.size, present + 1);
    else
        return;
    team.larger_at = time + team.pause;
    team.looked_at = 0; /* another team: the next look is only the first one at it */
}

static uint64_t share_of(uint32_t job, int64_t first, int64_t end)
{
    return (uint64_t)job << 32 | (uint64_t)first << 16 | (uint64_t)end;
}

/* Take the first or the last piece that is left in a share of this job; -1 if there is none. */
static int64_t take(Share *share, uint32_t job, bool last)
{
    uint64_t left = atomic_load(&share->left), next;
    int64_t first, end;
    do {
        first = left >> 16 & MOST_PIECES, end = left & MOST_PIECES;
        if (left >> 32 != job || first == end)
            return -1;
        next = last ? share_of(job, first, end - 1) : share_of(job, first + 1, end);
    } while (!atomic_compare_exchange_weak(&share->left, &left, next));
    return last ? end - 1 : first;
}

static int64_t pieces_done(int threads)
{
    int64_t done = 0;
    for (int i = 0; i < threads; i++)
        done += atomic_load(&team.shares[i].done);
    return done;
}

static void wake(Share *share)
{
    if (!atomic_load(&share->sleeps))
        return;
    pthread_mutex_lock(&team.lock);
    pthread_cond_signal(&share->wake);
    pthread_mutex_unlock(&team.lock);
}

/* Compute pieces of a job until none is left. */
static void compute(int self, uint32_t job)
{
    int threads = atomic_load(&team.threads);
    for (int k = 0; k < threads; k++) {
        int owner = (self + k) % threads;
        for (int64_t index; (index = take(team.shares + owner, job, k > 0)) >= 0;) {
            team.piece(team.args, team.first + index);
            atomic_fetch_add(&team.shares[self].done, 1);
        }
    }
    if (self > 0)
        wake(team.shares);
}

/* Wait for a job after `job`. */
static uint32_t wait_for_job(int self, uint32_t job)
{
    int64_t until = now() + AWAKE;
    while (atomic_load(&team.job) == job && now() < until && self < atomic_load(&team.size))
        relax();
    if (atomic_load(&team.job) == job || self >= atomic_load(&team.size)) {
        Share *share = team.shares + self;
        pthread_mutex_lock(&team.lock);
        atomic_store(&share->sleeps, true);
        while (atomic_load(&team.job) == job || self >= atomic_load(&team.size))
            pthread_cond_wait(&share->wake, &team.lock);
        atomic_store(&share->sleeps, false);
        pthread_mutex_unlock(&team.lock);
    }
    return atomic_load(&team.job);
}

/* Wait until the workers have computed the pieces that they have begun. */
static void wait_for_pieces(int threads, int64_t count)
{
    if (pieces_done(threads) == count)
        return;
    int64_t until = now() + SPIN;
    while (pieces_done(threads) < count && now() < until)
        relax();
    if (pieces_done(threads) < count) {
        pthread_mutex_lock(&team.lock);
        atomic_store(&team.shares[0].sleeps, true);
        while (pieces_done(threads) < count)
            pthread_cond_wait(&team.shares[0].wake, &team.lock);
        atomic_store(&team.shares[0].sleeps, false);
        pthread_mutex_unlock(&team.lock);
    }
}

static void *run_worker(void *number)
{
    int self = (int)(intptr_t)number;
    atomic_store(&team.shares[self].thread, thread_number());
    for (uint32_t job = 0;;) {
        job = wait_for_job(self, job);
        if (self < atomic_load(&team.threads))
            compute(self, job);
    }
    return NULL;
}

static void start_workers(int count)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (team.started < count
           && !pthread_create(&thread, NULL, run_worker, (void *)(intptr_t)(team.started + 1))) {
        pthread_detach(thread);
        team.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Compute `count` pieces, from `first` on, with the team. */
static void compute_together(
    int threads, int64_t first, int64_t count, Piece *piece, const void *args)
{
    uint32_t job = atomic_load(&team.job) + 1;
    if (team.started < threads - 1)
        start_workers(threads - 1);
    team.piece = piece, team.args = args, team.first = first;
    atomic_store(&team.threads, threads);
    for (int i = 0; i < threads; i++) {
        atomic_store(&team.shares[i].done, 0);
        atomic_store(&team.shares[i].left,
                     share_of(job, count * i / threads, count * (i + 1) / threads));
    }
    atomic_store(&team.job, job);
    for (int i = 1; i < threads; i++)
        wake(team.shares + i);
    compute(0, job);
    wait_for_pieces(threads, count);
}

void spread(int threads, int64_t count, Piece *piece, const void *args)
{
    threads = threads < MOST ? threads : MOST;
    threads = threads < count ? threads : (int)count;
    /* If another thread has the team, this one computes alone. */
    if (threads > 1 && !pthread_mutex_trylock(&team.caller)) {
        int64_t time = now();
        if (time > team.looked_at + PERIOD)
            adapt(time);
        threads = threads < team.size ? threads : team.size;
        for (int64_t first = 0; threads > 1 && first < count; first += MOST_PIECES) {
            int64_t left = count - first;
            compute_together(threads, first, left < MOST_PIECES ? left : MOST_PIECES, piece, args);
        }
        pthread_mutex_unlock(&team.caller);
        if (threads > 1)
            return;
    }
    for (int64_t i = 0; i < count; i++)
        piece(args, i);
}
