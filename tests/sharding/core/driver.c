/* Random images, orders and ranges of files, and random build plans, run by `core_run` in several threads and by queues, whose threads and caller share the jobs,
   and compared with loops that are easy to believe.

     driver SEED PLANS honest|short|broken

   Made of the core's files and this one with -Dprocess_vm_readv=driver_vm_readv, so that reads can fail here as they
   seldom do elsewhere: `short`, calls for several values copy a part or nothing, and each value must come all the same;
   `broken`, any call may, and a row may be reported that could be read, but never the other way round.

   Everything is allocated as large as it must be and no larger, for AddressSanitizer. Of a row that is reported,
   only the columns before the one reported are compared, as core.h promises nothing of the others. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core.h"

enum { MOST_COLUMNS = 6, THREADS = 3, MOST_ROWS = 400, MOST_PAGES = 40, GUARD = 0xA5, MOST_IOVECS = 1024 };

static enum { HONEST, SHORT, BROKEN } mode;
static int64_t page;
static long num_rows, num_lost, num_widened, num_short, num_resized, num_patched, num_ordered;
static long num_names, num_numbers, num_sums; /* what was tried, for the test to see */

#define CHECK(true_, ...)                                                                                        \
    do {                                                                                                         \
        if (!(true_)) {                                                                                          \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                      \
            fprintf(stderr, __VA_ARGS__);                                                                        \
            fputc('\n', stderr);                                                                                 \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)

/* ---- numbers ---------------------------------------------------------------------------------------------- */

static _Thread_local uint64_t random_state; /* splitmix64: every thread has its own */

static uint64_t next_random(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t below(int64_t n) { return (int64_t)(next_random() % (uint64_t)n); }

static int one_in(int64_t n) { return below(n) == 0; }

static void *allocated(int64_t nbytes) {
    void *memory = malloc((size_t)nbytes);
    CHECK(memory || !nbytes, "no memory");
    return memory;
}

static void fill(uint8_t *bytes, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i++) bytes[i] = (uint8_t)next_random();
}

/* ---- reads that fail -------------------------------------------------------------------------------------- */

/* <sys/uio.h> has declared `driver_vm_readv`: this is the real one. */
#undef process_vm_readv
extern ssize_t process_vm_readv(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                                unsigned long);

ssize_t driver_vm_readv(pid_t pid, const struct iovec *to, unsigned long num_to, const struct iovec *from,
                        unsigned long num_from, unsigned long flags) {
    if (mode == HONEST || (mode == SHORT && num_from == 1) || !one_in(3))
        return process_vm_readv(pid, to, num_to, from, num_from, flags);
    size_t total = 0;
    for (unsigned long i = 0; i < num_to; i++) total += to[i].iov_len;
    size_t left = total ? (size_t)below((int64_t)total) : 0;
    __atomic_add_fetch(&num_short, 1, __ATOMIC_RELAXED);
    if (!left || one_in(3)) {
        errno = EFAULT;
        return -1;
    }
    struct iovec part[MOST_IOVECS];
    unsigned long n = 0;
    for (; left; n++) {
        part[n] = to[n];
        if (part[n].iov_len > left) part[n].iov_len = left;
        left -= part[n].iov_len;
    }
    return process_vm_readv(pid, part, n, from, num_from, flags);
}

/* ---- a plan and what must come of it ----------------------------------------------------------------------- */

typedef struct {
    uint8_t *bytes;
    int64_t size, kept; /* the first `kept` bytes have their pages */
    int mapped;
} source;

typedef struct {
    source from;
    int64_t *index, *lengths, *dests;
    uint8_t *out;
    int64_t out_size, *offsets, *sizes, *at; /* [rows] of the source, in bytes; [rows] of `out` */
} column;

static const int64_t WIDTHS[] = {1, 1, 2, 2, 4, 4};

/* Pages of a file, of which the last may be gone: it was cut after it had been mapped. */
static source mapped_source(int64_t num_pages) {
    source made = {.size = num_pages * page, .kept = num_pages * page, .mapped = 1};
    char name[] = "driver-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && !unlink(name), "no file: %s", strerror(errno));
    uint8_t *bytes = allocated(made.size);
    fill(bytes, made.size);
    CHECK(write(file, bytes, (size_t)made.size) == made.size, "not written");
    free(bytes);
    made.bytes = mmap(0, (size_t)made.size, PROT_READ, MAP_SHARED, file, 0);
    CHECK(made.bytes != MAP_FAILED, "not mapped: %s", strerror(errno));
    if (!one_in(4)) {
        int64_t end = one_in(4) ? below(num_pages) * page : below(made.size);
        CHECK(!ftruncate(file, end), "not cut");
        made.kept = (end + page - 1) / page * page; /* of the page where the file ends, the rest is zeros */
    }
    close(file);
    return made;
}

static source heap_source(int64_t size) {
    source made = {.bytes = allocated(size), .size = size, .kept = size};
    fill(made.bytes, size);
    return made;
}

/* Where the values lie: as offsets, as addresses, in steps, or counted from the end. */
static void place_values(core_column *c, column *own, int64_t rows) {
    int64_t address = (int64_t)(intptr_t)own->from.bytes, size = own->from.size;
    int64_t steps[] = {1, 1, 3, -1}, kind = below(4);
    c->step = steps[kind];
    c->base = kind == 1 ? 0 : kind == 3 ? address + size : address;
    for (int64_t r = 0; r < rows; r++) {
        int64_t offset = below(size - own->sizes[r] + 1);
        if (kind == 2) offset -= offset % 3;
        own->offsets[r] = offset;
        own->index[r] = (address + offset - c->base) / c->step;
    }
    c->index = own->index;
}

/* Where they go: one after the other or in any order, with gaps that nobody may write to. */
static void place_outputs(core_column *c, column *own, int64_t rows, int64_t longest) {
    int64_t grain = c->op == CORE_WIDEN ? 8 : 1; /* int64 are written where int64 may be */
    int64_t gap = grain * below(4);
    if (one_in(2)) {
        c->out_step = longest + gap;
        for (int64_t r = 0; r < rows; r++) own->at[r] = c->out_step * r;
        own->out_size = c->out_step * rows;
    } else {
        int64_t each = c->op == CORE_WIDEN ? 8 / WIDTHS[c->stored] : 1, turn = rows ? below(rows) : 0;
        own->out_size = 0;
        for (int64_t i = 0; i < rows; i++) { /* the first row to write is any of them */
            int64_t r = (i + turn) % rows;
            own->at[r] = own->out_size;
            own->out_size += own->sizes[r] * each + grain * below(4);
        }
        own->dests = allocated(8 * rows);
        if (rows) memcpy(own->dests, own->at, (size_t)(8 * rows));
        c->offsets = own->dests;
    }
    c->out = own->out = allocated(own->out_size);
    if (own->out_size) memset(own->out, GUARD, (size_t)own->out_size);
}

static void make_column(core_column *c, column *own, int64_t rows) {
    memset(c, 0, sizeof *c);
    memset(own, 0, sizeof *own);
    c->op = one_in(2) ? CORE_WIDEN : CORE_COPY;
    c->stored = c->op == CORE_WIDEN ? below(6) : 0;
    own->from = one_in(2) ? mapped_source(1 + below(MOST_PAGES)) : heap_source(1 + below(one_in(2) ? 300 : 90000));
    c->may_load = own->from.kept == own->from.size && one_in(2);
    int64_t width = c->op == CORE_WIDEN ? WIDTHS[c->stored] : 1;
    /* Many values of a system call and few; and, in few rows, one that is more than `core.c` widens at a time. */
    int64_t limit = rows < 8 ? own->from.size : one_in(4) ? 5000 : 40;
    int64_t most = (limit < own->from.size ? limit : own->from.size) / width + 1;
    own->index = allocated(8 * rows), own->offsets = allocated(8 * rows);
    own->sizes = allocated(8 * rows), own->at = allocated(8 * rows);
    c->each = width * below(most);
    if (one_in(2)) c->lengths = own->lengths = allocated(8 * rows);
    int64_t longest = own->lengths ? 0 : c->each;
    for (int64_t r = 0; r < rows; r++) {
        own->sizes[r] = !own->lengths ? c->each : one_in(4) ? 0 : width * below(most);
        if (own->lengths) own->lengths[r] = own->sizes[r];
        if (own->sizes[r] > longest) longest = own->sizes[r];
    }
    place_values(c, own, rows);
    place_outputs(c, own, rows, longest / width * (c->op == CORE_WIDEN ? 8 : width));
    num_widened += c->op == CORE_WIDEN ? rows : 0;
}

static void free_column(column *own) {
    if (own->from.mapped)
        munmap(own->from.bytes, (size_t)own->from.size);
    else
        free(own->from.bytes);
    free(own->index), free(own->lengths), free(own->dests), free(own->out);
    free(own->offsets), free(own->sizes), free(own->at);
}

static int64_t number_at(const uint8_t *bytes, int64_t type) {
    uint8_t u8 = bytes[0];
    uint16_t u16;
    uint32_t u32;
    switch (type) {
    case CORE_U8: return u8;
    case CORE_I8: return (int8_t)u8;
    case CORE_U16: memcpy(&u16, bytes, 2); return u16;
    case CORE_I16: memcpy(&u16, bytes, 2); return (int16_t)u16;
    case CORE_U32: memcpy(&u32, bytes, 4); return u32;
    default: memcpy(&u32, bytes, 4); return (int32_t)u32;
    }
}

/* Bytes that a row's value has in the output; into `wanted` goes what they must be. */
static int64_t plain_value(const core_column *c, const column *own, int64_t row, uint8_t *wanted) {
    const uint8_t *from = own->from.bytes + own->offsets[row];
    int64_t size = own->sizes[row], width = WIDTHS[c->stored];
    if (c->op == CORE_COPY) {
        for (int64_t i = 0; wanted && i < size; i++) wanted[i] = from[i];
        return size;
    }
    for (int64_t i = 0; wanted && i < size / width; i++) {
        int64_t number = number_at(from + i * width, c->stored);
        memcpy(wanted + 8 * i, &number, 8);
    }
    return size / width * 8;
}

/* ---- one plan ---------------------------------------------------------------------------------------------- */

typedef struct {
    const core_column *columns;
    int64_t num_columns, first, last, bad;
    uint8_t *status;
    uint64_t seed;
} job;

static void *run_job(void *argument) {
    job *own = argument;
    random_state = own->seed;
    own->bad = core_run(own->columns, own->num_columns, own->first, own->last, own->status);
    return 0;
}

static void run_in_threads(const core_column *columns, int64_t num_columns, int64_t rows, uint8_t *status) {
    pthread_t threads[THREADS];
    job jobs[THREADS];
    int64_t begin = 0, bad = 0;
    for (int i = 0; i < THREADS; i++) { /* a range may be empty */
        int64_t end = i == THREADS - 1 ? rows : begin + below(rows - begin + 1);
        jobs[i] = (job){columns, num_columns, begin, end, 0, status, next_random()};
        CHECK(!pthread_create(threads + i, 0, run_job, jobs + i), "no thread");
        begin = end;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], 0);
        bad += jobs[i].bad;
    }
    for (int64_t r = 0; r < rows; r++) bad -= status[r] != 0;
    CHECK(!bad, "%ld rows were counted that are not reported", (long)bad);
}

