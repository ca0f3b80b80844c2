/* Queues of plans, and the threads that run them job by job; see core.h.

   One lock guards everything but the copies themselves. Whoever works takes the first job of the first plan that
   has one, so jobs end about in order. The caller of `core_work` is one worker more: it copies instead of waiting,
   and a plan makes progress though no thread ever wakes. */
#define _GNU_SOURCE
#include "core.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MOST_THREADS 64
#define MOST_SLOTS 1024
#define MOST_COLUMNS 64 /* of a plan, on the stack; a plan with more has memory of its own */
#define SPINS 100       /* looks at a job that somebody else copies, before a wait: some microseconds */

enum state { WAITS = 0, RUNS, DONE };

typedef struct {
    uint8_t *slot;
    int64_t bad;
    int state;
} job;

/* In the memory that came with the plan. */
typedef struct plan_node {
    core_plan plan;
    struct plan_node *next;
    int64_t num_begun, num_taken;
    job jobs[];
} plan_node;

_Static_assert(sizeof(plan_node) <= 8 * CORE_PLAN_WORDS && sizeof(job) <= 8 * CORE_JOB_WORDS, "see core.h");

typedef struct {
    uint8_t *memory;
    int64_t nbytes;
} slot;

struct core_queue {
    pthread_mutex_t lock;
    pthread_cond_t work;    /* there may be a job for a thread */
    pthread_cond_t over;    /* a job is over that somebody waits for, or the queue has stopped */
    plan_node *first;
    slot slots[MOST_SLOTS]; /* used from the end */
    int64_t num_slots;
    int64_t num_waiting;    /* jobs that wait */
    int64_t num_asleep, num_jobs, num_begun, busy_ns;
    int64_t running[MOST_THREADS + 1]; /* number of the job that each worker is at, 0: none; the last one: the caller */
    int64_t awaited;        /* those in `core_drain`, `core_work` and `core_close` that wait for `over` */
    int64_t num_threads, wake_at;
    int stopped;
    pthread_t threads[MOST_THREADS];
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- slots, under the lock ---------------------------------------------------------------------------------- */

/* A slot that is large enough: smaller ones stay, for `core_take_back`. */
static uint8_t *slot_for(core_queue *q, int64_t nbytes) {
    for (int64_t i = q->num_slots - 1; i >= 0; i--)
        if (q->slots[i].nbytes >= nbytes) {
            uint8_t *memory = q->slots[i].memory;
            memmove(q->slots + i, q->slots + i + 1, (size_t)(--q->num_slots - i) * sizeof(slot));
            return memory;
        }
    return 0;
}

int64_t core_give(core_queue *q, uint8_t *memory, int64_t nbytes, int64_t under) {
    pthread_mutex_lock(&q->lock);
    int64_t fits = q->num_slots < MOST_SLOTS, at = under ? 0 : q->num_slots;
    if (fits) {
        memmove(q->slots + at + 1, q->slots + at, (size_t)(q->num_slots++ - at) * sizeof(slot));
        q->slots[at] = (slot){memory, nbytes};
        int is_enough = q->num_slots >= MIN(q->wake_at, q->num_waiting);
        if (q->num_asleep && q->num_waiting && is_enough) pthread_cond_signal(&q->work);
    }
    pthread_mutex_unlock(&q->lock);
    return fits;
}

uint8_t *core_take_back(core_queue *q) {
    uint8_t *memory = 0;
    int64_t need = 0;
    pthread_mutex_lock(&q->lock);
    for (plan_node *n = q->first; n; n = n->next)
        if (n->num_begun < n->plan.num_jobs && n->plan.slot_bytes > need) need = n->plan.slot_bytes;
    for (int64_t i = 0; i < q->num_slots && !memory; i++)
        if (!q->num_waiting || q->slots[i].nbytes < need) {
            memory = q->slots[i].memory;
            memmove(q->slots + i, q->slots + i + 1, (size_t)(--q->num_slots - i) * sizeof(slot));
        }
    pthread_mutex_unlock(&q->lock);
    return memory;
}

/* ---- jobs ----------------------------------------------------------------------------------------------------- */

/* The first job that waits and can be begun, under the lock; null: there is none. */
static plan_node *begin_job(core_queue *q, int64_t worker, int64_t *number) {
    if (q->stopped || !q->num_waiting) return 0;
    for (plan_node *n = q->first; n; n = n->next) {
        if (n->num_begun == n->plan.num_jobs) continue;
        uint8_t *memory = slot_for(q, n->plan.slot_bytes);
        if (!memory) return 0; /* a later plan must not take what the next batch needs */
        *number = n->num_begun++;
        n->jobs[*number].slot = memory;
        __atomic_store_n(&n->jobs[*number].state, RUNS, __ATOMIC_RELAXED); /* others look without the lock */
        q->num_waiting--;
        q->running[worker] = ++q->num_begun;
        return n;
    }
    return 0;
}

/* Makes the copies of a job, without the lock; gives the number of rows that could not be read. */
static int64_t run_job(const core_plan *p, int64_t number, uint8_t *memory) {
    core_column few[MOST_COLUMNS], *columns = few;
    int64_t first = number ? p->ends[number - 1] : 0, last = p->ends[number];
    if (p->num_columns > MOST_COLUMNS) columns = malloc((size_t)p->num_columns * sizeof *columns);
    if (!columns) {
        memset(p->status + first, 1, (size_t)(last - first));
        return last - first;
    }
    int may_load = !p->generation || __atomic_load_n(p->generation, __ATOMIC_SEQ_CST) == p->planned_in;
    for (int64_t i = 0; i < p->num_columns; i++) {
        core_column *c = columns + i;
        *c = p->columns[i];
        int64_t before = c->offsets ? c->offsets[first] : c->out_step * first; /* may lie outside the slot */
        c->out = (uint8_t *)((intptr_t)memory + p->offsets[number * (p->num_columns + 1) + i] - before);
        c->may_load = c->may_load && may_load;
    }
    int64_t bad = core_run(columns, p->num_columns, first, last, p->status);
    if (columns != few) free(columns);
    return bad;
}

/* Runs a job that was begun. The lock is held before and after. */
static void finish_job(core_queue *q, plan_node *n, int64_t number, int64_t worker) {
    job *own = n->jobs + number;
    pthread_mutex_unlock(&q->lock);
    int64_t began_ns = now_ns(), bad = run_job(&n->plan, number, own->slot);
    int64_t took_ns = now_ns() - began_ns;
    pthread_mutex_lock(&q->lock);
    q->running[worker] = 0;
    q->num_jobs++;
    if (worker < q->num_threads) q->busy_ns += took_ns;
    own->bad = bad;
    __atomic_store_n(&own->state, DONE, __ATOMIC_RELEASE);
    if (q->awaited) pthread_cond_broadcast(&q->over);
}

static int64_t worker_of(core_queue *q) {
    for (int64_t i = 0; i < q->num_threads; i++)
        if (pthread_equal(q->threads[i], pthread_self())) return i;
    return q->num_threads;
}

static void *work(void *argument) {
    core_queue *q = argument;
    int64_t number;
    pthread_mutex_lock(&q->lock); /* not before all threads are known */
    int64_t worker = worker_of(q);
    while (!q->stopped) {
        plan_node *n = begin_job(q, worker, &number);
        if (n) {
            finish_job(q, n, number, worker);
            continue;
        }
        q->num_asleep++;
        pthread_cond_wait(&q->work, &q->lock);
        q->num_asleep--;
    }
    pthread_mutex_unlock(&q->lock);
    return 0;
}

/* ---- plans ---------------------------------------------------------------------------------------------------- */

void core_submit(core_queue *q, core_plan *plan) {
    plan_node *made = (plan_node *)plan;
    pthread_mutex_lock(&q->lock);
    plan_node **at = &q->first;
    while (*at && (*at)->plan.number <= plan->number) at = &(*at)->next;
    made->next = *at;
    *at = made;
    q->num_waiting += plan->num_jobs;
    if (q->num_asleep && q->num_slots) pthread_cond_broadcast(&q->work);
    pthread_mutex_unlock(&q->lock);
}

static void drop_plan(core_queue *q, plan_node *n) {
    plan_node **at = &q->first;
    while (*at != n) at = &(*at)->next;
    *at = n->next;
}

/* What there is to say of the next job of a plan, under the lock. */
static int64_t answer_for(core_queue *q, plan_node *n, int64_t answer[3]) {
    job *own = n->jobs + n->num_taken;
    answer[2] = q->num_waiting;
    if (own->state == DONE) {
        answer[0] = (int64_t)(intptr_t)own->slot, answer[1] = own->bad;
        if (++n->num_taken == n->plan.num_jobs) drop_plan(q, n);
        return CORE_READY;
    }
    if (q->stopped) return CORE_STOPPED;
    return own->state == WAITS ? CORE_NEED_SLOT : CORE_NOT_READY;
}

int64_t core_take(core_queue *q, core_plan *plan, int64_t answer[3]) {
    plan_node *n = (plan_node *)plan;
    if (__atomic_load_n(&n->jobs[n->num_taken].state, __ATOMIC_ACQUIRE) != DONE) return CORE_NOT_READY;
    pthread_mutex_lock(&q->lock);
    int64_t got = answer_for(q, n, answer);
    pthread_mutex_unlock(&q->lock);
    return got;
}

/* Looks at a job without the lock for some microseconds: it may be over sooner than a wait would begin. */
static void watch(const job *own) {
    for (int i = 0; i < SPINS && __atomic_load_n(&own->state, __ATOMIC_ACQUIRE) != DONE; i++)
        for (volatile int pause = 0; pause < 40; pause++) {
        }
}

/* Waits until a job is over, any; 0: it is too late. */
static int wait_until(core_queue *q, int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    q->awaited++;
    int got = pthread_cond_timedwait(&q->over, &q->lock, &until);
    q->awaited--;
    return got != ETIMEDOUT;
}

int64_t core_work(core_queue *q, core_plan *plan, int64_t timeout_ns, int64_t answer[3]) {
    plan_node *own = (plan_node *)plan, *other;
    int64_t got, number, until_ns = now_ns() + timeout_ns;
    int watched = 0, in_time = 1;
    pthread_mutex_lock(&q->lock);
    while ((got = answer_for(q, own, answer)) == CORE_NOT_READY || got == CORE_NEED_SLOT) {
        if ((other = begin_job(q, q->num_threads, &number))) {
            finish_job(q, other, number, q->num_threads);
        } else if (got == CORE_NEED_SLOT || !in_time) {
            break;
        } else if (!watched++) {
            pthread_mutex_unlock(&q->lock);
            watch(own->jobs + own->num_taken);
            pthread_mutex_lock(&q->lock);
        } else {
            in_time = wait_until(q, until_ns);
        }
    }
    pthread_mutex_unlock(&q->lock);
    return got;
}

/* ---- life ----------------------------------------------------------------------------------------------------- */

static int is_running(const core_queue *q, int64_t until) {
    for (int64_t i = 0; i <= q->num_threads; i++)
        if (q->running[i] && q->running[i] <= until) return 1;
    return 0;
}

static void wait_for_jobs(core_queue *q, int64_t until) {
    q->awaited++;
    while (is_running(q, until)) pthread_cond_wait(&q->over, &q->lock);
    q->awaited--;
}

void core_drain(core_queue *q) {
    pthread_mutex_lock(&q->lock);
    wait_for_jobs(q, q->num_begun);
    pthread_mutex_unlock(&q->lock);
}

void core_count(core_queue *q, int64_t counts[2]) {
    pthread_mutex_lock(&q->lock);
    counts[0] = q->busy_ns, counts[1] = q->num_jobs;
    pthread_mutex_unlock(&q->lock);
}

void core_stop(core_queue *q) {
    pthread_mutex_lock(&q->lock);
    q->stopped = 1;
    pthread_cond_broadcast(&q->work);
    pthread_cond_broadcast(&q->over);
    pthread_mutex_unlock(&q->lock);
}

void core_close(core_queue *q) {
    core_stop(q);
    pthread_mutex_lock(&q->lock);
    wait_for_jobs(q, q->num_begun); /* the caller of `core_work` is no thread of ours */
    pthread_mutex_unlock(&q->lock);
    for (int64_t i = 0; i < q->num_threads; i++) pthread_join(q->threads[i], 0);
}

int64_t core_queue_bytes(void) { return sizeof(core_queue); }

int64_t core_open(core_queue *q, int64_t num_threads, int64_t wake_at) {
    pthread_condattr_t clock;
    sigset_t all, before;
    memset(q, 0, sizeof *q);
    q->wake_at = wake_at;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, 0);
    pthread_cond_init(&q->work, 0);
    pthread_cond_init(&q->over, &clock);
    pthread_condattr_destroy(&clock);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&q->lock);
    while (q->num_threads < MIN(num_threads, MOST_THREADS)) {
        if (pthread_create(q->threads + q->num_threads, 0, work, q)) break;
        pthread_setname_np(q->threads[q->num_threads], "dataflow-copy"); /* for `top -H` */
        q->num_threads++;
    }
    pthread_mutex_unlock(&q->lock);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return q->num_threads;
}