static int64_t first_lost(const column *own, int64_t num_columns, int64_t row) {
    for (int64_t i = 0; i < num_columns; i++)
        if (own[i].sizes[row] && own[i].offsets[row] + own[i].sizes[row] > own[i].from.kept) return i + 1;
    return 0;
}

static void check_column(const core_column *c, const column *own, int64_t at, int64_t rows, const uint8_t *status) {
    uint8_t *wanted = allocated(own->out_size);
    if (own->out_size) memset(wanted, GUARD, (size_t)own->out_size);
    for (int64_t r = 0; r < rows; r++) {
        int64_t place = own->at[r], nbytes = plain_value(c, own, r, 0);
        if (status[r] && at >= status[r] - 1)
            memcpy(wanted + place, own->out + place, (size_t)nbytes);
        else
            plain_value(c, own, r, wanted + place);
    }
    for (int64_t i = 0; i < own->out_size; i++)
        CHECK(wanted[i] == own->out[i], "column %ld, byte %ld of %ld differs (op %ld, stored %ld, may_load %ld)",
              (long)at, (long)i, (long)own->out_size, (long)c->op, (long)c->stored, (long)c->may_load);
    free(wanted);
}

static void try_plan(void) {
    core_column columns[MOST_COLUMNS];
    column own[MOST_COLUMNS];
    int64_t rows = one_in(3) ? below(8) : below(MOST_ROWS), num_columns = 1 + below(MOST_COLUMNS);
    uint8_t *status = allocated(rows);
    for (int64_t i = 0; i < num_columns; i++) make_column(columns + i, own + i, rows);
    if (rows) memset(status, GUARD, (size_t)rows);
    run_in_threads(columns, num_columns, rows, status);
    for (int64_t r = 0; r < rows; r++) {
        int64_t lost = first_lost(own, num_columns, r);
        int right = mode == BROKEN ? (lost ? status[r] && status[r] <= lost : 1) : status[r] == lost;
        CHECK(right, "row %ld of %ld: status %d, not %ld", (long)r, (long)rows, status[r], (long)lost);
        num_lost += lost != 0;
    }
    for (int64_t i = 0; i < num_columns; i++) {
        check_column(columns + i, own + i, i, rows, status);
        free_column(own + i);
    }
    free(status);
    num_rows += rows;
}

/* ---- a queue ------------------------------------------------------------------------------------------------ */

enum { MOST_PLANS = 4, MOST_JOBS = 20 };

typedef struct {
    core_column columns[MOST_COLUMNS];
    column own[MOST_COLUMNS];
    int64_t rows, num_columns, num_jobs, ends[MOST_JOBS], *offsets, *words;
    uint8_t *status;
} queued_plan;

static int64_t generation;

/* The first columns of the rows of a job lie one after the other, each on 8 bytes, without gaps in themselves. */
static void make_queued(queued_plan *q, int64_t number) {
    memset(q, 0, sizeof *q);
    q->rows = 1 + below(one_in(2) ? 10 : 200), q->num_columns = 1 + below(MOST_COLUMNS);
    for (int64_t i = 0; i < q->num_columns; i++) {
        core_column *c = q->columns + i;
        column *own = q->own + i;
        make_column(c, own, q->rows);
        int64_t widened = c->op == CORE_WIDEN ? 8 / WIDTHS[c->stored] : 1, at = 0;
        free(own->dests), own->dests = 0, c->offsets = 0;
        if (c->lengths) {
            c->offsets = own->dests = allocated(8 * q->rows);
            for (int64_t r = 0; r < q->rows; r++) own->dests[r] = at, at += own->sizes[r] * widened;
        } else {
            c->out_step = c->each * widened;
        }
        c->out = 0;
    }
    while (q->num_jobs < MOST_JOBS - 1 && (!q->num_jobs || q->ends[q->num_jobs - 1] < q->rows)) {
        int64_t before = q->num_jobs ? q->ends[q->num_jobs - 1] : 0;
        q->ends[q->num_jobs++] = before + 1 + below(q->rows - before);
    }
    if (q->ends[q->num_jobs - 1] < q->rows) q->ends[q->num_jobs++] = q->rows;
    q->offsets = allocated(8 * q->num_jobs * (q->num_columns + 1));
    q->words = calloc((size_t)(CORE_PLAN_WORDS + CORE_JOB_WORDS * q->num_jobs), 8);
    q->status = allocated(q->rows);
    core_plan *plan = (core_plan *)q->words;
    for (int64_t j = 0; j < q->num_jobs; j++) {
        int64_t first = j ? q->ends[j - 1] : 0, at = 0, *offsets = q->offsets + j * (q->num_columns + 1);
        for (int64_t i = 0; i < q->num_columns; i++) {
            offsets[i] = at;
            for (int64_t r = first; r < q->ends[j]; r++) at += plain_value(q->columns + i, q->own + i, r, 0);
            at = (at + 7) / 8 * 8;
        }
        offsets[q->num_columns] = at;
        if (at > plan->slot_bytes) plan->slot_bytes = at;
    }
    plan->columns = q->columns, plan->num_columns = q->num_columns, plan->num_jobs = q->num_jobs;
    plan->number = number, plan->ends = q->ends, plan->offsets = q->offsets, plan->status = q->status;
    if (one_in(2)) plan->generation = &generation, plan->planned_in = __atomic_load_n(&generation, __ATOMIC_SEQ_CST);
}

static void check_job(const queued_plan *q, int64_t job, const uint8_t *slot, int64_t bad) {
    int64_t first = job ? q->ends[job - 1] : 0;
    for (int64_t r = first; r < q->ends[job]; r++) {
        int64_t lost = first_lost(q->own, q->num_columns, r), status = q->status[r];
        int right = mode == BROKEN ? (lost ? status && status <= lost : 1) : status == lost;
        CHECK(right, "queue: row %ld: status %ld, not %ld", (long)r, (long)status, (long)lost);
        bad -= status != 0;
    }
    CHECK(!bad, "queue: %ld rows were counted that are not reported", (long)bad);
    for (int64_t i = 0; i < q->num_columns; i++) {
        const uint8_t *at = slot + q->offsets[job * (q->num_columns + 1) + i];
        for (int64_t r = first; r < q->ends[job]; r++) {
            int64_t nbytes = plain_value(q->columns + i, q->own + i, r, 0);
            uint8_t *wanted = allocated(nbytes);
            plain_value(q->columns + i, q->own + i, r, q->status[r] && i >= q->status[r] - 1 ? 0 : wanted);
            int same = (q->status[r] && i >= q->status[r] - 1) || !nbytes || !memcmp(wanted, at, (size_t)nbytes);
            CHECK(same, "queue: row %ld of column %ld differs", (long)r, (long)i);
            at += nbytes;
            free(wanted);
        }
    }
    num_rows += q->ends[job] - first;
}

/* Takes back what the kernel may be asked for meanwhile, as a guard does that is given up. */
static void *next_generation(void *queue) {
    __atomic_add_fetch(&generation, 1, __ATOMIC_SEQ_CST);
    core_drain(queue);
    return 0;
}

static void try_queue(void) {
    static queued_plan plans[MOST_PLANS];
    int64_t num_plans = 1 + below(MOST_PLANS), threads = below(THREADS + 1), answer[3];
    int ends_early = one_in(4);
    core_queue *queue = calloc(1, (size_t)core_queue_bytes());
    uint8_t *lent[MOST_PLANS * MOST_JOBS * 2];
    int64_t num_lent = 0, counts[2];
    pthread_t breaker;
    CHECK(core_open(queue, threads, 1 + below(3)) == threads, "no threads");
    CHECK(!pthread_create(&breaker, 0, next_generation, queue), "no thread");
    for (int64_t i = 0; i < num_plans; i++) make_queued(plans + i, i);
    int64_t turn = below(num_plans); /* the order in which they come is not theirs */
    for (int64_t i = 0; i < num_plans; i++) core_submit(queue, (core_plan *)plans[(i + turn) % num_plans].words);
    for (int64_t i = 0; i < num_plans && !(ends_early && i); i++) {
        core_plan *plan = (core_plan *)plans[i].words;
        for (int64_t job = 0; job < plan->num_jobs; job++) {
            while (one_in(2) && num_lent < MOST_PLANS * MOST_JOBS) {
                uint8_t *slot = lent[num_lent++] = allocated(plan->slot_bytes);
                CHECK(core_give(queue, slot, plan->slot_bytes, one_in(2)), "slot refused");
            }
            int64_t got = one_in(2) ? core_take(queue, plan, answer) : CORE_NOT_READY;
            while (got != CORE_READY) {
                CHECK(got == CORE_NEED_SLOT || got == CORE_NOT_READY, "answer %ld", (long)got);
                if (got == CORE_NEED_SLOT) {
                    uint8_t *slot = lent[num_lent++] = allocated(plan->slot_bytes);
                    CHECK(core_give(queue, slot, plan->slot_bytes, 0), "slot refused");
                }
                got = core_work(queue, plan, 10000000000, answer);
            }
            check_job(plans + i, job, (uint8_t *)(intptr_t)answer[0], answer[1]);
        }
    }
    if (one_in(2)) core_take_back(queue);
    pthread_join(breaker, 0);
    core_count(queue, counts);
    core_close(queue);
    for (int64_t i = 0; i < num_plans; i++) {
        for (int64_t c = 0; c < plans[i].num_columns; c++) free_column(plans[i].own + c);
        free(plans[i].offsets), free(plans[i].words), free(plans[i].status);
    }
    while (num_lent) free(lent[--num_lent]);
    free(queue);
}

static void try_interleave(void) {
    int64_t width = (int64_t)1 << below(4), k = 1 + below(40), rows = below(700), bytes = rows * width;
    uint8_t *columns[40], *out = allocated(k * bytes);
    for (int64_t c = 0; c < k; c++) fill(columns[c] = allocated(bytes), bytes);
    core_interleave((const void *const *)columns, k, rows, width, out);
    for (int64_t i = 0; i < k * bytes; i++) {
        int64_t item = i / width;
        CHECK(out[i] == columns[item % k][item / k * width + i % width], "interleave: %ld columns of %ld rows",
              (long)k, (long)rows);
    }
    for (int64_t c = 0; c < k; c++) free(columns[c]);
    free(out);
}

/* ---- images ------------------------------------------------------------------------------------------------ */

/* The weight of a pixel, which begins at k, in a result; by core.h's words and not resize.c's sums. */
static double weight_of(const core_form *f, double k, double centre, double scale) {
    double stretch = f->antialias && scale > 1 ? scale : 1, x = (k + 0.5 - centre) / stretch;
    if (f->filter == CORE_AREA) {
        double first = centre - scale / 2 > k ? centre - scale / 2 : k;
        double last = centre + scale / 2 < k + 1 ? centre + scale / 2 : k + 1;
        return last > first ? last - first : 0;
    }
    x = x < 0 ? -x : x;
    if (f->filter == CORE_BILINEAR)
        return x < 1 ? 1 - x : 0;
    return x < 1 ? 1.5 * x * x * x - 2.5 * x * x + 1 : x < 2 ? -0.5 * x * x * x + 2.5 * x * x - 4 * x + 2 : 0;
}

static double level_of(const core_image *m, const core_form *f, int64_t y, int64_t x, int64_t channel) {
    double tall = m->height / (double)f->height, wide = m->width / (double)f->width, sum = 0, weights = 0;
    double row = m->top + ((double)y + 0.5) * tall;
    double column = m->left + ((double)(m->flip ? f->width - 1 - x : x) + 0.5) * wide;
    for (int64_t i = m->least_row; i < m->past_row; i++)
        for (int64_t j = m->least_column; j < m->past_column; j++) {
            double weight = weight_of(f, (double)i, row, tall) * weight_of(f, (double)j, column, wide);
            sum += weight * m->pixels[i * m->stride + j * f->channels + channel];
            weights += weight;
        }
    sum /= weights;
    return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

static void try_resize(void) {
    int64_t height = 1 + below(24), width = 1 + below(24);
    core_form f = {.channels = 1 + below(4), .height = 1 + below(20), .width = 1 + below(20), .filter = below(3),
                   .antialias = one_in(2), .planar = one_in(2)};
    int64_t stride = width * f.channels + below(3), results = f.channels * f.height * f.width;
    core_image m = {.stride = stride, .flip = one_in(2), .past_row = height, .past_column = width,
                    .height = (double)(1 + below(height)), .width = (double)(1 + below(width))};
    if (one_in(2))
        m.height -= 0.3, m.width -= 0.6;
    m.top = one_in(2) ? (double)height - m.height : 0, m.left = one_in(2) ? (double)width - m.width : 0;
    if (one_in(2)) /* a filter looks at the part alone */
        m.least_row = (int64_t)m.top, m.least_column = (int64_t)m.left;
    uint8_t *pixels = allocated((height - 1) * stride + width * f.channels);
    for (int64_t i = 0; i < (height - 1) * stride + width * f.channels; i++)
        pixels[i] = (uint8_t)next_random();
    float *numbers = one_in(3) ? allocated(1024 * f.channels) : 0;
    for (int64_t i = 0; numbers && i < 256 * f.channels; i++)
        numbers[i] = (float)(i % 256) + 1000 * (float)(i / 256);
    void *out = allocated(results * (numbers ? 4 : 1));
    m.pixels = pixels, m.out = out, f.numbers = numbers;
    CHECK(core_resize(&m, &f) == 0, "core_resize");
    for (int64_t i = 0; i < results; i++) {
        int64_t pixel = f.planar ? i % (f.height * f.width) : i / f.channels;
        int64_t channel = f.planar ? i / (f.height * f.width) : i % f.channels;
        double want = level_of(&m, &f, pixel / f.width, pixel % f.width, channel);
        double have = numbers ? ((float *)out)[i] - 1000 * (float)channel : ((uint8_t *)out)[i];
        CHECK(have - want < 0.6 && want - have < 0.6, "value %ld is %f and not %f", (long)i, have, want);
    }
    free(pixels), free(numbers), free(out);
    num_resized += results;
}

/* Levels from 64 to 191, of which nothing between the passes leaves [0, 255]: rounding there is the only difference. */
static void try_patches(void) {
    int64_t height = 1 + below(24), width = 1 + below(24), stride = 3 * width + below(3), nbytes, results;
    int64_t merge = 1 + below(2), down = 1 + below(7), across = one_in(3) ? 14 : 1 + below(7);
    core_form f = {.channels = 3, .height = merge * down * (1 + below(2)), .width = merge * across * (1 + below(2)),
                   .filter = below(2), .antialias = 1};
    core_image m = {.stride = stride, .past_row = height, .past_column = width, .height = (double)height,
                    .width = (double)width};
    nbytes = (height - 1) * stride + 3 * width, results = 3 * f.height * f.width;
    uint8_t *pixels = allocated(nbytes), *out = allocated(results);
    for (int64_t i = 0; i < nbytes; i++)
        pixels[i] = (uint8_t)(64 + below(128));
    m.pixels = pixels;
    core_picture p = {.pixels = pixels, .height = height, .width = width, .stride = stride, .rows = f.height,
                      .columns = f.width, .reach = f.filter == CORE_BICUBIC ? 2 : 1, .down = down, .across = across,
                      .merge = merge, .out = out};
    int64_t status = core_patches(&p);
    CHECK(status >= 0, "core_patches");
    for (int64_t i = 0; i < results && !status; i++) {
        int64_t x = i % across, y = i / across % down, channel = i / across / down % 3, patch = i / across / down / 3;
        int64_t square = patch / merge / merge, in_row = f.width / across / merge, inside = patch % (merge * merge);
        x += (square % in_row * merge + inside % merge) * across;
        y += (square / in_row * merge + inside / merge) * down;
        double want = level_of(&m, &f, y, x, channel), have = out[i];
        CHECK(have - want < 1.3 && want - have < 1.3, "level %ld is %f and not %f", (long)i, have, want);
    }
    num_patched += results;
    free(pixels), free(out);
}

/* ---- orders, draws, and pages of mapped files ----------------------------------------------------------------- */

static void try_orders(void) {
    int64_t count = below(5), sizes[4], total = 0;
    uint64_t keys[4];
    for (int64_t i = 0; i < count; i++) {
        total += sizes[i] = one_in(4) ? below(4) : below(5000);
        keys[i] = next_random();
    }
    int64_t *out = allocated(total * 8), *seen = allocated(total * 8);
    memset(seen, 0, (size_t)total * 8);
    CHECK(!core_seeded_permutations(sizes, keys, count, out), "no memory for an order");
    for (int64_t i = 0, start = 0; i < count; start += sizes[i++]) {
        uint64_t before = 0, span = 1;
        while (span < (uint64_t)sizes[i]) span *= 2;
        for (int64_t j = start; j < start + sizes[i]; j++) {
            CHECK(out[j] >= start && out[j] < start + sizes[i] && !seen[out[j]]++, "no permutation");
            uint64_t index = (uint64_t)(out[j] - start), saved = random_state;
            random_state = index ^ keys[i];
            uint64_t hashed = next_random() / span * span + index;
            random_state = saved;
            CHECK(j == start || hashed > before, "%ld of %ld is out of order", (long)j, (long)sizes[i]);
            before = hashed;
        }
    }
    num_ordered += total;
    free(out), free(seen);
}

/* Every prefix is within the longest sample of every share. */
static void try_turns(void) {
    int64_t sources = 1 + below(8), each = 1 + below(40), longest = 1 + below(50), total = 0, tokens = 0;
    int64_t shares[8], owed[8] = {0}, upcoming[8], end[8], of_source[8] = {0};
    int64_t *lengths = allocated(sources * each * 8), most = 1 + below(sources * each + 9);
    for (int64_t s = 0; s < sources; s++) {
        total += shares[s] = s ? below(9) : 1 + below(9);
        end[s] = (upcoming[s] = s * each) + each;
    }
    for (int64_t i = 0; i < sources * each; i++) lengths[i] = below(longest + 1);
    uint16_t *out = allocated(most * 2);
    int64_t taken = core_token_draws(shares, owed, lengths, upcoming, end, sources, out, most), ended = 0;
    for (int64_t s = 0; s < sources; s++) ended |= shares[s] && upcoming[s] == end[s], upcoming[s] = s * each;
    CHECK(taken == most || (ended && taken < most), "%ld of %ld draws", (long)taken, (long)most);
    for (int64_t draw = 0; draw < taken; draw++) {
        int64_t source = out[draw], length = lengths[upcoming[source]++];
        of_source[source] += length, tokens += length;
        for (int64_t s = 0; s < sources; s++)
            CHECK(labs(shares[s] * tokens - of_source[s] * total) <= total * longest, "source %ld", (long)s);
    }
    free(lengths), free(out);
}

static void try_bring(void) {
    char path[] = "bring-XXXXXX";
    int descriptor = mkstemp(path);
    struct stat now;
    int64_t pages = 1 + below(MOST_PAGES), size = pages * page, kept = one_in(2) ? pages : below(pages);
    CHECK(descriptor >= 0 && !ftruncate(descriptor, size) && !fstat(descriptor, &now), "%s", path);
    uint8_t *memory = mmap(0, (size_t)size, PROT_READ, MAP_SHARED, descriptor, 0);
    CHECK(memory != MAP_FAILED && !ftruncate(descriptor, kept * page), "%s", path);
    core_range ranges[3];
    int64_t status[3], changed = kept < pages, bad = 0;
    for (int64_t i = 0; i < 3; i++) {
        int64_t first = below(pages), num = below(pages - first + 1);
        ranges[i] = (core_range){path, size, now.st_mtim.tv_sec * 1000000000LL + now.st_mtim.tv_nsec,
                                 memory + first * page, num * page, below(8) & ~CORE_KEPT};
        if (!changed) ranges[i].flags &= ~CORE_CHECK; /* its time may be another by now */
    }
    bad = core_bring(ranges, 3, status);
    for (int64_t i = 0; i < 3; i++) {
        int64_t end = (ranges[i].address - memory + ranges[i].nbytes) / page;
        int64_t wanted = ranges[i].flags & CORE_CHECK ? -1 : ranges[i].nbytes && end > kept ? EFAULT : 0;
        CHECK(status[i] == wanted, "status %ld, not %ld", (long)status[i], (long)wanted);
        bad -= status[i] != 0;
    }
    CHECK(!bad, "%ld more are bad", (long)bad);
    munmap(memory, (size_t)size), close(descriptor), unlink(path);
}

static void try_read(void) {
    char path[] = "read-XXXXXX";
    int descriptor = mkstemp(path);
    int64_t size = 1 + below(1 << 16), whole = 0;
    uint8_t *content = allocated(size), *out = allocated(4 * size);
    for (int64_t i = 0; i < size; i++) content[i] = (uint8_t)below(256);
    CHECK(descriptor >= 0 && write(descriptor, content, (size_t)size) == size, "%s", path);
    core_part parts[4];
    for (int64_t i = 0; i < 4; i++) {
        int64_t offset = below(size), nbytes = below(size - offset + 1) + (one_in(8) ? size : 0);
        parts[i] = (core_part){descriptor, offset, nbytes > size ? size : nbytes, out + i * size};
    }
    while (whole < 4 && parts[whole].offset + parts[whole].nbytes <= size) whole++;
    CHECK(core_read(parts, 4) == whole, "not %ld whole ones", (long)whole);
    for (int64_t i = 0; i < whole; i++)
        CHECK(!memcmp(parts[i].out, content + parts[i].offset, (size_t)parts[i].nbytes), "part %ld", (long)i);
    close(descriptor), unlink(path), free(content), free(out);
}

/* ---- protobuf ----------------------------------------------------------------------------------------------- */

/* The same bytes as Examples, which some are: rows are written up to where there is room, and never beyond. */
static void try_examples(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *ends, int64_t n) {
    core_name *names = malloc(3 * sizeof *names);
    core_examples e = {data, nbytes, starts, ends, n, names, 0, 3, below(2), {0}, {0}, {0}, {0}};
    core_rows *rows[] = {&e.features, &e.steps, &e.lists, &e.values};
    for (int i = 0; i < 4; i++) {
        rows[i]->most = below(6);
        rows[i]->out = malloc((size_t)rows[i]->most * 3 * sizeof(int64_t) + 1);
    }
    int64_t status = core_parse(&e);
    CHECK(status <= 0 && status >= CORE_TOO_MANY_NAMES && e.num_names <= 3, "examples");
    num_names += e.num_names;
    for (int64_t i = 0; i < e.values.found && i < e.values.most; i++) {
        const int64_t *out = e.values.out + i;
        CHECK(out[e.values.most] >= 0 && out[2 * e.values.most] <= nbytes, "value");
    }
    for (int i = 0; i < 4; i++) free(rows[i]->out);
    free(names);
}

/* Messages, some of them damaged, as Examples and as packed numbers, in memory that ends where they do: whatever they are, nothing beyond
   is touched, and what is written is what the answer says. */
static void try_wire(void) {
    int64_t n = below(6), nbytes = 0, starts[6], ends[6], counts[6];
    uint8_t bytes[6 * 10 * 40], *data;
    for (int64_t i = 0; i < n; ends[i++] = nbytes) {
        starts[i] = nbytes;
        for (int64_t fields = below(10); fields > 0; fields--) { /* of one byte, or spans of some */
            int64_t size = below(30), is_span = below(2), depth = one_in(3) ? 3 + below(3) : 0;
            for (int64_t d = depth; d > 0; d--) { /* an Example as far as that, with a list of one value inside */
                bytes[nbytes++] = d == 3 && one_in(2) ? 2 << 3 | 2 : 1 << 3 | 2;
                bytes[nbytes++] = (uint8_t)(2 * d);
            }
            if (depth) bytes[nbytes++] = 1 << 3, bytes[nbytes++] = 5;
            if (depth) continue;
            bytes[nbytes++] = (uint8_t)((1 + below(15)) << 3 | (is_span ? 2 : 0));
            bytes[nbytes++] = (uint8_t)size;
            for (; is_span && size > 0; size--) bytes[nbytes++] = (uint8_t)(size > 1 ? next_random() : 1);
        }
    }
    for (int64_t changes = one_in(2) ? below(4) : 0; changes > 0 && nbytes; changes--)
        bytes[below(nbytes)] = (uint8_t)next_random();
    memcpy(data = malloc((size_t)nbytes + !nbytes), bytes, (size_t)nbytes);
    try_examples(data, nbytes, starts, ends, n);
    int64_t most = core_numbers(data, nbytes, starts, ends, n, counts, 0, 0);
    int64_t *out = malloc((size_t)(most > 0 ? most : 1) * sizeof *out);
    int64_t found = core_numbers(data, nbytes, starts, ends, n, counts, out, most), sum = 0;
    if (found >= 0) {
        for (int64_t i = 0; i < n; i++) sum += counts[i];
        CHECK(found == most && sum == most, "numbers");
        for (int64_t i = 0, at = 0, k = 0; k < most; k++, at++) { /* as read from byte to byte: spans have no gaps */
            uint64_t number = 0;
            for (i = 0; data[at] >= 0x80; i += 7) number |= (uint64_t)(data[at++] & 0x7F) << i;
            CHECK((uint64_t)out[k] == (number | (uint64_t)data[at] << i), "number");
        }
        num_numbers += found;
    }
    CHECK(core_numbers(data, nbytes, starts, ends, n, counts, out, most - 1) < 0 || !most, "too many numbers");
    free(out), free(data);
}

/* Chunks of riegeli, some of them damaged, in memory that ends where they do. */
static void try_chunks(void) {
    int64_t n = 1 + below(4), nbytes = 0, at[5] = {0}, counts[5] = {0}, starts[20], sizes[20] = {0};
    uint8_t bytes[5 * 200], *data;
    for (int64_t i = 0, record = 0; i < n; i++) {
        int64_t total = 0, head = at[i] = nbytes;
        counts[i] = below(5);
        for (nbytes += 42; total < counts[i]; total++) bytes[nbytes++] = (uint8_t)(sizes[record++] = below(20));
        bytes[head + 40] = 0;
        bytes[head + 41] = (uint8_t)counts[i];
        for (int64_t k = total = 0; k < counts[i]; k++) total += bytes[head + 42 + k];
        for (int64_t k = 0; k < total; k++) bytes[nbytes++] = (uint8_t)next_random();
        uint64_t words[] = {next_random(), (uint64_t)(nbytes - head - 40), 0, (uint64_t)counts[i] << 8 | 'r',
                            (uint64_t)total};
        memcpy(bytes + head, words, sizeof words);
    }
    memcpy(data = calloc((size_t)nbytes, 1), bytes, (size_t)nbytes);
    int64_t found_sizes[20];
    CHECK(!core_records(data, nbytes, at, counts, n, starts, found_sizes), "chunks");
    for (int64_t i = 0, record = 0; i < n; i++)
        for (int64_t k = 0; k < counts[i]; k++, record++)
            CHECK(found_sizes[record] == sizes[record] && starts[record] + sizes[record] <= nbytes, "record");
    for (int64_t changes = 1 + below(3); changes > 0; changes--)
        data[below(nbytes)] = (uint8_t)next_random();
    if (!core_records(data, nbytes, at, counts, n, starts, found_sizes))
        for (int64_t i = 0, record = 0; i < n; record += counts[i++])
            for (int64_t k = record; k < record + counts[i]; k++)
                CHECK(starts[k] >= 0 && found_sizes[k] >= 0 && starts[k] + found_sizes[k] <= nbytes, "record");
    free(data);
}

/* ---- checksums -------------------------------------------------------------------------------------------- */

static uint32_t crc32c_of(const uint8_t *data, int64_t nbytes) {
    uint32_t crc = ~0u;
    for (int64_t i = 0; i < 8 * nbytes; i++) {
        uint32_t bit = (crc ^ data[i / 8] >> i % 8) & 1;
        crc = crc >> 1 ^ (bit ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static void try_checksums(void) {
    int64_t nbytes = below(300), n = below(10), starts[10] = {0}, sizes[10] = {0}, by_tables = below(2);
    uint8_t *data = allocated(nbytes);
    uint32_t out[10];
    fill(data, nbytes);
    for (int64_t i = 0; i < n; i++) {
        starts[i] = below(nbytes + 1);
        sizes[i] = below(nbytes - starts[i] + 1);
    }
    CHECK(!core_crc32c(data, nbytes, starts, sizes, n, out, by_tables), "checksums");
    for (int64_t i = 0; i < n; i++, num_sums++)
        CHECK(out[i] == crc32c_of(data + starts[i], sizes[i]), "checksum of %ld bytes", (long)sizes[i]);
    if (n) {
        const int64_t outside[][2] = {{-1, 1}, {nbytes, 1}, {0, nbytes + 1}, {1, INT64_MAX}, {nbytes + 1, 0}, {0, -1}};
        int64_t *wrong = (int64_t *)outside[below(6)];
        starts[n - 1] = wrong[0];
        sizes[n - 1] = wrong[1];
        CHECK(core_crc32c(data, nbytes, starts, sizes, n, out, by_tables) == CORE_CUT, "a span outside");
    }
    free(data);
}

/* A file of records, of which one may be damaged or cut off. */
static void try_tfrecords(void) {
    int64_t n = below(6), sizes[6], ends[6], nbytes = 0, told[2][6];
    for (int64_t i = 0; i < n; i++) {
        sizes[i] = below(40);
        ends[i] = nbytes += 16 + sizes[i];
    }
    uint8_t *data = allocated(nbytes);
    fill(data, nbytes);
    for (int64_t i = 0; i < n; i++) {
        uint8_t *head = data + ends[i] - 16 - sizes[i];
        uint64_t size = (uint64_t)sizes[i];
        for (int k = 0; k < 8; k++) head[k] = (uint8_t)(size >> 8 * k);
        uint32_t crc = crc32c_of(head, 8), sum = (crc >> 15 | crc << 17) + 0xA282EAD8u;
        for (int k = 0; k < 4; k++) head[8 + k] = (uint8_t)(sum >> 8 * k);
    }
    int64_t whole = n, most = one_in(3) ? below(n + 1) : n;
    if (n && one_in(2)) { /* a byte of a header, or all from some byte on */
        whole = below(n);
        int64_t first = ends[whole] - 16 - sizes[whole];
        if (one_in(2)) data[first + below(12)] ^= (uint8_t)(1 + below(255));
        else {
            nbytes = first + below(16 + sizes[whole]);
            uint8_t *cut = allocated(nbytes);
            memcpy(cut, data, (size_t)nbytes);
            free(data);
            data = cut;
        }
    }
    if (whole > most) whole = most;
    CHECK(core_tfrecords(data, nbytes, told[0], told[1], most) == whole, "records");
    for (int64_t i = 0; i < whole; i++)
        CHECK(told[0][i] == ends[i] - sizes[i] - 4 && told[1][i] == sizes[i], "record %ld", (long)i);
    free(data);
}

/* Text of marks of JSON, which may end anywhere: lines are counted, none is read past its end, and keys go again. */
static void try_lines(void) {
    static const char marks[] = "{}\"\"\"::,\\\n ab[";
    int64_t nbytes = below(300), slots = (int64_t)2 << below(5), ends = 0, levels = one_in(20) ? 300 : 0, found[2];
    uint8_t *text = allocated(nbytes + levels);
    memset(text, '{', (size_t)levels);
    for (int64_t i = 0; i < nbytes; i++) ends += (text[levels + i] = (uint8_t)marks[below(sizeof marks - 1)]) == '\n';
    uint64_t *keys = allocated(slots * 12);
    memset(keys, 0, (size_t)slots * 8);
    int64_t answer = core_json_lines(text, nbytes + levels, keys, one_in(4) ? 0 : slots, found);
    CHECK(answer >= CORE_LINES_READ && answer <= CORE_LINES_ODD, "answer %ld", (long)answer);
    CHECK(found[0] >= 0 && found[0] <= ends + 1, "%ld lines", (long)found[0]);
    CHECK(found[1] >= 0 && found[1] <= nbytes + levels, "line at %ld", (long)found[1]);
    CHECK(!found[1] || text[found[1] - 1] == '\n' || found[1] == nbytes + levels, "no line at %ld", (long)found[1]);
    for (int64_t i = 0; i < slots; i++) CHECK(!keys[i], "a key is left");
    free(keys);
    free(text);
}

int main(int argc, char **argv) {
    CHECK(argc == 4, "driver SEED PLANS honest|short|broken");
    CHECK(core_version() == CORE_VERSION, "core_version");
    random_state = strtoull(argv[1], 0, 10);
    mode = !strcmp(argv[3], "honest") ? HONEST : !strcmp(argv[3], "short") ? SHORT : BROKEN;
    page = sysconf(_SC_PAGESIZE);
    for (long plans = atol(argv[2]); plans > 0; plans--) {
        try_plan();
        try_interleave();
        try_queue();
        try_resize();
        try_patches();
        try_orders();
        for (int i = 0; i < 20; i++) try_wire(); /* they take no time */
        try_chunks();
        try_checksums();
        try_tfrecords();
        try_turns();
        try_lines();
        try_bring();
        try_read();
    }
    printf("{\"rows\": %ld, \"lost\": %ld, \"widened\": %ld, \"short\": %ld, \"resized\": %ld, \"patched\": %ld, "
           "\"ordered\": %ld, \"names\": %ld, \"numbers\": %ld, \"sums\": %ld}\n",
           num_rows, num_lost, num_widened, num_short, num_resized, num_patched, num_ordered, num_names, num_numbers,
           num_sums);
    return 0;
}
